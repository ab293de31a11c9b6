// A decoder layer's two halves in one call each: attention (norm, q k v, their norms, rotary embedding, K and V to their
// slots, attention, output) and MLP (norm, gate and up, activation, down), each with its residual.
//
// Not here: finding the layers with this structure (quire/model/fused), the products (linear.hpp), the attention
// (attention.hpp), the arithmetic of the small operators (row_ops.hpp).
//
//   D1  A row of `out` depends on the row of `hidden`, its position, and the KV it sees: no operator mixes rows, and
//       the products and the attention keep the order of their sums.
//   D2  Weights, norms and biases are not owned and must outlive the block.
//   D3  std::invalid_argument for parts that do not fit or a slot outside the view, before anything is written; for a block
//       outside the view after K and V are.
//
// Cost in addition to the products and the attention: about 1 us a call and one pass over the rows for each norm;
// activation, residual, head norms, rotary embedding and the way to the slots are done to a product's results block by
// block, in the cache. Scratch of the calling thread is kept, as large as the largest call so far.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/asked_rows.hpp"
#include "kernels/attention.hpp"
#include "kernels/linear.hpp"
#include "kernels/row_ops.hpp"

namespace quire {

struct Product {
    const PackedWeight* weight;
    const void* bias;  // [num_outputs] of the weight's element, or null
};

// out = hidden + scale * after(block(before(hidden))), or without `hidden +` where the layer's own code adds it.
struct Surroundings {
    Norm before, after;
    bool residual = false;
    float residual_scale = 1.0f;
};

struct AttentionParts {
    Surroundings around;
    std::vector<Product> qkv;  // q, k and v; or one product that gives them in this order
    Norm q_norm, k_norm;
    bool norm_heads = true;  // the norms go over a head; else over all heads of a token
    Rotation rotation = Rotation::none;
    Product output{};
    std::int64_t num_q_heads = 0;
    bool gated = false;  // behind each head of q its gate, the sigmoid of which multiplies what the head attends to
};

struct MlpParts {
    Surroundings around;
    std::vector<Product> inputs;  // gate and up; or one product: gate before up where `gated`, else what is activated
    bool gated = true;
    Activation activation = Activation::silu;
    Product output{};
};

// What the step and the layer bring to a call.
struct DecoderStep {
    std::int64_t rows;
    const PagedView* view;
    const AttentionBatch* batch;
    const AttentionOptions* options;
    const std::int64_t* slots;  // [rows]
    const void* cos;            // [rows, table_width], of the element; null where nothing turns
    const void* sin;
    std::int64_t table_width;
    // Rows whose `out` is wanted, of which `out` has no others and `batch` no other queries; null: all.
    const LogitRows* asked = nullptr;
};

// Throws std::invalid_argument where the parts' shapes do not fit together.
void check_parts(const AttentionParts& parts);
void check_parts(const MlpParts& parts);

// hidden and out: [rows, width], contiguous, of the weights' element; out may be hidden. K and V are stored of all rows.
void run_attention(const AttentionParts& parts, const DecoderStep& step, const void* hidden, void* out);
void run_mlp(const MlpParts& parts, std::int64_t rows, const void* hidden, void* out);

// Both halves of one layer after another.
struct StackedLayer {
    const AttentionParts* attention;
    const MlpParts* mlp;
    const PagedView* view;
    const AttentionBatch* batch;
    const AttentionOptions* options;
    const std::int64_t* slots;
};
// What stands around the layers. `embedding` is null where the caller brings the hidden rows.
struct DecoderEnds {
    const PackedWeight* embedding;
    Norm norm;
    Product head;
};

// A forward: token ids to the logits of some rows, for which alone the last layer computes more than keys and values.
struct DecoderInput {
    std::int64_t rows;
    const std::int64_t* ids;        // [rows]; not read without an embedding
    void* hidden;                   // [rows, width]: the embedded rows without one, else null
    const std::int64_t* positions;  // [rows]
    const void* cos;                // [num_positions, table_width]: a row takes that of its position
    const void* sin;
    std::int64_t table_width, num_positions;  // of no width where nothing turns
    const std::int64_t* logit_rows;  // [num_logits], of the rows
    std::int64_t num_logits;
};

// logits [num_logits, head outputs]. Throws std::out_of_range for a token, a row or a position that is not there, before
// anything but scratch is written.
void run_decoder(const DecoderEnds& ends, const StackedLayer* layers, std::int64_t num_layers, const DecoderInput& input, void* logits);

// `norm` of each row of x [rows, width].
void run_norm(const Norm& norm, Element element, Isa isa, const void* x, std::int64_t rows, std::int64_t width, void* out);

// The first index of the largest element of each row of x [rows, width], and that element; of the first NaN in a row.
void run_argmax(Element element, Isa isa, const void* x, std::int64_t rows, std::int64_t width, std::int64_t* indices, float* best);

}  // namespace quire
