// Decodes codes of a panel: into registers for a few rows, or into a thread's scratch, a few hundred inputs at a time,
// which stay in the first cache:
//
//     floats   [input][16 columns] float32, for vector instructions
//     pairs    [input / 2][16 columns][2] bf16, for the matrix unit
//     chains   the same, a pair being inputs 4 j + 2 and 4 j, then 4 j + 3 and 4 j + 1 (quantized_rows.hpp), for vdpbf16ps
//
// The result is exact, so it is the same in every instruction set. An integer code becomes a float in the low bits of
// 2^23, from which 2^23 + zero is subtracted; codes of 4 bits with one zero, and tables of 16, by a table in registers.
#pragma once

#include "kernels/linear_kernel.hpp"
#include "kernels/quantized_codes.hpp"
#include "kernels/simd.hpp"

#include <type_traits>
#include <utility>

namespace quire {
namespace {

using Values = QuantizedForm::Values;

constexpr float kShift = 0x1p23f;           // a float whose last bit is 1
constexpr std::uint32_t kShiftBits = 0x4b000000u;
constexpr std::int64_t kBlocksAhead = 16;  // that codes are asked for ahead of their use

// Makes a block of 32 inputs: its codes, the zeros of its group (behind them those of the next, where a block has two), where to.
template <class To>
using WidenBlock = void (*)(const QuantizedForm& form, const unsigned char* block, const float* zeros, To* to);

// The group of a block and of those after it: a division for each would take as long as widening it.
class GroupOfBlock {
  public:
    GroupOfBlock(const QuantizedForm& form, std::int64_t block) : groups_(form.halves() ? 2 : 1), each_(form.halves() ? 1 : form.group / 32) {
        group_ = block / each_ * groups_, within_ = block % each_;
    }
    std::int64_t operator()() const { return group_; }
    void next() {
        if (++within_ == each_) within_ = 0, group_ += groups_;
    }

  private:
    std::int64_t groups_, each_, group_, within_;
};

// Zeros as they are taken off, of one column in `zeros`: 2^23 + zero of whole ones, else the zero.
inline float taken_off(const QuantizedForm& form, float zero) { return form.values == Values::integer ? kShift + zero : zero; }

// One code after the other: for processors of which nothing is known.
struct WidenPlain {
    // Blocks [first, first + count) of a panel. zeros: [groups][16] as `taken_off` gives them. Inlined into its caller, it takes 15 % longer for 4 bits.
    [[gnu::noinline]] static void floats(const QuantizedForm& form, const unsigned char* codes, const float* zeros, std::int64_t first, std::int64_t count, float* to) {
        for (std::int64_t b = 0; b < count; ++b) {
            const unsigned char* block = codes + (first + b) * form.block_bytes();
            for (std::int64_t k = 0; k < 32; ++k) {
                const std::int64_t group = ((first + b) * 32 + k) / form.group;
                for (std::int64_t column = 0; column < 16; ++column) to[(b * 32 + k) * 16 + column] = value_of(form, block, k, column, zeros[group * 16 + column]);
            }
        }
    }
    static WidenBlock<bf16> pairs(const QuantizedForm&) {
        return [](const QuantizedForm& form, const unsigned char* block, const float* zeros, bf16* to) {
            for (std::int64_t k = 0; k < 32; ++k) {
                for (std::int64_t column = 0; column < 16; ++column) {
                    const float value = value_of(form, block, k, column, zeros[(form.halves() ? k / 16 : 0) * 16 + column]);
                    to[k / 2 * 32 + column * 2 + k % 2].bits = static_cast<std::uint16_t>(bits_of(value) >> 16);
                }
            }
        };
    }

    static void chains(const QuantizedForm& form, const unsigned char* codes, const float* zeros, std::int64_t first, std::int64_t count, bf16* to) {
        for (std::int64_t i = 0; i < count * 32 * 16; ++i) {
            const std::int64_t b = first + i / 512, k = i / 16 % 32, column = i % 16, group = (b * 32 + k) / form.group;
            const float value = value_of(form, codes + b * form.block_bytes(), k, column, zeros[group * 16 + column]);
            to[i / 512 * 512 + (k / 4 * 2 + k % 2) * 32 + column * 2 + (k % 4 < 2 ? 1 : 0)].bits = static_cast<std::uint16_t>(bits_of(value) >> 16);
        }
    }

