// Weights held as codes, in every variant that runs here: bits against the product written out number by number (quantized.hpp, U1), in
// buffers of exactly the size that was promised, so that a read or write beyond them stops the test; a row against the row alone.
#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "kernels/linear.hpp"
#include "kernels/simd.hpp"
#include "kernels/thread_pool.hpp"
#include "tests/buffer.hpp"
#include "tests/testing.hpp"

using namespace quire;
using quire::testing::Buffer;
using quire::testing::Random;

namespace {

using Int = std::int64_t;

// What is given of a weight; group 0: all inputs.
struct Kind {
    int bits;
    Int group;
    enum { one_zero, whole_zeros, zeros, table, odd_table } values = one_zero;
    Number fine = Number::bf16;
    Int ratio = 0;  // of super-blocks
    bool minimums = false;
};

constexpr Kind kKinds[] = {
    {4, 128},
    {8, 0},
    {8, 32, Kind::one_zero, Number::f16},
    {4, 64, Kind::whole_zeros},
    {8, 128, Kind::whole_zeros},
    {4, 32, Kind::zeros, Number::f32},
    {4, 32, Kind::one_zero, Number::f16, 0, true},
    {5, 32, Kind::one_zero, Number::f16},
    {5, 32, Kind::whole_zeros, Number::u8, 8, true},
    {6, 16, Kind::one_zero, Number::i8, 16},
    {6, 32, Kind::whole_zeros},
    {2, 16, Kind::one_zero, Number::u8, 16, true},
    {4, 32, Kind::table},
    {4, 64, Kind::odd_table},
    {8, 128, Kind::table},
    {3, 0, Kind::zeros},
};

// A weight of such a kind, every part in memory of its own size.
class Weight {
  public:
    Weight(const Kind& kind, Int outputs, Int inputs, Random& random) : kind_(kind), outputs_(outputs), inputs_(inputs) {
        group_ = kind.group == 0 ? inputs : kind.group;
        groups_ = inputs / group_;
        codes_ = bytes(outputs * inputs, 1 << kind.bits, random);
        scales_ = factor(random);
        if (kind.minimums) minimums_ = factor(random);
        if (kind.values == Kind::whole_zeros) zeros_ = bytes(outputs * groups_, 1 << kind.bits, random);
        if (kind.values == Kind::zeros) zeros_ = numbers(Number::f32, outputs * groups_, random);
        if (kind.values == Kind::table || kind.values == Kind::odd_table) {
            table_.resize(std::size_t{1} << kind.bits);
            for (float& entry : table_) {
                entry = static_cast<float>(random.below(255) - 127) / (kind.values == Kind::table ? 16.0f : 7.0f);
            }
        }
    }

    QuantizedParts parts() const {
        QuantizedParts parts;
        parts.codes = codes_.data();
        parts.bits = kind_.bits;
        parts.num_outputs = outputs_, parts.num_inputs = inputs_, parts.group = group_;
        parts.scales = given(scales_);
        if (kind_.minimums) parts.minimums = given(minimums_);
        if (!zeros_.empty()) parts.zeros = zeros_.data(), parts.zeros_number = kind_.values == Kind::zeros ? Number::f32 : Number::u8;
        parts.zero = one_zero();
        parts.table = table_.empty() ? nullptr : table_.data();
        return parts;
    }

    Int inputs() const { return inputs_; }
    Int outputs() const { return outputs_; }

    float value(Int row, Int k) const {
        const auto code = codes_[at(row, k)];
        return table_.empty() ? static_cast<float>(code) - zero(row, k / group_) : table_[code];
    }
    float dequantized(Int row, Int k) const {
        const float scaled = number(scales_, row, k / group_) * value(row, k);
        return kind_.minimums ? scaled - number(minimums_, row, k / group_) : scaled;
    }
    // Of x [inputs] with an output's weights.
    float product(const float* x, Int row) const {
        float acc = 0.0f;
        for (Int g = 0; g < groups_; ++g) {
            const float of_values = sum(x, g, [&](Int k) { return value(row, k); });
            acc = acc + number(scales_, row, g) * of_values;
            if (kind_.minimums) acc = acc - number(minimums_, row, g) * sum(x, g, [](Int) { return 1.0f; });
        }
        return acc;
    }

