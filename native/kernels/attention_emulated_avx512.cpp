#include "kernels/attention_lanes.hpp"
#include "kernels/simd_emulated.hpp"

namespace quire {

void attention_item_emulated_avx512(const AttentionJob& job, std::int64_t index) { attend_in_lanes<Emulated512>(job, index); }

}  // namespace quire
