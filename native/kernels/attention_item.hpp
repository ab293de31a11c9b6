// One item of attention: tiles in order, heads within a span of tiles, rows within a head; online softmax and the merge of
// partials. A template over the two products of a variant (attention_lanes, attention_pairs, attention_tiles):
//
//   Simd, Element      the vector layer and the element in memory
//   kTileTokens        tokens of a tile
//   kBlockRows         rows of one product
//   Products(k width, v width, rows of a head, Scratch&)   takes its scratch memory
//   query_bytes()      of the packed query rows of a head;  pack_query(packed, row, query)
//   begin(k, v, next_k, next_v, start, stop)  a head's tile: row pointers of its tokens, and of the ones to come; only
//                                  tokens [start, stop) are seen by a query
//   scores(packed, row, rows, start, stop, s)    s[r][token] for block `row` of the rows
//   values(p, row, rows, start, stop, o, stride) o[r] += p[r] v
//   finish(o, factor, out)         out = o * factor, rounded, in natural order
#pragma once

#include "kernels/attention_state.hpp"

namespace quire {
namespace {

constexpr float kLog2E = 1.442695040888963f;

inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

// Cuts the thread's scratch memory into aligned pieces. Rows and widths have bounds, so it is enough for any item.
class Scratch {
  public:
    template <class T>
    T* take(std::int64_t count) {
        auto* piece = reinterpret_cast<T*>(base_ + used_);
        used_ += padded_to(count * static_cast<std::int64_t>(sizeof(T)), 64);
        if (used_ > kScratchBytes) __builtin_trap();
        return piece;
    }

  private:
    unsigned char* base_ = attention_scratch();
    std::int64_t used_ = 0;
};

// Rows cut into blocks of at most `most`, as even as they can be: 8 rows by 6 are 4 + 4, not 6 + 2.
class RowBlocks {
  public:
    RowBlocks(int rows, int most) : rows_(rows) {
        const int blocks = (rows + most - 1) / most;
        step_ = (rows + blocks - 1) / blocks;
    }
    int rows_from(int row) const { return rows_ - row < step_ ? rows_ - row : step_; }

  private:
    int rows_, step_;
};

// Asks for the cache lines of a row to come.
template <class S, class T>
inline void prefetch_row(const T* row, int width) {
    constexpr int kLine = 64 / static_cast<int>(sizeof(T));
    for (int d = 0; d < width; d += kLine) S::prefetch(row + d);
}

template <class Products>
class AttendItem {
    using S = typename Products::Simd;
    using Vec = typename S::Vec;
    using Element = typename Products::Element;
    static_assert(Products::kTileTokens == kTileTokens);
    static constexpr int kVectors = kTileTokens / S::kWidth;

    // Where a tile's tokens lie (offsets of head 0, in elements), and which of them any row sees.
    struct Tokens {
        std::int64_t k[kTileTokens], v[kTileTokens];
        int start, stop;
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
          all_(scratch_.take<float>(heads_ * state_floats(rows_, view_.v.width)), rows_, 1, view_.v.width),
          own_(scratch_.take<float>(heads_ * state_floats(rows_, view_.v.width)), rows_, 1, view_.v.width),
          scores_(scratch_.take<float>(std::int64_t{kItemRows} * kTileTokens)),
          queries_(scratch_.take<unsigned char>(products_.query_bytes() * heads_)) {
        table_ = job.batch->block_tables + item.sequence * job.batch->table_width;
        k_ = reinterpret_cast<const Element*>(view_.k.data);
        v_ = reinterpret_cast<const Element*>(view_.v.data);
        zeros_ = reinterpret_cast<const Element*>(kZeroRow);
        logit_scale_ = options_.softcap > 0.0f ? options_.scale / options_.softcap : options_.scale * kLog2E;
        logit_cap_ = options_.softcap * kLog2E;
        find_query_rows();
    }

