// Binding of the packed linear layer. Tensors cross as they are (array.hpp): a call must cost less than the product of a small
// layer.
#include "bindings/linear.hpp"

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "bindings/array.hpp"
#include "bindings/bindings.hpp"
#include "bindings/element_name.hpp"
#include "bindings/released.hpp"
#include "kernels/isa.hpp"

namespace nb = nanobind;

namespace quire {

namespace {

Isa isa_or_current(const std::optional<std::string>& isa) { return isa ? isa_from_name(*isa) : current_isa(); }

}  // namespace

void bind_linear(nb::module_& m) {
    nb::class_<BoundWeight>(m, "PackedWeight", "A linear layer's weight packed once for the kernels.")
        .def(
            "__init__",
            [](BoundWeight* self, nb::handle weight, std::optional<std::string> isa) {
                const Array given(weight, "weight");
                const Element element = given.element("a weight");
                const unsigned char* const data = given.strided(type_of(element), 2);
                const Isa chosen = isa_or_current(isa);
                const Released released;
                new (self) BoundWeight{
                    PackedWeight(element, data, given.shape(0), given.shape(1), given.stride(0), given.stride(1), chosen), {}};
            },
            nb::arg("weight"), nb::arg("isa") = nb::none(),
            "Packs a weight [num_outputs, num_inputs] of float32, bfloat16 or float16, of any strides. isa: a variant's name, default "
            "the one in use. The weight may be freed afterwards.")
        .def_static(
            "at",
            [](nb::handle packed, std::int64_t num_outputs, std::int64_t num_inputs, std::string_view dtype, std::optional<std::string> isa) {
                const Element element = element_named(dtype, "a weight");
                const Isa chosen = isa_or_current(isa);
                const Array given(packed, "packed");
                const std::size_t num_bytes = packed_num_bytes(element, num_outputs, num_inputs, chosen);
                const unsigned char* const data = given.dense(Type::u8, static_cast<std::int64_t>(num_bytes));
                return new BoundWeight{PackedWeight(element, data, num_outputs, num_inputs, chosen), given.owner()};
            },
            nb::arg("packed"), nb::arg("num_outputs"), nb::arg("num_inputs"), nb::arg("dtype"), nb::arg("isa").none(),
            nb::rv_policy::take_ownership,
            "A weight that was packed before with the same panel_layout, read where it lies: packed_num_bytes bytes (uint8) at a multiple "
            "of 64, which it keeps alive.")
        .def(
            "multiply",
            [](const BoundWeight& self, nb::handle x, nb::handle bias, nb::handle out) {
                const Type type = type_of(self.element());
                const Array rows(x, "x"), result(out, "out", Array::Use::written);
                const std::int64_t num_rows = rows.rows(type, self.num_inputs());
                const unsigned char* const from = rows.dense(type);
                unsigned char* const to = result.dense(type, num_rows * self.num_outputs());
                std::optional<Array> given_bias;
                if (!bias.is_none()) given_bias.emplace(bias, "bias");
                const unsigned char* const added = given_bias ? given_bias->dense(type, self.num_outputs()) : nullptr;
                const Released released;
                self.multiply(from, num_rows, added, to);
            },
            nb::arg("x"), nb::arg("bias").none(), nb::arg("out"),
            "out [rows, num_outputs] = x [rows, num_inputs] times the weight + bias [num_outputs] (or None); all contiguous, of "
            "the weight's dtype.")
        .def(
            "unpack",
            [](const BoundWeight& self, nb::handle out) {
                const Array result(out, "out", Array::Use::written);
                unsigned char* const to = result.dense(type_of(self.element()), self.num_outputs() * self.num_inputs());
                const Released released;
                self.unpack(to);
            },
            nb::arg("out"), "Writes the weight, bit for bit, contiguous [num_outputs, num_inputs].")
        .def(
            "gather_rows",
            [](const BoundWeight& self, nb::handle ids, nb::handle out) {
                const Array given(ids, "ids"), result(out, "out", Array::Use::written);
                const auto* const wanted = reinterpret_cast<const std::int64_t*>(given.dense(Type::i64));
                const std::int64_t num_ids = given.count();
                unsigned char* const to = result.dense(type_of(self.element()), num_ids * self.num_inputs());
                const Released released;
                self.gather_rows(wanted, num_ids, to);
            },
            nb::arg("ids"), nb::arg("out"),
            "Rows of the weight for int64 ids, contiguous [num_ids, num_inputs]. Raises IndexError for an id out of range.")
        .def_prop_ro("num_outputs", [](const BoundWeight& self) { return self.num_outputs(); })
        .def_prop_ro("num_inputs", [](const BoundWeight& self) { return self.num_inputs(); })
        .def_prop_ro("num_bytes", [](const BoundWeight& self) { return self.num_bytes(); }, "Bytes of the packed form.")
        .def_prop_ro("address", [](const BoundWeight& self) { return reinterpret_cast<std::uintptr_t>(self.data()); },
                     "Where they are.")
        .def_prop_ro("isa", [](const BoundWeight& self) { return std::string(isa_name(self.isa())); }, "The variant it is packed for.");
    m.def(
        "panel_layout",
        [](std::string_view dtype, std::optional<std::string> isa) {
            return panel_layout(element_named(dtype, "a weight"), isa_or_current(isa));
        },
        nb::arg("dtype"), nb::arg("isa") = nb::none(),
        "Names the packed form of a dtype for a variant: under equal names equal weights have equal packed bytes.");
    m.def(
        "packed_num_bytes",
        [](std::int64_t num_outputs, std::int64_t num_inputs, std::string_view dtype, std::optional<std::string> isa) {
            return packed_num_bytes(element_named(dtype, "a weight"), num_outputs, num_inputs, isa_or_current(isa));
        },
        nb::arg("num_outputs"), nb::arg("num_inputs"), nb::arg("dtype"), nb::arg("isa") = nb::none(),
        "Bytes of the packed form of a weight.");
}

}  // namespace quire
