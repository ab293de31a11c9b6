// Both products of attention in float32 lanes: portable, AVX2 and AVX-512, for every element type, and for codes of 8 and 4 bits.
//
// Scores: lanes of d, kWidth of them, in order; then the fold tree. Values: lanes of d, tokens in order. One row or many
// compute the same sums; many read keys and values that were widened to float32 once.
//
// Few rows: a register holds the kWidth sums of one score, and shuffles fold them. Many rows, with 16 lanes: the tile's keys
// are transposed once, a register holds the same one of the 16 sums of 16 tokens, and the tree is 15 additions of registers:
// the same products and additions in the same order, so the same bits.
#pragma once

#include "kernels/attention_item.hpp"
#include "kernels/kv_codes.hpp"

namespace quire {
namespace {

// M, N: of keys and of values in memory. Of codes of 8 bits the scale of a key is multiplied into its scores, that of a value into its
// weights, so a code is widened as it is loaded; codes of 4 bits are multiplied with their group's scale then, which is exact. Queries
// are turned as the keys are (kv_codes.hpp).
template <class S, class T, class M = T, class N = M>
class LaneProducts {
    static constexpr bool kCoded = !std::is_same_v<M, T>;
    static constexpr bool kScaledScores = std::is_same_v<M, code8>, kScaledWeights = std::is_same_v<N, code8>;
    static constexpr bool kGroupedKeys = std::is_same_v<M, code4>, kGroupedValues = std::is_same_v<N, code4>;
    static constexpr int kMostGroups = (kMaxHeadWidth + kCodeGroup - 1) / kCodeGroup;
    static constexpr int kWidth = S::kWidth;
    using Vec = typename S::Vec;

  public:
    using Simd = S;
    using Element = T;
    using Stored = M;
    static constexpr int kTileTokens = 32;
    static constexpr int kBlockRows = 6;
    // Not with AVX-512, which multiplies bf16 on Intel without AMX: there a head at a time reads blocks of 1 at 0.63 to 0.80
    // of the read bandwidth instead of 0.50 to 0.57, larger ones about alike. (Asking for near rows once more, as the pairs
    // do, made nothing faster there, and 28 to 30 GB/s instead of 34 to 42 of what lies in the second cache.)
    static constexpr bool kHeadsTogether = kWidth != 16;
    static constexpr bool kRoundsWeights = false;
    static constexpr int kHeadroom = 0;
    static constexpr int kSoftmaxShares = 0;
    static constexpr int kManyRows = kWidth / 2;

    LaneProducts(const PagedView& view, int rows, Scratch& scratch)
        : view_(view),
          k_width_(static_cast<int>(view.k.width)),
          v_width_(static_cast<int>(view.v.width)),
          k_stride_(static_cast<int>(padded_to(k_width_, 16))),
          v_stride_(static_cast<int>(padded_to(v_width_, 16))),
          rows_(rows),
          blocks_(rows, kBlockRows),
          widened_(many_rows() && sizeof(M) < sizeof(float)),
          folds_(scratch.take<float>(kBlockRows * kGroup * kWidth)) {
        if (widened_ || across()) wide_k_ = scratch.take<float>(kTileTokens * padded_to(k_width_, kColumns));
        if (widened_) wide_v_ = scratch.take<float>(std::int64_t{kTileTokens} * v_stride_);
    }

    std::int64_t query_bytes() const { return std::int64_t{rows_} * k_stride_ * 4; }

    void pack_query(unsigned char* packed, int row, const T* query) const {
        float* to = reinterpret_cast<float*>(packed) + std::int64_t{row} * k_stride_;
        if constexpr (kCoded) {
            switch (view_.element) {
                case quire::Element::f32: widen(Row<float>{reinterpret_cast<const float*>(query)}, to, k_width_, k_stride_); break;
                case quire::Element::bf16: widen(Row<bf16>{reinterpret_cast<const bf16*>(query)}, to, k_width_, k_stride_); break;
                case quire::Element::f16: widen(Row<f16>{reinterpret_cast<const f16*>(query)}, to, k_width_, k_stride_); break;
            }
            turn_query(to, k_width_);
        } else {
            widen(Row<T>{query}, to, k_width_, k_stride_);
        }
    }

    int block_rows(int row) const { return blocks_.rows_from(row); }

