// The row operators for one instruction set. Compiled once per variant, with its flags and -DQUIRE_VARIANT_<name>.
#include "kernels/row_ops.hpp"

#if defined(QUIRE_VARIANT_portable)
#include "kernels/simd_portable.hpp"
#define QUIRE_ROW_OPS row_ops_portable
#define QUIRE_SIMD Portable
#elif defined(QUIRE_VARIANT_avx2)
#include "kernels/simd_avx2.hpp"
#define QUIRE_ROW_OPS row_ops_avx2
#define QUIRE_SIMD Avx2
#elif defined(QUIRE_VARIANT_avx512)
#include "kernels/simd_avx512.hpp"
#define QUIRE_ROW_OPS row_ops_avx512
#define QUIRE_SIMD Avx512
#elif defined(QUIRE_VARIANT_avx512_bf16)
#include "kernels/simd_avx512.hpp"
#define QUIRE_ROW_OPS row_ops_avx512_bf16
#define QUIRE_SIMD Avx512Bf16
#elif defined(QUIRE_VARIANT_emulated_avx512_bf16)
#include "kernels/simd_emulated.hpp"
#define QUIRE_ROW_OPS row_ops_emulated_avx512_bf16
#define QUIRE_SIMD Emulated512Bf16
#elif defined(QUIRE_VARIANT_emulated_avx512)
#include "kernels/simd_emulated.hpp"
#define QUIRE_ROW_OPS row_ops_emulated_avx512
#define QUIRE_SIMD Emulated512
#else
#error "row_ops.cmake names the variant"
#endif

