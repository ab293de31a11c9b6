// One item of attention: tiles in order, heads within a span of tiles, rows within a head; online softmax and the merge of
// partials. A template over the two products of a variant (attention_lanes, attention_pairs, attention_tiles):
//
//   Simd, Element      the vector layer and the element in memory
//   kTileTokens        tokens of a tile
//   kBlockRows         rows of one product
//   kSoftmaxShares     of the memory to come that `begin` is given, the parts that are asked for in the softmax
//   kManyRows          from here on the softmax goes many rows at a time
//   kHeadsTogether     whether all heads' keys and values of a tile in small blocks are asked for before the first one's turn
//   Products(k width, v width, rows of a head, Scratch&)   takes its scratch memory
//   query_bytes()      of the packed query rows of a head;  pack_query(packed, row, query)
//   begin(k, v, ahead, start, stop)  a head's tile: row pointers of its tokens, and memory to come, in a share for each of
//                                  its 2 kTileTokens rows; only tokens [start, stop) are seen by a query
//   scores(packed, row, rows, start, stop, s)    s[r][token] for block `row` of the rows
//   kRoundsWeights                 whether p is kept rounded, by keep_weights(r, vector, first, second), a row's two vectors of
//                                  float32; `values` then has no use for its p, and each block of rows takes its turn alone
//   values(p, row, rows, start, stop, o, stride) o[r] += p[r] v
//   finish(o, factor, out)         out = o * factor, rounded, in natural order
#pragma once

#include "kernels/attention_ahead.hpp"
#include "kernels/attention_state.hpp"

namespace quire {
namespace {

constexpr float kLog2E = 1.442695040888963f;

inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

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

// o times the factors, rounded, to the first `columns` lanes. + 0.0f: a sum of no terms and a sum of zeros are the same zero.
template <class S, class T>
inline void store_scaled(typename S::Vec o, typename S::Vec factors, T* out, int columns) {
    const typename S::Vec scaled = S::add(S::mul(o, factors), S::zero());
    if (columns >= S::kWidth) {
        S::store(out, scaled);
    } else {
        S::store_part(out, scaled, columns);
    }
}

template <class Products>
class AttendItem {
    using S = typename Products::Simd;
    using Vec = typename S::Vec;
    using Element = typename Products::Element;
    static constexpr int kTileTokens = Products::kTileTokens;
    static_assert(kMostTileTokens % kTileTokens == 0 && kPartialTokens % kMostTileTokens == 0);
    static constexpr int kVectors = kTileTokens / S::kWidth;
    static constexpr int kTileShares = 2 * kTileTokens;  // of memory to come: one for each key and value of a tile

    // Where a tile's tokens lie (offsets of head 0, in elements), which of them any row sees, and where those of a block
    // begin and end.
    struct Tokens {
        std::int64_t k[kTileTokens], v[kTileTokens];
        int start, stop;
        int runs[kTileTokens + 1], num_runs;
        int head;  // for which their memory is listed as what comes next, or -1
    };
    struct Rows {
        const Element* k[kTileTokens];
        const Element* v[kTileTokens];
    };

  public:
    AttendItem(const AttentionJob& job, const AttentionItem& item)
        : job_(job),
          item_(item),
          view_(*job.view),
          options_(*job.options),
          group_(job.num_q_heads / static_cast<int>(view_.num_kv_heads)),
          rows_(item.row_stop - item.row_start),
          heads_(item.head_stop - item.head_start),
          products_(view_.k.width, view_.v.width, rows_, scratch_),
          states_(job, item, scratch_),
          scores_(scratch_.take<float>(std::int64_t{kItemRows} * kTileTokens)),
          queries_(scratch_.take<unsigned char>(products_.query_bytes() * heads_)) {
        table_ = job.batch->block_tables + item.sequence * job.batch->table_width;
        k_ = reinterpret_cast<const Element*>(view_.k.data);
        v_ = reinterpret_cast<const Element*>(view_.v.data);
        zeros_ = reinterpret_cast<const Element*>(kZeroRow);
        logit_scale_ = options_.softcap > 0.0f ? options_.scale / options_.softcap : options_.scale * kLog2E;
        logit_cap_ = options_.softcap * kLog2E;
        scaled_first_ = options_.softcap > 0.0f || !(options_.scale > 0.0f);
        rest_of_scale_ = scaled_first_ ? 1.0f : logit_scale_;
        token_major_ = view_.token_major();
        head_bytes_ = view_.k.head_stride * static_cast<std::int64_t>(sizeof(Element));
        heads_alike_ = view_.v.head_stride == view_.k.head_stride && head_bytes_ % LinesAhead<S>::kLineBytes == 0;
        find_query_rows();
    }