    void begin(const M* const* k, const M* const* v, LinesAhead<S>& ahead, int start, int stop) {
        k_ = k, v_ = v, ahead_ = &ahead;
        for (int t = 0; kCoded && t < kTileTokens; ++t) {
            const bool seen = t >= start && t < stop;
            take_scales(view_.k, k[t], seen, k_scales_ + t);
            take_scales(view_.v, v[t], seen, v_scales_ + t);
        }
        if (!many_rows()) return;
        if constexpr (kCanCross) {
            for (int d = 0; d < k_width_; d += kColumns) {
                for (int t = 0; t < kTileTokens; t += kWidth) widen_columns(t, d, wide_k_ + d * kTileTokens + t);
            }
        }
        for (int t = 0; t < kTileTokens; ++t) {
            if (!widened_) continue;
            wide_k_rows_[t] = wide_k_ + t * k_stride_;
            wide_v_rows_[t] = wide_v_ + t * v_stride_;
            if (t < start / kGroup * kGroup || t >= padded_to(stop, kGroup)) continue;
            if (!across()) widen(key_rows()[t], wide_k_ + t * k_stride_, k_width_, k_stride_);
            widen(value_rows()[t], wide_v_ + t * v_stride_, v_width_, v_stride_);
        }
    }

    void scores(const unsigned char* packed, int row, int rows, int start, int stop, float* s) const {
        const float* query = reinterpret_cast<const float*>(packed) + std::int64_t{row} * k_stride_;
        fetch_for_block();
        if (across()) {
            if constexpr (kCanCross) scores_across(query, rows, s);
        } else if (widened_) {
            scores_of(query, rows, Rows<float>{wide_k_rows_}, start, stop, s);
        } else {
            scores_of(query, rows, key_rows(), start, stop, s);
        }
        if constexpr (kScaledScores) {  // of tokens that no row sees s may be anything
            for (int r = 0; r < rows; ++r) times_scales(s + r * kTileTokens, k_scales_, s + r * kTileTokens);
        }
    }

    void values(const float* p, int, int rows, int start, int stop, float* o, std::int64_t stride) const {
        fetch_for_block();
        alignas(64) float scaled[kScaledWeights ? kBlockRows * kTileTokens : 1];
        if constexpr (kScaledWeights) {
            for (int r = 0; r < rows; ++r) times_scales(p + r * kTileTokens, v_scales_, scaled + r * kTileTokens);
            p = scaled;
        }
        if (widened_) {
            values_of(p, rows, Rows<float>{wide_v_rows_}, start, stop, o, stride);
        } else {
            values_of(p, rows, value_rows(), start, stop, o, stride);
        }
    }

    void finish(const float* o, float factor, T* out) const {
        if constexpr (kCoded) {
            switch (view_.element) {
                case quire::Element::f32: return finish_as(o, factor, reinterpret_cast<float*>(out));
                case quire::Element::bf16: return finish_as(o, factor, reinterpret_cast<bf16*>(out));
                case quire::Element::f16: return finish_as(o, factor, reinterpret_cast<f16*>(out));
            }
        } else {
            finish_as(o, factor, out);
        }
    }

  private:
    // A token's keys or values, and those of a tile's tokens: columns from d on, in float32.
    template <class E>
    struct Row {
        const E* at;
        Vec load(int d) const { return S::load(at + d); }
        Vec load_part(int d, int n) const { return S::load_part(at + d, n); }
    };
    template <class E>
    struct Rows {
        const E* const* rows;
        Row<E> operator[](int t) const { return {rows[t]}; }
    };
    // Of codes of 4 bits. scales: of the token's first group, kTileTokens to the next.
    struct GroupedRow {
        const code4* at;
        const float* scales;
        Vec load(int d) const { return S::mul(S::load(at + d / 2), scale(d)); }
        Vec load_part(int d, int n) const { return S::mul(S::load_part(at + d / 2, n), scale(d)); }
        Vec scale(int d) const { return S::broadcast(scales[d / static_cast<int>(kCodeGroup) * kTileTokens]); }
    };
    struct GroupedRows {
        const M* const* rows;
        const float* scales;
        GroupedRow operator[](int t) const { return {reinterpret_cast<const code4*>(rows[t]), scales + t}; }
    };
    using KeyRows = std::conditional_t<kGroupedKeys, GroupedRows, Rows<M>>;
    using ValueRows = std::conditional_t<kGroupedValues, GroupedRows, Rows<M>>;
    KeyRows key_rows() const {
        if constexpr (kGroupedKeys) return GroupedRows{k_, k_scales_};
        else return Rows<M>{k_};
    }
    ValueRows value_rows() const {
        if constexpr (kGroupedValues) return GroupedRows{v_, v_scales_};
        else return Rows<M>{v_};
    }

