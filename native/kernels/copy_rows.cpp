#include "kernels/copy_rows.hpp"

#include <cstring>

namespace quire {

void copy_rows(std::uintptr_t payload, const RowPiece* pieces, std::int64_t num_pieces, bool to_storage) {
    for (std::int64_t index = 0; index < num_pieces; ++index) {
        const RowPiece& piece = pieces[index];
        auto* ours = reinterpret_cast<char*>(payload) + piece.payload_offset;        // NOLINT: the interface is addresses
        auto* theirs = reinterpret_cast<char*>(static_cast<std::uintptr_t>(piece.address));  // NOLINT
        if (piece.stride == piece.row_bytes || piece.num_rows == 1) {
            const auto num_bytes = static_cast<std::size_t>(piece.num_rows * piece.row_bytes);
            std::memcpy(to_storage ? theirs : ours, to_storage ? ours : theirs, num_bytes);
            continue;
        }
        const auto row_bytes = static_cast<std::size_t>(piece.row_bytes);
        for (std::int64_t row = 0; row < piece.num_rows; ++row) {
            std::memcpy(to_storage ? theirs : ours, to_storage ? ours : theirs, row_bytes);
            ours += piece.row_bytes;
            theirs += piece.stride;
        }
    }
}

}  // namespace quire