    void run() {
        pack_queries();
        states_.begin();
        const std::int64_t begin = larger(seen_[0].start, item_.token_start), end = smaller(seen_[rows_ - 1].stop, item_.token_stop);
        const std::int64_t first_tile = begin / kTileTokens, last_tile = (end - 1) / kTileTokens;
        constexpr std::int64_t kTiles = kPartialTokens / kTileTokens;

        // A head's tokens of a block lie together: tiles of one span are taken for a head before the next head's turn.
        // Where a token's heads lie together instead, all heads take a tile before the next one's turn.
        std::int64_t span = 1;
        while (!token_major_ && 2 * span * kTileTokens <= view_.block_size && span < kTiles) span *= 2;
        // The heads of a small block too, where that is faster: the next tile is asked for block by block, all heads of it.
        constexpr std::int64_t kMostAhead = 1 << 18;  // bytes, of a second cache of 512 KiB or more
        const std::int64_t tile_bytes = kTileTokens * (view_.k.width + view_.v.width) * static_cast<std::int64_t>(sizeof(Element));
        const int together = (Products::kHeadsTogether || token_major_) && span == 1 && heads_ * tile_bytes <= kMostAhead ? heads_ : 1;

        ahead_.near = view_.block_size >= 8;

        Tokens tokens[2];
        Rows rows;
        int here = 0;
        find_tokens(first_tile, begin, end, tokens[here]);
        for (int part = 0; part < together; ++part) {
            find_ahead(tokens[here], item_.head_start, together, part);
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
                    find_rows(tokens[here], item_.head_start + head, rows);
                    int next = here;
                    ahead_.fetch_rest();
                    if (together > 1) {
                        if (stop <= last_tile) {
                            if (head == 0) find_tokens(stop, begin, end, tokens[1 - here]);
                            find_ahead(tokens[1 - here], item_.head_start, together, head);
                        }
                        if (!same_span) next = 1 - here;
                    } else if (next_tile <= last_tile) {
                        if (next_tile != tile) find_tokens(next_tile, begin, end, tokens[next = 1 - here]);
                        find_ahead(tokens[next], item_.head_start + (same_head ? head : same_span ? head + 1 : 0), 1, 0);
                    }
                    attend_tile(tile, head, tokens[here], rows, states);
                    here = next;
                }
            }
            if (stop % kTiles == 0 || stop > last_tile) states_.end_partial(partial, stop % kTiles == 0);
            start = stop;
        }
        if (states_.end()) write_out();
    }

  private:
    // Query tokens of the rows, and which positions each row sees.
    void find_query_rows() {
        const std::int32_t* start = job_.batch->query_start + item_.sequence;
        const std::int64_t first_position = job_.batch->context_lengths[item_.sequence] - (start[1] - start[0]);
        for (int row = 0; row < rows_; ++row) {
            if (item_.run >= 0) {
                tokens_[row] = job_.shared_tokens[(item_.shared_row + row) / group_];
                seen_[row] = {item_.token_start, item_.token_stop};  // every member's rows come after the run
            } else {
                const std::int64_t token = (item_.row_start + row) / group_, at = first_position + token;
                tokens_[row] = start[0] + token;
                seen_[row] = {first_visible(options_, at), at + 1};
            }
        }
    }

    std::int64_t query_head(int head, int row) const { return (item_.head_start + head) * group_ + (item_.row_start + row) % group_; }

    void pack_queries() {
        const auto* query = reinterpret_cast<const Element*>(job_.query->data);
        for (int head = 0; head < heads_; ++head) {
            for (int row = 0; row < rows_; ++row) {
                products_.pack_query(queries_ + head * products_.query_bytes(), row,
                                     query + tokens_[row] * job_.query->token_stride + query_head(head, row) * job_.query->head_stride);
            }
        }
    }

