// Common parts of the halves of a layer (decoder_layer.cpp, state_mixer.cpp): the input side (norm and products), the
// output side (output product, norm and residual), and the cut of rows into tasks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/decoder_layer.hpp"
#include "kernels/rounding.hpp"
#include "kernels/thread_pool.hpp"

namespace quire {

constexpr std::int64_t kSerialElements = 1 << 14;  // below, waking another thread costs more than it saves
constexpr std::int64_t kRowsAtOnce = 480;  // at most, of an MLP, of the way into attention: bounds the scratch; two passes over the weights anyway

inline void fit(bool fits, const char* what) {
    if (!fits) throw std::invalid_argument(std::string("expected a decoder layer whose parts fit together, got ") + what);
}

inline void check_products(const std::vector<Product>& inputs, const Product& output) {
    fit(!inputs.empty() && output.weight != nullptr, "no products");
    const PackedWeight& last = *output.weight;
    for (const Product& input : inputs) {
        fit(input.weight->num_inputs() == inputs[0].weight->num_inputs(), "input products of different widths");
        fit(input.weight->element() == last.element() && input.weight->isa() == last.isa(), "products of different types");
    }
    fit(inputs[0].weight->num_inputs() == last.num_outputs(), "an output of another width than the input");
}

// Rows that go through an MLP, and the way into attention, together: as many each time, in whole tiles of any product.
inline std::int64_t rows_at_once(std::int64_t rows) {
    constexpr std::int64_t kTiles = 32;
    return std::min(rows, even_part(rows, kRowsAtOnce, kTiles));
}

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

// The products of the rows as the block takes them: normed into `scratch` [rows][input_stride()], or as they are.
inline void enter(const Norm& norm, const LinearTarget* targets, std::size_t num_targets, const RowOps& ops, std::int64_t rows,
                  const void* hidden, unsigned char* scratch) {
    const PackedWeight& weight = *targets[0].weight;
    const std::int64_t width = weight.num_inputs(), stride = weight.input_stride(), bytes = element_bytes(weight.element());
    const auto* from = static_cast<const unsigned char*>(hidden);
    if (norm.kind == Norm::none) return multiply_together(targets, static_cast<int>(num_targets), hidden, rows);
    each_row(rows, width, [&](std::int64_t row) { ops.norm(from + row * width * bytes, norm, scratch + row * stride * bytes, width); });
    multiply_together(targets, static_cast<int>(num_targets), scratch, rows, stride);
}

// The output product of x [rows][input_stride()], its norm and residual. `scratch` has room for its rows where there is a norm.
inline void leave(const Surroundings& around, const Product& output, const RowOps& ops, const void* x, std::int64_t rows,
                  const void* hidden, unsigned char* scratch, void* out) {
    const std::int64_t width = output.weight->num_outputs(), bytes = element_bytes(output.weight->element());
    const std::int64_t stride = output.weight->input_stride();
    const auto multiply_to = [&](void* result) {
        const LinearTarget target{output.weight, output.bias, result};
        multiply_together(&target, 1, x, rows, stride);
    };
    const auto at = [&](std::int64_t row, std::int64_t column) { return (row * width + column) * bytes; };
    const auto* residual = static_cast<const unsigned char*>(hidden);
    auto* to = static_cast<unsigned char*>(out);
    const auto add = [&](std::int64_t row, std::int64_t column, std::int64_t columns, const unsigned char* values) {
        ops.add(residual + at(row, column), values, around.residual_scale, to + at(row, column), columns);
    };
    if (around.after.kind != Norm::none) {
        multiply_to(scratch);
        each_row(rows, 2 * width, [&](std::int64_t row) {
            unsigned char* given = scratch + at(row, 0);
            ops.norm(given, around.after, around.residual ? given : to + at(row, 0), width);
            if (around.residual) add(row, 0, width, given);
        });
    } else if (around.residual) {
        const LinearTarget target{output.weight, output.bias, nullptr, [&](const LinearResult& result) {
            for (std::int64_t r = 0; r < result.rows; ++r) add(result.row + r, result.column, result.columns, result.values[0] + r * result.stride);
        }};
        multiply_together(&target, 1, x, rows, stride);
    } else {
        multiply_to(out);
    }
}

}  // namespace quire
