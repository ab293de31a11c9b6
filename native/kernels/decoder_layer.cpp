#include "kernels/decoder_layer.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/profile.hpp"
#include "kernels/scratch.hpp"
#include "kernels/thread_pool.hpp"

namespace quire {

namespace {

constexpr std::int64_t kSerialElements = 1 << 14;  // below, waking another thread costs more than it saves
constexpr std::int64_t kRowsAtOnce = 480;  // of an MLP, of the way into attention: bounds the scratch; two passes over the weights anyway

thread_local GrownBuffer layer_scratch, decoder_scratch;

// Cuts the thread's scratch into buffers of rows.
class Buffers {
  public:
    Buffers(std::int64_t rows, std::int64_t row_elements, std::int64_t element_size)
        : rows_(rows),
          element_size_(element_size),
          next_(layer_scratch.get(static_cast<std::size_t>(rows * row_elements * element_size + 64 * kMostBuffers))) {}

    unsigned char* take(std::int64_t width) {
        unsigned char* buffer = next_;
        next_ += (rows_ * width * element_size_ + 63) / 64 * 64;
        return buffer;
    }

  private:
    static constexpr std::int64_t kMostBuffers = 8;
    std::int64_t rows_, element_size_;
    unsigned char* next_;
};

// task(row) for every row, on all threads where there is enough to do.
template <class Task>
void each_row(std::int64_t rows, std::int64_t row_elements, Task&& task) {
    const std::int64_t together = std::max<std::int64_t>(1, kSerialElements / 4 / row_elements);
    if (rows * row_elements < kSerialElements) {
        for (std::int64_t row = 0; row < rows; ++row) task(row);
        return;
    }
    ThreadPool::instance().run((rows + together - 1) / together, [&](std::int64_t chunk) {
        for (std::int64_t row = chunk * together; row < std::min(rows, (chunk + 1) * together); ++row) task(row);
    });
}

// The rows as the block takes them: normed into `scratch`, or as they are.
const unsigned char* entered(const Norm& norm, const RowOps& ops, std::int64_t rows, std::int64_t width, std::int64_t bytes, const void* hidden,
                             unsigned char* scratch) {
    const auto* from = static_cast<const unsigned char*>(hidden);
    if (norm.kind == Norm::none) return from;
    each_row(rows, width, [&](std::int64_t row) { ops.norm(from + row * width * bytes, norm, scratch + row * width * bytes, width); });
    return scratch;
}

// What the output product writes to, and what becomes of it.
void leave(const Surroundings& around, const RowOps& ops, std::int64_t rows, std::int64_t width, std::int64_t bytes, const void* hidden,
           unsigned char* result, void* out) {
    if (around.after.kind == Norm::none && !around.residual) return;  // `result` is `out`
    each_row(rows, 2 * width, [&](std::int64_t row) {
        const std::int64_t at = row * width * bytes;
        unsigned char* to = static_cast<unsigned char*>(out) + at;
        if (around.after.kind != Norm::none) ops.norm(result + at, around.after, around.residual ? result + at : to, width);
        if (around.residual) ops.add(static_cast<const unsigned char*>(hidden) + at, result + at, around.residual_scale, to, width);
    });
}

bool writes_out(const Surroundings& around) { return around.after.kind == Norm::none && !around.residual; }

void fit(bool fits, const char* what) {
    if (!fits) throw std::invalid_argument(std::string("expected a decoder layer whose parts fit together, got ") + what);
}

void check_products(const std::vector<Product>& inputs, const Product& output) {
    fit(!inputs.empty() && output.weight != nullptr, "no products");
    const PackedWeight& last = *output.weight;
    for (const Product& input : inputs) {
        fit(input.weight->num_inputs() == inputs[0].weight->num_inputs(), "input products of different widths");
        fit(input.weight->element() == last.element() && input.weight->isa() == last.isa(), "products of different types");
    }
    fit(inputs[0].weight->num_inputs() == last.num_outputs(), "an output of another width than the input");
}

void multiply_all(const std::vector<Product>& products, const void* x, std::int64_t rows, unsigned char* const* outs) {
    LinearTarget targets[3];
    for (std::size_t i = 0; i < products.size(); ++i) targets[i] = {products[i].weight, products[i].bias, outs[i]};
    multiply_together(targets, static_cast<int>(products.size()), x, rows);
}

}  // namespace

void check_parts(const AttentionParts& parts) {
    check_products(parts.qkv, parts.output);
    fit(parts.qkv.size() == 1 || parts.qkv.size() == 3, "neither one product nor three for q, k and v");
    fit(parts.num_q_heads > 0, "no query heads");
}

void check_parts(const MlpParts& parts) {
    check_products(parts.inputs, parts.output);
    std::int64_t width = 0;
    for (const Product& input : parts.inputs) width += input.weight->num_outputs();
    fit(parts.inputs.size() <= (parts.gated ? 2 : 1), "more input products than gate and up");
    fit(width == parts.output.weight->num_inputs() * (parts.gated ? 2 : 1), "input products of another width than the output takes");
    fit(parts.inputs[0].weight->num_outputs() * static_cast<std::int64_t>(parts.inputs.size()) == width, "gate and up of different widths");
}

void run_attention(const AttentionParts& parts, const DecoderStep& step, const void* hidden, void* out) {
    const Span span(Operator::fused);
    const PackedWeight& output = *parts.output.weight;
    const Element element = output.element();
    const RowOps& ops = row_ops(output.isa(), element);
    const PagedView& view = *step.view;
    const std::int64_t bytes = element_bytes(element), rows = step.rows, width = output.num_outputs();
    const std::int64_t q_heads = parts.num_q_heads, kv_heads = view.num_kv_heads, k_width = view.k.width, v_width = view.v.width;
    const std::int64_t q_row = q_heads * k_width, k_row = kv_heads * k_width, v_row = kv_heads * v_width, all = q_row + k_row + v_row;
    const std::int64_t rotary = step.table_width * (parts.rotation == Rotation::halves_short_table ? 2 : 1);
    std::int64_t given = 0;
    for (const Product& product : parts.qkv) given += product.weight->num_outputs();
    fit(view.element == element && given == all && output.num_inputs() == q_heads * v_width, "products that give other heads than the storage has");
    fit(parts.rotation == Rotation::none || (rotary > 0 && rotary % 2 == 0 && rotary <= k_width), "a rotary embedding wider than a head");
    check_slots(view, step.slots, rows);

    // What all rows need at once lives in two buffers: queries, then the output product's rows; attended rows. Keys and values go to
    // their slots a chunk at a time.
    const bool merged = parts.qkv.size() == 1;
    const std::int64_t at_once = std::min(rows, kRowsAtOnce), given_row = merged ? all : k_row + v_row;
    const auto lines = [](std::int64_t size) { return (size + 63) / 64 * 64; };
    const std::int64_t attended_bytes = lines(rows * q_heads * v_width * bytes), q_bytes = lines(rows * std::max(q_row, width) * bytes);
    const std::int64_t normed_bytes = lines(at_once * width * bytes);
    unsigned char* attended = layer_scratch.get(static_cast<std::size_t>(attended_bytes + q_bytes + normed_bytes + at_once * given_row * bytes));
    unsigned char *q = attended + attended_bytes, *normed = q + q_bytes, *products = normed + normed_bytes;
    unsigned char* result = writes_out(parts.around) ? static_cast<unsigned char*>(out) : q;
    const std::int64_t q_stride = merged ? all : q_row, k_stride = merged ? all : k_row, v_stride = merged ? all : v_row;

    for (std::int64_t start = 0; start < rows; start += kRowsAtOnce) {
        const std::int64_t count = std::min(kRowsAtOnce, rows - start);
        const auto* from = static_cast<const unsigned char*>(hidden) + start * width * bytes;
        unsigned char* q_given = merged ? products : q + start * q_row * bytes;
        unsigned char* k = merged ? products + q_row * bytes : products;
        unsigned char* v = merged ? k + k_row * bytes : k + count * k_row * bytes;
        unsigned char* const targets[3] = {q_given, k, v};
        multiply_all(parts.qkv, entered(parts.around.before, ops, count, width, bytes, from, normed), count, targets);

        each_row(count, 2 * all, [&](std::int64_t row) {
            const std::int64_t token = start + row;
            const auto* cos = static_cast<const unsigned char*>(step.cos) + token * step.table_width * bytes;
            const auto* sin = static_cast<const unsigned char*>(step.sin) + token * step.table_width * bytes;
            const std::int64_t block = step.slots[token] / view.block_size, offset = step.slots[token] % view.block_size;
            unsigned char* k_slot = view.k.data + (block * view.k.block_stride + offset * view.k.token_stride) * bytes;
            unsigned char* v_slot = view.v.data + (block * view.v.block_stride + offset * view.v.token_stride) * bytes;
            const auto prepare = [&](unsigned char* x, std::int64_t heads, const Norm& norm, unsigned char* to, std::int64_t head_stride) {
                if (norm.kind != Norm::none && !parts.norm_heads) ops.norm(x, norm, x, heads * k_width);
                for (std::int64_t head = 0; head < heads; ++head) {
                    unsigned char* at = x + head * k_width * bytes;
                    if (norm.kind != Norm::none && parts.norm_heads) ops.norm(at, norm, at, k_width);
                    ops.rotate(at, cos, sin, parts.rotation, rotary, to + head * head_stride * bytes, k_width);
                }
            };
            prepare(q_given + row * q_stride * bytes, q_heads, parts.q_norm, q + token * q_row * bytes, k_width);
            prepare(k + row * k_stride * bytes, kv_heads, parts.k_norm, k_slot, view.k.head_stride);
            const unsigned char* v_at = v + row * v_stride * bytes;
            for (std::int64_t head = 0; head < kv_heads; ++head) {
                std::copy_n(v_at + head * v_width * bytes, v_width * bytes, v_slot + head * view.v.head_stride * bytes);
            }
        });
    }

    attention_run(view, {q, q_row, k_width}, {attended, q_heads * v_width, v_width}, q_heads, *step.batch, *step.options, output.isa());
    output.multiply(attended, rows, parts.output.bias, result);
    leave(parts.around, ops, rows, width, bytes, hidden, result, out);
}

void run_mlp(const MlpParts& parts, std::int64_t rows, const void* hidden, void* out) {
    const Span span(Operator::fused);
    const PackedWeight& output = *parts.output.weight;
    const RowOps& ops = row_ops(output.isa(), output.element());
    const std::int64_t bytes = element_bytes(output.element()), width = output.num_outputs(), inner = output.num_inputs();
    const std::int64_t given = inner * (parts.gated ? 2 : 1);
    for (std::int64_t start = 0; start < rows; start += kRowsAtOnce) {
        const std::int64_t count = std::min(kRowsAtOnce, rows - start);
        const auto* from = static_cast<const unsigned char*>(hidden) + start * width * bytes;
        auto* to = static_cast<unsigned char*>(out) + start * width * bytes;
        const bool merged = parts.inputs.size() == 1, apart = merged && parts.gated;
        Buffers buffers(count, 2 * width + given + (apart ? inner : 0), bytes);
        unsigned char* normed = buffers.take(width);
        unsigned char* gate = buffers.take(given);
        unsigned char* result = writes_out(parts.around) ? to : buffers.take(width);
        unsigned char* activated = apart ? buffers.take(inner) : gate;  // the output product takes rows that lie close together
        unsigned char* up = merged ? gate + inner * bytes : gate + count * inner * bytes;
        const std::int64_t stride = (merged ? given : inner) * bytes;

        unsigned char* const targets[2] = {gate, up};
        multiply_all(parts.inputs, entered(parts.around.before, ops, count, width, bytes, from, normed), count, targets);
        each_row(count, 4 * inner, [&](std::int64_t row) {
            ops.activate(parts.activation, gate + row * stride, parts.gated ? up + row * stride : nullptr, activated + row * inner * bytes, inner);
        });
        output.multiply(activated, count, parts.output.bias, result);
        leave(parts.around, ops, count, width, bytes, from, result, to);
    }
}

void run_layers(const StackedLayer* layers, std::int64_t num_layers, const DecoderStep& step, void* hidden) {
    for (std::int64_t i = 0; i < num_layers; ++i) {
        const StackedLayer& layer = layers[i];
        run_attention(*layer.attention, {step.rows, layer.view, layer.batch, layer.options, layer.slots, step.cos, step.sin, step.table_width},
                      hidden, hidden);
        run_mlp(*layer.mlp, step.rows, hidden, hidden);
    }
}

void run_decoder(const DecoderEnds& ends, const StackedLayer* layers, std::int64_t num_layers, const DecoderInput& input, void* logits) {
    const PackedWeight& head = *ends.head.weight;
    const Element element = head.element();
    const RowOps& ops = row_ops(head.isa(), element);
    const std::int64_t bytes = element_bytes(element), rows = input.rows, row_bytes = head.num_inputs() * bytes;
    const std::int64_t angles_bytes = input.table_width * bytes;
    fit(ends.embedding == nullptr || (ends.embedding->num_inputs() == head.num_inputs() && ends.embedding->element() == element),
        "an embedding of other rows than the vocabulary projection takes");
    for (std::int64_t i = 0; i < input.num_logits; ++i) {
        if (input.logit_rows[i] < 0 || input.logit_rows[i] >= rows) throw std::out_of_range("expected logits of a row of the step, got another");
    }
    for (std::int64_t row = 0; angles_bytes > 0 && row < rows; ++row) {
        if (input.positions[row] < 0 || input.positions[row] >= input.num_positions) {
            throw std::out_of_range("expected positions in [0, " + std::to_string(input.num_positions) + "), got " +
                                    std::to_string(input.positions[row]));
        }
    }
    const auto lines = [](std::int64_t size) { return (size + 63) / 64 * 64; };
    const std::int64_t hidden_bytes = input.hidden == nullptr ? lines(rows * row_bytes) : 0;
    unsigned char* scratch = decoder_scratch.get(
        static_cast<std::size_t>(hidden_bytes + 2 * lines(rows * angles_bytes) + lines(input.num_logits * row_bytes)));
    auto* hidden = static_cast<unsigned char*>(input.hidden);
    if (hidden == nullptr) {
        hidden = scratch;
        ends.embedding->gather_rows(input.ids, rows, hidden);
    }
    unsigned char *cos = scratch + hidden_bytes, *sin = cos + lines(rows * angles_bytes), *normed = sin + lines(rows * angles_bytes);
    for (std::int64_t row = 0; angles_bytes > 0 && row < rows; ++row) {
        const std::int64_t at = input.positions[row] * angles_bytes;
        std::copy_n(static_cast<const unsigned char*>(input.cos) + at, angles_bytes, cos + row * angles_bytes);
        std::copy_n(static_cast<const unsigned char*>(input.sin) + at, angles_bytes, sin + row * angles_bytes);
    }
    run_layers(layers, num_layers, {rows, nullptr, nullptr, nullptr, nullptr, cos, sin, input.table_width}, hidden);
    {
        const Span span(Operator::fused);
        each_row(input.num_logits, head.num_inputs(), [&](std::int64_t i) {
            ops.norm(hidden + input.logit_rows[i] * row_bytes, ends.norm, normed + i * row_bytes, head.num_inputs());
        });
    }
    head.multiply(normed, input.num_logits, ends.head.bias, logits);
}

void run_norm(const Norm& norm, Element element, Isa isa, const void* x, std::int64_t rows, std::int64_t width, void* out) {
    const Span span(Operator::fused);
    const RowOps& ops = row_ops(isa, element);
    const std::int64_t bytes = width * element_bytes(element);
    each_row(rows, width, [&](std::int64_t row) {
        ops.norm(static_cast<const unsigned char*>(x) + row * bytes, norm, static_cast<unsigned char*>(out) + row * bytes, width);
    });
}

void run_argmax(Element element, Isa isa, const void* x, std::int64_t rows, std::int64_t width, std::int64_t* indices, float* best) {
    const RowOps& ops = row_ops(isa, element);
    each_row(rows, width, [&](std::int64_t row) {
        indices[row] = ops.argmax(static_cast<const unsigned char*>(x) + row * width * element_bytes(element), width, best + row);
    });
}

const RowOps& row_ops(Isa isa, Element element) {
    switch (isa) {
#if defined(__x86_64__)
        case Isa::amx_bf16:
        case Isa::avx512_bf16:
        case Isa::avx512: return row_ops_avx512(element);
        case Isa::avx2: return row_ops_avx2(element);
#endif
        case Isa::emulated_amx_bf16:
        case Isa::emulated_avx512_bf16:
        case Isa::emulated_avx512: return row_ops_emulated_avx512(element);
        default: return row_ops_portable(element);
    }
}

}  // namespace quire
