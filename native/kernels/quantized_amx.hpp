// Products of bf16 rows with panels of codes on AMX tiles: tdpbf16ps sums a block of 32 inputs as quantized_reference.py says, even and odd
// ones apart, and adds the sum to its tile, which holds a group's sum.
//
// Codes become bf16 pairs in the thread's scratch, of two panels at a time, once for all rows of a block: a range of K
// of two panels is decoded while the range before it is multiplied, since vector and matrix units work in parallel. Two
// tiles of rows by two panels are four sums. At the end of a group they are stored, and vector instructions scale and
// add them while the next groups' products run.
#pragma once

#include "kernels/amx.hpp"
#include "kernels/quantized_tiles.hpp"

namespace quire {
namespace {

template <class S, class Unit, class Widen>
struct QuantizedAmx {
    using Vec = typename S::Vec;
    using Int = std::int64_t;
    static constexpr int kTileRows = 16;
    static constexpr Int kTile = 256;  // sums of a tile
    static constexpr Int kAheadBytes = 4096;  // that codes are asked for ahead of being widened, at least

    // Tiles 0-3: sums of rows (upper, upper, lower, lower) by panels (left, right, left, right); 4-5 rows, 6-7 panels.
    static TileConfig shapes(int upper, int lower, int inputs) {
        TileConfig config;
        config.tile(0, upper, 64).tile(1, upper, 64).tile(2, lower, 64).tile(3, lower, 64);
        return config.tile(4, upper, inputs * 2).tile(5, lower, inputs * 2).tile(6, inputs / 2, 64).tile(7, inputs / 2, 64);
    }

    // Up to two tiles of rows by one or two panels, whose sums lie together, tile by tile.
    struct Square {
        const LinearBlock* block;
        const QuantizedScratch* scratch;
        const GroupNumbers* numbers;
        Int row, rows, panel, panels;
        const unsigned char* x;  // the first row's, at the first input that is widened
        const bf16* wide;        // [panels][inputs][16]
        Int wide_stride;
        float* acc;              // [tiles][256]
        float* parts;            // likewise, of a group that a range cuts; null: the tiles keep it

        Int lower_tile() const { return panels * kTile; }
        Int rows_of(bool lower) const { return lower ? rows - kTileRows : rows < kTileRows ? rows : kTileRows; }
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
        if constexpr (right) begin<1, load>(unit, part + kTile);
        if constexpr (lower) begin<2, load>(unit, part + square.lower_tile());
        if constexpr (lower && right) begin<3, load>(unit, part + square.lower_tile() + kTile);
    }
    template <bool lower, bool right>
    static void store_all(Unit& unit, float* upper_left, Int lower_tile) {
        unit.template store<0>(upper_left, 64);
        if constexpr (right) unit.template store<1>(upper_left + kTile, 64);
        if constexpr (lower) unit.template store<2>(upper_left + lower_tile, 64);
        if constexpr (lower && right) unit.template store<3>(upper_left + lower_tile + kTile, 64);
    }

    // Sums of consecutive groups of a square that were set down, and wait to be scaled and added: eight rows at a time, while products run. The
    // last group's are rounded into the output.
    struct Waiting {
        static constexpr int kMost = 4;  // groups
        static constexpr int kRows = 8, kParts = 2 * kTileRows / kRows;

        Square square;
        const float* tiles;  // [groups][4][256]
        Int group;           // first
        int count = 0;
        int next = kParts;   // of the parts of rows

        void add(int parts) {
            for (; parts > 0 && next < kParts; --parts, ++next) {
                if (next * kRows < square.rows) square.panels == 2 ? add_part<true>() : add_part<false>();
            }
        }

      private:
        template <bool right>
        void add_part() {
            if (square.block->form->has_minimums()) return add_counted<right, true>();
            add_counted<right, false>();
        }
        template <bool right, bool minimums>
        void add_counted() {
            switch (count) {
                case 1: return add_groups<right, minimums, 1>();
                case 2: return add_groups<right, minimums, 2>();
                case 3: return add_groups<right, minimums, 3>();
                default: return add_groups<right, minimums, 4>();
            }
        }

