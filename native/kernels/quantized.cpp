#include "kernels/quantized.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "kernels/quantized_codes.hpp"
#include "kernels/rounding.hpp"

namespace quire {

namespace {

constexpr std::int64_t kColumns = QuantizedForm::kColumns, kBlock = QuantizedForm::kBlock, kLineBytes = 64;

bool is_bf16(float value) { return (bits_of(value) & 0xffffu) == 0; }

[[noreturn]] void refuse(const std::string& expected, const std::string& got) { throw std::invalid_argument("expected " + expected + ", got " + got); }

// A row's numbers, one for each group, to column `column` of the panel.
void put_numbers(Number number, const void* from, std::int64_t row, std::int64_t count, unsigned char* to, std::int64_t column) {
    const std::int64_t bytes = number_bytes(number);
    const auto* source = static_cast<const unsigned char*>(from) + row * count * bytes;
    for (std::int64_t g = 0; g < count; ++g) std::memcpy(to + (g * kColumns + column) * bytes, source + g * bytes, static_cast<std::size_t>(bytes));
}

void put_code(int bits, unsigned char* block, std::int64_t k, std::int64_t column, std::uint32_t code) {
    const auto put = [&](unsigned char* plane, CodePlace place, std::uint32_t field) {
        unsigned char* word = plane + (place.word * kColumns + column) * 4;
        std::uint32_t bits_there;
        std::memcpy(&bits_there, word, 4);
        bits_there |= field << place.shift;
        std::memcpy(word, &bits_there, 4);
    };
    if (bits == 8) return put(block, byte_place(k), code);
    put(block, low_place(k), code & 0xf);
    if (bits == 5) put(block + kLowPlaneBytes, fifth_place(k), code >> 4);
    if (bits == 6) put(block + kLowPlaneBytes, upper_place(k), code >> 4);
}

// Fills in entries and lookup.
void make_lookup(QuantizedForm& form, const QuantizedParts& parts) {
    using Lookup = QuantizedForm::Lookup;
    if (!form.exact || form.bits > 6) return;
    const auto fill = [&](Lookup lookup, int period, auto&& value) {
        form.lookup = lookup;
        for (int i = 0; i < 64; ++i) form.entries[i] = static_cast<std::uint16_t>(bits_of(value(i % period)) >> 16);
    };
    if (form.values == QuantizedForm::Values::table) return fill(Lookup::code, 16, [&](int code) { return form.table[code]; });
    if (form.zeros == Number::none) return fill(Lookup::code, 1 << form.bits, [&](int code) { return static_cast<float>(code) - form.zero; });
    if (form.bits > 4 || form.zeros != Number::u8) return;
    const auto* zeros = static_cast<const unsigned char*>(parts.zeros);
    const bool small = std::all_of(zeros, zeros + parts.num_outputs * (parts.num_inputs / parts.group), [](unsigned char zero) { return zero <= 16; });
    if (small) fill(Lookup::code_less_zero, 32, [](int difference) { return static_cast<float>(difference < 16 ? difference : difference - 32); });
}

}  // namespace

QuantizedForm quantized_form(const QuantizedParts& parts) {
    const std::int64_t inputs = parts.num_inputs;
    if (parts.num_outputs < 1 || inputs < 1) refuse("a weight of at least 1 x 1", std::to_string(parts.num_outputs) + " x " + std::to_string(inputs));
    if (parts.bits < 2 || parts.bits > 8) refuse("codes of 2 to 8 bits", std::to_string(parts.bits));
    const std::int64_t group = parts.group;
    if (group < 1 || inputs % group != 0 || (group != inputs && group != kBlock / 2 && group % kBlock != 0)) {
        refuse("a group of 16, of a multiple of 32 that divides the inputs, or of all " + std::to_string(inputs), std::to_string(group));
    }
    QuantizedForm form;
    const bool table_of_bytes = parts.table != nullptr && parts.bits > 4;
    form.bits = parts.bits <= 4 ? 4 : parts.bits > 6 || table_of_bytes ? 8 : parts.bits;
    form.depth = round_up(inputs, kBlock);
    const std::int64_t given_groups = inputs / group;
    const bool whole = given_groups == 1 && group != kBlock / 2;
    form.group = whole ? form.depth : group;
    form.num_groups = form.depth / form.group;
    form.zeros = parts.zeros == nullptr ? Number::none : parts.zeros_number;
    form.zero = parts.zero;
    using Values = QuantizedForm::Values;
    if (parts.table != nullptr) {
        form.values = Values::table;
        std::copy(parts.table, parts.table + (1 << parts.bits), form.table);
        form.exact = std::all_of(form.table, form.table + 256, is_bf16);
    } else if (form.zeros == Number::f32 || parts.zero != std::rint(parts.zero) || parts.zero < 0.0f || parts.zero > 255.0f) {
        form.values = Values::fractional;
        form.exact = false;
    } else if (form.zeros == Number::none && form.bits == 4) {  // reads as one
        form.values = Values::table;
        for (int code = 0; code < 16; ++code) form.table[code] = static_cast<float>(code) - parts.zero;
    }
    make_lookup(form, parts);
    std::int64_t position = 0;
    const auto place = [&](Number number, std::int64_t count) {
        const std::int64_t at = position;
        position += round_up(count * kColumns * number_bytes(number), kLineBytes);
        return at;
    };
    const auto place_factor = [&](const QuantizedParts::Factor& given) {
        QuantizedFactor factor{given.fine_number, given.coarse == nullptr ? Number::none : given.coarse_number, given.ratio, 0, 0};
        factor.fine_offset = place(factor.fine, form.num_groups);
        factor.coarse_offset = place(factor.coarse, divide_up(form.num_groups, factor.ratio));
        return factor;
    };
    form.scales = place_factor(parts.scales);
    form.zeros_offset = place(form.zeros, form.num_groups);
    if (parts.minimums.fine != nullptr) form.minimums = place_factor(parts.minimums);
    form.codes_offset = position;
    form.panel_bytes = position + form.depth / kBlock * form.block_bytes();
    return form;
}

void pack_quantized(const QuantizedForm& form, const QuantizedParts& parts, std::int64_t panel, unsigned char* to) {
    std::memset(to, 0, static_cast<std::size_t>(form.panel_bytes));
    const std::int64_t first = panel * kColumns, columns = std::min(kColumns, parts.num_outputs - first), groups = parts.num_inputs / parts.group;
    const auto put_factor = [&](const QuantizedFactor& factor, const QuantizedParts::Factor& given, std::int64_t column) {
        if (factor.fine == Number::none) return;
        put_numbers(factor.fine, given.fine, first + column, groups, to + factor.fine_offset, column);
        if (factor.coarse != Number::none) put_numbers(factor.coarse, given.coarse, first + column, groups / factor.ratio, to + factor.coarse_offset, column);
    };
    for (std::int64_t column = 0; column < columns; ++column) {
        put_factor(form.scales, parts.scales, column);
        put_factor(form.minimums, parts.minimums, column);
        if (form.zeros != Number::none) put_numbers(form.zeros, parts.zeros, first + column, groups, to + form.zeros_offset, column);
    }
    for (std::int64_t start = 0; start < parts.num_inputs; start += kBlock) {
        unsigned char* block = to + form.codes_offset + start / kBlock * form.block_bytes();
        const std::int64_t count = std::min(kBlock, parts.num_inputs - start);
        for (std::int64_t column = 0; column < columns; ++column) {
            const std::uint8_t* codes = parts.codes + (first + column) * parts.num_inputs + start;
            for (std::int64_t k = 0; k < count; ++k) put_code(form.bits, block, k, column, codes[k]);
        }
    }
}

void dequantize_column(const QuantizedForm& form, const unsigned char* panel, std::int64_t column, std::int64_t num_inputs, float* to) {
    for (std::int64_t group = 0; group * form.group < num_inputs; ++group) {
        const float scale = factor_at(form.scales, panel, group, column), zero = zero_at(form, panel, group, column);
        const float minimum = form.has_minimums() ? factor_at(form.minimums, panel, group, column) : 0.0f;
        const std::int64_t end = std::min((group + 1) * form.group, num_inputs);
        for (std::int64_t k = group * form.group; k < end; ++k) {
            const unsigned char* block = panel + form.codes_offset + k / kBlock * form.block_bytes();
            const float scaled = scale * value_at(form, code_at(form.bits, block, k % kBlock, column), zero);
            to[k] = form.has_minimums() ? scaled - minimum : scaled;
        }
    }
}

}  // namespace quire
