// The exception of `check()`: a broken invariant, by its number, with the figures. The bindings turn it into
// quire.errors.InvariantError.
#pragma once

#include <stdexcept>
#include <string>

namespace quire {

class InvariantBroken : public std::logic_error {
public:
    using std::logic_error::logic_error;
};

inline void prove(bool holds, const char* invariant, const std::string& figures) {
    if (!holds) throw InvariantBroken(std::string(invariant) + " broken: " + figures);
}

}  // namespace quire
