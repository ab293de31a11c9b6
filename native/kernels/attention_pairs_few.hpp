// One item of attention of up to six rows by bf16 pairs (vdpbf16ps): decode of a token, which is memory-bound.
//
// A row's arithmetic is that of attention_pairs.hpp. Tiles in order, heads within a span of tiles; keys and values are
// multiplied in place. While a head tile (a tile of one head) is computed, the lines of the next are prefetched in the
// order of their addresses, a few at a time: the processor's own prefetcher follows addresses too and continues the
// stream. (Zen 5, one thread, blocks of 16: 32 GB/s so, 28 with four rows' lines in turn, 22 without prefetching. A
// tile of 32 tokens, which alternates between two blocks, reached 25.)
//
// A core has a limited number of operations in flight, the prefetches among them: every operation saved in a head tile
// saves time, even if it would not stall. So rows lie at distances known to the compiler, keys and values are loaded by
// the operations that take them (dot_from, interleave_from), queries stay in registers. (Zen 5, 8 x 8 192 tokens, two
// threads: 650 operations a head tile at 64 GB/s, 850 at 55.)
#pragma once

#include <type_traits>

#include "kernels/attention_pairs.hpp"
#include "kernels/attention_head_tile_rows.hpp"
#include "kernels/isa.hpp"

namespace quire {
namespace {

// kRows: of a head. Each is a translation unit of its own (attention_pairs_few.cpp): together they took half a minute to compile.
template <class S, int kRows>
class AttendFewRows : InterleavedValues<S> {
    using Vec = typename S::Vec;
    using Pairs = typename S::Pairs;
    using Values = InterleavedValues<S>;
    using Values::kColumns;
    static constexpr int kWidth = S::kWidth;
    static constexpr int kTileTokens = kPairTileTokens;
    static constexpr std::int64_t kTiles = kPartialTokens / kTileTokens;
    static constexpr int kUsualWidth = 128;  // of heads, for which there is code of its own
    static_assert(kTileTokens == kWidth, "a vector holds the scores of a tile");
    using Tokens = ItemTokens<S, bf16, kTileTokens>;
    using Places = typename Tokens::Rows;

  public:
    AttendFewRows(const AttentionJob& job, const AttentionItem& item)
        : view_(*job.view),
          table_(job.batch->block_tables + item.sequence * job.batch->table_width),
          first_head_(item.head_start),
          heads_(item.head_stop - item.head_start),
          k_width_(static_cast<int>(view_.k.width)),
          v_width_(static_cast<int>(view_.v.width)),
          k_stride_(static_cast<int>(padded_to(k_width_, kColumns))),
          rows_(job, item),
          tokens_(view_, table_),
          states_(job, item, scratch_),
          queries_(scratch_.take<bf16>(std::int64_t{heads_} * rows_.count() * k_stride_)),
          partials_(scratch_.take<RowStates>(heads_)),
          first_tile_(rows_.begin() / kTileTokens),
          last_tile_((rows_.end() - 1) / kTileTokens),
          all_heads_together_(all_heads_together(view_.k) && all_heads_together(view_.v)) {}

    void run() {
        for (int head = 0; head < heads_; ++head) {
            for (int row = 0; row < rows_.count(); ++row) pack_query(head, row);
        }
        states_.begin();
        if (k_width_ != kUsualWidth || v_width_ != kUsualWidth) {
            run_head_tiles<0, AskTwice<S>>();
        } else if (first_cache_waits_for_many() && !tokens_.token_major() && view_.k.token_stride == kUsualWidth && view_.v.token_stride == kUsualWidth) {
            run_head_tiles<kUsualWidth, AskOnce<S>>();
        } else {
            run_head_tiles<kUsualWidth, AskTwice<S>>();
        }
        if (states_.end()) write_out();
    }

    void finish(const float* o, float factor, bf16* out) const { Values::finish(o, factor, v_width_, out); }

  private:
    void write_out() const {
        for (int head = 0; head < heads_; ++head) fold_sums<S>(states_.all(head));
        rows_.write_out(states_, *this);
    }