        template <bool right, bool minimums, int groups>
        void add_groups() {
            const QuantizedForm& form = *square.block->form;
            constexpr int panels = right ? 2 : 1;
            Vec scales[panels * groups], least[panels * groups];
            unrolled<panels * groups>([&](auto i) __attribute__((always_inline)) {
                const Int at = (i / groups * form.num_groups + group + i % groups) * 16;
                scales[i] = S::load(square.numbers->scales + at);
                if constexpr (minimums) least[i] = S::load(square.numbers->minimums + at);
            });
            const Int first_row = next * kRows, at = first_row / kTileRows * square.lower_tile() + first_row % kTileRows * 16;
            const Int rows = square.rows - first_row < kRows ? square.rows - first_row : kRows;
            const float* sums = tiles + at;
            float* acc = square.acc + at;
            const float* of_x = square.scratch->sums_of_x + (square.row + first_row) * form.num_groups + group;
            const auto total_of = [&](Vec total, auto panel, Int r) __attribute__((always_inline)) {
                unrolled<groups>([&](auto g) __attribute__((always_inline)) {
                    total = S::add(total, S::mul(scales[panel * groups + g], S::load(sums + (g * 4 + panel) * kTile + r * 16)));
                    if constexpr (minimums) total = S::sub(total, S::mul(least[panel * groups + g], S::broadcast(of_x[r * form.num_groups + g])));
                });
                return total;
            };
            const std::integral_constant<int, 0> left_panel;
            const std::integral_constant<int, panels - 1> right_panel;
            const bool first = group == 0;
            if (group + groups == form.num_groups) {
                const PanelOutput<S, right> output(*square.block, square.panel);
                for (Int r = 0; r < rows; ++r) {
                    const Vec left = total_of(first ? S::zero() : S::load(acc + r * 16), left_panel, r);
                    output.put(square.row + first_row + r, left, right ? total_of(first ? S::zero() : S::load(acc + kTile + r * 16), right_panel, r) : left);
                }
                return;
            }
            for (Int r = 0; r < rows; ++r) {
                S::store(acc + r * 16, total_of(first ? S::zero() : S::load(acc + r * 16), left_panel, r));
                if constexpr (right) S::store(acc + kTile + r * 16, total_of(first ? S::zero() : S::load(acc + kTile + r * 16), right_panel, r));
            }
        }
    };

    // What is multiplied next, widened a block at a time while products run.
    struct Widening {
        const QuantizedForm* form;
        WidenBlock<bf16> widen;
        const unsigned char* codes[kPanelsTogether];  // of the piece's panels, from its first block on
        const unsigned char* ahead[kPanelsTogether];  // what is asked for meanwhile
        bool ahead_to_second;
        const float* zeros;
        bf16* to;          // [panels][kWidenedForTiles][16]
        Int first, panels;
        Int done = 0, all = 0, credit = 0, steps = 1;  // blocks, and shares of one

        // One of `steps` steps, in which all is to be widened.
        void step() {
            for (credit += all; credit >= steps; credit -= steps) one();
        }
        void finish() {
            while (done < all) one();
        }

      private:
        void one() {
            if (done == all) return;
            const Int panel = done % panels, block = done / panels, bytes = form->block_bytes();
            ask(ahead[panel] + block * bytes, bytes, ahead_to_second);
            const Int group = panel * form->num_groups + (first + block) * 32 / form->group;
            widen(*form, codes[panel] + block * bytes, zeros + group * 16, to + (panel * kWidenedForTiles + block * 32) * 16);
            ++done;
        }
    };

    static void ask(const unsigned char* from, Int bytes, bool to_second) {
        for (Int i = 0; i < bytes; i += kLineBytes) to_second ? S::prefetch_l2(from + i) : S::prefetch(from + i);
    }

