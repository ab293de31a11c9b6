// Bindings of what is done to the bytes of segments: copying between payloads and storages (addresses, as everywhere below
// `quire.memory`, which has checked what lies behind them), and reading.
#include "bindings/bindings.hpp"

#include <cerrno>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "kernels/copy_rows.hpp"
#include "kernels/read_now.hpp"
#include "kernels/xxh3.hpp"

namespace nb = nanobind;

namespace quire {
namespace {

// The bytes of objects with the buffer protocol, writable, held until this goes.
class Held {
public:
    Held() = default;
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held() {
        for (Py_buffer& buffer : buffers_) {
            PyBuffer_Release(&buffer);
        }
    }

    std::span<unsigned char> of(nb::handle object) {
        Py_buffer& buffer = buffers_.emplace_back();
        if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_WRITABLE) != 0) {
            buffers_.pop_back();
            throw nb::python_error();
        }
        return {static_cast<unsigned char*>(buffer.buf), static_cast<std::size_t>(buffer.len)};
    }

private:
    std::deque<Py_buffer> buffers_;  // which do not move
};

using Reads = std::vector<std::tuple<int, std::int64_t, nb::object, std::vector<nb::object>>>;

std::vector<ValueRead> value_reads(const Reads& reads, Held& held) {
    std::vector<ValueRead> found;
    for (const auto& [descriptor, offset, front, parts] : reads) {
        ValueRead read{descriptor, offset, held.of(front), {}};
        std::size_t num_bytes = 0;
        for (const nb::object& part : parts) {
            read.parts.push_back(held.of(part));
            num_bytes += read.parts.back().size();
        }
        if (num_bytes < kShortestXxh3) {
            throw std::invalid_argument("expected parts of " + std::to_string(kShortestXxh3) + " bytes or more, got " +
                                        std::to_string(num_bytes));
        }
        found.push_back(std::move(read));
    }
    return found;
}

}  // namespace

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
    m.attr("SHORTEST_READ") = kShortestXxh3;
    m.def(
        "read_now",
        [](const Reads& reads) {
            Held held;
            const std::vector<ValueRead> values = value_reads(reads, held);
            std::vector<std::uint64_t> digests;
            int error = 0;
            {
                const nb::gil_scoped_release release;
                try {
                    for (const ValueRead& value : values) {
                        const std::optional<std::uint64_t> digest = read_now(value);
                        if (!digest) {
                            break;
                        }
                        digests.push_back(*digest);
                    }
                } catch (const std::system_error& failed) {
                    error = failed.code().value();
                }
            }
            if (error != 0) {
                errno = error;
                PyErr_SetFromErrno(PyExc_OSError);
                throw nb::python_error();
            }
            return digests;
        },
        nb::arg("reads"),
        "Reads values that the system has in memory, each (descriptor, offset, front, parts) into its front and then its parts, writable "
        "buffers, the parts of SHORTEST_READ bytes or more together. The XXH3-64 of the parts of the leading values; ends before the "
        "first for which it would have to wait. Holds Python's lock only before and after. Raises OSError.");
}

}  // namespace quire
