#include "kernels/attention.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include <sys/mman.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/attention_schedule.hpp"
#include "kernels/kv_codes.hpp"
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

// Grows to the calling thread's largest call, so that a step's calls need no system calls.
struct Workspace {
    std::unique_ptr<std::atomic<std::int32_t>[]> counters;  // of splits, then of runs
    std::size_t num_counters = 0;
    AlignedBuffer<float> states;
    std::int64_t num_states = 0;
};

template <int kBits, int kValueBits>
AttentionVariant variant_for_codes(Isa isa, bool bf16) {
    switch (isa) {
#if defined(__x86_64__)
        case Isa::amx_bf16: return bf16 ? attention_codes_item_amx_bf16<kBits, kValueBits> : attention_codes_item_avx512<kBits, kValueBits>;
        case Isa::avx512_bf16: case Isa::avx512: return attention_codes_item_avx512<kBits, kValueBits>;
        case Isa::avx2: return attention_codes_item_avx2<kBits, kValueBits>;
#endif
#if defined(QUIRE_TEST_KERNELS)
        case Isa::emulated_amx_bf16:
            return bf16 ? attention_codes_item_emulated_amx_bf16<kBits, kValueBits> : attention_codes_item_emulated_avx512<kBits, kValueBits>;
        case Isa::emulated_avx512_bf16: case Isa::emulated_avx512: return attention_codes_item_emulated_avx512<kBits, kValueBits>;
#endif
        default: return attention_codes_item_portable<kBits, kValueBits>;
    }
}

AttentionVariant variant_for(Isa isa, const PagedView& view) {
    const bool bf16 = view.element == Element::bf16;
    if (view.coded && view.k.bits == 4) return variant_for_codes<4, 4>(isa, bf16);
    if (view.coded && view.v.bits == 4) return variant_for_codes<8, 4>(isa, bf16);
    if (view.coded) return variant_for_codes<8, 8>(isa, bf16);
    switch (isa) {
#if defined(__x86_64__)
        case Isa::amx_bf16: return bf16 ? attention_item_amx_bf16 : attention_item_avx512;
        case Isa::avx512_bf16: return bf16 ? attention_item_avx512_bf16 : attention_item_avx512;
        case Isa::avx512: return attention_item_avx512;
        case Isa::avx2: return attention_item_avx2;
#endif
#if defined(QUIRE_TEST_KERNELS)
        case Isa::emulated_amx_bf16: return bf16 ? attention_item_emulated_amx_bf16 : attention_item_emulated_avx512;
        case Isa::emulated_avx512_bf16: return bf16 ? attention_item_emulated_avx512_bf16 : attention_item_emulated_avx512;
        case Isa::emulated_avx512: return attention_item_emulated_avx512;
#endif
        default: return attention_item_portable;
    }
}

}  // namespace

unsigned char* attention_scratch() {
    thread_local const AlignedBuffer<unsigned char> buffer = aligned_buffer<unsigned char>(kScratchBytes);
    return buffer.get();
}

void attention_wait(const std::atomic<std::int32_t>& items_left) {
    constexpr int kSpins = 4096;  // some 100 us; then the thread that computes them may need this processor
    for (int spins = 0; items_left.load(std::memory_order_acquire) != 0; ++spins) {
        if (spins < kSpins) {
            pause_briefly();
        } else {
            std::this_thread::yield();
        }
    }
}

