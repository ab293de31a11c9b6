// The kernel of vector instructions for panels of codes. Few rows: codes become operands in registers and are multiplied there, so that widening
// runs beside the products of the inputs before. More rows share what was widened (quantized_tiles.hpp). Both in quantized_reference.py's order.
#pragma once

#include "kernels/quantized_tiles.hpp"

namespace quire {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kVectorRows = 1, kChainRows = 1;  // a compiler that adds its checks takes minutes for more
#else
constexpr int kVectorRows = static_cast<int>(kFewRows), kChainRows = 8;  // rows in registers at once, of floats and of chains
#endif
// Parts of rows that take a panel's codes one after the other. Of chains two: 12 rows take 14 % less time than as tiles (4 and 8 bits, Zen 5).
constexpr int kVectorParts = 1, kChainParts = 2;

// Of products that are exact, so that a fused multiply-add rounds as two steps do.
template <class S, class Products>
struct QuantizedFew {
    using Vec = typename S::Vec;
    using Operand = typename Products::Operand;
    static constexpr int kVectors = 16 / S::kWidth;
    static constexpr int kSteps = 16 / Products::kInputs;    // of a block, two operands each
    static constexpr std::int64_t kAfterBytes = 2048;        // of what the thread reads next, asked for with the last panel
    static constexpr bool kTotalsAreOwn = S::kRegisters == 16;  // sums in variables, not in acc

    // Of rows from `row` on. sums_of_x: [block.rows][groups], where the form has minimums. acc: [block.rows][16], zeros.
    template <int rows, bool halves>
    static void multiply_panel(const LinearBlock& block, const GroupNumbers& numbers, const float* sums_of_x, const unsigned char* panel, std::int64_t row, float* acc) {
        const QuantizedForm& form = *block.form;
        const std::int64_t stride = block.activation_stride / 4;
        const auto* x = reinterpret_cast<const float*>(block.activations) + row * stride;
        acc += row * 16, sums_of_x += row * form.num_groups;
        const std::int64_t each = form.group / 32;
        const std::int64_t num_groups = form.num_groups;
        const bool has_minimums = form.has_minimums();
        const float *scales = numbers.scales, *minimums = numbers.minimums;
        Vec even[rows], odd[rows], part[rows * kVectors], totals[rows * kVectors];
        unrolled<rows * kVectors>([&](auto i) __attribute__((always_inline)) { part[i] = totals[i] = S::zero(); });
        std::int64_t group = 0, within = 0;  // of the block; of halves the block is two groups
        const auto begin = [&] __attribute__((always_inline)) { unrolled<rows>([&](auto r) __attribute__((always_inline)) { even[r] = odd[r] = S::zero(); }); };
        // Adds what vector v has of a block to its group, whose sum is scaled at its end.
        const auto end = [&](auto v, std::int64_t at) __attribute__((always_inline)) {
            const bool first = halves || within == 0, last = halves || within + 1 == each;
            unrolled<rows>([&](auto r) __attribute__((always_inline)) {
                constexpr int i = r * kVectors + v;
                const Vec sum = S::add(even[r], odd[r]);
                part[i] = first ? sum : S::add(part[i], sum);
            });
            if (!last) return;
            const std::int64_t column = at * 16 + v * S::kWidth;
            const Vec scale = S::load(scales + column);
            const auto total = [&](auto r) __attribute__((always_inline)) {
                constexpr int i = r * kVectors + v;
                return S::add(kTotalsAreOwn ? totals[i] : S::load(acc + i * S::kWidth), S::mul(scale, part[i]));
            };
            const auto put = [&](auto r, Vec sum) __attribute__((always_inline)) {
                constexpr int i = r * kVectors + v;
                if constexpr (kTotalsAreOwn) totals[i] = sum;
                else S::store(acc + i * S::kWidth, sum);
            };
            if (has_minimums) {
                const Vec minimum = S::load(minimums + column);
                unrolled<rows>([&](auto r) __attribute__((always_inline)) {
                    put(r, S::sub(total(r), S::mul(minimum, S::broadcast(sums_of_x[r * num_groups + at]))));
                });
            } else {
                unrolled<rows>([&](auto r) __attribute__((always_inline)) { put(r, total(r)); });
            }
        };
        Products::each_of(form, panel + form.codes_offset, numbers.zeros, 0, form.depth / 32, [&](std::int64_t b, auto v, auto j, Operand low, Operand high) __attribute__((always_inline)) {
            if constexpr (j == 0) begin();
            if constexpr (halves && j == kSteps / 2) {
                end(v, 2 * b);
                begin();
            }
            unrolled<rows>([&](auto r) __attribute__((always_inline)) {
                const float* own = x + r * stride + b * (2 * kSteps) + 2 * j;
                even[r] = Products::add_broadcast(own, low, even[r]);
                odd[r] = Products::add_broadcast(own + 1, high, odd[r]);
            });
            if constexpr (j == kSteps - 1) {
                end(v, halves ? 2 * b + 1 : group);
                if constexpr (!halves && v == kVectors - 1) {
                    if (++within == each) within = 0, ++group;
                }
            }
        });
        if constexpr (kTotalsAreOwn) unrolled<rows * kVectors>([&](auto i) __attribute__((always_inline)) { S::store(acc + i * S::kWidth, totals[i]); });
    }

