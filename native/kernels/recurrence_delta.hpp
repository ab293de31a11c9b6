// Delta rule and linear attention: the columns of a state [k_dim, v_dim] are independent; a sum runs down one, in kChains chains.
// A part of recurrence_variant.cpp, which says before what S is.
#pragma once

#include "kernels/recurrence_lanes.hpp"

namespace quire {
namespace {

constexpr int kVecs = kDeltaColumns / kWidth;
constexpr int kChains = kVecs < 8 ? 8 / kVecs : 1;
constexpr Int kTokens = 16;  // whose q, k and decays are made ready at once

struct Columns {
    Vec v[kVecs];
};

template <class T>
Columns load_columns(const T* from, Int n) {
    Columns columns;
    for (int i = 0; i < kVecs; ++i) columns.v[i] = load_up_to(from + i * kWidth, n - i * kWidth);
    return columns;
}

template <class T>
void store_columns(const DeltaJob& job, Int at, const Columns& columns, Int n) {
    for (int i = 0; i < kVecs; ++i) store_result<T>(job.out, job.is_wide, at + i * kWidth, columns.v[i], n - i * kWidth);
}

// Sums down the columns of a block: row r is added to chain r % kChains.
struct Chains {
    Vec v[kChains][kVecs];

    void clear() {
#pragma GCC unroll 8
        for (int chain = 0; chain < kChains; ++chain) {
#pragma GCC unroll 8
            for (int i = 0; i < kVecs; ++i) v[chain][i] = S::zero();
        }
    }
    Columns total() {
        Columns total;
        for (int i = 0; i < kVecs; ++i) {
            for (int apart = 1; apart < kChains; apart *= 2) {
                for (int chain = 0; chain + apart < kChains; chain += 2 * apart) v[chain][i] = S::add(v[chain][i], v[chain + apart][i]);
            }
            total.v[i] = v[0][i];
        }
        return total;
    }
};

// Calls each(chain, row) for the rows [first, last); first is a multiple of kChains.
template <class Each>
[[gnu::always_inline]] inline void each_row(Int first, Int last, Each&& each) {
    Int row = first;
    for (; row + kChains <= last; row += kChains) {
#pragma GCC unroll 8
        for (int chain = 0; chain < kChains; ++chain) each(chain, row + chain);
    }
#pragma GCC unroll 8
    for (int chain = 0; chain < kChains; ++chain) {
        if (row + chain < last) each(chain, row + chain);
    }
}

// Of a token and head, k_dim each: q, k, the decays, and k times them.
struct Token {
    float *q, *k, *decay, *decayed_k;
};

Token token_at(float* memory, Int k_dim, Int index) {
    const Int padded = round_up(k_dim, 16);
    float* const at = memory + index * 4 * padded;
    return {at, at + padded, at + 2 * padded, at + 3 * padded};
}

// What is fetched beside each row of a state that lies in memory: the row that comes kRows later, into the first cache, and of the
// head behind into the second: of every row, or of every second one where two passes share them. Two lines a row; evenly, because
// more at once than the processor waits for would keep it from computing.
constexpr Int kRows = 16;
enum class Fetch { nothing, even, odd, every };

struct Ahead {
    Int stride = 0;
    Int head = 0;  // elements to the head behind; 0: none
};

template <Fetch kFetch>
[[gnu::always_inline]] inline void fetch(const float* values, Int row, const Ahead& ahead) {
    S::prefetch(values + kRows * ahead.stride);
    S::prefetch(values + kRows * ahead.stride + kLine);
    if (kFetch == Fetch::every || row % 2 == (kFetch == Fetch::odd)) {
        S::prefetch_l2(values + ahead.head);
        S::prefetch_l2(values + ahead.head + kLine);
    }
}

// Adds k times the decayed rows [first, last); with kCopies the rows are copied to `own` meanwhile, with kFetch others fetched.
template <bool kCopies, Fetch kFetch = Fetch::nothing>
[[gnu::always_inline]] inline void add_known(Chains& sums, const float* from, Int stride, Int first, Int last, const Token& token, float* own,
                                             const Ahead& ahead = {}) {
    Chains chains = sums;
    each_row(first, last, [&](int chain, Int row) __attribute__((always_inline)) {
        const Vec k = S::broadcast(token.decayed_k[row]);
        if constexpr (kFetch != Fetch::nothing) fetch<kFetch>(from + row * stride, row, ahead);
#pragma GCC unroll 8
        for (int i = 0; i < kVecs; ++i) {
            const Vec value = S::load(from + row * stride + i * kWidth);
            if constexpr (kCopies) S::store(own + row * kDeltaColumns + i * kWidth, value);
            chains.v[chain][i] = S::fma(k, value, chains.v[chain][i]);
        }
    });
    sums = chains;
}

// Rows [first, last), decayed and with k times `change` added, to `to`; adds q times them.
template <Fetch kFetch = Fetch::nothing>
[[gnu::always_inline]] inline void update(Chains& sums, const float* from, Int from_stride, float* to, Int to_stride, Int first, Int last,
                                          const Token& token, const Columns& change, const Ahead& ahead = {}) {
    Chains chains = sums;
    each_row(first, last, [&](int chain, Int row) __attribute__((always_inline)) {
        const Vec decay = S::broadcast(token.decay[row]), k = S::broadcast(token.k[row]), q = S::broadcast(token.q[row]);
        if constexpr (kFetch != Fetch::nothing) fetch<kFetch>(from + row * from_stride, row, ahead);
#pragma GCC unroll 8
        for (int i = 0; i < kVecs; ++i) {
            const Vec value = S::fma(k, change.v[i], S::mul(decay, S::load(from + row * from_stride + i * kWidth)));
            S::store(to + row * to_stride + i * kWidth, value);
            chains.v[chain][i] = S::fma(q, value, chains.v[chain][i]);
        }
    });
    sums = chains;
}

void multiply(float* values, Int n, float factor) {
    for (Int i = 0; i < n; i += kWidth) S::store(values + i, S::mul(S::load(values + i), S::broadcast(factor)));
}

float normalizing_factor(const float* values, Int n) {
    Vec sum = S::zero();
    for (Int i = 0; i < n; i += kWidth) {
        const Vec value = S::load(values + i);
        sum = S::fma(value, value, sum);
    }
    return 1.0f / __builtin_sqrtf(S::reduce_add(sum) + kDeltaNormEpsilon);
}

template <class T>
void load_token(const DeltaJob& job, Int row, Int head, const Token& token) {
    const Int k_head = head / (job.num_heads / job.num_k_heads), k_dim = job.k_dim;
    widen(row_of<T>(job.q, row, k_head), k_dim, token.q);
    widen(row_of<T>(job.k, row, k_head), k_dim, token.k);
    float q_factor = job.scale;
    if (job.normalize) {
        q_factor *= normalizing_factor(token.q, k_dim);
        multiply(token.k, k_dim, normalizing_factor(token.k, k_dim));
    }
    multiply(token.q, k_dim, q_factor);
    if (job.per_channel) {
        const float* const g = row_of<float>(job.g, row, head);
        for (Int i = 0; i < k_dim; i += kWidth) S::store(token.decay + i, decay_of(load_up_to(g + i, k_dim - i)));
    } else {
        const Vec decay = decay_of(S::broadcast(row_of<float>(job.g, job.corrects ? row : 0)[head]));
        for (Int i = 0; i < k_dim; i += kWidth) S::store(token.decay + i, decay);
    }
    for (Int i = 0; i < k_dim; i += kWidth) S::store(token.decayed_k + i, S::mul(S::load(token.k + i), S::load(token.decay + i)));
}

// beta (v - what is known of k), or v itself.
template <class T>
Columns change_of(const DeltaJob& job, Int row, Int head, Int first, Int count, Chains& known) {
    Columns change = load_columns(row_of<T>(job.v, row, head) + first, count);
    if (job.corrects) {
        const Columns before = known.total();
        const Vec beta = S::broadcast(row_of<float>(job.beta, row)[head]);
        for (int i = 0; i < kVecs; ++i) change.v[i] = S::mul(beta, S::sub(change.v[i], before.v[i]));
    }
    return change;
}

// Tokens [row, last_row) over one block of columns, which lies in `own` between a sequence's first and last token.
template <class T>
void delta_block(const DeltaJob& job, Int sequence, Int head, Int first, Int count, Int row, Int last_row, float* tokens, float* own) {
    const RecurrenceStep& step = *job.step;
    const Int start = step.starts[static_cast<std::size_t>(sequence)], stop = step.starts[static_cast<std::size_t>(sequence) + 1];
    const Int place = head * job.k_dim * job.v_dim + first, first_token = row;
    const auto slot = [&](Int which) { return job.state.data + which * job.state.slot_stride + place; };
    float* const state = slot(step.slots[static_cast<std::size_t>(sequence)]);
    const bool is_whole = count == kDeltaColumns;
    if (row == start && !is_whole) copy_in(state, job.v_dim, job.k_dim, count, own, kDeltaColumns);
    Checkpoints checkpoints(step, row);
    for (; row < last_row; ++row) {
        const Token token = token_at(tokens, job.k_dim, row - first_token);
        const bool is_in_state = is_whole && row == start;  // and not yet in `own`
        Chains sums;
        sums.clear();
        if (job.corrects && is_in_state) {
            add_known<true>(sums, state, job.v_dim, 0, job.k_dim, token, own);
        } else if (job.corrects) {
            add_known<false>(sums, own, kDeltaColumns, 0, job.k_dim, token, own);
        }
        const Columns change = change_of<T>(job, row, head, first, count, sums);
        const bool reads_state = is_in_state && !job.corrects;
        const bool writes_state = is_whole && row + 1 == stop && !checkpoints.is_at(row);
        sums.clear();
        update(sums, reads_state ? state : own, reads_state ? job.v_dim : kDeltaColumns, writes_state ? state : own,
               writes_state ? job.v_dim : kDeltaColumns, 0, job.k_dim, token, change);
        store_columns<T>(job, (row * job.num_heads + head) * job.v_dim + first, sums.total(), count);
        if (row + 1 == stop && !writes_state) copy_out(own, kDeltaColumns, job.k_dim, count, state, job.v_dim);
        while (checkpoints.is_at(row)) copy_out(own, kDeltaColumns, job.k_dim, count, slot(checkpoints.take()), job.v_dim);
    }
}

// One token over whole blocks of columns, where the state lies: some rows at a time and all of their columns, so that the
// memory is read in order. `follows`: the head behind comes next.
template <class T>
void delta_one(const DeltaJob& job, Int sequence, Int head, Int first, Int last, bool follows, const Token& token, float* memory) {
    const RecurrenceStep& step = *job.step;
    const Int row = step.starts[static_cast<std::size_t>(sequence)], k_dim = job.k_dim, width = last - first;
    const Int num_blocks = width / kDeltaColumns;
    float* const state = job.state.data + step.slots[static_cast<std::size_t>(sequence)] * job.state.slot_stride + head * k_dim * job.v_dim + first;
    auto* const sums = reinterpret_cast<Chains*>(memory);
    auto* const changes = reinterpret_cast<Columns*>(sums + num_blocks);
    const Ahead ahead{job.v_dim, follows ? k_dim * job.v_dim : 0};
    for (Int b = 0; b < num_blocks; ++b) sums[b].clear();
    for (Int group = 0; job.corrects && group < k_dim; group += kRows) {
        for (Int b = 0; b < num_blocks; ++b) {
            add_known<false, Fetch::even>(sums[b], state + b * kDeltaColumns, job.v_dim, group, std::min(group + kRows, k_dim), token, nullptr, ahead);
        }
    }
    for (Int b = 0; b < num_blocks; ++b) {
        changes[b] = change_of<T>(job, row, head, first + b * kDeltaColumns, kDeltaColumns, sums[b]);
        sums[b].clear();
    }
    for (Int group = 0; group < k_dim; group += kRows) {
        for (Int b = 0; b < num_blocks; ++b) {
            float* const at = state + b * kDeltaColumns;
            const Int end = std::min(group + kRows, k_dim);
            if (job.corrects) {
                update<Fetch::odd>(sums[b], at, job.v_dim, at, job.v_dim, group, end, token, changes[b], ahead);
            } else {
                update<Fetch::every>(sums[b], at, job.v_dim, at, job.v_dim, group, end, token, changes[b], ahead);
            }
        }
    }
    const Int out = (row * job.num_heads + head) * job.v_dim + first;
    for (Int b = 0; b < num_blocks; ++b) store_columns<T>(job, out + b * kDeltaColumns, sums[b].total(), kDeltaColumns);
}

template <class T>
void delta(const DeltaJob& job, Int sequence, Int first_head, Int last_head, Int first, Int last) {
    const RecurrenceStep& step = *job.step;
    const Int start = step.starts[static_cast<std::size_t>(sequence)], stop = step.starts[static_cast<std::size_t>(sequence) + 1];
    const Int num_blocks = divide_up(last - first, kDeltaColumns), block = job.k_dim * kDeltaColumns;
    const bool is_one = stop - start == 1 && (last - first) % kDeltaColumns == 0 && !Checkpoints(step, start).is_at(start);
    const bool is_one_batch = stop - start <= kTokens;  // then a block is done before the next begins
    const Int num_tokens = std::min(stop - start, kTokens), token_floats = num_tokens * 4 * round_up(job.k_dim, 16);
    const Int sum_floats = num_blocks * static_cast<Int>((sizeof(Chains) + sizeof(Columns)) / sizeof(float));
    float* const tokens = scratch(token_floats + (is_one ? sum_floats : block * (is_one_batch ? 1 : num_blocks)));
    float* const rest = tokens + token_floats;
    for (Int head = first_head; head < last_head; ++head) {
        for (Int row = start; row < stop; row += kTokens) {
            const Int last_row = std::min(row + kTokens, stop);
            for (Int i = row; i < last_row; ++i) load_token<T>(job, i, head, token_at(tokens, job.k_dim, i - row));
            if (is_one) {
                delta_one<T>(job, sequence, head, first, last, head + 1 < last_head, token_at(tokens, job.k_dim, 0), rest);
                continue;
            }
            for (Int b = 0; b < num_blocks; ++b) {
                const Int at = first + b * kDeltaColumns;
                delta_block<T>(job, sequence, head, at, std::min(kDeltaColumns, last - at), row, last_row, tokens, rest + (is_one_batch ? 0 : b * block));
            }
        }
    }
}

}  // namespace
}  // namespace quire
