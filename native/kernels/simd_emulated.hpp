// The arithmetic of simd_avx512.hpp in plain C++, lane by lane: same lanes, same trees, same roundings, so the results
// of the AVX-512 variants can be tested on any processor. Slow.
#pragma once

#include <cmath>

#include "kernels/simd.hpp"

// Not inlined: kernels unroll over vectors, and sixteen lanes of plain code at each place would take minutes to compile.
#define QUIRE_EMULATED __attribute__((noinline)) static

// The multiply-add loops are compiled a second time for processors with FMA: elsewhere std::fma is a call per lane.
#if defined(__x86_64__) && !defined(__FMA__)
#define QUIRE_FMA_CLONE __attribute__((target_clones("arch=haswell", "default"), optimize("O3")))
#else
#define QUIRE_FMA_CLONE
#endif

namespace quire {
namespace {

// c[i] = a[i] b[i] + c[i], rounded once.
QUIRE_FMA_CLONE void fma_lanes(const float* a, const float* b, float* c) {
    for (int i = 0; i < 16; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
}

// Subnormal numbers count as zero, of the same sign.
inline float flushed(float x) {
    const std::uint32_t bits = bits_of(x);
    return float_of((bits & 0x7f800000u) != 0 ? bits : bits & 0x80000000u);
}

// vdpbf16ps after the operation section of Intel's Software Developer's Manual: two FMAs with subnormal inputs and results
// as zero, to nearest even, the odd elements' first.
QUIRE_FMA_CLONE void dot_lanes(const bf16* a, const bf16* b, float* c) {
    std::uint32_t x[16], y[16];
    std::memcpy(x, a, sizeof x);
    std::memcpy(y, b, sizeof y);
    for (int i = 0; i < 16; ++i) {
        const float odd = flushed(__builtin_fmaf(flushed(float_of(x[i] & 0xffff0000u)), flushed(float_of(y[i] & 0xffff0000u)), flushed(c[i])));
        c[i] = flushed(__builtin_fmaf(flushed(float_of(x[i] << 16)), flushed(float_of(y[i] << 16)), odd));
    }
}

struct Emulated512 {
    static constexpr int kWidth = 16;
    static constexpr int kRegisters = 32;
    static constexpr bool kHasPairs = false;
    struct Vec {
        float lane[16];
    };

    template <class F>
    QUIRE_EMULATED Vec each(F&& f) {
        Vec v;
        for (int i = 0; i < 16; ++i) v.lane[i] = f(i);
        return v;
    }
    QUIRE_EMULATED Vec zero() { return Vec{}; }
    QUIRE_EMULATED Vec broadcast(float x) {
        return each([&](int) { return x; });
    }
    template <class T>
    QUIRE_EMULATED Vec load(const T* from) {
        return each([&](int i) { return to_float(from[i]); });
    }
    template <class T>
    QUIRE_EMULATED Vec load_part(const T* from, int n) {
        return each([&](int i) { return i < n ? to_float(from[i]) : 0.0f; });
    }
    QUIRE_EMULATED Vec load(const code4* from) { return load_part(from, kWidth); }
    QUIRE_EMULATED Vec load_part(const code4* from, int n) {
        return each([&](int i) { return i < n ? number_at(from, i) : 0.0f; });
    }
    static Vec held(Vec v) { return v; }
    QUIRE_EMULATED void load_split_pairs(const bf16* from, Vec& low, Vec& high) {
        low = each([&](int i) { return to_float(from[2 * i]); });
        high = each([&](int i) { return to_float(from[2 * i + 1]); });
    }
    template <class T>
    QUIRE_EMULATED void store(T* to, Vec v) {
        store_part(to, v, 16);
    }
    template <class T>
    QUIRE_EMULATED void store_part(T* to, Vec v, int n) {
        for (int i = 0; i < n; ++i) round_to(v.lane[i], to[i]);
    }
    QUIRE_EMULATED Vec add(Vec a, Vec b) {
        return each([&](int i) { return a.lane[i] + b.lane[i]; });
    }
    QUIRE_EMULATED Vec sub(Vec a, Vec b) {
        return each([&](int i) { return a.lane[i] - b.lane[i]; });
    }
    QUIRE_EMULATED Vec mul(Vec a, Vec b) {
        return each([&](int i) { return a.lane[i] * b.lane[i]; });
    }
    QUIRE_EMULATED Vec div(Vec a, Vec b) {
        return each([&](int i) { return a.lane[i] / b.lane[i]; });
    }
    QUIRE_EMULATED Vec max(Vec a, Vec b) {  // vmaxps: b where they compare unordered or equal
        return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
    }
    QUIRE_EMULATED Vec fma(Vec a, Vec b, Vec c) {
        fma_lanes(a.lane, b.lane, c.lane);
        return c;
    }
    QUIRE_EMULATED Vec split(Vec x, Vec& rest) {
        rest = each([&](int i) { return std::isinf(x.lane[i]) ? 0.0f : x.lane[i] - std::nearbyint(x.lane[i]); });
        return sub(x, rest);
    }
    QUIRE_EMULATED Vec scale_by_exp2(Vec a, Vec whole) {
        return each([&](int i) {
            const float n = whole.lane[i];
            return n == n ? std::scalbn(a.lane[i], static_cast<int>(n > -1000.0f ? n : -1000.0f)) : n;
        });
    }
    QUIRE_EMULATED Vec keep_from(Vec a, Vec b, Vec c) {
        return each([&](int i) { return a.lane[i] >= c.lane[i] ? b.lane[i] : 0.0f; });
    }
    QUIRE_EMULATED bool any_from(Vec a, Vec b) {
        for (int i = 0; i < 16; ++i) {
            if (a.lane[i] >= b.lane[i]) return true;
        }
        return false;
    }
    QUIRE_EMULATED Vec copy_sign(Vec magnitude, Vec sign) {
        return each([&](int i) { return std::copysign(magnitude.lane[i], sign.lane[i]); });
    }
    QUIRE_EMULATED Vec within(Vec v, int start, int stop) {
        return each([&](int i) { return i >= start && i < stop ? v.lane[i] : -__builtin_inff(); });
    }
    QUIRE_EMULATED float first(Vec v) { return v.lane[0]; }
    QUIRE_EMULATED float reduce_add(Vec v) { return add_lanes(v.lane); }
    QUIRE_EMULATED float reduce_max(Vec v) {
        float most = v.lane[0];
        for (int i = 1; i < 16; ++i) most = v.lane[i] > most ? v.lane[i] : most;
        return most;
    }
    QUIRE_EMULATED Vec fold(const float* rows) {
        return each([&](int i) { return add_lanes(rows + 16 * i); });
    }
    QUIRE_EMULATED Vec fold_max(const float* rows) {
        return each([&](int i) { return reduce_max(load(rows + 16 * i)); });
    }
    template <class T>
    QUIRE_EMULATED void widen_columns(const T* const* rows, int first, int width, float* to, int stride) {
        for (int column = 0; column < 32; ++column) {
            for (int i = 0; i < 16; ++i) to[column * stride + i] = first + column < width ? to_float(rows[i][first + column]) : 0.0f;
        }
    }
    QUIRE_EMULATED Vec fold_four(Vec a, Vec b, Vec c, Vec d) {
        const float* from[4] = {a.lane, b.lane, c.lane, d.lane};
        return each([&](int i) {
            const float* part = from[i % 4] + i / 4 * 4;
            return (part[0] + part[2]) + (part[1] + part[3]);
        });
    }
    QUIRE_EMULATED Vec fold_parts(Vec a, Vec b, Vec c, Vec d) {
        const float* from[4] = {a.lane, b.lane, c.lane, d.lane};
        return each([&](int i) {
            const float* part = from[i / 4] + i % 4;
            return (part[0] + part[4]) + (part[8] + part[12]);
        });
    }
    QUIRE_EMULATED void prefetch(const void*) {}
    static void prefetch_l2(const void*) {}
    static void prefetch_once(const void*) {}

  private:
    QUIRE_EMULATED float add_lanes(const float* lane) {
        float part[4];
        for (int j = 0; j < 4; ++j) part[j] = (lane[4 * j] + lane[4 * j + 2]) + (lane[4 * j + 1] + lane[4 * j + 3]);
        return (part[0] + part[1]) + (part[2] + part[3]);
    }
};

struct Emulated512Bf16 : Emulated512 {
    static constexpr bool kHasPairs = true;
    struct Pairs {
        bf16 element[32];
    };

    QUIRE_EMULATED Pairs load_pairs(const bf16* from) { return load_pairs_part(from, 32); }
    QUIRE_EMULATED Pairs load_pairs_part(const bf16* from, int n) {
        Pairs v{};
        std::memcpy(v.element, from, static_cast<std::size_t>(n) * sizeof(bf16));
        return v;
    }
    using Emulated512::held;
    static Pairs held(const Pairs& v) { return v; }
    QUIRE_EMULATED void store_pairs(bf16* to, const Pairs& v) { std::memcpy(to, v.element, sizeof v.element); }
    QUIRE_EMULATED void stream_pairs(bf16* to, const Pairs& v) { store_pairs(to, v); }
    QUIRE_EMULATED void end_streams() {}
    QUIRE_EMULATED Pairs broadcast_pair(const bf16* pair) {
        Pairs v;
        for (int i = 0; i < 16; ++i) std::memcpy(v.element + 2 * i, pair, 2 * sizeof(bf16));
        return v;
    }
    QUIRE_EMULATED Vec dot(Vec sum, const Pairs& a, const Pairs& b) {
        dot_lanes(a.element, b.element, sum.lane);
        return sum;
    }
    QUIRE_EMULATED Vec dot_pair(Vec sum, const bf16* pair, const Pairs& b) { return dot(sum, broadcast_pair(pair), b); }
    QUIRE_EMULATED Vec dot_from(Vec sum, const Pairs& a, const bf16* b) { return dot(sum, a, load_pairs(b)); }
    QUIRE_EMULATED void transpose(Pairs (&rows)[16]) {
        Pairs columns[16];
        for (int i = 0; i < 16; ++i) {
            for (int j = 0; j < 16; ++j) std::memcpy(columns[j].element + 2 * i, rows[i].element + 2 * j, 2 * sizeof(bf16));
        }
        std::memcpy(rows, columns, sizeof columns);
    }
    QUIRE_EMULATED void interleave(const Pairs& a, const Pairs& b, Pairs& low, Pairs& high) {
        for (int part = 0; part < 4; ++part) {
            for (int i = 0; i < 4; ++i) {
                low.element[8 * part + 2 * i] = a.element[8 * part + i];
                low.element[8 * part + 2 * i + 1] = b.element[8 * part + i];
                high.element[8 * part + 2 * i] = a.element[8 * part + 4 + i];
                high.element[8 * part + 2 * i + 1] = b.element[8 * part + 4 + i];
            }
        }
    }
    QUIRE_EMULATED void interleave_from(const Pairs& a, const bf16* b, Pairs& low, Pairs& high) { interleave(a, load_pairs(b), low, high); }
    QUIRE_EMULATED void natural_order(Vec& low, Vec& high) {
        float columns[32];
        for (int i = 0; i < 16; ++i) {
            columns[8 * (i / 4) + i % 4] = low.lane[i];
            columns[8 * (i / 4) + 4 + i % 4] = high.lane[i];
        }
        std::memcpy(low.lane, columns, sizeof low.lane);
        std::memcpy(high.lane, columns + 16, sizeof high.lane);
    }
    QUIRE_EMULATED void unzip(const Vec& a, const Vec& b, Vec& even, Vec& odd) {
        Vec evens, odds;
        for (int i = 0; i < 8; ++i) {
            evens.lane[i] = a.lane[2 * i], evens.lane[8 + i] = b.lane[2 * i];
            odds.lane[i] = a.lane[2 * i + 1], odds.lane[8 + i] = b.lane[2 * i + 1];
        }
        even = evens, odd = odds;
    }
    QUIRE_EMULATED void to_bf16(bf16* to, Vec v) { store_part(to, v, 16); }
    using Emulated512::store, Emulated512::store_part;
    static void store(bf16* to, const Vec& v) { to_bf16(to, v); }
    QUIRE_EMULATED void store_part(bf16* to, Vec v, int n) {
        // vcvtneps2bf16: subnormal inputs as zero.
        for (int i = 0; i < n; ++i) round_to(flushed(v.lane[i]), to[i]);
    }
    QUIRE_EMULATED Pairs to_bf16(Vec low, Vec high) {
        bf16 rounded[32];
        to_bf16(rounded, low);
        to_bf16(rounded + 16, high);
        return load_pairs(rounded);
    }
};

struct Emulated512Vbmi : Emulated512Bf16 {
    QUIRE_EMULATED Vec from_numbers(const std::int32_t* from) {
        return each([&](int i) { return static_cast<float>(from[i]); });
    }
    QUIRE_EMULATED void to_words(const Vec (&v)[4], Pairs& first, Pairs& second) {
        for (int i = 0; i < 64; ++i) {
            const int part = i % 32 / 8 * 4 + i % 4;  // to nearest even; what is no number becomes the smallest
            const float value = v[i / 32 * 2 + i % 8 / 4].lane[part];
            const int number = value >= 32767.0f ? 32767 : value >= -32768.0f ? static_cast<int>(__builtin_nearbyintf(value)) : -32768;
            (i < 32 ? first : second).element[i % 32].bits = static_cast<std::uint16_t>(number);
        }
    }
    QUIRE_EMULATED Pairs times_words(const Pairs& a, const Pairs& b) {
        Pairs v;
        for (int i = 0; i < 32; ++i) {
            const int product = static_cast<std::int16_t>(a.element[i].bits) * static_cast<std::int16_t>(b.element[i].bits);
            v.element[i].bits = static_cast<std::uint16_t>(((product >> 14) + 1) >> 1);
        }
        return v;
    }
    QUIRE_EMULATED void store_limbs(const Pairs& first, const Pairs& second, code8* upper, code8* lower) {
        for (int i = 0; i < 64; ++i) split_word((i % 2 == 0 ? first : second).element[i / 2], upper[i], lower[i]);
    }
    static int first_of_four(int i) { return i / 4 * 4 + i % 4 / 2 * 16 + i % 2 * 2; }
    QUIRE_EMULATED void split_in_order(const Vec (&v)[4], code8* upper, code8* lower) {
        Pairs words[2];
        to_words(v, words[0], words[1]);
        for (int i = 0; i < 64; ++i) split_word(words[i / 32].element[i % 16 / 4 * 8 + i % 32 / 16 * 4 + i % 4], upper[i], lower[i]);
    }
    QUIRE_EMULATED Pairs as_pairs(const Vec& v) {
        Pairs pairs;
        std::memcpy(pairs.element, v.lane, sizeof pairs.element);
        return pairs;
    }
    QUIRE_EMULATED Pairs interleave_codes(const code8* const (&rows)[4], int first, int n) {
        std::int8_t codes[64] = {};
        for (int i = 0; i < 64 && i / 4 < n; ++i) codes[i] = rows[i % 4][first + i / 4].number;
        return of_codes(codes);
    }
    QUIRE_EMULATED void interleave_codes(const code4* const (&rows)[4], int first, int n, Pairs& even, Pairs& odd) {
        std::int8_t codes[2][64] = {};
        for (int i = 0; i < 128 && i / 4 < n; ++i) codes[i / 4 % 2][i / 8 * 4 + i % 4] = static_cast<std::int8_t>(number_at(rows[i % 4], first + i / 4));
        even = of_codes(codes[0]), odd = of_codes(codes[1]);
    }
    QUIRE_EMULATED void widen_codes(const code4* from, int n, code8* to) {
        for (int i = 0; i < 128; ++i) to[i / 32 * 32 + i % 2 * 16 + i % 32 / 2].number = i < n ? static_cast<std::int8_t>(number_at(from, i)) : std::int8_t{0};
    }

  private:
    static void split_word(bf16 word, code8& upper, code8& lower) {
        upper.number = static_cast<std::int8_t>(static_cast<std::int16_t>(word.bits + 128) >> 8);
        lower.number = static_cast<std::int8_t>(word.bits);
    }
    static Pairs of_codes(const std::int8_t* codes) {
        Pairs v;
        std::memcpy(v.element, codes, sizeof v.element);
        return v;
    }
};

}  // namespace
}  // namespace quire

#undef QUIRE_FMA_CLONE
#undef QUIRE_EMULATED
