#include "kernels/attention_many_item.hpp"
#include "kernels/attention_tiles.hpp"
#include "kernels/simd_avx512.hpp"

namespace quire {

void attention_item_amx_bf16(const AttentionJob& job, std::int64_t index) {
    const AttentionItem& item = job.items[index];
    if (item.row_stop - item.row_start > ManyRows<Avx512Bf16, Tiles>::kRowsTogether) {
        AttendManyRows<ManyRows<Avx512Bf16, Tiles>>(job, item).run();
    } else {
        AttendItem<TileProducts<Avx512Bf16, Tiles>>(job, item).run();
    }
}

}  // namespace quire
