#include "kernels/attention.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include <sys/mman.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/attention_kernel.hpp"
#include "kernels/profile.hpp"
#include "kernels/thread_pool.hpp"

namespace quire {

alignas(64) const unsigned char kZeroRow[kMaxHeadWidth * 4] = {};

namespace {

struct AlignedFree {
    void operator()(void* data) const { ::operator delete(data, std::align_val_t{64}); }
};
template <class T>
using AlignedBuffer = std::unique_ptr<T, AlignedFree>;

template <class T>
AlignedBuffer<T> aligned_buffer(std::int64_t count) {
    return AlignedBuffer<T>(static_cast<T*>(::operator new(static_cast<std::size_t>(count) * sizeof(T), std::align_val_t{64})));
}

template <class Task>
void run_on(int num_threads, std::int64_t num_tasks, Task&& task) {
    if (num_threads > 1 && num_tasks > 1) {
        ThreadPool::instance().run(num_tasks, task);
    } else {
        for (std::int64_t i = 0; i < num_tasks; ++i) task(i);
    }
}

// Grown to the largest call of the thread that asks, so that a step's calls do not each ask the operating system.
struct Workspace {
    std::vector<AttentionItem> items;
    std::vector<AttentionSplit> splits;
    std::unique_ptr<std::atomic<std::int32_t>[]> items_done;
    std::size_t num_items_done = 0;
    AlignedBuffer<float> states;
    std::int64_t num_states = 0;
};

AttentionVariant variant_for(Isa isa, Element element) {
    const bool bf16 = element == Element::bf16;
    switch (isa) {
#if defined(__x86_64__)
        case Isa::amx_bf16: return bf16 ? attention_item_amx_bf16 : attention_item_avx512;
        case Isa::avx512_bf16: return bf16 ? attention_item_avx512_bf16 : attention_item_avx512;
        case Isa::avx512: return attention_item_avx512;
        case Isa::avx2: return attention_item_avx2;
#endif
        case Isa::emulated_amx_bf16: return bf16 ? attention_item_emulated_amx_bf16 : attention_item_emulated_avx512;
        case Isa::emulated_avx512_bf16: return bf16 ? attention_item_emulated_avx512_bf16 : attention_item_emulated_avx512;
        case Isa::emulated_avx512: return attention_item_emulated_avx512;
        default: return attention_item_portable;
    }
}

void check_tables(const PagedView& view, const AttentionBatch& batch, const AttentionOptions& options) {
    for (std::int64_t s = 0; s < batch.num_sequences; ++s) {
        const std::int64_t context = batch.context_lengths[s], num_rows = batch.query_start[s + 1] - batch.query_start[s];
        if (num_rows < 1 || context < num_rows || (context - 1) / view.block_size >= batch.table_width) {
            throw std::invalid_argument("expected 1 to context_length query rows and a table of the context's blocks, got " +
                                        std::to_string(num_rows) + " rows, a context of " + std::to_string(context) + " and " +
                                        std::to_string(batch.table_width) + " blocks of " + std::to_string(view.block_size) +
                                        " for sequence " + std::to_string(s));
        }
        const std::int64_t begin = first_visible(options, context - num_rows);
        const std::int32_t* table = batch.block_tables + s * batch.table_width;
        std::uint32_t most = 0;  // -1 is the largest of all
        for (std::int64_t b = begin / view.block_size; b <= (context - 1) / view.block_size; ++b) {
            most = std::max(most, static_cast<std::uint32_t>(table[b]));
        }
        if (most >= static_cast<std::uint64_t>(view.num_blocks)) {
            throw std::invalid_argument("expected blocks of 0 to " + std::to_string(view.num_blocks - 1) + " for positions " +
                                        std::to_string(begin) + " to " + std::to_string(context - 1) + ", got " +
                                        std::to_string(static_cast<std::int32_t>(most)) + " in the table of sequence " + std::to_string(s));
        }
    }
}

// Cuts a call into items of about equal work: enough that no thread waits long for another, none so small that handing
// it out costs more than doing it. It decides nothing about the results (A2).
class Partition {
  public:
    Partition(const PagedView& view, const AttentionBatch& batch, const AttentionOptions& options, std::int64_t num_q_heads,
              Workspace& workspace)
        : view_(view), batch_(batch), options_(options), group_(num_q_heads / view.num_kv_heads), workspace_(workspace) {
        workspace.items.clear();
        workspace.splits.clear();
        constexpr std::int64_t kItemsPerThread = 8, kLeastCost = 4096;
        for (std::int64_t s = 0; s < batch.num_sequences; ++s) {
            each_row_tile(s, [&](const RowTile& tile) { total_ += tile.cost * view.num_kv_heads; });
        }
        target_ = batch.num_threads == 1 ? total_ : std::max(kLeastCost, total_ / (kItemsPerThread * batch.num_threads));
        for (std::int64_t s = 0; s < batch.num_sequences; ++s) {
            each_row_tile(s, [&](const RowTile& tile) { cut(tile); });
        }
    }
    std::int64_t num_floats() const { return num_floats_; }

