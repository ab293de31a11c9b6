// Register tiles of the packed linear layer for vector instructions.
//
// A tile is `rows` x `panels` panels of two vectors of float32 sums. Whatever its shape, a sum takes its products in the
// order of k by one kind of instruction (linear.hpp, L1): a fused multiply-add of widened elements, or of bf16 pairs.
// With few rows a tile spans several panels, so that enough independent sums hide the latency. Tiles of the matrix
// unit: linear_amx.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/linear_kernel.hpp"
#include "kernels/simd.hpp"

namespace quire {
namespace {

constexpr int kLineBytes = 64;
constexpr std::int64_t kAnyDepth = std::int64_t{1} << 40, kAnyBytes = kAnyDepth;

// Calls function(integral_constant rows) for least <= rows <= most.
template <int least, int most, class Function>
[[gnu::always_inline]] inline void with_rows(std::int64_t rows, Function&& function) {
    if constexpr (most > least) {
        if (rows < most) return with_rows<least, most - 1>(rows, function);
    }
    function(std::integral_constant<int, most>{});
}

// Calls function(integral_constant i) for i = 0 ... count - 1. Arrays indexed so stay in registers: of a loop that is
// unrolled late, gcc keeps every sum's store to the stack.
template <int count, class Function>
[[gnu::always_inline]] inline void unrolled(Function&& function) {
    [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
        (function(std::integral_constant<int, i>{}), ...);
    }(std::make_integer_sequence<int, count>{});
}

// Copies one row of activations as they are.
template <class From>
void stage_copy(const void* row, std::int64_t count, void* staged, std::int64_t padded) {
    auto* to = static_cast<unsigned char*>(staged);
    std::memcpy(to, row, static_cast<std::size_t>(count) * sizeof(From));
    std::memset(to + count * sizeof(From), 0, static_cast<std::size_t>(padded - count) * sizeof(From));
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

// out[i] = rounded(sums[i] + bias[i]); bias may be null.
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

// What a tile multiplies: Weights of a panel row times one Activation, kStep of k at a time.

// Weights (float, bf16, f16) and activations widened to float32.
template <class S, class WeightType>
struct Widened {
    using Weight = WeightType;
    using Activation = float;
    using Operand = typename S::Vec;
    static constexpr int kStep = 1;
    static constexpr PanelLayout kLayout = std::is_same_v<Weight, bf16> ? PanelLayout::split_pairs : PanelLayout::rows;

    static void load(const Weight* from, Operand& low, Operand& high) {
        if constexpr (std::is_same_v<Weight, bf16>) {
            S::load_split_pairs(from, low, high);
        } else {
            low = S::load(from);
            high = S::load(from + S::kWidth);
        }
    }
    static Operand broadcast(const Activation* from) { return S::broadcast(*from); }
    static typename S::Vec add(typename S::Vec sum, const Operand& a, const Operand& w) { return S::fma(a, w, sum); }
};

// bf16 pairs along k (vdpbf16ps).
template <class S>
struct Paired {
    using Weight = bf16;
    using Activation = bf16;
    using Operand = typename S::Pairs;
    static constexpr int kStep = 2;
    static constexpr PanelLayout kLayout = PanelLayout::depth_pairs;

    static void load(const Weight* from, Operand& low, Operand& high) {
        low = S::load_pairs(from);
        high = S::load_pairs(from + 2 * S::kWidth);
    }
    static Operand broadcast(const Activation* from) { return S::broadcast_pair(from); }
    static typename S::Vec add(typename S::Vec sum, const Operand& a, const Operand& w) { return S::dot(sum, a, w); }
};

// What depends on the caches of the processors that run a variant, not on its instructions.
struct Tuning {
    int ahead_bytes;       // LinearKernel's
    bool ahead_to_second;  // into the second cache, else the first
    int fetching_tiles;    // of many rows: over how many of a panel's tiles the fetching of what comes next is spread
    std::int64_t many_range, pass_bytes;  // LinearKernel's
};
// Measured on Zen 4 (avx512_bf16) and on AVX2; Zen 5 reads better from further ahead: kZen5AheadBytes.
constexpr Tuning kCommon{1024, false, 2, 256, 240 << 10};
// Measured on Emerald Rapids: asked for a page of 4 KiB ahead, 4 to 12 rows took 15 to 25 % less time (bf16; float32 10 to 15 %),
// 1 and 2 rows as long as before; 1 KiB ahead the second cache was no better than the first. Probably because the second
// cache's own prefetcher stops at the end of a page.
// Fetching spread over six tiles instead of two: float32 takes 7 % less time at 32 rows, 6 to 12 at 64, 4 at 128; bf16 as long as before.
// All of K at once, from a second cache of 2 MiB (one core, K of 1 024 to 3 072): sums that are set down and taken up again after every 256
// cost 5 to 8 % of the time of many rows; rows of 480 KiB, not 1 to 3 MiB, another 3 to 8.
constexpr Tuning kIntel{4096, true, 6, 4096, 480 << 10};
// Two threads, seven layers of 31 MB: 8 rows 0.63 instead of 0.69 ms, 12 rows 0.63 instead of 0.74 (bf16; float32 1.23 instead of 1.35, 1.25 instead
// of 1.44); 4 and 16 KiB ahead, or into the second cache, up to 6 % slower.
constexpr std::int64_t kZen5AheadBytes = 8192;

template <class S, class Form, Tuning tuning>
struct VectorTiles {
    using Vec = typename S::Vec;
    using Weight = typename Form::Weight;
    using Activation = typename Form::Activation;
    using Operand = typename Form::Operand;
    static constexpr int kColumns = 2 * S::kWidth;
    // Measured on AVX2: widening bf16 takes a register for its mask, and a sixth row would spill.
    static constexpr bool kWidensBf16 = Form::kLayout == PanelLayout::split_pairs;
    static constexpr int kRows = S::kRegisters == 32 ? 12 : kWidensBf16 ? 5 : 6;
    static constexpr int kStepBytes = kColumns * Form::kStep * static_cast<int>(sizeof(Weight));
    static constexpr int kUnrollBytes = S::kRegisters == 32 || kWidensBf16 ? 2 * kLineBytes : kLineBytes;
    static constexpr int kUnroll = kUnrollBytes > kStepBytes ? kUnrollBytes / kStepBytes : 1;
    static constexpr int kLines = kUnroll * kStepBytes / kLineBytes;  // of a panel in one turn of the loop
    static constexpr int kBaseRows = 4;  // rows to an address register: with one for each row, gcc runs out of them

    // Measured on Zen 4 and Zen 5: with up to 3 rows of pairs its own prefetching reads as fast as the memory gives, and with many rows
    // of pairs a tile takes long enough to hide the second cache, not the memory.
    static constexpr bool fetches_ahead(int rows) { return Form::kStep == 1 || S::kRegisters != 32 || rows > 3; }
    // Its own panels `ahead_bytes` before their use, or in every turn of the loop the line at `fetch`, which then goes on by `fetch_step`: of what
    // comes next.
    enum class Fetch { none, ahead, next, next_to_second };
    // Many rows: the first tile of a panel keeps its elements, which it has widened, in float32 for the others. Widening takes the units that
    // multiply: 4 to 7 % less time for 33 rows and more (bf16).
    enum class Widen { none, keep, kept };
    static constexpr bool kWidens = Form::kStep == 1 && sizeof(Weight) < sizeof(float);

    template <bool to_second>
    static void prefetch(const unsigned char* line) {
        if constexpr (to_second) {
            S::prefetch_l2(line);
        } else {
            S::prefetch(line);
        }
    }

    template <std::size_t count>
    [[gnu::always_inline]] static void hold(Vec (&low)[count], Vec (&high)[count]) {
        unrolled<static_cast<int>(count)>([&](auto i) __attribute__((always_inline)) {
            low[i] = S::held(low[i]);
            high[i] = S::held(high[i]);
        });
    }

    static void put_line(Weight* to, Vec low, Vec high, bool streams) {
        if (streams) {
            S::stream_pairs(to, S::to_bf16(low, high));
        } else {
            S::store_pairs(to, S::to_bf16(low, high));
        }
    }
    static void finish_line(const float* sums, const Weight* bias, Weight* to, bool streams) {
        Vec low = S::load(sums), high = S::load(sums + S::kWidth);
        if (bias != nullptr) low = S::add(low, S::load(bias)), high = S::add(high, S::load(bias + S::kWidth));
        put_line(to, low, high, streams);
    }

    // Sums of the whole depth of a panel, to the output as they lie in registers. (Zen 5: by way of memory, as finish_tile takes them, products of
    // 2 048 rows took 1 to 2 % longer.)
    template <int rows>
    [[gnu::always_inline]] static void finish_held(const Vec (&low)[rows], const Vec (&high)[rows], unsigned char* to, std::int64_t stride, bool streams) {
        unrolled<rows>([&](auto r) __attribute__((always_inline)) { put_line(reinterpret_cast<Weight*>(to + r * stride), low[r], high[r], streams); });
    }

    // Sums of the whole depth [rows][panels][kColumns], to the output. One function for all tiles: inlined, it was two thirds of their code.
    [[gnu::noinline]] static void finish_tile(const LinearBlock& block, const float* sums, std::int64_t row, int rows, std::int64_t panel, int panels) {
        for (int r = 0; r < rows; ++r) {
            for (int p = 0; p < panels; ++p, sums += kColumns) {
                const std::int64_t first = (panel + p) * kColumns, left = block.out_columns - first;
                const auto* bias = block.bias == nullptr ? nullptr : reinterpret_cast<const Weight*>(block.bias) + first;
                auto* to = reinterpret_cast<Weight*>(block.out + (row + r) * block.out_stride) + first;
                if constexpr (Form::kStep == 2) {  // by the processor's own rounding, a whole line at once
                    if (left >= kColumns) {
                        finish_line(sums, bias, to, block.streams);
                        continue;
                    }
                }
                finish<S, Weight>(sums, bias, to, left < kColumns ? left : kColumns);
            }
        }
    }

    template <int rows, int panels, Fetch how, Widen widen = Widen::none>
    static void tile(const LinearBlock& block, std::int64_t row, std::int64_t panel, const unsigned char* fetch, std::int64_t fetch_step) {
        static_assert(widen == Widen::none || (kWidens && panels == 1));
        const std::int64_t stride = block.activation_stride;
        const unsigned char* x[(rows + kBaseRows - 1) / kBaseRows];
        unrolled<(rows + kBaseRows - 1) / kBaseRows>([&](auto i) __attribute__((always_inline)) {
            x[i] = block.activations + (row + i * kBaseRows) * stride;
            __asm__("" : "+r"(x[i]));  // not to be computed from another one
        });
        const unsigned char* weights[panels];
        unrolled<panels>([&](auto p) __attribute__((always_inline)) { weights[p] = block.panels + (panel + p) * block.panel_stride; });
        float* wide = block.wide;
        float* sums = block.sums + row * block.sums_stride + panel * kColumns;
        Vec low[rows * panels], high[rows * panels];
        unrolled<rows * panels>([&](auto i) __attribute__((always_inline)) {
            const float* from = sums + i / panels * block.sums_stride + i % panels * kColumns;
            low[i] = block.first ? S::zero() : S::load(from);
            high[i] = block.first ? S::zero() : S::load(from + S::kWidth);
        });
        const auto step = [&](auto position) __attribute__((always_inline)) {
            Operand w_low[panels], w_high[panels];
            float* wide_low = wide + position * kColumns;
            if constexpr (widen == Widen::kept) {
                w_low[0] = S::load(wide_low);
                w_high[0] = S::load(wide_low + S::kWidth);
            } else {
                unrolled<panels>([&](auto p) __attribute__((always_inline)) {
                    Form::load(reinterpret_cast<const Weight*>(weights[p] + position * kStepBytes), w_low[p], w_high[p]);
                });
            }
            if constexpr (widen == Widen::keep) {
                S::store(wide_low, w_low[0]);
                S::store(wide_low + S::kWidth, w_high[0]);
            }
            unrolled<rows>([&](auto r) __attribute__((always_inline)) {
                const unsigned char* from = x[r / kBaseRows] + r % kBaseRows * stride;
                const Operand a = Form::broadcast(reinterpret_cast<const Activation*>(from) + position * Form::kStep);
                unrolled<panels>([&](auto p) __attribute__((always_inline)) {
                    constexpr int i = r * panels + p;
                    low[i] = Form::add(low[i], a, w_low[p]);
                    high[i] = Form::add(high[i], a, w_high[p]);
                });
            });
        };
        const auto advance = [&](auto count) __attribute__((always_inline)) {
            for (auto& from : x) from += count * Form::kStep * static_cast<int>(sizeof(Activation));
            for (auto& from : weights) from += count * kStepBytes;
            if constexpr (widen != Widen::none) wide += count * kColumns;
        };
        // Streams side by side share the room of the first cache.
        constexpr std::int64_t kMostAhead = tuning.ahead_to_second ? kAnyBytes : kZen5AheadBytes / panels;
        const std::int64_t ahead = block.ahead_bytes < kMostAhead ? block.ahead_bytes : kMostAhead;
        std::int64_t left = block.depth / Form::kStep;
        for (; left >= kUnroll; left -= kUnroll) {
            if constexpr (how == Fetch::ahead) {
                unrolled<panels * kLines>([&](auto i) __attribute__((always_inline)) {
                    prefetch<tuning.ahead_to_second>(weights[i / kLines] + ahead + i % kLines * kLineBytes);
                });
            } else if constexpr (how != Fetch::none) {
                prefetch<how == Fetch::next_to_second>(fetch);
                fetch += fetch_step;
            }
            unrolled<kUnroll>([&](auto i) __attribute__((always_inline)) {
                step(i);
                // No two steps at once where registers are few: their operands would push sums out.
                if constexpr (kWidensBf16 && S::kRegisters != 32) hold(low, high);
            });
            advance(std::integral_constant<int, kUnroll>{});
        }
        for (; left > 0; --left) {
            step(std::integral_constant<int, 0>{});
            advance(std::integral_constant<int, 1>{});
        }
        const bool finishes = block.out != nullptr;
        if constexpr (Form::kStep == 2 && panels == 1) {
            const std::int64_t first = panel * kColumns;
            if (finishes && block.bias == nullptr && block.out_columns - first >= kColumns) {
                unsigned char* to = block.out + row * block.out_stride + first * static_cast<std::int64_t>(sizeof(Weight));
                return finish_held<rows>(low, high, to, block.out_stride, block.streams);
            }
        }
        float whole[rows * panels * kColumns];
        float* to = finishes ? whole : sums;
        const std::int64_t to_stride = finishes ? panels * kColumns : block.sums_stride;
        unrolled<rows * panels>([&](auto i) __attribute__((always_inline)) {
            S::store(to + i / panels * to_stride + i % panels * kColumns, low[i]);
            S::store(to + i / panels * to_stride + i % panels * kColumns + S::kWidth, high[i]);
        });
        if (finishes) finish_tile(block, whole, row, rows, panel, panels);
    }

    // Few rows: one read of the weights.
    template <int rows>
    static void multiply_few(const LinearBlock& block) {
        constexpr int panels = rows == 1 ? 4 : rows == 2 || (rows == 3 && S::kRegisters == 32) ? 2 : 1;
        constexpr Fetch how = fetches_ahead(rows) ? Fetch::ahead : Fetch::none;
        std::int64_t panel = 0;
        for (; panel + panels <= block.num_panels; panel += panels) tile<rows, panels, how>(block, 0, panel, nullptr, 0);
        for (; panel < block.num_panels; ++panel) tile<rows, 1, how>(block, 0, panel, nullptr, 0);
    }

    static void multiply(const LinearBlock& block) {
        products(block);
        if constexpr (Form::kStep == 2) {
            if (block.streams) S::end_streams();
        }
    }

    static void products(const LinearBlock& block) {
        if (block.rows <= kRows) {
            with_rows<1, kRows>(block.rows, [&](auto rows) { multiply_few<rows()>(block); });
            return;
        }
        if constexpr (Form::kStep == 2) {
            if (block.next_to_second) return products_of_many<Fetch::next_to_second>(block);
        }
        products_of_many<Fetch::next>(block);
    }

    // Tiles of nearly equal heights. The first of a panel fetch what comes after it, in equal parts.
    template <Fetch how>
    static void products_of_many(const LinearBlock& block) {
        const std::int64_t num_tiles = (block.rows + kRows - 1) / kRows;
        const std::int64_t range_bytes = block.depth / Form::kStep * kStepBytes;
        const std::int64_t fetching = num_tiles < tuning.fetching_tiles ? num_tiles : tuning.fetching_tiles;
        const std::int64_t fetch_step = (kLines * kLineBytes + fetching - 1) / fetching;
        for (std::int64_t panel = 0; panel < block.num_panels; ++panel) {
            const unsigned char* next = panel + 1 < block.num_panels ? block.panels + (panel + 1) * block.panel_stride : block.after;
            for (std::int64_t t = 0; t < num_tiles; ++t) {
                const std::int64_t row = block.rows * t / num_tiles, end = block.rows * (t + 1) / num_tiles;
                const unsigned char* fetch = next + (t < fetching ? t : fetching - 1) * range_bytes / fetching;
                with_rows<(kRows + 1) / 2, kRows>(end - row, [&](auto rows) {
                    if constexpr (kWidens) {
                        if (block.wide != nullptr) {
                            return t == 0 ? tile<rows(), 1, how, Widen::keep>(block, row, panel, fetch, fetch_step)
                                          : tile<rows(), 1, how, Widen::kept>(block, row, panel, fetch, fetch_step);
                        }
                    }
                    tile<rows(), 1, how>(block, row, panel, fetch, fetch_step);
                });
            }
        }
    }
};

template <class S, class Form, Tuning tuning>
constexpr LinearKernel vector_kernel() {
    using Own = VectorTiles<S, Form, tuning>;
    constexpr bool is_copy = std::is_same_v<typename Form::Activation, typename Form::Weight>;
    LinearKernel kernel{};
    kernel.layout = Form::kLayout;
    kernel.columns = Own::kColumns;
    kernel.depth = Form::kStep;
    kernel.tile_rows = Own::kRows;
    kernel.many_panels = 4;
    kernel.pass_rows = 240;
    kernel.pass_bytes = Form::kStep == 2 ? kAnyBytes : tuning.pass_bytes;
    // A tile of pairs takes so long for a line of weights that they may come from the second cache: all of K.
    kernel.few_range = Form::kStep == 2 ? kAnyDepth : 256;
    kernel.many_range = Form::kStep == 2 ? kAnyDepth : tuning.many_range;
    kernel.ahead_bytes = tuning.ahead_bytes;
    kernel.next_to_second = Form::kStep == 2;
    kernel.widens = Own::kWidens;
    kernel.staged_bytes = sizeof(typename Form::Activation);
    kernel.stage_is_copy = is_copy;
    if constexpr (is_copy) {
        kernel.stage = stage_copy<typename Form::Weight>;
    } else {
        kernel.stage = stage_float<S, typename Form::Weight>;
    }
    kernel.multiply = Own::multiply;
    return kernel;
}

}  // namespace
}  // namespace quire
