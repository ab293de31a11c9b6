// The schedule of an attention call, which depends only on its batch: checked tables, shared runs, items. Made once per
// step and kind of layer, and cached by the batch.
//
// Not here: keys, values, queries. A schedule does not affect the results (A2).
//
//   Items stand in an order in which each waits only for items before it: runs after their parents, then the sequences
//   without a run, then those with one. Threads take them in that order (ThreadPool, T6).
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/attention_kernel.hpp"

namespace quire {

struct AttentionSchedule {
    std::vector<AttentionItem> items;
    std::vector<AttentionSplit> splits;
    std::vector<AttentionRun> runs;
    std::vector<std::int32_t> shared_tokens;
    std::int64_t num_floats = 0;  // of states
    AttentionTraffic traffic{};
};

// The other inputs of a schedule.
struct AttentionKind {
    std::int64_t num_blocks, block_size, num_kv_heads, group, token_bytes, state_stride, window, chunk;
    bool token_major;  // see PagedView
    bool operator==(const AttentionKind&) const = default;
};

class AttentionSchedules {
  public:
    // The schedule of a batch; the first call makes it. Its address is stable.
    const AttentionSchedule& of(const PagedView& view, const AttentionBatch& batch, const AttentionOptions& options, std::int64_t num_q_heads,
                                Isa isa);

  private:
    struct Kept {
        AttentionKind kind;
        AttentionSchedule schedule;
    };
    std::mutex mutex_;
    std::vector<std::unique_ptr<const Kept>> kept_;
};

}  // namespace quire
