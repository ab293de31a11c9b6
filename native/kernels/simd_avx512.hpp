// The vector layer on AVX-512 (F, DQ, BW, VL): sixteen lanes of float32; and with AVX512_BF16, products of bf16 pairs.
// simd_emulated.hpp computes the same lane by lane in plain C++ and must be changed with it.
#pragma once

#include <immintrin.h>

#include "kernels/simd.hpp"

namespace quire {
namespace {

struct Avx512 {
    static constexpr int kWidth = 16;
    static constexpr int kRegisters = 32;
    static constexpr bool kHasPairs = false;
    using Vec = __m512;

    static __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

    static Vec zero() { return _mm512_setzero_ps(); }
    static Vec broadcast(float x) { return _mm512_set1_ps(x); }
    static Vec load(const float* from) { return _mm512_loadu_ps(from); }
    static Vec load(const bf16* from) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
    static Vec load(const f16* from) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
    static Vec load(const code8* from) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    }
    static Vec load(const code4* from) { return widen_halves(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))); }
    static Vec load_part(const float* from, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), from); }
    static Vec load_part(const bf16* from, int n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), from)); }
    static Vec load_part(const f16* from, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), from)); }
    static Vec load_part(const code8* from, int n) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes(n), from)));
    }
    static Vec load_part(const code4* from, int n) { return widen_halves(_mm_maskz_loadu_epi8(first_lanes(n / 2), from)); }
    static Vec held(Vec v) {
        __asm__("" : "+v"(v));
        return v;
    }
    static void load_split_pairs(const bf16* from, Vec& low, Vec& high) {
        const __m512i pairs = _mm512_loadu_si512(from);
        low = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
        high = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    }
    static void store(float* to, Vec v) { _mm512_storeu_ps(to, v); }
    static void store(bf16* to, Vec v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(v)); }
    static void store(f16* to, Vec v) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static void store_part(float* to, Vec v, int n) { _mm512_mask_storeu_ps(to, first_lanes(n), v); }
    static void store_part(bf16* to, Vec v, int n) { _mm256_mask_storeu_epi16(to, first_lanes(n), narrow(v)); }
    static void store_part(f16* to, Vec v, int n) {
        _mm256_mask_storeu_epi16(to, first_lanes(n), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
    static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
    static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
    static Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
    static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
    static Vec split(Vec x, Vec& rest) {
        rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);  // 0 of -inf
        return _mm512_sub_ps(x, rest);
    }
    static Vec scale_by_exp2(Vec a, Vec whole) { return _mm512_scalef_ps(a, whole); }
    static Vec keep_from(Vec a, Vec b, Vec c) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, c, _CMP_GE_OQ), b); }
    static bool any_from(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ) != 0; }
    static Vec copy_sign(Vec magnitude, Vec sign) {
        const Vec bit = _mm512_set1_ps(-0.0f);
        return _mm512_or_ps(_mm512_andnot_ps(bit, magnitude), _mm512_and_ps(bit, sign));
    }
    static Vec within(Vec v, int start, int stop) {
        const unsigned low = start <= 0 ? 0u : start >= 16 ? 16u : static_cast<unsigned>(start);
        const unsigned high = stop <= 0 ? 0u : stop >= 16 ? 16u : static_cast<unsigned>(stop);
        const auto mask = static_cast<__mmask16>(((1u << high) - 1u) & ~((1u << low) - 1u));
        return _mm512_mask_blend_ps(mask, _mm512_set1_ps(-__builtin_inff()), v);
    }
    static float first(Vec v) { return _mm512_cvtss_f32(v); }
    // Per 128-bit part (l0 + l2) + (l1 + l3), then (part 0 + part 1) + (part 2 + part 3): the tree of fold().
    static float reduce_add(Vec v) {
        v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4e));
        v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xb1));
        v = _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0xb1));
        v = _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0x4e));
        return _mm512_cvtss_f32(v);
    }
    static float reduce_max(Vec v) {
        v = _mm512_max_ps(v, _mm512_permute_ps(v, 0x4e));
        v = _mm512_max_ps(v, _mm512_permute_ps(v, 0xb1));
        v = _mm512_max_ps(v, _mm512_shuffle_f32x4(v, v, 0xb1));
        v = _mm512_max_ps(v, _mm512_shuffle_f32x4(v, v, 0x4e));
        return _mm512_cvtss_f32(v);
    }
    static Vec fold(const float* rows) { return fold_by<add>(rows); }
    static Vec fold_max(const float* rows) { return fold_by<max>(rows); }
    // The tree's two halves: four vectors -> per 128-bit part, lane i = (l0 + l2) + (l1 + l3) of vector i; then four of these.
    template <Vec (*kOf)(Vec, Vec) = add>
    static Vec fold_four(Vec a, Vec b, Vec c, Vec d) {
        const Vec ab = kOf(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        const Vec cd = kOf(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        return kOf(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    }
    template <Vec (*kOf)(Vec, Vec) = add>
    static Vec fold_parts(Vec a, Vec b, Vec c, Vec d) {
        const Vec ab = kOf(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
        const Vec cd = kOf(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
        return kOf(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    }
    // Sixteen rows of sixteen 32-bit elements -> their columns.
    static void transpose(__m512i (&rows)[16]) {
        __m512i fours[16];  // [4 i + j]: per 128-bit part, column j of rows 4 i to 4 i + 3
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 4) {
            const __m512i ab_low = _mm512_unpacklo_epi32(rows[i], rows[i + 1]), ab_high = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
            const __m512i cd_low = _mm512_unpacklo_epi32(rows[i + 2], rows[i + 3]), cd_high = _mm512_unpackhi_epi32(rows[i + 2], rows[i + 3]);
            fours[i] = _mm512_unpacklo_epi64(ab_low, cd_low);
            fours[i + 1] = _mm512_unpackhi_epi64(ab_low, cd_low);
            fours[i + 2] = _mm512_unpacklo_epi64(ab_high, cd_high);
            fours[i + 3] = _mm512_unpackhi_epi64(ab_high, cd_high);
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const __m512i ab_even = _mm512_shuffle_i32x4(fours[j], fours[j + 4], 0x88), ab_odd = _mm512_shuffle_i32x4(fours[j], fours[j + 4], 0xdd);
            const __m512i cd_even = _mm512_shuffle_i32x4(fours[j + 8], fours[j + 12], 0x88);
            const __m512i cd_odd = _mm512_shuffle_i32x4(fours[j + 8], fours[j + 12], 0xdd);
            rows[j] = _mm512_shuffle_i32x4(ab_even, cd_even, 0x88);
            rows[j + 4] = _mm512_shuffle_i32x4(ab_odd, cd_odd, 0x88);
            rows[j + 8] = _mm512_shuffle_i32x4(ab_even, cd_even, 0xdd);
            rows[j + 12] = _mm512_shuffle_i32x4(ab_odd, cd_odd, 0xdd);
        }
    }
    // Thirty-two columns of sixteen rows, in float32: to[column * stride + row].
    static void widen_columns(const bf16* const* rows, int first, int width, float* to, int stride) {
        const int left = width - first;
        const __mmask32 mask = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1u;
        __m512i square[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) square[i] = _mm512_maskz_loadu_epi16(mask, rows[i] + first);
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            store(to + 2 * i * stride, _mm512_castsi512_ps(_mm512_slli_epi32(square[i], 16)));
            store(to + (2 * i + 1) * stride,
                  _mm512_castsi512_ps(_mm512_and_si512(square[i], _mm512_set1_epi32(static_cast<int>(0xffff0000u)))));
        }
    }
    template <class T>
    static void widen_columns(const T* const* rows, int first, int width, float* to, int stride) {
        for (int half = 0; half < 32; half += 16) {
            const int left = width - first - half, n = left < 0 ? 0 : left < 16 ? left : 16;
            __m512i square[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) square[i] = _mm512_castps_si512(load_part(rows[i] + first + half, n));
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) store(to + (half + i) * stride, _mm512_castsi512_ps(square[i]));
        }
    }
    // Not _mm_prefetch: gcc takes a function that does nothing else for one without effects, and drops its calls.
    static void prefetch(const void* address) { __asm__ volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(address))); }
    static void prefetch_l2(const void* address) { __asm__ volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(address))); }
    static void prefetch_once(const void* address) { __asm__ volatile("prefetchnta %0" : : "m"(*static_cast<const char*>(address))); }

  private:
    template <Vec (*kOf)(Vec, Vec)>
    static Vec fold_by(const float* rows) {
        const auto four = [rows](int i) {
            const float* from = rows + 4 * i * kWidth;
            return fold_four<kOf>(load(from), load(from + kWidth), load(from + 2 * kWidth), load(from + 3 * kWidth));
        };
        return fold_parts<kOf>(four(0), four(1), four(2), four(3));
    }
    // Sixteen codes of 4 bits: each lane looks up the number of its own, by the four bits that vpermps reads of an index.
    static Vec widen_halves(__m128i codes) {
        const __m512i fours = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), _mm512_castsi128_si512(codes));
        const __m512i indices = _mm512_srlv_epi32(fours, _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28));
        return _mm512_permutexvar_ps(indices, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1));
    }
    // One shuffle that leaves zeros in the lower halves, where vpmovzxwd and a shift would be two operations.
    static Vec widen(__m256i words) {
        const __m512i upper_halves =
            _mm512_setr_epi32(0x00000000, 0x00010000, 0x00020000, 0x00030000, 0x00040000, 0x00050000, 0x00060000, 0x00070000,  //
                              0x00080000, 0x00090000, 0x000a0000, 0x000b0000, 0x000c0000, 0x000d0000, 0x000e0000, 0x000f0000);
        return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, upper_halves, _mm512_castsi256_si512(words)));
    }
    // To nearest even: half a step less one is added, and one more where the last bit kept is odd. The upper halves by one shuffle.
    static __m256i narrow(Vec v) {
        const __m512i bits = _mm512_castps_si512(v), half = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
        const __m512i rounded = _mm512_mask_add_epi32(half, _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000)), half, _mm512_set1_epi32(1));
        const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        const __m512i words = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
        const __m512i upper_halves =
            _mm512_setr_epi32(0x00030001, 0x00070005, 0x000b0009, 0x000f000d, 0x00130011, 0x00170015, 0x001b0019, 0x001f001d,  //
                              0, 0, 0, 0, 0, 0, 0, 0);
        return _mm512_castsi512_si256(_mm512_permutexvar_epi16(upper_halves, words));
    }
};

