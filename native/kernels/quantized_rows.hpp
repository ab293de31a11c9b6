// Rows of activations in the form of the products with codes, and the sums of x that are multiplied by minimums.
//
//     float32                      for vector instructions
//     bf16, in order               for the matrix unit
//     bf16, in chains              for vdpbf16ps: of each four inputs the third, the first, the fourth, the second, so that a pair is two inputs
//                                  that follow each other in a sum of even or odd ones, the earlier one in the upper half
//
// An x below 2^-100 in size becomes zero (quantized.hpp, U2). Behind a row, at the next line, are its sums over blocks,
// if requested.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/linear_kernel.hpp"
#include "kernels/quantized.hpp"
#include "kernels/simd.hpp"
#if defined(__AVX512F__)
#include "kernels/simd_avx512.hpp"
#endif

namespace quire {
namespace {

constexpr float kSmallest = 0x1p-100f;
constexpr std::uint16_t kSmallestBits = (127 - 100) << 7;

inline float counted(float x) { return x < kSmallest && x > -kSmallest ? 0.0f : x; }
inline std::uint16_t counted(std::uint16_t bits) { return (bits & 0x7fff) < kSmallestBits ? std::uint16_t{0} : bits; }

template <class From>
void stage_counted(const void* row, std::int64_t count, void* staged, std::int64_t padded) {
    const auto* from = static_cast<const From*>(row);
    auto* to = static_cast<float*>(staged);
    for (std::int64_t i = 0; i < count; ++i) to[i] = counted(to_float(from[i]));
    for (std::int64_t i = count; i < padded; ++i) to[i] = 0.0f;
}

// Of rows of bf16.
template <bool chained>
void stage_pairs(const void* row, std::int64_t count, void* staged, std::int64_t padded) {
    const auto* from = static_cast<const std::uint16_t*>(row);
    auto* to = static_cast<std::uint16_t*>(staged);
    if constexpr (!chained) {
        for (std::int64_t i = 0; i < count; ++i) to[i] = counted(from[i]);
        std::memset(to + count, 0, static_cast<std::size_t>(padded - count) * 2);
    } else {
        std::int64_t i = 0;
        for (; i + 4 <= count; i += 4) {
            to[i] = counted(from[i + 2]), to[i + 1] = counted(from[i]), to[i + 2] = counted(from[i + 3]), to[i + 3] = counted(from[i + 1]);
        }
        for (std::int64_t start = i; i < padded; ++i) {
            const std::int64_t at = start + (i - start) / 4 * 4 + ((i - start) % 4 == 0 ? 2 : (i - start) % 4 == 1 ? 0 : (i - start) % 4 == 2 ? 3 : 1);
            to[i] = at < count ? counted(from[at]) : std::uint16_t{0};
        }
    }
}

// Of a block as it was staged.
template <class Staged>
float sum_of_block(const Staged* x, int inputs) {
    float even = 0.0f, odd = 0.0f;
    for (int k = 0; k < inputs; k += 2) even += to_float(x[k]), odd += to_float(x[k + 1]);
    return even + odd;
}
// Put in order first: GCC 12 turns sums of what is read in another order into vectors, and adds in the order of memory.
inline float sum_of_chains(const bf16* x, int inputs) {
    float in_order[32];
    for (int k = 0; k < inputs; k += 4) {
        in_order[k] = to_float(x[k + 1]), in_order[k + 1] = to_float(x[k + 3]);
        in_order[k + 2] = to_float(x[k]), in_order[k + 3] = to_float(x[k + 2]);
    }
    return sum_of_block(in_order, inputs);
}

// Sums of each 32 inputs, then of each 16, of a staged row: [padded / 32], [padded / 16].
template <class Staged>
void stage_sums(void* staged, std::int64_t padded, float* sums) {
    const auto* x = static_cast<const Staged*>(staged);
    for (const int block : {32, 16}) {
        for (std::int64_t start = 0; start < padded; start += block) *sums++ = sum_of_block(x + start, block);
    }
}

// The same of bf16, sixteen blocks side by side where the instructions can turn them: one after the other it would take longer
// than the products of a prompt's rows.
template <class S, bool chained>
void stage_sums_of_pairs(void* staged, std::int64_t padded, float* sums) {
    std::int64_t done = 0;
#if defined(__AVX512F__)
    const auto* x = static_cast<const std::uint16_t*>(staged);
    for (; done + 512 <= padded; done += 512) {
        __m512i rows[16];
        for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_si512(x + done + i * 32);
        S::transpose(rows);
        const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        __m512 even[2] = {S::zero(), S::zero()}, odd[2] = {S::zero(), S::zero()}, all[2] = {S::zero(), S::zero()};  // of both halves; even and odd of all
        for (int p = 0; p < 16; ++p) {
            const __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(rows[p], 16)), high = _mm512_castsi512_ps(_mm512_and_si512(rows[p], upper));
            const auto add = [&](__m512* halves, __m512& whole, __m512 value) {
                halves[p / 8] = S::add(halves[p / 8], value);
                whole = S::add(whole, value);
            };
            if constexpr (chained) {
                add(p % 2 == 0 ? even : odd, all[p % 2], high);
                add(p % 2 == 0 ? even : odd, all[p % 2], low);
            } else {
                add(even, all[0], low);
                add(odd, all[1], high);
            }
        }
        S::store(sums + done / 32, S::add(all[0], all[1]));
        float halves[2][16];
        for (int half = 0; half < 2; ++half) S::store(halves[half], S::add(even[half], odd[half]));
        for (int i = 0; i < 32; ++i) sums[padded / 32 + done / 16 + i] = halves[i % 2][i / 2];
    }
#endif
    const auto* rest = static_cast<const bf16*>(staged);
    for (const int block : {32, 16}) {
        for (std::int64_t start = done; start < padded; start += block) {
            sums[(block == 16 ? padded / 32 : 0) + start / block] = chained ? sum_of_chains(rest + start, block) : sum_of_block(rest + start, block);
        }
    }
}

// Sums of x over the groups, of what was staged behind each row.
inline void sum_groups(const QuantizedForm& form, const LinearBlock& block, float* to) {
    const std::int64_t all = form.depth / 32, each = form.halves() ? 1 : form.group / 32;
    for (std::int64_t row = 0; row < block.rows; ++row) {
        const auto* sums = reinterpret_cast<const float*>(block.activations + row * block.activation_stride + block.sums_of_x_offset);
        if (form.halves()) sums += all;
        for (std::int64_t group = 0; group < form.num_groups; ++group) {
            float total = sums[group * each];
            for (std::int64_t b = 1; b < each; ++b) total += sums[group * each + b];
            to[row * form.num_groups + group] = total;
        }
    }
}

}  // namespace
}  // namespace quire
