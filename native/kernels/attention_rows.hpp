// The query rows of an item, common to all product kernels: the tokens that each sees, the softmax of a tile's scores,
// the output at the end.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>

#include "kernels/attention_state.hpp"
#include "kernels/attention_tokens.hpp"

namespace quire {
namespace {

constexpr float kLog2E = 1.442695040888963f;

// Stands for the element of queries and answers where a kernel asks the view which it is.
struct AnyElement {
    unsigned char byte;
};

// The element `offset` elements behind data.
template <class Element, class Byte>
inline auto element_at(Byte* data, std::int64_t offset, quire::Element element) {
    using Pointer = std::conditional_t<std::is_const_v<Byte>, const Element*, Element*>;
    if constexpr (std::is_same_v<Element, AnyElement>) {
        return reinterpret_cast<Pointer>(data + offset * element_bytes(element));
    } else {
        return reinterpret_cast<Pointer>(data) + offset;
    }
}

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

// kHeadroom: when a row's largest logit reaches its m, m becomes so much more, so that o is seldom scaled again (after
// FlashAttention-4, which lets p grow instead); p is smaller by that power of two, which rounding does not see.
template <class S, class Element, int kTileTokens, int kHeadroom>
class ItemRows {
    using Vec = typename S::Vec;
    static constexpr int kVectors = kTileTokens / S::kWidth;

  public:
    ItemRows(const AttentionJob& job, const AttentionItem& item)
        : job_(job),
          item_(item),
          options_(*job.options),
          group_(job.num_q_heads / static_cast<int>(job.view->num_kv_heads)),
          count_(item.row_stop - item.row_start) {
        logit_scale_ = options_.softcap > 0.0f ? options_.scale / options_.softcap : options_.scale * kLog2E;
        logit_cap_ = options_.softcap * kLog2E;
        scaled_first_ = options_.softcap > 0.0f || !(options_.scale > 0.0f) || options_.slopes != nullptr;
        rest_of_scale_ = scaled_first_ ? 1.0f : logit_scale_;
        find_tokens();
    }

    // Of one head.
    int count() const { return count_; }

    // The head of the item whose scores are softened next.
    void turn_to(int head) { head_ = head; }

    // The tokens that any row sees, of those that are the item's.
    std::int64_t begin() const { return larger(seen_[0].start, item_.token_start); }
    std::int64_t end() const { return smaller(seen_[count_ - 1].stop, item_.token_stop); }

    // Positions that some of rows [row, row + count) see.
    struct Seen {
        std::int64_t start, stop;
    };
    Seen seen(int row, int count) const { return {seen_[row].start, seen_[row + count - 1].stop}; }

    const Element* query(int head, int row) const {
        const unsigned char* first = job_.query->data;
        return element_at<Element>(first, tokens_[row] * job_.query->token_stride + query_head(head, row) * job_.query->head_stride, job_.view->element);
    }

    // Scores of a tile -> p, by the online softmax; what a row does not see gets p = 0. Leaves the factors for o so far.
    // states, here and below: of rows [row, row + count) only. keep(r, vector, first, second) takes two vectors of p of row r of `count`. Three short loops over the rows, because a
    // row's steps wait for each other; between() is called at each of the first two's steps.
    template <class Keep, class Between>
    void soften_few(int row, int count, std::int64_t base, const RowStates& states, float* s, Keep&& keep, Between&& between) {
        float tops[kItemRowsTogether], sums[kItemRowsTogether];
        for (int r = 0; r < count; ++r) {
            between();
            // Usually no lane reaches m, and then no instruction waits for the largest lane.
            const Vec most = row_most(row + r, base, s + r * kTileTokens);
            const bool raised = S::any_from(S::mul(most, S::broadcast(rest_of_scale_)), S::broadcast(states.m[r]));
            tops[r] = raised ? S::reduce_max(most) * rest_of_scale_ + kHeadroom : states.m[r];
        }
        for (int r = 0; r < count; ++r) {
            between();
            sums[r] = S::reduce_add(row_weights(r, tops[r], s + r * kTileTokens, keep));
        }
        for (int r = 0; r < count; ++r) {
            float factor = 1.0f;
            if (tops[r] > states.m[r]) {
                factor = S::first(exp2_nonpositive<S>(S::broadcast(states.m[r] - tops[r])));
                states.m[r] = tops[r];
            }
            states.l[r] = states.l[r] * factor + sums[r];
            factors_[row + r] = factor;
        }
    }

    bool see_all(int row, int count, std::int64_t begin, std::int64_t end) const {
        return seen_[row + count - 1].start <= begin && seen_[row].stop >= end;
    }