#if defined(__AVX512BF16__)

struct Avx512Bf16 : Avx512 {
    static constexpr bool kHasPairs = true;
    using Pairs = __m512i;  // 32 bf16: 16 pairs

    static Pairs load_pairs(const bf16* from) { return _mm512_loadu_si512(from); }
    static Pairs load_pairs_part(const bf16* from, int n) {
        return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((std::uint64_t{1} << n) - 1u), from);
    }
    using Avx512::held;
    static Pairs held(Pairs v) {
        __asm__("" : "+v"(v));
        return v;
    }
    static void store_pairs(bf16* to, Pairs v) { _mm512_storeu_si512(to, v); }
    static void stream_pairs(bf16* to, Pairs v) { _mm512_stream_si512(reinterpret_cast<__m512i*>(to), v); }
    static void end_streams() { _mm_sfence(); }
    static Pairs broadcast_pair(const bf16* pair) {
        std::int32_t bits;
        std::memcpy(&bits, pair, sizeof bits);
        return _mm512_set1_epi32(bits);
    }
    // vdpbf16ps: each lane adds the product of the odd elements, then that of the even ones.
    static Vec dot(Vec sum, Pairs a, Pairs b) {
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
    }
    // The same with `b` read by the operation itself.
    static Vec dot_from(Vec sum, Pairs a, const bf16* b) {
        __asm__("vdpbf16ps %1, %2, %0" : "+v"(sum) : "m"(*reinterpret_cast<const Line*>(b)), "v"(a));
        return sum;
    }
    // The same with one pair for all lanes, broadcast by the operation itself.
    static Vec dot_pair(Vec sum, const bf16* pair, Pairs b) {
        __asm__("vdpbf16ps %1%{1to16%}, %2, %0" : "+v"(sum) : "m"(*reinterpret_cast<const Pair*>(pair)), "v"(b));
        return sum;
    }
    // Rows a and b of 32 columns -> pairs (a[c], b[c]): lanes of `low` are columns 0-3, 8-11, 16-19, 24-27, of `high`
    // the others.
    static void interleave(Pairs a, Pairs b, Pairs& low, Pairs& high) {
        low = _mm512_unpacklo_epi16(a, b);
        high = _mm512_unpackhi_epi16(a, b);
    }
    // The same with `b` read by the operations themselves.
    static void interleave_from(Pairs a, const bf16* b, Pairs& low, Pairs& high) {
        const Line& from = *reinterpret_cast<const Line*>(b);
        __asm__("vpunpcklwd %1, %2, %0" : "=v"(low) : "m"(from), "v"(a));
        __asm__("vpunpckhwd %1, %2, %0" : "=v"(high) : "m"(from), "v"(a));
    }
    // Sums in interleave's order of columns -> columns 0-15 and 16-31.
    static void natural_order(Vec& low, Vec& high) {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        const Vec a = _mm512_permutex2var_ps(low, first, high), b = _mm512_permutex2var_ps(low, second, high);
        low = a;
        high = b;
    }
    static void unzip(Vec a, Vec b, Vec& even, Vec& odd) {
        const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        even = _mm512_permutex2var_ps(a, evens, b);
        odd = _mm512_permutex2var_ps(a, _mm512_or_si512(evens, _mm512_set1_epi32(1)), b);
    }
    // vcvtneps2bf16: to nearest even, subnormals to zero; one operation where Avx512 takes eight.
    static void to_bf16(bf16* to, Vec v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rounded(v)); }
    using Avx512::store, Avx512::store_part;
    static void store(bf16* to, Vec v) { to_bf16(to, v); }
    static void store_part(bf16* to, Vec v, int n) { _mm256_mask_storeu_epi16(to, first_lanes(n), rounded(v)); }
    static Pairs to_bf16(Vec low, Vec high) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)); }

  private:
    using Line = char[64];  // what an operation reads itself, at any address
    using Pair = char[4];
    static __m256i rounded(Vec v) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)); }
};

