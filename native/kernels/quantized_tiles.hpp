// Products of rows with panels of codes, by vector instructions: quantized_reference.py's order of operations, lanes being columns.
//
// For each panel and each few hundred inputs: the codes become float32 in the thread's scratch (quantized_widen.hpp), once for
// all rows of the block; then tiles of rows multiply by them. Several blocks of a few rows are computed at once, so
// that enough sums hide the latency: a block's sums depend on no other block.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/linear_tiles.hpp"
#include "kernels/quantized_rows.hpp"
#include "kernels/quantized_widen.hpp"

namespace quire {
namespace {

// Scales, zeros and minimums of the groups of kPanelsTogether panels: [panels][groups][16].
struct GroupNumbers {
    float *scales, *zeros, *minimums;
};

// A block's scratch, in float32 numbers.
struct QuantizedScratch {
    float* wide[kWideBuffers];  // [panels][inputs][16], or pairs of them
    GroupNumbers numbers[kWideBuffers];
    float* parts;               // [panels][rows][16]: sums of a group under way
    float* tiles;               // [2][4 groups][4][256]
    float* sums_of_x;           // [rows][groups]

    QuantizedScratch(const QuantizedForm& form, float* from, std::int64_t rows, std::int64_t panels) {
        const auto take = [&](std::int64_t count) {
            float* at = from;
            from += (count + 15) / 16 * 16;
            return at;
        };
        for (float*& buffer : wide) buffer = take(kPanelsTogether * kWidenedForTiles / 2 * 16 + kApart);
        for (GroupNumbers& own : numbers) {
            for (float** of : {&own.scales, &own.zeros, &own.minimums}) *of = take(kPanelsTogether * form.num_groups * 16);
        }
        parts = take(panels * rows * 16);
        tiles = take(kWaitingTiles * 256);
        sums_of_x = take(rows * form.num_groups);
    }
};

// Of a group's numbers, [count][16], as floats.
template <class S>
void widen_numbers(Number number, const unsigned char* from, std::int64_t count, float* to) {
    const auto load = [&](const auto* values) {
        for (std::int64_t i = 0; i < count; i += S::kWidth) S::store(to + i, S::load(values + i));
    };
    switch (number) {
        case Number::f32: return load(reinterpret_cast<const float*>(from));
        case Number::bf16: return load(reinterpret_cast<const bf16*>(from));
        case Number::f16: return load(reinterpret_cast<const f16*>(from));
        case Number::u8:
            for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
            return;
        case Number::i8:
            for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(static_cast<std::int8_t>(from[i]));
            return;
        case Number::none: return;
    }
}

// Of groups [first, end).
template <class S>
void widen_factor(const QuantizedFactor& factor, const unsigned char* panel, std::int64_t first, std::int64_t end, float* to) {
    widen_numbers<S>(factor.fine, panel + factor.fine_offset + first * 16 * number_bytes(factor.fine), (end - first) * 16, to + first * 16);
    if (factor.coarse == Number::none) return;
    for (std::int64_t group = first; group < end;) {
        const std::int64_t shared = group / factor.ratio, stop = (shared + 1) * factor.ratio < end ? (shared + 1) * factor.ratio : end;
        float coarse[16];
        widen_numbers<S>(factor.coarse, panel + factor.coarse_offset + shared * 16 * number_bytes(factor.coarse), 16, coarse);
        for (; group < stop; ++group) {
            for (int i = 0; i < 16; i += S::kWidth) S::store(to + group * 16 + i, S::mul(S::load(to + group * 16 + i), S::load(coarse + i)));
        }
    }
}

// Scales, zeros and minimums of groups [first, end) of a panel into their place for panel `index` of those together.
template <class S>
void widen_groups(const QuantizedForm& form, const unsigned char* panel, const GroupNumbers& numbers, std::int64_t index, std::int64_t first, std::int64_t end) {
    const std::int64_t at = index * form.num_groups * 16;
    widen_factor<S>(form.scales, panel, first, end, numbers.scales + at);
    if (form.has_minimums()) widen_factor<S>(form.minimums, panel, first, end, numbers.minimums + at);
    float* zeros = numbers.zeros + at;
    if (form.zeros == Number::none) {
        for (std::int64_t i = first * 16; i < end * 16; ++i) zeros[i] = taken_off(form, form.zero);
    } else {
        widen_numbers<S>(form.zeros, panel + form.zeros_offset + first * 16 * number_bytes(form.zeros), (end - first) * 16, zeros + first * 16);
        for (std::int64_t i = first * 16; i < end * 16; ++i) zeros[i] = taken_off(form, zeros[i]);
    }
}

// What tiles multiply: a vector of values of one input, or of pairs of inputs, by that of x, broadcast. Operands of 32 bits follow each other; the
// first, third, ... belong to the even inputs of a block, the others to the odd ones.

// exact: the product of an x and a value is.
template <class S, class Widen, bool exact>
struct FloatProducts {
    using Vec = typename S::Vec;
    using Operand = Vec;
    static constexpr int kInputs = 1;  // of an operand

