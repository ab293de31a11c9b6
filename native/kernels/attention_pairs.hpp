// Both products of attention by bf16 pairs (vdpbf16ps), for bf16 keys and values.
//
// Scores: pairs of d, 16 lanes of them, in order; then the fold tree. Values: lanes of d, pairs of tokens in order, p rounded
// to bf16. The rows of a pair of tokens are interleaved on the way, or once for many query rows.
//
// Few rows: a register holds the 16 sums of one score, and shuffles fold them. Many rows: the tile's keys are transposed once,
// a register holds the same one of the 16 sums of 16 tokens, and the tree is 15 additions of registers: the same products and
// additions in the same order, so the same bits.
#pragma once

#include "kernels/attention_item.hpp"

namespace quire {
namespace {

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
    static void load_interleaved(const bf16* a, const bf16* b, int d, int width, Pairs& low, Pairs& high) {
        S::interleave(load_columns(a, d, width), load_columns(b, d, width), low, high);
    }
    static Pairs load_columns(const bf16* row, int d, int width) {
        return width - d >= kColumns ? S::load_pairs(row + d) : S::load_pairs_part(row + d, width - d);
    }
    // `count` of a row of p as bf16.
    static void round_row(const float* p, bf16* to, int count) {
        for (int t = 0; t < count; t += S::kWidth) S::to_bf16(to + t, S::load(p + t));
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

template <class S>
class PairProducts : InterleavedValues<S> {
    using Vec = typename S::Vec;
    using Pairs = typename S::Pairs;
    using Values = InterleavedValues<S>;
    static constexpr int kWidth = S::kWidth;
    static constexpr int kGroup = kWidth;  // tokens folded together
    static constexpr int kColumns = Values::kColumns;

  public:
    using Simd = S;
    using Element = bf16;
    static constexpr int kTileTokens = 32;
    static constexpr int kBlockRows = 6;
    static constexpr bool kHeadsTogether = true;  // Zen 4
    static constexpr bool kRoundsWeights = false;
    static constexpr int kHeadroom = 0;
    static constexpr int kSoftmaxShares = 0;
    static constexpr int kManyRows = kWidth / 2;

    PairProducts(std::int64_t k_width, std::int64_t v_width, int rows, Scratch& scratch)
        : k_width_(static_cast<int>(k_width)),
          v_width_(static_cast<int>(v_width)),
          k_stride_(static_cast<int>(padded_to(k_width, kColumns))),
          rows_(rows),
          blocks_(rows, kBlockRows),
          folds_(scratch.take<float>(kBlockRows * 4 * kWidth)),
          rounded_(scratch.take<bf16>(kBlockRows * kTileTokens)),
          pair_stride_(2 * static_cast<int>(padded_to(v_width, kColumns))) {
        if (!many_rows()) return;
        keys_ = scratch.take<bf16>(std::int64_t{kTileTokens} * k_stride_);
        interleaved_ = scratch.take<bf16>(std::int64_t{kTileTokens / 2} * pair_stride_);
    }

    std::int64_t query_bytes() const { return std::int64_t{rows_} * k_stride_ * 2; }

    void pack_query(unsigned char* packed, int row, const bf16* query) const {
        auto* to = reinterpret_cast<bf16*>(packed) + std::int64_t{row} * k_stride_;
        for (int d = 0; d < k_width_; d += kColumns) S::store_pairs(to + d, Values::load_columns(query, d, k_width_));
    }

    int block_rows(int row) const { return blocks_.rows_from(row); }

    void begin(const bf16* const* k, const bf16* const* v, LinesAhead<S>& ahead, int start, int stop) {
        k_ = k, v_ = v, ahead_ = &ahead;
        if (!many_rows()) return;
        transpose_keys();
        const int lines = ahead.lines_of(2 * kTileTokens, kTileTokens / 2);
        for (int t = 0; t < kTileTokens; t += 2) {
            ahead.fetch(lines);
            if (t + 1 >= start && t < stop) Values::interleave_rows(v[t], v[t + 1], v_width_, interleaved_ + t / 2 * pair_stride_);
        }
    }

    void scores(const unsigned char* packed, int row, int rows, int start, int stop, float* s) const {
        const auto* query = reinterpret_cast<const bf16*>(packed) + std::int64_t{row} * k_stride_;
        if (many_rows()) return scores_across(query, rows, s);
        switch (rows) {
            case 1: return scores_tile<1>(query, start, stop, s);
            case 2: return scores_tile<2>(query, start, stop, s);
            case 3: return scores_tile<3>(query, start, stop, s);
            case 4: return scores_tile<4>(query, start, stop, s);
            case 5: return scores_tile<5>(query, start, stop, s);
            default: return scores_tile<6>(query, start, stop, s);
        }
    }

    void values(const float* p, int, int rows, int start, int stop, float* o, std::int64_t stride) const {
        for (int r = 0; r < rows; ++r) Values::round_row(p + r * kTileTokens, rounded_ + r * kTileTokens, kTileTokens);
        switch (rows) {
            case 1: return values_tile<1>(start, stop, o, stride);
            case 2: return values_tile<2>(start, stop, o, stride);
            case 3: return values_tile<3>(start, stop, o, stride);
            case 4: return values_tile<4>(start, stop, o, stride);
            case 5: return values_tile<5>(start, stop, o, stride);
            default: return values_tile<6>(start, stop, o, stride);
        }
    }

    void finish(const float* o, float factor, bf16* out) const { Values::finish(o, factor, v_width_, out); }

  private:
    // Tokens of a register tile of scores, and interleaved chunks of 32 columns of one of values.
    static constexpr int tile_tokens(int rows) { return rows == 1 ? 8 : 4; }
    static constexpr int tile_chunks(int rows) { return rows <= 2 ? 4 : 2; }

    // Rows of a register tile with lanes of tokens: measured, 4 and 6 are no faster.
    static constexpr int kAcrossRows = 3;
    bool many_rows() const { return rows_ > kBlockRows; }

    // The tile's keys -> [k_stride_ / 2 pairs of d][kTileTokens]. All 32: what no row sees are rows of zeros.
    void transpose_keys() {
        for (int d = 0; d < k_width_; d += kColumns) {
            for (int t = 0; t < kTileTokens; t += kWidth) {
                Pairs square[kWidth];
#pragma GCC unroll 16
                for (int i = 0; i < kWidth; ++i) square[i] = Values::load_columns(k_[t + i], d, k_width_);
                S::transpose(square);
#pragma GCC unroll 16
                for (int i = 0; i < kWidth; ++i) S::store_pairs(keys_ + (d + 2 * i) * kTileTokens + 2 * t, square[i]);
            }
        }
    }

    // Lanes of tokens, two vectors of them: all 32, whatever the rows see of them.
    void scores_across(const bf16* query, int rows, float* s) const {
        for (; rows >= kAcrossRows; rows -= kAcrossRows, query += kAcrossRows * k_stride_, s += kAcrossRows * kTileTokens) {
            tokens_tile<kAcrossRows>(query, s);
        }
        switch (rows) {
            case 1: return tokens_tile<1>(query, s);
            case 2: return tokens_tile<2>(query, s);
            default: return;
        }
    }

    template <int kRows>
    __attribute__((noinline)) void tokens_tile(const bf16* query, float* s) const {
        static_assert(kWidth == 16, "the fold tree is one of 4 parts of 4 lanes");
        constexpr int kSums = kRows * kTileTokens / kWidth;
        Vec parts[4][kSums];
        for (int part = 0; part < 4; ++part) {
            Vec even[kSums], odd[kSums];
            add_lanes<kRows>(query, 4 * part, even);
            add_lanes<kRows>(query, 4 * part + 1, odd);
#pragma GCC unroll 16
            for (int i = 0; i < kSums; ++i) parts[part][i] = S::add(even[i], odd[i]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kSums; ++i) {
            S::store(s + i * kWidth, S::add(S::add(parts[0][i], parts[1][i]), S::add(parts[2][i], parts[3][i])));
        }
    }

    // The sums of lanes `lane` and `lane + 2`, added.
    template <int kRows, int kSums>
    __attribute__((always_inline)) void add_lanes(const bf16* query, int lane, Vec (&sum)[kSums]) const {
        Vec other[kSums];
#pragma GCC unroll 16
        for (int i = 0; i < kSums; ++i) sum[i] = other[i] = S::zero();
        for (int d = 2 * lane; d < k_stride_; d += kColumns) {
            multiply_across<kRows>(query + d, keys_ + d * kTileTokens, sum);
            multiply_across<kRows>(query + d + 4, keys_ + (d + 4) * kTileTokens, other);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kSums; ++i) sum[i] = S::add(sum[i], other[i]);
    }

    template <int kRows, int kSums>
    __attribute__((always_inline)) void multiply_across(const bf16* query, const bf16* keys, Vec (&sum)[kSums]) const {
        constexpr int kVectors = kTileTokens / kWidth;
        Pairs loaded[kVectors];
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) loaded[i] = S::load_pairs(keys + i * kColumns);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const Pairs q = S::broadcast_pair(query + r * k_stride_);
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i) sum[r * kVectors + i] = S::dot(sum[r * kVectors + i], q, loaded[i]);
        }
    }

