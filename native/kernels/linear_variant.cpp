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
#include "kernels/simd_avx512.hpp"
#define QUIRE_LINEAR_KERNEL linear_kernel_amx_bf16
#elif defined(QUIRE_VARIANT_emulated_avx512)
#include "kernels/simd_emulated.hpp"
#define QUIRE_LINEAR_KERNEL linear_kernel_emulated_avx512
#elif defined(QUIRE_VARIANT_emulated_avx512_bf16)
#include "kernels/simd_emulated.hpp"
#define QUIRE_LINEAR_KERNEL linear_kernel_emulated_avx512_bf16
#elif defined(QUIRE_VARIANT_emulated_amx_bf16)
#include "kernels/simd_emulated.hpp"
#define QUIRE_LINEAR_KERNEL linear_kernel_emulated_amx_bf16
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

template <class Weight>
constexpr LinearKernel vector_kernel(PanelLayout layout) {
    using Tiles = VectorTiles<Simd, Weight>;
    return {
        .layout = layout,
        .columns = Tiles::kColumns,
        .depth = 1,
        .tile_rows = Tiles::kRows,
        .pass_rows = 240,
        .range = 256,
        .staged_bytes = 4,
        .stage_is_copy = std::is_same_v<Weight, float>,
        .stage = stage_float<Simd, Weight>,
        .multiply = Tiles::multiply,
        .finish = finish<Simd, Weight>,
    };
}

constexpr LinearKernel kFloat = vector_kernel<float>(PanelLayout::rows);
constexpr LinearKernel kHalf = vector_kernel<f16>(PanelLayout::rows);
constexpr LinearKernel kBrain = vector_kernel<bf16>(PanelLayout::split_pairs);

}  // namespace

const LinearKernel& QUIRE_LINEAR_KERNEL(Element element) {
    switch (element) {
        case Element::f32: return kFloat;
        case Element::f16: return kHalf;
        case Element::bf16: return kBrain;
    }
    return kFloat;
}

}  // namespace quire
