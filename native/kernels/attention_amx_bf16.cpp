#include "kernels/attention_many_item.hpp"
#include "kernels/simd_avx512.hpp"

namespace quire {

void attention_item_amx_bf16(const AttentionJob& job, std::int64_t index) { attend_by_tiles<Avx512Bf16, Tiles>(job, job.items[index]); }

}  // namespace quire
