// Both products of attention by AMX tiles (tdpbf16ps), for bf16 keys and values; one row or sixteen.
//
// Scores transposed: A = 16 tokens x 32 of K as they lie in memory, B = 16 query rows packed in pairs of d, C = 16 tokens x
// 16 rows, 32 of d after the other. Values: A = p rounded to bf16, rows x 32 tokens; B = 32 tokens x 16 columns, pairs of
// tokens interleaved into scratch on the way; C = o. Four sums at once where there are sixteen rows: each waits for its last
// product three times as long as the next takes.
//
// Prefetches are spread over the whole computation: while a core has its maximum of lines in flight, every other miss
// of its first cache waits too, and a few instructions between two prefetches avoid that.
//
// Tiles: 0 to 3 sums (2, 3 and 7 of as many rows as o has); 4, 5 keys, or values; 6 queries; 7 p. The sums of scores, and the
// queries, have as many columns as there are rows, up to the next power of two.
#pragma once

#include "kernels/amx.hpp"
#include "kernels/attention_tile_packing.hpp"

namespace quire {
namespace {

template <class S, class TileSet>
class TileProducts : TilePacking<S> {
    using Packing = TilePacking<S>;
    using Values = InterleavedValues<S>;
    using Pairs = typename S::Pairs;
    using Vec = typename S::Vec;
    using Packing::kColumns, Packing::kSide, Packing::kTileElements;
    static constexpr int kTogether = 2 * kSide;        // tokens of one product of values

  public:
    using Simd = S;
    using Element = bf16;
    using Stored = bf16;
    using Packing::kTileTokens, Packing::kHeadroom;
    static constexpr int kBlockRows = kSide;
    static constexpr bool kHeadsTogether = false;
    static constexpr bool kRoundsWeights = true;
    static constexpr int kManyRows = kSide;
    // Of 2 kTileTokens shares of the memory to come, as long as each part takes.
    static constexpr int kPackShares = kTileTokens / 2, kScoresShares = kTileTokens * 3 / 4;
    static constexpr int kSoftmaxShares = kTileTokens / 2, kValuesShares = kTileTokens / 4;

    TileProducts(const PagedView& view, int rows, Scratch& scratch)
        : k_width_(static_cast<int>(view.k.width)),
          v_width_(static_cast<int>(view.v.width)),
          k_padded_(static_cast<int>(padded_to(k_width_, kColumns))),
          v_tiles_(static_cast<int>(padded_to(v_width_, kColumns)) / kSide),
          rows_(rows),
          block_bytes_(k_padded_ * kSide * 2),
          keys_(scratch.take<bf16>(std::int64_t{kTileTokens} * k_padded_)),
          scores_(scratch.take<float>(4 * kSide * kSide)),
          rounded_(scratch.take<bf16>(kSide * kTileTokens)),
          values_(scratch.take<bf16>(std::int64_t{kTileTokens / kTogether} * v_tiles_ * kTileElements)),
          tiles_(config(block_rows(0))),
          configured_rows_(block_rows(0)),
          columns_(columns_of(configured_rows_)) {}

    std::int64_t query_bytes() const { return padded_to(rows_, kSide) / kSide * block_bytes_; }

    // [block of 16 rows][32 of d][16 pairs][16 rows][2]; a block is packed with its last row.
    void pack_query(unsigned char* packed, int row, const bf16* query) {
        auto* to = reinterpret_cast<bf16*>(packed + row / kSide * std::int64_t{block_bytes_});
        unpacked_[row % kSide] = query;
        if (row % kSide != kSide - 1 && row != rows_ - 1) return;
        for (int i = row % kSide + 1; i < kSide; ++i) unpacked_[i] = reinterpret_cast<const bf16*>(kZeroRow);
        Packing::pack_pairs(unpacked_, k_width_, to, [] {});
    }

    int block_rows(int row) const { return rows_ - row < kSide ? rows_ - row : kSide; }

    void begin(const bf16* const* k, const bf16* const* v, LinesAhead<S>& ahead, int start, int stop) {
        ahead_ = &ahead;
        // All tokens of a product are multiplied: those that no row sees must be zero, not left over.
        const int first = start / kTogether * kTogether, last = static_cast<int>(padded_to(stop, kTogether));
        num_steps_ = (last - first) / kTogether;
        for (int t = first; t < last; t += kSide) find_keys(k, t / kSide, start, stop);
        const int lines = ahead.lines_of(kPackShares, (last - first) / 2);
        Packing::pack_values(v, first, last, v_width_, values_, [&] { ahead.fetch(lines); });
    }

