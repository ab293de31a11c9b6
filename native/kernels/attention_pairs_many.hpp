// One item of attention of more than six rows by bf16 pairs (vdpbf16ps): groups of tiles in order, heads within a group, rows
// within a head. A group's keys and values are packed once, then multiplied with six rows at a time.
//
// A row's arithmetic equals that of attention_pairs_few.hpp, bit for bit. Scores: lanes of tokens; a register holds the
// same one of the 16 sums of 16 tokens, and the fold tree is 15 additions of registers. Four tiles' values are one
// product wherever no row's m is raised within them: then o has the same factor before all.
#pragma once

#include "kernels/attention_pairs.hpp"

namespace quire {
namespace {

template <class S>
class AttendManyPairs : InterleavedValues<S> {
    using Vec = typename S::Vec;
    using Pairs = typename S::Pairs;
    using Values = InterleavedValues<S>;
    using Values::kColumns;
    static constexpr int kWidth = S::kWidth;
    static constexpr int kTileTokens = kPairTileTokens;
    static_assert(kTileTokens == kWidth, "a vector holds the scores of a tile");
    static constexpr std::int64_t kTiles = kPartialTokens / kTileTokens;
    static constexpr int kGroupTiles = 4, kGroupTokens = kGroupTiles * kTileTokens;
    static constexpr int kRowsTogether = 6;
    using Tokens = ItemTokens<S, bf16, kTileTokens>;

  public:
    AttendManyPairs(const AttentionJob& job, const AttentionItem& item)
        : first_head_(item.head_start),
          heads_(item.head_stop - item.head_start),
          k_width_(static_cast<int>(job.view->k.width)),
          v_width_(static_cast<int>(job.view->v.width)),
          k_padded_(static_cast<int>(padded_to(k_width_, kColumns))),
          v_padded_(static_cast<int>(padded_to(v_width_, kColumns))),
          rows_(job, item),
          blocks_(rows_.count(), kRowsTogether),
          tokens_(*job.view, job.batch->block_tables + item.sequence * job.batch->table_width),
          states_(job, item, scratch_),
          keys_(scratch_.take<bf16>(std::int64_t{kGroupTokens} * k_padded_)),
          values_(scratch_.take<bf16>(std::int64_t{kGroupTokens} * v_padded_)),
          scores_(scratch_.take<float>(kRowsTogether * kGroupTokens)),
          weights_(scratch_.take<bf16>(kRowsTogether * kGroupTokens)),
          queries_(scratch_.take<bf16>(std::int64_t{heads_} * rows_.count() * k_padded_)) {
        for (auto& row : factors_) for (float& factor : row) factor = 1.0f;
    }

    void run() {
        pack_queries();
        states_.begin();
        const std::int64_t first_tile = rows_.begin() / kTileTokens, last_tile = (rows_.end() - 1) / kTileTokens;
        for (std::int64_t start = first_tile; start <= last_tile;) {
            const std::int64_t stop = after(start, last_tile), partial = start / kTiles;
            if (start == first_tile || start % kTiles == 0) states_.begin_partial(partial);
            for (int head = 0; head < heads_; ++head) {
                pack(start, stop, head);
                // What comes after: the same tiles of the next head, or the first head's next ones.
                const bool same_tiles = head + 1 < heads_;
                begin_ahead(same_tiles ? start : stop, same_tiles ? stop : after(stop, last_tile), same_tiles ? head + 1 : 0);
                const RowStates states = states_.partial(partial, head);
                rows_.turn_to(head);
                for (int row = 0, count; row < rows_.count(); row += count) {
                    count = blocks_.rows_from(row);
                    attend(start, stop, head, row, count, states.part(row, count));
                }
            }
            if (stop % kTiles == 0 || stop > last_tile) states_.end_partial(partial, stop % kTiles == 0);
            start = stop;
        }
        if (!states_.end()) return;
        for (int head = 0; head < heads_; ++head) fold_sums<S>(states_.all(head));
        rows_.write_out(states_, *this);
    }

    void finish(const float* o, float factor, bf16* out) const { Values::finish(o, factor, v_width_, out); }

  private:
    static std::int64_t after(std::int64_t tile, std::int64_t last_tile) { return smaller(tile - tile % kGroupTiles + kGroupTiles, last_tile + 1); }

