// Products of rows with panels of codes, by vector instructions: reference.py's order of operations, lanes being columns.
//
// For each panel and each few hundred inputs: the codes become float32 in the thread's scratch (quantized_widen.hpp), once for
// all rows of the block; then tiles of rows multiply by them. Few rows and many differ in nothing else. Several blocks of a few
// rows are under way at once, so that enough sums hide the latency: a block's sums depend on no other block.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/linear_tiles.hpp"
#include "kernels/quantized_widen.hpp"

namespace quire {
namespace {

constexpr float kSmallest = 0x1p-100f;  // what an x has to be, to count (quantized.hpp, U2)

inline float counted(float x) { return x < kSmallest && x > -kSmallest ? 0.0f : x; }

// Rows of activations as these kernels take them: float32; behind them (at the next line) are the sums of blocks that minimums take.
template <class From>
void stage_counted(const void* row, std::int64_t count, void* staged, std::int64_t padded) {
    const auto* from = static_cast<const From*>(row);
    auto* to = static_cast<float*>(staged);
    for (std::int64_t i = 0; i < count; ++i) to[i] = counted(to_float(from[i]));
    for (std::int64_t i = count; i < padded; ++i) to[i] = 0.0f;
}

template <class Staged>
float sum_of_block(const Staged* x, int inputs) {
    float even = 0.0f, odd = 0.0f;
    for (int k = 0; k < inputs; k += 2) even += to_float(x[k]), odd += to_float(x[k + 1]);
    return even + odd;
}

// Sums of each 32 inputs, then of each 16, of a staged row: [padded / 32], [padded / 16].
template <class Staged>
void stage_sums(void* staged, std::int64_t padded, float* sums) {
    const auto* x = static_cast<const Staged*>(staged);
    for (const int block : {32, 16}) {
        for (std::int64_t start = 0; start < padded; start += block) *sums++ = sum_of_block(x + start, block);
    }
}

// A block's scratch, in float32 numbers.
struct QuantizedScratch {
    float* wide;      // [panels][inputs][16], or pairs of them
    float* scales;    // [panels][groups][16]
    float* zeros;
    float* minimums;
    float* parts;     // [panels][rows][16]: sums of a group under way
    float* sums_of_x; // [rows][groups]
    float* tiles;     // [2][4][256]

