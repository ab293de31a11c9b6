// Common parts of the recurrences in one width of vectors: exponentials, rows that end within a vector, checkpoints,
// memory of a thread. A part of recurrence_variant.cpp, which says before what S is.
#pragma once

#include <algorithm>

#include "kernels/recurrence.hpp"
#include "kernels/rounding.hpp"
#include "kernels/scratch.hpp"
#include "kernels/simd.hpp"

namespace quire {
namespace {

constexpr Int kWidth = S::kWidth;
constexpr Int kLine = 16;  // floats of a cache line

// e^x within 2 units in the last place, of x below 88.
[[gnu::always_inline]] inline Vec decay_of(Vec x) {
    x = S::max(S::broadcast(-104.0f), x);  // the second where one is NaN
    Vec rest;
    const Vec whole = S::split(S::mul(x, S::broadcast(1.442695041f)), rest);
    // x - whole ln 2 in two steps, the first exact.
    rest = S::fma(whole, S::broadcast(-0.693359375f), x);
    rest = S::fma(whole, S::broadcast(2.12194440e-4f), rest);
    // 1 + rest + rest^2 by a minimax polynomial of degree 4 on [-ln 2 / 2, ln 2 / 2].
    Vec sum = S::broadcast(1.381445560e-03f);
    sum = S::fma(sum, rest, S::broadcast(8.368785493e-03f));
    sum = S::fma(sum, rest, S::broadcast(4.166839644e-02f));
    sum = S::fma(sum, rest, S::broadcast(1.666651964e-01f));
    sum = S::fma(sum, rest, S::broadcast(4.999999404e-01f));
    sum = S::fma(S::mul(sum, rest), rest, rest);
    // 0 below the smallest normal number where the instruction set has no smaller ones.
    return S::scale_by_exp2(S::add(sum, S::broadcast(1.0f)), whole);
}

// The same of any x: infinity from 89 on.
Vec exponential(Vec x) { return decay_of(S::sub(S::zero(), S::max(S::broadcast(-89.0f), S::sub(S::zero(), x)))); }

float decay_of(float x) { return S::first(decay_of(S::broadcast(x))); }

Vec square_root(Vec x) {
    alignas(64) float lanes[kWidth];
    S::store(lanes, x);
    for (Int i = 0; i < kWidth; ++i) lanes[i] = __builtin_sqrtf(lanes[i]);
    return S::load(lanes);
}

// 1 - a^2 of a = e^x, x <= 0: by a series where it is small, and a difference would have few digits.
Vec one_minus_square(Vec x, Vec a) {
    const float border = -0.5f;
    const Vec twice = S::add(x, x), opposite = S::sub(S::zero(), twice);
    Vec sum = S::broadcast(1.0f / 40320);
    for (const float coefficient : {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f}) {
        sum = S::fma(sum, twice, S::broadcast(coefficient));
    }
    const Vec near = S::mul(sum, opposite), far = S::sub(S::broadcast(1.0f), S::mul(a, a));
    return S::add(S::keep_from(twice, near, S::broadcast(border)), S::keep_from(opposite, far, S::broadcast(0.50000006f)));
}

// The first n lanes, n of any size.
template <class T>
Vec load_up_to(const T* from, Int n) {
    if (n >= kWidth) return S::load(from);
    return n > 0 ? S::load_part(from, static_cast<int>(n)) : S::zero();
}

template <class T>
void store_up_to(T* to, Vec v, Int n) {
    if (n >= kWidth) {
        S::store(to, v);
    } else if (n > 0) {
        S::store_part(to, v, static_cast<int>(n));
    }
}

// The first n lanes to elements `at` and on of a result, of float32 or of T.
template <class T>
void store_result(void* out, bool is_wide, Int at, Vec v, Int n) {
    if (is_wide) {
        store_up_to(static_cast<float*>(out) + at, v, n);
    } else {
        store_up_to(static_cast<T*>(out) + at, v, n);
    }
}

// n elements in float32, and zeros up to a whole vector.
template <class T>
void widen(const T* from, Int n, float* to) {
    for (Int i = 0; i < n; i += kWidth) S::store(to + i, load_up_to(from + i, n - i));
}

// Rows of n elements, each with zeros up to a whole vector in `to`; and back.
void copy_in(const float* from, Int from_stride, Int num_rows, Int n, float* to, Int to_stride) {
    for (Int row = 0; row < num_rows; ++row) {
        for (Int i = 0; i < to_stride; i += kWidth) S::store(to + row * to_stride + i, load_up_to(from + row * from_stride + i, n - i));
    }
}

void copy_out(const float* from, Int from_stride, Int num_rows, Int n, float* to, Int to_stride) {
    for (Int row = 0; row < num_rows; ++row) {
        for (Int i = 0; i < n; i += kWidth) store_up_to(to + row * to_stride + i, S::load(from + row * from_stride + i), n - i);
    }
}

template <class T>
const T* row_of(const RecurrenceInput& input, Int row, Int head = 0) {
    return static_cast<const T*>(input.data) + row * input.row_stride + head * input.head_stride;
}

// The checkpoints of a sequence, in the order of its rows.
class Checkpoints {
  public:
    Checkpoints(const RecurrenceStep& step, Int first_row)
        : step_(step),
          next_(std::lower_bound(step.checkpoint_rows.begin(), step.checkpoint_rows.end(), first_row) - step.checkpoint_rows.begin()) {}
    bool is_at(Int row) const { return next_ < static_cast<Int>(step_.checkpoint_rows.size()) && step_.checkpoint_rows[static_cast<std::size_t>(next_)] == row; }
    // The slot of one at the row, which is then done.
    Int take() { return step_.checkpoint_slots[static_cast<std::size_t>(next_++)]; }

  private:
    const RecurrenceStep& step_;
    Int next_;
};

float* scratch(Int num_floats) {
    thread_local GrownBuffer buffer;
    return reinterpret_cast<float*>(buffer.get(static_cast<std::size_t>(num_floats) * sizeof(float)));
}

}  // namespace
}  // namespace quire
