// Products of bf16 rows with panels of codes by vdpbf16ps, which multiplies pairs: quantized_reference.py's order of operations too, where a pair is two
// inputs that follow each other in a sum of even or odd ones (quantized_rows.hpp).
//
// A processor may not round between the two products of a pair: chains_keep_order() tests that. If it does not, codes
// are multiplied in float32.
#pragma once

#include "kernels/quantized_vector.hpp"

namespace quire {
namespace {

// vdpbf16ps adds first the product of the upper halves, then that of the lower ones: what follows in an even or odd input's sum.
template <class S, class Widen>
struct ChainProducts {
    using Vec = typename S::Vec;
    using Operand = typename S::Pairs;
    static constexpr int kInputs = 2;

    static Operand load(const float* from) { return S::load_pairs(reinterpret_cast<const bf16*>(from)); }
    static Operand broadcast(const float* from) { return S::broadcast_pair(reinterpret_cast<const bf16*>(from)); }
    static Vec add_broadcast(const float* from, const Operand& b, Vec sum) { return S::dot_pair(sum, reinterpret_cast<const bf16*>(from), b); }
    static Vec add(const Operand& a, const Operand& b, Vec sum) { return S::dot(sum, a, b); }
    static void widen(const QuantizedForm& form, const unsigned char* codes, const float* zeros, std::int64_t first, std::int64_t count, float* to) {
        Widen::chains(form, codes, zeros, first, count, reinterpret_cast<bf16*>(to));
    }
    template <class Visit>
    [[gnu::always_inline]] static void each_of(const QuantizedForm& form, const unsigned char* codes, const float* zeros, std::int64_t first, std::int64_t count, Visit&& visit) {
        Widen::each_chain(form, codes, zeros, first, count, visit);
    }
};

// As finish_panels, of two panels in whole lines.
template <class Round>
void finish_chains(const LinearBlock& block, const float* sums, std::int64_t panel, std::int64_t panels, std::int64_t row, std::int64_t rows) {
    if (panels == 1) return finish_panels<Round, bf16>(block, sums, panel, 1, row, rows);
    const PanelOutput<Round, true> output(block, panel);
    for (std::int64_t r = row; r < row + rows; ++r) output.put(r, Round::load(sums + r * 16), Round::load(sums + (block.rows + r) * 16));
}

template <class S, class Round, class Widen>
void multiply_chains(const LinearBlock& block) {
    constexpr int in_registers = std::is_same_v<Widen, WidenPlain> ? 0 : kChainRows;
    multiply_rows<S, ChainProducts<S, Widen>, in_registers, kChainParts>(block, finish_chains<Round>);
    if (block.streams) S::end_streams();
}

// S: products; Round: how the output is rounded (that of S takes subnormal numbers for zero).
template <class S, class Round, class Widen>
constexpr LinearKernel chain_quantized_kernel() {
    LinearKernel kernel = quantized_kernel(QuantizedTiles<S, ChainProducts<S, Widen>>::kTaskRows, 2);
    kernel.stage = stage_pairs<true>;
    kernel.stage_sums = stage_sums_of_pairs<Round, true>;
    kernel.multiply = multiply_chains<S, Round, Widen>;
    return kernel;
}

// Whether a pair's products are added one after the other, the upper halves' first, and each sum is rounded: on numbers of which any other way
// gives other bits for one in three.
template <class S>
bool chains_keep_order() {
    std::uint64_t state = 1;
    const auto random = [&] {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<std::uint32_t>(state >> 33);
    };
    for (int round = 0; round < 32; ++round) {
        bf16 a[32], b[32];
        float sums[16], got[16];
        for (int i = 0; i < 32; ++i) {
            a[i].bits = static_cast<std::uint16_t>((random() & 0x807f) | (125 + random() % 4) << 7);
            b[i].bits = static_cast<std::uint16_t>((random() & 0x807f) | (125 + random() % 4) << 7);
        }
        for (float& sum : sums) sum = float_of((random() & 0x7fffff) | (124 + random() % 6) << 23);
        S::store(got, S::dot(S::load(sums), S::load_pairs(a), S::load_pairs(b)));
        for (int i = 0; i < 16; ++i) {
            const float first = to_float(a[2 * i + 1]) * to_float(b[2 * i + 1]), second = to_float(a[2 * i]) * to_float(b[2 * i]);
            const float expected = (sums[i] + first) + second;  // products are exact, and nothing is contracted
            if (bits_of(expected) != bits_of(got[i])) return false;
        }
    }
    return true;
}

}  // namespace
}  // namespace quire
