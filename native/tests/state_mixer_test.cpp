// The mixer half of state layers, in memory of exactly the size it was promised: sequences in company in one call against each alone, cut
// into two calls, in every variant that runs here. Slots that a step does not name hold NaN.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/simd.hpp"
#include "kernels/state_mixer.hpp"
#include "kernels/thread_pool.hpp"
#include "tests/buffer.hpp"
#include "tests/testing.hpp"

using namespace quire;
using quire::testing::Buffer;
using quire::testing::Random;

namespace {

using Int = std::int64_t;

constexpr Int kHidden = 21, kHeads = 4, kHeadDim = 6, kSize = 5, kGroups = 2, kConvolution = 4, kSlots = 4;
constexpr Int kInner = kHeads * kHeadDim, kKeys = kGroups * kSize;

std::vector<float> floats(Random& random, Int count, float low, float high) {
    std::vector<float> made(static_cast<std::size_t>(count));
    for (float& value : made) value = low + (high - low) * static_cast<float>(random.below(1001)) / 1000.0f;
    return made;
}

struct Mixer {
    Mixer(MixerParts::Kind kind, Element element, Isa isa, Random& random)
        : norm_weight(floats(random, kHidden, -1.0f, 1.0f)),
          convolution(floats(random, (kInner + 2 * kKeys) * kConvolution, -1.0f, 1.0f)),
          bias(floats(random, kInner + 2 * kKeys, -1.0f, 1.0f)),
          rate(floats(random, kHeads, -1.0f, -0.1f)),
          shift(floats(random, kHeads, -1.0f, 1.0f)),
          skip(floats(random, kHeads, -1.0f, 1.0f)),
          gated_weight(floats(random, kInner, -1.0f, 1.0f)),
          element(element) {
        parts.kind = kind;
        parts.num_heads = kHeads, parts.head_dim = kHeadDim, parts.size = kSize, parts.num_groups = kGroups, parts.convolution_width = kConvolution;
        parts.convolution = convolution.data();
        parts.norm_width = parts.weight_width = kHeadDim;
        switch (kind) {
            case MixerParts::delta:  // what passes the convolution is put together of three
                widths = {kInner + kKeys, kKeys + kInner + 2 * kHeads};
                parts.gate = {{0, 0, kInner}};
                parts.x = {{0, kInner, kKeys}, {1, 0, kKeys}, {1, kKeys, kInner}};
                parts.a = {{1, kKeys + kInner, kHeads}};
                parts.b = {{1, kKeys + kInner + kHeads, kHeads}};
                parts.factor = 2.0f;
                break;
            case MixerParts::scan:
                widths = {2 * kInner + 2 * kKeys + kHeads};
                parts.gate = {{0, 0, kInner}};
                parts.x = {{0, kInner, kInner + 2 * kKeys}};
                parts.a = {{0, 2 * kInner + 2 * kKeys, kHeads}};
                parts.convolution_bias = bias.data();
                parts.skip = skip.data();
                parts.most_step = 100.0f;
                parts.norm_width = parts.weight_width = kInner;
                parts.norm.gates_first = true;
                break;
            case MixerParts::convolution_alone:
                widths = {3 * kInner};
                parts.b = {{0, 0, kInner}};
                parts.gate = {{0, kInner, kInner}};
                parts.x = {{0, 2 * kInner, kInner}};
                break;
        }
        parts.rate = rate.data();
        parts.shift = shift.data();
        parts.norm.weight = gated_weight.data();
        parts.norm.epsilon = 1e-5f;
        parts.around.before = {Norm::rms, norm_weight.data(), nullptr, 1e-5f};
        parts.around.residual = true;
        for (const Int width : widths) weights.push_back(make(element, width, kHidden, isa, random));
        weights.push_back(make(element, kHidden, kInner, isa, random));
        for (std::size_t i = 0; i < widths.size(); ++i) parts.inputs.push_back({&weights[i], nullptr});
        parts.output = {&weights.back(), nullptr};
        check_parts(parts);
    }

