// Mamba: the state's rows [head_dim, state_size] are independent of each other; a sum runs over the columns of one.
// A part of recurrence_variant.cpp, which says before what S is.
#pragma once

#include "kernels/recurrence_lanes.hpp"

namespace quire {
namespace {

// What is fetched into the first cache beside each line of a state that is passed over once, in order.
constexpr Int kLinesAhead = 64;

// A row of the state, decayed and with `added` times b in it; its sums with c. rates: of kPerChannel, which times `decays` are the
// logarithms to base 2 (an exponential of each element takes longer there than all else). kOnce: the row lies in memory, of whole
// vectors, and those behind it are passed over next.
template <bool kPerChannel, bool kOnce>
[[gnu::always_inline]] inline Vec advance_row(float* values, Int size, Int padded, const float* b, const float* c, const float* rates, Vec decays, Vec added) {
    Vec sum = S::zero();
    for (Int j = 0; j < padded; j += kWidth) {
        if (kOnce && j % kLine == 0) S::prefetch(values + j + kLinesAhead * kLine);
        Vec decay = decays;
        if constexpr (kPerChannel) decay = exp2_nonpositive<S>(S::mul(decays, kOnce ? S::load(rates + j) : load_up_to(rates + j, size - j)));
        const Vec value = S::fma(added, S::load(b + j), S::mul(decay, S::load(values + j)));
        S::store(values + j, value);
        sum = S::fma(value, S::load(c + j), sum);
    }
    return sum;
}

template <class T, bool kPerChannel, bool kOnce>
void scan_block(const ScanJob& job, Int sequence, Int head, Int first, Int count, float* memory) {
    const Int size = job.state_size, padded = round_up(size, kWidth);
    float* const b = memory;
    float* const c = b + padded;
    float* const x = c + padded;
    float* const factor = x + round_up(kScanRows, kWidth);  // dt x
    float* const dt = factor + round_up(kScanRows, kWidth);
    float* const own = dt + round_up(kScanRows, kWidth);  // the block, where its rows are no whole vectors
    const RecurrenceStep& step = *job.step;
    const Int start = step.starts[static_cast<std::size_t>(sequence)], stop = step.starts[static_cast<std::size_t>(sequence) + 1];
    const Int place = (head * job.head_dim + first) * size;
    const auto slot = [&](Int which) { return job.state.data + which * job.state.slot_stride + place; };
    float* const state = slot(step.slots[static_cast<std::size_t>(sequence)]);
    const bool in_place = kOnce || padded == size;
    float* const h = in_place ? state : own;
    if (!in_place) copy_in(state, size, count, size, own, padded);
    const Int group = head / (job.num_heads / job.num_groups);
    Checkpoints checkpoints(step, start);
    for (Int row = start; row < stop; ++row) {
        widen(row_of<T>(job.b, row, group), size, b);
        widen(row_of<T>(job.c, row, group), size, c);
        widen(row_of<T>(job.x, row, head) + first, count, x);
        float decay = 0.0f;
        if constexpr (kPerChannel) {
            widen(row_of<float>(job.dt, row) + first, count, dt);
            for (Int i = 0; i < count; i += kWidth) {
                S::store(factor + i, S::mul(S::load(dt + i), S::load(x + i)));
                S::store(dt + i, S::mul(S::load(dt + i), S::broadcast(1.442695041f)));
            }
        } else {
            const float step_size = row_of<float>(job.dt, row)[head];
            decay = decay_of(step_size * job.a[head]);
            for (Int i = 0; i < count; i += kWidth) S::store(factor + i, S::mul(S::broadcast(step_size), S::load(x + i)));
        }
        const Int place_out = (row * job.num_heads + head) * job.head_dim + first;
        alignas(64) float sums[kWidth * kWidth];
        for (Int i = 0; i < count; i += kWidth) {
            const Int lanes = std::min(kWidth, count - i);
            for (Int lane = 0; lane < lanes; ++lane) {
                const float* const rates = kPerChannel ? job.a + (first + i + lane) * size : nullptr;
                const Vec decays = S::broadcast(kPerChannel ? dt[i + lane] : decay), added = S::broadcast(factor[i + lane]);
                const Vec sum = advance_row<kPerChannel, kOnce>(h + (i + lane) * padded, size, padded, b, c, rates, decays, added);
                S::store(sums + lane * kWidth, sum);
            }
            for (Int lane = lanes; lane < kWidth; ++lane) S::store(sums + lane * kWidth, S::zero());
            Vec y = S::fold(sums);
            if (job.d != nullptr) {
                const Vec skip = kPerChannel ? load_up_to(job.d + first + i, lanes) : S::broadcast(job.d[head]);
                y = S::fma(skip, S::load(x + i), y);
            }
            store_result<T>(job.out, job.is_wide, place_out + i, y, lanes);
        }
        while (checkpoints.is_at(row)) copy_out(h, padded, count, size, slot(checkpoints.take()), size);
    }
    if (!in_place) copy_out(own, padded, count, size, state, size);
}

template <class T>
void scan(const ScanJob& job, Int sequence, Int first_head, Int last_head, Int first, Int last) {
    const Int padded = round_up(job.state_size, kWidth);
    float* const memory = scratch(padded * (2 + kScanRows) + 3 * round_up(kScanRows, kWidth));
    const std::int64_t* const start = job.step->starts.data() + sequence;
    const bool is_once = start[1] - start[0] == 1 && padded == job.state_size;
    const auto block = job.per_channel ? (is_once ? scan_block<T, true, true> : scan_block<T, true, false>)
                                       : (is_once ? scan_block<T, false, true> : scan_block<T, false, false>);
    for (Int head = first_head; head < last_head; ++head) {
        for (Int at = first; at < last; at += kScanRows) block(job, sequence, head, at, std::min(kScanRows, last - at), memory);
    }
}

}  // namespace
}  // namespace quire