  private:
    static float value_of(const QuantizedForm& form, const unsigned char* block, std::int64_t k, std::int64_t column, float zero) {
        return value_at(form, code_at(form.bits, block, k, column), form.values == Values::integer ? zero - kShift : zero);
    }
};

}  // namespace
}  // namespace quire

#if defined(__AVX512F__)
#include "kernels/simd_avx512.hpp"
#elif defined(__AVX2__)
#include "kernels/simd_avx2.hpp"
#endif

namespace quire {
namespace {

#if defined(__AVX512F__)

struct WidenAvx512 {
    static void floats(const QuantizedForm& form, const unsigned char* codes, const float* zeros, std::int64_t first, std::int64_t count, float* to) {
        each_of<false>(form, codes, zeros, first, count, [to](std::int64_t b, auto, auto p, __m512 even, __m512 odd) __attribute__((always_inline)) {
            float* at = to + (b * 32 + 2 * p) * 16;
            _mm512_storeu_ps(at, even);
            _mm512_storeu_ps(at + 16, odd);
        });
    }
    static WidenBlock<bf16> pairs(const QuantizedForm& form) {
        WidenBlock<bf16> found = nullptr;
        with_maker<false>(form, [&]<class Make>(std::type_identity<Make>) { found = put_block<Make>; });
        return found;
    }
    static void chains(const QuantizedForm& form, const unsigned char* codes, const float* zeros, std::int64_t first, std::int64_t count, bf16* to) {
        each_chain(form, codes, zeros, first, count, [to](std::int64_t b, auto, auto j, __m512i even, __m512i odd) __attribute__((always_inline)) {
            bf16* at = to + (b * 8 + j) * 64;
            _mm512_storeu_si512(at, even);
            _mm512_storeu_si512(at + 32, odd);
        });
    }

  private:
    template <int by>
    static __m512i moved(__m512i words) {  // within each half of a word, up where `by` is negative
        if constexpr (by > 0) return _mm512_srli_epi16(words, by);
        if constexpr (by < 0) return _mm512_slli_epi16(words, -by);
        return words;
    }
    static __m512i line(const unsigned char* from) { return _mm512_loadu_si512(from); }

    // The codes of inputs 2 p and 2 p + 1 of a block in the halves of each word; of 4 bits, and where not asked for, with what lies above them.
    template <int bits, int p, bool alone = true>
    static __m512i codes_at(const unsigned char* block) {
        if constexpr (bits == 8) {
            const __m512i words = line(block + p / 2 * 64);
            return p % 2 == 0 ? _mm512_and_si512(words, _mm512_set1_epi16(0xff)) : _mm512_srli_epi16(words, 8);
        } else {
            const __m512i low = moved<p % 4 * 4>(line(block + p / 4 * 64));
            if constexpr (bits == 4) return low;
            // low where the mask is set, else upper: 0xe4 with the mask as the selector
            if constexpr (bits == 5) {
                const __m512i upper = moved<p - 4>(line(block + kLowPlaneBytes));
                const __m512i both = _mm512_ternarylogic_epi32(_mm512_set1_epi16(0xf), low, upper, 0xca);
                return alone ? _mm512_and_si512(both, _mm512_set1_epi16(0x1f)) : both;
            } else {
                const __m512i upper = moved<p % 8 * 2 - 4>(line(block + kLowPlaneBytes + p / 8 * 64));
                const __m512i both = _mm512_ternarylogic_epi32(_mm512_set1_epi16(0xf), low, upper, 0xca);
                return alone ? _mm512_and_si512(both, _mm512_set1_epi16(0x3f)) : both;
            }
        }
    }

    struct Plain {  // codes in words -> their floats
        __m512 even, odd;
    };

