// Numbers and vectors the kernels compute with: bf16 and f16 as types, and functions common to all instruction sets.
//
// An instruction set is a struct of static functions with one interface (simd_portable, simd_avx2, simd_avx512,
// simd_emulated); kernels are templates over it:
//
//   kWidth            lanes of float32 in a Vec
//   kRegisters        vector registers there are, for the sizes of register tiles
//   load, store       float32, bf16, f16 or (loads alone) code8 and code4 in memory, float32 in the register; no
//                     alignment needed; stores round to nearest even (of bf16 by the processor's own rounding where
//                     kHasPairs: subnormals to zero)
//   load_part, store_part   the first n lanes only, the others zero or untouched: nothing beyond n is read or written
//   held(v)           v, in a register from here on: one load for several uses
//   load_split_pairs  2 kWidth bf16 in pairs (column j, column j + kWidth) -> two Vecs: a shift and a mask, no shuffle
//   fma(a, b, c)      a b + c, rounded once where the instruction set does
//   fold(rows)        kWidth vectors in memory -> lane i is the sum of vector i's lanes, by one fixed tree
//   fold_max(rows)    the same with the larger of two for their sum
//   reduce_add        the same tree on one vector; reduce_max
//   within            lanes [start, stop) of a vector, -inf elsewhere
//   split(x, rest)    the whole number next to x <= 0, and what is left of x, in [-0.5, 0.5]; -inf, or a number of -127 or less,
//                     and anything for x below -126.5; NaN where x is
//   scale_by_exp2     a 2^whole, of a number from split: at most a subnormal number where that is -127 or less
//   keep_from         b where a >= c, else 0
//   any_from          whether a >= b in any lane
//   prefetch, prefetch_l2   a line into the first or the second cache
//   prefetch_once     a line that is read once, into the first cache alone (where kHasPairs)
// and where kWidth is 16
//   widen_columns(rows, first, width, to, stride)   columns [first, first + 32) of sixteen rows of `width`, zeros beyond, in
//                     float32: to[column * stride + row]
// and where kHasPairs, products of bf16 pairs (vdpbf16ps): Pairs (2 kWidth bf16), load_pairs, load_pairs_part, store_pairs,
// stream_pairs (to a whole line past the caches; other threads see it after end_streams), broadcast_pair, transpose, interleave, natural_order, dot, to_bf16; unzip (the even and the odd lanes of two Vecs);
// and fold in two halves, of vectors in registers: fold_four, fold_parts.
// And where codes are multiplied as they are (Avx512Vbmi):
//   from_numbers      kWidth int32 in memory, as float32
//   to_words          4 kWidth numbers, rounded to 16 bits, in the order of times_words, which multiplies two of these as parts of 2^15
//   store_limbs       words -> their lower bytes, with a sign, and what is left of them / 256; the i-th four of bytes has the words t, t + 32,
//                     t + 1, t + 33, where t is first_of_four(i). split_in_order: the same of 4 kWidth numbers, in order
//   as_pairs          the bits of a Vec, for transpose
//   interleave_codes(rows, first, n)   codes from `first` on of four rows, at most sixteen of 8 bits: each with those of the other rows
//                     beside it, zeros from the n-th on; of 4 bits, at most 32, the even ones and the odd ones
//   widen_codes       up to 128 codes of 4 bits -> bytes, of each 32 the even ones first
//
// All headers of this family have internal linkage: each variant keeps its own copy, because the linker would merge
// equal names that were compiled for different processors.
#pragma once

#include <cstdint>
#include <cstring>

namespace quire {

// Upper half of a float32.
struct bf16 {
    std::uint16_t bits;
};

// IEEE binary16.
struct f16 {
    std::uint16_t bits;
};

// A whole number of -127 to 127, which a scale makes a number of (kv_codes.hpp).
struct code8 {
    std::int8_t number;
};

// Two whole numbers of -8 to 7, the first in the low half. Counted are numbers: a load of n reads n / 2 of these.
struct code4 {
    std::uint8_t pair;
};

namespace {

inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) { return float_of(static_cast<std::uint32_t>(value.bits) << 16); }

inline float to_float(f16 value) {
    const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
    if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    if (rest >= 0x0400u) return float_of(sign | ((rest << 13) + (112u << 23)));
    const float magnitude = static_cast<float>(rest) * 0x1p-24f;  // subnormal: exact
    return float_of(sign | bits_of(magnitude));
}

inline float to_float(code8 value) { return static_cast<float>(value.number); }

// Number i behind `from`.
inline float number_at(const code4* from, int i) { return static_cast<float>(((from[i / 2].pair >> 4 * (i % 2) & 15) ^ 8) - 8); }

inline void round_to(float value, float& out) { out = value; }

inline void round_to(float value, bf16& out) {
    const std::uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        out.bits = static_cast<std::uint16_t>(bits >> 16 | 0x40u);
    } else {
        out.bits = static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    }
}

inline void round_to(float value, f16& out) {
    const std::uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    std::uint32_t rounded;
    if (magnitude > 0x7f800000u) {
        rounded = 0x7e00u | (magnitude >> 13 & 0x3ffu);
    } else if (magnitude >= 0x47800000u) {
        rounded = 0x7c00u;
    } else if (magnitude >= 0x38800000u) {
        rounded = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    } else {
        // Subnormal or zero: adding 0.5 leaves the value's 2^-24 steps, rounded to nearest even, in the low bits.
        rounded = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    }
    out.bits = static_cast<std::uint16_t>(sign | rounded);
}

// 2^x for x <= 0, relative error below 2e-7; exactly 1 at 0, below the smallest normal number from -126.5 on, exactly 0 below
// -150 (and at -inf).
template <class S>
inline typename S::Vec exp2_nonpositive(typename S::Vec x) {
    using Vec = typename S::Vec;
    Vec rest;
    const Vec whole = S::split(x, rest);
    // Minimax polynomial of degree 5 on [-0.5, 0.5], constant term 1.
    Vec sum = S::broadcast(1.326472725e-03f);
    sum = S::fma(sum, rest, S::broadcast(9.671512688e-03f));
    sum = S::fma(sum, rest, S::broadcast(5.550733744e-02f));
    sum = S::fma(sum, rest, S::broadcast(2.402224208e-01f));
    sum = S::fma(sum, rest, S::broadcast(6.931469776e-01f));
    sum = S::fma(sum, rest, S::broadcast(1.0f));
    return S::scale_by_exp2(sum, whole);
}

// tanh by e = 2^(-2 |x| log2(e)): (1 - e) / (1 + e), absolute error below 2e-7.
template <class S>
inline typename S::Vec tanh(typename S::Vec x) {
    using Vec = typename S::Vec;
    const Vec magnitude = S::max(x, S::sub(S::zero(), x));
    const Vec power = exp2_nonpositive<S>(S::mul(magnitude, S::broadcast(-2.885390082f)));
    const Vec one = S::broadcast(1.0f);
    return S::copy_sign(S::div(S::sub(one, power), S::add(one, power)), x);
}

}  // namespace
}  // namespace quire