    static Operand load(const float* from) { return S::load(from); }
    static Operand broadcast(const float* from) { return S::broadcast(*from); }
    static Vec add(const Operand& a, const Operand& b, Vec sum) {
        if constexpr (exact) return S::fma(a, b, sum);
        return S::add(sum, S::mul(a, b));
    }
    static void widen(const QuantizedForm& form, const unsigned char* codes, const float* zeros, std::int64_t first, std::int64_t count, float* to) {
        Widen::floats(form, codes, zeros, first, count, to);
    }
};

template <class S, class Products>
struct QuantizedTiles {
    using Vec = typename S::Vec;
    using Operand = typename Products::Operand;
    static constexpr int kVectors = 16 / S::kWidth;
    static constexpr int kSums = S::kRegisters == 32 ? 24 : 12;         // vectors of sums at once
    static constexpr int kRows = kSums / (2 * kVectors) > 0 ? kSums / (2 * kVectors) : 1;  // of a tile at most

    struct Tile {
        const QuantizedForm* form;
        const QuantizedScratch* scratch;
        const float* x;       // first row's, at the first input that is widened
        std::int64_t stride;  // operands from a row to the next
        const float* wide;
        std::int64_t row;
        float* acc;           // the first row's
    };

    // Where in its group a block of sums is.
    struct Place {
        std::int64_t group, within, each;  // each: blocks of a group

        bool first() const { return within == 0; }
        bool last() const { return within + 1 == each; }
        void next() {
            if (++within == each) within = 0, ++group;
        }
    };

