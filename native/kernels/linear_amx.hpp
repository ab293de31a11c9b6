// The packed linear layer on AMX tiles: bf16 weights and activations, float32 sums.
//
// A panel is 32 columns as two tiles for every 32 of k. Every number of rows goes through tdpbf16ps, one row as a tile
// of one row: a row's bits do not depend on the tile's height (amx.hpp, X2). Up to 16 rows four sums are two panels; beyond,
// two tiles of rows by the two of a panel, so that each load serves two products.
#pragma once

#include <cstdint>

#include "kernels/amx.hpp"
#include "kernels/linear_kernel.hpp"
#include "kernels/linear_tiles.hpp"

namespace quire {
namespace {

template <class S, class Unit>
struct AmxTiles {
    static constexpr int kColumns = 32, kDepth = 32, kTileRows = 16, kTileBytes = 1024, kRowBytes = 64;
    static constexpr std::int64_t kTile = 256;                      // sums of a tile
    static constexpr std::int64_t kStepBytes = 2 * kTileBytes;      // of a panel, for kDepth of k
    static constexpr std::int64_t kAheadBytes = 8 * kTileBytes;

    // Tiles 0-3 sums, 4-5 activations, 6-7 weights. Sums 0, 1 (and 4) have `upper` rows, 2, 3 (and 5) `lower`.
    static TileConfig shapes(int upper, int lower) {
        TileConfig config;
        config.tile(0, upper, kRowBytes).tile(1, upper, kRowBytes).tile(2, lower, kRowBytes).tile(3, lower, kRowBytes);
        return config.tile(4, upper, kRowBytes).tile(5, lower, kRowBytes).tile(6, 16, kRowBytes).tile(7, 16, kRowBytes);
    }

    template <int tile>
    static void begin(Unit& unit, const float* sums, const LinearBlock& block) {
        if (block.first) {
            unit.template zero<tile>();
        } else {
            unit.template load<tile>(sums, kRowBytes);
        }
    }

    static void fetch(const unsigned char* address) {
        for (std::int64_t i = 0; i < kStepBytes; i += kLineBytes) S::prefetch(address + i);
    }

    // Two tiles of sums, which are in the first cache yet, to rows of the output, if that was the last of their depth.
    static void finish_part(const LinearBlock& block, const float* sums, std::int64_t row, std::int64_t rows, std::int64_t panel) {
        const std::int64_t first = panel * kColumns, left = block.out_columns - first;
        if (block.out == nullptr || left <= 0) return;
        const bf16* bias = block.bias == nullptr ? nullptr : reinterpret_cast<const bf16*>(block.bias) + first;
        unsigned char* to = block.out + row * block.out_stride + first * 2;
        if (left < kColumns) {
            const std::int64_t low = left < kTileRows ? left : kTileRows;
            for (std::int64_t r = 0; r < rows; ++r, sums += kTileRows, to += block.out_stride) {
                finish<S, bf16>(sums, bias, to, low);
                if (left > low) finish<S, bf16>(sums + kTile, bias == nullptr ? nullptr : bias + low, to + 2 * low, left - low);
            }
            return;
        }
        const auto low_bias = bias == nullptr ? S::zero() : S::load(bias), high_bias = bias == nullptr ? S::zero() : S::load(bias + kTileRows);
        for (std::int64_t r = 0; r < rows; ++r, sums += kTileRows, to += block.out_stride) {
            auto low = S::load(sums), high = S::load(sums + kTile);
            if (bias != nullptr) low = S::add(low, low_bias), high = S::add(high, high_bias);
            if (block.streams) {
                S::stream_pairs(reinterpret_cast<bf16*>(to), S::to_bf16(low, high));
            } else {
                S::store_pairs(reinterpret_cast<bf16*>(to), S::to_bf16(low, high));
            }
        }
    }

