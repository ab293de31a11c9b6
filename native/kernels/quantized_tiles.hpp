// Products of rows with panels of codes, by vector instructions: quantized_reference.py's order of operations, lanes being columns.
//
// For each two panels and each few hundred inputs: the codes become operands in the thread's scratch (quantized_widen.hpp), once for
// all rows of the block; then tiles of rows multiply by them. Two panels where a panel is one vector: an x, once loaded, is multiplied twice, so
// that products wait for no load. Several blocks of a few rows are computed at once, so that enough sums hide the latency: a block's sums depend on no
// other block.
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
    float* parts;               // sums of a group under way: [rows][panels][16], or as the matrix unit has them
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
    static Vec add_broadcast(const float* from, const Operand& b, Vec sum) { return add(broadcast(from), b, sum); }
    static Vec add(const Operand& a, const Operand& b, Vec sum) {
        if constexpr (exact) return S::fma(a, b, sum);
        return S::add(sum, S::mul(a, b));
    }
    static void widen(const QuantizedForm& form, const unsigned char* codes, const float* zeros, std::int64_t first, std::int64_t count, float* to) {
        Widen::floats(form, codes, zeros, first, count, to);
    }
    // Calls visit(b, v, j, low, high) for operands 2 j and 2 j + 1 of each of these blocks, vector v of the columns.
    template <class Visit>
    [[gnu::always_inline]] static void each_of(const QuantizedForm& form, const unsigned char* codes, const float* zeros, std::int64_t first, std::int64_t count, Visit&& visit) {
        Widen::template each_of<exact>(form, codes, zeros, first, count, visit);
    }
};

// Where the outputs of a panel, and of one to its right, go in bf16, to be rounded: whole lines where they have room.
template <class S, bool right>
struct PanelOutput {
    using Vec = typename S::Vec;
    const LinearBlock& block;
    unsigned char* to;
    int columns;  // of the last panel
    bool streams;
    Vec left_bias = S::zero(), right_bias = S::zero();

    PanelOutput(const LinearBlock& of, std::int64_t panel) : block(of), to(of.out + panel * 32) {
        const std::int64_t left = of.out_columns - (panel + right) * 16;
        columns = left < 16 ? static_cast<int>(left) : 16;
        streams = of.streams && right && columns == 16 && reinterpret_cast<std::uintptr_t>(to) % kLineBytes == 0;
        if (of.bias == nullptr) return;
        const auto* bias = reinterpret_cast<const bf16*>(of.bias) + panel * 16;
        if constexpr (right) left_bias = S::load(bias), bias += 16;
        (right ? right_bias : left_bias) = S::load_part(bias, columns);
    }
    void put(std::int64_t row, Vec left_total, Vec right_total) const {
        auto* at = reinterpret_cast<bf16*>(to + row * block.out_stride);
        if (block.bias != nullptr) {
            left_total = S::add(left_total, left_bias);
            if constexpr (right) right_total = S::add(right_total, right_bias);
        }
#if defined(__AVX512BF16__)
        constexpr int kSubnormal = 0x20;  // which vcvtne2ps2bf16 takes for zero, and S::store does not
        if (right && columns == 16 && (_mm512_fpclass_ps_mask(left_total, kSubnormal) | _mm512_fpclass_ps_mask(right_total, kSubnormal)) == 0) {
            const auto line = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(right_total, left_total));
            streams ? _mm512_stream_si512(reinterpret_cast<__m512i*>(at), line) : _mm512_storeu_si512(at, line);
            return;
        }
#endif
        if constexpr (right) S::store(at, left_total), at += 16;
        S::store_part(at, right ? right_total : left_total, columns);
    }
};

template <class S, class Products>
struct QuantizedTiles {
    using Vec = typename S::Vec;
    using Operand = typename Products::Operand;
    static constexpr int kVectors = 16 / S::kWidth;              // of a panel
    static constexpr int kPanels = kVectors == 1 ? kPanelsTogether : 1;
    static constexpr int kSums = S::kRegisters == 32 ? 24 : 12;  // vectors of sums at once
    static constexpr int kRows = kSums / (2 * kVectors * kPanels) > 0 ? kSums / (2 * kVectors * kPanels) : 1;  // of a tile at most
    static constexpr int kTaskRows = kRows * kPanels;            // LinearKernel's tile_rows: as many sums of one panel
    static constexpr std::int64_t kWidened = kWidenedForMany / kPanels * Products::kInputs;
    static constexpr std::int64_t kWidePanel = kWidened / Products::kInputs * 16;  // floats of the scratch

    struct Tile {
        const QuantizedForm* form;
        const QuantizedScratch* scratch;
        const float* x;            // first row's, at the first input that is widened
        std::int64_t stride;       // operands from a row to the next
        std::int64_t row;
        float* acc;                // the first row's, of the first panel
        std::int64_t acc_stride;   // floats from a panel to the next
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

