// Both products of attention by AMX tiles for more than 32 rows: 32 rows at a time are multiplied with the tiles of a
// group, whose keys and values are packed once. (Up to 32 rows memory bandwidth limits, and packing costs as much as it
// saves: attention_tiles.hpp.)
//
// A row's arithmetic is that of attention_tiles.hpp, operation for operation; only the order of rows and tiles differs.
// The states of 32 rows stay in the first cache while the group's keys and values stream from the second (tileloaddt1).
// Products are made of steps, of four tile products each, so that their caller can put a tile's softmax between the
// values of the tile before and the scores of the tile after.
//
// Tiles: 0 to 3 sums, of the upper half of the rows (0, 1) and the lower (2, 3); 4, 5 queries or p of the halves; 6, 7 keys, or
// values.
#pragma once

#include "kernels/amx.hpp"
#include "kernels/attention_ahead.hpp"
#include "kernels/attention_state.hpp"
#include "kernels/attention_tile_packing.hpp"

namespace quire {
namespace {

template <class S, class TileSet>
class ManyRows : TilePacking<S> {
    using Packing = TilePacking<S>;
    using Values = InterleavedValues<S>;
    using Vec = typename S::Vec;
    using Packing::kColumns, Packing::kSide, Packing::kTileElements;
    static constexpr std::int64_t kGroupBytes = 1 << 18;  // of packed keys and values, in a second cache of 2 MiB

  public:
    using Simd = S;
    using Packing::kTileTokens, Packing::kHeadroom;
    static constexpr int kRowsTogether = 2 * kSide;

    ManyRows(int k_width, int v_width, int rows, Scratch& scratch)
        : k_width_(k_width),
          v_width_(v_width),
          k_steps_(static_cast<int>(padded_to(k_width, kColumns)) / kColumns),
          v_steps_(static_cast<int>(padded_to(v_width, kColumns)) / kColumns),
          rows_(rows),
          group_tiles_(group_tiles(k_steps_ + v_steps_)),
          tiles_(TileConfig()),
          keys_(scratch.take<bf16>(std::int64_t{group_tiles_} * kTileTokens * k_steps_ * kColumns)),
          values_(scratch.take<bf16>(std::int64_t{group_tiles_} * kTileTokens * v_steps_ * kColumns)) {
        for (int i = 0; i < 2; ++i) {
            scores_[i] = scratch.take<float>(kRowsTogether * kTileTokens);
            weights_[i] = scratch.take<bf16>(kRowsTogether * kTileTokens);
        }
    }

    int k_width() const { return k_width_; }

    // Tiles whose keys and values are packed at once: a power of two.
    int group_tiles() const { return group_tiles_; }

    // Steps of a tile's scores and of its values at most.
    int num_steps() const { return 2 * (k_steps_ + v_steps_); }

    // Of a head's packed queries.
    std::int64_t query_elements() const { return std::int64_t{rows_} * k_steps_ * kColumns; }

    // Queries lie by 32 of d, then by rows: [32 of d][rows][32].
    void pack_query(bf16* packed, int row, const bf16* query) const {
        packed += row * kColumns;
        for (int d = 0; d < k_width_; d += kColumns, packed += rows_ * kColumns) S::store_pairs(packed, Values::load_columns(query, d, k_width_));
    }

    // The keys and values of the tile at `place` of the group: row pointers of its tokens. `lines` of what is ahead are asked for
    // at each of pack_steps().
    int pack_steps() const { return kTileTokens / kSide * k_steps_ + kTileTokens / 2; }
    void pack(int place, const bf16* const* k, const bf16* const* v, LinesAhead<S>& ahead, int lines) {
        const auto ask = [&] { ahead.fetch(lines); };
        for (int t = 0; t < kTileTokens; t += kSide) Packing::pack_pairs(k + t, k_width_, keys_of(place) + t * k_steps_ * kColumns, ask);
        Packing::pack_values(v, 0, kTileTokens, v_width_, values_of(place), ask);
    }

    // Rows [row, row + count) are next, two of them at least: halves as even as they can be. o: theirs.
    void begin_rows(const bf16* packed, int row, int count, float* o, std::int64_t stride) {
        upper_ = (count + 1) / 2;
        o_ = o;
        o_stride_ = stride;
        query_ = packed + row * kColumns;
        if (count == configured_) return;
        TileConfig config;
        for (const int tile : {0, 1, 4}) config.tile(tile, upper_, 64);
        for (const int tile : {2, 3, 5}) config.tile(tile, count - upper_, 64);
        for (const int tile : {6, 7}) config.tile(tile, kSide, 64);
        tiles_.configure(config);
        configured_ = count;
    }
    int upper() const { return upper_; }

    // s[row][token] of the tile at `place`, of one half of the rows.
    float* scores_of(int place, int half) const { return scores_[place % 2] + half * kSide * kTileTokens; }

    // Where keep() leaves p from now on.
    void weigh(int place, int half) { kept_ = weights_[place % 2] + half * kSide * kTileTokens; }

    // Of 2 x 16 tokens of row r of a half.
    void keep(int r, int vector, Vec first, Vec second) {
        S::store_pairs(kept_ + (vector / 2 * kSide + r) * kColumns, S::to_bf16(first, second));
    }

