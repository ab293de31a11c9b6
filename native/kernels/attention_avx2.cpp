#include "kernels/attention_lanes.hpp"
#include "kernels/simd_avx2.hpp"

namespace quire {

void attention_item_avx2(const AttentionJob& job, std::int64_t index) { attend_in_lanes<Avx2>(job, index); }

}  // namespace quire