  private:
    struct RowTile {
        std::int64_t sequence, start, stop, partial_start, partial_stop, cost;  // of one kv head
    };

    // The last rows of a prefill first: they see most.
    template <class Visit>
    void each_row_tile(std::int64_t s, Visit&& visit) const {
        const std::int64_t context = batch_.context_lengths[s], num_tokens = batch_.query_start[s + 1] - batch_.query_start[s];
        const std::int64_t num_rows = num_tokens * group_, tiles = (num_rows + kItemRows - 1) / kItemRows;
        const std::int64_t step = (num_rows + tiles - 1) / tiles;
        for (std::int64_t tile = tiles; tile-- > 0;) {
            const std::int64_t start = tile * step, stop = std::min(num_rows, start + step);
            if (start >= stop) continue;
            const std::int64_t first = context - num_tokens + start / group_, last = context - num_tokens + (stop - 1) / group_;
            const std::int64_t begin = first_visible(options_, first);
            // In tokens read; six rows are about as dear to compute as a token is to read.
            visit(RowTile{s, start, stop, begin / kPartialTokens, last / kPartialTokens + 1, (last + 1 - begin) * (6 + stop - start)});
        }
    }

    void cut(const RowTile& tile) {
        const std::int64_t num_partials = tile.partial_stop - tile.partial_start, rows = tile.stop - tile.start;
        // Few rows: several heads together, in the order in which a block's heads lie in memory.
        std::int64_t heads = std::min(view_.num_kv_heads, std::max<std::int64_t>(1, kItemRows / rows));
        std::int64_t partials = num_partials;
        if (tile.cost * heads > target_) {
            partials = std::clamp<std::int64_t>(num_partials * target_ / (tile.cost * heads), 1, num_partials);
            const std::int64_t cost = tile.cost * partials / num_partials;
            if (cost * heads > target_) heads = std::clamp<std::int64_t>(target_ / std::max<std::int64_t>(cost, 1), 1, heads);
        }
        const std::int64_t head_items = (view_.num_kv_heads + heads - 1) / heads;
        heads = (view_.num_kv_heads + head_items - 1) / head_items;
        for (std::int64_t head = 0; head < view_.num_kv_heads; head += heads) {
            const std::int64_t head_stop = std::min(view_.num_kv_heads, head + heads);
            const std::int64_t num_items = (num_partials + partials - 1) / partials;
            std::int32_t split = -1;
            if (num_items > 1) {
                split = static_cast<std::int32_t>(workspace_.splits.size());
                workspace_.splits.push_back({num_floats_, static_cast<std::int32_t>(tile.partial_start), static_cast<std::int32_t>(num_partials),
                                             static_cast<std::int32_t>(num_items)});
                num_floats_ += num_partials * state_floats(rows * (head_stop - head), view_.v.width);
            }
            for (std::int64_t partial = tile.partial_start; partial < tile.partial_stop; partial += partials) {
                workspace_.items.push_back({static_cast<std::int32_t>(tile.sequence), static_cast<std::int32_t>(head),
                                            static_cast<std::int32_t>(head_stop), static_cast<std::int32_t>(tile.start),
                                            static_cast<std::int32_t>(tile.stop), static_cast<std::int32_t>(partial),
                                            static_cast<std::int32_t>(std::min(tile.partial_stop, partial + partials)), split});
            }
        }
    }

