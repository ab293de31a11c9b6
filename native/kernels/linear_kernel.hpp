// A variant's part of the packed linear layer: the form of its panels and two functions. The implementations are
// linear_tiles.hpp, compiled once per variant by linear_variant.cpp; linear.cpp cuts the work up and calls them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/element.hpp"
#include "kernels/isa.hpp"

namespace quire {

struct QuantizedForm;

// Order of a panel's elements; P columns, k runs over K in all of them.
enum class PanelLayout {
    rows,         // [k][P]
    split_pairs,  // [k][P / 2][2], the pair being columns j and j + P / 2: both halves widen from bf16 by one operation
    depth_pairs,  // [k / 2][P][2]: vdpbf16ps
    tiles,        // [k / 32][P / 16][16][16][2]: tiles of tdpbf16ps, 16 pairs along k by 16 columns
};

// Position of (k, column) within a panel, in elements.
constexpr std::int64_t panel_index(PanelLayout layout, std::int64_t columns, std::int64_t k, std::int64_t column) {
    switch (layout) {
        case PanelLayout::rows: return k * columns + column;
        case PanelLayout::split_pairs: {
            const std::int64_t half = columns / 2;
            return k * columns + 2 * (column % half) + column / half;
        }
        case PanelLayout::depth_pairs: return (k / 2) * columns * 2 + column * 2 + k % 2;
        case PanelLayout::tiles: return (k / 32) * columns * 32 + (column / 16) * 512 + (k % 32) / 2 * 32 + (column % 16) * 2 + k % 2;
    }
    return 0;
}

// A product of `rows` staged rows with consecutive panels over one range of K.
struct LinearBlock {
    const unsigned char* activations;  // first staged row, at the range's first k
    std::int64_t activation_stride;    // bytes
    std::int64_t rows;
    const unsigned char* panels;       // first panel, at the range's first k
    std::int64_t panel_stride;         // bytes
    std::int64_t num_panels;
    const unsigned char* after;        // what the thread is likely to read after the last panel, to be asked for before: a panel's range
    std::int64_t ahead_bytes;          // LinearKernel's, and
    bool next_to_second;               // the same
    std::int64_t depth;                // length of the range, a multiple of the kernel's depth
    float* sums;                       // [rows][sums_stride] handed on from range to range, laid out as the kernel likes, for rows up
                                       // to the next multiple of tile_rows
    std::int64_t sums_stride;          // floats
    float* wide;                       // scratch of [depth][columns] for a kernel that `widens`, or null
    bool first;                        // the range begins at k = 0: sums start from zero, else they go on
    // Of the last range; else null.
    unsigned char* out;                // the first row's output of the first panel: rounded(sum + bias)
    std::int64_t out_stride;           // bytes
    std::int64_t out_columns;          // from there on, of which the panels have at most as many
    const unsigned char* bias;         // of the first panel's columns, or null
    const QuantizedForm* form;         // of panels of codes (quantized.hpp), with
    std::int64_t sums_of_x_offset;     // bytes from a staged row to what `stage_sums` has put behind it; null for dense ones
    bool streams;                      // the output passes by the caches: whole lines, aligned
};

struct LinearKernel {
    PanelLayout layout;
    std::int64_t columns;            // of a panel
    std::int64_t depth;              // K is padded to a multiple of it
    std::int64_t tile_rows;          // rows that share one read of the weights
    std::int64_t many_panels;        // of a task of many rows
    std::int64_t pass_rows;          // rows of one pass over the weights at most, and
    std::int64_t pass_bytes;         // staged bytes of these rows in one range: what the second cache keeps for the next panel
    std::int64_t few_range;          // K of a block of up to kFewTiles tiles of rows, a multiple of `depth`
    std::int64_t many_range;         // of a block of more tiles
    std::int64_t ahead_bytes;        // a stream of up to tile_rows rows asks for its weights so far ahead of their use, where it does
    bool next_to_second;             // more rows ask for the next panel by way of the second cache, else of the first
    bool widens;                     // keeps a panel's elements in float32 while many rows pass by
    std::int64_t staged_bytes;       // of one staged activation
    bool stage_is_copy;              // staged activations have the layer's own type
    // Copies one row of `count` activations to `staged` in the kernel's type; zeros up to `padded`.
    void (*stage)(const void* row, std::int64_t count, void* staged, std::int64_t padded);
    // Of kernels for codes, else null: sums of a staged row over blocks, `padded` * 3 / 32 of them.
    void (*stage_sums)(void* staged, std::int64_t padded, float* sums);
    void (*multiply)(const LinearBlock& block);
};

// One per variant; null never.
#define QUIRE_DECLARE_LINEAR(variant) const LinearKernel& linear_kernel_##variant(Element element);
QUIRE_DECLARE_LINEAR(portable)
QUIRE_DECLARE_LINEAR(emulated_avx512)
QUIRE_DECLARE_LINEAR(emulated_avx512_bf16)  // bf16 only
QUIRE_DECLARE_LINEAR(emulated_amx_bf16)     // bf16 only
#if defined(__x86_64__)
QUIRE_DECLARE_LINEAR(avx2)
QUIRE_DECLARE_LINEAR(avx512)
QUIRE_DECLARE_LINEAR(avx512_bf16)
QUIRE_DECLARE_LINEAR(amx_bf16)  // bf16 only
#endif
#undef QUIRE_DECLARE_LINEAR

// Those for codes (quantized_variant.cpp): whole panels at a time, all of K.
#define QUIRE_DECLARE_QUANTIZED(variant) const LinearKernel& quantized_kernel_##variant(Element element);
QUIRE_DECLARE_QUANTIZED(portable)
QUIRE_DECLARE_QUANTIZED(emulated_avx512)
QUIRE_DECLARE_QUANTIZED(emulated_avx512_bf16)  // exact values by bf16 only
QUIRE_DECLARE_QUANTIZED(emulated_amx_bf16)     // the same
#if defined(__x86_64__)
QUIRE_DECLARE_QUANTIZED(avx2)
QUIRE_DECLARE_QUANTIZED(avx512)
QUIRE_DECLARE_QUANTIZED(avx512_bf16)  // exact values by bf16 only
QUIRE_DECLARE_QUANTIZED(amx_bf16)     // the same
bool pairs_keep_order_avx512_bf16();  // whether this processor's vdpbf16ps gives the bits of the definition
#endif
#undef QUIRE_DECLARE_QUANTIZED

}  // namespace quire