    static PackedWeight make(Element element, Int outputs, Int inputs, Isa isa, Random& random) {
        Buffer dense(element, outputs * inputs);
        dense.fill(random);
        return PackedWeight(element, dense.data.get(), outputs, inputs, inputs, 1, isa);
    }
    Int convolution_state() const { return parts.channels() * (kConvolution - 1); }
    Int state() const { return parts.kind == MixerParts::convolution_alone ? 0 : kHeads * kHeadDim * kSize; }

    std::vector<float> norm_weight, convolution, bias, rate, shift, skip, gated_weight;
    Element element;
    std::vector<Int> widths;
    std::vector<PackedWeight> weights;
    MixerParts parts;
};

// Both states of every slot.
struct States {
    explicit States(const Mixer& mixer)
        : convolution(static_cast<std::size_t>(kSlots * mixer.convolution_state()), std::numeric_limits<float>::quiet_NaN()),
          state(static_cast<std::size_t>(kSlots * mixer.state()), std::numeric_limits<float>::quiet_NaN()),
          convolution_stride(mixer.convolution_state()), state_stride(mixer.state()) {}

    void clear(Int slot) {
        std::fill_n(convolution.data() + slot * convolution_stride, convolution_stride, 0.0f);
        std::fill_n(state.data() + slot * state_stride, state_stride, 0.0f);
    }
    bool operator==(const States& other) const {
        const auto same = [](const std::vector<float>& a, const std::vector<float>& b) { return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0; };
        return same(convolution, other.convolution) && (state.empty() || same(state, other.state));
    }

    std::vector<float> convolution, state;
    Int convolution_stride, state_stride;
};

void run(const Mixer& mixer, const RecurrenceStep& step, States& states, const Buffer& hidden, Buffer& out, Int first) {
    const Int offset = first * kHidden * element_bytes(mixer.element);
    run_mixer(mixer.parts, step, {states.convolution.data(), states.convolution_stride}, {states.state.data(), states.state_stride},
              hidden.data.get() + offset, out.data.get() + offset);
}

// Sequences of these lengths in slots 3 and 1, the state after the last row of the second also in slot 0.
void test(MixerParts::Kind kind, Element element, Isa isa, Int first, Int second, Random& random) {
    const Mixer mixer(kind, element, isa, random);
    const Int rows = first + second, cut = second / 2;
    Buffer hidden(element, rows * kHidden), together(element, rows * kHidden), apart(element, rows * kHidden);
    hidden.fill(random);
    States all(mixer);
    for (const Int slot : {3, 1}) all.clear(slot);
    States parts = all;
    run(mixer, {{0, first, rows}, {3, 1}, {rows - 1}, {0}, isa}, all, hidden, together, 0);
    run(mixer, {{0, first}, {3}, {}, {}, isa}, parts, hidden, apart, 0);
    if (cut > 0) run(mixer, {{0, cut}, {1}, {}, {}, isa}, parts, hidden, apart, first);
    run(mixer, {{0, second - cut}, {1}, {second - cut - 1}, {0}, isa}, parts, hidden, apart, first + cut);
    EXPECT(std::memcmp(together.data.get(), apart.data.get(), static_cast<std::size_t>(rows * kHidden * element_bytes(element))) == 0);
    EXPECT(all == parts);
    for (Int i = 0; i < together.count; ++i) EXPECT(std::isfinite(together.get(i)));
    EXPECT(std::isnan(all.convolution[static_cast<std::size_t>(2 * all.convolution_stride)]));
}

}  // namespace

int main() {
    Random random(3);
    for (const int num_threads : {1, 3}) {
        ThreadPool::instance().set_num_threads(num_threads);
        for (const Isa isa : supported_isas()) {
            const bool emulated = isa_name(isa).starts_with("emulated");
            for (const Element element : {Element::f32, Element::bf16, Element::f16}) {
                for (const auto kind : {MixerParts::delta, MixerParts::scan, MixerParts::convolution_alone}) {
                    test(kind, element, isa, 1, 1, random);
                    test(kind, element, isa, 5, 18, random);
                    if (!emulated) test(kind, element, isa, 40, 463, random);  // rows that go through in more than one part
                }
            }
        }
    }
    std::puts("mixers: ok");
}
