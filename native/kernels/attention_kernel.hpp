// The work of an attention call, cut into items, and the functions of a variant that compute them.
//
// One definition of the arithmetic of a query row:
//   R1  tokens are counted from 0 of the sequence. A tile is 32 tokens (64 with AMX, 16 by bf16 pairs), a partial 512, both at multiples of their
//       size.
//   R2  scores of a tile: float32 sums over d in the variant's lanes, folded by one tree; scale, soft cap, base-2 logits.
//   R3  a partial starts with m = -inf, l = 0, o = 0 and takes its tiles in order: online softmax over the tile's lanes (where a
//       tile's largest logit reaches m, m becomes that, and for products of bf16 8 more), then o += p v, tokens in order. Tiles and
//       tokens that a row does not see add nothing to it. l is summed tile by tile; by bf16 pairs lane by lane, and by the tree at the end.
//   R4  partials are merged in order into (M, L, O), beginning with (-inf, 0, 0); then the sink; then O / L is rounded.
// All of it is the same code and the same instructions for any number of rows. So the result does not depend on the
// rows that share an item, on the cut between items, or on the thread.
#pragma once

#include <atomic>
#include <cstdint>

#include "kernels/attention.hpp"

namespace quire {

constexpr int kPartialTokens = 512;
constexpr int kMostTileTokens = 64;  // of any variant; every tile size divides it
constexpr int kItemRows = 512;         // query rows of an item at most, over all its heads
constexpr int kItemFloats = 1 << 16;   // of their o: both states of an item stay in the second cache

// Rows [row_start, row_stop) for each kv head in [head_start, head_stop), over tokens [token_start, token_stop): rows of a
// sequence (row = token * group + query head within the group) or, where `run` is one, of all members of a shared run.
struct AttentionItem {
    std::int32_t run;       // index into AttentionJob::runs, or -1
    std::int32_t sequence;  // whose table is read
    std::int32_t head_start, head_stop;
    std::int32_t row_start, row_stop;
    std::int64_t token_start, token_stop;
    std::int32_t split;       // index into AttentionJob::splits, or -1: the item has all the tokens of its rows that no run has
    std::int32_t before;      // the run that ends at token_start for these rows, or -1
    std::int32_t shared_row;  // of row_start, among the rows in the order of sharing; where it or `before` has a run
};

// Rows whose partials several items compute: each item stores its states here, and the last to end merges them.
struct AttentionSplit {
    std::int64_t offset;  // of the first state in AttentionJob::states, in floats
    std::int32_t partial_start, num_partials;
    std::int32_t num_items;
};

// A run of tokens that the rows of several sequences share (attention_sharing.hpp). Its items store in
// AttentionJob::states for the items that continue: `merged` runs (M, L, O) up to the end of the run's last whole
// partial, and (m, l, o) of the one then begun; other runs, whose tokens several items share, (m, l, o) of each
// partial. So a row goes through R3 and R4 step by step as it would alone.
struct AttentionRun {
    std::int32_t before;  // its parent, or -1
    bool merged;
    std::int32_t first_row, num_rows;  // in the order of sharing
    std::int64_t token_start, token_stop;
    std::int64_t offset;  // of its states, in floats
    std::int32_t num_states;
    std::int32_t num_items;
};

struct AttentionJob {
    const PagedView* view;
    const TokenTensor* query;
    const TokenTensor* out;
    const AttentionBatch* batch;
    const AttentionOptions* options;
    std::int32_t num_q_heads;
    const AttentionItem* items;
    const AttentionSplit* splits;
    const AttentionRun* runs;
    std::int64_t state_stride;
    const std::int32_t* shared_tokens;       // query token of each `group` rows in the order of sharing
    std::atomic<std::int32_t>* items_done;   // of each split
    std::atomic<std::int32_t>* items_left;   // of each run
    float* states;
};

// States of rows, for each head and each of a number of states: o [rows][stride], m [rows], l [rows]. Where l is summed by lanes (R3), these
// stand behind a row's o, and whatever is done with o is done with them.
constexpr std::int64_t padded_to(std::int64_t n, std::int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
constexpr std::int64_t value_stride(std::int64_t width) { return padded_to(width, 64); }
constexpr std::int64_t kSumLanes = 16;
inline bool sums_by_lanes(Isa isa, const PagedView& view) {
    return view.element == Element::bf16 && !view.coded && (isa == Isa::avx512_bf16 || isa == Isa::emulated_avx512_bf16);
}
constexpr std::int64_t state_stride(std::int64_t width, bool by_lanes) { return value_stride(width) + (by_lanes ? kSumLanes : 0); }
constexpr std::int64_t state_floats(std::int64_t rows, std::int64_t stride) { return rows * stride + 2 * padded_to(rows, 16); }

// First position that a query at `position` sees.
inline std::int64_t first_visible(const AttentionOptions& options, std::int64_t position) {
    if (options.window > 0) return position >= options.window ? position - options.window + 1 : 0;
    if (options.chunk > 0) return position - position % options.chunk;
    return 0;
}

// Scratch memory of the calling thread, 64-byte aligned, valid until the next call.
constexpr std::int64_t kScratchBytes = 1 << 21;
unsigned char* attention_scratch();

// Returns when the items of a run are done. They precede the waiting item, so they have begun.
void attention_wait(const std::atomic<std::int32_t>& items_left);

// A row of zeros, in place of tokens that must not be read.
extern const unsigned char kZeroRow[kMaxHeadWidth * 4];

// Does item `index` of the job; one per variant.
using AttentionVariant = void (*)(const AttentionJob& job, std::int64_t index);

// Of codes, here and below; with the bits of keys and of values.
template <int kBits, int kValueBits>
void attention_codes_item_portable(const AttentionJob& job, std::int64_t index);
template <int kBits, int kValueBits>
void attention_codes_item_emulated_avx512(const AttentionJob& job, std::int64_t index);
template <int kBits, int kValueBits>
void attention_codes_item_emulated_amx_bf16(const AttentionJob& job, std::int64_t index);  // queries of bf16 only
void attention_item_portable(const AttentionJob& job, std::int64_t index);
void attention_item_emulated_avx512(const AttentionJob& job, std::int64_t index);
void attention_item_emulated_avx512_bf16(const AttentionJob& job, std::int64_t index);  // bf16 only
void attention_item_emulated_amx_bf16(const AttentionJob& job, std::int64_t index);     // bf16 only
// One of 1 to 6 rows of a head (attention_pairs_few.cpp), which attention_item_* leaves to it.
template <int kRows>
void attention_few_rows_emulated_avx512_bf16(const AttentionJob& job, const AttentionItem& item);
#if defined(__x86_64__)
template <int kBits, int kValueBits>
void attention_codes_item_avx2(const AttentionJob& job, std::int64_t index);
template <int kBits, int kValueBits>
void attention_codes_item_avx512(const AttentionJob& job, std::int64_t index);
template <int kBits, int kValueBits>
void attention_codes_item_amx_bf16(const AttentionJob& job, std::int64_t index);  // queries of bf16 only
void attention_item_avx2(const AttentionJob& job, std::int64_t index);
void attention_item_avx512(const AttentionJob& job, std::int64_t index);
void attention_item_avx512_bf16(const AttentionJob& job, std::int64_t index);  // bf16 only
void attention_item_amx_bf16(const AttentionJob& job, std::int64_t index);     // bf16 only
template <int kRows>
void attention_few_rows_avx512_bf16(const AttentionJob& job, const AttentionItem& item);
#endif

}  // namespace quire
