#include "kernels/attention_pairs_few.hpp"
#include "kernels/simd_emulated.hpp"

namespace quire {

void attention_item_emulated_avx512_bf16(const AttentionJob& job, std::int64_t index) {
    attend_by_pairs<Emulated512Bf16>(job, job.items[index]);
}

}  // namespace quire