    // A head's tile. They are taken span by span, in a span head by head.
    struct HeadTile {
        std::int64_t tile;
        int head;
    };
    HeadTile after(HeadTile at) const {
        const std::int64_t start = at.tile & -span_, stop = smaller(start + span_, last_tile_ + 1);
        if (at.tile + 1 < stop) return {at.tile + 1, at.head};
        return at.head + 1 < heads_ ? HeadTile{larger(start, first_tile_), at.head + 1} : HeadTile{stop, 0};
    }

    // kHeadWidth: of keys and of values, or 0 for any.
    template <int kHeadWidth, class Ask>
    void run_head_tiles() {
        if (view_.block_size % kTileTokens == 0) {
            run_even<kHeadWidth, Ask>();
        } else {
            if constexpr (std::is_same_v<Ask, AskOnce<S>>) {
                if (values_follow_keys()) return run_scattered<kHeadWidth, Ask, ScatteredRows<kHeadWidth>>();
            }
            run_scattered<kHeadWidth, Ask, ScatteredRows<0>>();
        }
    }

    template <int kHeadWidth, class Ask>
    void run_even() {
        using Rows = EvenRows<std::is_same_v<Ask, AskOnce<S>> ? kHeadWidth : 0>;
        // A head's tokens of a block lie together: tiles of one span are taken for a head before the next head's turn.
        while (!tokens_.token_major() && 2 * span_ * kTileTokens <= view_.block_size && span_ < kTiles) span_ *= 2;
        HeadTile at{first_tile_, 0};
        if (all_heads_together_) {
            for (int head = 0; head < heads_; ++head) ask_for<kHeadWidth, Ask>(rows_by_token<Rows>(at.tile, head));
        } else {
            ask_for<kHeadWidth, Ask>(even_rows<Rows>(at));
        }
        for (HeadTile next; at.tile <= last_tile_; at = next) {
            next = after(at);
            // By reference, and looked for again when it is its turn: a copy would be made by vectors, and those wait for what has just been stored.
            const Rows rows = even_rows<Rows>(at), following = even_rows<Rows>(next.tile <= last_tile_ ? next : at);
            if (all_heads_together_) {
                attend_head_tile<kHeadWidth, Ask>(at, rows, rows_by_token<Rows>(smaller(at.tile + 1, last_tile_), at.head), following);
            } else {
                attend_head_tile<kHeadWidth, Ask>(at, rows, following, following);
            }
        }
    }

    template <int kHeadWidth, class Ask, class Rows>
    void run_scattered() {
        Places places[2];
        find(first_tile_, places[0]);
        ask_for<kHeadWidth, Ask>(scattered_rows<Rows>(places[0], 0));
        for (std::int64_t tile = first_tile_; tile <= last_tile_; ++tile) {
            Places &here = places[(tile - first_tile_) % 2], &next = places[(tile + 1 - first_tile_) % 2];
            if (tile < last_tile_) find(tile + 1, next);
            for (int head = 0; head < heads_; ++head) {
                const bool same_tile = head + 1 < heads_ || tile == last_tile_;
                const Rows following = scattered_rows<Rows>(same_tile ? here : next, head + 1 < heads_ ? head + 1 : 0);
                attend_head_tile<kHeadWidth, Ask>({tile, head}, scattered_rows<Rows>(here, head), following, following);
            }
        }
    }

    template <int kHeadWidth, class Ask, class Rows>
    __attribute__((always_inline)) void attend_head_tile(HeadTile at, const Rows& rows, const Rows& far, const Rows& near) {
        const std::int64_t base = at.tile * kTileTokens, begin = rows_.begin() - base, end = rows_.end() - base;
        rows_.turn_to(at.head);
        if (at.head == 0 && (at.tile == first_tile_ || at.tile % kTiles == 0)) begin_partial(at.tile / kTiles);
        if (begin > 0 || end < kTileTokens) {
            const int start = static_cast<int>(larger(begin, 0)), stop = static_cast<int>(smaller(end, kTileTokens));
            attend<kHeadWidth, Ask>(at, PartOfRows<Rows>{{rows.k, start, stop}, {rows.v, start, stop}}, far, near);
        } else {
            attend<kHeadWidth, Ask>(at, rows, far, near);
        }
        const bool over = (at.tile + 1) % kTiles == 0;
        if (at.head + 1 == heads_ && (over || at.tile == last_tile_)) states_.end_partial(at.tile / kTiles, over);
    }

