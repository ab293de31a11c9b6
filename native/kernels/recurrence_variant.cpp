// The recurrences for one width of vectors. Compiled once per variant, with its flags and -DQUIRE_VARIANT_<name>.
#include <algorithm>

#include "kernels/recurrence.hpp"
#include "kernels/rounding.hpp"
#include "kernels/scratch.hpp"

#if defined(QUIRE_VARIANT_portable)
#include "kernels/simd_portable.hpp"
#define QUIRE_RECURRENCE recurrence_kernels_portable
#define QUIRE_SIMD Portable
#elif defined(QUIRE_VARIANT_avx2)
#include "kernels/simd_avx2.hpp"
#define QUIRE_RECURRENCE recurrence_kernels_avx2
#define QUIRE_SIMD Avx2
#elif defined(QUIRE_VARIANT_avx512)
#include "kernels/simd_avx512.hpp"
#define QUIRE_RECURRENCE recurrence_kernels_avx512
#define QUIRE_SIMD Avx512
#elif defined(QUIRE_VARIANT_emulated_avx512)
#include "kernels/simd_emulated.hpp"
#define QUIRE_RECURRENCE recurrence_kernels_emulated_avx512
#define QUIRE_SIMD Emulated512
#else
#error "recurrence.cmake names the variant"
#endif

namespace quire {
namespace {

using S = QUIRE_SIMD;
using Vec = S::Vec;
using Int = std::int64_t;

constexpr Int kWidth = S::kWidth;

// e^x within 2 units in the last place; 0 below the smallest normal number where the instruction set has no smaller ones,
// infinity from 89 on.
Vec exponential(Vec x) {
    x = S::max(S::broadcast(-104.0f), x);  // the second where one is NaN
    x = S::sub(S::zero(), S::max(S::broadcast(-89.0f), S::sub(S::zero(), x)));
    Vec rest;
    const Vec whole = S::split(S::mul(x, S::broadcast(1.442695041f)), rest);
    // x - whole ln 2 in two steps, the first exact.
    rest = S::fma(whole, S::broadcast(-0.693359375f), x);
    rest = S::fma(whole, S::broadcast(2.12194440e-4f), rest);
    Vec sum = S::broadcast(1.9875691500e-4f);
    sum = S::fma(sum, rest, S::broadcast(1.3981999507e-3f));
    sum = S::fma(sum, rest, S::broadcast(8.3334519073e-3f));
    sum = S::fma(sum, rest, S::broadcast(4.1665795894e-2f));
    sum = S::fma(sum, rest, S::broadcast(1.6666665459e-1f));
    sum = S::fma(sum, rest, S::broadcast(5.0000001201e-1f));
    sum = S::fma(S::mul(sum, rest), rest, rest);
    return S::scale_by_exp2(S::add(sum, S::broadcast(1.0f)), whole);
}

float exponential(float x) { return S::first(exponential(S::broadcast(x))); }

Vec square_root(Vec x) {
    alignas(64) float lanes[kWidth];
    S::store(lanes, x);
    for (Int i = 0; i < kWidth; ++i) lanes[i] = __builtin_sqrtf(lanes[i]);
    return S::load(lanes);
}

// 1 - e^x of x <= 0: by a series where e^x is nearly 1 and the difference would have few digits.
Vec one_minus_exponential(Vec x) {
    const float border = -0.5f;
    Vec sum = S::broadcast(1.0f / 40320);
    for (const float coefficient : {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f}) {
        sum = S::fma(sum, x, S::broadcast(coefficient));
    }
    const Vec opposite = S::sub(S::zero(), x), near = S::mul(sum, opposite);
    const Vec far = S::sub(S::broadcast(1.0f), exponential(x));
    return S::add(S::keep_from(x, near, S::broadcast(border)), S::keep_from(opposite, far, S::broadcast(0.50000006f)));
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

// Mamba: the state's rows [head_dim, state_size] are independent of each other; a sum runs over the columns of one.

template <class T, bool kPerChannel>
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
    const bool in_place = padded == size;
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
            for (Int i = 0; i < count; i += kWidth) S::store(factor + i, S::mul(S::load(dt + i), S::load(x + i)));
        } else {
            const float step_size = row_of<float>(job.dt, row)[head];
            decay = exponential(step_size * job.a[head]);
            for (Int i = 0; i < count; i += kWidth) S::store(factor + i, S::mul(S::broadcast(step_size), S::load(x + i)));
        }
        T* const out = static_cast<T*>(job.out) + (row * job.num_heads + head) * job.head_dim + first;
        alignas(64) float sums[kWidth * kWidth];
        for (Int i = 0; i < count; i += kWidth) {
            const Int lanes = std::min(kWidth, count - i);
            for (Int lane = 0; lane < lanes; ++lane) {
                float* const values = h + (i + lane) * padded;
                const Vec added = S::broadcast(factor[i + lane]);
                Vec sum = S::zero();
                if constexpr (kPerChannel) {
                    const float* const rates = job.a + (first + i + lane) * size;
                    const Vec step_size = S::broadcast(dt[i + lane]);
                    for (Int j = 0; j < padded; j += kWidth) {
                        const Vec decays = exponential(S::mul(step_size, load_up_to(rates + j, size - j)));
                        const Vec value = S::fma(added, S::load(b + j), S::mul(decays, S::load(values + j)));
                        S::store(values + j, value);
                        sum = S::fma(value, S::load(c + j), sum);
                    }
                } else {
                    const Vec decays = S::broadcast(decay);
                    for (Int j = 0; j < padded; j += kWidth) {
                        const Vec value = S::fma(added, S::load(b + j), S::mul(decays, S::load(values + j)));
                        S::store(values + j, value);
                        sum = S::fma(value, S::load(c + j), sum);
                    }
                }
                S::store(sums + lane * kWidth, sum);
            }
            for (Int lane = lanes; lane < kWidth; ++lane) S::store(sums + lane * kWidth, S::zero());
            Vec y = S::fold(sums);
            if (job.d != nullptr) {
                const Vec skip = kPerChannel ? load_up_to(job.d + first + i, lanes) : S::broadcast(job.d[head]);
                y = S::fma(skip, S::load(x + i), y);
            }
            store_up_to(out + i, y, lanes);
        }
        while (checkpoints.is_at(row)) copy_out(h, padded, count, size, slot(checkpoints.take()), size);
    }
    if (!in_place) copy_out(own, padded, count, size, state, size);
}

