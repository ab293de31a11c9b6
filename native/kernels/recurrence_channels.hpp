// RG-LRU and the short convolution: channels are independent.
// A part of recurrence_variant.cpp, which says before what S is.
#pragma once

#include "kernels/recurrence_lanes.hpp"

namespace quire {
namespace {

template <class T>
void lru_block(const LruJob& job, Int sequence, Int first, Int count) {
    const RecurrenceStep& step = *job.step;
    const Int start = step.starts[static_cast<std::size_t>(sequence)], stop = step.starts[static_cast<std::size_t>(sequence) + 1];
    const auto slot = [&](Int which) { return job.state.data + which * job.state.slot_stride + first; };
    float* const state = slot(step.slots[static_cast<std::size_t>(sequence)]);
    alignas(64) float h[kChannelBlock];
    const Int padded = round_up(count, kWidth);
    copy_in(state, 0, 1, count, h, padded);
    Checkpoints checkpoints(step, start);
    for (Int row = start; row < stop; ++row) {
        const T* const x = row_of<T>(job.x, row) + first;
        const float* const log_a = row_of<float>(job.log_a, row) + first;
        T* const out = static_cast<T*>(job.out) + row * job.num_channels + first;
        const bool is_first = job.first != nullptr && job.first[row] != 0;
        for (Int i = 0; i < count; i += kWidth) {
            Vec value = load_up_to(x + i, count - i);
            if (!is_first) {
                const Vec log = load_up_to(log_a + i, count - i), a = decay_of(log);
                value = S::fma(a, S::load(h + i), S::mul(value, square_root(one_minus_square(log, a))));
            }
            S::store(h + i, value);
            store_up_to(out + i, value, count - i);
        }
        while (checkpoints.is_at(row)) copy_out(h, 0, 1, count, slot(checkpoints.take()), 0);
    }
    copy_out(h, 0, 1, count, state, 0);
}

template <class T>
void lru(const LruJob& job, Int sequence, Int first, Int last) {
    for (; first < last; first += kChannelBlock) lru_block<T>(job, sequence, first, std::min(kChannelBlock, last - first));
}

template <class T>
void convolve(const ConvolutionJob& job, Int first_sequence, Int last_sequence, Int first, Int last) {
    constexpr Int kRing = kMostConvolutionWidth;  // inputs kept, that of position p at p % kRing
    const RecurrenceStep& step = *job.step;
    const Int count = last - first, before = job.width - 1;
    alignas(64) float weights[kRing][kChannelBlock], bias[kChannelBlock], inputs[kRing][kChannelBlock];
    for (Int j = 0; j < job.width; ++j) {
        for (Int i = 0; i < kChannelBlock; ++i) weights[j][i] = i < count ? job.weight[(first + i) * job.width + j] : 0.0f;
    }
    for (Int i = 0; i < kChannelBlock; ++i) bias[i] = i < count && job.bias != nullptr ? job.bias[first + i] : 0.0f;
    for (Int sequence = first_sequence; sequence < last_sequence; ++sequence) {
        const Int start = step.starts[static_cast<std::size_t>(sequence)], stop = step.starts[static_cast<std::size_t>(sequence) + 1];
        const auto slot = [&](Int which) { return job.state.data + which * job.state.slot_stride + first; };
        const auto save = [&](float* to, Int position) {  // the inputs before `position`
            for (Int j = 0; j < before; ++j) copy_out(inputs[(position + j) % kRing], 0, 1, count, to + j * job.num_channels, 0);
        };
        float* const state = slot(step.slots[static_cast<std::size_t>(sequence)]);
        for (Int j = 0; j < before; ++j) copy_in(state + j * job.num_channels, 0, 1, count, inputs[j], round_up(count, kWidth));
        Checkpoints checkpoints(step, start);
        for (Int row = start; row < stop; ++row) {
            const Int position = row - start;  // of the oldest input of the window
            const T* const x = row_of<T>(job.x, row) + first;
            T* const out = static_cast<T*>(job.out) + row * job.num_channels + first;
            float* const newest = inputs[(position + before) % kRing];
            for (Int i = 0; i < count; i += kWidth) {
                const Vec input = load_up_to(x + i, count - i);
                S::store(newest + i, input);
                Vec y = S::load(bias + i);
                for (Int j = 0; j < before; ++j) y = S::fma(S::load(weights[j] + i), S::load(inputs[(position + j) % kRing] + i), y);
                y = S::fma(S::load(weights[before] + i), input, y);
                if (job.silu) {
                    const Vec power = exponential(S::sub(S::zero(), y));
                    y = S::div(y, S::add(S::broadcast(1.0f), power));
                }
                store_up_to(out + i, y, count - i);
            }
            while (checkpoints.is_at(row)) save(slot(checkpoints.take()), position + 1);
        }
        save(state, stop - start);
    }
}

}  // namespace
}  // namespace quire
