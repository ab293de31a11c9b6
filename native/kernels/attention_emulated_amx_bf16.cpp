#include "kernels/attention_tiles.hpp"
#include "kernels/simd_emulated.hpp"

namespace quire {

void attention_item_emulated_amx_bf16(const AttentionJob& job, std::int64_t index) {
    AttendItem<TileProducts<Emulated512Bf16, EmulatedTiles>>(job, job.items[index]).run();
}

}  // namespace quire
