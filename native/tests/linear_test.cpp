// The packed linear layer of every variant that runs here, in buffers of exactly the size it was promised, so that a
// read or write beyond them stops the test; against sums in double, and each row against the row alone.
#include <algorithm>
#include <atomic>
#include <cmath>
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

bool same(const Buffer& a, std::int64_t first, const Buffer& b, std::int64_t count) {
    const auto bytes = static_cast<std::size_t>(element_bytes(a.element));
    return std::memcmp(a.data.get() + static_cast<std::size_t>(first) * bytes, b.data.get(), static_cast<std::size_t>(count) * bytes) == 0;
}

void test_product(Isa isa, Element element, std::int64_t outputs, std::int64_t inputs, std::int64_t rows, Random& random) {
    Buffer weight(element, outputs * inputs), bias(element, outputs), x(element, rows * inputs), out(element, rows * outputs);
    weight.fill(random);
    bias.fill(random);
    x.fill(random);
    const PackedWeight packed(element, weight.data.get(), outputs, inputs, inputs, 1, isa);
    packed.multiply(x.data.get(), rows, bias.data.get(), out.data.get());
    const double unit = element == Element::f32 ? 0.0 : element == Element::bf16 ? 0x1p-8 : 0x1p-11;
    for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t column = 0; column < outputs; ++column) {
            double exact = bias.get(column), size = std::fabs(exact);
            for (std::int64_t k = 0; k < inputs; ++k) {
                const double product = x.get(row * inputs + k) * weight.get(column * inputs + k);
                exact += product;
                size += std::fabs(product);
            }
            const double error = static_cast<double>(inputs + 4) * 0x1p-23 * size;
            EXPECT(std::fabs(out.get(row * outputs + column) - exact) <= error + unit * (std::fabs(exact) + error));
        }
    }
    Buffer one_x(element, inputs), one_out(element, outputs);
    for (const std::int64_t row : {std::int64_t{0}, rows / 2, rows - 1}) {
        const std::size_t bytes = static_cast<std::size_t>(inputs * element_bytes(element));
        std::memcpy(one_x.data.get(), x.data.get() + static_cast<std::size_t>(row) * bytes, bytes);
        packed.multiply(one_x.data.get(), 1, bias.data.get(), one_out.data.get());
        EXPECT(same(out, row * outputs, one_out, outputs));
    }

    Buffer dense(element, outputs * inputs);
    packed.unpack(dense.data.get());
    EXPECT(same(dense, 0, weight, outputs * inputs));
    const auto ids = std::make_unique<std::int64_t[]>(2);
    ids[0] = outputs - 1;
    ids[1] = 0;
    Buffer gathered(element, 2 * inputs);
    packed.gather_rows(ids.get(), 2, gathered.data.get());
    Buffer last(element, inputs);
    packed.gather_rows(ids.get(), 1, last.data.get());
    EXPECT(same(weight, (outputs - 1) * inputs, last, inputs));
    EXPECT(same(gathered, 0, last, inputs));
    ids[1] = outputs;
    bool refused = false;
    try {
        packed.gather_rows(ids.get(), 2, gathered.data.get());
    } catch (const std::out_of_range&) {
        refused = true;
    }
    EXPECT(refused);
}

// Several weights at once: the bits of one after the other, biases or not, in unwritten memory of exact size.
void test_together(Isa isa, Element element, std::int64_t inputs, std::int64_t rows, Random& random) {
    const std::int64_t outputs[] = {70, 33, 1};
    Buffer x(element, rows * inputs);
    x.fill(random);
    std::vector<Buffer> biases, alone, together;
    std::vector<PackedWeight> weights;
    std::vector<LinearTarget> targets;
    for (const std::int64_t count : outputs) {
        Buffer weight(element, count * inputs);
        weight.fill(random);
        weights.emplace_back(element, weight.data.get(), count, inputs, inputs, 1, isa);
        biases.emplace_back(element, count).fill(random);
        alone.emplace_back(element, rows * count);
        together.emplace_back(element, rows * count);
    }
    for (std::size_t i = 0; i < 3; ++i) {
        const void* bias = i == 1 ? nullptr : biases[i].data.get();
        weights[i].multiply(x.data.get(), rows, bias, alone[i].data.get());
        targets.push_back({&weights[i], bias, together[i].data.get()});
    }
    const std::int64_t stride = weights[0].input_stride() + 3;
    Buffer spread(element, (rows - 1) * stride + inputs);
    for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t k = 0; k < inputs; ++k) spread.set(row * stride + k, x.get(row * inputs + k));
    }
    multiply_together(targets.data(), 3, x.data.get(), rows);
    for (std::size_t i = 0; i < 3; ++i) EXPECT(same(together[i], 0, alone[i], rows * outputs[i]));
    multiply_together(targets.data(), 3, spread.data.get(), rows, stride);
    for (std::size_t i = 0; i < 3; ++i) EXPECT(same(together[i], 0, alone[i], rows * outputs[i]));
}

