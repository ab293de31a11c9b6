#include "kernels/state_mixer.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/layer_half.hpp"
#include "kernels/profile.hpp"
#include "kernels/scratch.hpp"
#include "kernels/simd.hpp"

namespace quire {

namespace {

using Int = std::int64_t;

thread_local GrownBuffer mixer_scratch;

Int lines(Int size) { return round_up(size, 64); }

// Some columns of rows in memory.
struct Rows {
    unsigned char* data;
    Int stride;  // elements
};

// Rows [first, last) of a step, as a step.
RecurrenceStep part_of(const RecurrenceStep& step, Int first, Int last) {
    RecurrenceStep part{};
    part.isa = step.isa;
    for (std::size_t s = 0; s < step.slots.size(); ++s) {
        const Int start = std::max(step.starts[s], first), stop = std::min(step.starts[s + 1], last);
        if (start >= stop) continue;
        part.starts.push_back(start - first);
        part.slots.push_back(step.slots[s]);
    }
    part.starts.push_back(last - first);
    for (std::size_t c = 0; c < step.checkpoint_rows.size(); ++c) {
        if (step.checkpoint_rows[c] < first || step.checkpoint_rows[c] >= last) continue;
        part.checkpoint_rows.push_back(step.checkpoint_rows[c] - first);
        part.checkpoint_slots.push_back(step.checkpoint_slots[c]);
    }
    return part;
}

float widened(Element element, const unsigned char* data, Int index) {
    switch (element) {
        case Element::f32: return reinterpret_cast<const float*>(data)[index];
        case Element::f16: return to_float(reinterpret_cast<const f16*>(data)[index]);
        case Element::bf16: return to_float(reinterpret_cast<const bf16*>(data)[index]);
    }
    return 0.0f;
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

void check_columns(const MixerParts& parts, const std::vector<ProductColumns>& columns, Int width) {
    Int sum = 0;
    for (const ProductColumns& part : columns) {
        const bool is_there = part.product >= 0 && part.product < static_cast<Int>(parts.inputs.size()) && part.column >= 0 && part.width > 0;
        fit(is_there && part.width <= parts.inputs[static_cast<std::size_t>(part.product)].weight->num_outputs() - part.column, "columns that no product gives");
        sum += part.width;
    }
    fit(sum == width, "columns of another width than the mixer takes");
}

}  // namespace

void check_parts(const MixerParts& parts) {
    check_products(parts.inputs, parts.output);
    fit(parts.inputs.size() <= 8, "more products than a mixer has");
    fit(parts.num_heads > 0 && parts.head_dim > 0 && parts.size > 0 && parts.num_groups > 0 && parts.num_heads % parts.num_groups == 0, "heads that groups do not divide");
    fit(parts.convolution_width >= 2 && parts.convolution_width <= kMostConvolutionWidth, "a convolution of another width than 2 to 8");
    check_columns(parts, parts.x, parts.channels());
    check_columns(parts, parts.gate, parts.width());
    const bool is_alone = parts.kind == MixerParts::convolution_alone;
    check_columns(parts, parts.a, is_alone ? 0 : parts.num_heads);
    check_columns(parts, parts.b, is_alone ? parts.width() : parts.kind == MixerParts::delta ? parts.num_heads : 0);
    fit(parts.output.weight->num_inputs() == parts.width(), "an output product of another width than the heads");
    if (is_alone) return;
    fit(parts.norm_width > 0 && parts.width() % parts.norm_width == 0 && parts.weight_width % parts.norm_width == 0 && parts.width() % parts.weight_width == 0,
        "a norm that does not divide the heads");
}

void run_mixer(const MixerParts& parts, const RecurrenceStep& step, const RecurrenceState& convolution, const RecurrenceState& state,
               const void* hidden, void* out) {
    const Span span(Operator::fused);
    const PackedWeight& output = *parts.output.weight;
    const Element element = output.element();
    const RowOps& ops = row_ops(output.isa(), element);
    const Int bytes = element_bytes(element), rows = step.num_rows(), width = output.num_outputs(), inner = parts.width();
    const Int channels = parts.channels(), heads = parts.num_heads, at_once = rows_at_once(rows);
    const bool is_delta = parts.kind == MixerParts::delta, is_alone = parts.kind == MixerParts::convolution_alone;
    Int products_width = 0;
    for (const Product& input : parts.inputs) products_width += input.weight->num_outputs();
    const Int given_width = 2 * channels + 2 * inner + 2 * heads;  // of the parts that have to be put together
    // What the recurrence takes and gives is kept in whole, then read once.
    const Int sizes[] = {
        lines(at_once * parts.inputs[0].weight->input_stride() * bytes),
        at_once * products_width * bytes + 64 * static_cast<Int>(parts.inputs.size()),
        at_once * given_width * bytes + 64 * 5,
        lines(at_once * channels * bytes),
        lines(at_once * 2 * heads * 4),
        lines(at_once * inner * 4),
        lines(at_once * output.input_stride() * bytes),
        lines(at_once * width * bytes),
    };
    Int total = 0;
    for (const Int size : sizes) total += lines(size);
    unsigned char* next = mixer_scratch.get(static_cast<std::size_t>(total));
    const auto take = [&](Int size) {
        unsigned char* const buffer = next;
        next += lines(size);
        return buffer;
    };
    unsigned char* const normed = take(sizes[0]);
    unsigned char* const products = take(sizes[1]);
    unsigned char* const together = take(sizes[2]);
    unsigned char* const convolved = take(sizes[3]);
    auto* const steps = reinterpret_cast<float*>(take(sizes[4]));
    auto* const y = reinterpret_cast<float*>(take(sizes[5]));
    unsigned char* const gated = take(sizes[6]);
    unsigned char* const result = take(sizes[7]);

    for (Int start = 0; start < rows; start += at_once) {
        const Int count = std::min(at_once, rows - start);
        const auto* const from = static_cast<const unsigned char*>(hidden) + start * width * bytes;
        auto* const to = static_cast<unsigned char*>(out) + start * width * bytes;
        const RecurrenceStep part = part_of(step, start, start + count);

        LinearTarget targets[8];
        Rows given[8];
        unsigned char* at = products;
        for (std::size_t i = 0; i < parts.inputs.size(); ++i) {
            const Product& input = parts.inputs[i];
            given[i] = {at, input.weight->num_outputs()};
            targets[i] = {input.weight, input.bias, at};
            at += lines(count * given[i].stride * bytes);
        }
        enter(parts.around.before, targets, parts.inputs.size(), ops, count, from, normed);

        // A part of the rows where it lies, or put together.
        unsigned char* place = together;
        const auto part_of_rows = [&](const std::vector<ProductColumns>& columns) -> Rows {
            if (columns.empty()) return {nullptr, 0};
            if (columns.size() == 1) {
                const Rows& all = given[columns[0].product];
                return {all.data + columns[0].column * bytes, all.stride};
            }
            Int size = 0;
            for (const ProductColumns& piece : columns) size += piece.width;
            const Rows made{place, size};
            place += lines(count * size * bytes);
            each_row(count, 2 * size, [&](Int row) {
                unsigned char* put = made.data + row * size * bytes;
                for (const ProductColumns& piece : columns) {
                    const Rows& all = given[piece.product];
                    std::memcpy(put, all.data + (row * all.stride + piece.column) * bytes, static_cast<std::size_t>(piece.width * bytes));
                    put += piece.width * bytes;
                }
            });
            return made;
        };
        Rows x = part_of_rows(parts.x);
        const Rows gate = part_of_rows(parts.gate), a = part_of_rows(parts.a), b = part_of_rows(parts.b);

        if (is_alone) {
            const Rows product{place, channels};
            each_row(count, 2 * channels, [&](Int row) {
                ops.multiply(x.data + row * x.stride * bytes, b.data + row * b.stride * bytes, product.data + row * channels * bytes, channels);
            });
            x = product;
        }
        run_convolution({&part, element, convolution, channels, parts.convolution_width, {x.data, x.stride, 0}, parts.convolution,
                         parts.convolution_bias, !is_alone, convolved});
        if (is_alone) {
            each_row(count, 2 * inner, [&](Int row) {
                ops.multiply(convolved + row * inner * bytes, gate.data + row * gate.stride * bytes, gated + row * output.input_stride() * bytes, inner);
            });
            leave(parts.around, parts.output, ops, gated, count, from, result, to);
            continue;
        }
        float* const betas = steps + count * heads;
        each_row(count, 64 * heads, [&](Int row) {
            for (Int head = 0; head < heads; ++head) {
                const float size = softplus(widened(element, a.data, row * a.stride + head) + parts.shift[head]);
                if (is_delta) {
                    steps[row * heads + head] = parts.rate[head] * size;
                    betas[row * heads + head] = parts.factor / (1.0f + std::exp(-widened(element, b.data, row * b.stride + head)));
                } else {
                    steps[row * heads + head] = std::clamp(size, parts.least_step, parts.most_step);
                }
            }
        });
        const Int keys = parts.num_groups * parts.size;
        const auto columns_of = [&](Int column, Int head_stride) { return RecurrenceInput{convolved + column * bytes, channels, head_stride}; };
        const RecurrenceInput decays{steps, heads, 0};
        if (is_delta) {
            DeltaJob job{};
            job.step = &part, job.element = element, job.state = state;
            job.num_heads = heads, job.k_dim = parts.size, job.v_dim = parts.head_dim, job.num_k_heads = parts.num_groups;
            job.corrects = true, job.normalize = true, job.scale = 1.0f / std::sqrt(static_cast<float>(parts.size));
            job.q = columns_of(0, parts.size), job.k = columns_of(keys, parts.size), job.v = columns_of(2 * keys, parts.head_dim);
            job.g = decays, job.beta = {betas, heads, 0};
            job.out = y, job.is_wide = true;
            run_delta(job);
        } else {
            ScanJob job{};
            job.step = &part, job.element = element, job.state = state;
            job.num_heads = heads, job.head_dim = parts.head_dim, job.state_size = parts.size, job.num_groups = parts.num_groups;
            job.x = columns_of(0, parts.head_dim), job.b = columns_of(inner, parts.size), job.c = columns_of(inner + keys, parts.size);
            job.dt = decays, job.a = parts.rate, job.d = parts.skip;
            job.out = y, job.is_wide = true;
            run_scan(job);
        }
        each_row(count, 4 * inner, [&](Int row) {
            for (Int column = 0; column < inner; column += parts.norm_width) {
                GatedNorm norm = parts.norm;
                norm.weight += column % parts.weight_width;
                ops.norm_gated(y + row * inner + column, gate.data + (row * gate.stride + column) * bytes, norm,
                               gated + (row * output.input_stride() + column) * bytes, parts.norm_width);
            }
        });
        leave(parts.around, parts.output, ops, gated, count, from, result, to);
    }
}

}  // namespace quire