    template <int kRows>
    __attribute__((noinline)) void scores_tile(const bf16* query, int start, int stop, float* s) const {
        constexpr int kTokens = tile_tokens(kRows);
        const int lines = many_rows() ? 0 : ahead_->lines_of(kTokens, k_stride_ / kColumns);
        for (int group = start / kGroup * kGroup; group < stop; group += kGroup) {
            for (int t = 0; t < kGroup; t += kTokens) {
                const bf16* near[kTokens];  // half a tile on: keys, then values
                for (int n = 0; n < kTokens; ++n) {
                    const int token = group + t + n + kTileTokens / 2;
                    near[n] = token < kTileTokens ? k_[token] : v_[token - kTileTokens];
                }
                const bf16* key[kTokens];
                Vec sum[kRows][kTokens];
#pragma GCC unroll 16
                for (int n = 0; n < kTokens; ++n) {
                    key[n] = k_[group + t + n];
#pragma GCC unroll 8
                    for (int r = 0; r < kRows; ++r) sum[r][n] = S::zero();
                }
                int d = 0;
                for (; d + kColumns <= k_width_; d += kColumns) {
                    if (lines > 0) ahead_->fetch(lines);
                    if (lines > 0 && ahead_->near) {
#pragma GCC unroll 16
                        for (int n = 0; n < kTokens; ++n) S::prefetch(near[n] + d);
                    }
                    multiply_scores<kRows, kTokens>(query + d, key, sum, [d](const bf16* from) { return S::load_pairs(from + d); });
                }
                const int rest = k_width_ - d;
                if (rest > 0) {
                    multiply_scores<kRows, kTokens>(query + d, key, sum, [d, rest](const bf16* from) { return S::load_pairs_part(from + d, rest); });
                }
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
                    for (int n = 0; n < kTokens; n += 4) {
                        S::store(folds_ + r * 4 * kWidth + (t + n) / 4 * kWidth,
                                 S::fold_four(sum[r][n], sum[r][n + 1], sum[r][n + 2], sum[r][n + 3]));
                    }
                }
            }
            for (int r = 0; r < kRows; ++r) {
                const float* parts = folds_ + r * 4 * kWidth;
                S::store(s + r * kTileTokens + group, S::fold_parts(S::load(parts), S::load(parts + kWidth), S::load(parts + 2 * kWidth),
                                                                    S::load(parts + 3 * kWidth)));
            }
        }
    }