    QuantizedScratch(const QuantizedForm& form, float* from, std::int64_t rows) {
        const auto take = [&](std::int64_t count) {
            float* at = from;
            from += (count + 15) / 16 * 16;
            return at;
        };
        wide = take(kPanelsTogether * kWidenedForTiles / 2 * 16);
        scales = take(kPanelsTogether * form.num_groups * 16);
        zeros = take(kPanelsTogether * form.num_groups * 16);
        minimums = take(kPanelsTogether * form.num_groups * 16);
        parts = take(kPanelsTogether * rows * 16);
        tiles = take(8 * 256);
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

template <class S>
void widen_factor(const QuantizedFactor& factor, const unsigned char* panel, std::int64_t groups, float* to) {
    widen_numbers<S>(factor.fine, panel + factor.fine_offset, groups * 16, to);
    if (factor.coarse == Number::none) return;
    for (std::int64_t group = 0; group < groups; group += factor.ratio) {
        float coarse[16];
        widen_numbers<S>(factor.coarse, panel + factor.coarse_offset + group / factor.ratio * 16 * number_bytes(factor.coarse), 16, coarse);
        const std::int64_t end = group + factor.ratio < groups ? group + factor.ratio : groups;
        for (std::int64_t g = group; g < end; ++g) {
            for (int i = 0; i < 16; i += S::kWidth) S::store(to + g * 16 + i, S::mul(S::load(to + g * 16 + i), S::load(coarse + i)));
        }
    }
}

// Scales, zeros and minimums of a panel into the scratch's place for panel `index` of those together.
template <class S>
void widen_groups(const QuantizedForm& form, const unsigned char* panel, const QuantizedScratch& scratch, std::int64_t index) {
    const std::int64_t at = index * form.num_groups * 16;
    widen_factor<S>(form.scales, panel, form.num_groups, scratch.scales + at);
    if (form.has_minimums()) widen_factor<S>(form.minimums, panel, form.num_groups, scratch.minimums + at);
    float* zeros = scratch.zeros + at;
    if (form.zeros == Number::none) {
        for (std::int64_t i = 0; i < form.num_groups * 16; ++i) zeros[i] = taken_off(form, form.zero);
    } else {
        widen_numbers<S>(form.zeros, panel + form.zeros_offset, form.num_groups * 16, zeros);
        for (std::int64_t i = 0; i < form.num_groups * 16; ++i) zeros[i] = taken_off(form, zeros[i]);
    }
}

// Sums of x over the groups, of what was staged behind each row.
inline void sum_groups(const QuantizedForm& form, const LinearBlock& block, float* to) {
    const std::int64_t all = form.depth / 32, each = form.halves() ? 1 : form.group / 32;
    for (std::int64_t row = 0; row < block.rows; ++row) {
        const auto* sums = reinterpret_cast<const float*>(block.activations + row * block.activation_stride + block.sums_of_x_offset);
        if (form.halves()) sums += all;
        for (std::int64_t group = 0; group < form.num_groups; ++group) {
            float total = sums[group * each];
            for (std::int64_t b = 1; b < each; ++b) total += sums[group * each + b];
            to[row * form.num_groups + group] = total;
        }
    }
}

// Where in its group a block of sums is.
struct GroupPlace {
    std::int64_t group;
    bool first, last;

    GroupPlace(const QuantizedForm& form, std::int64_t index, int inputs) {
        const std::int64_t each = form.group / inputs;
        group = index / each;
        first = index % each == 0;
        last = index % each == each - 1;
    }
};

// Products, for elements of any type.
template <class S, class Widen>
struct QuantizedTiles {
    using Vec = typename S::Vec;
    static constexpr int kVectors = 16 / S::kWidth;
    static constexpr int kSums = S::kRegisters == 32 ? 24 : 12;         // vectors of sums at once
    static constexpr int kRows = kSums / (2 * kVectors) > 0 ? kSums / (2 * kVectors) : 1;  // of a tile at most

    template <bool exact>
    [[gnu::always_inline]] static Vec add_product(Vec a, Vec b, Vec sum) {
        if constexpr (exact) return S::fma(a, b, sum);
        return S::add(sum, S::mul(a, b));
    }

    struct Tile {
        const QuantizedForm* form;
        const QuantizedScratch* scratch;
        const float* x;       // first row's, at the first input that is widened
        std::int64_t stride;  // floats from a row to the next
        const float* wide;
        std::int64_t row, panel;  // panel: of those together
        float* acc;           // the first row's
    };

    // `count` blocks of `inputs` from block `index` on (of the panel; `local` of what is widened), for `rows` rows.
    template <int rows, int count, int inputs, bool exact>
    [[gnu::always_inline]] static void blocks(const Tile& tile, std::int64_t index, std::int64_t local) {
        Vec even[rows * count * kVectors], odd[rows * count * kVectors];
        unrolled<rows * count * kVectors>([&](auto i) __attribute__((always_inline)) { even[i] = odd[i] = S::zero(); });
        const float* wide = tile.wide + local * inputs * 16;
        const float* x = tile.x + local * inputs;
        for (int k = 0; k < inputs; k += 2) {
            unrolled<count>([&](auto b) __attribute__((always_inline)) {
                const float* from = wide + (b * inputs + k) * 16;
                Vec low[kVectors], high[kVectors];
                unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
                    low[v] = S::load(from + v * S::kWidth);
                    high[v] = S::load(from + 16 + v * S::kWidth);
                });
                unrolled<rows>([&](auto r) __attribute__((always_inline)) {
                    const float* own = x + r * tile.stride + b * inputs + k;
                    const Vec a = S::broadcast(own[0]), c = S::broadcast(own[1]);
                    unrolled<kVectors>([&](auto v) __attribute__((always_inline)) {
                        constexpr int i = (b * rows + r) * kVectors + v;
                        even[i] = add_product<exact>(a, low[v], even[i]);
                        odd[i] = add_product<exact>(c, high[v], odd[i]);
                    });
                });
            });
        }
        const QuantizedForm& form = *tile.form;
        unrolled<count>([&](auto b) __attribute__((always_inline)) {
            const GroupPlace place(form, index + b, inputs);
            const float* scales = tile.scratch->scales + (tile.panel * form.num_groups + place.group) * 16;
            const float* minimums = tile.scratch->minimums + (tile.panel * form.num_groups + place.group) * 16;
            unrolled<rows * kVectors>([&](auto j) __attribute__((always_inline)) {
                constexpr int r = j / kVectors, v = j % kVectors, i = b * rows * kVectors + j;
                Vec sum = S::add(even[i], odd[i]);
                float* part = tile.scratch->parts + (tile.row + r) * 16 + v * S::kWidth;
                if (!place.first) sum = S::add(S::load(part), sum);
                if (!place.last) return S::store(part, sum);
                float* acc = tile.acc + r * 16 + v * S::kWidth;
                Vec total = S::add(S::load(acc), S::mul(S::load(scales + v * S::kWidth), sum));
                if (form.has_minimums()) {
                    const Vec of_x = S::broadcast(tile.scratch->sums_of_x[(tile.row + r) * form.num_groups + place.group]);
                    total = S::sub(total, S::mul(S::load(minimums + v * S::kWidth), of_x));
                }
                S::store(acc, total);
            });
        });
    }