    template <int most, class Finish>
    static void multiply(const LinearBlock& block, Finish finish) {
        const QuantizedForm& form = *block.form;
        const QuantizedScratch scratch(form, block.wide, block.rows, 1);
        if (form.has_minimums()) sum_groups(form, block, scratch.sums_of_x);
        const std::int64_t parts = (block.rows + most - 1) / most;
        for (std::int64_t panel = 0; panel < block.num_panels; ++panel) {
            const unsigned char* from = block.panels + panel * block.panel_stride;
            widen_groups<S>(form, from, scratch.numbers[0], 0, 0, form.num_groups);
            for (std::int64_t i = 0; panel + 1 == block.num_panels && i < kAfterBytes; i += kLineBytes) S::prefetch_l2(block.after + i);
            std::memset(block.sums, 0, static_cast<std::size_t>(block.rows * 16 * 4));
            for (std::int64_t part = 0; part < parts; ++part) {
                const std::int64_t row = block.rows * part / parts;
                with_rows<1, most>(block.rows * (part + 1) / parts - row, [&](auto rows) {
                    const auto own = form.halves() ? multiply_panel<rows(), true> : multiply_panel<rows(), false>;
                    own(block, scratch.numbers[0], scratch.sums_of_x, from, row, block.sums);
                });
            }
            finish(block, block.sums, panel, 1, 0, block.rows);
        }
    }
};

// in_registers: rows that are multiplied at once as codes are widened, at most; up to `parts` times as many are, in parts.
template <class S, class Products, int in_registers, int parts, class Finish>
void multiply_rows(const LinearBlock& block, Finish finish) {
    if constexpr (in_registers > 0) {
        if (block.rows <= in_registers * parts) return QuantizedFew<S, Products>::template multiply<in_registers>(block, finish);
    }
    QuantizedTiles<S, Products>::multiply(block, finish);
}

template <class S, class Element, class Widen>
void multiply_codes(const LinearBlock& block) {
    if (block.form->exact && sizeof(Element) == 2) {
        constexpr int in_registers = sizeof(Element) == 2 && !std::is_same_v<Widen, WidenPlain> ? kVectorRows : 0;
        return multiply_rows<S, FloatProducts<S, Widen, true>, in_registers, kVectorParts>(block, finish_panels<S, Element>);
    }
    QuantizedTiles<S, FloatProducts<S, Widen, false>>::multiply(block, finish_panels<S, Element>);
}

template <class S, class Element, class Widen>
constexpr LinearKernel vector_quantized_kernel() {
    LinearKernel kernel = quantized_kernel(QuantizedTiles<S, FloatProducts<S, Widen, true>>::kTaskRows, 4);
    kernel.stage = stage_counted<Element>;
    kernel.stage_sums = stage_sums<float>;
    kernel.multiply = multiply_codes<S, Element, Widen>;
    return kernel;
}

}  // namespace
}  // namespace quire