    bf16* query(int head, int row) const { return queries_ + (std::int64_t{head} * rows_.count() + row) * k_padded_; }
    // Queries lie a token's heads apart, which is too far for the processor to see what comes next.
    void pack_queries() const {
        constexpr int kRowsAhead = 16;
        for (int head = 0; head < heads_; ++head) {
            for (int row = 0; row < rows_.count(); ++row) {
                const bf16 *from = rows_.query(head, row), *ahead = rows_.query(head, row + kRowsAhead < rows_.count() ? row + kRowsAhead : row);
                for (int d = 0; d < k_width_; d += kColumns) {
                    S::prefetch(ahead + d);
                    S::store_pairs(query(head, row) + d, Values::load_columns(from, d, k_width_));
                }
            }
        }
    }

    // Tiles [start, stop) of a head: keys -> [lane of d][32 of d][kGroupTokens][2], values -> [pairs of tokens][v_padded_][2] in the order of an
    // interleave; zeros for tokens that no row sees.
    void pack(std::int64_t start, std::int64_t stop, int head) {
        const int steps = k_padded_ / kColumns;
        typename Tokens::Tile tile;
        typename Tokens::Rows rows;
        for (std::int64_t index = start; index < stop; ++index) {
            tokens_.find(index, rows_.begin(), rows_.end(), tile);
            tokens_.rows(tile, first_head_ + head, rows);
            const auto token = static_cast<int>(index - start) * kTileTokens;
            for (int d = 0; d < k_width_; d += kColumns) {
                Pairs square[kWidth];
#pragma GCC unroll 16
                for (int i = 0; i < kWidth; ++i) square[i] = Values::load_columns(rows.k[i], d, k_width_);
                S::transpose(square);
#pragma GCC unroll 16
                for (int i = 0; i < kWidth; ++i) S::store_pairs(keys_ + (i * steps + d / kColumns) * 2 * kGroupTokens + 2 * token, square[i]);
            }
            for (int t = 0; t < kTileTokens; t += 2) {
                Values::interleave_rows(rows.v[t], rows.v[t + 1], v_width_, values_ + std::int64_t{token + t} * v_padded_);
            }
        }
    }

    // Asked for while the rows pass by, a few lines at a time (15 rows of 2 heads over 1 024 tokens, two threads: 0.27 ms so, 0.30 in ten bursts
    // of 52 lines): tiles [start, stop) of a head. A row's share is asked for in two parts.
    void begin_ahead(std::int64_t start, std::int64_t stop, int head) {
        ahead_tile_ = start;
        ahead_stop_ = stop;
        ahead_head_ = head;
        const std::int64_t bytes = kTileTokens * (k_width_ + v_width_) * static_cast<std::int64_t>(sizeof(bf16));
        lines_ = static_cast<int>((stop - start) * bytes / LinesAhead<S>::kLineBytes / (2 * rows_.count())) + 1;
    }
    void ask(int rows) {
        for (int left = rows * lines_; (left = ahead_.fetch_across(left)) > 0 && ahead_tile_ < ahead_stop_;) {
            tokens_.find(ahead_tile_++, rows_.begin(), rows_.end(), listed_);
            tokens_.list(listed_, first_head_ + ahead_head_, 1, 0, ahead_);
        }
    }

    // Rows [row, row + count), whose states these are, over those of tiles [start, stop) that they see.
    void attend(std::int64_t start, std::int64_t stop, int head, int row, int count, const RowStates& states) {
        const auto seen = rows_.seen(row, count);
        const auto first = static_cast<int>(larger(seen.start / kTileTokens - start, 0));
        const auto last = static_cast<int>(smaller((seen.stop - 1) / kTileTokens + 1, stop) - start);
        if (first >= last) return;
        const std::int64_t base = start * kTileTokens;
        scores(query(head, row), count, first, last);
        if (last - first == kGroupTiles && rows_.see_all(row, count, base, base + kGroupTokens)) {
            for (int r = 0; r < count; ++r) {
                ask(1);
                soften_whole(row, r, base, states);
            }
        } else {
            for (int r = 0; r < count; ++r) {
                ask(1);
                soften(row, r, base, first, last, states);
            }
        }
        for (int from = first, to; from < last; from = to) {
            rescale(from, count, states);
            for (to = from + 1; to < last && !raised_[to];) ++to;
            add_values(from, to, count, states);
        }
    }

    // --- softmax --------------------------------------------------------------------------------------