  private:
    struct Factor {
        std::vector<unsigned char> fine, coarse;
    };

    std::size_t at(Int row, Int k) const { return static_cast<std::size_t>(row * inputs_ + k); }
    float one_zero() const { return kind_.values == Kind::one_zero && !kind_.minimums ? static_cast<float>(1 << (kind_.bits - 1)) : 0.0f; }

    template <class Value>
    float sum(const float* x, Int group, Value&& value_at) const {
        float total = 0.0f;
        for (Int first = group * group_; first < (group + 1) * group_; first += 32) {
            float halves[2] = {0.0f, 0.0f};
            for (Int k = first; k < std::min(first + 32, (group + 1) * group_); ++k) {
                float& half = halves[(k - first) % 2];
                half = half + x[k] * value_at(k);
            }
            total = total + (halves[0] + halves[1]);
        }
        return total;
    }

    static std::vector<unsigned char> bytes(Int count, Int bound, Random& random) {
        std::vector<unsigned char> made(static_cast<std::size_t>(count));
        for (unsigned char& byte : made) byte = static_cast<unsigned char>(random.below(bound));
        return made;
    }
    static std::vector<unsigned char> numbers(Number number, Int count, Random& random) {
        const Int size = number_bytes(number);
        std::vector<unsigned char> made = bytes(count * size, 60, random);
        for (Int i = 0; i < count && size > 1; ++i) {
            const float value = static_cast<float>(1 + random.below(2000)) / 300.0f;
            unsigned char* to = made.data() + i * size;
            if (number == Number::f32) Buffer::write<float>(to, value);
            if (number == Number::bf16) Buffer::write<bf16>(to, value);
            if (number == Number::f16) Buffer::write<f16>(to, value);
        }
        return made;
    }
    static float number_of(Number number, const std::vector<unsigned char>& from, Int index) {
        const unsigned char* at = from.data() + index * number_bytes(number);
        switch (number) {
            case Number::f32: return Buffer::read<float>(at);
            case Number::bf16: return to_float(Buffer::read<bf16>(at));
            case Number::f16: return to_float(Buffer::read<f16>(at));
            case Number::i8: return static_cast<float>(static_cast<std::int8_t>(*at));
            default: return static_cast<float>(*at);
        }
    }
    Factor factor(Random& random) const {
        Factor made{numbers(kind_.fine, outputs_ * groups_, random), {}};
        if (kind_.ratio > 0) made.coarse = numbers(Number::f16, outputs_ * (groups_ / kind_.ratio), random);
        return made;
    }
    QuantizedParts::Factor given(const Factor& factor) const {
        if (kind_.ratio == 0) return {factor.fine.data(), kind_.fine, nullptr, Number::none, 1};
        return {factor.fine.data(), kind_.fine, factor.coarse.data(), Number::f16, kind_.ratio};
    }
    float number(const Factor& factor, Int row, Int group) const {
        const float fine = number_of(kind_.fine, factor.fine, row * groups_ + group);
        return kind_.ratio == 0 ? fine : fine * number_of(Number::f16, factor.coarse, row * (groups_ / kind_.ratio) + group / kind_.ratio);
    }
    float zero(Int row, Int group) const {
        if (zeros_.empty()) return one_zero();
        return number_of(kind_.values == Kind::zeros ? Number::f32 : Number::u8, zeros_, row * groups_ + group);
    }

