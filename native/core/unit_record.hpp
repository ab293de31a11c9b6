// What the pool keeps of a unit: 16 bytes, in a slab by unit id.
#pragma once

#include <cstdint>

#include "core/prefix_tree.hpp"

namespace quire {

struct UnitRecord {
    std::int32_t refs;
    UnitId previous;  // in the list of its account and retention while cached; else what the pool says of its state
    UnitId next;      // in that list or a stack; of a leased unit, the stamp of its lease
    NodeId node;
};
static_assert(sizeof(UnitRecord) == 16);

}  // namespace quire