    // The scales of a row of codes, [scale][kTileTokens]; zeros where no row of queries sees the token.
    static void take_scales(const PagedTensor& tensor, const M* row, bool seen, float* to) {
        const int count = static_cast<int>(tensor.num_scales());
        for (int i = 0; i < count; ++i) to[i * kTileTokens] = seen ? code_scale(row, tensor.scale + 2 * i) : 0.0f;
    }

    // Columns [d, d + kColumns) of the keys of kWidth tokens from t on: to[column * kTileTokens + token].
    void widen_columns(int t, int d, float* to) const {
        if constexpr (kGroupedKeys) {
            alignas(64) float wide[kWidth][kColumns];
            const float* rows[kWidth];
            const int width = k_width_ - d < kColumns ? k_width_ - d : kColumns;
            for (int i = 0; i < kWidth; ++i) {
                const GroupedRow key = key_rows()[t + i];
                rows[i] = wide[i];
                int column = 0;
                for (; column + kWidth <= width; column += kWidth) S::store(wide[i] + column, key.load(d + column));
                if (column < width) S::store(wide[i] + column, key.load_part(d + column, width - column));
            }
            S::widen_columns(rows, 0, width, to, kTileTokens);
        } else {
            S::widen_columns(k_ + t, d, k_width_, to, kTileTokens);
        }
    }

    template <class E>
    void finish_as(const float* o, float factor, E* out) const {
        const Vec factors = S::broadcast(factor);
        for (int d = 0; d < v_width_; d += kWidth) store_scaled<S>(S::load(o + d), factors, out + d, v_width_ - d);
    }

    static void times_scales(const float* from, const float* scales, float* to) {
        for (int t = 0; t < kTileTokens; t += kWidth) S::store(to + t, S::mul(S::load(from + t), S::load(scales + t)));
    }

    // Many rows: the next tile's memory over the products of this one's row blocks, not all at once.
    void fetch_for_block() const {
        if (many_rows()) ahead_->fetch(ahead_->lines_of(2 * kTileTokens, 2 * blocks_.count()));
    }

    // Tokens folded together: no fewer than give each product enough independent sums.
    static constexpr int kGroup = kWidth < 8 ? 8 : kWidth;
    static constexpr bool kTails = kWidth > 8;  // widths are multiples of 8

    static constexpr bool kCanCross = kWidth == 16;
    // Tokens whose sums share a vector when they are stored: the first half of the fold tree is done in registers where
    // the layer has its halves.
    static constexpr int kFolded = kWidth == 16 ? 4 : 1;
    static constexpr int kColumns = kCanCross ? 32 : 16;  // of keys widened at once
    bool many_rows() const { return rows_ > kBlockRows; }
    bool across() const { return kCanCross && many_rows(); }

    // Tokens and vectors of d of a register tile with `rows` rows.
    static constexpr int tile_tokens(int rows) {
        constexpr int kMost = S::kRegisters == 32 ? 4 : 2;
        return rows == 1 ? 4 * kMost : rows <= 3 ? 2 * kMost : kMost;
    }
    static constexpr int tile_vectors(int rows) { return tile_tokens(rows); }

    template <class From>
    static void widen(From from, float* to, int width, int padded) {
        int d = 0;
        for (; d + kWidth <= width; d += kWidth) S::store(to + d, from.load(d));
        if constexpr (kTails) {
            if (d < width) S::store(to + d, from.load_part(d, width - d)), d += kWidth;
        }
        for (; d < padded; d += kWidth) S::store(to + d, S::zero());
    }

    // Lanes of tokens, two vectors of them: all 32, whatever the rows see of them.
    void scores_across(const float* query, int rows, float* s) const {
        switch (rows) {
            case 1: return tokens_tile<1>(query, s);
            case 2: return tokens_tile<2>(query, s);
            case 3: return tokens_tile<3>(query, s);
            case 4: return tokens_tile<4>(query, s);
            case 5: return tokens_tile<5>(query, s);
            default: return tokens_tile<6>(query, s);
        }
    }

