#include "kernels/attention_lanes.hpp"
#include "kernels/simd_avx512.hpp"

namespace quire {

void attention_item_avx512(const AttentionJob& job, std::int64_t index) { attend_in_lanes<Avx512>(job, index); }

}  // namespace quire
