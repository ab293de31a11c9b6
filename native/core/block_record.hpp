// The pool's record of a block: 12 bytes, in a slab by block id.
#pragma once

#include <cstdint>

#include "core/prefix_tree.hpp"

namespace quire {

struct BlockRecord {
    BlockId previous;  // in the list of its owner and cache priority while cached; else what the pool says of its state
    BlockId next;      // in that list or a stack; of a held block, its references; of a in flight one, the stamp of its lease
    NodeId node;
};
static_assert(sizeof(BlockRecord) == 12);

}  // namespace quire
