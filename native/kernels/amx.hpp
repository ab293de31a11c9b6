// AMX: the eight tile registers of a thread and the tile products of bf16 and of int8, real and emulated behind one interface.
//
// Not here: permission to use it (isa.hpp asks the operating system) and blocking of products (linear, attention).
//
//     Tiles tiles(TileConfig()                     // or EmulatedTiles
//                     .tile(0, 16, 64)             // C: 16 rows of 16 float32
//                     .tile(1, 16, 64)             // A: 16 rows of 32 bfloat16
//                     .tile(2, 16, 64));           // B: 32 x 16 bfloat16 as 16 rows of 16 pairs (2k, 2k + 1)
//     tiles.zero<0>(); tiles.load<1>(a, a_stride); tiles.load<2>(b, 64); tiles.dot_bf16<0, 1, 2>(); tiles.store<0>(c, 64);
//
// Invariants:
//   X1  C += A B needs rows(A) = rows(C), row_bytes(A) = 4 rows(B), row_bytes(B) = row_bytes(C). The processor faults
//       otherwise; the emulation stops the process with the shapes.
//   X2  A row of C depends only on that row of A, never on the number of rows of the tile.
//   X3  The object configures the calling thread when it is made and releases its tiles when it goes; one at a time
//       and thread, made inside a task of the thread pool. Configuring costs in the order of 50 ns, a product 16 cycles.
//   X4  Internal linkage: every variant keeps its own copy, since the linker would merge equal names that were compiled
//       for different processors.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace quire {
namespace {

// Memory image of ldtilecfg: palette 1, eight tiles of at most 16 rows of 64 bytes. Unnamed tiles stay unusable.
class TileConfig {
  public:
    TileConfig& tile(int index, int rows, int row_bytes) {
        row_bytes_[index] = static_cast<std::uint16_t>(row_bytes);
        rows_[index] = static_cast<std::uint8_t>(rows);
        return *this;
    }
    int rows(int index) const { return rows_[index]; }
    int row_bytes(int index) const { return row_bytes_[index]; }

