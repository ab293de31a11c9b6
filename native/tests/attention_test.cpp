// Attention of every variant that runs here: tokens written by slot, read through block tables, against sums in double, and
// each sequence in the batch against the sequence alone, bit for bit. Some batches share a prefix; then the blocks of that are
// the same, and the batch is also compared with itself without sharing.
//
// All buffers have exactly the size they were promised. Slots that were not written hold NaN and are poisoned besides, so
// that AddressSanitizer stops the test at the first byte read of them or beyond a row.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/attention.hpp"
#include "kernels/simd.hpp"
#include "kernels/thread_pool.hpp"
#include "tests/buffer.hpp"
#include "tests/testing.hpp"

using namespace quire;
using quire::testing::Buffer;
using quire::testing::Random;

namespace {

struct Shape {
    Element element;
    std::int64_t num_kv_heads, group, k_width, v_width, block_size;
    AttentionOptions options;
    std::vector<std::pair<std::int64_t, std::int64_t>> lengths;  // context and new tokens of each sequence
    std::int64_t shared;                                         // first tokens that all have alike; 0 with a window
};

std::int64_t first_seen(const AttentionOptions& options, std::int64_t position) {
    if (options.window > 0) return std::max<std::int64_t>(0, position - options.window + 1);
    return options.chunk > 0 ? position / options.chunk * options.chunk : 0;
}

// A batch in a storage [block, head, {K, V}, token, width] of its own.
class Case {
  public:
    Case(const Shape& shape, Random& random)
        : shape_(shape), pool_(shape.element, num_blocks(shape) * block_elements(shape)), view_(make_view()), sinks_(num_q_heads()), slopes_(num_q_heads()) {
        for (float& sink : sinks_) sink = static_cast<float>(random.below(100)) / 25.0f - 2.0f;
        if (shape_.options.sinks != nullptr) shape_.options.sinks = sinks_.data();
        for (float& slope : slopes_) slope = static_cast<float>(random.below(100)) / 200.0f - 0.01f;
        if (shape_.options.slopes != nullptr) shape_.options.slopes = slopes_.data();
        for (std::int64_t i = 0; i < pool_.count; ++i) pool_.set(i, std::numeric_limits<float>::quiet_NaN());
        ASAN_POISON_MEMORY_REGION(pool_.data.get(), static_cast<std::size_t>(pool_.count * element_bytes(shape_.element)));

        std::vector<std::int32_t> blocks(static_cast<std::size_t>(view_.num_blocks));
        for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<std::int32_t>(i);
        for (std::size_t i = blocks.size(); i > 1; --i) std::swap(blocks[i - 1], blocks[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);

        query_start_.push_back(0);
        for (const auto& [context, tokens] : shape_.lengths) {
            width_ = std::max(width_, (context + shape_.block_size - 1) / shape_.block_size);
            query_start_.push_back(query_start_.back() + static_cast<std::int32_t>(tokens));
            contexts_.push_back(static_cast<std::int32_t>(context));
        }
        tables_.assign(static_cast<std::size_t>(width_) * shape_.lengths.size(), -1);
        for (std::size_t s = 0; s < shape_.lengths.size(); ++s) {
            const auto [context, tokens] = shape_.lengths[s];
            const std::int64_t begin = first_seen(shape_.options, context - tokens);
            std::vector<std::int64_t> slots;
            for (std::int64_t t = begin; t < context; ++t) {
                const std::int64_t index = t / shape_.block_size;
                std::int32_t& block = tables_[s * static_cast<std::size_t>(width_) + static_cast<std::size_t>(index)];
                if (s > 0 && (index + 1) * shape_.block_size <= shape_.shared) block = tables_[static_cast<std::size_t>(index)];
                if (block < 0) block = blocks.back(), blocks.pop_back();
                slots.push_back(block * shape_.block_size + t % shape_.block_size);
                unpoison(slots.back());
            }
            begins_.push_back(begin);
            const auto count = static_cast<std::int64_t>(slots.size());
            keys_.emplace_back(shape_.element, count * shape_.num_kv_heads * shape_.k_width);
            values_.emplace_back(shape_.element, count * shape_.num_kv_heads * shape_.v_width);
            keys_.back().fill(random);
            values_.back().fill(random);
            for (auto* tokens : {&keys_, &values_}) {
                const auto bytes = shape_.shared * shape_.num_kv_heads * (tokens == &keys_ ? shape_.k_width : shape_.v_width) *
                                   element_bytes(shape_.element);
                if (s > 0) std::memcpy(tokens->back().data.get(), tokens->front().data.get(), static_cast<std::size_t>(bytes));
            }
            attention_write(view_, rows(keys_.back(), shape_.num_kv_heads, shape_.k_width), rows(values_.back(), shape_.num_kv_heads, shape_.v_width),
                            slots.data(), count, 2);
        }
        query_ = std::make_unique<Buffer>(shape_.element, query_start_.back() * num_q_heads() * shape_.k_width);
        query_->fill(random);
    }

    std::size_t num_sequences() const { return shape_.lengths.size(); }

    // Sequences [first, last) as one batch.
    Buffer run(Isa isa, std::size_t first, std::size_t last, int num_threads, bool share_prefixes = true) {
        std::vector<std::int32_t> starts;
        for (std::size_t s = first; s <= last; ++s) starts.push_back(query_start_[s] - query_start_[first]);
        Buffer out(shape_.element, starts.back() * num_q_heads() * shape_.v_width);
        TokenTensor query = rows(*query_, num_q_heads(), shape_.k_width);
        query.data += query_start_[first] * query.token_stride * element_bytes(shape_.element);
        const AttentionBatch batch(starts.data(), contexts_.data() + first, tables_.data() + first * static_cast<std::size_t>(width_),
                                   static_cast<std::int64_t>(last - first), width_, num_threads, share_prefixes);
        attention_run(view_, query, rows(out, num_q_heads(), shape_.v_width), num_q_heads(), batch, shape_.options, isa);
        const AttentionTraffic traffic = attention_traffic(view_, num_q_heads(), batch, shape_.options);
        EXPECT(traffic.num_shared_runs == 0 ? traffic.kv_bytes == traffic.unshared_kv_bytes : traffic.kv_bytes < traffic.unshared_kv_bytes);
        num_shared_runs_ += traffic.num_shared_runs;
        return out;
    }

    std::int64_t num_shared_runs() const { return num_shared_runs_; }

    void expect_right(const Buffer& out) const {
        const double bound = shape_.element == Element::f32 ? 1e-4 : shape_.element == Element::f16 ? 1e-2 : 6e-2;
        for (std::size_t s = 0; s < num_sequences(); ++s) {
            for (std::int32_t row = query_start_[s]; row < query_start_[s + 1]; ++row) {
                for (std::int64_t head = 0; head < num_q_heads(); ++head) expect_right(out, s, row, head, bound);
            }
        }
    }

    bool same_rows(const Buffer& batch, const Buffer& alone, std::size_t sequence) const {
        const std::int64_t row_bytes = num_q_heads() * shape_.v_width * element_bytes(shape_.element);
        return std::memcmp(batch.data.get() + query_start_[sequence] * row_bytes, alone.data.get(),
                           static_cast<std::size_t>(alone.count * element_bytes(shape_.element))) == 0;
    }

    void expect_refused(Isa isa) {
        std::int32_t& entry = tables_.back();
        const std::int32_t before = entry;
        for (const std::int32_t bad : {-1, static_cast<std::int32_t>(view_.num_blocks)}) {
            entry = bad;
            bool refused = false;
            try {
                run(isa, num_sequences() - 1, num_sequences(), 1);
            } catch (const std::invalid_argument&) {
                refused = true;
            }
            EXPECT(refused || contexts_.back() <= (width_ - 1) * shape_.block_size);
        }
        entry = before;
    }

  private:
    static std::int64_t num_blocks(const Shape& shape) {
        std::int64_t blocks = 1;
        for (const auto& [context, tokens] : shape.lengths) blocks += (context + shape.block_size - 1) / shape.block_size;
        return blocks;
    }
    static std::int64_t block_elements(const Shape& shape) { return shape.num_kv_heads * shape.block_size * (shape.k_width + shape.v_width); }
    std::int64_t num_q_heads() const { return shape_.num_kv_heads * shape_.group; }

    PagedView make_view() const {
        const std::int64_t head = shape_.block_size * (shape_.k_width + shape_.v_width), block = head * shape_.num_kv_heads;
        return {{pool_.data.get(), block, head, shape_.k_width, shape_.k_width},
                {pool_.data.get() + shape_.block_size * shape_.k_width * element_bytes(shape_.element), block, head, shape_.v_width, shape_.v_width},
                shape_.element, num_blocks(shape_), shape_.num_kv_heads, shape_.block_size};
    }
    static TokenTensor rows(const Buffer& buffer, std::int64_t heads, std::int64_t width) { return {buffer.data.get(), heads * width, width}; }

    void unpoison(std::int64_t slot) const {
        for (std::int64_t head = 0; head < shape_.num_kv_heads; ++head) {
            for (const PagedTensor* field : {&view_.k, &view_.v}) {
                const std::int64_t at = slot / shape_.block_size * field->block_stride + head * field->head_stride +
                                        slot % shape_.block_size * field->token_stride;
                ASAN_UNPOISON_MEMORY_REGION(field->data + at * element_bytes(shape_.element),
                                            static_cast<std::size_t>(field->width * element_bytes(shape_.element)));
            }
        }
    }

    void expect_right(const Buffer& out, std::size_t s, std::int64_t row, std::int64_t head, double bound) const {
        const auto [context, tokens] = shape_.lengths[s];
        const std::int64_t position = context - tokens + row - query_start_[s], kv_head = head / shape_.group;
        std::vector<double> weights, sums(static_cast<std::size_t>(shape_.v_width));
        double total = shape_.options.sinks != nullptr ? std::exp(static_cast<double>(sinks_[static_cast<std::size_t>(head)])) : 0.0;
        for (std::int64_t t = first_seen(shape_.options, position); t <= position; ++t) {
            double score = 0;
            const std::int64_t token = (t - begins_[s]) * shape_.num_kv_heads + kv_head;
            for (std::int64_t d = 0; d < shape_.k_width; ++d) {
                score += query_->get((row * num_q_heads() + head) * shape_.k_width + d) * keys_[s].get(token * shape_.k_width + d);
            }
            score *= static_cast<double>(shape_.options.scale);
            if (shape_.options.softcap > 0) score = shape_.options.softcap * std::tanh(score / shape_.options.softcap);
            if (shape_.options.slopes != nullptr) score += static_cast<double>(slopes_[static_cast<std::size_t>(head)]) * static_cast<double>(t - position);
            const double weight = std::exp(score);
            total += weight;
            for (std::int64_t d = 0; d < shape_.v_width; ++d) sums[static_cast<std::size_t>(d)] += weight * values_[s].get(token * shape_.v_width + d);
        }
        for (std::int64_t d = 0; d < shape_.v_width; ++d) {
            const double got = out.get((row * num_q_heads() + head) * shape_.v_width + d);
            EXPECT(std::fabs(got - sums[static_cast<std::size_t>(d)] / total) <= bound);
        }
    }

    Shape shape_;
    Buffer pool_;
    PagedView view_;
    std::vector<float> sinks_, slopes_;
    std::vector<std::int32_t> query_start_, contexts_, tables_;
    std::vector<std::int64_t> begins_;  // first token of each sequence that is in the storage
    std::vector<Buffer> keys_, values_;
    std::unique_ptr<Buffer> query_;
    std::int64_t width_ = 0;
    mutable std::int64_t num_shared_runs_ = 0;  // of all calls
};

Shape draw(Random& random, Element element) {
    static constexpr std::int64_t kBlockSizes[] = {1, 2, 7, 16, 17, 32, 64, 512};
    static constexpr float kAny = 0.0f;
    Shape shape{};
    shape.element = element;
    shape.num_kv_heads = 1 + random.below(3);
    shape.group = 1 + random.below(9);
    shape.k_width = 8 * (1 + random.below(random.below(8) == 0 ? 72 : 9));
    shape.v_width = random.below(2) != 0 ? shape.k_width : 8 * (1 + random.below(9));
    shape.block_size = kBlockSizes[random.below(8)];
    shape.options.scale = 1.0f / std::sqrt(static_cast<float>(shape.k_width));
    if (random.below(3) == 0) shape.options.window = 1 + random.below(60);
    else if (random.below(3) == 0) shape.options.chunk = 1 + random.below(60);
    if (random.below(4) == 0) shape.options.softcap = 3.0f;
    if (random.below(3) == 0) shape.options.sinks = &kAny;
    if (random.below(3) == 0) shape.options.slopes = &kAny;
    const bool limited = shape.options.window != 0 || shape.options.chunk != 0;
    if (!limited && random.below(2) != 0) shape.shared = 1 + random.below(random.below(6) == 0 ? 1100 : 80);
    for (std::int64_t n = 1 + random.below(shape.shared > 0 ? 7 : 3); n > 0; --n) {
        const std::int64_t context = shape.shared + 1 + random.below(random.below(12) == 0 ? 1300 : 90);
        shape.lengths.emplace_back(context, random.below(2) != 0 ? 1 : 1 + random.below(std::min<std::int64_t>(context, 24)));
    }
    return shape;
}

}  // namespace

int main() {
    ThreadPool::instance().set_num_threads(2);
    for (const Isa isa : supported_isas()) {
        const bool emulated = isa_name(isa).starts_with("emulated");
        Random random(7);
        std::int64_t num_shared_runs = 0;
        for (int i = 0; i < (emulated ? 60 : 300); ++i) {
            Case test(draw(random, static_cast<Element>(i % 3)), random);
            const Buffer batch = test.run(isa, 0, test.num_sequences(), 2);
            test.expect_right(batch);
            num_shared_runs += test.num_shared_runs();
            const Buffer unshared = test.run(isa, 0, test.num_sequences(), 1, false);
            EXPECT(std::memcmp(batch.data.get(), unshared.data.get(), static_cast<std::size_t>(batch.count * element_bytes(batch.element))) == 0);
            for (std::size_t s = 0; s < test.num_sequences(); ++s) EXPECT(test.same_rows(batch, test.run(isa, s, s + 1, 1), s));
            test.expect_refused(isa);
        }
        EXPECT(num_shared_runs > 0);
        std::printf("attention: %s, %d shared runs\n", std::string(isa_name(isa)).c_str(), static_cast<int>(num_shared_runs));
    }
    return 0;
}
