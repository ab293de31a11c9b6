// The vector layer on AVX2 + FMA + F16C: eight lanes of float32.
#pragma once

#include <immintrin.h>

#include "kernels/simd.hpp"

namespace quire {
namespace {

struct Avx2 {
    static constexpr int kWidth = 8;
    static constexpr int kRegisters = 16;
    static constexpr bool kHasPairs = false;
    using Vec = __m256;

    static Vec zero() { return _mm256_setzero_ps(); }
    static Vec broadcast(float x) { return _mm256_set1_ps(x); }
    static Vec load(const float* from) { return _mm256_loadu_ps(from); }
    static Vec load(const bf16* from) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
    static Vec load(const f16* from) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }
    static Vec load(const code8* from) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
    }
    static Vec load(const code4* from) {  // each lane shifts its half byte to the top, and back with its sign
        std::int32_t codes;
        std::memcpy(&codes, from, sizeof codes);
        const __m256i tops = _mm256_sllv_epi32(_mm256_set1_epi32(codes), _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0));
        return _mm256_cvtepi32_ps(_mm256_srai_epi32(tops, 28));
    }
    template <class T>
    static Vec load_part(const T* from, int n) {
        alignas(32) T lanes[kWidth] = {};
        for (int i = 0; i < n; ++i) lanes[i] = from[i];
        return load(lanes);
    }
    static Vec held(Vec v) {
        __asm__("" : "+x"(v));
        return v;
    }
    static void load_split_pairs(const bf16* from, Vec& low, Vec& high) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        low = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
        high = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
    }
    static void store(float* to, Vec v) { _mm256_storeu_ps(to, v); }
    static void store(bf16* to, Vec v) {
        const __m256i bits = _mm256_castps_si256(v);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
        const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        const __m256i words = _mm256_blendv_epi8(rounded, quiet, nan);
        const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
    }
    static void store(f16* to, Vec v) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    template <class T>
    static void store_part(T* to, Vec v, int n) {
        alignas(32) T lanes[kWidth];
        store(lanes, v);
        for (int i = 0; i < n; ++i) to[i] = lanes[i];
    }
    static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
    static Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
    static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
    static Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
    static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
    static Vec split(Vec x, Vec& rest) {
        const Vec clamped = _mm256_max_ps(_mm256_set1_ps(-127.0f), x);  // the second where one is NaN
        const Vec whole = _mm256_round_ps(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        rest = _mm256_sub_ps(clamped, whole);
        return whole;
    }
    static Vec scale_by_exp2(Vec a, Vec whole) {  // an exponent of zero is the number zero
        const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
        return _mm256_mul_ps(a, _mm256_castsi256_ps(exponent));
    }
    static Vec keep_from(Vec a, Vec b, Vec c) { return _mm256_and_ps(_mm256_cmp_ps(a, c, _CMP_GE_OQ), b); }
    static bool any_from(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)) != 0; }
    static Vec copy_sign(Vec magnitude, Vec sign) {
        const Vec bit = _mm256_set1_ps(-0.0f);
        return _mm256_or_ps(_mm256_andnot_ps(bit, magnitude), _mm256_and_ps(bit, sign));
    }
    static Vec within(Vec v, int start, int stop) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(start), lane), in = _mm256_cmpgt_epi32(_mm256_set1_epi32(stop), lane);
        return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), v, _mm256_castsi256_ps(_mm256_andnot_si256(below, in)));
    }
    static float first(Vec v) { return _mm256_cvtss_f32(v); }
    // Per 128-bit half (l0 + l2) + (l1 + l3), then half 0 + half 1: the tree of fold().
    static float reduce_add(Vec v) {
        v = _mm256_add_ps(v, _mm256_permute_ps(v, 0x4e));
        v = _mm256_add_ps(v, _mm256_permute_ps(v, 0xb1));
        return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)));
    }
    static float reduce_max(Vec v) {
        __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_max_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
    }
    static Vec fold(const float* rows) { return fold_by<add>(rows); }
    static Vec fold_max(const float* rows) { return fold_by<max>(rows); }
    // Not _mm_prefetch: gcc takes a function that does nothing else for one without effects, and drops its calls.
    static void prefetch(const void* address) { __asm__ volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(address))); }
    static void prefetch_l2(const void* address) { __asm__ volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(address))); }

  private:
    // Four vectors -> per 128-bit half, lane i = (l0 + l2) + (l1 + l3) of vector i.
    template <Vec (*kOf)(Vec, Vec)>
    static Vec fold_half(const float* rows) {
        const Vec a = load(rows), b = load(rows + 8), c = load(rows + 16), d = load(rows + 24);
        const Vec ab = kOf(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        const Vec cd = kOf(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        return kOf(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    }
    template <Vec (*kOf)(Vec, Vec)>
    static Vec fold_by(const float* rows) {
        const Vec low = fold_half<kOf>(rows), high = fold_half<kOf>(rows + 4 * kWidth);  // of tokens 0-3 and 4-7
        return kOf(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
    }
};

}  // namespace
}  // namespace quire