    // Adds sums [rows][panels] of the block at `place` to those of its group, which are scaled at its end. Pointers of its own, since a store of
    // sums might change those of `tile`, for all that a compiler knows.
    template <int rows, int panels>
    [[gnu::always_inline]] static void add_sums(const Tile& tile, const Place& place, Vec (&sums)[rows * panels * kVectors]) {
        constexpr int vectors = panels * kVectors;
        float* parts = tile.scratch->parts + tile.row * panels * 16;
        if (!place.first()) unrolled<rows * vectors>([&](auto i) __attribute__((always_inline)) { sums[i] = S::add(S::load(parts + i * S::kWidth), sums[i]); });
        if (!place.last()) return unrolled<rows * vectors>([&](auto i) __attribute__((always_inline)) { S::store(parts + i * S::kWidth, sums[i]); });
        const std::int64_t num_groups = tile.form->num_groups, acc_stride = tile.acc_stride;
        const float* scales = tile.scratch->numbers[0].scales + place.group * 16;
        const float* minimums = tile.scratch->numbers[0].minimums + place.group * 16;
        const float* sums_of_x = tile.scratch->sums_of_x + tile.row * num_groups + place.group;
        float* acc = tile.acc;
        const auto scale = [&](auto has_minimums) __attribute__((always_inline)) {
            unrolled<rows * vectors>([&](auto i) __attribute__((always_inline)) {
                constexpr int r = i / vectors, p = i % vectors / kVectors, v = i % kVectors;
                const std::int64_t column = p * num_groups * 16 + v * S::kWidth;
                float* own = acc + p * acc_stride + r * 16 + v * S::kWidth;
                Vec total = S::add(S::load(own), S::mul(S::load(scales + column), sums[i]));
                if constexpr (has_minimums()) total = S::sub(total, S::mul(S::load(minimums + column), S::broadcast(sums_of_x[r * num_groups])));
                S::store(own, total);
            });
        };
        tile.form->has_minimums() ? scale(std::true_type{}) : scale(std::false_type{});
    }

    // `count` blocks of `inputs` from `place` on (`local` of what is widened), for `rows` rows and `panels` panels.
    template <int rows, int panels, int count, int inputs>
    [[gnu::always_inline]] static void blocks(const Tile& tile, Place& place, std::int64_t local) {
        constexpr int operands = inputs / Products::kInputs, vectors = panels * kVectors;
        Vec even[rows * count * vectors], odd[rows * count * vectors];
        unrolled<rows * count * vectors>([&](auto i) __attribute__((always_inline)) { even[i] = odd[i] = S::zero(); });
        const float* wide = tile.scratch->wide[0] + local * operands * 16;
        const float* x = tile.x + local * operands;
        for (int k = 0; k < operands; k += 2) {
            unrolled<count>([&](auto b) __attribute__((always_inline)) {
                const float* from = wide + (b * operands + k) * 16;
                Operand low[vectors], high[vectors];
                unrolled<vectors>([&](auto v) __attribute__((always_inline)) {
                    const float* own = from + v / kVectors * kWidePanel + v % kVectors * S::kWidth;
                    low[v] = Products::load(own);
                    high[v] = Products::load(own + 16);
                });
                unrolled<rows>([&](auto r) __attribute__((always_inline)) {
                    const float* own = x + r * tile.stride + b * operands + k;
                    const Operand a = Products::broadcast(own), c = Products::broadcast(own + 1);
                    unrolled<vectors>([&](auto v) __attribute__((always_inline)) {
                        constexpr int i = (b * rows + r) * vectors + v;
                        even[i] = Products::add(a, low[v], even[i]);
                        odd[i] = Products::add(c, high[v], odd[i]);
                    });
                });
            });
        }
        unrolled<count>([&](auto b) __attribute__((always_inline)) {
            Vec sums[rows * vectors];
            unrolled<rows * vectors>([&](auto i) __attribute__((always_inline)) { sums[i] = S::add(even[b * rows * vectors + i], odd[b * rows * vectors + i]); });
            add_sums<rows, panels>(tile, place, sums);
            place.next();
        });
    }

    template <int rows, int panels, int inputs>
    static void range(const Tile& tile, Place place, std::int64_t num_blocks) {
        constexpr int fit = kSums / (2 * kVectors * panels * rows), together = fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
        std::int64_t b = 0;
        for (; b + together <= num_blocks; b += together) blocks<rows, panels, together, inputs>(tile, place, b);
        for (; b < num_blocks; ++b) blocks<rows, panels, 1, inputs>(tile, place, b);
    }

    // Bytes that are widened next, of each panel: the tiles before ask for them in equal parts.
    struct Ahead {
        const unsigned char* from[kPanels];
        std::int64_t bytes;

