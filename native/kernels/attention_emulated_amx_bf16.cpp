#include "kernels/attention_many_item.hpp"
#include "kernels/simd_emulated.hpp"

namespace quire {

void attention_item_emulated_amx_bf16(const AttentionJob& job, std::int64_t index) { attend_by_tiles<Emulated512Bf16, EmulatedTiles>(job, job.items[index]); }

}  // namespace quire
