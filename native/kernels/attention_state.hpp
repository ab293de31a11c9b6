// The running softmax of an item's query rows: its memory, its continuation from another item, and the merging of
// partials (R4).
#pragma once

#include <cstring>

#include "kernels/attention_kernel.hpp"
#include "kernels/simd.hpp"

namespace quire {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kLowest = -3.402823466e+38f;  // what is finite

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

// Rows of one head: o [num_rows][stride], m and l [num_rows].
struct RowStates {
    float* o;
    float* m;
    float* l;
    std::int64_t stride;
    std::int64_t num_rows;

    // Rows [row, row + count) of these.
    RowStates part(std::int64_t row, std::int64_t count) const { return {o + row * stride, m + row, l + row, stride, count}; }

    // o stays what it was: for one who writes it before it is read.
    void clear_sums() const {
        for (std::int64_t r = 0; r < num_rows; ++r) m[r] = kMinusInfinity, l[r] = 0.0f;
    }
    void clear() const {
        clear_sums();
        std::memset(o, 0, static_cast<std::size_t>(num_rows * stride) * sizeof(float));
    }
    void copy(const RowStates& from) const {
        const auto bytes = static_cast<std::size_t>(num_rows) * sizeof(float);
        std::memcpy(o, from.o, bytes * static_cast<std::size_t>(stride));
        std::memcpy(m, from.m, bytes);
        std::memcpy(l, from.l, bytes);
    }
};

// States of several heads, and of several partials of each.
class StateBlock {
  public:
    StateBlock(float* base, std::int64_t rows, std::int64_t states, std::int64_t stride)
        : base_(base), rows_(rows), states_(states), stride_(stride), floats_(state_floats(rows, stride)) {}
    // Rows [row, row + num_rows) of a head.
    RowStates rows(std::int64_t head, std::int64_t state, std::int64_t row, std::int64_t num_rows) const {
        float* o = base_ + (head * states_ + state) * floats_;
        float* m = o + rows_ * stride_ + row;
        return {o + row * stride_, m, m + padded_to(rows_, 16), stride_, num_rows};
    }

  private:
    float* base_;
    std::int64_t rows_, states_, stride_, floats_;
};

template <class S>
float softmax_weight(float m, float top) {
    return m == kMinusInfinity ? 0.0f : S::first(exp2_nonpositive<S>(S::broadcast(m - top)));
}

// The next partial in order into (M, L, O). Of rows that have seen nothing yet o need not be written, in either.
template <class S>
void merge_states(const RowStates& all, const RowStates& part) {
    for (std::int64_t row = 0; row < all.num_rows; row += S::kWidth) {
        const int count = static_cast<int>(all.num_rows - row < S::kWidth ? all.num_rows - row : S::kWidth);
        float *m = all.m + row, *l = all.l + row;
        const auto before = S::load_part(m, count), with = S::load_part(part.m + row, count), top = S::max(before, with);
        const auto finite = S::max(top, S::broadcast(kLowest));  // nothing of either: 0 of both
        const auto all_weights = exp2_nonpositive<S>(S::sub(before, finite)), part_weights = exp2_nonpositive<S>(S::sub(with, finite));
        alignas(64) float a[S::kWidth], b[S::kWidth];
        S::store(a, all_weights);
        S::store(b, part_weights);
        S::store_part(l, S::fma(part_weights, S::load_part(part.l + row, count), S::mul(all_weights, S::load_part(l, count))), count);
        S::store_part(m, top, count);
        for (int r = 0; r < count; ++r) {
            if (b[r] == 0.0f) continue;
            float* o = all.o + (row + r) * all.stride;
            const float* from = part.o + (row + r) * part.stride;
            if (a[r] == 0.0f) {
                std::memcpy(o, from, static_cast<std::size_t>(all.stride) * sizeof(float));
                continue;
            }
            const auto ar = S::broadcast(a[r]), br = S::broadcast(b[r]);
            for (std::int64_t d = 0; d < all.stride; d += S::kWidth) {
                S::store(o + d, S::fma(br, S::load(from + d), S::mul(ar, S::load(o + d))));
            }
        }
    }
}

// States of the rows of an item: of the partial under way, and of all merged so far.
template <class S>
class ItemStates {
  public:
    ItemStates(const AttentionJob& job, const AttentionItem& item, Scratch& scratch)
        : job_(job),
          item_(item),
          rows_(item.row_stop - item.row_start),
          heads_(item.head_stop - item.head_start),
          stride_(job.state_stride),
          merges_(item.run >= 0 ? job.runs[item.run].merged : item.split < 0),
          all_(scratch.take<float>(heads_ * state_floats(rows_, stride_)), rows_, 1, stride_),
          own_(scratch.take<float>(heads_ * state_floats(rows_, stride_)), rows_, 1, stride_) {}