    void run() {
        pack_queries();
        const bool merges = item_.run >= 0 ? job_.runs[item_.run].merged : item_.split < 0;
        if (merges) begin_merge();
        const std::int64_t begin = larger(seen_[0].start, item_.token_start), end = smaller(seen_[rows_ - 1].stop, item_.token_stop);
        const std::int64_t first_tile = begin / kTileTokens, last_tile = (end - 1) / kTileTokens;
        constexpr std::int64_t kTiles = kPartialTokens / kTileTokens;

        // A head's tokens of a block lie together: tiles of one span are taken for a head before the next head's turn.
        std::int64_t span = 1;
        while (2 * span * kTileTokens <= view_.block_size && span < kTiles) span *= 2;

        Tokens tokens[2];
        Rows rows[2];
        int here = 0, now = 0;
        find_tokens(first_tile, begin, end, tokens[here]);
        find_rows(tokens[here], item_.head_start, rows[now]);
        for (std::int64_t start = first_tile; start <= last_tile;) {
            const std::int64_t stop = smaller(start - start % span + span, last_tile + 1), partial = start / kTiles;
            if (start == first_tile || start % kTiles == 0) begin_partial(partial, start == first_tile);
            for (int head = 0; head < heads_; ++head) {
                const RowStates states = partial_states(partial, head);
                for (std::int64_t tile = start; tile < stop; ++tile) {
                    // What comes after: the head's next tile, the next head, or the first one of the next span.
                    const bool same_head = tile + 1 < stop, same_span = same_head || head + 1 < heads_;
                    const std::int64_t next_tile = same_head ? tile + 1 : same_span ? start : stop;
                    const bool more = next_tile <= last_tile;
                    int next = here;
                    if (more) {
                        if (next_tile != tile) find_tokens(next_tile, begin, end, tokens[next = 1 - here]);
                        find_rows(tokens[next], item_.head_start + (same_head ? head : same_span ? head + 1 : 0), rows[1 - now]);
                    }
                    attend_tile(tile, head, tokens[here], rows[now], rows[more ? 1 - now : now], states);
                    here = next;
                    now = 1 - now;
                }
            }
            // The partial in which a run ends is not over.
            if (merges && (stop % kTiles == 0 || (stop > last_tile && item_.run < 0))) {
                for (int head = 0; head < heads_; ++head) merge_states<S>(all_states(head), partial_states(partial, head));
            }
            start = stop;
        }
        if (item_.run >= 0) {
            job_.items_left[item_.run].fetch_sub(1, std::memory_order_release);
        } else if (item_.split < 0) {
            write_out();
        } else if (last_of_split()) {
            merge_split();
            write_out();
        }
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

    // States of the partial under way: the thread's own, or where others will look for them.
    RowStates partial_states(std::int64_t partial, int head) const {
        if (item_.run >= 0) {
            const AttentionRun& run = job_.runs[item_.run];
            if (!run.merged) return run_states(run, partial - run.token_start / kPartialTokens, head);
            if (run.num_states > 1) return run_states(run, 1, head);
        } else if (item_.split >= 0) {
            const AttentionSplit& split = job_.splits[item_.split];
            return StateBlock(job_.states + split.offset, rows_, split.num_partials, view_.v.width).rows(head, partial - split.partial_start, 0, rows_);
        }
        return own_.rows(head, 0, 0, rows_);
    }

    RowStates all_states(int head) const {
        return item_.run >= 0 ? run_states(job_.runs[item_.run], 0, head) : all_.rows(head, 0, 0, rows_);
    }

    // The item's rows among a run's.
    RowStates run_states(const AttentionRun& run, std::int64_t state, int head) const {
        return StateBlock(job_.states + run.offset, run.num_rows, run.num_states, view_.v.width)
            .rows(item_.head_start + head, state, item_.shared_row - run.first_row, rows_);
    }

    // The rows' partial, from where a run before has left it.
    void begin_partial(std::int64_t partial, bool first) const {
        const bool begun = first && item_.before >= 0 && item_.token_start % kPartialTokens != 0 &&
                           job_.runs[item_.before].token_stop == item_.token_start;
        if (begun) attention_wait(job_.items_left[item_.before]);
        for (int head = 0; head < heads_; ++head) {
            const RowStates states = partial_states(partial, head);
            if (begun) {
                states.copy(run_states(job_.runs[item_.before], job_.runs[item_.before].num_states - 1, head));
            } else {
                states.clear();
            }
        }
    }

    // (M, L, O) of the partials before those of this item.
    void begin_merge() const { merge_run(item_.before); }

    void merge_run(std::int32_t index) const {
        if (index < 0) {
            for (int head = 0; head < heads_; ++head) all_states(head).clear();
            return;
        }
        const AttentionRun& run = job_.runs[index];
        if (!run.merged) merge_run(run.before);
        attention_wait(job_.items_left[index]);
        for (int head = 0; head < heads_; ++head) {
            if (run.merged) {
                all_states(head).copy(run_states(run, 0, head));
                continue;
            }
            const std::int64_t num_over = run.token_stop / kPartialTokens - run.token_start / kPartialTokens;
            for (std::int64_t state = 0; state < num_over; ++state) merge_states<S>(all_states(head), run_states(run, state, head));
        }
    }

    void find_tokens(std::int64_t tile, std::int64_t begin, std::int64_t end, Tokens& tokens) const {
        const std::int64_t base = tile * kTileTokens;
        tokens.start = static_cast<int>(larger(begin - base, 0));
        tokens.stop = static_cast<int>(smaller(end - base, kTileTokens));
        std::int64_t block = (base + tokens.start) / view_.block_size, offset = (base + tokens.start) % view_.block_size;
        for (int t = tokens.start; t < tokens.stop;) {
            const std::int64_t id = table_[block];
            const std::int64_t k = id * view_.k.block_stride, v = id * view_.v.block_stride;
            for (; t < tokens.stop && offset < view_.block_size; ++t, ++offset) {
                tokens.k[t] = k + offset * view_.k.token_stride;
                tokens.v[t] = v + offset * view_.v.token_stride;
            }
            ++block;
            offset = 0;
        }
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

    void attend_tile(std::int64_t tile, int head, const Tokens& tokens, const Rows& rows, const Rows& next, const RowStates& states) {
        const std::int64_t base = tile * kTileTokens;
        products_.begin(rows.k, rows.v, next.k, next.v, tokens.start, tokens.stop);
        const unsigned char* query = queries_ + head * products_.query_bytes();
        // All scores, then all values: the tile's keys, then its values, stay in the first cache meanwhile.
        for (int row = 0, count; row < rows_; row += count) {
            count = products_.block_rows(row);
            const Seen seen = seen_by(row, count, base);
            if (seen.start >= seen.stop) continue;
            float* s = scores_ + row * kTileTokens;
            products_.scores(query, row, count, seen.start, seen.stop, s);
            soften(s, row, count, base, states);
        }
        for (int row = 0, count; row < rows_; row += count) {
            count = products_.block_rows(row);
            const Seen seen = seen_by(row, count, base);
            if (seen.start >= seen.stop) continue;
            float* o = states.o + row * states.stride;
            for (int r = 0; r < count; ++r) {
                if (factors_[row + r] != 1.0f) scale(o + r * states.stride, states.stride, factors_[row + r]);
            }
            products_.values(scores_ + row * kTileTokens, row, count, seen.start, seen.stop, o, states.stride);
        }
    }

    // Tokens of the tile that some row of a block sees.
    struct Seen {
        int start, stop;
    };
    Seen seen_by(int row, int count, std::int64_t base) const {
        return {static_cast<int>(larger(seen_[row].start - base, 0)), static_cast<int>(smaller(seen_[row + count - 1].stop - base, kTileTokens))};
    }

    static void scale(float* o, std::int64_t count, float factor) {
        const Vec factors = S::broadcast(factor);
        for (std::int64_t d = 0; d < count; d += S::kWidth) S::store(o + d, S::mul(S::load(o + d), factors));
    }

    Vec logits(Vec score) const {
        const Vec scaled = S::mul(score, S::broadcast(logit_scale_));
        return options_.softcap > 0.0f ? S::mul(tanh<S>(scaled), S::broadcast(logit_cap_)) : scaled;
    }

    // Scores of a tile -> p, by the online softmax; what a row does not see gets p = 0. Leaves the factors for o so far.
    // Three short loops over the rows, because a row's steps wait for each other.
    void soften(float* s, int row, int count, std::int64_t base, const RowStates& states) {
        float tops[Products::kBlockRows], sums[Products::kBlockRows];
        for (int r = 0; r < count; ++r) {
            const std::int64_t start = seen_[row + r].start - base, stop = seen_[row + r].stop - base;
            const bool whole = start <= 0 && stop >= kTileTokens;
            const int low = static_cast<int>(larger(start, 0)), high = static_cast<int>(larger(smaller(stop, kTileTokens), 0));
            Vec most = S::broadcast(kMinusInfinity);
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i) {
                float* at = s + r * kTileTokens + i * S::kWidth;
                Vec x = logits(S::load(at));
                if (!whole) x = S::within(x, low - i * S::kWidth, high - i * S::kWidth);
                S::store(at, x);
                most = S::max(x, most);
            }
            const float tile_most = S::reduce_max(most), before = states.m[row + r];
            tops[r] = tile_most > before ? tile_most : before;
        }
        for (int r = 0; r < count; ++r) {
            // A row that has seen nothing in this partial yet: every logit is -inf, and so is below 0.
            const Vec top = S::broadcast(tops[r] == kMinusInfinity ? 0.0f : tops[r]);
            Vec sum = S::zero();
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i) {
                float* at = s + r * kTileTokens + i * S::kWidth;
                const Vec p = exp2_nonpositive<S>(S::sub(S::load(at), top));
                S::store(at, p);
                sum = S::add(sum, p);
            }
            sums[r] = S::reduce_add(sum);
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

    bool last_of_split() const {
        const std::int32_t before = job_.items_done[item_.split].fetch_add(1, std::memory_order_acq_rel);
        return before + 1 == job_.splits[item_.split].num_items;
    }

    void merge_split() const {
        const AttentionSplit& split = job_.splits[item_.split];
        begin_merge();
        for (int head = 0; head < heads_; ++head) {
            for (int i = 0; i < split.num_partials; ++i) merge_states<S>(all_states(head), partial_states(split.partial_start + i, head));
        }
    }

    void write_out() {
        auto* out = reinterpret_cast<Element*>(job_.out->data);
        for (int head = 0; head < heads_; ++head) {
            const RowStates all = all_states(head);
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
    const StateBlock all_;
    const StateBlock own_;
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
    float logit_scale_;
    float logit_cap_;
};

}  // namespace
}  // namespace quire
