// Rows of K and V as codes of 8 bits and a scale, or of 4 bits and a scale for each 32: the bits of quire.attention.codecs, row by
// row.
//
// Turning: the Hadamard matrix of entries 1 and -1, of the largest power of two that divides the row, at most 128; sums and
// differences at the distances 1, 2, 4, ..., each rounded once, so the bits are the same in any instruction set. Its units are
// compiled without contraction.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/attention.hpp"
#include "kernels/simd.hpp"

namespace quire {
namespace {

constexpr int kMostTurned = 128;
constexpr int kMostCode = 127;

inline int turn_size(int width) { return (width & -width) < kMostTurned ? width & -width : kMostTurned; }

inline void turn(float* row, int width) {
    const int size = turn_size(width);
    for (int distance = 1; distance < size; distance *= 2) {
        for (int start = 0; start < width; start += 2 * distance) {
            float *first = row + start, *second = first + distance;
            for (int i = 0; i < distance; ++i) {
                const float sum = first[i] + second[i], difference = first[i] - second[i];
                first[i] = sum;
                second[i] = difference;
            }
        }
    }
}

// A query as it meets keys that were turned.
inline void turn_query(float* row, int width) {
    turn(row, width);
    const float rest = 1.0f / static_cast<float>(turn_size(width));
    for (int d = 0; d < width; ++d) row[d] *= rest;
}

// Scale: the largest magnitude / 127 in bf16 that is not smaller, at least 2^-126; not finite where a number is not, and all codes 0.
inline void encode(const float* row, int width, std::int8_t* codes, bf16* scale) {
    std::uint32_t most = 0;  // of the magnitudes' bits: of NaN they are the largest
    for (int d = 0; d < width; ++d) {
        const std::uint32_t magnitude = bits_of(row[d]) & 0x7fffffffu;
        most = magnitude > most ? magnitude : most;
    }
    if (most >= 0x7f800000u) {
        scale->bits = most > 0x7f800000u ? 0x7fc0u : 0x7f80u;
        std::memset(codes, 0, static_cast<std::size_t>(width));
        return;
    }
    const float least = float_of(most) / static_cast<float>(kMostCode), smallest = 0x1p-126f;
    const std::uint32_t raised = bits_of(least > smallest ? least : smallest) + 0xffffu;
    scale->bits = static_cast<std::uint16_t>(raised >> 16);
    const float step = to_float(*scale), shift = 12582912.0f;  // 1.5 * 2^23: a sum with it is rounded to a whole number, to nearest even
    for (int d = 0; d < width; ++d) codes[d] = static_cast<std::int8_t>(static_cast<int>((row[d] / step + shift) - shift));
}

// Of each kCodeGroup numbers, the last of them maybe fewer: the scale is the number farthest from zero (of two the positive one) / -8
// in bf16 that is not nearer to zero, its magnitude at least 2^-126; not finite where a number is not, and all codes 0.
inline void encode_groups(const float* row, int width, unsigned char* codes, unsigned char* scales) {
    for (int start = 0; start < width; start += kCodeGroup, codes += kCodeGroup / 2, scales += sizeof(bf16)) {
        const int count = width - start < kCodeGroup ? width - start : static_cast<int>(kCodeGroup);
        float above = 0.0f, below = 0.0f;
        std::uint32_t most = 0;
        for (int d = start; d < start + count; ++d) {
            const std::uint32_t magnitude = bits_of(row[d]) & 0x7fffffffu;
            most = magnitude > most ? magnitude : most;
            above = row[d] > above ? row[d] : above;
            below = -row[d] > below ? -row[d] : below;
        }
        bf16 scale;
        const std::uint16_t sign = above >= below ? 0x8000u : 0u;
        if (most >= 0x7f800000u) {
            scale.bits = most > 0x7f800000u ? std::uint16_t{0x7fc0u} : static_cast<std::uint16_t>(0x7f80u | sign);
            std::memcpy(scales, &scale, sizeof scale);
            std::memset(codes, 0, static_cast<std::size_t>(count / 2));
            continue;
        }
        const float least = float_of(most) / 8.0f, smallest = 0x1p-126f;
        scale.bits = static_cast<std::uint16_t>((bits_of(least > smallest ? least : smallest) + 0xffffu) >> 16 | sign);
        std::memcpy(scales, &scale, sizeof scale);
        const float step = to_float(scale), shift = 12582912.0f;  // as in `encode`
        const auto code = [&](int d) {
            const int number = static_cast<int>((row[d] / step + shift) - shift);
            return static_cast<unsigned>(number < 7 ? number : 7) & 15u;
        };
        for (int i = 0; i < count; i += 2) codes[i / 2] = static_cast<unsigned char>(code(start + i) | code(start + i + 1) << 4);
    }
}

// Of the row that begins with `code`, so many bytes behind it.
inline float code_scale(const void* code, std::int64_t distance) {
    bf16 scale;
    std::memcpy(&scale, static_cast<const unsigned char*>(code) + distance, sizeof scale);
    return to_float(scale);
}

template <class T>
inline void widen_row(const unsigned char* from, int width, float* to) {
    for (int d = 0; d < width; ++d) {
        T element;
        std::memcpy(&element, from + d * static_cast<int>(sizeof(T)), sizeof element);
        to[d] = to_float(element);
    }
}

}  // namespace
}  // namespace quire
