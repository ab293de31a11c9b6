#include "kernels/attention_many_item.hpp"
#include "kernels/attention_tiles.hpp"
#include "kernels/simd_emulated.hpp"

namespace quire {

void attention_item_emulated_amx_bf16(const AttentionJob& job, std::int64_t index) {
    const AttentionItem& item = job.items[index];
    if (item.row_stop - item.row_start > ManyRows<Emulated512Bf16, EmulatedTiles>::kRowsTogether) {
        AttendManyRows<ManyRows<Emulated512Bf16, EmulatedTiles>>(job, item).run();
    } else {
        AttendItem<TileProducts<Emulated512Bf16, EmulatedTiles>>(job, item).run();
    }
}

}  // namespace quire
