// The kernel of vector instructions for panels of codes. Up to four rows: codes become float32 in registers and are multiplied there, so that a
// row takes little longer than its codes take to come. More rows share what was widened (quantized_tiles.hpp). Both in quantized_reference.py's order.
#pragma once

#include "kernels/quantized_tiles.hpp"

namespace quire {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::int64_t kRowsInRegisters = 1;  // a compiler that adds its checks takes minutes for more
#else
constexpr std::int64_t kRowsInRegisters = kVectorRows;
#endif

// Of 16-bit rows and values that bf16 holds: their products are exact, so a fused multiply-add rounds as two steps do.
template <class S, class Widen>
struct QuantizedFew {
    using Vec = typename S::Vec;
    static constexpr int kVectors = 16 / S::kWidth;
    static constexpr std::int64_t kAfterBytes = 2048;  // of what the thread reads next, asked for with the last panel
    static constexpr bool kIsThere = !std::is_same_v<Widen, WidenPlain>;
    static_assert(kRowsInRegisters == 1 || kRowsInRegisters == 4);

    // sums_of_x: [rows][groups], where the form has minimums. acc: [rows][16].
    template <int rows, bool halves>
    static void multiply_panel(const LinearBlock& block, const GroupNumbers& numbers, const float* sums_of_x, const unsigned char* panel, float* acc) {
        const QuantizedForm& form = *block.form;
        const auto* x = reinterpret_cast<const float*>(block.activations);
        const std::int64_t stride = block.activation_stride / 4, each = form.group / 32;
        const bool minimums = form.has_minimums();
        Vec even[rows], odd[rows], part[rows * kVectors], total[rows * kVectors];
        unrolled<rows * kVectors>([&](auto i) __attribute__((always_inline)) { part[i] = total[i] = S::zero(); });
        std::int64_t group = 0, within = 0;  // of the block
        // Two inputs of block b: what vector v of the columns has of them.
        const auto visit = [&](std::int64_t b, auto v, auto p, auto made) __attribute__((always_inline)) {
            constexpr bool begins = p == 0 || (halves && p == 8), ends = p == 15 || (halves && p == 7);
            unrolled<rows>([&](auto r) __attribute__((always_inline)) {
                if constexpr (begins) even[r] = odd[r] = S::zero();
                const float* own = x + r * stride + b * 32 + 2 * p;
                even[r] = S::fma(S::broadcast(own[0]), made.even, even[r]);
                odd[r] = S::fma(S::broadcast(own[1]), made.odd, odd[r]);
            });
            if constexpr (ends) {
                const std::int64_t at = halves ? 2 * b + p / 8 : group;
                const bool first = halves || within == 0, last = halves || within + 1 == each;
                unrolled<rows>([&](auto r) __attribute__((always_inline)) {
                    constexpr int i = r * kVectors + v;
                    const Vec sum = S::add(even[r], odd[r]);
                    part[i] = first ? sum : S::add(part[i], sum);
                    if (!last) return;
                    const std::int64_t column = at * 16 + v * S::kWidth;
                    total[i] = S::add(total[i], S::mul(S::load(numbers.scales + column), part[i]));
                    if (minimums) total[i] = S::sub(total[i], S::mul(S::load(numbers.minimums + column), S::broadcast(sums_of_x[r * form.num_groups + at])));
                });
                if constexpr (!halves && v == kVectors - 1) {
                    if (++within == each) within = 0, ++group;
                }
            }
        };
        const auto of = [&](auto bits) __attribute__((always_inline)) { Widen::template each_of<bits(), true>(form, panel + form.codes_offset, numbers.zeros, 0, form.depth / 32, visit); };
        switch (form.bits) {
            case 4: of(std::integral_constant<int, 4>{}); break;
            case 5: of(std::integral_constant<int, 5>{}); break;
            case 6: of(std::integral_constant<int, 6>{}); break;
            default: of(std::integral_constant<int, 8>{}); break;
        }
        unrolled<rows * kVectors>([&](auto i) __attribute__((always_inline)) { S::store(acc + i * S::kWidth, total[i]); });
    }

    template <class Finish>
    static void multiply(const LinearBlock& block, Finish&& finish_panel) {
        const QuantizedForm& form = *block.form;
        const QuantizedScratch scratch(form, block.wide, block.rows, 1);
        if (form.has_minimums()) sum_groups(form, block, scratch.sums_of_x);
        for (std::int64_t panel = 0; panel < block.num_panels; ++panel) {
            const unsigned char* from = block.panels + panel * block.panel_stride;
            widen_groups<S>(form, from, scratch.numbers[0], 0, 0, form.num_groups);
            for (std::int64_t i = 0; panel + 1 == block.num_panels && i < kAfterBytes; i += kLineBytes) S::prefetch_l2(block.after + i);
            const auto by = [&](auto rows) {
                const auto own = form.halves() ? multiply_panel<rows(), true> : multiply_panel<rows(), false>;
                own(block, scratch.numbers[0], scratch.sums_of_x, from, block.sums);
            };
            if constexpr (kRowsInRegisters == 1) {
                by(std::integral_constant<int, 1>{});
            } else {
                switch (block.rows) {
                    case 1: by(std::integral_constant<int, 1>{}); break;
                    case 2: by(std::integral_constant<int, 2>{}); break;
                    case 3: by(std::integral_constant<int, 3>{}); break;
                    default: by(std::integral_constant<int, 4>{}); break;
                }
            }
            finish_panel(block, block.sums, panel);
        }
    }
};

template <class S, class Element, class Widen>
void multiply_codes(const LinearBlock& block) {
    if (block.form->exact && sizeof(Element) == 2) {
        if constexpr (QuantizedFew<S, Widen>::kIsThere && sizeof(Element) == 2) {
            if (block.rows <= kRowsInRegisters) return QuantizedFew<S, Widen>::multiply(block, finish_panel<S, Element>);
        }
        return QuantizedTiles<S, FloatProducts<S, Widen, true>>::multiply(block, finish_panel<S, Element>);
    }
    QuantizedTiles<S, FloatProducts<S, Widen, false>>::multiply(block, finish_panel<S, Element>);
}

template <class S, class Element, class Widen>
constexpr LinearKernel vector_quantized_kernel() {
    LinearKernel kernel = quantized_kernel(QuantizedTiles<S, FloatProducts<S, Widen, true>>::kRows, 4);
    kernel.stage = stage_counted<Element>;
    kernel.stage_sums = stage_sums<float>;
    kernel.multiply = multiply_codes<S, Element, Widen>;
    return kernel;
}

}  // namespace
}  // namespace quire
