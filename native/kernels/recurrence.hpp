// The recurrences of state layers (Mamba 1 and 2, gated delta rule and KDA, linear attention, RG-LRU, short convolution) over
// the rows of many sequences: token by token, in float32. src/quire/recurrence/reference_recurrence.py is the definition.
//
//   R1  A row's result and a state depend only on that sequence's rows and state: sums have one order, whatever the cut
//       of the work, so a prompt may be cut into calls anywhere.
//   R2  Slots that the step does not name are neither read nor written.
//   R3  The binding checks the targets of a call before: slots are distinct and exist, sizes are 1 or more.
//
// Work is cut into sequences x heads (or blocks of channels), and into blocks of columns if these are few. All tokens
// of a sequence pass over a block that stays in the first cache.
//
// Cost: a decode step reads and writes each state once.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/element.hpp"
#include "kernels/isa.hpp"

namespace quire {

// Rows, slots and checkpoints of one call; checkpoints in rising order of their rows.
struct RecurrenceStep {
    std::vector<std::int64_t> starts;  // [num_sequences + 1]
    std::vector<std::int64_t> slots;
    std::vector<std::int64_t> checkpoint_rows;
    std::vector<std::int64_t> checkpoint_slots;
    Isa isa;

    std::int64_t num_sequences() const { return static_cast<std::int64_t>(slots.size()); }
    std::int64_t num_rows() const { return starts.back(); }
};

// Rows in memory; strides in elements.
struct RecurrenceInput {
    const void* data;
    std::int64_t row_stride;
    std::int64_t head_stride;  // 0 where there are no heads
};

struct RecurrenceState {
    float* data;
    std::int64_t slot_stride;
};

// Mamba 1 (`a` per channel and column, one head of all channels) and Mamba 2 (`a` per head).
struct ScanJob {
    const RecurrenceStep* step;
    Element element;  // of x, b, c and out
    RecurrenceState state;
    std::int64_t num_heads, head_dim, state_size, num_groups;
    bool per_channel;  // dt [rows, head_dim], a [head_dim, state_size], d [head_dim]; else dt [rows, heads], a and d [heads]
    RecurrenceInput x, b, c;
    RecurrenceInput dt;  // float32
    const float* a;
    const float* d;  // or null
    void* out;
    bool is_wide;  // out is float32, whatever the element
};

// Gated delta rule, KDA and linear attention.
struct DeltaJob {
    const RecurrenceStep* step;
    Element element;  // of q, k, v and out
    RecurrenceState state;
    std::int64_t num_heads, k_dim, v_dim, num_k_heads;
    bool corrects;     // delta rule; else linear attention: g [heads], no beta
    bool per_channel;  // g [rows, heads, k_dim]; else [rows, heads]
    bool normalize;
    float scale;
    RecurrenceInput q, k, v;
    RecurrenceInput g, beta;  // float32
    void* out;
    bool is_wide;  // out is float32, whatever the element
};

struct LruJob {
    const RecurrenceStep* step;
    Element element;  // of x and out
    RecurrenceState state;
    std::int64_t num_channels;
    RecurrenceInput x;
    RecurrenceInput log_a;        // float32
    const unsigned char* first;  // [rows] or null
    void* out;
};

struct ConvolutionJob {
    const RecurrenceStep* step;
    Element element;  // of x and out
    RecurrenceState state;
    std::int64_t num_channels, width;
    RecurrenceInput x;
    const float* weight;  // [channels, width]
    const float* bias;    // [channels] or null
    bool silu;
    void* out;
};

constexpr std::int64_t kMostConvolutionWidth = 8;
constexpr float kDeltaNormEpsilon = 1e-6f;

void run_scan(const ScanJob& job);
void run_delta(const DeltaJob& job);
void run_lru(const LruJob& job);
void run_convolution(const ConvolutionJob& job);

// What a variant gives: rows [first, last) of each head's state (scan), columns of it (delta), channels (the others).
struct RecurrenceKernels {
    void (*scan)(const ScanJob& job, std::int64_t sequence, std::int64_t first_head, std::int64_t last_head, std::int64_t first, std::int64_t last);
    void (*delta)(const DeltaJob& job, std::int64_t sequence, std::int64_t first_head, std::int64_t last_head, std::int64_t first, std::int64_t last);
    void (*lru)(const LruJob& job, std::int64_t sequence, std::int64_t first, std::int64_t last);
    void (*convolve)(const ConvolutionJob& job, std::int64_t first_sequence, std::int64_t last_sequence, std::int64_t first, std::int64_t last);
};

// What the parts of a cut are multiples of: the blocks that kernels keep in the first cache.
constexpr std::int64_t kScanRows = 32, kDeltaColumns = 32, kChannelBlock = 128;

#define QUIRE_DECLARE_RECURRENCE(variant) const RecurrenceKernels& recurrence_kernels_##variant(Element element);
QUIRE_DECLARE_RECURRENCE(portable)
QUIRE_DECLARE_RECURRENCE(emulated_avx512)
#if defined(__x86_64__)
QUIRE_DECLARE_RECURRENCE(avx2)
QUIRE_DECLARE_RECURRENCE(avx512)
#endif
#undef QUIRE_DECLARE_RECURRENCE

}  // namespace quire