    template <int kRows>
    __attribute__((noinline)) void tokens_tile(const float* query, float* s) const {
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
    __attribute__((always_inline)) void add_lanes(const float* query, int lane, Vec (&sum)[kSums]) const {
        Vec other[kSums];
#pragma GCC unroll 16
        for (int i = 0; i < kSums; ++i) sum[i] = other[i] = S::zero();
        for (int d = lane; d < k_stride_; d += kWidth) {
            multiply_across<kRows>(query + d, wide_k_ + d * kTileTokens, sum);
            multiply_across<kRows>(query + d + 2, wide_k_ + (d + 2) * kTileTokens, other);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kSums; ++i) sum[i] = S::add(sum[i], other[i]);
    }

    template <int kRows, int kSums>
    __attribute__((always_inline)) void multiply_across(const float* query, const float* keys, Vec (&sum)[kSums]) const {
        constexpr int kVectors = kTileTokens / kWidth;
        Vec loaded[kVectors];
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) loaded[i] = S::load(keys + i * kWidth);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const Vec q = S::held(S::broadcast(query[r * k_stride_]));
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i) sum[r * kVectors + i] = S::fma(q, loaded[i], sum[r * kVectors + i]);
        }
    }

    template <class Keys>
    void scores_of(const float* query, int rows, Keys k, int start, int stop, float* s) const {
        switch (rows) {
            case 1: return scores_tile<1>(query, k, start, stop, s);
            case 2: return scores_tile<2>(query, k, start, stop, s);
            case 3: return scores_tile<3>(query, k, start, stop, s);
            case 4: return scores_tile<4>(query, k, start, stop, s);
            case 5: return scores_tile<5>(query, k, start, stop, s);
            default: return scores_tile<6>(query, k, start, stop, s);
        }
    }

