// Reads a value from a file to its target and computes its digest, unless a read would block.
//
// It is native because two loading threads would alternate on the GIL for every piece of every value; here a load is
// one call and takes the GIL once. `quire.tiers.disk.files` has the rest of a file's handling.
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

// The XXH3-64 of the parts; nullopt if a read would wait for the medium, the system cannot tell, or the file ends
// early: then the buffers' contents are undefined. Throws std::system_error if reading fails otherwise.
std::optional<std::uint64_t> read_now(const ValueRead& read);

}  // namespace quire
