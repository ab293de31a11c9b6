// Counts in whole multiples and in even parts; none of them negative.
#pragma once

#include <algorithm>
#include <cstdint>

namespace quire {

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return divide_up(a, b) * b; }

// Size of the parts of `count` when there are as few as `most` allows, as even as they can be in whole `multiple`s, of which
// `most` is one.
constexpr std::int64_t even_part(std::int64_t count, std::int64_t most, std::int64_t multiple) {
    return round_up(divide_up(count, std::max<std::int64_t>(1, divide_up(count, most))), multiple);
}

}  // namespace quire