    void scores(const unsigned char* packed, int row, int rows, int start, int stop, float* s) {
        if (rows != configured_rows_) {
            tiles_.configure(config(rows));
            configured_rows_ = rows;
            columns_ = columns_of(rows);
        }
        const auto* query = reinterpret_cast<const bf16*>(packed + row / kSide * std::int64_t{block_bytes_});
        const int lines = row == 0 ? ahead_->lines_of(kScoresShares, 2 * num_steps_ * (k_padded_ / kColumns)) : 0;
        for (int t = start / kTogether * kTogether; t < stop; t += kTogether) {
            if (rows == kSide && stop - t > kTogether) {
                four_scores(query, t / kSide, 4 * lines);
                transpose_scores<4>(rows, s + t);
                t += kTogether;
                continue;
            }
            two_scores(query, t / kSide, lines);
            switch (columns_) {
                case 1: unzip_scores<1>(s + t); break;
                case 2: unzip_scores<2>(s + t); break;
                case 4: unzip_scores<4>(s + t); break;
                case 8: unzip_scores<8>(s + t); break;
                default: transpose_scores<2>(rows, s + t);
            }
        }
    }

    // Of 2 x 16 tokens of row r of the block under way.
    void keep_weights(int r, int vector, Vec first, Vec second) {
        S::store_pairs(rounded_ + (vector / 2 * kSide + r) * kTogether, S::to_bf16(first, second));
    }

    void values(const float*, int row, int rows, int start, int stop, float* o, std::int64_t stride) {
        const int first = start / kTogether * kTogether;
        const int lines = row == 0 ? ahead_->lines_of(kValuesShares, num_steps_ * v_tiles_ / 2) : 0;
        int column = 0;
        if (rows == kSide) {
            for (; column + 4 <= v_tiles_; column += 4) four_values(column, first, stop, 2 * lines, o + column * kSide, stride * 4);
        }
        for (; column < v_tiles_; column += 2) two_values(column, first, stop, lines, o + column * kSide, stride * 4);
    }

    void finish(const float* o, float factor, bf16* out) const { Values::finish(o, factor, v_width_, out); }

  private:
    static int columns_of(int rows) { return rows > 8 ? 16 : rows > 4 ? 8 : rows > 2 ? 4 : rows; }
    static TileConfig config(int rows) {
        TileConfig config;
        for (const int tile : {4, 5}) config.tile(tile, kSide, 64);
        for (const int tile : {0, 1, 6}) config.tile(tile, kSide, 4 * columns_of(rows));
        for (const int tile : {2, 3, 7}) config.tile(tile, rows, 64);
        return config;
    }

    // Of 32 tokens from the half-th sixteen on, to scores_.
    void two_scores(const bf16* query, int half, int lines) {
        tiles_.template zero<0>();
        tiles_.template zero<1>();
        for (int d = 0; d < k_padded_; d += kColumns) {
            ahead_->fetch(lines);
            tiles_.template load<6>(query + d * kSide, 64);
            tiles_.template load<4>(key_base_[half] + d, key_stride_[half]);
            tiles_.template dot_bf16<0, 4, 6>();
            ahead_->fetch(lines);
            tiles_.template load<5>(key_base_[half + 1] + d, key_stride_[half + 1]);
            tiles_.template dot_bf16<1, 5, 6>();
        }
        tiles_.template store<0>(scores_, 4 * columns_);
        tiles_.template store<1>(scores_ + kSide * columns_, 4 * columns_);
    }

    // scores_ of 32 tokens -> s[row][token], where a power of two of rows lies together.
    template <int kRows>
    void unzip_scores(float* s) const {
#pragma GCC unroll 2
        for (int t = 0; t < kTogether; t += kSide) {
            Vec rows[kRows];
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) rows[i] = S::load(scores_ + t * kRows + i * kSide);
#pragma GCC unroll 3
            for (int step = kRows; step > 1; step /= 2) {
                Vec even_odd[kRows];
#pragma GCC unroll 4
                for (int i = 0; i < kRows / 2; ++i) S::unzip(rows[2 * i], rows[2 * i + 1], even_odd[i], even_odd[kRows / 2 + i]);
#pragma GCC unroll 8
                for (int i = 0; i < kRows; ++i) rows[i] = even_odd[i];
            }
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) S::store(s + i * kTileTokens + t, rows[i]);
        }
    }