#endif

#if defined(__AVX512VBMI__)

struct Avx512Vbmi : Avx512Bf16 {
    static Vec from_numbers(const std::int32_t* from) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(from)); }
    // 16 bits: the vectors 0 and 1 in `first`, 2 and 3 in `second`, four lanes of each after the other.
    static void to_words(const Vec (&v)[4], Pairs& first, Pairs& second) {
        first = _mm512_packs_epi32(_mm512_cvtps_epi32(v[0]), _mm512_cvtps_epi32(v[1]));
        second = _mm512_packs_epi32(_mm512_cvtps_epi32(v[2]), _mm512_cvtps_epi32(v[3]));
    }
    static Pairs times_words(Pairs a, Pairs b) { return _mm512_mulhrs_epi16(a, b); }
    // Bytes of words of `first` and of `second` in turn.
    static void store_limbs(Pairs first, Pairs second, code8* upper, code8* lower) {
        const __m512i half = _mm512_set1_epi16(128), low = _mm512_set1_epi16(255);
        constexpr int kSelect = 0xca;  // bits of the second where the first has ones, else of the third
        _mm512_storeu_si512(lower, _mm512_ternarylogic_epi32(low, first, _mm512_slli_epi16(second, 8), kSelect));
        first = _mm512_add_epi16(first, half), second = _mm512_add_epi16(second, half);
        _mm512_storeu_si512(upper, _mm512_ternarylogic_epi32(low, _mm512_srli_epi16(first, 8), second, kSelect));
    }
    static int first_of_four(int i) { return i / 4 * 4 + i % 4 / 2 * 16 + i % 2 * 2; }
    static void split_in_order(const Vec (&v)[4], code8* upper, code8* lower) {
        Pairs first, second;
        to_words(v, first, second);
        const __m512i half = _mm512_set1_epi16(128), low = _mm512_set1_epi16(255);
        const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        _mm512_storeu_si512(lower, _mm512_permutexvar_epi32(in_order, _mm512_packus_epi16(_mm512_and_si512(first, low), _mm512_and_si512(second, low))));
        first = _mm512_srai_epi16(_mm512_add_epi16(first, half), 8), second = _mm512_srai_epi16(_mm512_add_epi16(second, half), 8);
        _mm512_storeu_si512(upper, _mm512_permutexvar_epi32(in_order, _mm512_packs_epi16(first, second)));
    }
    static Pairs as_pairs(Vec v) { return _mm512_castps_si512(v); }
    static Pairs interleave_codes(const code8* const (&rows)[4], int first, int n) { return interleaved(rows, first, n); }
    static void interleave_codes(const code4* const (&rows)[4], int first, int n, Pairs& even, Pairs& odd) {
        halves(interleaved(rows, first / 2, (n + 1) / 2), even, odd);
    }
    static void widen_codes(const code4* from, int n, code8* to) {
        const int bytes = (n + 1) / 2;
        __m512i even, odd;
        halves(bytes >= 64 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi8((std::uint64_t{1} << bytes) - 1u, from), even, odd);
        _mm512_storeu_si512(to, _mm512_permutex2var_epi64(even, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), odd));
        _mm512_storeu_si512(to + 64, _mm512_permutex2var_epi64(even, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), odd));
    }

  private:
    // Bytes [first, first + n), at most 16, of four rows: byte i of each side by side.
    template <class T>
    static __m512i interleaved(const T* const (&rows)[4], int first, int n) {
        const auto part = [&](int i) {
            const void* from = rows[i] + first;
            return n >= 16 ? _mm_loadu_si128(static_cast<const __m128i*>(from)) : _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << n) - 1u), from);
        };
        __m512i bytes = _mm512_castsi128_si512(part(0));
        bytes = _mm512_inserti32x4(bytes, part(1), 1);
        bytes = _mm512_inserti32x4(bytes, part(2), 2);
        bytes = _mm512_inserti32x4(bytes, part(3), 3);
        const __m512i fours = _mm512_setr_epi32(0x30201000, 0x31211101, 0x32221202, 0x33231303, 0x34241404, 0x35251505, 0x36261606, 0x37271707,  //
                                                0x38281808, 0x39291909, 0x3a2a1a0a, 0x3b2b1b0b, 0x3c2c1c0c, 0x3d2d1d0d, 0x3e2e1e0e, 0x3f2f1f0f);
        return _mm512_permutexvar_epi8(fours, bytes);
    }
    // The codes in the low and in the high halves of bytes, as bytes.
    static void halves(__m512i pairs, __m512i& low, __m512i& high) {
        const __m512i numbers = _mm512_set4_epi32(static_cast<int>(0xfffefdfcu), static_cast<int>(0xfbfaf9f8u), 0x07060504, 0x03020100), mask = _mm512_set1_epi8(15);
        low = _mm512_shuffle_epi8(numbers, _mm512_and_si512(pairs, mask));
        high = _mm512_shuffle_epi8(numbers, _mm512_and_si512(_mm512_srli_epi32(pairs, 4), mask));
    }
};

#endif

}  // namespace
}  // namespace quire
