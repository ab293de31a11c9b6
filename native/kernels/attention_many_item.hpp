// One item of attention of many rows: the tiles of a partial in groups, heads within a group, rows within a head, tiles within
// 32 rows. A row's arithmetic equals that of attention_item.hpp, bit for bit (attention_many_rows.hpp).
//
// The memory of the next group is prefetched while a group is packed and multiplied; in the first group, each tile is
// prefetched while the tile before it is packed.
#pragma once

#include "kernels/attention_item.hpp"
#include "kernels/attention_many_rows.hpp"
#include "kernels/attention_tiles.hpp"

namespace quire {
namespace {

template <class Products>
class AttendManyRows {
    using S = typename Products::Simd;
    static constexpr int kTileTokens = Products::kTileTokens;
    using Tokens = ItemTokens<S, bf16, kTileTokens>;

  public:
    AttendManyRows(const AttentionJob& job, const AttentionItem& item)
        : first_head_(item.head_start),
          heads_(item.head_stop - item.head_start),
          rows_(job, item),
          blocks_(rows_.count(), Products::kRowsTogether),
          tokens_(*job.view, job.batch->block_tables + item.sequence * job.batch->table_width),
          products_(static_cast<int>(job.view->k.width), static_cast<int>(job.view->v.width), rows_.count(), scratch_),
          states_(job, item, scratch_),
          queries_(scratch_.take<bf16>(products_.query_elements() * heads_)) {}

    void run() {
        pack_queries();
        states_.begin();
        constexpr std::int64_t kTiles = kPartialTokens / kTileTokens;
        const std::int64_t first_tile = rows_.begin() / kTileTokens, last_tile = (rows_.end() - 1) / kTileTokens, group = products_.group_tiles();
        for (std::int64_t start = first_tile; start <= last_tile;) {
            const std::int64_t stop = smaller(start - start % group + group, last_tile + 1), partial = start / kTiles;
            if (start == first_tile || start % kTiles == 0) fresh_from_ = states_.begin_partial(partial, false) ? start : -1;
            const bool ends = stop % kTiles == 0 || stop > last_tile;
            for (int head = 0; head < heads_; ++head) {
                // The group that comes after: the next head's, or the first of the next tiles.
                const bool same_tiles = head + 1 < heads_;
                begin_ahead(same_tiles ? head + 1 : 0, same_tiles ? start : stop, same_tiles ? stop - start : smaller(group, last_tile + 1 - stop),
                            stop - start);
                pack(start, stop, head, start == first_tile && head == 0);
                // Rows of a partial that is this group alone take turns in one place, which stays in the first cache.
                const bool run_here = start == fresh_from_ && ends && states_.owns_partials();
                for (int row = 0, block = 0, count; row < rows_.count(); row += count, ++block) {
                    count = blocks_.rows_from(row);
                    const RowStates states = run_here ? states_.partial(partial, 0).part(0, count) : states_.partial(partial, head).part(row, count);
                    if (run_here) states.clear_sums();
                    attend(start, stop, head, block, row, count, states);
                    if (ends) states_.end_partial(states, stop % kTiles == 0, head, row);  // they are near yet
                }
            }
            start = stop;
        }
        if (states_.end()) rows_.write_out(states_, products_);
    }

  private:
    bf16* queries_of(int head) const { return queries_ + head * products_.query_elements(); }

    // Queries are a token's heads apart, too far for the processor's prefetcher.
    void pack_queries() {
        constexpr int kRowsAhead = 16, kLine = 64 / sizeof(bf16);
        const int count = rows_.count();
        for (int head = 0; head < heads_; ++head) {
            for (int row = 0; row < count; ++row) {
                const bf16* ahead = rows_.query(head, row + kRowsAhead < count ? row + kRowsAhead : row);
                for (int d = 0; d < products_.k_width(); d += kLine) S::prefetch(ahead + d);
                products_.pack_query(queries_of(head), row, rows_.query(head, row));
            }
        }
    }

    void list(std::int64_t tile, int head) {
        tokens_.find(tile, rows_.begin(), rows_.end(), listed_);
        tokens_.list(listed_, first_head_ + head, 1, 0, ahead_);
    }

    // `num_tiles` from `tile` on, of a head, are to be asked for while a group of `tiles` has its turns: each tile's packing, and
    // each block's with each tile.
    void begin_ahead(int head, std::int64_t tile, std::int64_t num_tiles, std::int64_t tiles) {
        next_head_ = head;
        next_tile_ = tile;
        num_next_ = num_tiles;
        num_listed_ = 0;
        num_turns_ = tiles * (1 + blocks_.count());
    }
    // Lines to ask for at each of a turn's `steps`.
    int ahead_of(std::int64_t turn, int steps) {
        for (; num_listed_ < num_next_ && num_listed_ * num_turns_ <= turn * num_next_; ++num_listed_) {
            ahead_.fetch_rest();
            list(next_tile_ + num_listed_, next_head_);
        }
        return num_listed_ == 0 ? 0 : ahead_.lines_of(Tokens::kTileShares, static_cast<int>(steps * larger(1, num_turns_ / num_next_)));
    }

