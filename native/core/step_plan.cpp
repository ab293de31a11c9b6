// See step_plan.hpp.
#include "core/step_plan.hpp"

#include <algorithm>

namespace quire {

std::int32_t GroupPlan::widest_table() const noexcept {
    std::int32_t widest = 0;
    for (const TableView& table : tables) widest = std::max(widest, table.size);
    return widest;
}

void GroupPlan::padded_tables(std::int32_t* out) const noexcept {
    const std::int32_t widest = widest_table();
    for (const TableView& table : tables) {
        const auto entries = table.entries();
        std::fill(std::copy(entries.begin(), entries.end(), out), out + widest, kNone);
        out += widest;
    }
}

}  // namespace quire