    // Of whole codes and those with fractions for zeros.
    template <int bits, bool whole>
    static Plain numbers(__m512i words, __m512 zeros) {
        if constexpr (bits == 4) words = _mm512_and_si512(words, _mm512_set1_epi16(0xf));
        const __m512i shift = _mm512_set1_epi32(static_cast<int>(kShiftBits));
        // (words & 0xffff) | shift
        const __m512i even = _mm512_ternarylogic_epi32(words, _mm512_set1_epi32(0xffff), shift, 0xea), odd = _mm512_or_si512(_mm512_srli_epi32(words, 16), shift);
        __m512 low = _mm512_castsi512_ps(even), high = _mm512_castsi512_ps(odd);
        if constexpr (!whole) low = _mm512_sub_ps(low, _mm512_set1_ps(kShift)), high = _mm512_sub_ps(high, _mm512_set1_ps(kShift));
        return {_mm512_sub_ps(low, zeros), _mm512_sub_ps(high, zeros)};
    }
    static Plain looked_up(__m512i words, __m512 table) {  // of 16: the low four bits of a lane count
        return {_mm512_permutexvar_ps(words, table), _mm512_permutexvar_ps(_mm512_srli_epi32(words, 16), table)};
    }
    static Plain gathered(__m512i words, const float* table) {
        return {_mm512_i32gather_ps(_mm512_and_si512(words, _mm512_set1_epi32(0xffff)), table, 4), _mm512_i32gather_ps(_mm512_srli_epi32(words, 16), table, 4)};
    }
    // Floats that are bf16 -> pairs.
    static __m512i paired(Plain numbers) {
        return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(numbers.even), 16), _mm512_castps_si512(numbers.odd));
    }

    template <class Function>
    [[gnu::always_inline]] static void of_bits(const QuantizedForm& form, Function&& function) {
        switch (form.bits) {
            case 4: return function(std::integral_constant<int, 4>{});
            case 5: return function(std::integral_constant<int, 5>{});
            case 6: return function(std::integral_constant<int, 6>{});
            default: return function(std::integral_constant<int, 8>{});
        }
    }
    template <int count, class Function>
    [[gnu::always_inline]] static void each_below(Function&& function) {
        [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) { (function(std::integral_constant<int, i>{}), ...); }(std::make_integer_sequence<int, count>{});
    }
    template <int bits>
    [[gnu::always_inline]] static void ask_ahead_of(const unsigned char* block) {
        each_below<bits>([&](auto i) __attribute__((always_inline)) { Avx512::prefetch(block + kBlocksAhead * bits * 64 + i * 64); });
    }

  public:
    // Calls visit(b, 0, p, even, odd) for pair p of the inputs of each of these blocks; 0 and p are integral_constants. exact: of no form whose
    // values are not, so that there is no code for them.
    template <bool exact, class Visit>
    [[gnu::always_inline]] static void each_of(const QuantizedForm& form, const unsigned char* codes, const float* zeros, std::int64_t first, std::int64_t count, Visit&& visit) {
        of_bits(form, [&](auto bits) __attribute__((always_inline)) { each_of_bits<bits(), exact>(form, codes, zeros, first, count, visit); });
    }
    // Calls visit(b, 0, j, even, odd) for the chains' pairs of inputs 4 j to 4 j + 3 of each of these blocks.
    template <class Visit>
    [[gnu::always_inline]] static void each_chain(const QuantizedForm& form, const unsigned char* codes, const float* zeros, std::int64_t first, std::int64_t count, Visit&& visit) {
        const auto by = [&]<class Make>(std::type_identity<Make>) __attribute__((always_inline)) {
            const Make make(form);
            GroupOfBlock group(form, first);
            for (std::int64_t b = 0; b < count; ++b, group.next()) {
                const unsigned char* block = codes + (first + b) * Make::kBits * 64;
                ask_ahead_of<Make::kBits>(block);
                const float* own = zeros + group() * 16;
                const auto zero = Make::zero_of(own), second = Make::zero_of(own + (form.halves() ? 16 : 0));
                each_below<8>([&](auto j) __attribute__((always_inline)) {
                    __m512i even, odd;
                    make.template fours<j()>(block, j < 4 ? zero : second, even, odd);
                    visit(b, std::integral_constant<int, 0>{}, j, even, odd);
                });
            }
        };
        with_maker<true>(form, by);
    }