    void find_tokens(std::int64_t tile, std::int64_t begin, std::int64_t end, Tokens& tokens) const {
        const std::int64_t base = tile * kTileTokens;
        tokens.start = static_cast<int>(larger(begin - base, 0));
        tokens.stop = static_cast<int>(smaller(end - base, kTileTokens));
        std::int64_t block = (base + tokens.start) / view_.block_size, offset = (base + tokens.start) % view_.block_size;
        tokens.num_runs = 0;
        tokens.head = -1;
        for (int t = tokens.start; t < tokens.stop;) {
            tokens.runs[tokens.num_runs++] = t;
            const std::int64_t id = table_[block];
            const std::int64_t k = id * view_.k.block_stride, v = id * view_.v.block_stride;
            for (; t < tokens.stop && offset < view_.block_size; ++t, ++offset) {
                tokens.k[t] = k + offset * view_.k.token_stride;
                tokens.v[t] = v + offset * view_.v.token_stride;
            }
            ++block;
            offset = 0;
        }
        tokens.runs[tokens.num_runs] = tokens.stop;
    }

    // Part `part` of `num_heads` equal parts of a tile's memory: block by block, the heads from `head` on, keys and values;
    // or, where a token's heads lie together, token by token.
    void find_ahead(Tokens& tokens, int head, int num_heads, int part) {
        if (num_heads == 1 && tokens.head >= 0) return ahead_.again((head - tokens.head) * head_bytes_);
        ahead_.begin();
        if (num_heads == 1 && heads_alike_) tokens.head = head;
        if (token_major_) {
            const int count = tokens.stop - tokens.start;
            const int first = tokens.start + count * part / num_heads, last = tokens.start + count * (part + 1) / num_heads;
            for (int t = first; t < last; ++t) {
                ahead_.add(k_ + head * view_.k.head_stride + tokens.k[t], (num_heads - 1) * view_.k.head_stride + view_.k.width);
            }
            for (int t = first; t < last; ++t) {
                ahead_.add(v_ + head * view_.v.head_stride + tokens.v[t], (num_heads - 1) * view_.v.head_stride + view_.v.width);
            }
            return ahead_.end(kTileShares);
        }
        const int pieces = 2 * tokens.num_runs;
        for (int piece = part * pieces; piece < (part + 1) * pieces; ++piece) {
            const int run = piece / (2 * num_heads), start = tokens.runs[run];
            const std::int64_t at = head + piece / 2 % num_heads, more = tokens.runs[run + 1] - start - 1;
            if (piece % 2 == 0) {
                ahead_.add(k_ + at * view_.k.head_stride + tokens.k[start], more * view_.k.token_stride + view_.k.width);
            } else {
                ahead_.add(v_ + at * view_.v.head_stride + tokens.v[start], more * view_.v.token_stride + view_.v.width);
            }
        }
        ahead_.end(kTileShares);
    }

    void find_rows(const Tokens& tokens, int head, Rows& rows) const {
        const Element* k = k_ + head * view_.k.head_stride;
        const Element* v = v_ + head * view_.v.head_stride;
        for (int t = 0; t < tokens.start; ++t) rows.k[t] = rows.v[t] = zeros_;
        for (int t = tokens.start; t < tokens.stop; ++t) {
            rows.k[t] = k + tokens.k[t];
            rows.v[t] = v + tokens.v[t];
        }
        for (int t = tokens.stop; t < kTileTokens; ++t) rows.k[t] = rows.v[t] = zeros_;
    }

    void attend_tile(std::int64_t tile, int head, const Tokens& tokens, const Rows& rows, const RowStates& states) {
        const std::int64_t base = tile * kTileTokens;
        products_.begin(rows.k, rows.v, ahead_, tokens.start, tokens.stop);
        const unsigned char* query = queries_ + head * products_.query_bytes();
        if constexpr (Products::kRoundsWeights) {  // a block's scores and weights are still in the first cache when they are taken
            for (int row = 0, count; row < rows_; row += count) {
                count = products_.block_rows(row);
                const Seen seen = seen_by(row, count, base);
                if (seen.start >= seen.stop) continue;
                products_.scores(query, row, count, seen.start, seen.stop, scores_);
                soften(row, count, base, states, scores_);
                add_values(row, count, seen, states, scores_);
            }
            return;
        }
        // All scores, then all values: the tile's keys, then its values, stay in the first cache meanwhile.
        for (int row = 0, count; row < rows_; row += count) {
            count = products_.block_rows(row);
            const Seen seen = seen_by(row, count, base);
            if (seen.start >= seen.stop) continue;
            products_.scores(query, row, count, seen.start, seen.stop, scores_ + row * kTileTokens);
            if (!many_rows()) soften(row, count, base, states, scores_ + row * kTileTokens);
        }
        for (int row = 0; many_rows() && row < rows_; row += S::kWidth) {
            soften(row, static_cast<int>(smaller(S::kWidth, rows_ - row)), base, states, scores_ + row * kTileTokens);
        }
        for (int row = 0, count; row < rows_; row += count) {
            count = products_.block_rows(row);
            const Seen seen = seen_by(row, count, base);
            if (seen.start < seen.stop) add_values(row, count, seen, states, scores_ + row * kTileTokens);
        }
    }

