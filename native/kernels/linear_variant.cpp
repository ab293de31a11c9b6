// The packed linear layer's kernels for one instruction set. Compiled once per variant, with that variant's flags and
// -DQUIRE_VARIANT_<name> (linear.cmake). No standard library templates here: the linker could hand their code to others.
#include "kernels/linear_tiles.hpp"

#if defined(QUIRE_VARIANT_portable)
#include "kernels/simd_portable.hpp"
#define QUIRE_LINEAR_KERNEL linear_kernel_portable
#elif defined(QUIRE_VARIANT_avx2)
#include "kernels/simd_avx2.hpp"
#define QUIRE_LINEAR_KERNEL linear_kernel_avx2
#elif defined(QUIRE_VARIANT_avx512)
#include "kernels/simd_avx512.hpp"
#define QUIRE_LINEAR_KERNEL linear_kernel_avx512
#elif defined(QUIRE_VARIANT_avx512_bf16)
#include "kernels/simd_avx512.hpp"
#define QUIRE_LINEAR_KERNEL linear_kernel_avx512_bf16
#elif defined(QUIRE_VARIANT_amx_bf16)
#include "kernels/linear_amx.hpp"
#include "kernels/simd_avx512.hpp"
#define QUIRE_LINEAR_KERNEL linear_kernel_amx_bf16
#define QUIRE_BF16_ONLY
#elif defined(QUIRE_VARIANT_emulated_avx512)
#include "kernels/simd_emulated.hpp"
#define QUIRE_LINEAR_KERNEL linear_kernel_emulated_avx512
#elif defined(QUIRE_VARIANT_emulated_avx512_bf16)
#include "kernels/simd_emulated.hpp"
#define QUIRE_LINEAR_KERNEL linear_kernel_emulated_avx512_bf16
#define QUIRE_BF16_ONLY
#elif defined(QUIRE_VARIANT_emulated_amx_bf16)
#include "kernels/linear_amx.hpp"
#include "kernels/simd_emulated.hpp"
#define QUIRE_LINEAR_KERNEL linear_kernel_emulated_amx_bf16
#define QUIRE_BF16_ONLY
#else
#error "linear.cmake names the variant"
#endif

namespace quire {
namespace {

#if defined(QUIRE_VARIANT_portable)
using Simd = Portable;
#elif defined(QUIRE_VARIANT_avx2)
using Simd = Avx2;
#elif defined(__AVX512F__)
using Simd = Avx512;
#else
using Simd = Emulated512;
#endif

#if defined(QUIRE_VARIANT_avx512)
constexpr Tuning kTuning = kIntel;  // AMD's processors with AVX-512 run avx512_bf16 (isa.hpp, preferred_isa)
#else
constexpr Tuning kTuning = kCommon;
#endif

#if defined(QUIRE_VARIANT_amx_bf16)
constexpr LinearKernel kBrain = amx_kernel<Avx512Bf16, Tiles>();
#elif defined(QUIRE_VARIANT_emulated_amx_bf16)
constexpr LinearKernel kBrain = amx_kernel<Emulated512Bf16, EmulatedTiles>();
#elif defined(QUIRE_VARIANT_avx512_bf16)
constexpr LinearKernel kBrain = vector_kernel<Avx512Bf16, Paired<Avx512Bf16>, kTuning>();
#elif defined(QUIRE_VARIANT_emulated_avx512_bf16)
constexpr LinearKernel kBrain = vector_kernel<Emulated512Bf16, Paired<Emulated512Bf16>, kTuning>();
#else
constexpr LinearKernel kBrain = vector_kernel<Simd, Widened<Simd, bf16>, kTuning>();
#endif

#if !defined(QUIRE_BF16_ONLY)
constexpr LinearKernel kFloat = vector_kernel<Simd, Widened<Simd, float>, kTuning>();
constexpr LinearKernel kHalf = vector_kernel<Simd, Widened<Simd, f16>, kTuning>();
#endif

#if defined(QUIRE_VARIANT_avx512_bf16)
constexpr LinearKernel of_zen5(LinearKernel kernel) {
    kernel.ahead_bytes = kZen5AheadBytes;
    kernel.next_to_second = false;
    return kernel;
}
constexpr LinearKernel kFloatOfZen5 = of_zen5(kFloat), kHalfOfZen5 = of_zen5(kHalf), kBrainOfZen5 = of_zen5(kBrain);
#endif

}  // namespace

#if defined(QUIRE_BF16_ONLY)
const LinearKernel& QUIRE_LINEAR_KERNEL(Element) { return kBrain; }
#else
const LinearKernel& QUIRE_LINEAR_KERNEL(Element element) {
#if defined(QUIRE_VARIANT_avx512_bf16)
    if (first_cache_waits_for_many()) return element == Element::f32 ? kFloatOfZen5 : element == Element::f16 ? kHalfOfZen5 : kBrainOfZen5;
#endif
    switch (element) {
        case Element::f32: return kFloat;
        case Element::f16: return kHalf;
        case Element::bf16: return kBrain;
    }
    return kFloat;
}
#endif

}  // namespace quire
