// Bindings for the bytes of segments: copying between payloads and storages (given by addresses), and reading.
#include "bindings/bindings.hpp"

#include <algorithm>
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

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/array.hpp"
#include "bindings/released.hpp"
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

// The storage's side is addresses, of which a storage knows that they are its own: here only what can be no address is refused.
void check_pieces(const RowPiece* pieces, std::int64_t num_pieces, std::int64_t payload_bytes) {
    constexpr std::int64_t kFirst = 1 << 16, kEnd = std::int64_t{1} << 47;  // what Linux gives a process
    const auto within = [](std::int64_t value, std::int64_t low, std::int64_t high) { return value >= low && value <= high; };
    for (std::int64_t index = 0; index < num_pieces; ++index) {
        const RowPiece& piece = pieces[index];
        std::int64_t num_bytes = 0, last = 0, end = 0;
        const bool fits = piece.num_rows >= 0 && piece.row_bytes >= 0 && !__builtin_mul_overflow(piece.num_rows, piece.row_bytes, &num_bytes) &&
                          within(piece.payload_offset, 0, payload_bytes) && num_bytes <= payload_bytes - piece.payload_offset;
        if (fits && num_bytes == 0) continue;
        const auto address = static_cast<std::int64_t>(piece.address);
        const bool is_address = fits && within(address, kFirst, kEnd) && !__builtin_mul_overflow(piece.num_rows - 1, piece.stride, &last) &&
                                !__builtin_add_overflow(address, last, &end) && within(end, kFirst, kEnd) && piece.row_bytes <= kEnd - std::max(end, address);
        if (!is_address) {
            throw std::invalid_argument("expected pieces within a payload of " + std::to_string(payload_bytes) +
                                        " bytes, at addresses of this process, got " + std::to_string(piece.num_rows) + " rows of " +
                                        std::to_string(piece.row_bytes) + " bytes at offset " + std::to_string(piece.payload_offset) +
                                        " and address " + std::to_string(address) + ", " + std::to_string(piece.stride) +
                                        " bytes apart, as piece " + std::to_string(index));
        }
    }
}

}  // namespace

void bind_bytes(nb::module_& m) {
    m.def(
        "copy_rows",
        [](nb::handle payload, nb::handle pieces, bool to_storage) {
            static_assert(sizeof(RowPiece) == 5 * sizeof(std::int64_t));
            const Array bytes(payload, "payload", to_storage ? Array::Use::read : Array::Use::written), table(pieces, "pieces");
            table.shaped(Type::i64, {-1, 5});
            const auto* rows = reinterpret_cast<const RowPiece*>(table.dense(Type::i64));  // NOLINT: five numbers each
            const std::int64_t num_pieces = table.shape(0);
            const auto first = reinterpret_cast<std::uintptr_t>(bytes.dense(Type::u8));  // NOLINT: the interface is addresses
            check_pieces(rows, num_pieces, bytes.count());
            const Released released;
            copy_rows(first, rows, num_pieces, to_storage);
        },
        nb::arg("payload"), nb::arg("pieces"), nb::arg("to_storage"),
        "Copies rows between a payload (uint8, contiguous) and a storage. pieces: int64 [n, 5], of each its offset in the payload, its "
        "address in the storage, its number of rows, bytes of a row (adjacent in the payload) and their distance in the storage. Raises "
        "ValueError for a piece that is not within the payload; the addresses in the storage are the caller's word.");
    m.attr("SHORTEST_READ") = kShortestXxh3;
    m.def(
        "read_now",
        [](const Reads& reads) {
            Held held;
            const std::vector<ValueRead> values = value_reads(reads, held);
            std::vector<std::uint64_t> digests;
            int error = 0;
            {
                const Released released;
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
