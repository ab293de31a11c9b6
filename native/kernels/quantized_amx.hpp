// Products of bf16 rows with panels of codes on AMX tiles: tdpbf16ps sums a block of 32 inputs as reference.py says, even and odd
// ones apart, and adds the sum to its tile, which holds a group's sum.
//
// Codes become bf16 pairs in the thread's scratch, of two panels at a time; two tiles of rows by two panels are four sums. Where a
// group ends they are stored, scaled and added by vector instructions.
#pragma once

#include "kernels/amx.hpp"
#include "kernels/quantized_tiles.hpp"

namespace quire {
namespace {

// Rows as they are, but for what does not count.
inline void stage_counted_bf16(const void* row, std::int64_t count, void* staged, std::int64_t padded) {
    constexpr std::uint16_t kSmallestBits = (127 - 100) << 7;
    const auto* from = static_cast<const std::uint16_t*>(row);
    auto* to = static_cast<std::uint16_t*>(staged);
    for (std::int64_t i = 0; i < count; ++i) to[i] = (from[i] & 0x7fff) < kSmallestBits ? std::uint16_t{0} : from[i];
    std::memset(to + count, 0, static_cast<std::size_t>(padded - count) * 2);
}

template <class S, class Unit, class Widen>
struct QuantizedAmx {
    using Vec = typename S::Vec;
    static constexpr int kTileRows = 16;

    // Tiles 0-3: sums of rows (upper, upper, lower, lower) by panels (left, right, left, right); 4-5 rows, 6-7 panels.
    static TileConfig shapes(int upper, int lower, int inputs) {
        TileConfig config;
        config.tile(0, upper, 64).tile(1, upper, 64).tile(2, lower, 64).tile(3, lower, 64);
        return config.tile(4, upper, inputs * 2).tile(5, lower, inputs * 2).tile(6, inputs / 2, 64).tile(7, inputs / 2, 64);
    }

    struct Square {
        const QuantizedForm* form;
        const QuantizedScratch* scratch;
        const unsigned char* x;  // the first row's, at the first input that is widened
        std::int64_t stride;     // bytes
        const bf16* wide;        // [2][most inputs][16]
        std::int64_t wide_stride;
        std::int64_t row, rows;
        float* acc;              // [2][padded rows][16], at the first row
        float* parts;            // likewise
        std::int64_t panel_stride;  // of those, floats
    };

    template <int tile, bool load>
    static void begin(Unit& unit, const float* part) {
        if constexpr (load) {
            unit.template load<tile>(part, 64);
        } else {
            unit.template zero<tile>();
        }
    }
    template <bool lower, bool right, bool load>
    static void begin_all(Unit& unit, const Square& square) {
        const float* part = square.parts;
        begin<0, load>(unit, part);
        if constexpr (right) begin<1, load>(unit, part + square.panel_stride);
        if constexpr (lower) begin<2, load>(unit, part + kTileRows * 16);
        if constexpr (lower && right) begin<3, load>(unit, part + square.panel_stride + kTileRows * 16);
    }
    template <bool lower, bool right>
    static void store_all(Unit& unit, float* upper_left, std::int64_t panel, std::int64_t down) {
        unit.template store<0>(upper_left, 64);
        if constexpr (right) unit.template store<1>(upper_left + panel, 64);
        if constexpr (lower) unit.template store<2>(upper_left + down, 64);
        if constexpr (lower && right) unit.template store<3>(upper_left + panel + down, 64);
    }

    // A group's sums, scaled and added.
    template <bool minimums>
    static void add_scaled(const Square& square, const float* sums, int panel, std::int64_t first, std::int64_t rows, std::int64_t group) {
        const QuantizedForm& form = *square.form;
        const Vec scales = S::load(square.scratch->scales + (panel * form.num_groups + group) * 16);
        Vec least = S::zero();
        if constexpr (minimums) least = S::load(square.scratch->minimums + (panel * form.num_groups + group) * 16);
        float* acc = square.acc + panel * square.panel_stride + first * 16;
        for (std::int64_t r = 0; r < rows; ++r) {
            Vec total = S::add(S::load(acc + r * 16), S::mul(scales, S::load(sums + r * 16)));
            if constexpr (minimums) total = S::sub(total, S::mul(least, S::broadcast(square.scratch->sums_of_x[(square.row + first + r) * form.num_groups + group])));
            S::store(acc + r * 16, total);
        }
    }
    template <bool lower, bool right, bool minimums>
    static void add_all(const Square& square, std::int64_t group) {
        const float* tiles = square.scratch->tiles;
        const std::int64_t upper_rows = square.rows < kTileRows ? square.rows : kTileRows;
        add_scaled<minimums>(square, tiles, 0, 0, upper_rows, group);
        if constexpr (right) add_scaled<minimums>(square, tiles + 256, 1, 0, upper_rows, group);
        if constexpr (lower) add_scaled<minimums>(square, tiles + 512, 0, kTileRows, square.rows - kTileRows, group);
        if constexpr (lower && right) add_scaled<minimums>(square, tiles + 768, 1, kTileRows, square.rows - kTileRows, group);
    }