        void ask(std::int64_t part, std::int64_t parts) const {
            for (const unsigned char* panel : from) {
                for (std::int64_t i = bytes * part / parts / kLineBytes; i < bytes * (part + 1) / parts / kLineBytes; ++i) S::prefetch(panel + i * kLineBytes);
            }
        }
    };

    // All of the rows, in tiles of nearly equal heights. finish(row, rows): called with the rows of each.
    template <int panels, int inputs, class Finish>
    static void tiles(Tile tile, std::int64_t rows, Place place, std::int64_t num_blocks, const Ahead& ahead, Finish&& finish) {
        const std::int64_t num_tiles = (rows + kRows - 1) / kRows;
        const float* x = tile.x;
        float* acc = tile.acc;
        for (std::int64_t t = 0; t < num_tiles; ++t) {
            ahead.ask(t, num_tiles);
            tile.row = rows * t / num_tiles;
            tile.x = x + tile.row * tile.stride;
            tile.acc = acc + tile.row * 16;
            const std::int64_t height = rows * (t + 1) / num_tiles - tile.row;
            with_rows<1, kRows>(height, [&](auto of) { range<of(), panels, inputs>(tile, place, num_blocks); });
            finish(tile.row, height);
        }
    }

    template <int inputs, class Finish>
    static void multiply_by(const LinearBlock& block, Finish finish) {
        const QuantizedForm& form = *block.form;
        const std::int64_t most = block.rows <= kTaskRows ? kWidenedForFew : kWidened;
        const QuantizedScratch scratch(form, block.wide, block.rows, block.num_panels < kPanels ? block.num_panels : kPanels);
        if (form.has_minimums()) sum_groups(form, block, scratch.sums_of_x);
        for (std::int64_t panel = 0; panel < block.num_panels; panel += kPanels) {
            const std::int64_t panels = block.num_panels - panel < kPanels ? block.num_panels - panel : kPanels;
            const unsigned char* from = block.panels + panel * block.panel_stride;
            const unsigned char* next = panel + kPanels < block.num_panels ? from + kPanels * block.panel_stride : block.after;
            for (std::int64_t p = 0; p < panels; ++p) widen_groups<S>(form, from + p * block.panel_stride, scratch.numbers[0], p, 0, form.num_groups);
            std::memset(block.sums, 0, static_cast<std::size_t>(panels * block.rows * 16 * 4));
            for (std::int64_t k = 0; k < form.depth; k += most) {
                const std::int64_t count = form.depth - k < most ? form.depth - k : most;
                const bool last = k + count == form.depth;
                const std::int64_t range_bytes = most / 32 * form.block_bytes();
                Ahead ahead{{}, last ? form.codes_offset + range_bytes : range_bytes};
                for (std::int64_t p = 0; p < panels; ++p) {
                    const unsigned char* codes = from + p * block.panel_stride + form.codes_offset;
                    Products::widen(form, codes, scratch.numbers[0].zeros + p * form.num_groups * 16, k / 32, count / 32, scratch.wide[0] + p * kWidePanel);
                }
                for (std::int64_t p = 0; p < kPanels; ++p) {
                    ahead.from[p] = last ? next + p * block.panel_stride : from + (p < panels ? p : 0) * block.panel_stride + form.codes_offset + (k + most) / 32 * form.block_bytes();
                }
                const Tile tile{&form, &scratch, reinterpret_cast<const float*>(block.activations) + k / Products::kInputs, block.activation_stride / 4, 0, block.sums, block.rows * 16};
                const std::int64_t each = form.group / inputs, index = k / inputs;
                const Place place{index / each, index % each, each};
                const auto finish_rows = [&](std::int64_t row, std::int64_t rows) {
                    if (last) finish(block, block.sums, panel, panels, row, rows);
                };
                panels == kPanels ? tiles<kPanels, inputs>(tile, block.rows, place, count / inputs, ahead, finish_rows) : tiles<1, inputs>(tile, block.rows, place, count / inputs, ahead, finish_rows);
            }
        }
    }

    template <class Finish>
    static void multiply(const LinearBlock& block, Finish finish) {
        block.form->halves() ? multiply_by<16>(block, finish) : multiply_by<32>(block, finish);
    }
};

// Rows [row, row + rows) of sums [panels][block.rows][16] of panels from `panel` on to the output.
template <class S, class Element>
void finish_panels(const LinearBlock& block, const float* sums, std::int64_t panel, std::int64_t panels, std::int64_t row, std::int64_t rows) {
    for (std::int64_t p = 0; p < panels; ++p) {
        const std::int64_t first = (panel + p) * 16, left = block.out_columns - first;
        const auto* bias = block.bias == nullptr ? nullptr : reinterpret_cast<const Element*>(block.bias) + first;
        for (std::int64_t r = row; r < row + rows; ++r) {
            finish<S, Element>(sums + (p * block.rows + r) * 16, bias, block.out + r * block.out_stride + first * static_cast<std::int64_t>(sizeof(Element)), left < 16 ? left : 16);
        }
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