    // `count` blocks of `inputs` from `place` on (`local` of what is widened), for `rows` rows.
    template <int rows, int count, int inputs>
    [[gnu::always_inline]] static void blocks(const Tile& tile, Place& place, std::int64_t local) {
        constexpr int operands = inputs / Products::kInputs;
        Vec even[rows * count * kVectors], odd[rows * count * kVectors];
        unrolled<rows * count * kVectors>([&](auto i) __attribute__((always_inline)) { even[i] = odd[i] = S::zero(); });
        const float* wide = tile.wide + local * operands * 16;
        const float* x = tile.x + local * operands;
        for (int k = 0; k < operands; k += 2) {
            unrolled<count>([&](auto b) __attribute__((always_inline)) {
                const float* from = wide + (b * operands + k) * 16;
                Operand low[kVectors], high[kVectors];
                unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
                    low[v] = Products::load(from + v * S::kWidth);
                    high[v] = Products::load(from + 16 + v * S::kWidth);
                });
                unrolled<rows>([&](auto r) __attribute__((always_inline)) {
                    const float* own = x + r * tile.stride + b * operands + k;
                    const Operand a = Products::broadcast(own), c = Products::broadcast(own + 1);
                    unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
                        constexpr int i = (b * rows + r) * kVectors + v;
                        even[i] = Products::add(a, low[v], even[i]);
                        odd[i] = Products::add(c, high[v], odd[i]);
                    });
                });
            });
        }
        const QuantizedForm& form = *tile.form;
        unrolled<count>([&](auto b) __attribute__((always_inline)) {
            const float* scales = tile.scratch->numbers[0].scales + place.group * 16;
            const float* minimums = tile.scratch->numbers[0].minimums + place.group * 16;
            unrolled<rows * kVectors>([&](auto j) __attribute__((always_inline)) {
                constexpr int r = j / kVectors, v = j % kVectors, i = b * rows * kVectors + j;
                Vec sum = S::add(even[i], odd[i]);
                float* part = tile.scratch->parts + (tile.row + r) * 16 + v * S::kWidth;
                if (!place.first()) sum = S::add(S::load(part), sum);
                if (!place.last()) return S::store(part, sum);
                float* acc = tile.acc + r * 16 + v * S::kWidth;
                Vec total = S::add(S::load(acc), S::mul(S::load(scales + v * S::kWidth), sum));
                if (form.has_minimums()) {
                    const Vec of_x = S::broadcast(tile.scratch->sums_of_x[(tile.row + r) * form.num_groups + place.group]);
                    total = S::sub(total, S::mul(S::load(minimums + v * S::kWidth), of_x));
                }
                S::store(acc, total);
            });
            place.next();
        });
    }

    template <int rows, int inputs>
    static void range(const Tile& tile, Place place, std::int64_t num_blocks) {
        constexpr int together = kSums / (2 * kVectors * rows) >= 4 ? 4 : kSums / (2 * kVectors * rows) >= 2 ? 2 : 1;
        std::int64_t b = 0;
        for (; b + together <= num_blocks; b += together) blocks<rows, together, inputs>(tile, place, b);
        for (; b < num_blocks; ++b) blocks<rows, 1, inputs>(tile, place, b);
    }

    // All of the rows, in tiles of a few heights.
    template <int inputs, int most = kRows>
    static void tiles(Tile tile, std::int64_t rows, Place place, std::int64_t num_blocks) {
        for (; rows >= most; rows -= most) {
            range<most, inputs>(tile, place, num_blocks);
            tile.x += most * tile.stride;
            tile.row += most;
            tile.acc += most * 16;
        }
        if constexpr (most > 1) {
            if (rows > 0) tiles<inputs, (most > 6 ? 6 : most > 4 ? 4 : most - 1)>(tile, rows, place, num_blocks);
        }
    }

    using Finish = void (*)(const LinearBlock& block, const float* acc, std::int64_t panel);

    template <int inputs>
    static void multiply_by(const LinearBlock& block, Finish finish_panel) {
        const QuantizedForm& form = *block.form;
        const std::int64_t most = block.rows <= kRows ? kWidenedForFew : kWidenedForMany, padded_rows = (block.rows + kRows - 1) / kRows * kRows;
        const QuantizedScratch scratch(form, block.wide, padded_rows, 1);
        if (form.has_minimums()) sum_groups(form, block, scratch.sums_of_x);
        for (std::int64_t panel = 0; panel < block.num_panels; ++panel) {
            const unsigned char* from = block.panels + panel * block.panel_stride;
            widen_groups<S>(form, from, scratch.numbers[0], 0, 0, form.num_groups);
            float* acc = block.sums + panel * padded_rows * 16;
            std::memset(acc, 0, static_cast<std::size_t>(block.rows * 16 * 4));
            for (std::int64_t k = 0; k < form.depth; k += most) {
                const std::int64_t count = form.depth - k < most ? form.depth - k : most;
                Products::widen(form, from + form.codes_offset, scratch.numbers[0].zeros, k / 32, count / 32, scratch.wide[0]);
                const Tile tile{&form, &scratch, reinterpret_cast<const float*>(block.activations) + k / Products::kInputs, block.activation_stride / 4, scratch.wide[0], 0, acc};
                const std::int64_t each = form.group / inputs, index = k / inputs;
                tiles<inputs>(tile, block.rows, Place{index / each, index % each, each}, count / inputs);
            }
            finish_panel(block, acc, panel);
        }
    }

    static void multiply(const LinearBlock& block, Finish finish_panel) {
        block.form->halves() ? multiply_by<16>(block, finish_panel) : multiply_by<32>(block, finish_panel);
    }
};

// [rows][16] of a panel to the output.
template <class S, class Element>
void finish_panel(const LinearBlock& block, const float* acc, std::int64_t panel) {
    const std::int64_t first = panel * 16, left = block.out_columns - first;
    if (left <= 0) return;
    const auto* bias = block.bias == nullptr ? nullptr : reinterpret_cast<const Element*>(block.bias) + first;
    for (std::int64_t row = 0; row < block.rows; ++row) {
        finish<S, Element>(acc + row * 16, bias, block.out + row * block.out_stride + first * static_cast<std::int64_t>(sizeof(Element)), left < 16 ? left : 16);
    }
}

constexpr LinearKernel quantized_kernel(int tile_rows, std::int64_t staged_bytes) {
    LinearKernel kernel{};
    kernel.columns = 16;
    kernel.depth = 32;
    kernel.tile_rows = tile_rows;
    kernel.many_panels = 4;
    kernel.pass_rows = 240;
    kernel.pass_bytes = kAnyBytes;
    kernel.few_range = kernel.many_range = kAnyDepth;
    kernel.staged_bytes = staged_bytes;
    return kernel;
}

}  // namespace
}  // namespace quire
