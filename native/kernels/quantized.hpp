// A quantized weight of a linear layer: the layout of a panel of codes, and the parameters that a kernel needs.
//
// A quantized weight is a PackedWeight (linear.hpp): multiply_together and its callers take it like a dense weight.
// Only the form of a panel and the kernel differ. quire/weights/codes/quantized_reference.py defines the product, bit for
// bit:
//
//   U1  products of a block of 32 inputs (16 where a group is 16) are summed apart for even and odd inputs, in order, each
//       difference, product and sum rounded by itself; then even + odd; blocks of a group in order; then acc + scale * sum,
//       acc - minimum * (sum of x); groups in order. Fused operations are used only if the product is exact. So the
//       bits are the same in every variant, at any number of rows and of threads; the matrix unit's tdpbf16ps computes
//       in that very order.
//   U2  an x below 2^-100 in size counts as zero: no sum is a subnormal number.
//   U3  a panel is 16 outputs: first the parameters of groups, then the codes, four bits or more each; codes are never
//       expanded in memory.
//
// A panel:   fine scales [groups][16], coarse ones, zeros, fine minimums, coarse ones: each as given, 64-byte aligned; then
//            for each 32 inputs the codes' planes, in 32-bit words [..][16 columns]:
//            low 4 bits: 4 words, word j with inputs 8 j + 2 i at bits 4 i and 8 j + 2 i + 1 at bits 16 + 4 i;
//            the fifth bit (5 bits): 1 word, inputs 2 p at bit p, 2 p + 1 at bit 16 + p;
//            the fifth and sixth (6 bits): 2 words, word h with inputs 16 h + 2 q at bits 2 q, 16 h + 2 q + 1 at bits 16 + 2 q;
//            or all 8 bits: 8 words, word j with inputs 4 j + 2 i at bits 8 i, 4 j + 2 i + 1 at bits 16 + 8 i.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/element.hpp"

namespace quire {

enum class Number : std::uint8_t { none, f32, bf16, f16, u8, i8 };

constexpr std::int64_t number_bytes(Number number) {
    switch (number) {
        case Number::none: return 0;
        case Number::f32: return 4;
        case Number::bf16:
        case Number::f16: return 2;
        default: return 1;
    }
}

// A number for each group, maybe as the product of a fine and a coarse one: `ratio` groups share a coarse one.
struct QuantizedFactor {
    Number fine = Number::none, coarse = Number::none;
    std::int64_t ratio = 1;
    std::int64_t fine_offset = 0, coarse_offset = 0;  // bytes, in a panel
};

struct QuantizedForm {
    static constexpr std::int64_t kColumns = 16, kBlock = 32;

    // What the codes stand for.
    enum class Values : std::uint8_t {
        integer,     // code - zero, both whole: a zero for each group, or one for all
        fractional,  // code - zero, of any float32
        table,       // an entry of 16 or 256
    };

    int bits = 4;                  // 4, 5, 6 or 8
    Values values = Values::integer;
    bool exact = true;             // every value is a bf16: its product with 16 bits is exact in float32
    std::int64_t depth = 0;        // inputs, padded to blocks
    std::int64_t group = 0;        // inputs; of one group it is all of the depth
    std::int64_t num_groups = 0;   // padded to the depth
    QuantizedFactor scales, minimums;
    Number zeros = Number::none;   // none: `zero` for all
    std::int64_t zeros_offset = 0;
    float zero = 0.0f;
    std::int64_t codes_offset = 0;
    std::int64_t panel_bytes = 0;
    float table[256] = {};         // of 4-bit codes with one zero for all too
    // Values of at most 6 bits in bf16, by code; or by code - zero, modulo 32, where zeros are at most 16. Repeated to 64.
    enum class Lookup : std::uint8_t { none, code, code_less_zero };
    Lookup lookup = Lookup::none;
    std::uint16_t entries[64] = {};

    std::int64_t block_bytes() const { return kBlock * kColumns * bits / 8; }
    bool halves() const { return group == kBlock / 2; }
    bool has_minimums() const { return minimums.fine != Number::none; }
    // float32 numbers that a thread needs beside its sums to multiply `rows` rows, whole tiles of them, with so many panels (QuantizedScratch).
    std::size_t scratch_floats(std::int64_t rows, std::int64_t panels) const;
};

// Rows that vector instructions multiply by codes as they widen them, where a matrix unit multiplies more.
constexpr std::int64_t kFewRows = 4;
// Inputs that are widened at a time: for few rows so many that the memory is asked for codes while products are computed (128: 15 % less time
// than 256 for 1 to 32 rows of a weight from memory, AMX); for many rows so many that sums are seldom set down, and a panel's stay in the first cache.
constexpr std::int64_t kWidenedForFew = 128, kWidenedForMany = 256, kWidenedForTiles = 512;
// Panels that are multiplied at a time, and how many times over: what is multiplied, and what is widened meanwhile.
constexpr std::int64_t kPanelsTogether = 2, kWideBuffers = 2;
// Half a page, in floats, between what is read and what is written meanwhile: a load waits for a store of the same place in another page.
constexpr std::int64_t kApart = 512;
// Tiles of sums that wait to be scaled: of four groups, and of four that come meanwhile.
constexpr std::int64_t kWaitingTiles = 2 * 4 * 4;

inline std::size_t QuantizedForm::scratch_floats(std::int64_t rows, std::int64_t panels) const {
    const std::int64_t of_panel = kWidenedForTiles / 2 + 3 * num_groups;
    return static_cast<std::size_t>((kWideBuffers * kPanelsTogether * of_panel + panels * rows) * kColumns + kWideBuffers * kApart + kWaitingTiles * 256 + rows * num_groups + 16);
}

// A weight [num_outputs, num_inputs] as it is given: all contiguous.
struct QuantizedParts {
    struct Factor {
        const void* fine = nullptr;  // [num_outputs, groups]
        Number fine_number = Number::none;
        const void* coarse = nullptr;  // [num_outputs, groups / ratio], or null
        Number coarse_number = Number::none;
        std::int64_t ratio = 1;
    };
    const std::uint8_t* codes = nullptr;  // [num_outputs, num_inputs], each below 2^bits
    int bits = 4;                         // 2 to 8
    std::int64_t num_outputs = 0, num_inputs = 0;
    std::int64_t group = 0;               // 16, a multiple of 32, or num_inputs
    Factor scales, minimums;
    const void* zeros = nullptr;          // [num_outputs, groups] of `zeros_number`, or null: `zero`
    Number zeros_number = Number::none;   // u8 or f32
    float zero = 0.0f;
    const float* table = nullptr;         // [2^bits], or null
};

// Throws std::invalid_argument for what has no panels.
QuantizedForm quantized_form(const QuantizedParts& parts);

// Writes panel `panel` of the weight, form.panel_bytes at `to`.
void pack_quantized(const QuantizedForm& form, const QuantizedParts& parts, std::int64_t panel, unsigned char* to);

// Inputs [0, num_inputs) of a column of a panel, dequantized: scale * value - minimum.
void dequantize_column(const QuantizedForm& form, const unsigned char* panel, std::int64_t column, std::int64_t num_inputs, float* to);

}  // namespace quire
