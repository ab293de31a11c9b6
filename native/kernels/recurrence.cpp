// Cuts a call of a recurrence into tasks for the threads; see recurrence.hpp.
#include "kernels/recurrence.hpp"

#include "kernels/rounding.hpp"
#include "kernels/thread_pool.hpp"

namespace quire {

namespace {

using Int = std::int64_t;

const RecurrenceKernels& kernels_of(Isa isa, Element element) {
    switch (isa) {
#if defined(__x86_64__)
        case Isa::avx2: return recurrence_kernels_avx2(element);
        case Isa::avx512:
        case Isa::avx512_bf16:
        case Isa::amx_bf16: return recurrence_kernels_avx512(element);
#endif
#if defined(QUIRE_TEST_KERNELS)
        case Isa::emulated_avx512:
        case Isa::emulated_avx512_bf16:
        case Isa::emulated_amx_bf16: return recurrence_kernels_emulated_avx512(element);
#endif
        default: return recurrence_kernels_portable(element);
    }
}

// Parts that `size` is cut into, in whole blocks, where there are `others` pieces of work besides: some for each thread.
Int part_of(Int size, Int block, Int others) {
    const Int wanted = divide_up(Int{8} * ThreadPool::instance().num_threads(), others);
    return round_up(divide_up(size, wanted), block);
}

// Sequences that a cut may count on to be equal pieces: one where some have many rows, which are cut as if they were alone.
Int equal_sequences(const RecurrenceStep& step) { return step.num_rows() == step.num_sequences() ? step.num_sequences() : 1; }

// Heads of a task: in a decode step some that follow each other in memory, as many as leave enough tasks.
Int heads_of_task(const RecurrenceStep& step, Int num_heads) {
    return step.num_rows() == step.num_sequences() ? part_of(num_heads, 1, step.num_sequences()) : 1;
}

// Columns of a state that a thread keeps a copy of: some 4 MiB, and one block at least.
Int most_columns(Int k_dim) { return std::clamp((Int{1} << 20) / k_dim / kDeltaColumns, Int{1}, Int{128}) * kDeltaColumns; }

}  // namespace

void run_scan(const ScanJob& job) {
    const RecurrenceKernels& kernels = kernels_of(job.step->isa, job.element);
    const Int part = part_of(job.head_dim, kScanRows, equal_sequences(*job.step) * job.num_heads), parts = divide_up(job.head_dim, part);
    const Int heads = heads_of_task(*job.step, job.num_heads), head_parts = divide_up(job.num_heads, heads);
    ThreadPool::instance().run(job.step->num_sequences() * head_parts * parts, [&](Int index) {
        const Int first = index % parts * part, piece = index / parts, head = piece % head_parts * heads;
        kernels.scan(job, piece / head_parts, head, std::min(head + heads, job.num_heads), first, std::min(first + part, job.head_dim));
    });
}

void run_delta(const DeltaJob& job) {
    const RecurrenceKernels& kernels = kernels_of(job.step->isa, job.element);
    const Int part = std::min(part_of(job.v_dim, kDeltaColumns, equal_sequences(*job.step) * job.num_heads), most_columns(job.k_dim));
    const Int heads = heads_of_task(*job.step, job.num_heads), head_parts = divide_up(job.num_heads, heads);
    const Int parts = divide_up(job.v_dim, part);
    ThreadPool::instance().run(job.step->num_sequences() * head_parts * parts, [&](Int index) {
        const Int first = index % parts * part, piece = index / parts, head = piece % head_parts * heads;
        kernels.delta(job, piece / head_parts, head, std::min(head + heads, job.num_heads), first, std::min(first + part, job.v_dim));
    });
}

void run_lru(const LruJob& job) {
    const RecurrenceKernels& kernels = kernels_of(job.step->isa, job.element);
    const Int pieces = job.step->num_sequences(), part = part_of(job.num_channels, kChannelBlock, equal_sequences(*job.step));
    const Int parts = divide_up(job.num_channels, part);
    ThreadPool::instance().run(pieces * parts, [&](Int index) {
        const Int first = index % parts * part;
        kernels.lru(job, index / parts, first, std::min(first + part, job.num_channels));
    });
}

void run_convolution(const ConvolutionJob& job) {
    const RecurrenceKernels& kernels = kernels_of(job.step->isa, job.element);
    // A task's weights are laid out for all of its sequences.
    const Int blocks = divide_up(job.num_channels, kChannelBlock), part = part_of(job.step->num_sequences(), 1, blocks);
    const Int parts = divide_up(job.step->num_sequences(), part);
    ThreadPool::instance().run(blocks * parts, [&](Int index) {
        const Int first = index % blocks * kChannelBlock, sequence = index / blocks * part;
        kernels.convolve(job, sequence, std::min(sequence + part, job.step->num_sequences()), first,
                         std::min(first + kChannelBlock, job.num_channels));
    });
}

}  // namespace quire
