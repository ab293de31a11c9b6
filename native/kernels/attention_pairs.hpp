// Common parts of attention by bf16 products: interleaved values, and the arithmetic of a row by pairs (vdpbf16ps),
// which few rows (attention_pairs_few.hpp) and many (attention_pairs_many.hpp) run in different orders with the same
// bits.
//
// Scores: pairs of d, 16 lanes of them, in order; then the fold tree. Tiles of 16 tokens, so that a tile's keys and values lie in one
// block of 16 and memory is read as it lies. Values: lanes of d, pairs of tokens in order, p rounded to bf16. l: a sum for each of a
// tile's lanes, behind a row's o and scaled with it; folded by the tree when the row is done.
#pragma once

#include "kernels/attention_item.hpp"

namespace quire {
namespace {

constexpr int kPairTileTokens = 16, kPairHeadroom = 8;

// What a variant with pairs shares, whatever it multiplies with: interleaved values and the order of their columns.
template <class S>
class InterleavedValues {
    using Vec = typename S::Vec;
    using Pairs = typename S::Pairs;

  public:
    static constexpr int kColumns = 32;  // of one interleave

    // Rows a and b of `width` elements -> padded to kColumns: [width / 32][low, high][32].
    static void interleave_rows(const bf16* a, const bf16* b, int width, bf16* to) {
        for (int d = 0; d < width; d += kColumns) {
            Pairs low, high;
            load_interleaved(a, b, d, width, low, high);
            S::store_pairs(to + 2 * d, low);
            S::store_pairs(to + 2 * d + kColumns, high);
        }
    }
    template <class E>
    static void load_interleaved(const E* a, const E* b, int d, int width, Pairs& low, Pairs& high) {
        S::interleave(load_columns(a, d, width), load_columns(b, d, width), low, high);
    }
    template <class E>
    static Pairs load_columns(const E* row, int d, int width) {
        return width - d >= kColumns ? S::load_pairs(row + d) : S::load_pairs_part(row + d, width - d);
    }
    static void finish(const float* o, float factor, int width, bf16* out) {
        const Vec factors = S::broadcast(factor);
        for (int d = 0; d < width; d += kColumns) {
            Vec low = S::load(o + d), high = S::load(o + d + S::kWidth);
            S::natural_order(low, high);
            store_scaled<S>(low, factors, out + d, width - d);
            if (width - d > S::kWidth) store_scaled<S>(high, factors, out + d + S::kWidth, width - d - S::kWidth);
        }
    }
};

// l of rows whose sums are by lanes, at their end.
template <class S>
void fold_sums(const RowStates& states) {
    for (std::int64_t row = 0; row < states.num_rows; ++row) states.l[row] = S::reduce_add(S::load(states.o + (row + 1) * states.stride - kSumLanes));
}

}  // namespace
}  // namespace quire