  private:
    template <int bits, bool exact, class Visit>
    [[gnu::always_inline]] static void each_of_bits(const QuantizedForm& form, const unsigned char* codes, const float* zeros, std::int64_t first, std::int64_t count, Visit&& visit) {
        const auto blocks = [&](auto&& make) __attribute__((always_inline)) {
            GroupOfBlock group(form, first);
            for (std::int64_t b = 0; b < count; ++b, group.next()) {
                const unsigned char* block = codes + (first + b) * bits * 64;
                ask_ahead_of<bits>(block);
                const __m512 zero[2] = {_mm512_loadu_ps(zeros + group() * 16), _mm512_loadu_ps(zeros + (group() + (form.halves() ? 1 : 0)) * 16)};
                each_below<16>([&](auto p) __attribute__((always_inline)) {
                    const Plain made = make(codes_at<bits, p>(block), zero[p / 8]);
                    visit(b, std::integral_constant<int, 0>{}, p, made.even, made.odd);
                });
            }
        };
        if (form.values == Values::integer) return blocks([](__m512i words, __m512 zero) __attribute__((always_inline)) { return numbers<bits, true>(words, zero); });
        if constexpr (!exact) {
            if (form.values == Values::fractional) return blocks([](__m512i words, __m512 zero) __attribute__((always_inline)) { return numbers<bits, false>(words, zero); });
        }
        if constexpr (bits == 4) {
            const __m512 table = _mm512_loadu_ps(form.table);
            return blocks([table](__m512i words, __m512) __attribute__((always_inline)) { return looked_up(words, table); });
        } else if constexpr (bits == 8) {
            return blocks([&form](__m512i words, __m512) __attribute__((always_inline)) { return gathered(words, form.table); });
        }
    }