    // (M, L, O) of a head.
    RowStates all(int head) const {
        return item_.run >= 0 ? of_run(job_.runs[item_.run], 0, head) : all_.rows(head, 0, 0, rows_);
    }

    // (m, l, o) of a partial: the thread's own, or where others will look for it.
    RowStates partial(std::int64_t index, int head) const {
        if (item_.run >= 0) {
            const AttentionRun& run = job_.runs[item_.run];
            if (!run.merged) return of_run(run, index - run.token_start / kPartialTokens, head);
            if (run.num_states > 1) return of_run(run, 1, head);
        } else if (item_.split >= 0) {
            const AttentionSplit& split = job_.splits[item_.split];
            return StateBlock(job_.states + split.offset, rows_, split.num_partials, stride_).rows(head, index - split.partial_start, 0, rows_);
        }
        return own_.rows(head, 0, 0, rows_);
    }

    // Whether nobody else looks for the states of a partial: they may lie anywhere until end_partial merges them.
    bool owns_partials() const { return merges_ && item_.run < 0; }

    void begin() const {
        if (merges_) merge_runs(item_.before);
    }

    // A partial begins at nothing, or where the run before this item has left it. `values`: o is cleared too where it begins at
    // nothing. Returns whether it does.
    bool begin_partial(std::int64_t partial, bool values = true) const {
        const bool begun = item_.before >= 0 && item_.token_start % kPartialTokens != 0 && item_.token_start / kPartialTokens == partial &&
                           job_.runs[item_.before].token_stop == item_.token_start;
        if (begun) attention_wait(job_.items_left[item_.before]);
        for (int head = 0; head < heads_; ++head) {
            const RowStates states = this->partial(partial, head);
            if (begun) {
                states.copy(of_run(job_.runs[item_.before], job_.runs[item_.before].num_states - 1, head));
            } else if (values) {
                states.clear();
            } else {
                states.clear_sums();
            }
        }
        return !begun;
    }

    // The item is done with a partial. One in which a run ends is not over: others go on with it.
    void end_partial(std::int64_t partial, bool over) const {
        for (int head = 0; head < heads_; ++head) end_partial(this->partial(partial, head), over, head, 0);
    }
    // The same for some rows of one head, from `row` on, which have come to `part`.
    void end_partial(const RowStates& part, bool over, int head, int row) const {
        if (!merges_ || (item_.run >= 0 && !over)) return;
        merge_states<S>(all(head).part(row, part.num_rows), part);
    }

    // The item is done. True if `all` now is what its rows come to.
    bool end() const {
        if (item_.run >= 0) {
            job_.items_left[item_.run].fetch_sub(1, std::memory_order_release);
            return false;
        }
        if (item_.split < 0) return true;
        const AttentionSplit& split = job_.splits[item_.split];
        if (job_.items_done[item_.split].fetch_add(1, std::memory_order_acq_rel) + 1 < split.num_items) return false;
        merge_runs(item_.before);
        for (int head = 0; head < heads_; ++head) {
            for (int i = 0; i < split.num_partials; ++i) merge_states<S>(all(head), partial(split.partial_start + i, head));
        }
        return true;
    }

  private:
    // The item's rows among a run's.
    RowStates of_run(const AttentionRun& run, std::int64_t state, int head) const {
        return StateBlock(job_.states + run.offset, run.num_rows, run.num_states, stride_)
            .rows(item_.head_start + head, state, item_.shared_row - run.first_row, rows_);
    }

    // (M, L, O) of the partials that are over at the end of a run; of nothing for -1, with o not written yet.
    void merge_runs(std::int32_t index) const {
        if (index < 0) {
            for (int head = 0; head < heads_; ++head) all(head).clear_sums();
            return;
        }
        const AttentionRun& run = job_.runs[index];
        if (!run.merged) merge_runs(run.before);
        attention_wait(job_.items_left[index]);
        for (int head = 0; head < heads_; ++head) {
            if (run.merged) {
                all(head).copy(of_run(run, 0, head));
                continue;
            }
            const std::int64_t num_over = run.token_stop / kPartialTokens - run.token_start / kPartialTokens;
            for (std::int64_t state = 0; state < num_over; ++state) merge_states<S>(all(head), of_run(run, state, head));
        }
    }

    const AttentionJob& job_;
    const AttentionItem& item_;
    const int rows_;   // of one head
    const int heads_;
    const std::int64_t stride_;
    const bool merges_;
    const StateBlock all_;
    const StateBlock own_;
};

}  // namespace
}  // namespace quire
