// The fused decoder layer of every variant that runs here, in buffers of exactly the size it was promised: its rows in
// company and alone, its KV in the slots, the MLP in more than one piece, the argmax of a row; and a decoder of one layer.
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kernels/decoder_layer.hpp"
#include "kernels/simd.hpp"
#include "kernels/thread_pool.hpp"
#include "tests/buffer.hpp"
#include "tests/testing.hpp"

using namespace quire;
using quire::testing::Buffer;
using quire::testing::Random;

namespace {

constexpr std::int64_t kHidden = 52, kInner = 37, kHeads = 4, kKvHeads = 2, kWidth = 8, kBlock = 4, kBlocks = 6;

struct Layer {
    Layer(Element element, Isa isa, Random& random)
        : qkv(make(element, (kHeads + 2 * kKvHeads) * kWidth, kHidden, isa, random)),
          output(make(element, kHidden, kHeads * kWidth, isa, random)),
          gate(make(element, kInner, kHidden, isa, random)),
          up(make(element, kInner, kHidden, isa, random)),
          down(make(element, kHidden, kInner, isa, random)),
          weight(Element::f32, kHidden) {
        weight.fill(random);
        const Norm norm{Norm::rms, reinterpret_cast<const float*>(weight.data.get()), nullptr, 1e-5f};
        attention.around = {norm, {}, true, 1.0f};
        attention.qkv = {{&qkv, nullptr}};
        attention.rotation = Rotation::halves;
        attention.output = {&output, nullptr};
        attention.num_q_heads = kHeads;
        mlp.around = {norm, norm, true, 0.5f};
        mlp.inputs = {{&gate, nullptr}, {&up, nullptr}};
        mlp.output = {&down, nullptr};
        check_parts(attention);
        check_parts(mlp);
    }

    static PackedWeight make(Element element, std::int64_t outputs, std::int64_t inputs, Isa isa, Random& random) {
        Buffer dense(element, outputs * inputs);
        dense.fill(random);
        return PackedWeight(element, dense.data.get(), outputs, inputs, inputs, 1, isa);
    }

