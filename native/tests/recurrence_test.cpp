// The recurrences of every variant that runs here, in memory of exactly the size they were promised, so that a read or write
// beyond it stops the test; a prompt in one call against the same in two.
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/recurrence.hpp"
#include "kernels/simd.hpp"
#include "kernels/thread_pool.hpp"
#include "tests/testing.hpp"

using namespace quire;
using quire::testing::Random;

namespace {

using Int = std::int64_t;

float number(Random& random) { return static_cast<float>(random.below(2001) - 1000) / 500.0f; }

std::vector<float> floats(Random& random, Int count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = number(random);
    return values;
}

std::vector<float> below_zero(Random& random, Int count) {
    std::vector<float> values = floats(random, count);
    for (float& value : values) value = -value * value;
    return values;
}

// Of `element`, at their own size.
std::vector<unsigned char> elements(Random& random, Element element, Int count) {
    std::vector<unsigned char> bytes(static_cast<std::size_t>(count * element_bytes(element)));
    for (Int i = 0; i < count; ++i) {
        const float value = number(random);
        unsigned char* const at = bytes.data() + i * element_bytes(element);
        if (element == Element::f32) std::memcpy(at, &value, sizeof value);
        bf16 half;
        f16 other;
        round_to(value, half);
        round_to(value, other);
        if (element == Element::bf16) std::memcpy(at, &half, sizeof half);
        if (element == Element::f16) std::memcpy(at, &other, sizeof other);
    }
    return bytes;
}

struct Made {
    std::vector<float> state;
    std::vector<unsigned char> out;
};

// Rows [first, last) of one sequence in slot 1 of 3, the state after the last also in slot 0. Calls run(step, state, out, first).
template <class Run>
void both_ways(Isa isa, Element element, Int num_rows, Int one_state, Int out_width, Random& random, Run&& run) {
    const Int row_bytes = out_width * element_bytes(element);
    const std::vector<float> start = floats(random, 3 * one_state);
    Made whole{start, std::vector<unsigned char>(static_cast<std::size_t>(num_rows * row_bytes))}, parts = whole;
    const RecurrenceStep all{{0, num_rows}, {1}, {num_rows - 1}, {0}, isa};
    run(all, RecurrenceState{whole.state.data(), one_state}, whole.out.data(), Int{0});
    const Int cut = num_rows / 2;
    const RecurrenceStep before{{0, cut}, {1}, {}, {}, isa}, after{{0, num_rows - cut}, {1}, {num_rows - cut - 1}, {0}, isa};
    run(before, RecurrenceState{parts.state.data(), one_state}, parts.out.data(), Int{0});
    run(after, RecurrenceState{parts.state.data(), one_state}, parts.out.data() + cut * row_bytes, cut);
    EXPECT(whole.out == parts.out);
    EXPECT(std::memcmp(whole.state.data(), parts.state.data(), whole.state.size() * sizeof(float)) == 0);
    EXPECT(std::memcmp(whole.state.data(), whole.state.data() + one_state, static_cast<std::size_t>(one_state) * sizeof(float)) == 0);
    EXPECT(std::memcmp(whole.state.data() + 2 * one_state, start.data() + 2 * one_state, static_cast<std::size_t>(one_state) * sizeof(float)) == 0);
}

// The rows from `first` on.
RecurrenceInput input(const std::vector<unsigned char>& values, Element element, Int first, Int width, Int head) {
    return {values.data() + first * width * element_bytes(element), width, head};
}

RecurrenceInput input(const std::vector<float>& values, Int first, Int width, Int head) { return {values.data() + first * width, width, head}; }

void test_all(Isa isa, Element element, Random& random) {
    const Int rows = 2 + random.below(40), heads = 2, k_heads = 1 + random.below(2), k_dim = 1 + random.below(40), v_dim = 1 + random.below(100);
    const auto q = elements(random, element, rows * k_heads * k_dim), k = elements(random, element, rows * k_heads * k_dim);
    const auto v = elements(random, element, rows * heads * v_dim);
    const auto g = below_zero(random, rows * heads * k_dim), beta = floats(random, rows * heads);
    for (const bool corrects : {true, false}) {
        for (const bool per_channel : {true, false}) {
            if (!corrects && per_channel) continue;
            both_ways(isa, element, rows, heads * k_dim * v_dim, heads * v_dim, random,
                      [&](const RecurrenceStep& step, RecurrenceState state, void* out, Int first) {
                          const Int width = per_channel ? heads * k_dim : heads;
                          run_delta({&step, element, state, heads, k_dim, v_dim, k_heads, corrects, per_channel, corrects, 0.5f,
                                     input(q, element, first, k_heads * k_dim, k_dim), input(k, element, first, k_heads * k_dim, k_dim),
                                     input(v, element, first, heads * v_dim, v_dim), input(g, corrects ? first : 0, width, k_dim),
                                     input(beta, first, heads, 0), out});
                      });
        }
    }
    const Int size = k_dim, head_dim = v_dim;
    const auto dt = floats(random, rows * std::max(heads, head_dim)), a = below_zero(random, std::max(heads, head_dim * size));
    const auto b = elements(random, element, rows * heads * size), c = elements(random, element, rows * heads * size);
    for (const bool per_channel : {true, false}) {
        const Int count = per_channel ? 1 : heads;
        both_ways(isa, element, rows, count * head_dim * size, count * head_dim, random,
                  [&](const RecurrenceStep& step, RecurrenceState state, void* out, Int first) {
                      run_scan({&step, element, state, count, head_dim, size, count, per_channel, input(v, element, first, count * head_dim, head_dim),
                                input(b, element, first, count * size, size), input(c, element, first, count * size, size),
                                input(dt, first, per_channel ? head_dim : heads, 0), a.data(), dt.data(), out});
                  });
    }
    const Int channels = v_dim, width = 2 + random.below(7);
    const auto log_a = below_zero(random, rows * channels), weight = floats(random, channels * width);
    std::vector<unsigned char> marks(static_cast<std::size_t>(rows));
    marks[0] = 1;
    both_ways(isa, element, rows, channels, channels, random, [&](const RecurrenceStep& step, RecurrenceState state, void* out, Int first) {
        run_lru({&step, element, state, channels, input(v, element, first, channels, 0), input(log_a, first, channels, 0), marks.data() + first, out});
    });
    both_ways(isa, element, rows, channels * (width - 1), channels, random, [&](const RecurrenceStep& step, RecurrenceState state, void* out, Int first) {
        run_convolution({&step, element, state, channels, width, input(v, element, first, channels, 0), weight.data(), log_a.data(), true, out});
    });
}

}  // namespace

int main() {
    ThreadPool::instance().set_num_threads(2);
    Random random(1);
    for (const Isa isa : supported_isas()) {
        for (const Element element : {Element::f32, Element::bf16, Element::f16}) {
            for (int i = 0; i < 6; ++i) test_all(isa, element, random);
        }
    }
    std::puts("recurrences: ok");
    return 0;
}