namespace quire {
namespace {

using S = QUIRE_SIMD;
using Vec = S::Vec;

// Calls whole(i) for every full vector of [0, width), then part(i, rest) for what is left.
template <class Whole, class Part>
[[gnu::always_inline]] inline void each_vector(std::int64_t width, Whole&& whole, Part&& part) {
    std::int64_t i = 0;
    for (; i + S::kWidth <= width; i += S::kWidth) whole(i);
    if (i < width) part(i, static_cast<int>(width - i));
}

// out[i] = f(i, load), where load(p) gives the vector at p + i.
template <class T, class Function>
[[gnu::always_inline]] inline void map(T* out, std::int64_t width, Function&& f) {
    each_vector(
        width, [&](std::int64_t i) { S::store(out + i, f([&](const auto* from) { return S::load(from + i); })); },
        [&](std::int64_t i, int n) { S::store_part(out + i, f([&](const auto* from) { return S::load_part(from + i, n); }), n); });
}

alignas(64) constexpr float kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// Sum over the row by f(sum, vector, one): two chains of lanes, then one tree. Lanes of `one` beyond the row are zero.
template <class T, class Function>
[[gnu::always_inline]] inline float sum_of(const T* x, std::int64_t width, Function&& f) {
    Vec even = S::zero(), odd = S::zero();
    const Vec ones = S::broadcast(1.0f);
    std::int64_t i = 0;
    for (; i + 2 * S::kWidth <= width; i += 2 * S::kWidth) {
        even = f(even, S::load(x + i), ones);
        odd = f(odd, S::load(x + i + S::kWidth), ones);
    }
    if (i + S::kWidth <= width) {
        even = f(even, S::load(x + i), ones);
        i += S::kWidth;
    }
    const int rest = static_cast<int>(width - i);
    if (rest > 0) odd = f(odd, S::load_part(x + i, rest), S::load_part(kOnes, rest));
    return S::reduce_add(S::add(even, odd));
}

template <class T>
void norm(const void* row, const Norm& norm, void* to, std::int64_t width) {
    const auto* x = static_cast<const T*>(row);
    auto* out = static_cast<T*>(to);
    const auto count = static_cast<float>(width);
    float mean = 0.0f;
    if (norm.kind == Norm::layer) mean = sum_of(x, width, [](Vec sum, Vec v, Vec) { return S::add(sum, v); }) / count;
    float squares;
    if (norm.kind == Norm::layer) {
        const Vec means = S::broadcast(mean);
        squares = sum_of(x, width, [means](Vec sum, Vec v, Vec one) {
            const Vec distance = S::mul(S::sub(v, means), one);
            return S::fma(distance, distance, sum);
        });
    } else {
        squares = sum_of(x, width, [](Vec sum, Vec v, Vec) { return S::fma(v, v, sum); });
    }
    const Vec factor = S::broadcast(1.0f / __builtin_sqrtf(squares / count + norm.epsilon)), means = S::broadcast(mean);
    const float *weight = norm.weight, *bias = norm.bias;
    if (norm.kind == Norm::rms) {
        map(out, width, [&](auto load) { return S::mul(S::mul(load(x), factor), load(weight)); });
    } else if (bias == nullptr) {
        map(out, width, [&](auto load) { return S::mul(S::mul(S::sub(load(x), means), factor), load(weight)); });
    } else {
        map(out, width, [&](auto load) { return S::fma(S::mul(S::sub(load(x), means), factor), load(weight), load(bias)); });
    }
}

template <class T>
void add(const void* a, const void* b, float scale, void* to, std::int64_t width) {
    const auto *x = static_cast<const T*>(a), *y = static_cast<const T*>(b);
    const Vec factor = S::broadcast(scale);
    map(static_cast<T*>(to), width, [&](auto load) { return S::fma(load(y), factor, load(x)); });
}

template <class T>
void rotate(const void* row, const void* cosines, const void* sines, Rotation rotation, std::int64_t rotary, void* to, std::int64_t width) {
    const auto *x = static_cast<const T*>(row), *cos = static_cast<const T*>(cosines), *sin = static_cast<const T*>(sines);
    auto* out = static_cast<T*>(to);
    const std::int64_t half = rotary / 2;
    if (rotation == Rotation::halves || rotation == Rotation::halves_short_table) {
        const std::int64_t second = rotation == Rotation::halves ? half : 0;
        const auto turn = [&](std::int64_t i, auto load, auto store) {
            const Vec low = load(x + i), high = load(x + half + i);
            store(out + i, S::sub(S::mul(low, load(cos + i)), S::mul(high, load(sin + i))));
            store(out + half + i, S::add(S::mul(high, load(cos + second + i)), S::mul(low, load(sin + second + i))));
        };
        each_vector(
            half, [&](std::int64_t i) { turn(i, [](const T* from) { return S::load(from); }, [](T* at, Vec v) { S::store(at, v); }); },
            [&](std::int64_t i, int n) {
                turn(i, [n](const T* from) { return S::load_part(from, n); }, [n](T* at, Vec v) { S::store_part(at, v, n); });
            });
    } else if (rotation != Rotation::none) {
        for (std::int64_t i = 0; i < half; ++i) {
            const std::int64_t first = rotation == Rotation::pairs ? 2 * i : i, second = rotation == Rotation::pairs ? 2 * i + 1 : i;
            const float low = to_float(x[2 * i]), high = to_float(x[2 * i + 1]);
            round_to(low * to_float(cos[first]) - high * to_float(sin[first]), out[2 * i]);
            round_to(high * to_float(cos[second]) + low * to_float(sin[second]), out[2 * i + 1]);
        }
    }
    const std::int64_t turned = rotation == Rotation::none ? 0 : rotary;
    if (out != x && turned < width) std::memcpy(out + turned, x + turned, static_cast<std::size_t>(width - turned) * sizeof(T));
}

// 1 / x of x in [1, 2], within 1e-7: a line, then Newton's steps. Seven operations that run side by side, where a division of
// sixteen floats keeps the processor for as many cycles (2 048 tokens of Qwen3-0.6B, AMX: 1.34 and 1.31 s).
Vec reciprocal(Vec x) {
    const Vec one = S::broadcast(1.0f), opposite = S::sub(S::zero(), x);
    Vec y = S::fma(x, S::broadcast(-8.0f / 17), S::broadcast(24.0f / 17));
#pragma GCC unroll 3
    for (int i = 0; i < 3; ++i) y = S::fma(y, S::fma(opposite, y, one), y);
    return y;
}

// 1 / (1 + e^-x), by the power that does not overflow.
Vec sigmoid(Vec x) {
    const Vec opposite = S::sub(S::zero(), x), one = S::broadcast(1.0f);
    const Vec power = exp2_nonpositive<S>(S::mul(S::max(x, opposite), S::broadcast(-1.442695041f)));
    const Vec quotient = reciprocal(S::add(one, power));
    return S::add(S::keep_from(x, quotient, S::zero()), S::keep_from(opposite, S::mul(quotient, power), S::broadcast(1.17549435e-38f)));
}

// erf by Abramowitz and Stegun 7.1.26, absolute error below 2e-7.
Vec erf(Vec x) {
    const Vec magnitude = S::max(x, S::sub(S::zero(), x)), one = S::broadcast(1.0f);
    const Vec t = S::div(one, S::fma(magnitude, S::broadcast(0.3275911f), one));
    Vec sum = S::broadcast(1.061405429f);
    sum = S::fma(sum, t, S::broadcast(-1.453152027f));
    sum = S::fma(sum, t, S::broadcast(1.421413741f));
    sum = S::fma(sum, t, S::broadcast(-0.284496736f));
    sum = S::fma(sum, t, S::broadcast(0.254829592f));
    const Vec power = exp2_nonpositive<S>(S::mul(S::mul(magnitude, magnitude), S::broadcast(-1.442695041f)));
    return S::copy_sign(S::sub(one, S::mul(S::mul(sum, t), power)), x);
}

template <Activation kind>
Vec activated(Vec x) {
    if constexpr (kind == Activation::silu) return S::mul(x, sigmoid(x));
    if constexpr (kind == Activation::relu) return S::max(x, S::zero());
    if constexpr (kind == Activation::relu_squared) {
        const Vec positive = S::max(x, S::zero());
        return S::mul(positive, positive);
    }
    const Vec half = S::mul(x, S::broadcast(0.5f));
    if constexpr (kind == Activation::gelu) return S::fma(half, erf(S::mul(x, S::broadcast(0.7071067812f))), half);
    const Vec cube = S::mul(S::mul(x, x), x);
    const Vec inner = S::mul(S::fma(cube, S::broadcast(0.044715f), x), S::broadcast(0.7978845608f));
    return S::fma(half, tanh<S>(inner), half);
}

template <class T, Activation kind>
void activate_as(const T* gate, const T* up, T* out, std::int64_t width) {
    if (up == nullptr) {
        map(out, width, [&](auto load) { return activated<kind>(load(gate)); });
    } else {
        map(out, width, [&](auto load) { return S::mul(activated<kind>(load(gate)), load(up)); });
    }
}

template <class T>
void activate(Activation activation, const void* gate, const void* up, void* out, std::int64_t width) {
    const auto run = [&](auto function) { function(static_cast<const T*>(gate), static_cast<const T*>(up), static_cast<T*>(out), width); };
    switch (activation) {
        case Activation::silu: return run(activate_as<T, Activation::silu>);
        case Activation::gelu: return run(activate_as<T, Activation::gelu>);
        case Activation::gelu_tanh: return run(activate_as<T, Activation::gelu_tanh>);
        case Activation::relu: return run(activate_as<T, Activation::relu>);
        case Activation::relu_squared: return run(activate_as<T, Activation::relu_squared>);
    }
}

template <class T>
void norm_gated(float* x, const void* gates, const GatedNorm& norm, void* to, std::int64_t width) {
    const auto* gate = static_cast<const T*>(gates);
    auto* out = static_cast<T*>(to);
    if (norm.gates_first) {
        map(x, width, [&](auto load) { return S::mul(load(x), activated<Activation::silu>(load(gate))); });
    }
    const float squares = sum_of(x, width, [](Vec sum, Vec v, Vec) { return S::fma(v, v, sum); });
    const Vec factor = S::broadcast(1.0f / __builtin_sqrtf(squares / static_cast<float>(width) + norm.epsilon));
    const auto normed = [&](auto load) { return S::mul(S::mul(load(x), factor), load(norm.weight)); };
    if (norm.gates_first) {
        map(out, width, normed);
    } else {
        map(out, width, [&](auto load) { return S::mul(normed(load), activated<Activation::silu>(load(gate))); });
    }
}

template <class T>
void multiply(const void* a, const void* b, void* to, std::int64_t width) {
    const auto *x = static_cast<const T*>(a), *y = static_cast<const T*>(b);
    map(static_cast<T*>(to), width, [&](auto load) { return S::mul(load(x), load(y)); });
}

template <class T>
void gate(const void* row, const void* gates, void* to, std::int64_t width) {
    const auto *x = static_cast<const T*>(row), *gate = static_cast<const T*>(gates);
    map(static_cast<T*>(to), width, [&](auto load) { return S::mul(load(x), sigmoid(load(gate))); });
}

template <class T>
std::int64_t first_where(const T* x, std::int64_t start, std::int64_t width, float value) {
    for (std::int64_t i = start; i < width; ++i) {
        if (to_float(x[i]) == value) return i;
    }
    return start;  // nothing above -inf
}

template <class T>
std::int64_t argmax(const void* row, std::int64_t width, float* best) {
    const auto* x = static_cast<const T*>(row);
    constexpr std::int64_t kBlock = 64 * S::kWidth;  // searched element by element where the largest is found
    float largest = -__builtin_inff();
    std::int64_t found = 0;
    for (std::int64_t start = 0; start < width; start += kBlock) {
        const std::int64_t stop = start + kBlock < width ? start + kBlock : width;
        // x - x is 0 but for NaN and infinities.
        Vec most = S::broadcast(-__builtin_inff()), odd = S::zero();
        std::int64_t i = start;
        for (; i + S::kWidth <= stop; i += S::kWidth) {
            const Vec v = S::load(x + i);
            most = S::max(v, most);
            odd = S::add(odd, S::sub(v, v));
        }
        float top = S::reduce_max(most);
        bool suspect = S::reduce_add(odd) != 0.0f;  // NaN is unequal to all
        for (; i < stop; ++i) {
            const float at = to_float(x[i]);
            if (at > top) top = at;
            suspect = suspect || at != at;
        }
        if (suspect) {
            for (std::int64_t j = start; j < stop; ++j) {
                if (const float at = to_float(x[j]); at != at) return *best = at, j;
            }
        }
        if (top > largest) {
            largest = top;
            found = start;
        }
    }
    *best = largest;
    return first_where(x, found, width, largest);
}

template <class T>
constexpr RowOps kRowOps = {norm<T>, add<T>, rotate<T>, activate<T>, norm_gated<T>, multiply<T>, gate<T>, argmax<T>};

}  // namespace

const RowOps& QUIRE_ROW_OPS(Element element) {
    switch (element) {
        case Element::f32: return kRowOps<float>;
        case Element::f16: return kRowOps<f16>;
        case Element::bf16: return kRowOps<bf16>;
    }
    return kRowOps<float>;
}

}  // namespace quire
