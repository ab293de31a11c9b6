#include "kernels/attention_lanes.hpp"
#include "kernels/simd_portable.hpp"

namespace quire {

void attention_item_portable(const AttentionJob& job, std::int64_t index) { attend_in_lanes<Portable>(job, index); }

}  // namespace quire
