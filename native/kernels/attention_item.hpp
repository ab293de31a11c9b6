// One item of attention: tiles in order, heads within a span of tiles, rows within a head; online softmax and the merge of
// partials. A template over the two products of a variant (attention_lanes, attention_pairs, attention_tiles):
//
//   Simd, Element, Stored   the vector layer, the element of queries and answers, that of keys and values in memory
//   kTileTokens        tokens of a tile
//   kBlockRows         rows of one product
//   kSoftmaxShares     of the memory to come that `begin` is given, the parts that are asked for in the softmax
//   kManyRows          from here on the softmax goes many rows at a time
//   kHeadsTogether     whether all heads' keys and values of a tile in small blocks are asked for before the first one's turn
//   Products(PagedView, rows of a head, Scratch&)   takes its scratch memory
//   query_bytes()      of the packed query rows of a head;  pack_query(packed, row, query)
//   begin(k, v, ahead, start, stop)  a head's tile: row pointers of its tokens, and memory to come, in a share for each of
//                                  its 2 kTileTokens rows; only tokens [start, stop) are seen by a query
//   scores(packed, row, rows, start, stop, s)    s[r][token] for block `row` of the rows
//   kRoundsWeights                 whether p is kept rounded, by keep_weights(r, vector, first, second), a row's two vectors of
//                                  float32; `values` then has no use for its p, and each block of rows takes its turn alone
//   kHeadroom                      of m above the largest logit (attention_rows.hpp)
//   values(p, row, rows, start, stop, o, stride) o[r] += p[r] v
//   finish(o, factor, out)         out = o * factor, rounded, in natural order
#pragma once

#include "kernels/attention_rows.hpp"

namespace quire {
namespace {

// Rows cut into blocks of at most `most`, as even as they can be: 8 rows by 6 are 4 + 4, not 6 + 2.
class RowBlocks {
  public:
    RowBlocks(int rows, int most) : rows_(rows) {
        count_ = (rows + most - 1) / most;
        step_ = (rows + count_ - 1) / count_;
    }
    int count() const { return count_; }
    int rows_from(int row) const { return rows_ - row < step_ ? rows_ - row : step_; }

  private:
    int rows_, count_, step_;
};

template <class Products>
class AttendItem {
    using S = typename Products::Simd;
    using Element = typename Products::Element;
    using Stored = typename Products::Stored;
    static constexpr int kTileTokens = Products::kTileTokens;
    static_assert(kMostTileTokens % kTileTokens == 0 && kPartialTokens % kMostTileTokens == 0);
    using Tokens = ItemTokens<S, Stored, kTileTokens>;
    using Tile = typename Tokens::Tile;

  public:
    AttendItem(const AttentionJob& job, const AttentionItem& item)
        : view_(*job.view),
          first_head_(item.head_start),
          heads_(item.head_stop - item.head_start),
          rows_(job, item),
          tokens_(view_, job.batch->block_tables + item.sequence * job.batch->table_width),
          products_(view_, rows_.count(), scratch_),
          states_(job, item, scratch_),
          scores_(scratch_.take<float>(std::int64_t{kItemRows} * kTileTokens)),
          queries_(scratch_.take<unsigned char>(products_.query_bytes() * heads_)) {}

    void run() {
        pack_queries();
        states_.begin();
        const std::int64_t begin = rows_.begin(), end = rows_.end();
        const std::int64_t first_tile = begin / kTileTokens, last_tile = (end - 1) / kTileTokens;
        constexpr std::int64_t kTiles = kPartialTokens / kTileTokens;

        // A head's tokens of a block lie together: tiles of one span are taken for a head before the next head's turn.
        // Where a token's heads lie together instead, all heads take a tile before the next one's turn.
        std::int64_t span = 1;
        while (!tokens_.token_major() && 2 * span * kTileTokens <= view_.block_size && span < kTiles) span *= 2;
        // The heads of a small block too, where that is faster: the next tile is asked for block by block, all heads of it.
        constexpr std::int64_t kMostAhead = 1 << 18;  // bytes, of a second cache of 512 KiB or more
        const std::int64_t tile_bytes = kTileTokens * (view_.k.width + view_.v.width) * static_cast<std::int64_t>(sizeof(Stored));
        const int together = (Products::kHeadsTogether || tokens_.token_major()) && span == 1 && heads_ * tile_bytes <= kMostAhead ? heads_ : 1;

        ahead_.near = view_.block_size >= 8;

        Tile tokens[2];
        typename Tokens::Rows rows;
        int here = 0;
        tokens_.find(first_tile, begin, end, tokens[here]);
        for (int part = 0; part < together; ++part) {
            tokens_.list(tokens[here], first_head_, together, part, ahead_);
            ahead_.fetch_rest();
        }
        for (std::int64_t start = first_tile; start <= last_tile;) {
            const std::int64_t stop = smaller(start - start % span + span, last_tile + 1), partial = start / kTiles;
            if (start == first_tile || start % kTiles == 0) states_.begin_partial(partial);
            for (int head = 0; head < heads_; ++head) {
                const RowStates states = states_.partial(partial, head);
                for (std::int64_t tile = start; tile < stop; ++tile) {
                    // What comes after: the head's next tile, the next head, or the first one of the next span.
                    const bool same_head = tile + 1 < stop, same_span = same_head || head + 1 < heads_;
                    const std::int64_t next_tile = same_head ? tile + 1 : same_span ? start : stop;
                    tokens_.rows(tokens[here], first_head_ + head, rows);
                    int next = here;
                    ahead_.fetch_rest();
                    if (together > 1) {
                        if (stop <= last_tile) {
                            if (head == 0) tokens_.find(stop, begin, end, tokens[1 - here]);
                            tokens_.list(tokens[1 - here], first_head_, together, head, ahead_);
                        }
                        if (!same_span) next = 1 - here;
                    } else if (next_tile <= last_tile) {
                        if (next_tile != tile) tokens_.find(next_tile, begin, end, tokens[next = 1 - here]);
                        tokens_.list(tokens[next], first_head_ + (same_head ? head : same_span ? head + 1 : 0), 1, 0, ahead_);
                    }
                    attend_tile(tile, head, tokens[here], rows, states);
                    here = next;
                }
            }
            if (stop % kTiles == 0 || stop > last_tile) states_.end_partial(partial, stop % kTiles == 0);
            start = stop;
        }
        if (states_.end()) rows_.write_out(states_, products_);
    }

