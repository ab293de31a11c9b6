// The decision of `reserve` for one step: the slot of every new token, and the blocks that each sequence reads.
// Immutable.
//
// The arrays are written once, in `reserve`; block tables are not copied but referred to (block_table.hpp), and become one
// padded array when asked for. A plan owns its data and outlives the block manager; any thread may read and drop it.
//
// Cost: building is O(new tokens + sequences) per group; `padded_tables` O(entries).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/block_table.hpp"
#include "core/slab.hpp"

namespace quire {

// One row of `copies`: the first `num_tokens` tokens of a block, to be copied before the step writes.
struct BlockCopy {
    BlockId source;
    BlockId destination;
    std::int32_t num_tokens;
};
static_assert(sizeof(BlockCopy) == 3 * sizeof(std::int32_t));

struct GroupPlan {
    Slab<std::int64_t> slot_mapping;     // [num_tokens]
    Slab<std::int64_t> lookahead_slots;  // [num_sequences * num_lookahead]
    std::vector<BlockCopy> copies;
    std::vector<TableView> tables;  // [num_sequences]

    std::int32_t widest_table() const noexcept;
    // int32 [num_sequences, widest_table()], kNone beyond the end of a row.
    void padded_tables(std::int32_t* out) const noexcept;
};

struct StepPlan {
    std::int64_t step = 0;
    std::int64_t num_sequences = 0;
    std::int64_t num_tokens = 0;
    std::int64_t num_lookahead = 0;
    Slab<std::int32_t> query_start;      // [num_sequences + 1]
    Slab<std::int32_t> context_lengths;  // [num_sequences]
    std::vector<GroupPlan> groups;
};

}  // namespace quire
