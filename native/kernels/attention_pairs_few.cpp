// Attention of QUIRE_ROWS query rows of a head by bf16 pairs. Compiled for 1 to 6 rows, for each variant that multiplies pairs, with
// its flags and -DQUIRE_VARIANT_<name> (attention.cmake).
#include "kernels/attention_pairs_few.hpp"

#if defined(QUIRE_VARIANT_avx512_bf16)
#include "kernels/simd_avx512.hpp"
#define QUIRE_ATTEND attention_few_rows_avx512_bf16
#define QUIRE_SIMD Avx512Bf16
#elif defined(QUIRE_VARIANT_emulated_avx512_bf16)
#include "kernels/simd_emulated.hpp"
#define QUIRE_ATTEND attention_few_rows_emulated_avx512_bf16
#define QUIRE_SIMD Emulated512Bf16
#else
#error "attention.cmake names the variant"
#endif

namespace quire {

template <int kRows>
void QUIRE_ATTEND(const AttentionJob& job, const AttentionItem& item) {
    AttendFewRows<QUIRE_SIMD, kRows>(job, item).run();
}

template void QUIRE_ATTEND<QUIRE_ROWS>(const AttentionJob& job, const AttentionItem& item);

}  // namespace quire