template <class T>
void scan(const ScanJob& job, Int sequence, Int head, Int first, Int last) {
    const Int padded = round_up(job.state_size, kWidth);
    float* const memory = scratch(padded * (2 + kScanRows) + 3 * round_up(kScanRows, kWidth));
    for (; first < last; first += kScanRows) {
        const Int count = std::min(kScanRows, last - first);
        if (job.per_channel) {
            scan_block<T, true>(job, sequence, head, first, count, memory);
        } else {
            scan_block<T, false>(job, sequence, head, first, count, memory);
        }
    }
}

// Delta rule and linear attention: the columns of a state [k_dim, v_dim] are independent; a sum runs down one, in kChains chains.

constexpr int kVecs = kDeltaColumns / kWidth;
constexpr int kChains = kVecs < 8 ? 8 / kVecs : 1;

struct Columns {
    Vec v[kVecs];
};

template <class T>
Columns load_columns(const T* from, Int n) {
    Columns columns;
    for (int i = 0; i < kVecs; ++i) columns.v[i] = load_up_to(from + i * kWidth, n - i * kWidth);
    return columns;
}

struct Chains {
    Vec v[kChains][kVecs];

    Chains() {
#pragma GCC unroll 8
        for (int chain = 0; chain < kChains; ++chain) {
#pragma GCC unroll 8
            for (int i = 0; i < kVecs; ++i) v[chain][i] = S::zero();
        }
    }
    Columns sum() {
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

// Calls each(chain, row) for every row, chain of it row % kChains.
template <class Each>
[[gnu::always_inline]] inline void each_row(Int num_rows, Each&& each) {
    Int row = 0;
    for (; row + kChains <= num_rows; row += kChains) {
#pragma GCC unroll 8
        for (int chain = 0; chain < kChains; ++chain) each(chain, row + chain);
    }
#pragma GCC unroll 8
    for (int chain = 0; chain < kChains; ++chain) {
        if (row + chain < num_rows) each(chain, row + chain);
    }
}

// A token's q, k and decays, of k_dim each.
struct Token {
    float *q, *k, *decay;
};

// k times the decayed rows of the block; with kCopies they are copied to `own` meanwhile, and rows ahead are fetched.
template <bool kCopies>
Columns known(const float* from, Int stride, Int k_dim, const Token& token, float* own) {
    Chains chains;
    constexpr Int kAhead = 16;
    each_row(k_dim, [&](int chain, Int row) __attribute__((always_inline)) {
        const float* const values = from + row * stride;
        if constexpr (kCopies) {
            S::prefetch(values + kAhead * stride);
            S::prefetch(values + kAhead * stride + kDeltaColumns / 2);
        }
        const Vec decay = S::broadcast(token.decay[row]), k = S::broadcast(token.k[row]);
#pragma GCC unroll 8
        for (int i = 0; i < kVecs; ++i) {
            const Vec value = S::load(values + i * kWidth);
            if constexpr (kCopies) S::store(own + row * kDeltaColumns + i * kWidth, value);
            chains.v[chain][i] = S::fma(k, S::mul(decay, value), chains.v[chain][i]);
        }
    });
    return chains.sum();
}

// The decayed rows plus k times `change`, to `to`; q times them.
Columns updated(const float* from, Int from_stride, float* to, Int to_stride, Int k_dim, const Token& token, const Columns& change) {
    Chains chains;
    each_row(k_dim, [&](int chain, Int row) __attribute__((always_inline)) {
        const Vec decay = S::broadcast(token.decay[row]), k = S::broadcast(token.k[row]), q = S::broadcast(token.q[row]);
#pragma GCC unroll 8
        for (int i = 0; i < kVecs; ++i) {
            const Vec value = S::fma(k, change.v[i], S::mul(decay, S::load(from + row * from_stride + i * kWidth)));
            S::store(to + row * to_stride + i * kWidth, value);
            chains.v[chain][i] = S::fma(q, value, chains.v[chain][i]);
        }
    });
    return chains.sum();
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
    const Int k_head = head / (job.num_heads / job.num_k_heads);
    widen(row_of<T>(job.q, row, k_head), job.k_dim, token.q);
    widen(row_of<T>(job.k, row, k_head), job.k_dim, token.k);
    if (job.normalize) {
        multiply(token.q, job.k_dim, normalizing_factor(token.q, job.k_dim));
        multiply(token.k, job.k_dim, normalizing_factor(token.k, job.k_dim));
    }
    multiply(token.q, job.k_dim, job.scale);
    if (job.per_channel) {
        const float* const g = row_of<float>(job.g, row, head);
        for (Int i = 0; i < job.k_dim; i += kWidth) S::store(token.decay + i, exponential(load_up_to(g + i, job.k_dim - i)));
    } else if (job.corrects) {
        const Vec decay = exponential(S::broadcast(row_of<float>(job.g, row)[head]));
        for (Int i = 0; i < job.k_dim; i += kWidth) S::store(token.decay + i, decay);
    }
}

template <class T>
void delta_block(const DeltaJob& job, Int sequence, Int head, Int first, Int count, const Token& token, float* own) {
    const RecurrenceStep& step = *job.step;
    const Int start = step.starts[static_cast<std::size_t>(sequence)], stop = step.starts[static_cast<std::size_t>(sequence) + 1];
    const Int place = head * job.k_dim * job.v_dim + first;
    const auto slot = [&](Int which) { return job.state.data + which * job.state.slot_stride + place; };
    float* const state = slot(step.slots[static_cast<std::size_t>(sequence)]);
    const bool is_whole = count == kDeltaColumns;
    if (!is_whole) copy_in(state, job.v_dim, job.k_dim, count, own, kDeltaColumns);
    Checkpoints checkpoints(step, start);
    for (Int row = start; row < stop; ++row) {
        load_token<T>(job, row, head, token);
        const bool is_in_state = is_whole && row == start;  // and not yet in `own`
        Columns change = load_columns(row_of<T>(job.v, row, head) + first, count);
        if (job.corrects) {
            const Columns before = is_in_state ? known<true>(state, job.v_dim, job.k_dim, token, own)
                                               : known<false>(own, kDeltaColumns, job.k_dim, token, own);
            const Vec beta = S::broadcast(row_of<float>(job.beta, row)[head]);
            for (int i = 0; i < kVecs; ++i) change.v[i] = S::mul(beta, S::sub(change.v[i], before.v[i]));
        }
        const bool reads_state = is_in_state && !job.corrects;
        const bool writes_state = is_whole && row + 1 == stop && !checkpoints.is_at(row);
        const Columns y = updated(reads_state ? state : own, reads_state ? job.v_dim : kDeltaColumns, writes_state ? state : own,
                                  writes_state ? job.v_dim : kDeltaColumns, job.k_dim, token, change);
        T* const out = static_cast<T*>(job.out) + (row * job.num_heads + head) * job.v_dim + first;
        for (int i = 0; i < kVecs; ++i) store_up_to(out + i * kWidth, y.v[i], count - i * kWidth);
        if (row + 1 == stop && !writes_state) copy_out(own, kDeltaColumns, job.k_dim, count, state, job.v_dim);
        while (checkpoints.is_at(row)) copy_out(own, kDeltaColumns, job.k_dim, count, slot(checkpoints.take()), job.v_dim);
    }
}

template <class T>
void delta(const DeltaJob& job, Int sequence, Int head, Int first, Int last) {
    const Int padded = round_up(job.k_dim, 16);
    float* const memory = scratch(3 * padded + job.k_dim * kDeltaColumns);
    const Token token{memory, memory + padded, memory + 2 * padded};
    if (!job.corrects) {
        const Vec decay = exponential(S::broadcast(row_of<float>(job.g, 0)[head]));
        for (Int i = 0; i < job.k_dim; i += kWidth) S::store(token.decay + i, decay);
    }
    for (; first < last; first += kDeltaColumns) {
        delta_block<T>(job, sequence, head, first, std::min(kDeltaColumns, last - first), token, memory + 3 * padded);
    }
}

// RG-LRU and the short convolution: channels are independent.

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
                const Vec log = load_up_to(log_a + i, count - i);
                value = S::mul(value, square_root(one_minus_exponential(S::add(log, log))));
                value = S::fma(exponential(log), S::load(h + i), value);
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

template <class T>
constexpr RecurrenceKernels kKernels = {scan<T>, delta<T>, lru<T>, convolve<T>};

}  // namespace

const RecurrenceKernels& QUIRE_RECURRENCE(Element element) {
    switch (element) {
        case Element::f32: return kKernels<float>;
        case Element::f16: return kKernels<f16>;
        case Element::bf16: return kKernels<bf16>;
    }
    return kKernels<float>;
}

}  // namespace quire