    Kind kind_;
    Int outputs_, inputs_, group_, groups_;
    std::vector<unsigned char> codes_, zeros_;
    Factor scales_, minimums_;
    std::vector<float> table_;
};

bool same(const Buffer& a, Int first, const Buffer& b, Int count) {
    const auto bytes = static_cast<std::size_t>(element_bytes(a.element));
    return std::memcmp(a.data.get() + static_cast<std::size_t>(first) * bytes, b.data.get(), static_cast<std::size_t>(count) * bytes) == 0;
}

bool emulated(Isa isa) { return isa_name(isa).starts_with("emulated"); }

// All variants against the definition; `with_emulated`: those that go lane by lane too.
void test_product(const Weight& weight, Element element, Int rows, bool with_emulated, Random& random) {
    const Int outputs = weight.outputs(), inputs = weight.inputs();
    Buffer bias(element, outputs), x(element, rows * inputs), want(element, rows * outputs);
    bias.fill(random);
    x.fill(random);
    if (element != Element::f16) x.set(0, 1e-33f);  // does not count
    std::vector<float> row(static_cast<std::size_t>(inputs));
    for (Int r = 0; r < rows; ++r) {
        for (Int k = 0; k < inputs; ++k) {
            const auto value = static_cast<float>(x.get(r * inputs + k));
            row[static_cast<std::size_t>(k)] = value < 0x1p-100f && value > -0x1p-100f ? 0.0f : value;
        }
        for (Int n = 0; n < outputs; ++n) want.set(r * outputs + n, weight.product(row.data(), n) + static_cast<float>(bias.get(n)));
    }
    for (const Isa isa : supported_isas()) {
        if (emulated(isa) && !with_emulated) continue;
        const PackedWeight packed(element, weight.parts(), isa);
        Buffer out(element, rows * outputs), one_out(element, outputs), last(element, inputs);
        packed.multiply(x.data.get(), rows, bias.data.get(), out.data.get());
        EXPECT(same(out, 0, want, rows * outputs));
        std::memcpy(last.data.get(), x.data.get() + (rows - 1) * inputs * element_bytes(element), static_cast<std::size_t>(inputs * element_bytes(element)));
        packed.multiply(last.data.get(), 1, bias.data.get(), one_out.data.get());
        EXPECT(same(out, (rows - 1) * outputs, one_out, outputs));
    }
}

void test_rows_of_the_weight(const Weight& weight, Random& random) {
    const Int outputs = weight.outputs(), inputs = weight.inputs();
    for (const Isa isa : {Isa::portable, supported_isas().front()}) {
        const PackedWeight packed(Element::f32, weight.parts(), isa);
        Buffer dense(Element::f32, outputs * inputs), row(Element::f32, inputs), rounded(Element::f16, inputs);
        packed.unpack(dense.data.get());
        const Int n = random.below(outputs);
        packed.gather_rows(&n, 1, row.data.get());
        packed.gather_rows_in(Element::f16, &n, 1, rounded.data.get());
        EXPECT(same(dense, n * inputs, row, inputs));
        for (Int k = 0; k < inputs; ++k) {
            const float value = weight.dequantized(n, k);
            f16 half;
            round_to(value, half);
            EXPECT(static_cast<float>(row.get(k)) == value && static_cast<float>(rounded.get(k)) == to_float(half));
        }
        bool refused = false;
        try {
            packed.gather_rows(&outputs, 1, row.data.get());
        } catch (const std::out_of_range&) {
            refused = true;
        }
        EXPECT(refused);
    }
}

// Two weights that are taken block by block, from rows that lie apart: the bits of one after the other.
void test_taken(Isa isa, const Kind& kind, Int rows, Random& random) {
    constexpr Int kOutputs = 210, kInputs = 256;
    const Weight first(kind, kOutputs, kInputs, random), second(kind, kOutputs, kInputs, random);
    const PackedWeight a(Element::bf16, first.parts(), isa), b(Element::bf16, second.parts(), isa);
    const Int stride = a.input_stride() + 5;
    Buffer x(Element::bf16, (rows - 1) * stride + kInputs), close(Element::bf16, rows * kInputs);
    x.fill(random);
    for (Int r = 0; r < rows; ++r) std::memcpy(close.data.get() + r * kInputs * 2, x.data.get() + r * stride * 2, kInputs * 2);
    Buffer alone(Element::bf16, rows * kOutputs), beside(Element::bf16, rows * kOutputs), taken(Element::bf16, rows * kOutputs), other(Element::bf16, rows * kOutputs);
    a.multiply(close.data.get(), rows, nullptr, alone.data.get());
    b.multiply(close.data.get(), rows, nullptr, beside.data.get());
    LinearTarget target{&a, nullptr, nullptr};
    target.unit = 24;
    target.second = &b;
    target.take = [&](const LinearResult& result) {
        for (Int r = 0; r < result.rows; ++r) {
            const Int at = ((result.row + r) * kOutputs + result.column) * 2;
            std::copy_n(result.values[0] + r * result.stride, result.columns * 2, taken.data.get() + at);
            std::copy_n(result.values[1] + r * result.stride, result.columns * 2, other.data.get() + at);
        }
    };
    multiply_together(&target, 1, x.data.get(), rows, stride);
    EXPECT(same(taken, 0, alone, rows * kOutputs) && same(other, 0, beside, rows * kOutputs));
}

void test_what_is_refused() {
    const std::vector<std::uint8_t> codes(4 * 96);
    const std::vector<float> scales(4 * 96, 1.0f);
    const auto refused = [&](int bits, Int group, Int inputs) {
        QuantizedParts parts;
        parts.codes = codes.data(), parts.bits = bits, parts.num_outputs = 4, parts.num_inputs = inputs, parts.group = group;
        parts.scales = {scales.data(), Number::f32, nullptr, Number::none, 1};
        try {
            const PackedWeight packed(Element::f32, parts, Isa::portable);
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    EXPECT(!refused(4, 32, 96) && refused(4, 48, 96) && refused(4, 64, 96) && refused(9, 32, 96) && refused(1, 32, 96) && refused(4, 0, 96) && refused(4, 32, 0));
}

}  // namespace

int main() {
    Random random(1);
    test_what_is_refused();
    for (const int num_threads : {1, 3}) {
        ThreadPool::instance().set_num_threads(num_threads);
        for (const Kind& kind : kKinds) {
            const Int step = kind.ratio > 0 ? kind.ratio * kind.group : kind.group > 0 ? kind.group : 1;
            const Int inputs = step == 1 ? 97 : step == 16 ? 48 : step;
            for (const Int rows : {1, 3, 17, 38}) test_product(Weight(kind, 37, inputs, random), Element::bf16, rows, rows == 17, random);
            test_product(Weight(kind, 16, 2 * inputs, random), Element::f32, 7, true, random);
            test_product(Weight(kind, 1, inputs, random), Element::f16, 5, false, random);
            test_rows_of_the_weight(Weight(kind, 33, inputs, random), random);
        }
        for (const Kind& kind : {kKinds[0], kKinds[6], kKinds[9]}) {
            test_product(Weight(kind, 130, 512, random), Element::bf16, 70, false, random);
        }
        test_product(Weight({8, 0}, 1, 1, random), Element::bf16, 1, true, random);
        test_product(Weight({8, 0}, 65, 31, random), Element::bf16, 65, false, random);
        test_product(Weight({8, 0}, 37, 4500, random), Element::bf16, 65, false, random);  // more than one range of K
        test_product(Weight({4, 128}, 17, 640, random), Element::bf16, 530, false, random);  // more than one pass
        test_product(Weight({4, 1152}, 40, 2304, random), Element::bf16, 67, false, random);  // groups that ranges cut
        for (const Isa isa : supported_isas()) {
            if (!emulated(isa)) test_taken(isa, kKinds[num_threads], 67, random);
        }
    }
    std::puts("codes: ok");
}