    template <int kRows, class Keys>
    __attribute__((noinline)) void scores_tile(const float* query, Keys k, int start, int stop, float* s) const {
        constexpr int kTokens = tile_tokens(kRows);
        const int lines = many_rows() ? 0 : ahead_->lines_of(kTokens, k_stride_ / kWidth);
        static_assert(kGroup % kTokens == 0 && kTileTokens % kGroup == 0);
        for (int group = start / kGroup * kGroup; group < stop; group += kGroup) {
            for (int t = 0; t < kGroup; t += kTokens) {
                decltype(k[0]) key[kTokens];
                Vec sum[kRows][kTokens];
#pragma GCC unroll 16
                for (int n = 0; n < kTokens; ++n) {
                    key[n] = k[group + t + n];
#pragma GCC unroll 8
                    for (int r = 0; r < kRows; ++r) sum[r][n] = S::zero();
                }
                int d = 0;
                for (; d + kWidth <= k_width_; d += kWidth) {
                    if (lines > 0) ahead_->fetch(lines);
                    multiply_scores<kRows, kTokens>(query + d, key, sum, [d](const auto& from) { return from.load(d); });
                }
                if constexpr (kTails) {
                    const int rest = k_width_ - d;
                    if (rest > 0) {
                        multiply_scores<kRows, kTokens>(query + d, key, sum, [d, rest](const auto& from) { return from.load_part(d, rest); });
                    }
                }
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
                    for (int n = 0; n < kTokens; n += kFolded) S::store(folds_ + (r * kGroup + t + n) / kFolded * kWidth, half_folded(&sum[r][n]));
                }
            }
            for (int r = 0; r < kRows; ++r) {
                for (int t = 0; t < kGroup; t += kWidth) {
                    S::store(s + r * kTileTokens + group + t, folded(folds_ + (r * kGroup + t) / kFolded * kWidth));
                }
            }
        }
    }

    __attribute__((always_inline)) static Vec half_folded(const Vec* sums) {
        if constexpr (kFolded == 1) {
            return sums[0];
        } else {
            return S::fold_four(sums[0], sums[1], sums[2], sums[3]);
        }
    }
    // The scores of kWidth tokens.
    static Vec folded(const float* halves) {
        if constexpr (kFolded == 1) {
            return S::fold(halves);
        } else {
            return S::fold_parts(S::load(halves), S::load(halves + kWidth), S::load(halves + 2 * kWidth), S::load(halves + 3 * kWidth));
        }
    }

    template <int kRows, int kTokens, class Key, class Load>
    __attribute__((always_inline)) void multiply_scores(const float* query, const Key (&key)[kTokens], Vec (&sum)[kRows][kTokens],
                                                        Load load) const {
        Vec loaded[kTokens];
#pragma GCC unroll 16
        for (int n = 0; n < kTokens; ++n) loaded[n] = load(key[n]);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const Vec q = S::held(S::load(query + r * k_stride_));
#pragma GCC unroll 16
            for (int n = 0; n < kTokens; ++n) sum[r][n] = S::fma(q, loaded[n], sum[r][n]);
        }
    }

    template <class Values>
    void values_of(const float* p, int rows, Values v, int start, int stop, float* o, std::int64_t stride) const {
        switch (rows) {
            case 1: return values_tile<1>(p, v, start, stop, o, stride);
            case 2: return values_tile<2>(p, v, start, stop, o, stride);
            case 3: return values_tile<3>(p, v, start, stop, o, stride);
            case 4: return values_tile<4>(p, v, start, stop, o, stride);
            case 5: return values_tile<5>(p, v, start, stop, o, stride);
            default: return values_tile<6>(p, v, start, stop, o, stride);
        }
    }

    template <int kRows, class Values>
    __attribute__((noinline)) void values_tile(const float* p, Values v, int start, int stop, float* o, std::int64_t stride) const {
        constexpr int kVectors = tile_vectors(kRows), kStep = kVectors * kWidth;
        int d = 0;
        for (; d + kStep <= v_width_; d += kStep) {
            values_columns<kRows, kVectors>(p, v, start, stop, o + d, stride, d, [d](const auto& row, int i) { return row.load(d + i * kWidth); });
        }
        for (; d + kWidth <= v_width_; d += kWidth) {
            values_columns<kRows, 1>(p, v, start, stop, o + d, stride, d, [d](const auto& row, int) { return row.load(d); });
        }
        if constexpr (kTails) {
            const int rest = v_width_ - d;
            if (rest > 0) {
                values_columns<kRows, 1>(p, v, start, stop, o + d, stride, d, [d, rest](const auto& row, int) { return row.load_part(d, rest); });
            }
        }
    }

    template <int kRows, int kVectors, class Values, class Load>
    __attribute__((always_inline)) void values_columns(const float* p, Values v, int start, int stop, float* o, std::int64_t stride,
                                                       [[maybe_unused]] int column, Load load) const {
        const int lines = many_rows() ? 0 : ahead_->lines_of(kVectors * kWidth, v_stride_);
        Vec sum[kRows][kVectors];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
            for (int i = 0; i < kVectors; ++i) sum[r][i] = S::load(o + r * stride + i * kWidth);
        }
        for (int t = start; t < stop; ++t) {
            if (lines > 0) ahead_->fetch(lines);
            const auto row = v[t];
            Vec loaded[kVectors];
#pragma GCC unroll 16
            for (int i = 0; i < kVectors; ++i) loaded[i] = load(row, i);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const Vec weight = S::broadcast(p[r * kTileTokens + t]);
#pragma GCC unroll 16
                for (int i = 0; i < kVectors; ++i) sum[r][i] = S::fma(weight, loaded[i], sum[r][i]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
            for (int i = 0; i < kVectors; ++i) S::store(o + r * stride + i * kWidth, sum[r][i]);
        }
    }

    const PagedView& view_;
    alignas(64) float k_scales_[kCoded ? (kGroupedKeys ? kMostGroups : 1) * kTileTokens : 1];  // [scale][token]
    alignas(64) float v_scales_[kCoded ? (kGroupedValues ? kMostGroups : 1) * kTileTokens : 1];
    const int k_width_, v_width_;
    const int k_stride_, v_stride_;  // floats of a packed query, of a widened key and value
    const int rows_;
    const RowBlocks blocks_;
    const bool widened_;
    float* folds_;
    float* wide_k_ = nullptr;  // as widened: [token][k_stride_], or where across(): [k_width][kTileTokens]
    float* wide_v_ = nullptr;
    const float* wide_k_rows_[kTileTokens];
    const float* wide_v_rows_[kTileTokens];
    const M* const* k_ = nullptr;
    const M* const* v_ = nullptr;
    LinesAhead<S>* ahead_ = nullptr;
};

template <class S>
void attend_in_lanes(const AttentionJob& job, std::int64_t index) {
    switch (job.view->element) {
        case Element::f32: return AttendItem<LaneProducts<S, float>>(job, job.items[index]).run();
        case Element::bf16: return AttendItem<LaneProducts<S, bf16>>(job, job.items[index]).run();
        case Element::f16: return AttendItem<LaneProducts<S, f16>>(job, job.items[index]).run();
    }
}

}  // namespace
}  // namespace quire
