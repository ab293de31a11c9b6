// Common parts of both AMX kernels (attention_tiles.hpp, attention_many_rows.hpp), so that their rows have the same
// bits: the form of a tile of tokens, and keys, queries and values as operands of tdpbf16ps, the second of which has
// two elements of the sum's dimension side by side.
#pragma once

#include "kernels/attention_pairs.hpp"

namespace quire {
namespace {

template <class S>
class TilePacking : protected InterleavedValues<S> {
    using Values = InterleavedValues<S>;
    using Pairs = typename S::Pairs;

  public:
    static constexpr int kTileTokens = 64;
    static constexpr int kHeadroom = 8;

  protected:
    static constexpr int kColumns = 32;  // of d, or tokens, of one product
    static constexpr int kSide = 16;     // rows of a tile
    static constexpr int kTileElements = kSide * kColumns;

    // Sixteen rows of `width` elements -> [32 of d][16 pairs of d][16 rows][2]. between() before each 32 of d.
    template <class Between>
    static void pack_pairs(const bf16* const* rows, int width, bf16* to, Between&& between) {
        for (int d = 0; d < width; d += kColumns, to += kTileElements) {
            between();
            Pairs square[kSide];
#pragma GCC unroll 16
            for (int i = 0; i < kSide; ++i) square[i] = Values::load_columns(rows[i], d, width);
            S::transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < kSide; ++i) S::store_pairs(to + i * kColumns, square[i]);
        }
    }

    // Values of tokens [first, last), even numbers -> [32 tokens][16 columns][16 pairs of tokens][16 columns][2], in the order
    // of an interleave, zeros beyond their width. between() before each pair of tokens.
    template <class Between>
    static void pack_values(const bf16* const* v, int first, int last, int width, bf16* values, Between&& between) {
        const int wide = static_cast<int>(padded_to(width, kColumns));
        for (int t = first; t < last; t += 2) {
            between();
            bf16* to = values + t / kColumns * kColumns * wide + t % kColumns / 2 * kColumns;
            for (int d = 0; d < width; d += kColumns, to += 2 * kTileElements) {
                Pairs low, high;
                S::interleave(Values::load_columns(v[t], d, width), Values::load_columns(v[t + 1], d, width), low, high);
                S::store_pairs(to, low);
                S::store_pairs(to + kTileElements, high);
            }
        }
    }
};

}  // namespace
}  // namespace quire