    // Pairs 2 j and 2 j + 1 of a block -> what the two chains have of them.
    static void chain(__m512i& first, __m512i& second) {
        const __m512i even = _mm512_mask_blend_epi16(0xaaaaaaaau, second, _mm512_slli_epi32(first, 16));
        second = _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(second, 16), first);
        first = even;
    }
    // The codes of pairs 2 j and 2 j + 1, or of the chains' pairs, with what may lie above them.
    template <bool chained, int bits, int j>
    static void four_codes(const unsigned char* block, __m512i& first, __m512i& second) {
        if constexpr (chained && bits == 4) {  // a half of a word has four inputs of one chain: it comes to lie in both halves
            const __m512i words = line(block + j / 2 * 64);
            const __m512i lower = _mm512_set4_epi32(0x0d0c0d0c, 0x09080908, 0x05040504, 0x01000100), upper = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
            const __m512i by = _mm512_set1_epi32(j % 2 == 0 ? 0x00000004 : 0x0008000c);
            first = _mm512_srlv_epi16(_mm512_shuffle_epi8(words, lower), by);
            second = _mm512_srlv_epi16(_mm512_shuffle_epi8(words, upper), by);
        } else {
            first = codes_at<bits, 2 * j, false>(block), second = codes_at<bits, 2 * j + 1, false>(block);
            if constexpr (chained) chain(first, second);
        }
    }

    // Makers of pairs 2 j and 2 j + 1 of a block, or of the chains' pairs: fours<j>. `zero`: what zero_of makes of the zeros of their group.

    // What lies above a code in its half of a word is not looked at: entries repeat, where a code has fewer bits than the table is asked with.
    template <bool chained, int bits>
    struct ByCode {
        static constexpr int kBits = bits;
        struct Zero {};
        __m512i low, high;
        explicit ByCode(const QuantizedForm& form) : low(_mm512_loadu_si512(form.entries)), high(_mm512_loadu_si512(form.entries + 32)) {}
        static Zero zero_of(const float*) { return {}; }
        __m512i looked_up(__m512i codes) const { return bits == 6 ? _mm512_permutex2var_epi16(low, codes, high) : _mm512_permutexvar_epi16(codes, low); }
        template <int j>
        void fours(const unsigned char* block, Zero, __m512i& first, __m512i& second) const {
            four_codes<chained, bits, j>(block, first, second);
            first = looked_up(first), second = looked_up(second);
        }
    };
    // Codes of 4 bits less zeros of at most 16: five bits, one of them the sign.
    template <bool chained>
    struct ByDifference {
        static constexpr int kBits = 4;
        using Zero = __m512i;
        __m512i table;
        explicit ByDifference(const QuantizedForm& form) : table(_mm512_loadu_si512(form.entries)) {}
        static Zero zero_of(const float* zeros) {  // 2^23 + zero: its low bits are the zero
            const __m512i words = _mm512_castps_si512(_mm512_loadu_ps(zeros));
            return _mm512_or_si512(_mm512_and_si512(words, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(words, 16));
        }
        __m512i looked_up(__m512i codes, __m512i zero) const {
            return _mm512_permutexvar_epi16(_mm512_sub_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0xf)), zero), table);
        }
        template <int j>
        void fours(const unsigned char* block, Zero zero, __m512i& first, __m512i& second) const {
            four_codes<chained, 4, j>(block, first, second);
            first = looked_up(first, zero), second = looked_up(second, zero);
        }
    };
    template <bool chained, int bits>
    struct Reckoned {
        static constexpr int kBits = bits;
        using Zero = __m512;
        explicit Reckoned(const QuantizedForm&) {}
        static Zero zero_of(const float* zeros) { return _mm512_loadu_ps(zeros); }
        template <int j>
        void fours(const unsigned char* block, Zero zero, __m512i& first, __m512i& second) const {
            first = paired(numbers<bits, true>(codes_at<bits, 2 * j>(block), zero)), second = paired(numbers<bits, true>(codes_at<bits, 2 * j + 1>(block), zero));
            if constexpr (chained) chain(first, second);
        }
    };
    // Whole codes of 8 bits: each byte of a word comes to lie in the low bits of a float of its own.
    template <bool chained>
    struct OfBytes {
        static constexpr int kBits = 8;
        using Zero = __m512;
        explicit OfBytes(const QuantizedForm&) {}
        static Zero zero_of(const float* zeros) { return _mm512_loadu_ps(zeros); }
        template <int j>
        void fours(const unsigned char* block, Zero zero, __m512i& first, __m512i& last) const {
            const __m512i shift = _mm512_set1_epi32(static_cast<int>(kShiftBits));
            const __m512i second = _mm512_set4_epi32(0x0c0c0c0d, 0x08080809, 0x04040405, 0x00000001), third = _mm512_add_epi32(second, _mm512_set1_epi32(1));
            const __m512i upper = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
            constexpr __mmask64 lowest = 0x1111111111111111u, lower_half = 0x3333333333333333u;
            const auto number = [&](__m512i bits) __attribute__((always_inline)) { return _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(bits), zero)); };
            const auto pair = [&](__m512i even, __m512i odd) __attribute__((always_inline)) { return _mm512_mask_shuffle_epi8(odd, lower_half, even, upper); };
            const __m512i words = line(block + j * 64);
            const __m512i a = number(_mm512_ternarylogic_epi32(words, _mm512_set1_epi32(0xff), shift, 0xea));
            const __m512i b = number(_mm512_mask_shuffle_epi8(shift, lowest, words, second));
            const __m512i c = number(_mm512_mask_shuffle_epi8(shift, lowest, words, third));
            const __m512i d = number(_mm512_or_si512(_mm512_srli_epi32(words, 24), shift));
            if constexpr (chained) {
                first = pair(b, a), last = pair(d, c);
            } else {
                first = pair(a, c), last = pair(b, d);
            }
        }
    };
    template <bool chained>
    struct Gathered {
        static constexpr int kBits = 8;
        struct Zero {};
        const float* table;
        explicit Gathered(const QuantizedForm& form) : table(form.table) {}
        static Zero zero_of(const float*) { return {}; }
        template <int j>
        void fours(const unsigned char* block, Zero, __m512i& first, __m512i& second) const {
            first = paired(gathered(codes_at<8, 2 * j>(block), table)), second = paired(gathered(codes_at<8, 2 * j + 1>(block), table));
            if constexpr (chained) chain(first, second);
        }
    };

    // Calls use(type_identity of the form's maker).
    template <bool chained, class Use>
    [[gnu::always_inline]] static void with_maker(const QuantizedForm& form, Use&& use) {
        using Lookup = QuantizedForm::Lookup;
        if (form.bits == 8) return form.values == Values::table ? use(std::type_identity<Gathered<chained>>{}) : use(std::type_identity<OfBytes<chained>>{});
        if (form.lookup == Lookup::code_less_zero) return use(std::type_identity<ByDifference<chained>>{});
        const auto of = [&](auto bits) __attribute__((always_inline)) {
            return form.lookup == Lookup::code ? use(std::type_identity<ByCode<chained, bits()>>{}) : use(std::type_identity<Reckoned<chained, bits()>>{});
        };
        if (form.bits == 4) return of(std::integral_constant<int, 4>{});
        return form.bits == 5 ? of(std::integral_constant<int, 5>{}) : of(std::integral_constant<int, 6>{});
    }

    template <class Make>
    static void put_block(const QuantizedForm& form, const unsigned char* block, const float* zeros, bf16* to) {
        const Make make(form);
        const typename Make::Zero zero[2] = {Make::zero_of(zeros), Make::zero_of(zeros + (form.halves() ? 16 : 0))};
        each_below<8>([&](auto j) __attribute__((always_inline)) {
            __m512i first, second;
            make.template fours<j()>(block, zero[j / 4], first, second);
            _mm512_storeu_si512(to + j * 64, first);
            _mm512_storeu_si512(to + j * 64 + 32, second);
        });
    }
};