    // Tiles [start, stop) of a head. `cold`: not prefetched.
    void pack(std::int64_t start, std::int64_t stop, int head, bool cold) {
        typename Tokens::Tile tile;
        typename Tokens::Rows rows;
        for (std::int64_t at = start; at < stop; ++at) {
            if (cold && at == start) ask(at, head);
            if (cold && at + 1 < stop) ask(at + 1, head);
            const int lines = cold ? 0 : ahead_of(at - start, products_.pack_steps());
            tokens_.find(at, rows_.begin(), rows_.end(), tile);
            tokens_.rows(tile, first_head_ + head, rows);
            products_.pack(static_cast<int>(at - start), rows.k, rows.v, ahead_, lines);
        }
    }
    void ask(std::int64_t tile, int head) {
        list(tile, head);
        ahead_.fetch_rest();
    }

    // Rows [row, row + count), whose states these are, over those of the packed tiles that they see. A tile's softmax is done between the products of
    // its neighbours.
    void attend(std::int64_t start, std::int64_t stop, int head, int block, int row, int count, const RowStates& states) {
        const auto seen = rows_.seen(row, count);
        const std::int64_t first = larger(start, seen.start / kTileTokens), last = smaller(stop, (seen.stop - 1) / kTileTokens + 1) - 1;
        if (first > last) return;
        rows_.turn_to(head);
        products_.begin_rows(queries_of(head), row, count, states.o, states.stride);
        const int upper = products_.upper();
        const std::int64_t fresh = fresh_from_ < 0 ? -1 : larger(fresh_from_, seen.start / kTileTokens);  // whose values are the first
        for (std::int64_t tile = first - 1; tile <= last + 1; ++tile) {
            const std::int64_t before = tile - 1, base = before * kTileTokens;
            const bool has_values = before >= first && before <= last, has_scores = tile < last;
            const int lines = tile <= last ? ahead_of((1 + block) * (stop - start) + larger(tile - start, 0), products_.num_steps()) : 0;
            if (has_values && before != fresh) rows_.rescale(row, count, states);
            products_.plan(has_values ? static_cast<int>(before - start) : -1, static_cast<int>(larger(seen.start - base, 0)),
                           static_cast<int>(smaller(seen.stop - base, kTileTokens)), before == fresh,
                           has_scores ? static_cast<int>(tile + 1 - start) : -1, ahead_, lines);
            if (tile >= first && tile <= last) {
                soften(tile, start, row, 0, upper, count, states.part(0, upper));
                soften(tile, start, row, upper, count, count, states.part(upper, count - upper));
            }
            products_.advance(1, 1);
        }
    }

    // Rows [from, to) of the `count` from `row` on; their states.
    void soften(std::int64_t tile, std::int64_t start, int row, int from, int to, int count, const RowStates& states) {
        const int place = static_cast<int>(tile - start), half = from == 0 ? 0 : 1;
        float* s = products_.scores_of(place, half);
        products_.weigh(place, half);
        rows_.soften_many(row + from, to - from, tile * kTileTokens, states, s,
                          [this](int r, int vector, auto first, auto second) { products_.keep(r, vector, first, second); },
                          [&](int r) { products_.advance(from + r + 1, count); });
    }

    Scratch scratch_;
    const int first_head_, heads_;
    ItemRows<S, bf16, kTileTokens, Products::kHeadroom> rows_;
    const RowBlocks blocks_;
    const Tokens tokens_;
    Products products_;
    const ItemStates<S> states_;
    LinesAhead<S> ahead_;
    typename Tokens::Tile listed_;
    std::int64_t fresh_from_ = -1;  // the tile with which a partial has begun at nothing, or -1
    int next_head_ = 0;
    std::int64_t next_tile_ = 0, num_next_ = 0, num_listed_ = 0, num_turns_ = 0;
    bf16* queries_;
};

// An item by AMX tiles, real or emulated.
template <class S, class TileSet>
void attend_by_tiles(const AttentionJob& job, const AttentionItem& item) {
    using Many = ManyRows<S, TileSet>;
    if (item.row_stop - item.row_start > Many::kRowsTogether) {
        AttendManyRows<Many>(job, item).run();
    } else {
        AttendItem<TileProducts<S, TileSet>>(job, item).run();
    }
}

}  // namespace
}  // namespace quire