    // Of row `row + r`, r of the block; it sees all of the group.
    __attribute__((always_inline)) void soften_whole(int row, int r, std::int64_t base, const RowStates& states) {
        const float* s = scores_ + r * kGroupTokens;
        Vec of_tiles[kGroupTiles], p[kGroupTiles];
#pragma GCC unroll 4
        for (int i = 0; i < kGroupTiles; ++i) of_tiles[i] = S::load(s + i * kTileTokens);
        float factor;
        if (!rows_.soften_steadily(of_tiles, states.m[r], factor, p)) return soften(row, r, base, 0, kGroupTiles, states);
        float* sums = states.o + (r + 1) * states.stride - kSumLanes;
        Vec sum = S::load(sums);
        if (factor != 1.0f) sum = raise(0, r, factor, sum);
#pragma GCC unroll 4
        for (int i = 0; i < kGroupTiles; ++i) sum = S::add(sum, p[i]);
        S::store(sums, sum);
#pragma GCC unroll 4
        for (int i = 0; i < kGroupTiles; i += 2) S::store_pairs(weights_ + r * kGroupTokens + i * kTileTokens, S::to_bf16(p[i], p[i + 1]));
    }

    // Of any row, over tiles [first, last) of the group.
    __attribute__((noinline)) void soften(int row, int r, std::int64_t base, int first, int last, const RowStates& states) {
        float *s = scores_ + r * kGroupTokens, *sums = states.o + (r + 1) * states.stride - kSumLanes, factors[kGroupTiles];
        rows_.soften_tiles(row + r, base + first * kTileTokens, last - first, s + first * kTileTokens, states.m[r], factors + first);
        Vec sum = S::load(sums);
        for (int i = first; i < last; ++i) {
            const Vec p = S::load(s + i * kTileTokens);
            if (factors[i] != 1.0f) sum = raise(i, r, factors[i], sum);
            sum = S::add(sum, p);
            S::to_bf16(weights_ + r * kGroupTokens + i * kTileTokens, p);
        }
        S::store(sums, sum);
    }

    // o of row r of the block is to be scaled before the values of a tile, and its sums now.
    Vec raise(int tile, int r, float factor, Vec sum) {
        raised_[tile] = true;
        factors_[r][tile] = factor;
        return S::mul(sum, S::broadcast(factor));
    }
    void rescale(int tile, int count, const RowStates& states) {
        if (!raised_[tile]) return;
        raised_[tile] = false;
        for (int r = 0; r < count; ++r) {
            rows_.rescale(states.o + r * states.stride, v_padded_, factors_[r][tile]);
            factors_[r][tile] = 1.0f;
        }
    }

    // --- scores ---------------------------------------------------------------------------------------

    // Of tiles [first, last) and perhaps others of the group. Two rows by four vectors of tokens: of three rows, sums wait on the stack for
    // their other half (1 to 4 % slower).
    void scores(const bf16* query, int rows, int first, int last) {
        float* s = scores_;
        const int half = kGroupTiles / 2;
        for (int left = rows, count; left > 0; left -= count, query += count * k_padded_, s += count * kGroupTokens) {
            count = left > 1 ? 2 : 1;
            ask(count);
            if (first >= half || last <= half) {
                const int token = first >= half ? half * kTileTokens : 0;
                scores_of_rows<half>(count, query, keys_ + 2 * token, s + token);
            } else {
                scores_of_rows<kGroupTiles>(count, query, keys_, s);
            }
        }
    }
    template <int kVectors>
    void scores_of_rows(int rows, const bf16* query, const bf16* keys, float* s) const {
        if (rows == 1) return scores_tile<1, kVectors, 0>(query, keys, s);
        if (k_padded_ == 128) return scores_tile<2, kVectors, 128>(query, keys, s);
        scores_tile<2, kVectors, 0>(query, keys, s);
    }