    template <int rows, int inputs, bool exact>
    static void range(const Tile& tile, std::int64_t index, std::int64_t num_blocks) {
        constexpr int together = kSums / (2 * kVectors * rows) >= 4 ? 4 : kSums / (2 * kVectors * rows) >= 2 ? 2 : 1;
        std::int64_t b = 0;
        for (; b + together <= num_blocks; b += together) blocks<rows, together, inputs, exact>(tile, index + b, b);
        for (; b < num_blocks; ++b) blocks<rows, 1, inputs, exact>(tile, index + b, b);
    }

    // All of the rows, in tiles of a few heights.
    template <int inputs, bool exact, int most = kRows>
    static void tiles(Tile tile, std::int64_t rows, std::int64_t index, std::int64_t num_blocks) {
        for (; rows >= most; rows -= most) {
            range<most, inputs, exact>(tile, index, num_blocks);
            tile.x += most * tile.stride;
            tile.row += most;
            tile.acc += most * 16;
        }
        if constexpr (most > 1) {
            if (rows > 0) tiles<inputs, exact, (most > 6 ? 6 : most > 4 ? 4 : most - 1)>(tile, rows, index, num_blocks);
        }
    }

    using Finish = void (*)(const LinearBlock& block, const float* acc, std::int64_t panel);

    template <int inputs, bool exact>
    static void multiply_by(const LinearBlock& block, Finish finish_panel) {
        const QuantizedForm& form = *block.form;
        const std::int64_t most = block.rows <= kRows ? kWidenedForFew : kWidenedForMany, padded_rows = (block.rows + kRows - 1) / kRows * kRows;
        const QuantizedScratch scratch(form, block.wide, padded_rows);
        if (form.has_minimums()) sum_groups(form, block, scratch.sums_of_x);
        for (std::int64_t panel = 0; panel < block.num_panels; ++panel) {
            const unsigned char* from = block.panels + panel * block.panel_stride;
            widen_groups<S>(form, from, scratch, 0);
            float* acc = block.sums + panel * padded_rows * 16;
            std::memset(acc, 0, static_cast<std::size_t>(block.rows * 16 * 4));
            for (std::int64_t k = 0; k < form.depth; k += most) {
                const std::int64_t count = form.depth - k < most ? form.depth - k : most;
                Widen::floats(form, from + form.codes_offset, scratch.zeros, k / 32, count / 32, scratch.wide);
                const Tile tile{&form, &scratch, reinterpret_cast<const float*>(block.activations) + k, block.activation_stride / 4, scratch.wide, 0, 0, acc};
                tiles<inputs, exact>(tile, block.rows, k / inputs, count / inputs);
            }
            finish_panel(block, acc, panel);
        }
    }

    // exact: the product of an x and a value is.
    static void multiply(const LinearBlock& block, bool exact, Finish finish_panel) {
        const bool halves = block.form->halves();
        if (exact) return halves ? multiply_by<16, true>(block, finish_panel) : multiply_by<32, true>(block, finish_panel);
        halves ? multiply_by<16, false>(block, finish_panel) : multiply_by<32, false>(block, finish_panel);
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

template <class S, class Element, class Widen>
void multiply_codes(const LinearBlock& block) {
    QuantizedTiles<S, Widen>::multiply(block, block.form->exact && sizeof(Element) == 2, finish_panel<S, Element>);
}

constexpr LinearKernel quantized_kernel(int tile_rows, std::int64_t staged_bytes) {
    LinearKernel kernel{};
    kernel.columns = 16;
    kernel.depth = 32;
    kernel.tile_rows = tile_rows;
    kernel.pass_rows = 240;
    kernel.pass_bytes = kAnyBytes;
    kernel.few_range = kernel.many_range = kAnyDepth;
    kernel.staged_bytes = staged_bytes;
    return kernel;
}

template <class S, class Element, class Widen>
constexpr LinearKernel vector_quantized_kernel() {
    LinearKernel kernel = quantized_kernel(QuantizedTiles<S, Widen>::kRows, 4);
    kernel.stage = stage_counted<Element>;
    kernel.stage_sums = stage_sums<float>;
    kernel.multiply = multiply_codes<S, Element, Widen>;
    return kernel;
}

}  // namespace
}  // namespace quire
