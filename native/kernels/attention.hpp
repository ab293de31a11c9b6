// Attention over paged keys and values: write them to slots, read them through block tables.
//
// Not here: Python and torch (bindings/attention.cpp), the arithmetic (attention_kernel.hpp).
//
//   A1  A call reads only blocks that one of its queries may see, and in them only tokens of the sequence: other slots
//       may hold any bytes, NaN included, and table entries of other blocks may be -1.
//   A2  The bits of an output row depend on the query row, its position, the keys and values it sees, the options and the
//       variant; and on no other input (see attention_kernel.hpp).
//   A3  std::invalid_argument before anything is written, or nothing thrown.
//
// Cost of a call: one read of the visible keys and values per row tile (up to 512 rows of one kv head share a read, those of
// sequences that share blocks too: attention_sharing.hpp), plus about 1 us and 50 ns per item of work.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/element.hpp"
#include "kernels/isa.hpp"

namespace quire {

constexpr std::int64_t kCodeGroup = 32;  // codes of 4 bits that have a scale

// One layer's keys or values: element (block, head, token, d) at data + block * block_stride + head * head_stride +
// token * token_stride + d; strides in elements. For codes of 8 or 4 bits strides are in bytes; scale: bytes from a
// row's first code to its scales (bf16), one in all or one for each kCodeGroup.
struct PagedTensor {
    unsigned char* data;
    std::int64_t block_stride;
    std::int64_t head_stride;
    std::int64_t token_stride;
    std::int64_t width;
    std::int64_t scale = 0;
    int bits = 8;

    std::int64_t num_scales() const { return bits == 4 ? (width + kCodeGroup - 1) / kCodeGroup : 1; }
    // Elements of a row, scales included.
    std::int64_t extent() const { return scale > 0 ? scale + 2 * num_scales() : width; }
};

// element: type of queries, written rows and output. coded: keys and values are codes and scales (kv_codes.hpp), keys
// rotated; else they are of `element` too. Keys have as many bits as values, or 8.
struct PagedView {
    PagedTensor k;
    PagedTensor v;
    Element element;
    std::int64_t num_blocks;
    std::int64_t num_kv_heads;
    std::int64_t block_size;
    bool coded = false;
    const float* k_offset = nullptr;  // [num_kv_heads, k.width], of codes: taken from keys before they are turned; null for none

    // True in a latent layer: the values are the first columns of the keys, which hold the bytes of both.
    bool values_in_keys() const { return v.data == k.data; }
    std::int64_t stored_bytes() const { return coded ? 1 : element_bytes(element); }
    // Bytes of a token of one head.
    std::int64_t token_bytes() const { return (k.extent() + (values_in_keys() ? 0 : v.extent())) * stored_bytes(); }

    // Whether the heads of a token are adjacent, not the tokens of a head.
    bool token_major() const { return block_size > 1 && k.head_stride < k.token_stride; }
};

class AttentionSchedules;

// Rows of a step, as in quire.attention.AttentionPlan; immutable. It caches the schedule, which depends only on the
// batch, so that a step's layers compute it once (attention_schedule.hpp).
struct AttentionBatch {
    // Without `share_prefixes` each sequence's tokens are read for it alone: the same bits, for tests and comparisons.
    AttentionBatch(const std::int32_t* query_start, const std::int32_t* context_lengths, const std::int32_t* block_tables,
                   std::int64_t num_sequences, std::int64_t table_width, int num_threads, bool share_prefixes = true);
    ~AttentionBatch();

    const std::int32_t* query_start;      // [num_sequences + 1]
    const std::int32_t* context_lengths;  // [num_sequences]
    const std::int32_t* block_tables;     // [num_sequences, table_width]
    std::int64_t num_sequences;
    std::int64_t table_width;
    int num_threads;
    bool share_prefixes;
    std::unique_ptr<AttentionSchedules> schedules;
};

// Bytes of keys and values that a call reads, summed over its items, and the sum without sharing between sequences.
struct AttentionTraffic {
    std::int64_t kv_bytes, unshared_kv_bytes;
    std::int64_t num_shared_runs;
};

struct AttentionOptions {
    float scale;
    std::int64_t window;  // 0: none
    std::int64_t chunk;   // 0: none
    float softcap;        // 0: none
    const float* sinks;   // [num_q_heads] or null
    const float* slopes;  // [num_q_heads] or null: the head's times (position of the key - position of the query) is added to a score
};

// [tokens, heads, width], the last dimension dense; strides in elements.
struct TokenTensor {
    unsigned char* data;
    std::int64_t token_stride;
    std::int64_t head_stride;
};

constexpr std::int64_t kMaxHeadWidth = 576;  // a latent of 512 and 64 turned columns

// A head's keys, or values, of a token: `from`, of the view's element, to its slot in view.k or view.v.
void attention_store(const PagedView& view, const PagedTensor& to, const unsigned char* from, std::int64_t slot, std::int64_t head);

// std::invalid_argument if one of `slots` lies outside the view.
void check_slots(const PagedView& view, const std::int64_t* slots, std::int64_t num_tokens);

// k [num_tokens, num_kv_heads, k.width] and v (v.width), of the view's element, to distinct `slots`. Where the view's values lie in its keys, v is
// not read.
void attention_write(const PagedView& view, const TokenTensor& k, const TokenTensor& v, const std::int64_t* slots, std::int64_t num_tokens,
                     int num_threads);

// out [tokens, num_q_heads, v.width] of query [tokens, num_q_heads, k.width], both of the view's element. `isa` must be
// supported here.
void attention_run(const PagedView& view, const TokenTensor& query, const TokenTensor& out, std::int64_t num_q_heads,
                   const AttentionBatch& batch, const AttentionOptions& options, Isa isa);

AttentionTraffic attention_traffic(const PagedView& view, std::int64_t num_q_heads, const AttentionBatch& batch, const AttentionOptions& options);

// Bytes per second at which all threads of the pool together read a buffer of `num_bytes`; the best of `repetitions`.
double read_bandwidth(std::int64_t num_bytes, int repetitions);

}  // namespace quire
