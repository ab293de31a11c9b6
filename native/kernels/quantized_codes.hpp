// Codes and numbers of a panel, one at a time: for packing, for rows of an embedding, and for unknown instruction sets.
#pragma once

#include "kernels/quantized.hpp"
#include "kernels/simd.hpp"

namespace quire {
namespace {

// Where the bits of input `k` (within a block) lie: word (of the plane, per column) and shift.
struct CodePlace {
    std::int64_t word;
    int shift;
};

inline CodePlace low_place(std::int64_t k) { return {k / 8, static_cast<int>(k % 8 / 2 * 4 + k % 2 * 16)}; }
inline CodePlace fifth_place(std::int64_t k) { return {0, static_cast<int>(k / 2 + k % 2 * 16)}; }
inline CodePlace upper_place(std::int64_t k) { return {k / 16, static_cast<int>(k % 16 / 2 * 2 + k % 2 * 16)}; }
inline CodePlace byte_place(std::int64_t k) { return {k / 4, static_cast<int>(k % 4 / 2 * 8 + k % 2 * 16)}; }

inline std::uint32_t code_word(const unsigned char* plane, std::int64_t word, std::int64_t column) {
    std::uint32_t bits;
    std::memcpy(&bits, plane + (word * QuantizedForm::kColumns + column) * 4, 4);
    return bits;
}

constexpr std::int64_t kLowPlaneBytes = 256;  // of a block

inline std::uint32_t code_at(int bits, const unsigned char* block, std::int64_t k, std::int64_t column) {
    const auto field = [&](const unsigned char* plane, CodePlace place, std::uint32_t mask) {
        return code_word(plane, place.word, column) >> place.shift & mask;
    };
    if (bits == 8) return field(block, byte_place(k), 0xff);
    const std::uint32_t low = field(block, low_place(k), 0xf);
    if (bits == 5) return low | field(block + kLowPlaneBytes, fifth_place(k), 1) << 4;
    if (bits == 6) return low | field(block + kLowPlaneBytes, upper_place(k), 3) << 4;
    return low;
}

inline float number_at(Number number, const unsigned char* from, std::int64_t index) {
    switch (number) {
        case Number::f32: {
            float value;
            std::memcpy(&value, from + index * 4, 4);
            return value;
        }
        case Number::bf16:
        case Number::f16: {
            std::uint16_t bits;
            std::memcpy(&bits, from + index * 2, 2);
            return number == Number::bf16 ? to_float(bf16{bits}) : to_float(f16{bits});
        }
        case Number::u8: return static_cast<float>(from[index]);
        case Number::i8: return static_cast<float>(static_cast<std::int8_t>(from[index]));
        case Number::none: break;
    }
    return 0.0f;
}

// That of a group and a column.
inline float factor_at(const QuantizedFactor& factor, const unsigned char* panel, std::int64_t group, std::int64_t column) {
    const float fine = number_at(factor.fine, panel + factor.fine_offset, group * QuantizedForm::kColumns + column);
    if (factor.coarse == Number::none) return fine;
    return fine * number_at(factor.coarse, panel + factor.coarse_offset, group / factor.ratio * QuantizedForm::kColumns + column);
}

inline float zero_at(const QuantizedForm& form, const unsigned char* panel, std::int64_t group, std::int64_t column) {
    if (form.zeros == Number::none) return form.zero;
    return number_at(form.zeros, panel + form.zeros_offset, group * QuantizedForm::kColumns + column);
}

inline float value_at(const QuantizedForm& form, std::uint32_t code, float zero) {
    return form.values == QuantizedForm::Values::table ? form.table[code] : static_cast<float>(code) - zero;
}

}  // namespace
}  // namespace quire
