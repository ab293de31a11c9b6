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

// stage_sums of bf16 rows, sixteen blocks side by side where the instructions can turn them: one after the other it would take longer
// than the products of a prompt's rows.
template <class S>
void stage_sums_of_pairs(void* staged, std::int64_t padded, float* sums) {
    std::int64_t done = 0;
#if defined(__AVX512F__)
    const auto* x = static_cast<const std::uint16_t*>(staged);
    for (; done + 512 <= padded; done += 512) {
        __m512i rows[16];
        for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_si512(x + done + i * 32);
        S::transpose(rows);
        const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        __m512 even = S::zero(), odd = S::zero(), later_even = S::zero(), later_odd = S::zero(), first = S::zero();
        for (int p = 0; p < 16; ++p) {
            const __m512 a = _mm512_castsi512_ps(_mm512_slli_epi32(rows[p], 16)), b = _mm512_castsi512_ps(_mm512_and_si512(rows[p], upper));
            even = S::add(even, a), odd = S::add(odd, b);
            if (p == 7) first = S::add(even, odd);
            if (p >= 8) later_even = S::add(later_even, a), later_odd = S::add(later_odd, b);
        }
        S::store(sums + done / 32, S::add(even, odd));
        float halves[2][16];
        S::store(halves[0], first);
        S::store(halves[1], S::add(later_even, later_odd));
        for (int i = 0; i < 32; ++i) sums[padded / 32 + done / 16 + i] = halves[i % 2][i / 2];
    }
#endif
    const auto* rest = static_cast<const bf16*>(staged);
    for (const int block : {32, 16}) {
        for (std::int64_t start = done; start < padded; start += block) {
            sums[(block == 16 ? padded / 32 : 0) + start / block] = sum_of_block(rest + start, block);
        }
    }
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

    // A group's sums that are stored and not added yet: some of them after each block of the next group, while its products run.
    struct Stored {
        const float* tiles;
        std::int64_t group;
        int next = 4;  // tile that is added next

        template <bool lower, bool right>
        void add(const Square& square, int count) {
            for (; count > 0 && next < 4; --count, ++next) {
                const bool is_lower = next >= 2;
                const int panel = next % 2;
                if ((is_lower && !lower) || (panel == 1 && !right)) continue;
                const std::int64_t upper_rows = square.rows < kTileRows ? square.rows : kTileRows, first = is_lower ? kTileRows : 0;
                const std::int64_t rows = is_lower ? square.rows - kTileRows : upper_rows;
                if (square.form->has_minimums()) {
                    add_scaled<true>(square, tiles + next * 256, panel, first, rows, group);
                } else {
                    add_scaled<false>(square, tiles + next * 256, panel, first, rows, group);
                }
            }
        }
    };

    template <bool lower, bool right, int inputs>
    static void range(Unit& unit, const Square& square, std::int64_t index, std::int64_t num_blocks) {
        const QuantizedForm& form = *square.form;
        const std::int64_t each = form.group / inputs;
        std::int64_t group = index / each, within = index % each;
        const int added_a_block = each >= 4 ? 1 : each >= 2 ? 2 : 4;
        float* tiles = square.scratch->tiles;
        Stored stored{tiles, 0};
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
            unit.template load_streamed<4>(x, square.stride);
            unit.template dot_bf16<0, 4, 6>();
            if constexpr (right) {
                unit.template load<7>(panel, 64);
                unit.template dot_bf16<1, 4, 7>();
            }
            if constexpr (lower) {
                unit.template load_streamed<5>(x + kTileRows * square.stride, square.stride);
                unit.template dot_bf16<2, 5, 6>();
                if constexpr (right) unit.template dot_bf16<3, 5, 7>();
            }
            stored.template add<lower, right>(square, added_a_block);
            x += inputs * 2;
            left += inputs * 16;
            panel += inputs * 16;
            if (++within == each) {
                store_all<lower, right>(unit, tiles, 256, 512);
                stored = Stored{tiles, group, 0};
                tiles = tiles == square.scratch->tiles ? tiles + 4 * 256 : square.scratch->tiles;
                within = 0;
                ++group;
            } else if (b + 1 == num_blocks) {
                store_all<lower, right>(unit, square.parts, square.panel_stride, kTileRows * 16);
            }
        }
        stored.template add<lower, right>(square, 4);
    }

    template <int inputs>
    static void multiply_by(const LinearBlock& block) {
        const QuantizedForm& form = *block.form;
        const std::int64_t most = block.rows <= 2 * kTileRows ? kWidenedForFew : kWidenedForTiles;
        const std::int64_t padded_rows = (block.rows + kTileRows - 1) / kTileRows * kTileRows;
        const QuantizedScratch scratch(form, block.wide, padded_rows);
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
    kernel.pass_bytes = 1 << 20;
    kernel.stage = stage_counted_bf16;
    kernel.stage_sums = stage_sums_of_pairs<S>;
    kernel.multiply = Own::multiply;
    return kernel;
}

}  // namespace
}  // namespace quire
