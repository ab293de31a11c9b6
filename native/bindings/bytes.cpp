// Binding of the copying between payloads and storages. Addresses, as everywhere below `quire.memory`, which has checked
// what lies behind them.
#include "bindings/bindings.hpp"

#include <cstdint>

#include <nanobind/ndarray.h>

#include "kernels/copy_rows.hpp"

namespace nb = nanobind;

namespace quire {

void bind_bytes(nb::module_& m) {
    using Pieces = nb::ndarray<const std::int64_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;
    m.def(
        "copy_rows",
        [](std::uintptr_t payload, const Pieces& pieces, bool to_storage) {
            static_assert(sizeof(RowPiece) == 5 * sizeof(std::int64_t));
            const auto* rows = reinterpret_cast<const RowPiece*>(pieces.data());  // NOLINT: five numbers each
            const auto num_pieces = static_cast<std::int64_t>(pieces.shape(0));
            const nb::gil_scoped_release release;
            copy_rows(payload, rows, num_pieces, to_storage);
        },
        nb::arg("payload"), nb::arg("pieces"), nb::arg("to_storage"),
        "Copies rows between the payload at an address and a storage. pieces: int64 [n, 5], of each its offset in the payload, its "
        "address in the storage, its number of rows, bytes of a row (adjacent in the payload) and their distance in the storage.");
}

}  // namespace quire
