#include "kernels/attention_pairs_few.hpp"
#include "kernels/simd_avx512.hpp"

namespace quire {

void attention_item_avx512_bf16(const AttentionJob& job, std::int64_t index) {
    attend_by_pairs<Avx512Bf16>(job, job.items[index]);
}

}  // namespace quire
