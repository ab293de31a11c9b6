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

// e^x within 2 units in the last place, of x below 88.
Vec decay_of(Vec x) {
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
            decay = decay_of(step_size * job.a[head]);
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
                        const Vec decays = decay_of(S::mul(step_size, load_up_to(rates + j, size - j)));
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
void store_columns(T* to, const Columns& columns, Int n) {
    for (int i = 0; i < kVecs; ++i) store_up_to(to + i * kWidth, columns.v[i], n - i * kWidth);
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

// What is fetched beside each row of a state that lies in memory: the row that comes kRows later, into the first cache, and of
// every second one (of the even, or of the odd) that of the head behind, into the second. Two lines a row; evenly, because more at
// once than the processor waits for would keep it from computing.
constexpr Int kRows = 16;

struct Ahead {
    Int stride = 0;
    Int head = 0;  // elements to the head behind; 0: none
};

template <int kParity>
[[gnu::always_inline]] inline void fetch(const float* values, Int row, const Ahead& ahead) {
    constexpr Int kLine = 16;
    S::prefetch(values + kRows * ahead.stride);
    S::prefetch(values + kRows * ahead.stride + kLine);
    if (row % 2 == kParity) {
        S::prefetch_l2(values + ahead.head);
        S::prefetch_l2(values + ahead.head + kLine);
    }
}

// Adds k times the decayed rows [first, last); with kCopies the rows are copied to `own` meanwhile, with kFetches others fetched.
template <bool kCopies, bool kFetches = false>
[[gnu::always_inline]] inline void add_known(Chains& sums, const float* from, Int stride, Int first, Int last, const Token& token, float* own,
                                             const Ahead& ahead = {}) {
    Chains chains = sums;
    each_row(first, last, [&](int chain, Int row) __attribute__((always_inline)) {
        const Vec k = S::broadcast(token.decayed_k[row]);
        if constexpr (kFetches) fetch<0>(from + row * stride, row, ahead);
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
template <bool kFetches = false>
[[gnu::always_inline]] inline void update(Chains& sums, const float* from, Int from_stride, float* to, Int to_stride, Int first, Int last,
                                          const Token& token, const Columns& change, const Ahead& ahead = {}) {
    Chains chains = sums;
    each_row(first, last, [&](int chain, Int row) __attribute__((always_inline)) {
        const Vec decay = S::broadcast(token.decay[row]), k = S::broadcast(token.k[row]), q = S::broadcast(token.q[row]);
        if constexpr (kFetches) fetch<1>(from + row * from_stride, row, ahead);
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
        store_columns(static_cast<T*>(job.out) + (row * job.num_heads + head) * job.v_dim + first, sums.total(), count);
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
            add_known<false, true>(sums[b], state + b * kDeltaColumns, job.v_dim, group, std::min(group + kRows, k_dim), token, nullptr, ahead);
        }
    }
    for (Int b = 0; b < num_blocks; ++b) {
        changes[b] = change_of<T>(job, row, head, first + b * kDeltaColumns, kDeltaColumns, sums[b]);
        sums[b].clear();
    }
    for (Int group = 0; group < k_dim; group += kRows) {
        for (Int b = 0; b < num_blocks; ++b) {
            float* const at = state + b * kDeltaColumns;
            update<true>(sums[b], at, job.v_dim, at, job.v_dim, group, std::min(group + kRows, k_dim), token, changes[b], ahead);
        }
    }
    T* const out = static_cast<T*>(job.out) + (row * job.num_heads + head) * job.v_dim + first;
    for (Int b = 0; b < num_blocks; ++b) store_columns(out + b * kDeltaColumns, sums[b].total(), kDeltaColumns);
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
