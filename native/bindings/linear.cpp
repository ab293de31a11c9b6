// Binding of the packed linear layer. Buffers cross as addresses: the caller (quire.model.linear) has checked types,
// shapes and strides, and a call must cost less than the product of a small layer.
#include "bindings/bindings.hpp"
#include "bindings/element_name.hpp"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "kernels/isa.hpp"
#include "kernels/linear.hpp"

namespace nb = nanobind;

namespace quire {

namespace {

template <typename T>
T* at(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);  // NOLINT: the interface is addresses
}

}  // namespace

void bind_linear(nb::module_& m) {
    using Release = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<PackedWeight>(m, "PackedWeight",
                             "A linear layer's weight packed once for the kernels. All buffers are addresses of CPU memory.")
        .def(
            "__init__",
            [](PackedWeight* self, std::uintptr_t weight, std::int64_t num_outputs, std::int64_t num_inputs, std::int64_t output_stride,
               std::int64_t input_stride, std::string_view dtype, std::optional<std::string> isa) {
                const Element element = element_named(dtype, "a weight");
                const Isa chosen = isa ? isa_from_name(*isa) : current_isa();
                const nb::gil_scoped_release release;
                new (self)
                    PackedWeight(element, at<const void>(weight), num_outputs, num_inputs, output_stride, input_stride, chosen);
            },
            nb::arg("weight"), nb::arg("num_outputs"), nb::arg("num_inputs"), nb::arg("output_stride"), nb::arg("input_stride"),
            nb::arg("dtype"), nb::arg("isa") = nb::none(),
            "Packs the weight whose element (n, k) lies at weight + n * output_stride + k * input_stride (in elements). "
            "dtype: float32, bfloat16 or float16; isa: a variant's name, default the one in use. The weight may be freed "
            "afterwards.")
        .def_static(
            "at",
            [](std::uintptr_t packed, std::int64_t num_outputs, std::int64_t num_inputs, std::string_view dtype,
               std::optional<std::string> isa, nb::handle) {
                const Isa chosen = isa ? isa_from_name(*isa) : current_isa();
                return new PackedWeight(element_named(dtype, "a weight"), at<const void>(packed), num_outputs, num_inputs, chosen);
            },
            nb::arg("packed"), nb::arg("num_outputs"), nb::arg("num_inputs"), nb::arg("dtype"), nb::arg("isa").none(),
            nb::arg("owner"), nb::keep_alive<0, 6>(), nb::rv_policy::take_ownership,
            "A weight that was packed before with the same panel_layout, read where it lies: num_bytes bytes at a multiple of "
            "64. `owner` keeps them, and is kept.")
        .def(
            "multiply",
            [](const PackedWeight& self, std::uintptr_t x, std::int64_t rows, std::uintptr_t bias, std::uintptr_t out) {
                self.multiply(at<const void>(x), rows, at<const void>(bias), at<void>(out));
            },
            nb::arg("x"), nb::arg("rows"), nb::arg("bias"), nb::arg("out"), Release(),
            "out [rows, num_outputs] = x [rows, num_inputs] times the weight + bias [num_outputs] (0: none); all contiguous, of "
            "the weight's dtype.")
        .def(
            "unpack", [](const PackedWeight& self, std::uintptr_t out) { self.unpack(at<void>(out)); }, nb::arg("out"), Release(),
            "Writes the weight, bit for bit, contiguous [num_outputs, num_inputs].")
        .def(
            "gather_rows",
            [](const PackedWeight& self, std::uintptr_t ids, std::int64_t num_ids, std::uintptr_t out) {
                self.gather_rows(at<const std::int64_t>(ids), num_ids, at<void>(out));
            },
            nb::arg("ids"), nb::arg("num_ids"), nb::arg("out"), Release(),
            "Rows of the weight for int64 ids, contiguous [num_ids, num_inputs]. Raises IndexError for an id out of range.")
        .def_prop_ro("num_outputs", &PackedWeight::num_outputs)
        .def_prop_ro("num_inputs", &PackedWeight::num_inputs)
        .def_prop_ro("num_bytes", &PackedWeight::num_bytes, "Bytes of the packed form.")
        .def_prop_ro("address", [](const PackedWeight& self) { return reinterpret_cast<std::uintptr_t>(self.data()); },
                     "Where they are.")
        .def_prop_ro("isa", [](const PackedWeight& self) { return std::string(isa_name(self.isa())); }, "The variant it is packed for.");
    m.def(
        "panel_layout",
        [](std::string_view dtype, std::optional<std::string> isa) {
            return panel_layout(element_named(dtype, "a weight"), isa ? isa_from_name(*isa) : current_isa());
        },
        nb::arg("dtype"), nb::arg("isa") = nb::none(),
        "Names the packed form of a dtype for a variant: under equal names equal weights have equal packed bytes.");
    m.def(
        "packed_num_bytes",
        [](std::int64_t num_outputs, std::int64_t num_inputs, std::string_view dtype, std::optional<std::string> isa) {
            return packed_num_bytes(element_named(dtype, "a weight"), num_outputs, num_inputs,
                                    isa ? isa_from_name(*isa) : current_isa());
        },
        nb::arg("num_outputs"), nb::arg("num_inputs"), nb::arg("dtype"), nb::arg("isa") = nb::none(),
        "Bytes of the packed form of a weight.");
}

}  // namespace quire
