// Attention over keys and values in codes of 8 bits, of every variant that runs here: what was written by slot against the codes of
// kv_codes.hpp, what is read against sums in double over these codes, each sequence against the sequence alone, bit for bit.
//
// All buffers have exactly the size they were promised. Slots that were not written, and the bytes between a row's codes and its scale, are
// poisoned, so that AddressSanitizer stops the test at the first byte read of them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/attention.hpp"
#include "kernels/kv_codes.hpp"
#include "kernels/thread_pool.hpp"
#include "tests/buffer.hpp"
#include "tests/testing.hpp"

using namespace quire;
using quire::testing::Buffer;
using quire::testing::Random;

namespace {

using Int = std::int64_t;

struct Sequence {
    Int context, tokens;
    Buffer keys, values;  // [context, heads, width]
};

class Case {
  public:
    Case(Element element, Random& random)
        : element_(element), heads_(1 + random.below(3)), group_(1 + random.below(4)), width_(8 * (1 + random.below(18))), block_(1 + random.below(20)) {
        const Int row = width_ + 2 * random.below(3) + 2;  // codes, a gap, the scale
        for (Int n = 1 + random.below(3); n > 0; --n) {
            const Int context = 1 + random.below(90);
            sequences_.push_back({context, random.below(2) != 0 ? 1 : 1 + random.below(std::min<Int>(context, 24)), {element, context * heads_ * width_}, {element, context * heads_ * width_}});
        }
        Int num_blocks = 1;
        for (const Sequence& sequence : sequences_) num_blocks += (sequence.context + block_ - 1) / block_;
        pool_.assign(static_cast<std::size_t>(num_blocks * heads_ * block_ * 2 * row), 0x7f);
        const auto tensor = [&](Int offset) { return PagedTensor{pool_.data() + offset, heads_ * block_ * 2 * row, block_ * 2 * row, 2 * row, width_, row - 2}; };
        offset_.resize(static_cast<std::size_t>(heads_ * width_));
        for (float& value : offset_) value = static_cast<float>(random.below(100)) / 50.0f;
        view_ = {tensor(0), tensor(row), element, num_blocks, heads_, block_, true, random.below(2) != 0 ? offset_.data() : nullptr};
        ASAN_POISON_MEMORY_REGION(pool_.data(), pool_.size());
        std::int32_t next = static_cast<std::int32_t>(num_blocks) - 1;  // block 0 is nobody's
        starts_.push_back(0);
        for (const Sequence& sequence : sequences_) {
            table_width_ = std::max(table_width_, (sequence.context + block_ - 1) / block_);
            starts_.push_back(starts_.back() + static_cast<std::int32_t>(sequence.tokens));
            contexts_.push_back(static_cast<std::int32_t>(sequence.context));
        }
        tables_.assign(static_cast<std::size_t>(table_width_) * sequences_.size(), -1);
        for (std::size_t s = 0; s < sequences_.size(); ++s) {
            std::vector<Int> slots;
            for (Int t = 0; t < sequences_[s].context; ++t) {
                std::int32_t& block = tables_[s * static_cast<std::size_t>(table_width_) + static_cast<std::size_t>(t / block_)];
                if (block < 0) block = next--;
                slots.push_back(block * block_ + t % block_);
                for (const PagedTensor* field : {&view_.k, &view_.v}) {
                    for (Int head = 0; head < heads_; ++head) {
                        unsigned char* const at = row_at(*field, slots.back(), head);
                        ASAN_UNPOISON_MEMORY_REGION(at, static_cast<std::size_t>(width_));
                        ASAN_UNPOISON_MEMORY_REGION(at + field->scale, 2);
                    }
                }
            }
            sequences_[s].keys.fill(random);
            sequences_[s].values.fill(random);
            attention_write(view_, rows(sequences_[s].keys), rows(sequences_[s].values), slots.data(), sequences_[s].context, 2);
            slots_.push_back(slots);
        }
        query_ = std::make_unique<Buffer>(element, starts_.back() * heads_ * group_ * width_);
        query_->fill(random);
        if (random.below(3) == 0) window_ = 1 + random.below(60);
    }
    ~Case() { ASAN_UNPOISON_MEMORY_REGION(pool_.data(), pool_.size()); }

    std::size_t num_sequences() const { return sequences_.size(); }

    void expect_codes() const {
        std::vector<float> row(static_cast<std::size_t>(width_));
        std::vector<std::int8_t> codes(row.size());
        for (std::size_t s = 0; s < sequences_.size(); ++s) {
            for (Int t = 0; t < sequences_[s].context; ++t) {
                for (Int head = 0; head < heads_; ++head) {
                    for (const PagedTensor* field : {&view_.k, &view_.v}) {
                        const bool keys = field == &view_.k;
                        const Buffer& from = keys ? sequences_[s].keys : sequences_[s].values;
                        for (Int d = 0; d < width_; ++d) {
                            const auto value = static_cast<float>(from.get((t * heads_ + head) * width_ + d));
                            row[static_cast<std::size_t>(d)] = keys && view_.k_offset != nullptr ? value - offset_[static_cast<std::size_t>(head * width_ + d)] : value;
                        }
                        if (keys) turn(row.data(), static_cast<int>(width_));
                        bf16 scale;
                        encode(row.data(), static_cast<int>(width_), codes.data(), &scale);
                        const unsigned char* at = row_at(*field, slots_[s][static_cast<std::size_t>(t)], head);
                        EXPECT(std::memcmp(at, codes.data(), codes.size()) == 0 && std::memcmp(at + field->scale, &scale, sizeof scale) == 0);
                    }
                }
            }
        }
    }