    PackedWeight qkv, output, gate, up, down;
    Buffer weight;
    AttentionParts attention;
    MlpParts mlp;
};

// One sequence of `rows` new tokens in blocks 3, 1, 4; its answer.
Buffer run(const Layer& layer, Element element, const Buffer& hidden, const Buffer& cos, const Buffer& sin, std::int64_t first, std::int64_t rows,
           Buffer& pool) {
    const std::int64_t head = 2 * kBlock * kWidth;
    const PagedView view{{pool.data.get(), kKvHeads * head, head, kWidth, kWidth},
                         {pool.data.get() + kBlock * kWidth * element_bytes(element), kKvHeads * head, head, kWidth, kWidth},
                         element, kBlocks, kKvHeads, kBlock};
    const std::int32_t table[3] = {3, 1, 4}, query_start[2] = {0, static_cast<std::int32_t>(rows)},
                       context[1] = {static_cast<std::int32_t>(first + rows)};
    const AttentionBatch batch(query_start, context, table, 1, 3, 2);
    const AttentionOptions options{0.3f, 0, 0, 0.0f, nullptr, nullptr};
    std::vector<std::int64_t> slots;
    for (std::int64_t t = first; t < first + rows; ++t) slots.push_back(table[t / kBlock] * kBlock + t % kBlock);
    const std::int64_t bytes = element_bytes(element);
    const auto at = [&](const Buffer& buffer, std::int64_t width) { return buffer.data.get() + first * width * bytes; };
    Buffer out(element, rows * kHidden);
    run_attention(layer.attention, {rows, &view, &batch, &options, slots.data(), at(cos, kWidth), at(sin, kWidth), kWidth}, at(hidden, kHidden),
                  out.data.get());
    run_mlp(layer.mlp, rows, out.data.get(), out.data.get());
    return out;
}

void test_rows_alone_and_in_company(Element element, Isa isa, Random& random) {
    constexpr std::int64_t kRows = 11;
    const Layer layer(element, isa, random);
    Buffer hidden(element, kRows * kHidden), cos(element, kRows * kWidth), sin(element, kRows * kWidth);
    hidden.fill(random);
    cos.fill(random);
    sin.fill(random);
    const std::int64_t pool_size = kBlocks * kKvHeads * 2 * kBlock * kWidth;
    Buffer together(element, pool_size), apart(element, pool_size);
    for (std::int64_t i = 0; i < pool_size; ++i) together.set(i, NAN), apart.set(i, NAN);
    const Buffer all = run(layer, element, hidden, cos, sin, 0, kRows, together);
    for (std::int64_t row = 0; row < kRows; ++row) {
        const Buffer one = run(layer, element, hidden, cos, sin, row, 1, apart);
        const auto bytes = static_cast<std::size_t>(kHidden * element_bytes(element));
        EXPECT(std::memcmp(one.data.get(), all.data.get() + static_cast<std::size_t>(row) * bytes, bytes) == 0);
        for (std::int64_t d = 0; d < kHidden; ++d) EXPECT(std::isfinite(one.get(d)));
    }
    const auto pool_bytes = static_cast<std::size_t>(pool_size * element_bytes(element));
    EXPECT(std::memcmp(together.data.get(), apart.data.get(), pool_bytes) == 0);
}

void test_mlp_in_pieces(Isa isa, Random& random) {
    constexpr std::int64_t kRows = 1003;
    const Layer layer(Element::f32, isa, random);
    Buffer hidden(Element::f32, kRows * kHidden), out(Element::f32, kRows * kHidden), one(Element::f32, kHidden);
    hidden.fill(random);
    run_mlp(layer.mlp, kRows, hidden.data.get(), out.data.get());
    for (const std::int64_t row : {std::int64_t{0}, std::int64_t{351}, std::int64_t{352}, kRows - 1}) {
        const std::size_t bytes = kHidden * 4, at = static_cast<std::size_t>(row) * bytes;
        run_mlp(layer.mlp, 1, hidden.data.get() + at, one.data.get());
        EXPECT(std::memcmp(one.data.get(), out.data.get() + at, bytes) == 0);
    }
}

// From ids to logits, against the same operators called one by one.
void test_decoder(Element element, Isa isa, Random& random) {
    constexpr std::int64_t kRows = 7, kVocabulary = 45, kPositions = 9, kLogits = 2;
    const std::int64_t bytes = element_bytes(element), row_bytes = kHidden * bytes, angle_bytes = kWidth * bytes;
    const Layer layer(element, isa, random);
    const PackedWeight embedding = Layer::make(element, kVocabulary, kHidden, isa, random), head = Layer::make(element, kVocabulary, kHidden, isa, random);
    Buffer cos(element, kPositions * kWidth), sin(element, kPositions * kWidth), taken_cos(element, kRows * kWidth), taken_sin(element, kRows * kWidth);
    cos.fill(random);
    sin.fill(random);
    std::vector<std::int64_t> ids{0, 44, 7, 7, 31, 32, 1}, positions{0, 1, 2, 3, 4, 8, 6};
    const std::vector<std::int64_t> logit_rows{6, 2};
    for (std::int64_t row = 0; row < kRows; ++row) {
        std::memcpy(taken_cos.data.get() + row * angle_bytes, cos.data.get() + positions[row] * angle_bytes, static_cast<std::size_t>(angle_bytes));
        std::memcpy(taken_sin.data.get() + row * angle_bytes, sin.data.get() + positions[row] * angle_bytes, static_cast<std::size_t>(angle_bytes));
    }
    const std::int64_t pool_size = kBlocks * kKvHeads * 2 * kBlock * kWidth;
    Buffer pool(element, pool_size), hidden(element, kRows * kHidden), normed(element, kLogits * kHidden), want(element, kLogits * kVocabulary);
    for (std::int64_t i = 0; i < pool_size; ++i) pool.set(i, NAN);
    embedding.gather_rows(ids.data(), kRows, hidden.data.get());
    const Buffer out = run(layer, element, hidden, taken_cos, taken_sin, 0, kRows, pool);
    const DecoderEnds ends{&embedding, layer.mlp.around.before, {&head, nullptr}};
    for (std::int64_t i = 0; i < kLogits; ++i) {
        run_norm(ends.norm, element, isa, out.data.get() + logit_rows[i] * row_bytes, 1, kHidden, normed.data.get() + i * row_bytes);
    }
    head.multiply(normed.data.get(), kLogits, nullptr, want.data.get());

    const std::int64_t head_size = 2 * kBlock * kWidth;
    const PagedView view{{pool.data.get(), kKvHeads * head_size, head_size, kWidth, kWidth},
                         {pool.data.get() + kBlock * kWidth * bytes, kKvHeads * head_size, head_size, kWidth, kWidth},
                         element, kBlocks, kKvHeads, kBlock};
    const std::int32_t table[3] = {3, 1, 4}, query_start[2] = {0, kRows}, context[1] = {kRows};
    const AttentionBatch batch(query_start, context, table, 1, 3, 2);
    const AttentionOptions options{0.3f, 0, 0, 0.0f, nullptr, nullptr};
    const std::vector<std::int64_t> slots{12, 13, 14, 15, 4, 5, 6};
    const StackedLayer stacked{&layer.attention, &layer.mlp, &view, &batch, &options, slots.data()};
    const auto logits_of = [&](const DecoderEnds& around, void* given) {
        Buffer got(element, kLogits * kVocabulary);
        run_decoder(around, &stacked, 1,
                    {kRows, ids.data(), given, positions.data(), cos.data.get(), sin.data.get(), kWidth, kPositions, logit_rows.data(), kLogits},
                    got.data.get());
        return got;
    };
    const auto size = static_cast<std::size_t>(kLogits * kVocabulary * bytes);
    EXPECT(std::memcmp(logits_of(ends, nullptr).data.get(), want.data.get(), size) == 0);
    EXPECT(std::memcmp(logits_of({nullptr, ends.norm, ends.head}, hidden.data.get()).data.get(), want.data.get(), size) == 0);

    const auto refused = [&](std::vector<std::int64_t>& numbers, std::int64_t wrong) {
        const std::int64_t right = std::exchange(numbers[5], wrong);
        bool thrown = false;
        try {
            logits_of(ends, nullptr);
        } catch (const std::out_of_range&) {
            thrown = true;
        }
        numbers[5] = right;
        return thrown;
    };
    EXPECT(refused(positions, kPositions));
    EXPECT(refused(positions, -1));
    EXPECT(refused(ids, kVocabulary));
}

void test_argmax(Element element, Isa isa, Random& random) {
    for (const std::int64_t width : {1, 15, 64, 1025, 2051}) {
        Buffer x(element, 3 * width);
        x.fill(random);
        std::int64_t indices[3];
        float best[3];
        run_argmax(element, isa, x.data.get(), 3, width, indices, best);
        for (std::int64_t row = 0; row < 3; ++row) {
            std::int64_t first = 0;
            for (std::int64_t i = 1; i < width; ++i) {
                if (x.get(row * width + i) > x.get(row * width + first)) first = i;
            }
            EXPECT(indices[row] == first);
            EXPECT(static_cast<double>(best[row]) == x.get(row * width + first));
        }
    }
}

}  // namespace

int main() {
    Random random(7);
    ThreadPool::instance().set_num_threads(2);
    for (const Isa isa : supported_isas()) {
        for (const Element element : {Element::f32, Element::bf16, Element::f16}) {
            test_rows_alone_and_in_company(element, isa, random);
            test_argmax(element, isa, random);
            test_decoder(element, isa, random);
        }
        test_mlp_in_pieces(isa, random);
    }
    return 0;
}