    // p of kTiles tiles of one vector of scores each, of a row that sees all of them, where only the first one's logits may reach its m: mostly
    // none does, and there is nothing to wait for. factor: for o (and l) before the first tile. False, and nothing done, otherwise.
    template <int kTiles>
    __attribute__((always_inline)) bool soften_steadily(const Vec (&s)[kTiles], float& m, float& factor, Vec (&p)[kTiles]) const {
        if (scaled_first_) return false;
        const Vec scale = S::broadcast(rest_of_scale_);
        float top = m;
        if (S::any_from(S::mul(s[0], scale), S::broadcast(m))) top = S::reduce_max(s[0]) * rest_of_scale_ + kHeadroom;
        if constexpr (kTiles > 1) {
            Vec most = s[1];
#pragma GCC unroll 4
            for (int i = 2; i < kTiles; ++i) most = S::max(most, s[i]);
            if (S::any_from(S::mul(most, scale), S::broadcast(top))) return false;
        }
        factor = 1.0f;
        if (top != m) factor = S::first(exp2_nonpositive<S>(S::broadcast(m - top)));
        m = top;
        const Vec below = S::broadcast(-top);
#pragma GCC unroll 4
        for (int i = 0; i < kTiles; ++i) p[i] = exp2_nonpositive<S>(S::fma(s[i], scale, below));
        return true;
    }

    // p in place of s, of tiles of one vector each from position `base` on, whatever the row sees of them. factors[i]: for o (and l) before tile i.
    __attribute__((noinline)) void soften_tiles(int row, std::int64_t base, int num_tiles, float* s, float& m, float* factors) {
        static_assert(kVectors == 1);
        for (int i = 0; i < num_tiles; ++i, base += kTileTokens, s += kTileTokens) {
            const Vec most = row_most(row, base, s);
            factors[i] = 1.0f;
            if (S::any_from(S::mul(most, S::broadcast(rest_of_scale_)), S::broadcast(m))) {
                const float top = S::reduce_max(most) * rest_of_scale_ + kHeadroom;
                if (top > m) {
                    factors[i] = S::first(exp2_nonpositive<S>(S::broadcast(m - top)));
                    m = top;
                }
            }
            row_weights(0, m, s, nullptr);
        }
    }

    // Rows' o, and the sums by lanes behind it, times a factor that is not 1.
    static void rescale(float* o, std::int64_t stride, float factor) {
        if (factor == 1.0f) return;
        const Vec factors = S::broadcast(factor);
        for (std::int64_t d = 0; d < stride; d += S::kWidth) S::store(o + d, S::mul(S::load(o + d), factors));
    }

    // The same for up to kWidth rows at once, a lane for each: the same operations, so the same bits. A row that has seen
    // nothing yet (-inf less a number) gets 0 for a factor of its zeros, where soften_few leaves them. between(r) is called
    // before row r's weights, and with -1 before all.
    template <class Keep, class Between>
    void soften_many(int row, int count, std::int64_t base, const RowStates& states, float* s, Keep&& keep, Between&& between) {
        constexpr int kWidth = S::kWidth;
        alignas(64) float lanes[kWidth * kWidth], tops[kWidth];
        for (int r = count; r < kWidth; ++r) S::store(lanes + r * kWidth, S::zero());
        between(-1);
        const bool as_they_are = !scaled_first_ && seen_[row + count - 1].start <= base && seen_[row].stop >= base + kTileTokens;
        if (as_they_are) {
            for (int r = 0; r < count; ++r) S::store(lanes + r * kWidth, most_of(s + r * kTileTokens));
        } else {
            for (int r = 0; r < count; ++r) S::store(lanes + r * kWidth, row_most(row + r, base, s + r * kTileTokens));
        }
        // Rows beyond `count` may be another item's.
        const Vec most = S::mul(S::fold_max(lanes), S::broadcast(rest_of_scale_));
        const Vec before = S::load_part(states.m, count), raised = S::keep_from(most, S::broadcast(kHeadroom), before);
        const Vec top = S::max(kHeadroom == 0 ? most : S::add(most, raised), before);
        S::store(tops, top);
        for (int r = 0; r < count; ++r) {
            between(r);
            S::store(lanes + r * kWidth, row_weights(r, tops[r], s + r * kTileTokens, keep));
        }
        const Vec factor = exp2_nonpositive<S>(S::sub(before, S::max(top, S::broadcast(kLowest))));
        S::store_part(factors_ + row, factor, count);
        S::store_part(states.m, top, count);
        S::store_part(states.l, S::add(S::mul(S::load_part(states.l, count), factor), S::fold(lanes)), count);
    }

    // o of rows [row, row + count) times the factors that the last softmax left.
    void rescale(int row, int count, const RowStates& states) const {
        for (int r = 0; r < count; ++r) rescale(states.o + r * states.stride, states.stride, factors_[row + r]);
    }

    // Writes the output of the rows of every head, rounded by the products.
    template <class Products>
    void write_out(const ItemStates<S>& states, const Products& products) const {
        for (int head = 0; head < item_.head_stop - item_.head_start; ++head) write_head(head, states.all(head), products);
    }
  private:
    static constexpr int kItemRowsTogether = 16;  // of a softmax, at most

    // Query tokens of the rows, and which positions each row sees.
    void find_tokens() {
        const std::int32_t* start = job_.batch->query_start + item_.sequence;
        const std::int64_t first_position = job_.batch->context_lengths[item_.sequence] - (start[1] - start[0]);
        for (int row = 0; row < count_; ++row) {
            if (item_.run >= 0) {
                tokens_[row] = job_.shared_tokens[(item_.shared_row + row) / group_];
                seen_[row] = {item_.token_start, item_.token_stop};  // every member's rows come after the run
            } else {
                const std::int64_t token = (item_.row_start + row) / group_, at = first_position + token;
                tokens_[row] = start[0] + token;
                seen_[row] = {first_visible(options_, at), at + 1};
            }
            if (options_.slopes != nullptr) positions_[row] = position_of(tokens_[row]);
        }
    }