    template <int kRows, int kTokens, class Load>
    __attribute__((always_inline)) void multiply_scores(const bf16* query, const bf16* const (&key)[kTokens], Vec (&sum)[kRows][kTokens],
                                                        Load load) const {
        Pairs loaded[kTokens];
#pragma GCC unroll 16
        for (int n = 0; n < kTokens; ++n) loaded[n] = load(key[n]);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const Pairs q = S::load_pairs(query + r * k_stride_);
#pragma GCC unroll 16
            for (int n = 0; n < kTokens; ++n) sum[r][n] = S::dot(sum[r][n], q, loaded[n]);
        }
    }

    template <int kRows>
    __attribute__((noinline)) void values_tile(int start, int stop, float* o, std::int64_t stride) const {
        constexpr int kChunks = tile_chunks(kRows);
        const int padded = pair_stride_ / 2;
        int d = 0;
        for (; d + kChunks * kColumns <= padded; d += kChunks * kColumns) values_columns<kRows, kChunks>(start, stop, d, o + d, stride);
        for (; d < padded; d += kColumns) values_columns<kRows, 1>(start, stop, d, o + d, stride);
    }

    template <int kRows, int kChunks>
    __attribute__((always_inline)) void values_columns(int start, int stop, int column, float* o, std::int64_t stride) const {
        const int lines = many_rows() ? 0 : ahead_->lines_of(2 * kChunks * kColumns, pair_stride_ / 2);
        Vec sum[kRows][2 * kChunks];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int i = 0; i < 2 * kChunks; ++i) sum[r][i] = S::load(o + r * stride + i * kWidth);
        }
        for (int t = start & ~1; t < stop; t += 2) {
            if (lines > 0) ahead_->fetch(lines);
            if (lines > 0 && ahead_->near && t < kTileTokens / 2) {
                for (const int near : {t + kTileTokens / 2, t + 1 + kTileTokens / 2}) {
#pragma GCC unroll 4
                    for (int i = 0; i < kChunks; ++i) S::prefetch(v_[near] + column + i * kColumns);
                }
            }
            Pairs loaded[2 * kChunks];
            if (many_rows()) {
                const bf16* pairs = interleaved_ + t / 2 * pair_stride_ + 2 * column;
#pragma GCC unroll 8
                for (int i = 0; i < 2 * kChunks; ++i) loaded[i] = S::load_pairs(pairs + i * kColumns);
            } else {
#pragma GCC unroll 4
                for (int i = 0; i < kChunks; ++i) {
                    Values::load_interleaved(v_[t], v_[t + 1], column + i * kColumns, v_width_, loaded[2 * i], loaded[2 * i + 1]);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const Pairs weights = S::broadcast_pair(rounded_ + r * kTileTokens + t);
#pragma GCC unroll 8
                for (int i = 0; i < 2 * kChunks; ++i) sum[r][i] = S::dot(sum[r][i], weights, loaded[i]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int i = 0; i < 2 * kChunks; ++i) S::store(o + r * stride + i * kWidth, sum[r][i]);
        }
    }

    const int k_width_, v_width_;
    const int k_stride_;  // elements of a packed query
    const int rows_;
    const RowBlocks blocks_;
    float* folds_;    // halfway up the fold tree: [row][4][kWidth]
    bf16* rounded_;  // p of a block
    const int pair_stride_;
    bf16* keys_ = nullptr;         // transposed: [pair of d][kTileTokens]
    bf16* interleaved_ = nullptr;  // [tile / 2][pair_stride_]
    const bf16* const* k_ = nullptr;
    const bf16* const* v_ = nullptr;
    LinesAhead<S>* ahead_ = nullptr;
};

}  // namespace
}  // namespace quire
