// The mixer half of a state layer in one call: norm, input products, convolution, gates, recurrence, gated norm, output product,
// residual. Gated delta nets (one decay a head), Mamba 2, and short convolutions alone, which have a product with the row before
// and one behind. quire/model/state has the same in torch.
//
// Not here: finding the mixers of these kinds (quire/model/fused), the products (linear.hpp), convolution and
// recurrences (recurrence.hpp), the arithmetic of norms and gates (row_ops.hpp).
//
//   X1  A row of `out` and a state depend on that sequence's rows and state alone. Rows go through in parts of kRowsAtOnce, which
//       cuts sequences as prompts are cut into calls.
//   X2  Weights, norms and constants are not owned and must outlive the parts.
//
// Cost in addition to the products and the recurrence: a pass over the rows for each of convolution, gated norm and
// inputs that are not adjacent columns of one product; two exponentials and a logarithm a head. Scratch of the calling
// thread is kept.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/decoder_layer.hpp"
#include "kernels/recurrence.hpp"

namespace quire {

// Columns [column, column + width) of what product `product` gives.
struct ProductColumns {
    std::int64_t product, column, width;
};

struct MixerParts {
    enum Kind { delta, scan, convolution_alone };
    Kind kind = delta;
    Surroundings around;
    std::vector<Product> inputs;
    // What each part of a row consists of, in order. x: what passes the convolution (delta: q, k, v; scan: x, b, c; alone: after
    // it was multiplied by b, and is multiplied by the gate then).
    std::vector<ProductColumns> x, gate, a;  // gate [heads * head_dim]; a: what the decays are made of, [heads]; alone: none
    std::vector<ProductColumns> b;           // delta: [heads]; alone: as the gate
    const float* convolution = nullptr;      // [channels of x, convolution_width]
    const float* convolution_bias = nullptr;  // [channels] or null
    std::int64_t convolution_width = 0;
    std::int64_t num_heads = 0, head_dim = 0, size = 0, num_groups = 0;  // size: of a key or a state; groups: heads of q and k, or of b and c
    // But of a convolution alone:
    const float* rate = nullptr;   // [heads], the logarithm of a decay for a step of 1, not above 0
    const float* shift = nullptr;  // [heads], added to a: softplus(a + shift) is the step
    const float* skip = nullptr;   // scan: [heads] or null
    float least_step = 0.0f, most_step = 0.0f;  // scan
    float factor = 1.0f;                        // delta: of sigmoid(b)
    GatedNorm norm{};
    std::int64_t norm_width = 0;    // elements that are normed together
    std::int64_t weight_width = 0;  // of the norm's weight, which repeats along a row
    Product output{};

    std::int64_t width() const { return num_heads * head_dim; }
    std::int64_t channels() const { return (kind == convolution_alone ? 0 : 2 * num_groups * size) + width(); }
};

// Throws std::invalid_argument where the parts' shapes do not fit together.
void check_parts(const MixerParts& parts);

// hidden and out: [rows of the step, width], contiguous, of the weights' element; out may be hidden.
void run_mixer(const MixerParts& parts, const RecurrenceStep& step, const RecurrenceState& convolution, const RecurrenceState& state,
               const void* hidden, void* out);  // of a convolution alone `state` is not looked at

}  // namespace quire
