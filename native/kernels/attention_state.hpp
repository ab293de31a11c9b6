// The running softmax of query rows: where it lies, and how partials are merged (R4).
#pragma once

#include <cstring>

#include "kernels/attention_kernel.hpp"
#include "kernels/simd.hpp"

namespace quire {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();

// Rows of one head: o [num_rows][stride], m and l [num_rows].
struct RowStates {
    float* o;
    float* m;
    float* l;
    std::int64_t stride;
    std::int64_t num_rows;

    void clear() const {
        for (std::int64_t r = 0; r < num_rows; ++r) m[r] = kMinusInfinity, l[r] = 0.0f;
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
    StateBlock(float* base, std::int64_t rows, std::int64_t states, std::int64_t width)
        : base_(base), rows_(rows), states_(states), stride_(value_stride(width)), floats_(state_floats(rows, width)) {}
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

// The next partial in order into (M, L, O).
template <class S>
void merge_states(const RowStates& all, const RowStates& part) {
    for (std::int64_t r = 0; r < all.num_rows; ++r) {
        if (part.m[r] == kMinusInfinity) continue;
        const float top = part.m[r] > all.m[r] ? part.m[r] : all.m[r];
        const float a = softmax_weight<S>(all.m[r], top), b = softmax_weight<S>(part.m[r], top);
        float* o = all.o + r * all.stride;
        const float* from = part.o + r * part.stride;
        const auto av = S::broadcast(a), bv = S::broadcast(b);
        for (std::int64_t d = 0; d < all.stride; d += S::kWidth) {
            S::store(o + d, S::fma(bv, S::load(from + d), S::mul(av, S::load(o + d))));
        }
        all.l[r] = S::first(S::fma(S::broadcast(b), S::broadcast(part.l[r]), S::broadcast(a * all.l[r])));
        all.m[r] = top;
    }
}

}  // namespace
}  // namespace quire
