// Runs of tokens that several sequences of a batch share, found from the block tables only: equal entries at equal
// positions, from the first token that is seen. Runs are nested: a run shared by all members, then the further tokens
// shared by half of them, and so on.
//
// Not here: cutting a run into items (attention_schedule.cpp), computing it (attention_item.hpp).
//
//   S1  A run is whole tiles of kMostTileTokens, begins where its parent ends, and ends before the first query row of each member:
//       every row of every member sees all of it.
//   S2  A sequence takes part if all its rows see from one token on, the start of a partial (that is token 0 without a window),
//       and two such sequences fit into an item; longer pieces of a prefill read their tokens at negligible cost
//       already.
//   S3  A run is kept only if it saves time:
//           tokens x kReadRows x (items that would read them - items that read the run) > rows x kStateRows + kRunRows
//       in units of one row seeing one token: kReadRows is the price of reading a token, kStateRows of handing a row's
//       state over, kRunRows of one item waiting for another. Otherwise its tokens go to the runs below it, or to its
//       sequences.
//
// Cost: every shared table entry is compared once, plus a sort of the members where they diverge: 256 sequences without
// shared tokens take about 10 us, once per step and kind of layer.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention.hpp"

namespace quire {

struct SharedRun {
    std::int32_t parent;                      // index of the run before it, or -1
    std::int32_t member_start, member_stop;   // its sequences, in SharedRuns::order
    std::int64_t token_start, token_stop;
};

struct SharedRuns {
    std::vector<SharedRun> runs;          // parents before their children
    std::vector<std::int32_t> order;      // sequences, so that the members of a run lie side by side
    std::vector<std::int32_t> first_row;  // in that order: rows of the sequences before
    std::vector<std::int32_t> place;      // of each sequence: its index in `order`, or -1
    std::vector<std::int32_t> last;       // of each sequence: the run in which its path ends, or -1
};

// `group`: query heads of a kv head. `item_rows`: query rows of an item at most. The tables have been checked.
SharedRuns find_shared_runs(const AttentionBatch& batch, std::int64_t block_size, const AttentionOptions& options, std::int64_t group,
                            std::int64_t item_rows);

}  // namespace quire