    // kPadded: k_padded_, or 0 for any.
    template <int kRows, int kVectors, int kPadded>
    __attribute__((noinline)) void scores_tile(const bf16* query, const bf16* keys, float* s) const {
        constexpr int kSums = kRows * kVectors;
        Vec halves[2][kSums];
        for (int half = 0; half < 2; ++half) {
            for (int part = 0; part < 2; ++part) {
                const int lane = 8 * half + 4 * part;
                Vec even[kSums], odd[kSums];
                add_lanes<kRows, kVectors, kPadded>(query, keys, lane, even);
                add_lanes<kRows, kVectors, kPadded>(query, keys, lane + 1, odd);
#pragma GCC unroll 16
                for (int i = 0; i < kSums; ++i) {
                    const Vec sum = S::add(even[i], odd[i]);
                    halves[half][i] = part == 0 ? sum : S::add(halves[half][i], sum);
                }
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < kSums; ++i) {
            S::store(s + i / kVectors * kGroupTokens + i % kVectors * kTileTokens, S::add(halves[0][i], halves[1][i]));
        }
    }

    // The sums of lanes `lane` and `lane + 2`, added.
    template <int kRows, int kVectors, int kPadded, int kSums>
    __attribute__((always_inline)) void add_lanes(const bf16* query, const bf16* keys, int lane, Vec (&sum)[kSums]) const {
        Vec other[kSums];
#pragma GCC unroll 16
        for (int i = 0; i < kSums; ++i) sum[i] = other[i] = S::zero();
        const int padded = kPadded > 0 ? kPadded : k_padded_, steps = padded / kColumns;
        query += 2 * lane;
        keys += lane * steps * 2 * kGroupTokens;
#pragma GCC unroll 4
        for (int i = 0; i < steps; ++i) {
            multiply<kRows, kVectors>(query + i * kColumns, padded, keys + i * 2 * kGroupTokens, sum);
            multiply<kRows, kVectors>(query + i * kColumns + 4, padded, keys + (2 * steps + i) * 2 * kGroupTokens, other);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kSums; ++i) sum[i] = S::add(sum[i], other[i]);
    }

    template <int kRows, int kVectors, int kSums>
    __attribute__((always_inline)) void multiply(const bf16* query, int padded, const bf16* keys, Vec (&sum)[kSums]) const {
        Pairs loaded[kVectors];
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) loaded[i] = S::held(S::load_pairs(keys + i * 2 * kTileTokens));
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            const Pairs q = S::broadcast_pair(query + r * padded);
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i) sum[r * kVectors + i] = S::dot(sum[r * kVectors + i], q, loaded[i]);
        }
    }

    // --- values ---------------------------------------------------------------------------------------

    // Of tiles [from, to).
    void add_values(int from, int to, int rows, const RowStates& states) const {
        const int start = from * kTileTokens, stop = to * kTileTokens;
        switch (rows) {
            case 1: return values_of<1>(start, stop, states);
            case 2: return values_of<2>(start, stop, states);
            case 3: return values_of<3>(start, stop, states);
            case 4: return values_of<4>(start, stop, states);
            case 5: return values_of<5>(start, stop, states);
            default: return values_of<6>(start, stop, states);
        }
    }
    template <int kRows>
    __attribute__((noinline)) void values_of(int start, int stop, const RowStates& states) const {
        int d = 0;
        for (; d + 2 * kColumns <= v_padded_; d += 2 * kColumns) values_columns<kRows, 2>(start, stop, d, states.o + d, states.stride);
        if (d < v_padded_) values_columns<kRows, 1>(start, stop, d, states.o + d, states.stride);
    }

    template <int kRows, int kChunks>
    __attribute__((always_inline)) void values_columns(int start, int stop, int column, float* o, std::int64_t stride) const {
        Vec sum[kRows][2 * kChunks];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int i = 0; i < 2 * kChunks; ++i) sum[r][i] = S::load(o + r * stride + i * kWidth);
        }
        const bf16* values = values_ + std::int64_t{start} * v_padded_ + 2 * column;
        for (int t = start; t < stop; t += 2, values += 2 * v_padded_) {
            Pairs loaded[2 * kChunks];
#pragma GCC unroll 8
            for (int i = 0; i < 2 * kChunks; ++i) loaded[i] = S::load_pairs(values + i * kColumns);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const Pairs weights = S::broadcast_pair(weights_ + r * kGroupTokens + t);
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

    Scratch scratch_;
    const int first_head_, heads_;
    const int k_width_, v_width_;
    const int k_padded_, v_padded_;
    ItemRows<S, bf16, kTileTokens, kPairHeadroom> rows_;
    const RowBlocks blocks_;
    const Tokens tokens_;
    const ItemStates<S> states_;
    LinesAhead<S> ahead_;
    typename Tokens::Tile listed_;
    std::int64_t ahead_tile_ = 0, ahead_stop_ = 0;
    int ahead_head_ = 0, lines_ = 0;
    bf16* keys_;
    bf16* values_;
    float* scores_;   // [row][kGroupTokens], of a block
    bf16* weights_;   // p rounded
    bf16* queries_;   // [head][row][k_padded_]
    // Of the block under way: what o is to be scaled by before a tile's values, and whether any row's is.
    float factors_[kRowsTogether][kGroupTiles];
    bool raised_[kGroupTiles] = {};
};

}  // namespace
}  // namespace quire
