// The thread pool, linear layers (dense and of codes), a mixer and attention, called from several host threads at once while another changes the number of
// threads: each call has the bits it has alone, and ThreadSanitizer (scripts/sanitize thread) finds no race.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels/attention.hpp"
#include "kernels/linear.hpp"
#include "kernels/state_mixer.hpp"
#include "kernels/thread_pool.hpp"
#include "tests/testing.hpp"

using namespace quire;
using quire::testing::Random;

namespace {

constexpr int kHosts = 3, kRounds = 24;

std::vector<float> random_floats(std::size_t count, std::uint64_t seed) {
    Random random(seed);
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(random.below(2001) - 1000) / 500.0f;
    return values;
}

// Runs `call(host)` on kHosts threads, kRounds times each, and set_num_threads meanwhile.
template <class Call>
void from_many_threads(Call&& call) {
    std::atomic<int> running{kHosts};
    std::vector<std::thread> hosts;
    for (int host = 0; host < kHosts; ++host) {
        hosts.emplace_back([&, host] {
            for (int round = 0; round < kRounds; ++round) call(host);
            running.fetch_sub(1);
        });
    }
    ThreadPool& pool = ThreadPool::instance();
    for (int count = 0; running.load() != 0; ++count) {
        pool.set_num_threads(1 + count % 4);
        EXPECT(pool.num_threads() == 1 + count % 4);
        std::this_thread::yield();
    }
    for (std::thread& host : hosts) host.join();
}

void test_pool() {
    from_many_threads([](int host) {
        std::vector<std::int64_t> done(static_cast<std::size_t>(40 + host), 0);
        ThreadPool::instance().run(static_cast<std::int64_t>(done.size()), [&](std::int64_t index) { done[static_cast<std::size_t>(index)] += index + 1; });
        for (std::size_t index = 0; index < done.size(); ++index) EXPECT(done[index] == static_cast<std::int64_t>(index) + 1);
    });
}

// One weight, which all host threads multiply by and gather from.
void test_linear(Isa isa) {
    constexpr std::int64_t kOutputs = 200, kInputs = 96, kRows = 20;
    const std::vector<float> weight = random_floats(kOutputs * kInputs, 1), x = random_floats(kRows * kInputs, 2);
    const PackedWeight packed(Element::f32, weight.data(), kOutputs, kInputs, kInputs, 1, isa);
    std::vector<float> expected(kRows * kOutputs);
    packed.multiply(x.data(), kRows, nullptr, expected.data());
    from_many_threads([&](int host) {
        std::vector<float> out(kRows * kOutputs), dense(kOutputs * kInputs);
        packed.multiply(x.data(), kRows, nullptr, out.data());
        EXPECT(out == expected);
        if (host == 0) {
            packed.unpack(dense.data());
            EXPECT(dense == weight);
        } else {
            const PackedWeight again(Element::f32, weight.data(), kOutputs, kInputs, kInputs, 1, isa);
            EXPECT(std::memcmp(again.data(), packed.data(), packed.num_bytes()) == 0);
        }
    });
}

// The same of a weight held as codes.
void test_codes(Isa isa) {
    constexpr std::int64_t kOutputs = 200, kInputs = 96, kGroup = 32, kRows = 40;
    Random random(5);
    std::vector<std::uint8_t> codes(kOutputs * kInputs);
    for (std::uint8_t& code : codes) code = static_cast<std::uint8_t>(random.below(16));
    const std::vector<float> scales = random_floats(kOutputs * (kInputs / kGroup), 6), x = random_floats(kRows * kInputs, 7);
    QuantizedParts parts;
    parts.codes = codes.data(), parts.bits = 4, parts.num_outputs = kOutputs, parts.num_inputs = kInputs, parts.group = kGroup;
    parts.scales = parts.minimums = {scales.data(), Number::f32, nullptr, Number::none, 1};
    std::vector<std::uint16_t> rows(x.size());  // bf16: the matrix unit takes them
    for (std::size_t i = 0; i < x.size(); ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, &x[i], sizeof bits);
        rows[i] = static_cast<std::uint16_t>(bits >> 16);
    }
    const PackedWeight packed(Element::bf16, parts, isa);
    std::vector<std::uint16_t> expected(kRows * kOutputs);
    packed.multiply(rows.data(), kRows, nullptr, expected.data());
    from_many_threads([&](int host) {
        std::vector<std::uint16_t> out(kRows * kOutputs);
        packed.multiply(rows.data(), kRows, nullptr, out.data());
        EXPECT(out == expected);
        if (host != 0) return;
        const PackedWeight again(Element::bf16, parts, isa);
        EXPECT(std::memcmp(again.data(), packed.data(), packed.num_bytes()) == 0);
    });
}