#endif

#if defined(__AVX2__) && !defined(__AVX512F__)

struct WidenAvx2 {
    static void floats(const QuantizedForm& form, const unsigned char* codes, const float* zeros, std::int64_t first, std::int64_t count, float* to) {
        each_of<false>(form, codes, zeros, first, count, [to](std::int64_t b, auto half, auto p, __m256 even, __m256 odd) __attribute__((always_inline)) {
            float* at = to + (b * 32 + 2 * p) * 16 + half * 8;
            _mm256_storeu_ps(at, even);
            _mm256_storeu_ps(at + 16, odd);
        });
    }
    // As WidenAvx512's, visit(b, half of the columns, p, even, odd): all pairs of one half, then of the other.
    template <bool exact, class Visit>
    [[gnu::always_inline]] static void each_of(const QuantizedForm& form, const unsigned char* codes, const float* zeros, std::int64_t first, std::int64_t count, Visit&& visit) {
        switch (form.bits) {
            case 4: return each_of_bits<4, exact>(form, codes, zeros, first, count, visit);
            case 5: return each_of_bits<5, exact>(form, codes, zeros, first, count, visit);
            case 6: return each_of_bits<6, exact>(form, codes, zeros, first, count, visit);
            default: return each_of_bits<8, exact>(form, codes, zeros, first, count, visit);
        }
    }