    template <bool lower, bool right, int inputs>
    static void range(Unit& unit, const Square& square, Int index, Int num_blocks, Waiting& waiting, Widening& widening) {
        const QuantizedForm& form = *square.block->form;
        const Int each = form.group / inputs, stride = square.block->activation_stride;
        Int group = index / each, within = index % each;
        // Sums of more groups of one block than two do not stay in the first cache (10 % of 32 rows). What is handed over is added in four steps at most, or two.
        const int together = each == 1 ? 2 : Waiting::kMost, parts_a_step = each == 1 ? 2 : 1;
        float* tiles = square.scratch->tiles;
        if (waiting.tiles == tiles) tiles += Waiting::kMost * 4 * kTile;
        int stored = 0;
        const auto hand_over = [&] {
            waiting.add(Waiting::kParts);
            waiting = Waiting{square, tiles, group - stored, stored, 0};
            tiles = tiles == square.scratch->tiles ? tiles + Waiting::kMost * 4 * kTile : square.scratch->tiles;
            stored = 0;
        };
        const unsigned char* x = square.x;
        const bf16* left = square.wide;
        const bf16* panel = left + square.wide_stride;
        for (Int b = 0; b < num_blocks; ++b) {
            if (within == 0) {
                begin_all<lower, right, false>(unit, square);
            } else if (b == 0 && square.parts != nullptr) {
                begin_all<lower, right, true>(unit, square);
            }
            unit.template load<6>(left, 64);
            unit.template load_streamed<4>(x, stride);
            unit.template dot_bf16<0, 4, 6>();
            if constexpr (right) {
                unit.template load<7>(panel, 64);
                unit.template dot_bf16<1, 4, 7>();
            }
            if constexpr (lower) {
                unit.template load_streamed<5>(x + kTileRows * stride, stride);
                unit.template dot_bf16<2, 5, 6>();
                if constexpr (right) unit.template dot_bf16<3, 5, 7>();
            }
            waiting.add(parts_a_step);
            widening.step();
            x += inputs * 2;
            left += inputs * 16;
            panel += inputs * 16;
            if (++within == each) {
                store_all<lower, right>(unit, tiles + stored * 4 * kTile, square.lower_tile());
                within = 0;
                ++group;
                if (++stored == together) hand_over();
            } else if (b + 1 == num_blocks && square.parts != nullptr) {
                store_all<lower, right>(unit, square.parts, square.lower_tile());
            }
        }
        if (stored > 0) hand_over();
    }

    // What is widened at a time: a range of K of two panels, or of the last. Few rows take all of K of the same panels first, many all panels.
    struct Piece {
        const LinearBlock* block;
        Int length;  // of a range
        bool few;
        Int k = 0, panel = 0, index = 0;

        // Which of the scratch's group numbers are its own. Pieces of the same panels have them in common where one follows the other.
        Int numbers() const { return (few ? panel / kPanelsTogether : index) % 2; }
        bool begins_numbers() const { return !few || k == 0; }
        bool is_there() const { return k < block->form->depth && panel < block->num_panels; }
        Int count() const { return block->form->depth - k < length ? block->form->depth - k : length; }
        Int panels() const { return block->num_panels - panel < kPanelsTogether ? block->num_panels - panel : kPanelsTogether; }
        Piece next() const {
            Piece made = *this;
            ++made.index;
            if (few) {
                made.k += length;
                if (made.k >= block->form->depth) made.k = 0, made.panel += kPanelsTogether;
            } else {
                made.panel += kPanelsTogether;
                if (made.panel >= block->num_panels) made.panel = 0, made.k += length;
            }
            return made;
        }
        // Of a panel of the piece, or of what the thread is likely to read when there are no more.
        const unsigned char* data(Int p) const { return is_there() ? block->panels + (panel + p) * block->panel_stride : block->after + p * block->panel_stride; }
        const unsigned char* codes(Int p) const { return data(p) + block->form->codes_offset + (is_there() ? k / 32 * block->form->block_bytes() : 0); }
    };

    // later: what is asked for while this is widened.
    static Widening widening_of(const Piece& piece, const Piece& later, const QuantizedScratch& scratch, Int steps) {
        const QuantizedForm& form = *piece.block->form;
        const Int first = piece.k / form.group, end = (piece.k + piece.count() + form.group - 1) / form.group;
        const GroupNumbers& numbers = scratch.numbers[piece.numbers()];
        Widening made{&form, Widen::pairs(form), {}, {}, !piece.few, numbers.zeros, reinterpret_cast<bf16*>(scratch.wide[piece.index % 2]), piece.k / 32, piece.panels()};
        for (Int p = 0; p < piece.panels(); ++p) {
            widen_groups<S>(form, piece.data(p), numbers, p, first, end);
            made.codes[p] = piece.codes(p);
            made.ahead[p] = later.codes(p);
            if (later.k == 0 || !later.is_there()) ask(later.data(p), form.codes_offset, !piece.few);
        }
        made.all = piece.panels() * (piece.count() / 32);
        made.steps = steps;
        return made;
    }