void attention_run(const PagedView& view, const TokenTensor& query, const TokenTensor& out, std::int64_t num_q_heads,
                   const AttentionBatch& batch, const AttentionOptions& options, Isa isa) {
    const Span span(Operator::attention);
    if (view.k.width % 8 != 0 || view.v.width % 8 != 0 || view.k.width < 8 || view.v.width < 8 || view.k.width > kMaxHeadWidth ||
        view.v.width > kMaxHeadWidth) {
        throw std::invalid_argument("expected heads of 8 to " + std::to_string(kMaxHeadWidth) + " elements, in multiples of 8, got " +
                                    std::to_string(view.k.width) + " for keys and " + std::to_string(view.v.width) + " for values");
    }
    if (view.k_offset != nullptr && (options.softcap > 0.0f || options.sinks != nullptr)) {
        throw std::invalid_argument("expected keys as they are for a layer with a soft cap or sinks, which see what is taken off them, got keys with an offset");
    }
    const AttentionSchedule& schedule = batch.schedules->of(view, batch, options, num_q_heads, isa);
    thread_local Workspace workspace;
    if (workspace.num_states < schedule.num_floats) {
        workspace.states = aligned_buffer<float>(schedule.num_floats);
        workspace.num_states = schedule.num_floats;
    }
    const std::size_t num_splits = schedule.splits.size(), num_counters = num_splits + schedule.runs.size();
    if (workspace.num_counters < num_counters) {
        workspace.counters = std::make_unique<std::atomic<std::int32_t>[]>(num_counters);
        workspace.num_counters = num_counters;
    }
    std::atomic<std::int32_t>*items_done = workspace.counters.get(), *items_left = items_done + num_splits;
    for (std::size_t i = 0; i < num_splits; ++i) items_done[i].store(0, std::memory_order_relaxed);
    for (std::size_t i = 0; i < schedule.runs.size(); ++i) items_left[i].store(schedule.runs[i].num_items, std::memory_order_relaxed);
    const AttentionJob job{&view,
                           &query,
                           &out,
                           &batch,
                           &options,
                           static_cast<std::int32_t>(num_q_heads),
                           schedule.items.data(),
                           schedule.splits.data(),
                           schedule.runs.data(),
                           state_stride(view.v.width, sums_by_lanes(isa, view)),
                           schedule.shared_tokens.data(),
                           items_done,
                           items_left,
                           workspace.states.get()};
    const AttentionVariant variant = variant_for(isa, view);
    run_on(batch.num_threads, static_cast<std::int64_t>(schedule.items.size()), [&](std::int64_t i) { variant(job, i); });
}

AttentionTraffic attention_traffic(const PagedView& view, std::int64_t num_q_heads, const AttentionBatch& batch, const AttentionOptions& options) {
    return batch.schedules->of(view, batch, options, num_q_heads, current_isa()).traffic;
}

void attention_store(const PagedView& view, const PagedTensor& to, const unsigned char* from, std::int64_t slot, std::int64_t head) {
    const std::int64_t block = slot / view.block_size, offset = slot % view.block_size;
    unsigned char* target = to.data + (block * to.block_stride + offset * to.token_stride + head * to.head_stride) * view.stored_bytes();
    if (!view.coded) {
        std::memcpy(target, from, static_cast<std::size_t>(to.width * view.stored_bytes()));
        return;
    }
    float row[kMaxHeadWidth];
    const int width = static_cast<int>(to.width);
    switch (view.element) {
        case Element::f32: widen_row<float>(from, width, row); break;
        case Element::bf16: widen_row<bf16>(from, width, row); break;
        case Element::f16: widen_row<f16>(from, width, row); break;
    }
    if (&to == &view.k) {
        if (view.k_offset != nullptr) {
            for (int d = 0; d < width; ++d) row[d] -= view.k_offset[head * width + d];
        }
        turn(row, width);
    }
    if (to.bits == 4) return encode_groups(row, width, target, target + to.scale);
    bf16 scale;
    encode(row, width, reinterpret_cast<std::int8_t*>(target), &scale);
    std::memcpy(target + to.scale, &scale, sizeof scale);
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
    const auto store = [&](const TokenTensor& from, const PagedTensor& to, std::int64_t token) {
        const unsigned char* source = from.data + token * from.token_stride * bytes;
        for (std::int64_t head = 0; head < view.num_kv_heads; ++head) attention_store(view, to, source + head * from.head_stride * bytes, slots[token], head);
    };
    constexpr std::int64_t kTaskBytes = 256 * 1024;
    const std::int64_t token_bytes = view.num_kv_heads * view.token_bytes();
    const std::int64_t step = std::max<std::int64_t>(1, kTaskBytes / token_bytes);
    run_on(num_threads, (num_tokens + step - 1) / step, [&](std::int64_t task) {
        for (std::int64_t t = task * step; t < std::min(num_tokens, (task + 1) * step); ++t) {
            store(k, view.k, t);
            if (!view.values_in_keys()) store(v, view.v, t);
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
// Intrinsics, not a compiled loop, so that memory bandwidth is measured.
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
    constexpr int kMostRepetitions = 1000;
    if (num_bytes < (1 << 20) || repetitions < 1 || repetitions > kMostRepetitions) {
        throw std::invalid_argument("expected at least 1 MiB and 1 to " + std::to_string(kMostRepetitions) + " repetitions, got " +
                                    std::to_string(num_bytes) + " bytes and " + std::to_string(repetitions));
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