    void begin_partial(std::int64_t partial) {
        states_.begin_partial(partial);
        for (int head = 0; head < heads_; ++head) partials_[head] = states_.partial(partial, head);
    }

    void pack_query(int head, int row) {
        const bf16* query = rows_.query(head, row);
        bf16* to = queries_ + (std::int64_t{head} * rows_.count() + row) * k_stride_;
        for (int d = 0; d < k_width_; d += kColumns) S::store_pairs(to + d, Values::load_columns(query, d, k_width_));
    }

    // Of a head tile in blocks of whole tiles.
    template <class Rows>
    Rows even_rows(HeadTile at) {
        if (at.tile != placed_) {
            const std::int64_t token = at.tile * kTileTokens, block = token / view_.block_size, offset = token - block * view_.block_size;
            const auto place = [&](const PagedTensor& of) {
                return reinterpret_cast<const bf16*>(of.data) + table_[block] * of.block_stride + offset * of.token_stride;
            };
            placed_ = at.tile;
            k_place_ = place(view_.k);
            v_place_ = place(view_.v);
        }
        const std::int64_t head = first_head_ + at.head;
        return {{k_place_ + head * view_.k.head_stride, view_.k.token_stride}, {v_place_ + head * view_.v.head_stride, view_.v.token_stride}};
    }
    // Where all heads of a token lie together: as many rows of a tile as a head tile has, its part of them in the order of their addresses.
    template <class Rows>
    Rows rows_by_token(std::int64_t tile, int part) {
        const Rows rows = even_rows<Rows>({tile, 0});
        const std::int64_t before = std::int64_t{part} * kTileTokens;
        return {{rows.k.first + before * k_width_, k_width_}, {rows.v.first + before * v_width_, v_width_}};
    }
    bool all_heads_together(const PagedTensor& of) const { return of.head_stride == of.width && of.token_stride == heads_ * of.width; }

    void find(std::int64_t tile, Places& places) {
        tokens_.find(tile, rows_.begin(), rows_.end(), tile_);
        tokens_.rows(tile_, first_head_, places);
    }
    template <class Rows>
    Rows scattered_rows(const Places& places, int head) const {
        return {{places.k, head * view_.k.head_stride}, {places.v, head * view_.v.head_stride}};
    }
    bool values_follow_keys() const {
        return view_.v.data == view_.k.data + k_width_ * sizeof(bf16) && view_.v.block_stride == view_.k.block_stride &&
               view_.v.head_stride == view_.k.head_stride && view_.v.token_stride == view_.k.token_stride;
    }

    template <int kHeadWidth, class Ask, class Rows>
    void ask_for(const Rows& rows) const {
        for (int t = 0; t < kTileTokens; ++t) ask_for_row<kHeadWidth, Ask::far>(rows.k[t], k_width_);
        for (int t = 0; t < kTileTokens; ++t) ask_for_row<kHeadWidth, Ask::far>(rows.v[t], v_width_);
    }

    // far: rows to be asked for, as many as the head tile has. near: the next one's, whose keys will then be needed first.
    template <int kHeadWidth, class Ask, class Rows, class Asked>
    __attribute__((noinline)) void attend(HeadTile at, const Rows& rows, const Asked& far, const Asked& near) {
        const std::int64_t base = at.tile * kTileTokens;
        const RowStates& states = partials_[at.head];
        alignas(64) bf16 p[kRows * kTileTokens];
        Vec s[kRows];
        scores<kHeadWidth, Ask>(rows, far, queries_ + std::int64_t{at.head} * kRows * k_stride_, s);
        const bool whole = rows_.see_all(0, kRows, base, base + kTileTokens);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            float *o = states.o + r * states.stride, *sums = o + states.stride - kSumLanes;
            Vec one[1] = {s[r]}, weights[1];
            float factor;
            if (whole && rows_.soften_steadily(one, states.m[r], factor, weights)) {
                rows_.rescale(o, states.stride, factor);
            } else {
                weights[0] = soften(r, base, states.m[r], o, states.stride, s[r]);
            }
            S::to_bf16(p + r * kTileTokens, weights[0]);
            S::store(sums, S::add(S::load(sums), weights[0]));
        }
        values<kHeadWidth, Ask>(rows, far, near, p, states.o, states.stride);
    }