    const PagedView& view_;
    const AttentionBatch& batch_;
    const AttentionOptions& options_;
    const std::int64_t group_;
    Workspace& workspace_;
    std::int64_t total_ = 0;
    std::int64_t target_ = 0;
    std::int64_t num_floats_ = 0;
};

}  // namespace

unsigned char* attention_scratch() {
    thread_local const AlignedBuffer<unsigned char> buffer = aligned_buffer<unsigned char>(kScratchBytes);
    return buffer.get();
}

void attention_run(const PagedView& view, const TokenTensor& query, const TokenTensor& out, std::int64_t num_q_heads,
                   const AttentionBatch& batch, const AttentionOptions& options, Isa isa) {
    const Span span(Operator::attention);
    if (view.k.width % 8 != 0 || view.v.width % 8 != 0 || view.k.width < 8 || view.v.width < 8 || view.k.width > kMaxHeadWidth ||
        view.v.width > kMaxHeadWidth) {
        throw std::invalid_argument("expected heads of 8 to 512 elements, in multiples of 8, got " + std::to_string(view.k.width) +
                                    " for keys and " + std::to_string(view.v.width) + " for values");
    }
    check_tables(view, batch, options);
    thread_local Workspace workspace;
    const Partition partition(view, batch, options, num_q_heads, workspace);
    if (workspace.num_states < partition.num_floats()) {
        workspace.states = aligned_buffer<float>(partition.num_floats());
        workspace.num_states = partition.num_floats();
    }
    if (workspace.num_items_done < workspace.splits.size()) {
        workspace.items_done = std::make_unique<std::atomic<std::int32_t>[]>(workspace.splits.size());
        workspace.num_items_done = workspace.splits.size();
    }
    for (std::size_t i = 0; i < workspace.splits.size(); ++i) workspace.items_done[i].store(0, std::memory_order_relaxed);
    const AttentionJob job{&view,   &query, &out, &batch, &options, static_cast<std::int32_t>(num_q_heads), workspace.items.data(),
                           workspace.splits.data(), workspace.items_done.get(), workspace.states.get()};
    const AttentionVariant variant = variant_for(isa, view.element);
    run_on(batch.num_threads, static_cast<std::int64_t>(workspace.items.size()), [&](std::int64_t i) { variant(job, i); });
}

void check_slots(const PagedView& view, const std::int64_t* slots, std::int64_t num_tokens) {
    const std::int64_t num_slots = view.num_blocks * view.block_size;
    for (std::int64_t t = 0; t < num_tokens; ++t) {
        if (slots[t] < 0 || slots[t] >= num_slots) {
            throw std::invalid_argument("expected slots of 0 to " + std::to_string(num_slots - 1) + ", got " + std::to_string(slots[t]) +
                                        " for token " + std::to_string(t));
        }
    }
}

void attention_write(const PagedView& view, const TokenTensor& k, const TokenTensor& v, const std::int64_t* slots, std::int64_t num_tokens,
                     int num_threads) {
    const Span span(Operator::kv_write);
    check_slots(view, slots, num_tokens);
    const std::int64_t bytes = element_bytes(view.element);
    const auto copy = [&](const TokenTensor& from, const PagedTensor& to, std::int64_t token, std::int64_t block, std::int64_t offset) {
        const unsigned char* source = from.data + token * from.token_stride * bytes;
        unsigned char* target = to.data + (block * to.block_stride + offset * to.token_stride) * bytes;
        for (std::int64_t head = 0; head < view.num_kv_heads; ++head) {
            std::memcpy(target + head * to.head_stride * bytes, source + head * from.head_stride * bytes, static_cast<std::size_t>(to.width * bytes));
        }
    };
    constexpr std::int64_t kTaskBytes = 256 * 1024;
    const std::int64_t token_bytes = view.num_kv_heads * (view.k.width + view.v.width) * bytes;
    const std::int64_t step = std::max<std::int64_t>(1, kTaskBytes / token_bytes);
    run_on(num_threads, (num_tokens + step - 1) / step, [&](std::int64_t task) {
        for (std::int64_t t = task * step; t < std::min(num_tokens, (task + 1) * step); ++t) {
            const std::int64_t block = slots[t] / view.block_size, offset = slots[t] % view.block_size;
            copy(k, view.k, t, block, offset);
            copy(v, view.v, t, block, offset);
        }
    });
}

namespace {

std::uint64_t sum_words(const std::uint64_t* words, std::int64_t count) {
    std::uint64_t sum = 0;
    for (std::int64_t i = 0; i < count; ++i) sum += words[i];
    return sum;
}

#if defined(__x86_64__)
// Intrinsics, not a loop for the compiler: what is measured must be the memory.
__attribute__((target("avx2"))) std::uint64_t sum_words_avx2(const std::uint64_t* words, std::int64_t count) {
    const auto* from = reinterpret_cast<const __m256i*>(words);
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (std::int64_t i = 0; i < count / 4; i += 4) {
        a = _mm256_add_epi64(a, _mm256_load_si256(from + i));
        b = _mm256_add_epi64(b, _mm256_load_si256(from + i + 1));
        c = _mm256_add_epi64(c, _mm256_load_si256(from + i + 2));
        d = _mm256_add_epi64(d, _mm256_load_si256(from + i + 3));
    }
    alignas(32) std::uint64_t sums[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(sums), _mm256_add_epi64(_mm256_add_epi64(a, b), _mm256_add_epi64(c, d)));
    return sums[0] + sums[1] + sums[2] + sums[3];
}
#endif

}  // namespace

double read_bandwidth(std::int64_t num_bytes, int repetitions) {
    if (num_bytes < (1 << 20) || repetitions < 1) {
        throw std::invalid_argument("expected at least 1 MiB and 1 repetition, got " + std::to_string(num_bytes) + " bytes and " +
                                    std::to_string(repetitions));
    }
    const std::int64_t num_words = num_bytes / 8;
    const AlignedBuffer<std::uint64_t> buffer = aligned_buffer<std::uint64_t>(num_words);
#if defined(MADV_HUGEPAGE)
    madvise(reinterpret_cast<void*>(padded_to(reinterpret_cast<std::intptr_t>(buffer.get()), 4096)), static_cast<std::size_t>(num_bytes) - 4096,
            MADV_HUGEPAGE);  // as the storage has them
#endif
    std::fill_n(buffer.get(), num_words, std::uint64_t{1});
    constexpr std::int64_t kPieceWords = (1 << 20) / 8;
    const std::int64_t num_pieces = num_words / kPieceWords;
    std::atomic<std::uint64_t> sum{0};
    auto* read = sum_words;
#if defined(__x86_64__)
    if (isa_supported(Isa::avx2)) read = sum_words_avx2;
#endif
    double best = 0;
    for (int i = 0; i < repetitions; ++i) {
        const auto start = std::chrono::steady_clock::now();
        ThreadPool::instance().run(num_pieces, [&](std::int64_t piece) {
            sum.fetch_add(read(buffer.get() + piece * kPieceWords, kPieceWords), std::memory_order_relaxed);
        });
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        best = std::max(best, static_cast<double>(num_pieces * kPieceWords * 8) / seconds.count());
    }
    if (sum.load() != static_cast<std::uint64_t>(num_pieces * kPieceWords * repetitions)) std::abort();
    return best;
}

}  // namespace quire
