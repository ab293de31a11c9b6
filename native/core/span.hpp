// The past tokens that a group of layers still needs: the arithmetic of quire.spec.Span.
#pragma once

#include <cstdint>

namespace quire {

struct Span {
    enum class Kind { full, window, chunked };

    Kind kind = Kind::full;
    std::int64_t size = 0;

    bool is_full() const noexcept { return kind == Kind::full; }

    // First token position that the query at `position` may read.
    std::int64_t first_needed(std::int64_t position) const noexcept {
        switch (kind) {
            case Kind::window: return position - size + 1 > 0 ? position - size + 1 : 0;
            case Kind::chunked: return position - position % size;
            case Kind::full: break;
        }
        return 0;
    }
};

}  // namespace quire