    // Of 64 tokens; only where tiles 2 and 3 have sixteen rows.
    void four_scores(const bf16* query, int half, int lines) {
        tiles_.template zero<0>();
        tiles_.template zero<1>();
        tiles_.template zero<2>();
        tiles_.template zero<3>();
        for (int d = 0; d < k_padded_; d += kColumns) {
            ahead_->fetch(lines);
            tiles_.template load<6>(query + d * kSide, 64);
            tiles_.template load<4>(key_base_[half] + d, key_stride_[half]);
            tiles_.template dot_bf16<0, 4, 6>();
            tiles_.template load<5>(key_base_[half + 1] + d, key_stride_[half + 1]);
            tiles_.template dot_bf16<1, 5, 6>();
            tiles_.template load<4>(key_base_[half + 2] + d, key_stride_[half + 2]);
            tiles_.template dot_bf16<2, 4, 6>();
            tiles_.template load<5>(key_base_[half + 3] + d, key_stride_[half + 3]);
            tiles_.template dot_bf16<3, 5, 6>();
        }
        tiles_.template store<0>(scores_, 64);
        tiles_.template store<1>(scores_ + kSide * kSide, 64);
        tiles_.template store<2>(scores_ + 2 * kSide * kSide, 64);
        tiles_.template store<3>(scores_ + 3 * kSide * kSide, 64);
    }

    // o[rows][32 columns] += p v, tokens [start, stop).
    void two_values(int column, int start, int stop, int lines, float* o, std::int64_t row_bytes) {
        tiles_.template load<2>(o, row_bytes);
        tiles_.template load<3>(o + kSide, row_bytes);
        for (int t = start; t < stop; t += kTogether) {
            ahead_->fetch(lines);
            const bf16* v = values_ + (t / kTogether * v_tiles_ + column) * kTileElements;
            tiles_.template load<7>(rounded_ + t * kSide, 64);
            tiles_.template load<4>(v, 64);
            tiles_.template dot_bf16<2, 7, 4>();
            tiles_.template load<5>(v + kTileElements, 64);
            tiles_.template dot_bf16<3, 7, 5>();
        }
        tiles_.template store<2>(o, row_bytes);
        tiles_.template store<3>(o + kSide, row_bytes);
    }

    // o[16][64 columns] += p v.
    void four_values(int column, int start, int stop, int lines, float* o, std::int64_t row_bytes) {
        tiles_.template load<0>(o, row_bytes);
        tiles_.template load<1>(o + kSide, row_bytes);
        tiles_.template load<2>(o + 2 * kSide, row_bytes);
        tiles_.template load<3>(o + 3 * kSide, row_bytes);
        for (int t = start; t < stop; t += kTogether) {
            ahead_->fetch(lines);
            const bf16* v = values_ + (t / kTogether * v_tiles_ + column) * kTileElements;
            tiles_.template load<7>(rounded_ + t * kSide, 64);
            tiles_.template load<4>(v, 64);
            tiles_.template dot_bf16<0, 7, 4>();
            tiles_.template load<5>(v + kTileElements, 64);
            tiles_.template dot_bf16<1, 7, 5>();
            tiles_.template load<4>(v + 2 * kTileElements, 64);
            tiles_.template dot_bf16<2, 7, 4>();
            tiles_.template load<5>(v + 3 * kTileElements, 64);
            tiles_.template dot_bf16<3, 7, 5>();
        }
        tiles_.template store<0>(o, row_bytes);
        tiles_.template store<1>(o + kSide, row_bytes);
        tiles_.template store<2>(o + 2 * kSide, row_bytes);
        tiles_.template store<3>(o + 3 * kSide, row_bytes);
    }

    // scores_ of kSixteens x 16 tokens -> s[row][token], sixteen tokens at a time as if they were pairs.
    template <int kSixteens>
    void transpose_scores(int rows, float* s) const {
        for (int t = 0; t < kSixteens * kSide; t += kSide) {
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
    const int v_tiles_;  // of sixteen columns, an even number
    const int rows_;
    const int block_bytes_;  // of sixteen packed query rows
    bf16* keys_;
    float* scores_;   // [token][columns_]
    bf16* rounded_;   // [32 tokens][row][32]
    bf16* values_;    // [32 tokens][16 columns][16 pairs of tokens][16 columns][2]
    const bf16* unpacked_[kSide];
    TileSet tiles_;
    int configured_rows_;
    int columns_;  // of a tile of scores
    const bf16* key_base_[kTileTokens / kSide];
    std::int64_t key_stride_[kTileTokens / kSide];
    int num_steps_ = 0;
    LinesAhead<S>* ahead_ = nullptr;
};

}  // namespace
}  // namespace quire