    // At most 16 rows by two panels, all of the block's depth.
    static void few(Unit& unit, const LinearBlock& block, std::int64_t panel) {
        float* sums = block.sums;  // of all panels in turn: they are finished at once
        const unsigned char* a = block.activations;
        const unsigned char* left = block.panels + panel * block.panel_stride;
        const unsigned char* right = left + block.panel_stride;
        begin<0>(unit, sums, block);
        begin<1>(unit, sums + kTile, block);
        begin<2>(unit, sums + 2 * kTile, block);
        begin<3>(unit, sums + 3 * kTile, block);
        constexpr std::int64_t kAheadDepth = kAheadBytes / kStepBytes * kDepth;
        for (std::int64_t k = 0; k < block.depth; k += kDepth) {
            // Where the left panel ends the right one of the next two is to come: its own beginning follows this right one's end.
            fetch(left + kAheadBytes + (k + kAheadDepth < block.depth ? 0 : 2 * block.panel_stride));
            fetch(right + kAheadBytes);
            unit.template load<4>(a, block.activation_stride);
            unit.template load<6>(left, kRowBytes);
            unit.template dot_bf16<0, 4, 6>();
            unit.template load<7>(left + kTileBytes, kRowBytes);
            unit.template dot_bf16<1, 4, 7>();
            unit.template load<6>(right, kRowBytes);
            unit.template dot_bf16<2, 4, 6>();
            unit.template load<7>(right + kTileBytes, kRowBytes);
            unit.template dot_bf16<3, 4, 7>();
            a += kRowBytes;
            left += kStepBytes;
            right += kStepBytes;
        }
        unit.template store<0>(sums, kRowBytes);
        unit.template store<1>(sums + kTile, kRowBytes);
        unit.template store<2>(sums + 2 * kTile, kRowBytes);
        unit.template store<3>(sums + 3 * kTile, kRowBytes);
        finish_part(block, sums, 0, block.rows, panel);
        finish_part(block, sums + 2 * kTile, 0, block.rows, panel + 1);
    }

    // Sums lie tile by tile, the four of a square together: the second cache takes a store of many lines in a row far better than
    // one of rows apart (one core, 480 rows, K of 1 024: 1.0 and 1.8 TFLOP/s with nothing else changed).
    static float* sums_of(const LinearBlock& block, std::int64_t row, std::int64_t panel) {
        return block.sums + row * block.sums_stride + panel * 4 * kTile;
    }

    // What a square asks for while it runs: `lines` lines from `from` on in each step of its depth, for a later one.
    struct Ahead {
        const unsigned char* from;
        std::int64_t lines;
    };

    // One or two tiles of rows by one panel. The activations pass by the first cache (tileloaddt1), which then has room for twice
    // the panel's depth, and the sums go half as often through the second (one core, sums of a range of 512: 1.6 and 1.95 TFLOP/s).
    template <bool both>
    static void square(Unit& unit, const LinearBlock& block, std::int64_t row, std::int64_t panel, Ahead ahead) {
        float* upper = sums_of(block, row, panel);
        float* lower = upper + 2 * kTile;
        const unsigned char* a = block.activations + row * block.activation_stride;
        const unsigned char* b = block.panels + panel * block.panel_stride;
        begin<0>(unit, upper, block);
        begin<1>(unit, upper + kTile, block);
        if constexpr (both) {
            begin<2>(unit, lower, block);
            begin<3>(unit, lower + kTile, block);
        }
        for (std::int64_t k = 0; k < block.depth; k += kDepth) {
            for (std::int64_t i = 0; i < ahead.lines; ++i) S::prefetch_l2(ahead.from + i * kLineBytes);
            ahead.from += ahead.lines * kLineBytes;
            unit.template load<6>(b, kRowBytes);
            unit.template load_streamed<4>(a, block.activation_stride);
            unit.template dot_bf16<0, 4, 6>();
            unit.template load<7>(b + kTileBytes, kRowBytes);
            unit.template dot_bf16<1, 4, 7>();
            if constexpr (both) {
                unit.template load_streamed<5>(a + kTileRows * block.activation_stride, block.activation_stride);
                unit.template dot_bf16<2, 5, 6>();
                unit.template dot_bf16<3, 5, 7>();
            }
            a += kRowBytes;
            b += kStepBytes;
        }
        unit.template store<0>(upper, kRowBytes);
        unit.template store<1>(upper + kTile, kRowBytes);
        const std::int64_t rows = block.rows - row;
        finish_part(block, upper, row, rows < kTileRows ? rows : kTileRows, panel);
        if constexpr (both) {
            unit.template store<2>(lower, kRowBytes);
            unit.template store<3>(lower + kTile, kRowBytes);
            finish_part(block, lower, row + kTileRows, rows < 2 * kTileRows ? rows - kTileRows : kTileRows, panel);
        }
    }