    __attribute__((noinline)) Vec soften(int row, std::int64_t base, float& m, float* o, std::int64_t stride, Vec s) {
        alignas(64) float p[kTileTokens];
        float factor;
        S::store(p, s);
        rows_.soften_tiles(row, base, 1, p, m, &factor);
        rows_.rescale(o, stride, factor);
        return S::load(p);
    }

    template <int kHeadWidth, class Ask, class Rows, class Asked>
    __attribute__((always_inline)) void scores(const Rows& rows, const Asked& far, const bf16* query, Vec (&s)[kRows]) const {
        constexpr int kTokens = 4;
        constexpr bool kRowAStep = kHeadWidth == kTokens * kColumns;  // as many steps of d as tokens at once
        const int width = kHeadWidth > 0 ? kHeadWidth : k_width_;
        constexpr bool kHoldsQueries = kHeadWidth > 0 && kRows <= 2;
        constexpr int kSteps = kHoldsQueries ? kHeadWidth / kColumns : 1;
        Pairs held[kHoldsQueries ? kRows : 1][kSteps];
        if constexpr (kHoldsQueries) {
#pragma GCC unroll 8
            for (int i = 0; i < kRows * kSteps; ++i) held[i / kSteps][i % kSteps] = S::held(S::load_pairs(query + i / kSteps * k_stride_ + i % kSteps * kColumns));
        }
        Vec parts[kRows][kTileTokens / kTokens];
#pragma GCC unroll 4
        for (int group = 0; group < kTileTokens; group += kTokens) {
            Vec sum[kRows][kTokens];
            const bf16* key[kTokens];
#pragma GCC unroll 4
            for (int n = 0; n < kTokens; ++n) {
                key[n] = rows.k[group + n];
                if constexpr (!kRowAStep) {
                    ask_for_row<kHeadWidth, Ask::far>(asked_with_keys(far, group + n), width);
                    ask_for_row<kHeadWidth, Ask::near>(rows.v[group + n], v_width_);
                }
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r) sum[r][n] = S::zero();
            }
            int d = 0;
#pragma GCC unroll 4
            for (; d + kColumns <= width; d += kColumns) {
                if constexpr (kRowAStep) {
                    ask_for_row<kHeadWidth, Ask::far>(asked_with_keys(far, group + d / kColumns), width);
                    ask_for_row<kHeadWidth, Ask::near>(rows.v[group + d / kColumns], width);
                }
                if constexpr (kHoldsQueries) {
#pragma GCC unroll 8
                    for (int i = 0; i < kRows * kTokens; ++i) {
                        Vec& one = sum[i / kTokens][i % kTokens];
                        one = S::dot_from(one, held[i / kTokens][d / kColumns], key[i % kTokens] + d);
                    }
                } else {
                    multiply<kTokens>(query + d, key, sum, [d](const bf16* from) { return S::load_pairs(from + d); });
                }
            }
            if constexpr (kHeadWidth == 0) {
                const int rest = width - d;
                if (rest > 0) {
                    multiply<kTokens>(query + d, key, sum, [d, rest](const bf16* from) { return S::load_pairs_part(from + d, rest); });
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) parts[r][group / kTokens] = S::fold_four(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) s[r] = S::fold_parts(parts[r][0], parts[r][1], parts[r][2], parts[r][3]);
    }

    template <int kTokens, class Load>
    __attribute__((always_inline)) void multiply(const bf16* query, const bf16* const (&key)[kTokens], Vec (&sum)[kRows][kTokens], Load load) const {
        Pairs loaded[kTokens];
#pragma GCC unroll 4
        for (int n = 0; n < kTokens; ++n) loaded[n] = S::held(load(key[n]));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const Pairs q = S::load_pairs(query + r * k_stride_);
#pragma GCC unroll 4
            for (int n = 0; n < kTokens; ++n) sum[r][n] = S::dot(sum[r][n], q, loaded[n]);
        }
    }

