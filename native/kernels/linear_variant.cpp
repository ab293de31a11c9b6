// The packed linear layer's kernels for one instruction set. Compiled once per variant, with that variant's flags and
// -DQUIRE_VARIANT_<name> (linear.cmake). No standard library templates here: the linker could hand their code to others.
#include "kernels/linear_kernel.hpp"
#include "kernels/linear_tiles.hpp"

namespace quire {
namespace {

#if defined(QUIRE_VARIANT_portable)
#define QUIRE_KERNEL_NAME linear_kernel_portable
using Vector = GenericVector<4, false>;
#elif defined(QUIRE_VARIANT_avx2)
#define QUIRE_KERNEL_NAME linear_kernel_avx2
using Vector = Avx2Vector;
#else
#error "linear.cmake names the variant"
#endif

template <typename Weight>
constexpr LinearKernel vector_kernel(PanelLayout layout) {
    using Tiles = VectorTiles<Vector, Weight>;
    return {
        .layout = layout,
        .columns = Tiles::kColumns,
        .depth = 1,
        .tile_rows = Tiles::kRows,
        .pass_rows = 240,
        .range = 256,
        .staged_bytes = 4,
        .stage_is_copy = std::is_same_v<Weight, float>,
        .stage = stage_float<Vector, Weight>,
        .multiply = Tiles::multiply,
        .finish = finish<Vector, Weight>,
    };
}

constexpr LinearKernel kFloat = vector_kernel<float>(PanelLayout::rows);
constexpr LinearKernel kHalf = vector_kernel<F16>(PanelLayout::rows);
constexpr LinearKernel kBrain = vector_kernel<Bf16>(PanelLayout::split_pairs);

}  // namespace

const LinearKernel& QUIRE_KERNEL_NAME(Element element) {
    switch (element) {
        case Element::f32: return kFloat;
        case Element::f16: return kHalf;
        case Element::bf16: return kBrain;
    }
    return kFloat;
}

}  // namespace quire
