#include "kernels/attention_pairs.hpp"
#include "kernels/simd_avx512.hpp"

namespace quire {

void attention_item_avx512_bf16(const AttentionJob& job, std::int64_t index) {
    AttendItem<PairProducts<Avx512Bf16>>(job, job.items[index]).run();
}

}  // namespace quire