    template <int kHeadWidth, class Ask, class Rows, class Asked>
    __attribute__((always_inline)) void values(const Rows& rows, const Asked& far, const Asked& near, const bf16* p, float* o, std::int64_t stride) const {
        constexpr int kChunks = kRows <= 3 ? 4 : 2;
        const int width = kHeadWidth > 0 ? kHeadWidth : v_width_;
        const auto whole = [](const bf16* even, const bf16* odd, Pairs& low, Pairs& high) { S::interleave_from(S::held(S::load_pairs(even)), odd, low, high); };
        int d = 0;
        for (; d + kChunks * kColumns <= width; d += kChunks * kColumns) values_columns<kChunks, Ask>(rows, far, near, p, d, o, stride, whole);
        if constexpr (kHeadWidth == 0) {
            for (; d + kColumns <= width; d += kColumns) values_columns<1, Ask>(rows, far, near, p, d, o, stride, whole);
            const int rest = width - d;
            if (rest > 0) {
                values_columns<1, Ask>(rows, far, near, p, d, o, stride, [rest](const bf16* even, const bf16* odd, Pairs& low, Pairs& high) {
                    S::interleave(S::load_pairs_part(even, rest), S::load_pairs_part(odd, rest), low, high);
                });
            }
        }
    }

    template <int kChunks, class Ask, class Rows, class Asked, class Load>
    __attribute__((always_inline)) void values_columns(const Rows& rows, const Asked& far, const Asked& near, const bf16* p, int column, float* o, std::int64_t stride,
                                                       Load load) const {
        o += column;
        Vec sum[kRows][2 * kChunks];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int i = 0; i < 2 * kChunks; ++i) sum[r][i] = S::load(o + r * stride + i * kWidth);
        }
        for (int t = 0; t < kTileTokens; t += 2) {
            const bf16 *even = rows.v[t] + column, *odd = rows.v[t + 1] + column;
            const bf16* const values[2] = {asked_with_values(far, t) + column, asked_with_values(far, t + 1) + column};
            const bf16* const keys[2] = {near.k[t] + column, near.k[t + 1] + column};
            Pairs weights[kRows];
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) weights[r] = S::broadcast_pair(p + r * kTileTokens + t);
#pragma GCC unroll 4
            for (int i = 0; i < kChunks; ++i) {
                const int first = 2 * i, second = 2 * i + 1;  // line of the pair of rows, in order
                Ask::far(values[first / kChunks] + first % kChunks * kColumns);
                Ask::far(values[second / kChunks] + second % kChunks * kColumns);
                Ask::near(keys[first / kChunks] + first % kChunks * kColumns);
                Ask::near(keys[second / kChunks] + second % kChunks * kColumns);
                Pairs low, high;
                load(even + i * kColumns, odd + i * kColumns, low, high);
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r) {
                    sum[r][2 * i] = S::dot(sum[r][2 * i], weights[r], low);
                    sum[r][2 * i + 1] = S::dot(sum[r][2 * i + 1], weights[r], high);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int i = 0; i < 2 * kChunks; ++i) S::store(o + r * stride + i * kWidth, sum[r][i]);
        }
    }

    Scratch scratch_;
    const PagedView& view_;
    const std::int32_t* table_;
    const int first_head_, heads_;
    const int k_width_, v_width_;
    const int k_stride_;  // elements of a packed query
    ItemRows<S, bf16, kTileTokens, kPairHeadroom> rows_;
    const Tokens tokens_;
    const ItemStates<S> states_;
    bf16* queries_;
    RowStates* partials_;  // of each head, of the partial under way
    const std::int64_t first_tile_, last_tile_;
    const bool all_heads_together_;
    std::int64_t span_ = 1;     // tiles: a power of two
    std::int64_t placed_ = -1;  // the tile whose tokens lie
    const bf16* k_place_ = nullptr;  // from here on, of head 0, where even
    const bf16* v_place_ = nullptr;
    typename Tokens::Tile tile_;  // what was found last, where not
};

}  // namespace
}  // namespace quire
