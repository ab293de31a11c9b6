// The addresses of the keys and values of a head tile (a tile of one head), and the prefetching of the next tiles while
// it is computed, for attention of few rows by bf16 pairs (attention_pairs_few.hpp), which is memory-bound.
//
// Rows are k and v, each with an operator[](token of the tile). Strides are known at compile time, so that finding a
// row takes at most one operation.
#pragma once

#include <cstdint>

#include "kernels/attention_pairs.hpp"

namespace quire {
namespace {

// One after the other: of blocks of whole tiles. kStride: elements from a row to the next one, or 0 for any.
template <int kStride>
struct EvenRows {
    struct Of {
        const bf16* first;
        std::int64_t stride;
        const bf16* operator[](int t) const { return first + t * (kStride > 0 ? kStride : stride); }
    };
    Of k, v;
};

// Wherever they lie, a head's so far from those of the item's first. kBesideWidth: of keys whose values follow them, as in blocks of 1 (both are
// asked for token by token then, at half as many addresses), or 0.
template <int kBesideWidth>
struct ScatteredRows {
    struct Of {
        const bf16* const* first;
        std::int64_t offset;
        const bf16* operator[](int t) const { return first[t] + offset; }
    };
    Of k, v;
};

// Without those before `start` and from `stop` on, for which there are zeros: at the ends of an item's tokens.
template <class Rows>
struct PartOfRows {
    struct Of {
        typename Rows::Of whole;
        int start, stop;
        const bf16* operator[](int t) const { return t >= start && t < stop ? whole[t] : reinterpret_cast<const bf16*>(kZeroRow); }
    };
    Of k, v;
};

// The rows that are asked for with row t of the keys and of the values: the same rows, or the keys and values of half a token more.
template <class Rows>
inline const bf16* asked_with_keys(const Rows& far, int t) {
    return far.k[t];
}
template <class Rows>
inline const bf16* asked_with_values(const Rows& far, int t) {
    return far.v[t];
}
template <int kBesideWidth>
    requires(kBesideWidth > 0)
inline const bf16* asked_with_keys(const ScatteredRows<kBesideWidth>& far, int t) {
    return far.k[t / 2] + t % 2 * kBesideWidth;
}
template <int kBesideWidth>
    requires(kBesideWidth > 0)
inline const bf16* asked_with_values(const ScatteredRows<kBesideWidth>& far, int t) {
    return far.k[(kPairTileTokens + t) / 2] + t % 2 * kBesideWidth;
}

// How the next tile is prefetched. Once, into the first cache only, as no line is read again (Zen 5, two threads, 8 x 8
// 192 tokens: 69 GB/s, 62 into all caches, 65 in two steps). Or in two steps, into the second cache, then from there,
// where a core waits for few lines of its first cache at once (before Zen 5: attention_ahead.hpp) or the lines in
// flight do not fit into it.
template <class S>
struct AskOnce {
    static void far(const bf16* line) { S::prefetch_once(line); }
    static void near(const bf16*) {}
};
template <class S>
struct AskTwice {
    static void far(const bf16* line) { S::prefetch_l2(line); }
    static void near(const bf16* line) { S::prefetch(line); }
};

// kWidth: of the row, or 0 for `width`.
template <int kWidth, void (*ask)(const bf16*)>
__attribute__((always_inline)) inline void ask_for_row(const bf16* row, int width) {
    constexpr int kLine = 64 / sizeof(bf16);
    if constexpr (kWidth > 0) {
#pragma GCC unroll 8
        for (int d = 0; d < kWidth; d += kLine) ask(row + d);
    } else {
        for (int d = 0; d < width; d += kLine) ask(row + d);
    }
}

}  // namespace
}  // namespace quire