    // Sequences [first, last) as one batch.
    Buffer run(Isa isa, std::size_t first, std::size_t last) const {
        std::vector<std::int32_t> starts;
        for (std::size_t s = first; s <= last; ++s) starts.push_back(starts_[s] - starts_[first]);
        Buffer out(element_, starts.back() * heads_ * group_ * width_);
        TokenTensor query = rows(*query_, group_);
        query.data += starts_[first] * query.token_stride * element_bytes(element_);
        const AttentionBatch batch(starts.data(), contexts_.data() + first, tables_.data() + first * static_cast<std::size_t>(table_width_), static_cast<Int>(last - first), table_width_, 2);
        attention_run(view_, query, rows(out, group_), heads_ * group_, batch, {scale(), window_, 0, 0.0f, nullptr, nullptr}, isa);
        return out;
    }

    bool same_rows(const Buffer& all, const Buffer& alone, std::size_t sequence) const {
        const Int bytes = element_bytes(element_);
        return std::memcmp(all.data.get() + starts_[sequence] * heads_ * group_ * width_ * bytes, alone.data.get(), static_cast<std::size_t>(alone.count * bytes)) == 0;
    }

    void expect_right(const Buffer& out) const {
        const double bound = element_ == Element::f32 ? 1e-3 : element_ == Element::f16 ? 1e-2 : 6e-2;
        std::vector<float> turned(static_cast<std::size_t>(width_));
        std::vector<double> sums(turned.size());
        for (std::size_t s = 0; s < sequences_.size(); ++s) {
            for (Int row = starts_[s]; row < starts_[s + 1]; ++row) {
                const Int position = sequences_[s].context - sequences_[s].tokens + row - starts_[s];
                for (Int head = 0; head < heads_ * group_; ++head) {
                    const Int first = (row * heads_ * group_ + head) * width_;
                    for (Int d = 0; d < width_; ++d) turned[static_cast<std::size_t>(d)] = static_cast<float>(query_->get(first + d));
                    turn_query(turned.data(), static_cast<int>(width_));
                    double total = 0;
                    std::fill(sums.begin(), sums.end(), 0.0);
                    for (Int t = window_ > 0 ? std::max<Int>(0, position - window_ + 1) : 0; t <= position; ++t) {
                        const unsigned char* k = row_at(view_.k, slots_[s][static_cast<std::size_t>(t)], head / group_);
                        const unsigned char* v = row_at(view_.v, slots_[s][static_cast<std::size_t>(t)], head / group_);
                        double score = 0;
                        for (Int d = 0; d < width_; ++d) score += static_cast<double>(turned[static_cast<std::size_t>(d)]) * static_cast<std::int8_t>(k[d]);
                        const double weight = std::exp(score * number(k + view_.k.scale) * static_cast<double>(scale()));
                        total += weight;
                        for (Int d = 0; d < width_; ++d) sums[static_cast<std::size_t>(d)] += weight * number(v + view_.v.scale) * static_cast<std::int8_t>(v[d]);
                    }
                    for (Int d = 0; d < width_; ++d) EXPECT(std::fabs(out.get(first + d) - sums[static_cast<std::size_t>(d)] / total) <= bound);
                }
            }
        }
    }

  private:
    unsigned char* row_at(const PagedTensor& field, Int slot, Int head) const {
        return field.data + slot / block_ * field.block_stride + head * field.head_stride + slot % block_ * field.token_stride;
    }
    static double number(const unsigned char* scale) { return static_cast<double>(to_float(Buffer::read<bf16>(scale))); }
    TokenTensor rows(const Buffer& buffer, Int group = 1) const { return {buffer.data.get(), heads_ * group * width_, width_}; }
    float scale() const { return 1.0f / std::sqrt(static_cast<float>(width_)); }

    Element element_;
    Int heads_, group_, width_, block_, table_width_ = 0, window_ = 0;
    std::vector<Sequence> sequences_;
    std::vector<unsigned char> pool_;
    std::vector<float> offset_;
    PagedView view_{};
    std::vector<std::int32_t> starts_, contexts_, tables_;
    std::vector<std::vector<Int>> slots_;
    std::unique_ptr<Buffer> query_;
};

}  // namespace

int main() {
    ThreadPool::instance().set_num_threads(2);
    for (const Isa isa : supported_isas()) {
        Random random(5);
        for (int i = 0; i < (isa_name(isa).starts_with("emulated") ? 24 : 90); ++i) {
            const Case test(static_cast<Element>(i % 3), random);
            test.expect_codes();
            const Buffer all = test.run(isa, 0, test.num_sequences());
            test.expect_right(all);
            for (std::size_t s = 0; s < test.num_sequences(); ++s) EXPECT(test.same_rows(all, test.run(isa, s, s + 1), s));
        }
    }
    std::puts("attention over codes: ok");
}