    template <int inputs>
    static void multiply_by(const LinearBlock& block) {
        const QuantizedForm& form = *block.form;
        const bool few = block.rows <= 2 * kTileRows;
        const Int most = few ? kWidenedForFew : kWidenedForTiles;
        const Int length = !few && form.group <= most ? most / form.group * form.group : most;  // groups are seldom cut
        const Int padded_rows = (block.rows + kTileRows - 1) / kTileRows * kTileRows;
        const QuantizedScratch scratch(form, block.wide, padded_rows, block.num_panels);
        if (form.has_minimums()) sum_groups(form, block, scratch.sums_of_x);
        int upper = block.rows < kTileRows ? static_cast<int>(block.rows) : kTileRows, lower = upper;
        Unit unit(shapes(upper, lower, inputs));
        const auto shape = [&](int now_upper, int now_lower) {
            if (now_upper == upper && now_lower == lower) return;
            upper = now_upper, lower = now_lower;
            unit.configure(shapes(upper, lower, inputs));
        };
        Waiting waiting{};
        Piece piece{&block, length, few}, next = piece.next(), later = next;
        const Int piece_bytes = kPanelsTogether * length / 32 * form.block_bytes();
        for (Int ahead = piece_bytes; ahead <= kAheadBytes; ahead += piece_bytes) later = later.next();
        widening_of(piece, next, scratch, 1).finish();
        for (; piece.is_there(); piece = next, next = next.next(), later = later.next()) {
            Widening widening{};
            if (next.is_there()) {
                if (next.begins_numbers() && waiting.square.numbers == &scratch.numbers[next.numbers()]) waiting.add(Waiting::kParts);
                const Int steps = (block.rows + 2 * kTileRows - 1) / (2 * kTileRows) * (piece.count() / inputs);
                widening = widening_of(next, later, scratch, steps);
            }
            const Int panels = piece.panels();
            for (Int row = 0; row < block.rows; row += 2 * kTileRows) {
                const Int rows = block.rows - row < 2 * kTileRows ? block.rows - row : 2 * kTileRows;
                const Int at = piece.panel * padded_rows * 16 + row * 16 * panels;
                const Square square{&block, &scratch, &scratch.numbers[piece.numbers()], row, rows, piece.panel, panels, block.activations + row * block.activation_stride + piece.k * 2,
                                    reinterpret_cast<const bf16*>(scratch.wide[piece.index % 2]), kWidenedForTiles * 16, block.sums + at, few ? nullptr : scratch.parts + at};
                const auto by_panels = [&](auto is_lower) {
                    if (panels == 2) return range<is_lower(), true, inputs>(unit, square, piece.k / inputs, piece.count() / inputs, waiting, widening);
                    range<is_lower(), false, inputs>(unit, square, piece.k / inputs, piece.count() / inputs, waiting, widening);
                };
                if (rows > kTileRows) {
                    shape(kTileRows, static_cast<int>(rows) - kTileRows);
                    by_panels(std::true_type{});
                } else {
                    shape(static_cast<int>(rows), static_cast<int>(rows));
                    by_panels(std::false_type{});
                }
            }
            widening.finish();
        }
        waiting.add(Waiting::kParts);
    }

    static void multiply(const LinearBlock& block) {
        block.form->halves() ? multiply_by<16>(block) : multiply_by<32>(block);
#if defined(__AVX512F__)
        if (block.streams) _mm_sfence();
#endif
    }
};

template <class S, class Unit, class Widen>
constexpr LinearKernel amx_quantized_kernel() {
    using Own = QuantizedAmx<S, Unit, Widen>;
    LinearKernel kernel = quantized_kernel(Own::kTileRows, 2);
    kernel.many_panels = 8;
    kernel.pass_rows = 512;
    kernel.stage = stage_pairs<false>;
    kernel.stage_sums = stage_sums_of_pairs<S, false>;
    kernel.multiply = Own::multiply;
    return kernel;
}

}  // namespace
}  // namespace quire
