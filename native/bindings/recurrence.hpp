// Common parts of the bindings of recurrences and of state mixers: limits of sizes, and states in the kernels' form.
#pragma once

#include <cstdint>

#include "bindings/array.hpp"
#include "kernels/recurrence.hpp"

namespace quire {

constexpr std::int64_t kMostHeads = 1 << 16, kMostSums = 1 << 16, kMostStateColumns = 1 << 24;  // so that their product counts in 64 bits

// A state [num_slots, sizes...]: each slot contiguous, none over another, and those of the step are there; else it throws.
RecurrenceState state_of(const Array& state, int num_sizes, const RecurrenceStep& step);

}  // namespace quire
