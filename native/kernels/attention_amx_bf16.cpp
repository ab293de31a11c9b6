#include "kernels/attention_tiles.hpp"
#include "kernels/simd_avx512.hpp"

namespace quire {

void attention_item_amx_bf16(const AttentionJob& job, std::int64_t index) {
    AttendItem<TileProducts<Avx512Bf16, Tiles>>(job, job.items[index]).run();
}

}  // namespace quire
