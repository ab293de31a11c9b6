// XXH3, 64 bits, of bytes that lie in several places (the algorithm: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).
//
// `read_now` needs it to read and check without Python, so the library `xxhash` does not serve.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace quire {

using Bytes = std::span<const unsigned char>;

// What is shorter has another algorithm, which is not here.
inline constexpr std::size_t kShortestXxh3 = 241;

// The digest, with the seed 0, of the parts as if they followed one another: kShortestXxh3 bytes at least. One pass.
std::uint64_t xxh3_64(std::span<const Bytes> parts);

}  // namespace quire