    // What is to be done between: o += p v of the tile at `values`, tokens [start, stop) of it (o = p v where it is `fresh`), and
    // the scores of the one at `scores`; -1 for none. `lines` of what is ahead are asked for at each step.
    void plan(int values, int start, int stop, bool fresh, int scores, LinesAhead<S>& ahead, int lines) {
        values_place_ = values;
        fresh_ = fresh;
        first_ = start / kColumns;
        each_ = (stop + kColumns - 1) / kColumns - first_;
        scores_place_ = scores;
        num_values_ = values < 0 ? 0 : v_steps_ * each_;
        num_planned_ = num_values_ + (scores < 0 ? 0 : 2 * k_steps_);
        done_ = 0;
        ahead_ = &ahead;
        lines_ = lines;
    }

    // Of the plan, as much as `part` is of `whole`.
    void advance(int part, int whole) {
        for (; done_ * whole < num_planned_ * part; ++done_) {
            ahead_->fetch(lines_);
            if (done_ < num_values_) {
                values_step(done_ / each_, done_ % each_);
            } else {
                scores_step((done_ - num_values_) / k_steps_, (done_ - num_values_) % k_steps_);
            }
        }
    }

    void finish(const float* o, float factor, bf16* out) const { Values::finish(o, factor, v_width_, out); }

  private:
    static int group_tiles(int steps) {
        int count = kPartialTokens / kTileTokens;
        while (count > 1 && std::int64_t{count} * kTileTokens * steps * kColumns * 2 > kGroupBytes) count /= 2;
        return count;
    }
    // [16 tokens][32 of d][16 pairs of d][16 tokens][2]
    bf16* keys_of(int place) const { return keys_ + std::int64_t{place} * kTileTokens * k_steps_ * kColumns; }
    // [32 tokens][16 columns][16 pairs of tokens][16 columns][2]
    bf16* values_of(int place) const { return values_ + std::int64_t{place} * kTileTokens * v_steps_ * kColumns; }

    void clear_sums() {
        tiles_.template zero<0>();
        tiles_.template zero<1>();
        tiles_.template zero<2>();
        tiles_.template zero<3>();
    }

    // Scores of 32 tokens, 32 of d.
    void scores_step(int half, int step) {
        if (step == 0) clear_sums();
        const bf16* query = query_ + std::int64_t{step} * rows_ * kColumns;
        const bf16* keys = keys_of(scores_place_) + (2 * half * k_steps_ + step) * kTileElements;
        tiles_.template load<4>(query, 64);
        tiles_.template load_streamed<6>(keys, 64);
        tiles_.template dot_bf16<0, 4, 6>();
        tiles_.template load_streamed<7>(keys + k_steps_ * kTileElements, 64);
        tiles_.template dot_bf16<1, 4, 7>();
        tiles_.template load<5>(query + upper_ * kColumns, 64);
        tiles_.template dot_bf16<2, 5, 6>();
        tiles_.template dot_bf16<3, 5, 7>();
        if (step != k_steps_ - 1) return;
        constexpr std::int64_t kStride = kTileTokens * 4;
        float *upper = scores_of(scores_place_, 0) + half * kColumns, *lower = scores_of(scores_place_, 1) + half * kColumns;
        tiles_.template store<0>(upper, kStride);
        tiles_.template store<1>(upper + kSide, kStride);
        tiles_.template store<2>(lower, kStride);
        tiles_.template store<3>(lower + kSide, kStride);
    }

    // Values of 32 columns, 32 tokens.
    void values_step(int column, int step) {
        const std::int64_t row_bytes = o_stride_ * 4;
        float *upper = o_ + column * kColumns, *lower = upper + upper_ * o_stride_;
        if (step == 0 && fresh_) {
            clear_sums();
        } else if (step == 0) {
            tiles_.template load<0>(upper, row_bytes);
            tiles_.template load<1>(upper + kSide, row_bytes);
            tiles_.template load<2>(lower, row_bytes);
            tiles_.template load<3>(lower + kSide, row_bytes);
        }
        const bf16* p = weights_[values_place_ % 2] + (first_ + step) * kTileElements;
        const bf16* v = values_of(values_place_) + ((first_ + step) * v_steps_ + column) * 2 * kTileElements;
        tiles_.template load<4>(p, 64);
        tiles_.template load_streamed<6>(v, 64);
        tiles_.template dot_bf16<0, 4, 6>();
        tiles_.template load_streamed<7>(v + kTileElements, 64);
        tiles_.template dot_bf16<1, 4, 7>();
        tiles_.template load<5>(p + kSide * kTileTokens, 64);
        tiles_.template dot_bf16<2, 5, 6>();
        tiles_.template dot_bf16<3, 5, 7>();
        if (step != each_ - 1) return;
        tiles_.template store<0>(upper, row_bytes);
        tiles_.template store<1>(upper + kSide, row_bytes);
        tiles_.template store<2>(lower, row_bytes);
        tiles_.template store<3>(lower + kSide, row_bytes);
    }

    const int k_width_, v_width_;
    const int k_steps_, v_steps_;  // of 32 columns
    const int rows_;
    const int group_tiles_;
    TileSet tiles_;
    bf16* keys_;
    bf16* values_;
    float* scores_[2];    // of a tile and the one after: [row][token]
    bf16* weights_[2];    // the same: [half][32 tokens][row][32]
    bf16* kept_ = nullptr;
    int configured_ = 0;  // rows
    int upper_ = 0;
    const bf16* query_ = nullptr;
    float* o_ = nullptr;
    std::int64_t o_stride_ = 0;
    bool fresh_ = false;
    int values_place_ = -1, first_ = 0, each_ = 0, num_values_ = 0;
    int scores_place_ = -1, num_planned_ = 0, done_ = 0;
    LinesAhead<S>* ahead_ = nullptr;
    int lines_ = 0;
};

}  // namespace
}  // namespace quire