  private:
    template <int by>
    static __m256i moved(__m256i words) {
        if constexpr (by > 0) return _mm256_srli_epi16(words, by);
        if constexpr (by < 0) return _mm256_slli_epi16(words, -by);
        return words;
    }
    static __m256i half_line(const unsigned char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
    static __m256i masked(__m256i words, int mask) { return _mm256_and_si256(words, _mm256_set1_epi16(static_cast<short>(mask))); }

    // As WidenAvx512's, of the eight columns at `block`, and alone.
    template <int bits, int p>
    static __m256i codes_at(const unsigned char* block) {
        if constexpr (bits == 8) {
            const __m256i words = half_line(block + p / 2 * 64);
            return p % 2 == 0 ? masked(words, 0xff) : _mm256_srli_epi16(words, 8);
        } else {
            const __m256i low = masked(moved<p % 4 * 4>(half_line(block + p / 4 * 64)), 0xf);
            if constexpr (bits == 5) return _mm256_or_si256(low, masked(moved<p - 4>(half_line(block + kLowPlaneBytes)), 0x10));
            if constexpr (bits == 6) return _mm256_or_si256(low, masked(moved<p % 8 * 2 - 4>(half_line(block + kLowPlaneBytes + p / 8 * 64)), 0x30));
            return low;
        }
    }

    template <bool whole>
    static __m256 number(__m256i code, __m256 zero) {
        __m256 value = _mm256_castsi256_ps(_mm256_or_si256(code, _mm256_set1_epi32(static_cast<int>(kShiftBits))));
        if constexpr (!whole) value = _mm256_sub_ps(value, _mm256_set1_ps(kShift));
        return _mm256_sub_ps(value, zero);
    }
    static __m256 looked_up(__m256i code, __m256 low, __m256 high) {
        const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));  // its sign: the code's fourth bit
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code), _mm256_permutevar8x32_ps(high, code), upper);
    }

    template <int bits, bool exact, class Visit>
    [[gnu::always_inline]] static void each_of_bits(const QuantizedForm& form, const unsigned char* codes, const float* zeros, std::int64_t first, std::int64_t count, Visit&& visit) {
        const auto half_of = [&](std::int64_t b, const unsigned char* block, const float* from, auto half, auto&& make) __attribute__((always_inline)) {
            const __m256 zero[2] = {_mm256_loadu_ps(from), _mm256_loadu_ps(from + (form.halves() ? 16 : 0))};
            [&]<int... p>(std::integer_sequence<int, p...>) __attribute__((always_inline)) {
                (
                    [&]() __attribute__((always_inline)) {
                        const __m256i words = codes_at<bits, p>(block);
                        visit(b, half, std::integral_constant<int, p>{}, make(_mm256_and_si256(words, _mm256_set1_epi32(0xffff)), zero[p / 8]), make(_mm256_srli_epi32(words, 16), zero[p / 8]));
                    }(),
                    ...);
            }(std::make_integer_sequence<int, 16>{});
        };
        // Codes in planes come with more numbers of groups, so that fewer bytes are asked for ahead.
        constexpr std::int64_t ahead = bits % 4 == 0 ? kBlocksAhead * bits * 64 : 2048;
        const auto blocks = [&](auto&& make) __attribute__((always_inline)) {
            GroupOfBlock group(form, first);
            for (std::int64_t b = 0; b < count; ++b, group.next()) {
                const unsigned char* block = codes + (first + b) * bits * 64;
                for (int i = 0; i < bits; ++i) Avx2::prefetch(block + ahead + i * 64);
                const float* from = zeros + group() * 16;
                half_of(b, block, from, std::integral_constant<int, 0>{}, make);
                half_of(b, block + 32, from + 8, std::integral_constant<int, 1>{}, make);
            }
        };
        if (form.values == Values::integer) return blocks([](__m256i code, __m256 zero) __attribute__((always_inline)) { return number<true>(code, zero); });
        if constexpr (!exact) {
            if (form.values == Values::fractional) return blocks([](__m256i code, __m256 zero) __attribute__((always_inline)) { return number<false>(code, zero); });
        }
        if constexpr (bits == 4) {
            const __m256 low = _mm256_loadu_ps(form.table), high = _mm256_loadu_ps(form.table + 8);
            return blocks([low, high](__m256i code, __m256) __attribute__((always_inline)) { return looked_up(code, low, high); });
        } else if constexpr (bits == 8) {
            return blocks([&form](__m256i code, __m256) __attribute__((always_inline)) { return _mm256_i32gather_ps(form.table, code, 4); });
        }
    }

};

#endif

}  // namespace
}  // namespace quire
