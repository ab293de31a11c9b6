// The pool's record of a block: 16 bytes, in a slab by block id.
#pragma once

#include <cstdint>

#include "core/prefix_tree.hpp"

namespace quire {

struct BlockRecord {
    BlockId previous;  // in the list of its owner and cache priority while cached; else what the pool says of its state
    BlockId next;      // in that list or a stack; of a held block, its references; of a in flight one, the stamp of its lease
    NodeId node;
    std::uint32_t time : 29;  // of its last release, in blocks released so far, modulo 2^29
    std::uint32_t uses : 3;   // 1 .. kMaxUses; changes only while it is in no list
};
static_assert(sizeof(BlockRecord) == 16);

inline constexpr std::uint32_t kMaxUses = 5;

}  // namespace quire