  private:
    std::uint8_t palette_ = 1;
    std::uint8_t start_row_ = 0;
    std::uint8_t reserved_[14] = {};
    std::uint16_t row_bytes_[16] = {};
    std::uint8_t rows_[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

#if defined(__x86_64__)

// The processor's tiles. Instructions are written as assembly because the compilers' intrinsics take a literal tile
// number, not a template's; so this header needs no compile flag, but only the amx variants may run it.
class Tiles {
  public:
    explicit Tiles(const TileConfig& config) { configure(config); }
    ~Tiles() { __asm__ volatile("tilerelease" ::: "memory"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    // Forgets the contents of all tiles.
    void configure(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory"); }

    template <int tile>
    void zero() {
        __asm__ volatile("tilezero %%tmm%c0" ::"i"(tile));
    }
    // Rows lie `stride_bytes` apart; reads exactly rows * row_bytes bytes.
    template <int tile>
    void load(const void* base, std::int64_t stride_bytes) {
        __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(stride_bytes), "i"(tile) : "memory");
    }
    // The same with a hint that the data will not be used again soon.
    template <int tile>
    void load_streamed(const void* base, std::int64_t stride_bytes) {
        __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(stride_bytes), "i"(tile) : "memory");
    }
    template <int tile>
    void store(void* base, std::int64_t stride_bytes) {
        __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(base), "r"(stride_bytes), "i"(tile) : "memory");
    }
    // float32 c += bfloat16 a * bfloat16 b (tdpbf16ps).
    template <int c, int a, int b>
    void dot_bf16() {
        __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
    }
    // int32 c += int8 a * int8 b (tdpbssd), four of each side by side where bfloat16 has a pair.
    template <int c, int a, int b>
    void dot_int8() {
        __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
    }
};

#endif

// The arithmetic of the tiles in plain C++, after the operation section of TDPBF16PS in Intel's Software Developer's
// Manual: the even and the odd elements of a row are summed apart along k, then added to each other and to C; subnormal
// inputs and results count as zero. A product of two bfloat16 is exact in float32, so multiply and add round as the
// processor's fused operation does.
class EmulatedTiles {
  public:
    explicit EmulatedTiles(const TileConfig& config) { configure(config); }
    EmulatedTiles(const EmulatedTiles&) = delete;
    EmulatedTiles& operator=(const EmulatedTiles&) = delete;

    void configure(const TileConfig& config) {
        config_ = config;
        std::memset(data_, 0, sizeof data_);
    }

    template <int tile>
    void zero() {
        require_configured(tile);
        std::memset(data_[tile], 0, sizeof data_[tile]);
    }
    template <int tile>
    void load(const void* base, std::int64_t stride_bytes) {
        require_configured(tile);
        const auto* from = static_cast<const std::uint8_t*>(base);
        for (int row = 0; row < config_.rows(tile); ++row) {
            std::memcpy(data_[tile] + row * kRowBytes, from + row * stride_bytes, config_.row_bytes(tile));
        }
    }
    template <int tile>
    void load_streamed(const void* base, std::int64_t stride_bytes) {
        load<tile>(base, stride_bytes);
    }
    template <int tile>
    void store(void* base, std::int64_t stride_bytes) {
        require_configured(tile);
        auto* to = static_cast<std::uint8_t*>(base);
        for (int row = 0; row < config_.rows(tile); ++row) {
            std::memcpy(to + row * stride_bytes, data_[tile] + row * kRowBytes, config_.row_bytes(tile));
        }
    }
    template <int c, int a, int b>
    void dot_bf16() {
        static_assert(c != a && c != b && a != b, "the processor faults where two operands are one tile");
        require_shapes(c, a, b);
        const int num_pairs = config_.rows(b), columns = config_.row_bytes(c) / 4;
        for (int row = 0; row < config_.rows(c); ++row) {
            float even[kColumns] = {}, odd[kColumns] = {}, sums[kColumns];
            const std::uint8_t* a_row = data_[a] + row * kRowBytes;
            for (int k = 0; k < num_pairs; ++k) {
                const std::uint32_t a_pair = word(a_row, k);
                const float a_even = widen(a_pair << 16), a_odd = widen(a_pair & 0xffff0000u);
                const std::uint8_t* b_row = data_[b] + k * kRowBytes;
                for (int n = 0; n < kColumns; ++n) {
                    const std::uint32_t b_pair = word(b_row, n);
                    even[n] = flush(even[n] + a_even * widen(b_pair << 16));
                    odd[n] = flush(odd[n] + a_odd * widen(b_pair & 0xffff0000u));
                }
            }
            std::uint8_t* c_row = data_[c] + row * kRowBytes;
            std::memcpy(sums, c_row, sizeof sums);
            for (int n = 0; n < columns; ++n) sums[n] = flush(flush(sums[n]) + flush(even[n] + odd[n]));
            std::memcpy(c_row, sums, sizeof sums);
        }
    }

    template <int c, int a, int b>
    void dot_int8() {
        static_assert(c != a && c != b && a != b, "the processor faults where two operands are one tile");
        require_shapes(c, a, b);
        const int columns = config_.row_bytes(c) / 4;
        for (int row = 0; row < config_.rows(c); ++row) {
            std::int32_t sums[kColumns];
            std::memcpy(sums, data_[c] + row * kRowBytes, sizeof sums);
            for (int k = 0; k < config_.row_bytes(a); ++k) {
                const auto* b_row = data_[b] + k / 4 * kRowBytes + k % 4;
                const int number = static_cast<std::int8_t>(data_[a][row * kRowBytes + k]);
                for (int n = 0; n < columns; ++n) sums[n] += number * static_cast<std::int8_t>(b_row[4 * n]);
            }
            std::memcpy(data_[c] + row * kRowBytes, sums, sizeof sums);
        }
    }

  private:
    static constexpr int kTiles = 8, kRowBytes = 64, kColumns = 16;

    static std::uint32_t word(const std::uint8_t* row, int index) {
        std::uint32_t bits;
        std::memcpy(&bits, row + 4 * index, sizeof bits);
        return bits;
    }
    static float flush(float value) {
        constexpr float kSmallestNormal = 1.17549435e-38f;
        return value < kSmallestNormal && value > -kSmallestNormal ? value * 0.0f : value;
    }
    static float widen(std::uint32_t bits) {
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return flush(value);
    }
    void require_configured(int tile) const {
        if (config_.rows(tile) >= 1 && config_.rows(tile) <= 16 && config_.row_bytes(tile) >= 4 && config_.row_bytes(tile) <= 64) return;
        std::fprintf(stderr, "quire: expected tile %d to have 1 to 16 rows of 4 to 64 bytes, got %d rows of %d\n", tile,
                     config_.rows(tile), config_.row_bytes(tile));
        std::abort();
    }
    void require_shapes(int c, int a, int b) const {
        for (const int tile : {c, a, b}) require_configured(tile);
        if (config_.rows(a) == config_.rows(c) && config_.row_bytes(a) == 4 * config_.rows(b) && config_.row_bytes(b) == config_.row_bytes(c))
            return;
        std::fprintf(stderr, "quire: tile shapes do not match: c %d x %d bytes, a %d x %d, b %d x %d\n", config_.rows(c),
                     config_.row_bytes(c), config_.rows(a), config_.row_bytes(a), config_.rows(b), config_.row_bytes(b));
        std::abort();
    }

    TileConfig config_;
    alignas(64) std::uint8_t data_[kTiles][16 * kRowBytes];
};

}  // namespace
}  // namespace quire
