#include "kernels/attention_pairs_many.hpp"
#include "kernels/simd_avx512.hpp"

namespace quire {

void attention_item_avx512_bf16(const AttentionJob& job, std::int64_t index) {
    const AttentionItem& item = job.items[index];
    switch (item.row_stop - item.row_start) {
        case 1: return attention_few_rows_avx512_bf16<1>(job, item);
        case 2: return attention_few_rows_avx512_bf16<2>(job, item);
        case 3: return attention_few_rows_avx512_bf16<3>(job, item);
        case 4: return attention_few_rows_avx512_bf16<4>(job, item);
        case 5: return attention_few_rows_avx512_bf16<5>(job, item);
        case 6: return attention_few_rows_avx512_bf16<6>(job, item);
        default: AttendManyPairs<Avx512Bf16>(job, item).run();
    }
}

}  // namespace quire