    bool many_rows() const { return rows_ >= Products::kManyRows; }

    // Tokens of the tile that some row of a block sees.
    struct Seen {
        int start, stop;
    };
    Seen seen_by(int row, int count, std::int64_t base) const {
        return {static_cast<int>(larger(seen_[row].start - base, 0)), static_cast<int>(smaller(seen_[row + count - 1].stop - base, kTileTokens))};
    }

    void add_values(int row, int count, Seen seen, const RowStates& states, const float* s) {
        float* o = states.o + row * states.stride;
        for (int r = 0; r < count; ++r) {
            if (factors_[row + r] != 1.0f) scale(o + r * states.stride, states.stride, factors_[row + r]);
        }
        products_.values(s, row, count, seen.start, seen.stop, o, states.stride);
    }

    static void scale(float* o, std::int64_t count, float factor) {
        const Vec factors = S::broadcast(factor);
        for (std::int64_t d = 0; d < count; d += S::kWidth) S::store(o + d, S::mul(S::load(o + d), factors));
    }

    // Of a row's scores s: those it does not see become -inf; where the scale cannot wait (a soft cap, or none above zero), all
    // become base-2 logits. Returns the largest of each lane.
    Vec row_most(int row, std::int64_t base, float* s) {
        const std::int64_t start = seen_[row].start - base, stop = seen_[row].stop - base;
        const bool whole = start <= 0 && stop >= kTileTokens;
        const int low = static_cast<int>(larger(start, 0)), high = static_cast<int>(larger(smaller(stop, kTileTokens), 0));
        Vec most = S::broadcast(kMinusInfinity);
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) {
            Vec x = S::load(s + i * S::kWidth);
            if (!whole || scaled_first_) {
                if (scaled_first_) x = S::mul(x, S::broadcast(logit_scale_));
                if (options_.softcap > 0.0f) x = S::mul(tanh<S>(x), S::broadcast(logit_cap_));
                if (!whole) x = S::within(x, low - i * S::kWidth, high - i * S::kWidth);
                S::store(s + i * S::kWidth, x);
            }
            most = S::max(x, most);
        }
        return most;
    }

    // p of a row, below its largest logit `row_top` (-inf: it has seen nothing): in place of s, or rounded where the products
    // want it so. Returns the sum of each lane.
    Vec row_weights(int r, float row_top, float* s) {
        const Vec factor = S::broadcast(rest_of_scale_), below = S::broadcast(row_top == kMinusInfinity ? 0.0f : -row_top);
        const auto weight = [&](int i) { return exp2_nonpositive<S>(S::fma(S::load(s + i * S::kWidth), factor, below)); };
        Vec sum = S::zero();
        if constexpr (Products::kRoundsWeights) {
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; i += 2) {
                const Vec first = weight(i), second = weight(i + 1);
                products_.keep_weights(r, i, first, second);
                sum = S::add(S::add(sum, first), second);
            }
        } else {
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i) {
                const Vec p = weight(i);
                S::store(s + i * S::kWidth, p);
                sum = S::add(sum, p);
            }
        }
        return sum;
    }

    // Scores of a tile -> p, by the online softmax; what a row does not see gets p = 0. Leaves the factors for o so far.
    void soften(int row, int count, std::int64_t base, const RowStates& states, float* s) {
        if (many_rows()) {
            soften_many(row, count, base, states, s);
        } else {
            soften_few(row, count, base, states, s);
        }
    }

    // Lines to ask for at each of 2 `steps` of the softmax; the first rows of a tile ask for all.
    int softmax_lines(int row, int steps) const { return row == 0 ? ahead_.lines_of(Products::kSoftmaxShares, 2 * steps) : 0; }

    // Three short loops over the rows, because a row's steps wait for each other.
    void soften_few(int row, int count, std::int64_t base, const RowStates& states, float* s) {
        float tops[Products::kBlockRows], sums[Products::kBlockRows];
        const int lines = softmax_lines(row, count);
        for (int r = 0; r < count; ++r) {
            ahead_.fetch(lines);
            const float tile_most = S::reduce_max(row_most(row + r, base, s + r * kTileTokens)) * rest_of_scale_, before = states.m[row + r];
            tops[r] = tile_most > before ? tile_most : before;
        }
        for (int r = 0; r < count; ++r) {
            ahead_.fetch(lines);
            sums[r] = S::reduce_add(row_weights(r, tops[r], s + r * kTileTokens));
        }
        for (int r = 0; r < count; ++r) {
            float factor = 1.0f;
            if (tops[r] > states.m[row + r]) {
                factor = S::first(exp2_nonpositive<S>(S::broadcast(states.m[row + r] - tops[r])));
                states.m[row + r] = tops[r];
            }
            states.l[row + r] = states.l[row + r] * factor + sums[r];
            factors_[row + r] = factor;
        }
    }

    // The same for up to kWidth rows at once, a lane for each: the same operations, so the same bits. A row that has seen
    // nothing yet (-inf less a number) gets 0 for a factor of its zeros, where soften_few leaves them.
    void soften_many(int row, int count, std::int64_t base, const RowStates& states, float* s) {
        constexpr int kWidth = S::kWidth;
        alignas(64) float lanes[kWidth * kWidth], tops[kWidth];
        for (int r = count; r < kWidth; ++r) S::store(lanes + r * kWidth, S::zero());
        float *m = states.m + row, *l = states.l + row;
        const int lines = softmax_lines(row, 1);
        ahead_.fetch(lines);
        for (int r = 0; r < count; ++r) S::store(lanes + r * kWidth, row_most(row + r, base, s + r * kTileTokens));
        // Rows beyond `count` may be another item's.
        const Vec most = S::mul(S::fold_max(lanes), S::broadcast(rest_of_scale_));
        const Vec before = S::load_part(m, count), top = S::max(most, before);
        S::store(tops, top);
        ahead_.fetch(lines);
        for (int r = 0; r < count; ++r) S::store(lanes + r * kWidth, row_weights(r, tops[r], s + r * kTileTokens));
        const Vec factor = exp2_nonpositive<S>(S::sub(before, S::max(top, S::broadcast(-3.402823466e+38f))));
        S::store(factors_ + row, factor);
        S::store_part(m, top, count);
        S::store_part(l, S::add(S::mul(S::load_part(l, count), factor), S::fold(lanes)), count);
    }

    void write_out() {
        auto* out = reinterpret_cast<Element*>(job_.out->data);
        for (int head = 0; head < heads_; ++head) {
            const RowStates all = states_.all(head);
            for (int row = 0; row < rows_; ++row) {
                float l = all.l[row], factor = 1.0f;
                if (options_.sinks != nullptr) {
                    const float sink = options_.sinks[query_head(head, row)] * kLog2E, m = all.m[row], top = sink > m ? sink : m;
                    factor = softmax_weight<S>(m, top);
                    l = l * factor + softmax_weight<S>(sink, top);
                }
                products_.finish(all.o + row * all.stride, factor / l,
                                 out + tokens_[row] * job_.out->token_stride + query_head(head, row) * job_.out->head_stride);
            }
        }
    }

    const AttentionJob& job_;
    const AttentionItem& item_;
    const PagedView& view_;
    const AttentionOptions& options_;
    Scratch scratch_;
    const int group_;
    const int rows_;   // of one head
    const int heads_;
    Products products_;
    const ItemStates<S> states_;
    LinesAhead<S> ahead_;
    float* scores_;  // [rows of a head][kTileTokens]
    float factors_[kItemRows];
    std::int64_t tokens_[kItemRows];  // of the query
    struct {
        std::int64_t start, stop;
    } seen_[kItemRows];  // positions that each row sees
    unsigned char* queries_;
    const std::int32_t* table_;
    const Element* k_;
    const Element* v_;
    const Element* zeros_;
    std::int64_t head_bytes_;  // from a head's keys to the next one's
    bool heads_alike_;  // a head's keys and values lie as the next one's do, on whole lines
    bool token_major_;  // the heads of a token lie together, not the tokens of a head
    float logit_scale_;
    float logit_cap_;
    bool scaled_first_;     // the scores are scaled before the largest is looked for
    float rest_of_scale_;   // what makes logits of them after that
};

}  // namespace
}  // namespace quire
