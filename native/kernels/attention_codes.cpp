// Attention over keys and values in codes (kv_codes.hpp), compiled once per variant and format, with that variant's flags,
// -DQUIRE_VARIANT_<name>, and the bits of keys and of values as -DQUIRE_BITS and -DQUIRE_VALUE_BITS (attention.cmake): in float32
// lanes, or by AMX tiles for queries of bf16.
#include "kernels/attention_code_tiles.hpp"
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
#elif defined(QUIRE_VARIANT_amx_bf16)
#include "kernels/simd_avx512.hpp"
#define QUIRE_ATTEND attention_codes_item_amx_bf16
#define QUIRE_PRODUCTS CodeTileProducts<Avx512Vbmi, Tiles, Key, Value>
#elif defined(QUIRE_VARIANT_emulated_amx_bf16)
#include "kernels/simd_emulated.hpp"
#define QUIRE_ATTEND attention_codes_item_emulated_amx_bf16
#define QUIRE_PRODUCTS CodeTileProducts<Emulated512Vbmi, EmulatedTiles, Key, Value>
#else
#error "attention.cmake names the variant"
#endif

#if !defined(QUIRE_PRODUCTS)
#define QUIRE_PRODUCTS LaneProducts<QUIRE_SIMD, AnyElement, Key, Value>
#endif

namespace quire {

namespace {

using Key = std::conditional_t<QUIRE_BITS == 4, code4, code8>;
using Value = std::conditional_t<QUIRE_VALUE_BITS == 4, code4, code8>;

}  // namespace

template <int kBits, int kValueBits>
void QUIRE_ATTEND(const AttentionJob& job, std::int64_t index) {
    AttendItem<QUIRE_PRODUCTS>(job, job.items[index]).run();
}
template void QUIRE_ATTEND<QUIRE_BITS, QUIRE_VALUE_BITS>(const AttentionJob& job, std::int64_t index);

}  // namespace quire
