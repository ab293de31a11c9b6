#include "kernels/decoder_layer.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "kernels/layer_half.hpp"
#include "kernels/profile.hpp"
#include "kernels/scratch.hpp"

namespace quire {

namespace {

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

}  // namespace

void check_parts(const AttentionParts& parts) {
    check_products(parts.qkv, parts.output);
    fit(parts.qkv.size() == 1 || parts.qkv.size() == 3, "neither one product nor three for q, k and v");
    fit(parts.num_q_heads > 0, "no query heads");
    fit(!parts.gated || (parts.qkv.size() == 3 && (parts.q_norm.kind == Norm::none || parts.norm_heads)), "gates of queries that are no product of their own");
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
    const bool merged = parts.qkv.size() == 1;
    const std::int64_t row_widths[3] = {merged ? all : parts.gated ? 2 * q_row : q_row, k_row, v_row};
    bool given = true;
    for (std::size_t i = 0; i < parts.qkv.size(); ++i) given = given && parts.qkv[i].weight->num_outputs() == row_widths[i];
    fit(view.element == element && given && output.num_inputs() == q_heads * v_width, "products that give other heads than the storage has");
    fit(!parts.gated || k_width == v_width, "gates of another width than what is attended to");
    fit(parts.rotation == Rotation::none || (rotary > 0 && rotary % 2 == 0 && rotary <= k_width), "a rotary embedding wider than a head");
    check_slots(view, step.slots, rows);
    const std::int64_t num_queries = step.asked == nullptr ? rows : step.asked->count();

    // Whole heads can go to their places as a product's blocks come, but where a norm goes over all of them or blocks would cut them.
    const auto whole_rows = [&](const Norm& norm) { return norm.kind != Norm::none && !parts.norm_heads; };
    const bool by_blocks = !whole_rows(parts.q_norm) && !whole_rows(parts.k_norm) && (!merged || k_width == v_width);

    // What all queries need at once lives in two buffers: queries, then the output product's rows; attended rows. Keys and values go to
    // their slots a chunk at a time.
    const std::int64_t at_once = rows_at_once(rows);
    const auto lines = [](std::int64_t size) { return (size + 63) / 64 * 64; };
    const std::int64_t attended_bytes = lines(num_queries * output.input_stride() * bytes), q_bytes = lines(num_queries * std::max(q_row, width) * bytes);
    const std::int64_t normed_bytes = lines(at_once * parts.qkv[0].weight->input_stride() * bytes);
    const std::int64_t gates_bytes = parts.gated ? lines(num_queries * q_row * bytes) : 0;
    unsigned char* attended =
        layer_scratch.get(static_cast<std::size_t>(attended_bytes + q_bytes + gates_bytes + normed_bytes + (by_blocks ? 0 : at_once * all * bytes)));
    unsigned char *q = attended + attended_bytes, *gates = q + q_bytes, *normed = gates + gates_bytes, *products = normed + normed_bytes;

    const auto slot = [&](const PagedTensor& tensor, std::int64_t token, std::int64_t head) {
        const std::int64_t block = step.slots[token] / view.block_size, offset = step.slots[token] % view.block_size;
        return tensor.data + (block * tensor.block_stride + offset * tensor.token_stride + head * tensor.head_stride) * bytes;
    };
    // A head of a token, of all of q, k and v in this order, from where the product left it to its place.
    const auto place = [&](std::int64_t token, std::int64_t head, unsigned char* x) {
        if (head >= q_heads + kv_heads) {
            attention_store(view, view.v, x, step.slots[token], head - q_heads - kv_heads);
            return;
        }
        const bool is_query = head < q_heads;
        const std::int64_t query = is_query && step.asked != nullptr ? step.asked->index_of(token) : token;
        if (query < 0) return;
        alignas(64) unsigned char turned[kMaxHeadWidth * 4];  // by the embedding; keys that go into codes from there
        const bool coded = !is_query && view.coded;
        unsigned char* to = is_query ? q + (query * q_row + head * k_width) * bytes : coded ? turned : slot(view.k, token, head - q_heads);
        const Norm& norm = is_query ? parts.q_norm : parts.k_norm;
        const auto* cos = static_cast<const unsigned char*>(step.cos) + token * step.table_width * bytes;
        const auto* sin = static_cast<const unsigned char*>(step.sin) + token * step.table_width * bytes;
        if (norm.kind != Norm::none && parts.norm_heads) ops.norm(x, norm, x, k_width);
        ops.rotate(x, cos, sin, parts.rotation, rotary, to, k_width);
        if (coded) attention_store(view, view.k, turned, step.slots[token], head - q_heads);
    };
    // A head of the product of q, or the gate behind it.
    const auto place_gated = [&](std::int64_t token, std::int64_t index, unsigned char* x) {
        if (index % 2 == 0) return place(token, index / 2, x);
        const std::int64_t query = step.asked != nullptr ? step.asked->index_of(token) : token;
        if (query >= 0) std::copy_n(x, v_width * bytes, gates + (query * q_row + index / 2 * v_width) * bytes);
    };
    // A product whose heads go to their places block by block; row r is that of token_of(r).
    const auto taken = [&](std::size_t i, auto token_of) {
        const std::int64_t head_width = i == 2 ? v_width : k_width, first_head = i == 0 ? 0 : i == 1 ? q_heads : q_heads + kv_heads;
        LinearTarget target{parts.qkv[i].weight, parts.qkv[i].bias, nullptr};
        target.unit = head_width;
        const bool has_gates = i == 0 && parts.gated;
        target.take = [=, &place, &place_gated](const LinearResult& result) {
            for (std::int64_t r = 0; r < result.rows; ++r) {
                for (std::int64_t column = 0; column < result.columns; column += head_width) {
                    const std::int64_t token = token_of(result.row + r), index = (result.column + column) / head_width;
                    unsigned char* const values = result.values[0] + r * result.stride + column * bytes;
                    has_gates ? place_gated(token, index, values) : place(token, first_head + index, values);
                }
            }
        };
        return target;
    };
    // Queries of few rows that are asked for are a product of their own.
    const bool queries_apart = step.asked != nullptr && by_blocks && !merged && 2 * num_queries <= rows;

    for (std::int64_t start = 0; start < rows; start += at_once) {
        const std::int64_t count = std::min(at_once, rows - start);
        const auto* from = static_cast<const unsigned char*>(hidden) + start * width * bytes;
        LinearTarget targets[3];
        unsigned char* next = products;
        std::size_t num_targets = 0;
        for (std::size_t i = queries_apart ? 1 : 0; i < parts.qkv.size(); ++i) {
            if (by_blocks) {
                targets[num_targets++] = taken(i, [start](std::int64_t row) { return start + row; });
            } else {
                targets[num_targets++] = {parts.qkv[i].weight, parts.qkv[i].bias, next};
                next += count * row_widths[i] * bytes;
            }
        }
        enter(parts.around.before, targets, num_targets, ops, count, from, normed);
        if (by_blocks) continue;
        each_row(count, 2 * all, [&](std::int64_t row) {
            unsigned char* q_given = products + row * row_widths[0] * bytes;
            unsigned char* k = merged ? q_given + q_row * bytes : products + (count * q_row + row * k_row) * bytes;
            unsigned char* v = merged ? k + k_row * bytes : products + (count * (q_row + k_row) + row * v_row) * bytes;
            if (whole_rows(parts.q_norm)) ops.norm(q_given, parts.q_norm, q_given, q_row);
            if (whole_rows(parts.k_norm)) ops.norm(k, parts.k_norm, k, k_row);
            for (std::int64_t head = 0; head < q_heads; ++head) place(start + row, head, q_given + head * k_width * bytes);
            for (std::int64_t head = 0; head < kv_heads; ++head) {
                place(start + row, q_heads + head, k + head * k_width * bytes);
                place(start + row, q_heads + kv_heads + head, v + head * v_width * bytes);
            }
        });
    }

    if (num_queries == 0) return;
    if (step.asked != nullptr) {  // their residuals, close together: they lie further on, or where they were
        const auto* from = static_cast<const unsigned char*>(hidden);
        auto* to = static_cast<unsigned char*>(out);
        for (std::int64_t i = 0; i < num_queries; ++i) std::memmove(to + i * width * bytes, from + (*step.asked)[i] * width * bytes, static_cast<std::size_t>(width * bytes));
        hidden = out;
    }
    for (std::int64_t start = 0; queries_apart && start < num_queries; start += at_once) {
        const LinearTarget target = taken(0, [start, asked = step.asked](std::int64_t row) { return (*asked)[start + row]; });
        enter(parts.around.before, &target, 1, ops, std::min(at_once, num_queries - start), static_cast<const unsigned char*>(hidden) + start * width * bytes, normed);
    }
    attention_run(view, {q, q_row, k_width}, {attended, output.input_stride(), v_width}, q_heads, *step.batch, *step.options, output.isa());
    if (parts.gated) {
        each_row(num_queries, 2 * q_row, [&](std::int64_t query) {
            unsigned char* const x = attended + query * output.input_stride() * bytes;
            ops.gate(x, gates + query * q_row * bytes, x, q_row);
        });
    }
    leave(parts.around, parts.output, ops, attended, num_queries, hidden, q, out);
}

void run_mlp(const MlpParts& parts, std::int64_t rows, const void* hidden, void* out) {
    const Span span(Operator::fused);
    const PackedWeight& output = *parts.output.weight;
    const RowOps& ops = row_ops(output.isa(), output.element());
    const std::int64_t bytes = element_bytes(output.element()), width = output.num_outputs(), inner = output.num_inputs();
    const std::int64_t normed_stride = parts.inputs[0].weight->input_stride(), inner_stride = output.input_stride();
    const bool apart = parts.gated && parts.inputs.size() == 1;  // gate and up are columns of one product
    const std::int64_t at_once = rows_at_once(rows);
    for (std::int64_t start = 0; start < rows; start += at_once) {
        const std::int64_t count = std::min(at_once, rows - start);
        const auto* from = static_cast<const unsigned char*>(hidden) + start * width * bytes;
        auto* to = static_cast<unsigned char*>(out) + start * width * bytes;
        Buffers buffers(count, normed_stride + inner_stride + width + (apart ? 2 * inner : 0), bytes);
        unsigned char *normed = buffers.take(normed_stride), *activated = buffers.take(inner_stride), *result = buffers.take(width);
        const auto activate = [&](std::int64_t row, std::int64_t column, std::int64_t columns, const void* gate, const void* up) {
            ops.activate(parts.activation, gate, up, activated + (row * inner_stride + column) * bytes, columns);
        };
        LinearTarget target{parts.inputs[0].weight, parts.inputs[0].bias, apart ? buffers.take(2 * inner) : nullptr};
        if (!apart) {
            target.take = [&](const LinearResult& block) {
                for (std::int64_t r = 0; r < block.rows; ++r) {
                    const unsigned char* up = parts.gated ? block.values[1] + r * block.stride : nullptr;
                    activate(block.row + r, block.column, block.columns, block.values[0] + r * block.stride, up);
                }
            };
            if (parts.gated) target.second = parts.inputs[1].weight, target.second_bias = parts.inputs[1].bias;
        }
        enter(parts.around.before, &target, 1, ops, count, from, normed);
        if (apart) {
            each_row(count, 4 * inner, [&](std::int64_t row) {
                const unsigned char* gate = static_cast<unsigned char*>(target.out) + row * 2 * inner * bytes;
                activate(row, 0, inner, gate, gate + inner * bytes);
            });
        }
        leave(parts.around, parts.output, ops, activated, count, from, result, to);
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
    std::optional<LogitRows> asked;  // of the last layer, where that is less than half of it
    for (std::int64_t i = 0; i < num_layers; ++i) {
        const StackedLayer& layer = layers[i];
        DecoderStep step{rows, layer.view, layer.batch, layer.options, layer.slots, cos, sin, input.table_width};
        if (i + 1 == num_layers && 2 * input.num_logits < rows && rows == layer.batch->query_start[layer.batch->num_sequences]) {
            asked.emplace(*layer.batch, rows, input.logit_rows, input.num_logits);
            step.asked = &*asked, step.batch = &asked->batch();
        }
        run_attention(*layer.attention, step, hidden, hidden);
        run_mlp(*layer.mlp, asked ? asked->count() : rows, hidden, hidden);
    }
    {
        const Span span(Operator::fused);
        each_row(input.num_logits, head.num_inputs(), [&](std::int64_t i) {
            const std::int64_t row = asked ? asked->index_of(input.logit_rows[i]) : input.logit_rows[i];
            ops.norm(hidden + row * row_bytes, ends.norm, normed + i * row_bytes, head.num_inputs());
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
        case Isa::avx512_bf16: return row_ops_avx512_bf16(element);
        case Isa::avx512: return row_ops_avx512(element);
        case Isa::avx2: return row_ops_avx2(element);
#endif
#if defined(QUIRE_TEST_KERNELS)
        case Isa::emulated_amx_bf16:
        case Isa::emulated_avx512_bf16: return row_ops_emulated_avx512_bf16(element);
        case Isa::emulated_avx512: return row_ops_emulated_avx512(element);
#endif
        default: return row_ops_portable(element);
    }
}

}  // namespace quire
