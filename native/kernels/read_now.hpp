// Reading a value from a file to where it is wanted, as long as that waits for nothing, and its digest on the way.
//
// Why here: two threads that load take turns with Python's lock for every piece of every value; a turn of a load is one call, and
// the lock is taken once. The rest of the file's business is `quire.tiers.files`'.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace quire {

struct ValueRead {
    int descriptor;
    std::int64_t offset;
    std::span<unsigned char> front;               // takes the first bytes
    std::vector<std::span<unsigned char>> parts;  // take the rest, one after the other: kShortestXxh3 bytes at least
};

// The XXH3-64 of the parts; nothing where the system would have to wait for the medium, or cannot tell, or the file ends before:
// what is in the buffers then says nothing. Throws std::system_error where reading fails otherwise.
std::optional<std::uint64_t> read_now(const ValueRead& read);

}  // namespace quire
