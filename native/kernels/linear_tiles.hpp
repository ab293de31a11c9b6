// Register tiles of the packed linear layer for vector instructions: float32 sums of widened weights and activations.
//
// A tile is `rows` x `panels` panels of 2 vectors. Whatever its shape, an output's sum takes its products in the order
// of k by one fused multiply-add each (linear.hpp, L1). With few rows a tile spans several panels, so that enough
// independent sums are under way to hide the latency of the multiply-add.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/linear_kernel.hpp"
#include "kernels/simd.hpp"

namespace quire {
namespace {

constexpr std::int64_t kPrefetchBytes = 1024;  // how far ahead of its use a panel is fetched

// The rows of a staged block, one by one or all of a tile: f(integral_constant rows).
template <int most, typename Function>
[[gnu::always_inline]] inline void with_rows(std::int64_t rows, Function&& function) {
    if constexpr (most > 1) {
        if (rows < most) return with_rows<most - 1>(rows, function);
    }
    function(std::integral_constant<int, most>{});
}

// Converts one row of activations of type From to float32.
template <class S, class From>
void stage_float(const void* row, std::int64_t count, void* staged, std::int64_t padded) {
    const auto* from = static_cast<const From*>(row);
    auto* to = static_cast<float*>(staged);
    std::int64_t i = 0;
    for (; i + S::kWidth <= count; i += S::kWidth) S::store(to + i, S::load(from + i));
    const int rest = static_cast<int>(count - i);
    if (rest > 0) S::store_part(to + i, S::load_part(from + i, rest), rest);
    for (i = count; i < padded; ++i) to[i] = 0.0f;
}

template <class S, class To>
void finish(const float* sums, const void* bias, void* out, std::int64_t count) {
    const auto* added = static_cast<const To*>(bias);
    auto* to = static_cast<To*>(out);
    std::int64_t i = 0;
    for (; i + S::kWidth <= count; i += S::kWidth) {
        const auto sum = S::load(sums + i);
        S::store(to + i, added == nullptr ? sum : S::add(sum, S::load(added + i)));
    }
    const int rest = static_cast<int>(count - i);
    if (rest == 0) return;
    const auto sum = S::load_part(sums + i, rest);
    S::store_part(to + i, added == nullptr ? sum : S::add(sum, S::load_part(added + i, rest)), rest);
}

// One row of a panel, widened.
template <class S, class Weight>
[[gnu::always_inline]] inline void load_weights(const Weight* from, typename S::Vec& low, typename S::Vec& high) {
    if constexpr (std::is_same_v<Weight, bf16>) {
        S::load_split_pairs(from, low, high);
    } else {
        low = S::load(from);
        high = S::load(from + S::kWidth);
    }
}

// Panels of Weight (float, bf16, f16), activations staged as float32.
template <class S, class Weight>
struct VectorTiles {
    static constexpr int kColumns = 2 * S::kWidth;
    static constexpr int kRows = S::kRegisters == 32 ? 12 : 6;
    using Vec = typename S::Vec;

    template <int rows, int panels, bool ahead>
    static void tile(const LinearBlock& block, std::int64_t row, std::int64_t panel, const unsigned char* fetch) {
        constexpr int unroll = 128 / (kColumns * sizeof(Weight)) > 0 ? 128 / (kColumns * sizeof(Weight)) : 1;
        const std::int64_t stride = block.activation_stride / 4;
        const float* x = reinterpret_cast<const float*>(block.activations) + row * stride;
        const Weight* weights[panels];
        for (int p = 0; p < panels; ++p) {
            weights[p] = reinterpret_cast<const Weight*>(block.panels + (panel + p) * block.panel_stride);
        }
        const std::int64_t sums_stride = block.sums_stride;
        float* sums = block.sums + row * sums_stride + panel * kColumns;
        Vec low[rows][panels], high[rows][panels];
        for (int r = 0; r < rows; ++r) {
            for (int p = 0; p < panels; ++p) {
                const float* from = sums + r * sums_stride + p * kColumns;
                low[r][p] = block.first ? S::zero() : S::load(from);
                high[r][p] = block.first ? S::zero() : S::load(from + S::kWidth);
            }
        }
        const auto step = [&](std::int64_t k) __attribute__((always_inline)) {
            Vec w_low[panels], w_high[panels];
            for (int p = 0; p < panels; ++p) load_weights<S>(weights[p] + k * kColumns, w_low[p], w_high[p]);
            for (int r = 0; r < rows; ++r) {
                const Vec broadcast = S::broadcast(x[r * stride + k]);
                for (int p = 0; p < panels; ++p) {
                    low[r][p] = S::fma(broadcast, w_low[p], low[r][p]);
                    high[r][p] = S::fma(broadcast, w_high[p], high[r][p]);
                }
            }
        };
        std::int64_t k = 0;
        for (; k + unroll <= block.depth; k += unroll) {
            if constexpr (ahead) {
                for (int p = 0; p < panels; ++p) {
                    const auto* next = reinterpret_cast<const unsigned char*>(weights[p] + k * kColumns) + kPrefetchBytes;
                    __builtin_prefetch(next);
                    __builtin_prefetch(next + 64);
                }
            } else {
                __builtin_prefetch(fetch);
                fetch += 64;
            }
            for (int i = 0; i < unroll; ++i) step(k + i);
        }
        for (; k < block.depth; ++k) step(k);
        for (int r = 0; r < rows; ++r) {
            for (int p = 0; p < panels; ++p) {
                float* to = sums + r * sums_stride + p * kColumns;
                S::store(to, low[r][p]);
                S::store(to + S::kWidth, high[r][p]);
            }
        }
    }

    // Few rows: one read of the weights, fetched ahead.
    template <int rows>
    static void multiply_few(const LinearBlock& block) {
        constexpr int panels = rows == 1 ? 4 : rows <= 3 ? 2 : 1;
        std::int64_t panel = 0;
        for (; panel + panels <= block.num_panels; panel += panels) tile<rows, panels, true>(block, 0, panel, nullptr);
        for (; panel < block.num_panels; ++panel) tile<rows, 1, true>(block, 0, panel, nullptr);
    }

    static void multiply(const LinearBlock& block) {
        if (block.rows <= kRows) {
            with_rows<kRows>(block.rows, [&](auto rows) { multiply_few<rows()>(block); });
            return;
        }
        // Tiles of nearly equal heights. While the first two of a panel run, they fetch what follows the panel's range.
        const std::int64_t num_tiles = (block.rows + kRows - 1) / kRows;
        const std::int64_t range_bytes = block.depth * kColumns * static_cast<std::int64_t>(sizeof(Weight));
        for (std::int64_t panel = 0; panel < block.num_panels; ++panel) {
            const unsigned char* next = block.panels + panel * block.panel_stride + range_bytes;
            for (std::int64_t t = 0; t < num_tiles; ++t) {
                const std::int64_t row = block.rows * t / num_tiles, end = block.rows * (t + 1) / num_tiles;
                const unsigned char* fetch = next + (t < 2 ? t : 1) * range_bytes / 2;
                with_rows<kRows>(end - row, [&](auto rows) { tile<rows(), 1, false>(block, row, panel, fetch); });
            }
        }
    }
};

}  // namespace
}  // namespace quire
