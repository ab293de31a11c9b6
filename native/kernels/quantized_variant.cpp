// The kernels of quantized weights for one instruction set. Compiled once per variant, with that variant's flags,
// without contraction, and -DQUIRE_VARIANT_<name> (linear.cmake). No standard library templates here: the linker could
// hand their code to others.
#include "kernels/quantized_vector.hpp"

#if defined(QUIRE_VARIANT_portable)
#include "kernels/simd_portable.hpp"
#define QUIRE_QUANTIZED_KERNEL quantized_kernel_portable
#elif defined(QUIRE_VARIANT_avx2)
#include "kernels/simd_avx2.hpp"
#define QUIRE_QUANTIZED_KERNEL quantized_kernel_avx2
#elif defined(QUIRE_VARIANT_avx512)
#include "kernels/simd_avx512.hpp"
#define QUIRE_QUANTIZED_KERNEL quantized_kernel_avx512
#elif defined(QUIRE_VARIANT_avx512_bf16)
#include "kernels/quantized_chains.hpp"
#include "kernels/simd_avx512.hpp"
#define QUIRE_QUANTIZED_KERNEL quantized_kernel_avx512_bf16
#define QUIRE_PAIRS_ONLY
#elif defined(QUIRE_VARIANT_amx_bf16)
#include "kernels/quantized_amx.hpp"
#include "kernels/simd_avx512.hpp"
#define QUIRE_QUANTIZED_KERNEL quantized_kernel_amx_bf16
#define QUIRE_PAIRS_ONLY
#elif defined(QUIRE_VARIANT_emulated_avx512)
#include "kernels/simd_emulated.hpp"
#define QUIRE_QUANTIZED_KERNEL quantized_kernel_emulated_avx512
#elif defined(QUIRE_VARIANT_emulated_avx512_bf16)
#include "kernels/quantized_chains.hpp"
#include "kernels/simd_emulated.hpp"
#define QUIRE_QUANTIZED_KERNEL quantized_kernel_emulated_avx512_bf16
#define QUIRE_PAIRS_ONLY
#elif defined(QUIRE_VARIANT_emulated_amx_bf16)
#include "kernels/quantized_amx.hpp"
#include "kernels/simd_emulated.hpp"
#define QUIRE_QUANTIZED_KERNEL quantized_kernel_emulated_amx_bf16
#define QUIRE_PAIRS_ONLY
#else
#error "linear.cmake names the variant"
#endif

namespace quire {
namespace {

#if defined(QUIRE_VARIANT_portable)
using Simd = Portable;
using Widen = WidenPlain;
#elif defined(QUIRE_VARIANT_avx2)
using Simd = Avx2;
using Widen = WidenAvx2;
#elif defined(__AVX512F__)
using Simd = Avx512;
using Widen = WidenAvx512;
#else
using Simd = Emulated512;
using Widen = WidenPlain;
#endif

#if defined(QUIRE_VARIANT_amx_bf16)
constexpr LinearKernel kBrain = amx_quantized_kernel<Simd, Tiles, Widen>();
#elif defined(QUIRE_VARIANT_avx512_bf16)
constexpr LinearKernel kBrain = chain_quantized_kernel<Avx512Bf16, Simd, Widen>();
#elif defined(QUIRE_VARIANT_emulated_avx512_bf16)
constexpr LinearKernel kBrain = chain_quantized_kernel<Emulated512Bf16, Simd, Widen>();
#elif defined(QUIRE_VARIANT_emulated_amx_bf16)
constexpr LinearKernel kBrain = amx_quantized_kernel<Simd, EmulatedTiles, Widen>();
#else
constexpr LinearKernel kBrain = vector_quantized_kernel<Simd, bf16, Widen>();
constexpr LinearKernel kFloat = vector_quantized_kernel<Simd, float, Widen>();
constexpr LinearKernel kHalf = vector_quantized_kernel<Simd, f16, Widen>();
#endif

}  // namespace

#if defined(QUIRE_VARIANT_avx512_bf16)
bool pairs_keep_order_avx512_bf16() { return chains_keep_order<Avx512Bf16>(); }
#endif

#if defined(QUIRE_PAIRS_ONLY)
const LinearKernel& QUIRE_QUANTIZED_KERNEL(Element) { return kBrain; }
#else
const LinearKernel& QUIRE_QUANTIZED_KERNEL(Element element) {
    switch (element) {
        case Element::f32: return kFloat;
        case Element::f16: return kHalf;
        case Element::bf16: return kBrain;
    }
    return kFloat;
}
#endif

}  // namespace quire
