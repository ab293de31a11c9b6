// What the pool keeps of a unit: 12 bytes, in a slab by unit id.
#pragma once

#include <cstdint>

#include "core/prefix_tree.hpp"

namespace quire {

struct UnitRecord {
    UnitId previous;  // in the list of its account and retention while cached; else what the pool says of its state
    UnitId next;      // in that list or a stack; of a held unit, its references; of a leased one, the stamp of its lease
    NodeId node;
};
static_assert(sizeof(UnitRecord) == 12);

}  // namespace quire