    template <bool lower, bool right, int inputs>
    static void range(Unit& unit, const Square& square, std::int64_t index, std::int64_t num_blocks) {
        const QuantizedForm& form = *square.form;
        const std::int64_t each = form.group / inputs;
        std::int64_t group = index / each, within = index % each;
        const unsigned char* x = square.x;
        const bf16* left = square.wide;
        const bf16* panel = left + square.wide_stride;
        for (std::int64_t b = 0; b < num_blocks; ++b) {
            if (within == 0) {
                begin_all<lower, right, false>(unit, square);
            } else if (b == 0) {
                begin_all<lower, right, true>(unit, square);
            }
            unit.template load<6>(left, 64);
            unit.template load<4>(x, square.stride);
            unit.template dot_bf16<0, 4, 6>();
            if constexpr (right) {
                unit.template load<7>(panel, 64);
                unit.template dot_bf16<1, 4, 7>();
            }
            if constexpr (lower) {
                unit.template load<5>(x + kTileRows * square.stride, square.stride);
                unit.template dot_bf16<2, 5, 6>();
                if constexpr (right) unit.template dot_bf16<3, 5, 7>();
            }
            x += inputs * 2;
            left += inputs * 16;
            panel += inputs * 16;
            if (++within == each) {
                store_all<lower, right>(unit, square.scratch->tiles, 256, 512);
                if (form.has_minimums()) {
                    add_all<lower, right, true>(square, group);
                } else {
                    add_all<lower, right, false>(square, group);
                }
                within = 0;
                ++group;
            } else if (b + 1 == num_blocks) {
                store_all<lower, right>(unit, square.parts, square.panel_stride, kTileRows * 16);
            }
        }
    }

    template <int inputs>
    static void multiply_by(const LinearBlock& block) {
        const QuantizedForm& form = *block.form;
        const std::int64_t most = widened_inputs(form), padded_rows = (block.rows + kTileRows - 1) / kTileRows * kTileRows;
        const QuantizedScratch scratch(form, block.wide, most, padded_rows);
        if (form.has_minimums()) sum_groups(form, block, scratch.sums_of_x);
        auto* wide = reinterpret_cast<bf16*>(scratch.wide);
        int upper = block.rows < kTileRows ? static_cast<int>(block.rows) : kTileRows, lower = upper;
        Unit unit(shapes(upper, lower, inputs));
        const auto shape = [&](int now_upper, int now_lower) {
            if (now_upper == upper && now_lower == lower) return;
            upper = now_upper, lower = now_lower;
            unit.configure(shapes(upper, lower, inputs));
        };
        for (std::int64_t panel = 0; panel < block.num_panels; panel += kPanelsTogether) {
            const std::int64_t panels = block.num_panels - panel < kPanelsTogether ? block.num_panels - panel : kPanelsTogether;
            float* acc = block.sums + panel * padded_rows * 16;
            std::memset(acc, 0, static_cast<std::size_t>(panels * padded_rows * 16 * 4));
            const unsigned char* from = block.panels + panel * block.panel_stride;
            for (std::int64_t p = 0; p < panels; ++p) widen_groups<S>(form, from + p * block.panel_stride, scratch, p);
            for (std::int64_t k = 0; k < form.depth; k += most) {
                const std::int64_t count = form.depth - k < most ? form.depth - k : most;
                for (std::int64_t p = 0; p < panels; ++p) {
                    Widen::pairs(form, from + p * block.panel_stride + form.codes_offset, scratch.zeros + p * form.num_groups * 16, k / 32, count / 32,
                                 wide + p * most * 16);
                }
                for (std::int64_t row = 0; row < block.rows; row += 2 * kTileRows) {
                    const std::int64_t rows = block.rows - row < 2 * kTileRows ? block.rows - row : 2 * kTileRows;
                    const Square square{&form, &scratch, block.activations + row * block.activation_stride + k * 2, block.activation_stride, wide, most * 16, row, rows,
                                        acc + row * 16, scratch.parts + row * 16, padded_rows * 16};
                    const auto by_panels = [&](auto is_lower) {
                        if (panels == 2) return range<is_lower(), true, inputs>(unit, square, k / inputs, count / inputs);
                        range<is_lower(), false, inputs>(unit, square, k / inputs, count / inputs);
                    };
                    if (rows > kTileRows) {
                        shape(kTileRows, static_cast<int>(rows) - kTileRows);
                        by_panels(std::true_type{});
                    } else {
                        shape(static_cast<int>(rows), static_cast<int>(rows));
                        by_panels(std::false_type{});
                    }
                }
            }
            for (std::int64_t p = 0; p < panels; ++p) finish_panel<S, bf16>(block, acc + p * padded_rows * 16, panel + p);
        }
    }

    static void multiply(const LinearBlock& block) { return block.form->halves() ? multiply_by<16>(block) : multiply_by<32>(block); }
};

template <class S, class Unit, class Widen>
constexpr LinearKernel amx_quantized_kernel() {
    using Own = QuantizedAmx<S, Unit, Widen>;
    LinearKernel kernel = quantized_kernel(Own::kTileRows, 2);
    kernel.pass_rows = 480;
    kernel.stage = stage_counted_bf16;
    kernel.stage_sums = stage_sums<bf16>;
    kernel.multiply = Own::multiply;
    return kernel;
}

}  // namespace
}  // namespace quire
