// Copying between a payload and the places of a storage: many pieces, each some rows of equal bytes.
//
// Not parallel: a call copies on one core, so that a transfer during a step takes no thread from the pool.
#pragma once

#include <cstdint>

namespace quire {

// Rows that follow each other without a gap in the payload and lie `stride` bytes apart in the storage.
struct RowPiece {
    std::int64_t payload_offset;  // bytes
    std::int64_t address;         // of the first row in the storage
    std::int64_t num_rows;
    std::int64_t row_bytes;
    std::int64_t stride;
};

// Copies every piece, to the storage or from it. The pieces' bytes must be there; they may not overlap.
void copy_rows(std::uintptr_t payload, const RowPiece* pieces, std::int64_t num_pieces, bool to_storage);

}  // namespace quire
