#include "kernels/copy_rows.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace quire {
namespace {

#if defined(__x86_64__)

// Past the caches: a line that is written whole is not read first, and what is copied into a storage is more than a core's caches
// hold. Three times the speed of memcpy there, from two threads as from one.
void copy_past_caches(char* to, const char* from, std::size_t num_bytes) {
    constexpr std::size_t line = 64;
    const std::size_t before = (line - reinterpret_cast<std::uintptr_t>(to) % line) % line;  // NOLINT: an address's alignment
    if (num_bytes < before + line) {
        std::memcpy(to, from, num_bytes);
        return;
    }
    std::memcpy(to, from, before);
    to += before;
    from += before;
    num_bytes -= before;
    for (; num_bytes >= line; num_bytes -= line, to += line, from += line) {
        const auto* source = reinterpret_cast<const __m128i*>(from);  // NOLINT: any bytes
        auto* target = reinterpret_cast<__m128i*>(to);                // NOLINT
        const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    std::memcpy(to, from, num_bytes);
}

// Before anybody is told that the copy is done: such stores are not ordered.
void end_copies_past_caches() { _mm_sfence(); }

#else

void copy_past_caches(char* to, const char* from, std::size_t num_bytes) { std::memcpy(to, from, num_bytes); }
void end_copies_past_caches() {}

#endif

}  // namespace

void copy_rows(std::uintptr_t payload, const RowPiece* pieces, std::int64_t num_pieces, bool to_storage) {
    for (std::int64_t index = 0; index < num_pieces; ++index) {
        const RowPiece& piece = pieces[index];
        auto* ours = reinterpret_cast<char*>(payload) + piece.payload_offset;        // NOLINT: the interface is addresses
        auto* theirs = reinterpret_cast<char*>(static_cast<std::uintptr_t>(piece.address));  // NOLINT
        const bool is_dense = piece.stride == piece.row_bytes || piece.num_rows == 1;
        const std::int64_t num_rows = is_dense ? 1 : piece.num_rows;
        const auto row_bytes = static_cast<std::size_t>(is_dense ? piece.num_rows * piece.row_bytes : piece.row_bytes);
        for (std::int64_t row = 0; row < num_rows; ++row) {
            if (to_storage) {
                copy_past_caches(theirs, ours, row_bytes);
            } else {
                std::memcpy(ours, theirs, row_bytes);
            }
            ours += row_bytes;
            theirs += piece.stride;
        }
    }
    if (to_storage) {
        end_copies_past_caches();
    }
}

}  // namespace quire