// One mixer, whose weights all host threads use, each with states of its own.
void test_mixer(Isa isa) {
    constexpr std::int64_t kHidden = 32, kHeads = 2, kWidth = 3, kRows = 70, kInner = 2 * kHidden;
    const std::vector<float> weight = random_floats(3 * kInner * kHidden, 8), hidden = random_floats(kRows * kHidden, 9);
    const PackedWeight in(Element::f32, weight.data(), 3 * kInner, kHidden, kHidden, 1, isa), out(Element::f32, weight.data(), kHidden, kInner, kInner, 1, isa);
    MixerParts parts;
    parts.kind = MixerParts::convolution_alone;
    parts.inputs = {{&in, nullptr}};
    parts.output = {&out, nullptr};
    parts.x = {{0, 0, kInner}}, parts.gate = {{0, kInner, kInner}}, parts.b = {{0, 2 * kInner, kInner}};
    parts.convolution = weight.data(), parts.convolution_width = kWidth;
    parts.num_heads = kHeads, parts.head_dim = kInner / kHeads, parts.size = 1, parts.num_groups = 1;
    check_parts(parts);
    const auto run = [&] {
        std::vector<float> result(kRows * kHidden), state(kInner * (kWidth - 1), 0.0f);
        run_mixer(parts, {{0, kRows}, {0}, {}, {}, isa}, {state.data(), kInner * (kWidth - 1)}, {nullptr, 0}, hidden.data(), result.data());
        result.insert(result.end(), state.begin(), state.end());
        return result;
    };
    const std::vector<float> expected = run();
    from_many_threads([&](int) { EXPECT(run() == expected); });
}

// One batch over one view, of which the host threads ask at once, each with slots of its own to write to.
void test_attention(Isa isa) {
    constexpr std::int64_t kBlock = 16, kHeads = 2, kGroup = 2, kWidth = 32, kShared = 8, kBlocks = kShared + kHosts, kContext = kShared * kBlock;
    std::vector<float> pool = random_floats(static_cast<std::size_t>(kBlocks * kBlock * kHeads * 2 * kWidth), 3);
    const auto tensor = [&](std::int64_t offset) {
        return PagedTensor{reinterpret_cast<unsigned char*>(pool.data() + offset), kHeads * kBlock * 2 * kWidth, kBlock * 2 * kWidth, 2 * kWidth, kWidth};
    };
    const PagedView view{tensor(0), tensor(kWidth), Element::f32, kBlocks, kHeads, kBlock};
    std::vector<std::int32_t> starts{0, 3, 4, 20}, contexts{kContext, kContext - 5, kContext - 1}, tables;
    for (std::size_t s = 0; s < contexts.size(); ++s) {
        for (std::int32_t block = 0; block < kShared; ++block) tables.push_back(block);
    }
    const std::int64_t rows = starts.back(), row = kHeads * kGroup * kWidth;
    std::vector<float> query = random_floats(static_cast<std::size_t>(rows * row), 4);
    const AttentionOptions options{0.2f, 0, 0, 0.0f, nullptr, nullptr};
    const auto run = [&](const AttentionBatch& batch, std::vector<float>& out) {
        attention_run(view, {reinterpret_cast<unsigned char*>(query.data()), row, kWidth}, {reinterpret_cast<unsigned char*>(out.data()), row, kWidth},
                      kHeads * kGroup, batch, options, isa);
    };
    const auto batch_of = [&] { return AttentionBatch(starts.data(), contexts.data(), tables.data(), 3, kShared, 4); };
    std::vector<float> expected(query.size());
    run(batch_of(), expected);
    const AttentionBatch shared = batch_of();
    from_many_threads([&](int host) {
        std::vector<float> out(query.size()), keys(static_cast<std::size_t>(kBlock * kHeads * kWidth), static_cast<float>(host));
        std::vector<std::int64_t> slots;
        for (std::int64_t token = 0; token < kBlock; ++token) slots.push_back((kShared + host) * kBlock + token);
        auto* from = reinterpret_cast<unsigned char*>(keys.data());
        attention_write(view, {from, kHeads * kWidth, kWidth}, {from, kHeads * kWidth, kWidth}, slots.data(), kBlock, 4);
        run(shared, out);
        EXPECT(out == expected);
        run(batch_of(), out);
        EXPECT(out == expected);
    });
}

}  // namespace

int main() {
    test_pool();
    for (const Isa isa : supported_isas()) {
        if (isa_name(isa).starts_with("emulated")) continue;  // lane by lane; the others' code
        test_linear(isa);
        test_codes(isa);
        test_mixer(isa);
        test_attention(isa);
    }
    std::puts("ok");
}
