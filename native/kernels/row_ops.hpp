// The small operators between the products of a decoder layer, one row at a time: norms, rotary embedding, activation,
// residual. Each variant has them; decoder_layer.cpp calls them.
//
//   O1  A row's result depends on the row (and the operator's parameters) alone: its sums run over lanes in a fixed order.
//   O2  Everything is computed in float32 and rounded once, at the end. A pretrained model's own modules round after
//       each of their steps, which causes the difference.
//
// Cost: one read of the inputs and one write of the output; rows stay in the first cache. `out` may be an input.
#pragma once

#include <cstdint>

#include "kernels/element.hpp"
#include "kernels/isa.hpp"

namespace quire {

enum class Activation { silu, gelu, gelu_tanh, relu, relu_squared };

struct Norm {
    enum Kind { none, rms, layer };
    Kind kind = none;
    const float* weight = nullptr;  // [width]
    const float* bias = nullptr;    // [width] or null; layer only
    float epsilon = 0.0f;
};

// An RMS norm and a gate, silu of it: norm(x) * silu(gate), or norm(x * silu(gate)).
struct GatedNorm {
    const float* weight;  // [width]
    float epsilon;
    bool gates_first;
};

// Which of the first `rotary` dimensions of a head turn together, and where their cosine and sine stand in the table.
enum class Rotation {
    none,
    halves,             // (i, i + rotary / 2); at i and i + rotary / 2
    halves_short_table, // the same; both at i, and the table's rows have rotary / 2 elements
    pairs,              // (2i, 2i + 1); at 2i and 2i + 1
    pairs_half_table,   // the same; both at i
};

struct RowOps {
    // out[i] = x[i] / sqrt(mean(x^2) + epsilon) * weight[i]; of kind layer the mean is taken off first, bias added last.
    void (*norm)(const void* x, const Norm& norm, void* out, std::int64_t width);
    // out[i] = x[i] + scale * y[i]
    void (*add)(const void* x, const void* y, float scale, void* out, std::int64_t width);
    // The first `rotary` of `width` elements turned, the others as they are. cos and sin of the element.
    void (*rotate)(const void* x, const void* cos, const void* sin, Rotation rotation, std::int64_t rotary, void* out, std::int64_t width);
    // out[i] = activation(gate[i]) * up[i]; up may be null.
    void (*activate)(Activation activation, const void* gate, const void* up, void* out, std::int64_t width);
    // `norm` of x, float32, which is written over.
    void (*norm_gated)(float* x, const void* gate, const GatedNorm& norm, void* out, std::int64_t width);
    // out[i] = x[i] * y[i]
    void (*multiply)(const void* x, const void* y, void* out, std::int64_t width);
    // out[i] = x[i] * sigmoid(gate[i])
    void (*gate)(const void* x, const void* gate, void* out, std::int64_t width);
    // The first index of the largest element, which goes to `best`; of the first NaN where there is one.
    std::int64_t (*argmax)(const void* x, std::int64_t width, float* best);
};

// The operators of `isa` for `element`; AMX uses those of avx512_bf16.
const RowOps& row_ops(Isa isa, Element element);

#define QUIRE_DECLARE_ROW_OPS(variant) const RowOps& row_ops_##variant(Element element);
QUIRE_DECLARE_ROW_OPS(portable)
QUIRE_DECLARE_ROW_OPS(emulated_avx512)
QUIRE_DECLARE_ROW_OPS(emulated_avx512_bf16)
#if defined(__x86_64__)
QUIRE_DECLARE_ROW_OPS(avx2)
QUIRE_DECLARE_ROW_OPS(avx512)
QUIRE_DECLARE_ROW_OPS(avx512_bf16)
#endif
#undef QUIRE_DECLARE_ROW_OPS

}  // namespace quire
