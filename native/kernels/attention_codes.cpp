// Attention over keys and values in codes of 8 bits (kv_codes.hpp), compiled once per variant, with that variant's flags and
// -DQUIRE_VARIANT_<name> (attention.cmake).
#include "kernels/attention_lanes.hpp"

#if defined(QUIRE_VARIANT_portable)
#include "kernels/simd_portable.hpp"
#define QUIRE_ATTEND attention_codes_item_portable
#define QUIRE_SIMD Portable
#elif defined(QUIRE_VARIANT_avx2)
#include "kernels/simd_avx2.hpp"
#define QUIRE_ATTEND attention_codes_item_avx2
#define QUIRE_SIMD Avx2
#elif defined(QUIRE_VARIANT_avx512)
#include "kernels/simd_avx512.hpp"
#define QUIRE_ATTEND attention_codes_item_avx512
#define QUIRE_SIMD Avx512
#elif defined(QUIRE_VARIANT_emulated_avx512)
#include "kernels/simd_emulated.hpp"
#define QUIRE_ATTEND attention_codes_item_emulated_avx512
#define QUIRE_SIMD Emulated512
#else
#error "attention.cmake names the variant"
#endif

namespace quire {

void QUIRE_ATTEND(const AttentionJob& job, std::int64_t index) { AttendItem<LaneProducts<QUIRE_SIMD, AnyElement, code8>>(job, job.items[index]).run(); }

}  // namespace quire
