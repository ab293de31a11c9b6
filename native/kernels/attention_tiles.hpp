// Both products of attention by AMX tiles (tdpbf16ps), for bf16 keys and values; one row or sixteen.
//
// Scores transposed: A = 16 tokens x 32 of K as they lie in memory, B = 16 query rows packed in pairs of d, C = 16 tokens x
// 16 rows, 32 of d after the other. Values: A = p rounded to bf16, rows x 32 tokens; B = 32 tokens x 16 columns, pairs of
// tokens interleaved into scratch on the way; C = o.
//
// Tiles: 0, 1 scores of 16 tokens each; 2, 3 keys, or values; 4 queries; 5 p; 6, 7 o.
#pragma once

#include "kernels/amx.hpp"
#include "kernels/attention_pairs.hpp"

namespace quire {
namespace {

template <class S, class TileSet>
class TileProducts : InterleavedValues<S> {
    using Values = InterleavedValues<S>;
    using Pairs = typename S::Pairs;
    static constexpr int kColumns = 32;                // of d in a tile of keys, of values in two tiles
    static constexpr int kSide = 16;                   // tokens or rows of a tile
    static constexpr int kTileElements = kSide * kColumns;
    static constexpr int kTransposedRows = 5;          // from here on sixteen rows at once are sooner done

  public:
    using Simd = S;
    using Element = bf16;
    static constexpr int kTileTokens = 2 * kSide;
    static constexpr int kBlockRows = kSide;
    static constexpr bool kHeadsTogether = true;

    TileProducts(std::int64_t k_width, std::int64_t v_width, int rows, Scratch& scratch)
        : k_width_(static_cast<int>(k_width)),
          v_width_(static_cast<int>(v_width)),
          k_padded_(static_cast<int>(padded_to(k_width, kColumns))),
          rows_(rows),
          block_bytes_(k_padded_ * kSide * 2),
          pair_stride_(2 * static_cast<int>(padded_to(v_width, kColumns))),
          keys_(scratch.take<bf16>(std::int64_t{kTileTokens} * k_padded_)),
          scores_(scratch.take<float>(kTileTokens * kSide)),
          rounded_(scratch.take<bf16>(kSide * kTileTokens)),
          interleaved_(scratch.take<bf16>(std::int64_t{kTileTokens / 2} * pair_stride_)),
          tiles_(config(block_rows(0))),
          configured_rows_(block_rows(0)) {}

    std::int64_t query_bytes() const { return padded_to(rows_, kSide) / kSide * block_bytes_; }

    // [block of 16 rows][32 of d][16 pairs][16 rows][2].
    void pack_query(unsigned char* packed, int row, const bf16* query) const {
        bf16* to = reinterpret_cast<bf16*>(packed + row / kSide * std::int64_t{block_bytes_}) + row % kSide * 2;
        int d = 0;
        for (; d + 2 <= k_width_; d += 2) __builtin_memcpy(to + d * kSide, query + d, 2 * sizeof(bf16));
        for (; d < k_padded_; d += 2) {
            to[d * kSide] = d < k_width_ ? query[d] : bf16{0};
            to[d * kSide + 1] = bf16{0};
        }
        if (row == rows_ - 1 && row % kSide != kSide - 1) clear_rows_after(packed, row);
    }

    int block_rows(int row) const { return rows_ - row < kSide ? rows_ - row : kSide; }

    void begin(const bf16* const* k, const bf16* const* v, LinesAhead<S>& ahead, int start, int stop) {
        ahead_ = &ahead;
        for (int half = 0; half < 2; ++half) find_keys(k, half, start, stop);
        // All 32 tokens are multiplied: those that no row sees must be zero, not left over.
        const int lines = ahead.lines_of(kTileTokens / 2, kTileTokens / 2);
        for (int t = 0; t < kTileTokens; t += 2) {
            ahead.fetch(lines);
            Values::interleave_rows(v[t], v[t + 1], v_width_, interleaved_ + t / 2 * pair_stride_);
        }
    }

    void scores(const unsigned char* packed, int row, int rows, int, int, float* s) {
        const auto* query = reinterpret_cast<const bf16*>(packed + row / kSide * std::int64_t{block_bytes_});
        tiles_.template zero<0>();
        tiles_.template zero<1>();
        const int lines = row == 0 ? ahead_->lines_of(kTileTokens / 2, k_padded_ / kColumns) : 0;
        for (int d = 0; d < k_padded_; d += kColumns) {
            ahead_->fetch(lines);
            tiles_.template load<4>(query + d / kColumns * kTileElements, 64);
            tiles_.template load<2>(key_base_[0] + d, key_stride_[0]);
            tiles_.template dot_bf16<0, 2, 4>();
            tiles_.template load<3>(key_base_[1] + d, key_stride_[1]);
            tiles_.template dot_bf16<1, 3, 4>();
        }
        tiles_.template store<0>(scores_, 64);
        tiles_.template store<1>(scores_ + kSide * kSide, 64);
        ahead_->fetch(row == 0 ? ahead_->lines_of(kTileTokens / 2, 1) : 0);
        if (rows >= kTransposedRows) return transpose_scores(rows, s);
        for (int r = 0; r < rows; ++r) {
            for (int t = 0; t < kTileTokens; ++t) s[r * kTileTokens + t] = scores_[t * kSide + r];
        }
    }