    // Of the query of a row of the batch.
    std::int64_t position_of(std::int64_t token) const {
        const std::int32_t* starts = job_.batch->query_start;
        const std::int64_t sequence = std::upper_bound(starts, starts + job_.batch->num_sequences, static_cast<std::int32_t>(token)) - starts - 1;
        return job_.batch->context_lengths[sequence] - (starts[sequence + 1] - token);
    }

    std::int64_t query_head(int head, int row) const { return (item_.head_start + head) * group_ + (item_.row_start + row) % group_; }

    template <class Products>
    void write_head(int head, const RowStates& all, const Products& products) const {
        for (int row = 0; row < count_; ++row) {
            float l = all.l[row], factor = 1.0f;
            if (options_.sinks != nullptr) {
                const float sink = options_.sinks[query_head(head, row)] * kLog2E, m = all.m[row], top = sink > m ? sink : m;
                factor = softmax_weight<S>(m, top);
                l = l * factor + softmax_weight<S>(sink, top);
            }
            const std::int64_t offset = tokens_[row] * job_.out->token_stride + query_head(head, row) * job_.out->head_stride;
            products.finish(all.o + row * all.stride, factor / l, element_at<Element>(job_.out->data, offset, job_.view->element));
        }
    }

    // row_most, where every row sees the whole tile and the scale waits.
    static Vec most_of(const float* s) {
        Vec most = S::broadcast(kMinusInfinity);
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) most = S::max(S::load(s + i * S::kWidth), most);
        return most;
    }

    // Of a row's scores s: those it does not see become -inf; where the scale cannot wait (a soft cap, slopes, or none above zero),
    // all become base-2 logits. Returns the largest of each lane.
    Vec row_most(int row, std::int64_t base, float* s) {
        const std::int64_t start = seen_[row].start - base, stop = seen_[row].stop - base;
        const bool whole = start <= 0 && stop >= kTileTokens;
        const int low = static_cast<int>(larger(start, 0)), high = static_cast<int>(larger(smaller(stop, kTileTokens), 0));
        Vec most = S::broadcast(kMinusInfinity), slope = S::zero(), distance = S::zero();
        if (options_.slopes != nullptr) {
            slope = S::broadcast(options_.slopes[query_head(head_, row)] * kLog2E);
            distance = S::broadcast(static_cast<float>(base - positions_[row]));
        }
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) {
            Vec x = S::load(s + i * S::kWidth);
            if (!whole || scaled_first_) {
                if (scaled_first_) x = S::mul(x, S::broadcast(logit_scale_));
                if (options_.softcap > 0.0f) x = S::mul(tanh<S>(x), S::broadcast(logit_cap_));
                if (options_.slopes != nullptr) x = S::fma(S::add(S::load(kOffsets.data() + i * S::kWidth), distance), slope, x);
                if (!whole) x = S::within(x, low - i * S::kWidth, high - i * S::kWidth);
                S::store(s + i * S::kWidth, x);
            }
            most = S::max(x, most);
        }
        return most;
    }

    // p of a row, below its largest logit `row_top` (-inf: it has seen nothing): kept, or in place of s where `keep` is none.
    // Returns the sum of each lane.
    template <class Keep>
    Vec row_weights(int r, float row_top, float* s, Keep&& keep) const {
        const Vec factor = S::broadcast(rest_of_scale_), below = S::broadcast(row_top == kMinusInfinity ? 0.0f : -row_top);
        const auto weight = [&](int i) { return exp2_nonpositive<S>(S::fma(S::load(s + i * S::kWidth), factor, below)); };
        Vec sum = S::zero();
        if constexpr (!std::is_null_pointer_v<std::remove_cvref_t<Keep>>) {
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; i += 2) {
                const Vec first = weight(i), second = weight(i + 1);
                keep(r, i, first, second);
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

    // 0, 1, 2, ... of a tile's tokens.
    alignas(64) static constexpr auto kOffsets = [] {
        std::array<float, kTileTokens> offsets{};
        for (int i = 0; i < kTileTokens; ++i) offsets[static_cast<std::size_t>(i)] = static_cast<float>(i);
        return offsets;
    }();

    const AttentionJob& job_;
    const AttentionItem& item_;
    const AttentionOptions& options_;
    const int group_;
    const int count_;
    float factors_[kItemRows];
    std::int64_t tokens_[kItemRows];  // of the query
    Seen seen_[kItemRows];            // positions that each row sees
    std::int64_t positions_[kItemRows];  // of the query; where there are slopes
    int head_ = 0;
    float logit_scale_;
    float logit_cap_;
    bool scaled_first_;    // the scores are scaled before the largest is looked for
    float rest_of_scale_;  // what makes logits of them after that
};

}  // namespace
}  // namespace quire