  private:
    void pack_queries() {
        for (int head = 0; head < heads_; ++head) {
            for (int row = 0; row < rows_.count(); ++row) products_.pack_query(queries_ + head * products_.query_bytes(), row, rows_.query(head, row));
        }
    }

    void attend_tile(std::int64_t tile, int head, const Tile& tokens, const typename Tokens::Rows& rows, const RowStates& states) {
        rows_.turn_to(head);
        const std::int64_t base = tile * kTileTokens;
        products_.begin(rows.k, rows.v, ahead_, tokens.start, tokens.stop);
        const unsigned char* query = queries_ + head * products_.query_bytes();
        if constexpr (Products::kRoundsWeights) {  // a block's scores and weights are still in the first cache when they are taken
            for (int row = 0, count; row < rows_.count(); row += count) {
                count = products_.block_rows(row);
                const Seen seen = seen_by(row, count, base);
                if (seen.start >= seen.stop) continue;
                products_.scores(query, row, count, seen.start, seen.stop, scores_);
                soften(row, count, base, states.part(row, count), scores_);
                add_values(row, count, seen, states.part(row, count), scores_);
            }
            return;
        }
        // All scores, then all values: the tile's keys, then its values, stay in the first cache meanwhile.
        for (int row = 0, count; row < rows_.count(); row += count) {
            count = products_.block_rows(row);
            const Seen seen = seen_by(row, count, base);
            if (seen.start >= seen.stop) continue;
            products_.scores(query, row, count, seen.start, seen.stop, scores_ + row * kTileTokens);
            if (!many_rows()) soften(row, count, base, states.part(row, count), scores_ + row * kTileTokens);
        }
        for (int row = 0, count; many_rows() && row < rows_.count(); row += count) {
            count = static_cast<int>(smaller(S::kWidth, rows_.count() - row));
            soften(row, count, base, states.part(row, count), scores_ + row * kTileTokens);
        }
        for (int row = 0, count; row < rows_.count(); row += count) {
            count = products_.block_rows(row);
            const Seen seen = seen_by(row, count, base);
            if (seen.start < seen.stop) add_values(row, count, seen, states.part(row, count), scores_ + row * kTileTokens);
        }
    }

    bool many_rows() const { return rows_.count() >= Products::kManyRows; }

    // Tokens of the tile that some row of a block sees.
    struct Seen {
        int start, stop;
    };
    Seen seen_by(int row, int count, std::int64_t base) const {
        const auto seen = rows_.seen(row, count);
        return {static_cast<int>(larger(seen.start - base, 0)), static_cast<int>(smaller(seen.stop - base, kTileTokens))};
    }

    // states, here and below: of rows [row, row + count).
    void add_values(int row, int count, Seen seen, const RowStates& states, const float* s) {
        rows_.rescale(row, count, states);
        products_.values(s, row, count, seen.start, seen.stop, states.o, states.stride);
    }

    void soften(int row, int count, std::int64_t base, const RowStates& states, float* s) {
        if constexpr (Products::kRoundsWeights) {
            soften(row, count, base, states, s, [this](int r, int vector, auto first, auto second) { products_.keep_weights(r, vector, first, second); });
        } else {
            soften(row, count, base, states, s, nullptr);
        }
    }
    // The first rows of a tile ask for what is the softmax's share of the memory to come.
    template <class Keep>
    void soften(int row, int count, std::int64_t base, const RowStates& states, float* s, Keep&& keep) {
        const int lines = row == 0 ? ahead_.lines_of(Products::kSoftmaxShares, many_rows() ? 2 : 2 * count) : 0;
        if (many_rows()) {
            rows_.soften_many(row, count, base, states, s, keep, [&](int r) {
                if (r <= 0) ahead_.fetch(lines);
            });
        } else {
            rows_.soften_few(row, count, base, states, s, keep, [&] { ahead_.fetch(lines); });
        }
    }

    const PagedView& view_;
    Scratch scratch_;
    const int first_head_, heads_;
    ItemRows<S, Element, kTileTokens, Products::kHeadroom> rows_;
    const Tokens tokens_;
    Products products_;
    const ItemStates<S> states_;
    LinesAhead<S> ahead_;
    float* scores_;  // [rows of a head][kTileTokens]
    unsigned char* queries_;
};

}  // namespace
}  // namespace quire