    void values(const float* p, int row, int rows, int, int, float* o, std::int64_t stride) {
        if (rows != configured_rows_) {
            tiles_.configure(config(rows));
            configured_rows_ = rows;
        }
        for (int r = 0; r < rows; ++r) Values::round_row(p + r * kTileTokens, rounded_ + r * kTileTokens, kTileTokens);
        tiles_.template load<5>(rounded_, 64);
        const std::int64_t pair_bytes = pair_stride_ * 2, row_bytes = stride * 4;
        const int lines = row == 0 ? ahead_->lines_of(kTileTokens / 2, pair_stride_ / 2 / kColumns) : 0;
        const int width = pair_stride_ / 2;
        int d = 0;
        // Two more sums where all tiles have sixteen rows: a product takes longer than the load and store of another's sums.
        if (rows == kSide) {
            for (; d + 2 * kColumns <= width; d += 2 * kColumns) {
                ahead_->fetch(2 * lines);
                tiles_.template load<6>(o + d, row_bytes);
                tiles_.template load<2>(interleaved_ + 2 * d, pair_bytes);
                tiles_.template dot_bf16<6, 5, 2>();
                tiles_.template load<7>(o + d + kSide, row_bytes);
                tiles_.template load<3>(interleaved_ + 2 * d + kColumns, pair_bytes);
                tiles_.template dot_bf16<7, 5, 3>();
                tiles_.template load<0>(o + d + kColumns, row_bytes);
                tiles_.template load<2>(interleaved_ + 2 * (d + kColumns), pair_bytes);
                tiles_.template dot_bf16<0, 5, 2>();
                tiles_.template load<1>(o + d + kColumns + kSide, row_bytes);
                tiles_.template load<3>(interleaved_ + 2 * (d + kColumns) + kColumns, pair_bytes);
                tiles_.template dot_bf16<1, 5, 3>();
                tiles_.template store<6>(o + d, row_bytes);
                tiles_.template store<7>(o + d + kSide, row_bytes);
                tiles_.template store<0>(o + d + kColumns, row_bytes);
                tiles_.template store<1>(o + d + kColumns + kSide, row_bytes);
            }
        }
        for (; d < width; d += kColumns) {
            ahead_->fetch(lines);
            tiles_.template load<6>(o + d, row_bytes);
            tiles_.template load<2>(interleaved_ + 2 * d, pair_bytes);
            tiles_.template dot_bf16<6, 5, 2>();
            tiles_.template load<7>(o + d + kSide, row_bytes);
            tiles_.template load<3>(interleaved_ + 2 * d + kColumns, pair_bytes);
            tiles_.template dot_bf16<7, 5, 3>();
            tiles_.template store<6>(o + d, row_bytes);
            tiles_.template store<7>(o + d + kSide, row_bytes);
        }
    }

    void finish(const float* o, float factor, bf16* out) const { Values::finish(o, factor, v_width_, out); }

  private:
    static TileConfig config(int rows) {
        TileConfig config;
        for (int tile = 0; tile < 5; ++tile) config.tile(tile, kSide, 64);
        return config.tile(5, rows, 64).tile(6, rows, 64).tile(7, rows, 64);
    }

    // scores_ -> s[row][token], sixteen tokens at a time as if they were pairs.
    void transpose_scores(int rows, float* s) const {
        for (int t = 0; t < kTileTokens; t += kSide) {
            Pairs square[kSide];
#pragma GCC unroll 16
            for (int i = 0; i < kSide; ++i) square[i] = S::load_pairs(reinterpret_cast<const bf16*>(scores_ + (t + i) * kSide));
            S::transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < kSide; ++i) {
                if (i < rows) S::store_pairs(reinterpret_cast<bf16*>(s + i * kTileTokens + t), square[i]);
            }
        }
    }

    void clear_rows_after(unsigned char* packed, int last) const {
        auto* block = reinterpret_cast<bf16*>(packed + last / kSide * std::int64_t{block_bytes_});
        for (int pair = 0; pair < k_padded_ / 2; ++pair) {
            for (int i = 2 * (last % kSide + 1); i < 2 * kSide; ++i) block[pair * 2 * kSide + i] = bf16{0};
        }
    }

    // Sixteen keys as a tile's rows: in place where they lie at one stride and fill their last 32 columns, else a copy.
    void find_keys(const bf16* const* k, int half, int start, int stop) {
        const int first = half * kSide;
        const std::int64_t stride = k[first + 1] - k[first];
        bool in_place = k_width_ == k_padded_ && start <= first && stop >= first + kSide;
        for (int t = first + 1; in_place && t < first + kSide; ++t) in_place = k[t] - k[t - 1] == stride;
        if (in_place) {
            key_base_[half] = k[first];
            key_stride_[half] = stride * 2;
            return;
        }
        for (int t = first; t < first + kSide; ++t) {
            for (int d = 0; d < k_padded_; d += kColumns) S::store_pairs(keys_ + t * k_padded_ + d, Values::load_columns(k[t], d, k_width_));
        }
        key_base_[half] = keys_ + first * k_padded_;
        key_stride_[half] = k_padded_ * 2;
    }

    const int k_width_, v_width_;
    const int k_padded_;
    const int rows_;
    const int block_bytes_;  // of sixteen packed query rows
    const int pair_stride_;
    bf16* keys_;
    float* scores_;  // [token][row]
    bf16* rounded_;
    bf16* interleaved_;
    TileSet tiles_;
    int configured_rows_;
    const bf16* key_base_[2];
    std::int64_t key_stride_[2];
    LinesAhead<S>* ahead_ = nullptr;
};

}  // namespace
}  // namespace quire