// Two products taken block by block: every output once, with the bits of multiply(), blocks at multiples of the unit.
void test_taken(Isa isa, Element element, std::int64_t rows, std::int64_t unit, Random& random) {
    constexpr std::int64_t kOutputs = 210, kInputs = 67;
    const std::int64_t bytes = element_bytes(element);
    Buffer x(element, rows * kInputs), bias(element, kOutputs), weight(element, kOutputs * kInputs), more(element, kOutputs * kInputs);
    for (Buffer* buffer : {&x, &bias, &weight, &more}) buffer->fill(random);
    const PackedWeight first(element, weight.data.get(), kOutputs, kInputs, kInputs, 1, isa), second(element, more.data.get(), kOutputs, kInputs, kInputs, 1, isa);
    Buffer alone(element, rows * kOutputs), beside(element, rows * kOutputs), taken(element, rows * kOutputs), taken_beside(element, rows * kOutputs);
    first.multiply(x.data.get(), rows, bias.data.get(), alone.data.get());
    second.multiply(x.data.get(), rows, nullptr, beside.data.get());
    std::atomic<std::int64_t> num_taken = 0, num_astray = 0;
    LinearTarget target{&first, bias.data.get(), nullptr};
    target.unit = unit;
    target.second = &second;
    target.take = [&](const LinearResult& result) {
        num_astray += result.column % unit != 0;
        num_taken += result.rows * result.columns;
        for (std::int64_t r = 0; r < result.rows; ++r) {
            const std::int64_t at = ((result.row + r) * kOutputs + result.column) * bytes;
            std::copy_n(result.values[0] + r * result.stride, result.columns * bytes, taken.data.get() + at);
            std::copy_n(result.values[1] + r * result.stride, result.columns * bytes, taken_beside.data.get() + at);
        }
    };
    multiply_together(&target, 1, x.data.get(), rows);
    EXPECT(num_taken == rows * kOutputs && num_astray == 0);
    EXPECT(same(taken, 0, alone, rows * kOutputs) && same(taken_beside, 0, beside, rows * kOutputs));
}

// Each part of the rows by a weight of its own: the bits of one after the other, in buffers of exact size.
void test_each(Isa isa, Element element, std::int64_t rows, Random& random) {
    constexpr std::int64_t kParts = 3, kOutputs = 70, kInputs = 67;
    Buffer x(element, rows * kParts * kInputs), out(element, rows * kParts * kOutputs), own(element, rows * kInputs), alone(element, rows * kOutputs);
    x.fill(random);
    std::vector<PackedWeight> weights;
    std::vector<const PackedWeight*> all;
    weights.reserve(kParts);
    for (std::int64_t part = 0; part < kParts; ++part) {
        Buffer weight(element, kOutputs * kInputs);
        weight.fill(random);
        all.push_back(&weights.emplace_back(element, weight.data.get(), kOutputs, kInputs, kInputs, 1, isa));
    }
    multiply_each(all.data(), kParts, {x.data.get(), kParts * kInputs, kInputs}, rows, {out.data.get(), kOutputs, rows * kOutputs});
    for (std::int64_t part = 0; part < kParts; ++part) {
        for (std::int64_t row = 0; row < rows; ++row) {
            for (std::int64_t k = 0; k < kInputs; ++k) own.set(row * kInputs + k, x.get((row * kParts + part) * kInputs + k));
        }
        weights[static_cast<std::size_t>(part)].multiply(own.data.get(), rows, nullptr, alone.data.get());
        EXPECT(same(out, part * rows * kOutputs, alone, rows * kOutputs));
    }
}

bool refused(const PackedWeight& a, const PackedWeight& b, const PackedWeight* second = nullptr) {
    LinearTarget targets[] = {{&a, nullptr, nullptr}, {&b, nullptr, nullptr}};
    targets[1].second = second;
    try {
        multiply_together(targets, 2, nullptr, 0);
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

void test_weights_that_do_not_go_together() {
    const float zeros[16] = {};
    const PackedWeight a(Element::f32, zeros, 4, 4, 4, 1, Isa::portable), shorter(Element::f32, zeros, 4, 3, 3, 1, Isa::portable);
    const PackedWeight half(Element::f16, zeros, 4, 4, 4, 1, Isa::portable);
    const PackedWeight other(Element::f32, zeros, 4, 4, 4, 1, Isa::emulated_avx512);
    EXPECT(refused(a, shorter) && refused(a, half) && refused(a, other));
    const PackedWeight narrower(Element::f32, zeros, 3, 4, 4, 1, Isa::portable);
    EXPECT(!refused(a, a, &a) && refused(a, a, &narrower) && refused(a, a, &shorter));
}

}  // namespace

int main() {
    Random random(1);
    test_weights_that_do_not_go_together();
    for (const int num_threads : {1, 3}) {
        ThreadPool::instance().set_num_threads(num_threads);
        for (const Isa isa : supported_isas()) {
            const bool emulated = isa_name(isa).starts_with("emulated");
            for (const Element element : {Element::f32, Element::bf16, Element::f16}) {
                for (const std::int64_t rows : {1, 2, 3, 5, 6, 7, 13, 16, 17, 33, 65}) {
                    test_product(isa, element, 1, 1, rows, random);
                    test_product(isa, element, 33, 35, rows, random);
                    test_product(isa, element, 32, 64, rows, random);
                    if (rows % 16 == 1) test_product(isa, element, 71, 97, rows, random);
                }
                for (const std::int64_t rows : {1, 7, 50}) test_together(isa, element, 67, rows, random);
                for (const std::int64_t rows : {1, 7, 60}) test_each(isa, element, rows, random);
                for (const std::int64_t unit : {1, 7, 24, 64}) test_taken(isa, element, unit == 7 ? 70 : 5, unit, random);
                if (!emulated) test_product(isa, element, 140, 530, 250, random);
                if (!emulated) test_product(isa, element, 40, 4500, 65, random);  // more than one range of K, whatever the variant
            }
            test_product(isa, Element::bf16, 17, 70, 530, random);
        }
    }
    std::puts("linear: ok");
}