    // Of a panel that passes by once: itself, a little before it is used.
    static Ahead own(const LinearBlock& block, std::int64_t panel) {
        return {block.panels + panel * block.panel_stride + kAheadBytes, kStepBytes / kLineBytes};
    }

    static void multiply(const LinearBlock& block) {
        products(block);
        if (block.streams) S::end_streams();
    }

    static void products(const LinearBlock& block) {
        if (block.rows <= kTileRows) {
            const int rows = static_cast<int>(block.rows);
            Unit unit(shapes(rows, rows));
            std::int64_t panel = 0;
            for (; panel + 2 <= block.num_panels; panel += 2) few(unit, block, panel);
            if (panel < block.num_panels) square<false>(unit, block, 0, panel, own(block, panel));
            return;
        }
        if (block.rows <= 2 * kTileRows) {
            Unit unit(shapes(kTileRows, static_cast<int>(block.rows) - kTileRows));
            for (std::int64_t panel = 0; panel < block.num_panels; ++panel) square<true>(unit, block, 0, panel, own(block, panel));
            return;
        }
        // Panel by panel past all rows, each of which asks for its share of the panel that comes next.
        const std::int64_t num_steps = block.depth / kDepth, whole = block.rows / (2 * kTileRows) * (2 * kTileRows);
        const int rest = static_cast<int>(block.rows - whole);
        const std::int64_t squares = whole / (2 * kTileRows), lines = (kStepBytes / kLineBytes + squares - 1) / squares;
        Unit unit(shapes(kTileRows, kTileRows));
        for (std::int64_t panel = 0; panel < block.num_panels; ++panel) {
            const unsigned char* next =
                block.panels + (panel + 1 < block.num_panels ? (panel + 1) * block.panel_stride : num_steps * kStepBytes);
            for (std::int64_t row = 0; row < whole; row += 2 * kTileRows) {
                square<true>(unit, block, row, panel, {next, lines});
                next += num_steps * lines * kLineBytes;
            }
        }
        if (rest == 0) return;
        const bool both = rest > kTileRows;
        unit.configure(both ? shapes(kTileRows, rest - kTileRows) : shapes(rest, rest));
        for (std::int64_t panel = 0; panel < block.num_panels; ++panel) {
            if (both) {
                square<true>(unit, block, whole, panel, {nullptr, 0});
            } else {
                square<false>(unit, block, whole, panel, {nullptr, 0});
            }
        }
    }
};

template <class S, class Unit>
constexpr LinearKernel amx_kernel() {
    using Own = AmxTiles<S, Unit>;
    LinearKernel kernel{};
    kernel.layout = PanelLayout::tiles;
    kernel.columns = Own::kColumns;
    kernel.depth = Own::kDepth;
    kernel.tile_rows = 2 * Own::kTileRows;
    kernel.many_panels = 4;
    kernel.pass_rows = 512;
    kernel.pass_bytes = kAnyBytes;
    kernel.few_range = kernel.many_range = 512;  // 32 KiB of a panel stay in the first cache while the rows pass by
    kernel.staged_bytes = sizeof(bf16);
    kernel.stage_is_copy = true;
    kernel.stage = stage_copy<bf16>;
    kernel.multiply = Own::multiply;
    return kernel;
}

}  // namespace
}  // namespace quire
