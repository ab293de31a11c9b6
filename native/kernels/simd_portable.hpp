// The vector layer for any processor: four lanes by the compiler's vector extension (SSE2, NEON or other).
#pragma once

#include <cmath>

#include "kernels/simd.hpp"

namespace quire {
namespace {

struct Portable {
    static constexpr int kWidth = 4;
    static constexpr int kRegisters = 16;
    static constexpr bool kHasPairs = false;
    typedef float Vec __attribute__((vector_size(16)));
    typedef std::int32_t Ints __attribute__((vector_size(16)));

    static Vec zero() { return Vec{}; }
    static Vec broadcast(float x) { return Vec{x, x, x, x}; }
    static Vec load(const float* from) {
        Vec v;
        std::memcpy(&v, from, sizeof v);
        return v;
    }
    static Vec load(const bf16* from) { return Vec{to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3])}; }
    static Vec load(const f16* from) { return Vec{to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3])}; }
    static Vec load(const code8* from) { return Vec{to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3])}; }
    static Vec load(const code4* from) { return Vec{number_at(from, 0), number_at(from, 1), number_at(from, 2), number_at(from, 3)}; }
    template <class T>
    static Vec load_part(const T* from, int n) {
        float lanes[kWidth] = {};
        for (int i = 0; i < n; ++i) lanes[i] = to_float(from[i]);
        return load(lanes);
    }
    static Vec held(Vec v) {
#if defined(__x86_64__)
        __asm__("" : "+x"(v));
#endif
        return v;
    }
    static void load_split_pairs(const bf16* from, Vec& low, Vec& high) {
        low = Vec{to_float(from[0]), to_float(from[2]), to_float(from[4]), to_float(from[6])};
        high = Vec{to_float(from[1]), to_float(from[3]), to_float(from[5]), to_float(from[7])};
    }
    static void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }
    template <class T>
    static void store(T* to, Vec v) {
        for (int i = 0; i < kWidth; ++i) round_to(v[i], to[i]);
    }
    template <class T>
    static void store_part(T* to, Vec v, int n) {
        for (int i = 0; i < n; ++i) round_to(v[i], to[i]);
    }
    static Vec add(Vec a, Vec b) { return a + b; }
    static Vec sub(Vec a, Vec b) { return a - b; }
    static Vec mul(Vec a, Vec b) { return a * b; }
    static Vec div(Vec a, Vec b) { return a / b; }
    static Vec max(Vec a, Vec b) { return a > b ? a : b; }
    static Vec fma(Vec a, Vec b, Vec c) {
#if defined(__FP_FAST_FMAF)
        for (int i = 0; i < kWidth; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
        return c;
#else
        return a * b + c;  // two roundings: these units are compiled without contraction
#endif
    }
    static Vec split(Vec x, Vec& rest) {
        const Vec clamped = max(broadcast(-127.0f), x), shift = broadcast(12582912.0f);  // 1.5 * 2^23
        const Vec whole = (clamped + shift) - shift;
        rest = clamped - whole;
        return whole;
    }
    static Vec scale_by_exp2(Vec a, Vec whole) {  // an exponent of zero is the number zero
        const Ints exponent = (__builtin_convertvector(whole, Ints) + 127) << 23;
        Vec v;
        std::memcpy(&v, &exponent, sizeof v);
        return a * v;
    }
    static Vec keep_from(Vec a, Vec b, Vec c) { return a >= c ? b : zero(); }
    static bool any_from(Vec a, Vec b) {
        const Ints from = a >= b;
        return (from[0] | from[1] | from[2] | from[3]) != 0;
    }
    static Vec copy_sign(Vec magnitude, Vec sign) {
        for (int i = 0; i < kWidth; ++i) magnitude[i] = __builtin_copysignf(magnitude[i], sign[i]);
        return magnitude;
    }
    static Vec within(Vec v, int start, int stop) {
        const Ints lane = {0, 1, 2, 3};
        return (lane >= start) & (lane < stop) ? v : broadcast(-__builtin_inff());
    }
    static float first(Vec v) { return v[0]; }
    static float reduce_add(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
    static float reduce_max(Vec v) {
        const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
        return a > b ? a : b;
    }
    static Vec fold_max(const float* rows) {
        return Vec{reduce_max(load(rows)), reduce_max(load(rows + 4)), reduce_max(load(rows + 8)), reduce_max(load(rows + 12))};
    }
    static Vec fold(const float* rows) {
        const Vec a = load(rows), b = load(rows + 4), c = load(rows + 8), d = load(rows + 12);
        const Vec ab = Vec{a[0], b[0], a[1], b[1]} + Vec{a[2], b[2], a[3], b[3]};
        const Vec cd = Vec{c[0], d[0], c[1], d[1]} + Vec{c[2], d[2], c[3], d[3]};
        return Vec{ab[0], ab[1], cd[0], cd[1]} + Vec{ab[2], ab[3], cd[2], cd[3]};
    }
    // gcc takes a function of __builtin_prefetch alone for one without effects, and drops its calls; the empty asm is one.
    static void prefetch(const void* address) {
        __builtin_prefetch(address, 0, 3);
        __asm__ volatile("");
    }
    static void prefetch_l2(const void* address) {
        __builtin_prefetch(address, 0, 2);
        __asm__ volatile("");
    }
};

}  // namespace
}  // namespace quire
