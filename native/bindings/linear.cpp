// Binding of the packed linear layer. Tensors are passed by address (array.hpp): a call must cost less than the product
// of a small layer.
#include "bindings/linear.hpp"

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "bindings/array.hpp"
#include "bindings/bindings.hpp"
#include "bindings/element_name.hpp"
#include "bindings/released.hpp"
#include "kernels/isa.hpp"

namespace nb = nanobind;

namespace quire {

namespace {

constexpr std::int64_t kMostElements = std::int64_t{1} << 46;  // of all that a processor can address

// Keeps what a factor's arrays are while they are read.
struct GivenFactor {
    std::optional<Array> fine, coarse;
    QuantizedParts::Factor parts;
};

Number number_of(const Array& given, const char* name, bool is_signed) {
    switch (given.type()) {
        case Type::f32: return Number::f32;
        case Type::bf16: return Number::bf16;
        case Type::f16: return Number::f16;
        case Type::u8: return is_signed ? Number::i8 : Number::u8;
        default: throw std::invalid_argument(std::string("expected ") + name + " of float32, bfloat16, float16 or bytes, got another type");
    }
}

void take_factor(GivenFactor& to, nb::handle fine, nb::handle coarse, bool is_signed, const char* name, std::int64_t outputs, std::int64_t groups) {
    if (fine.is_none()) return;
    to.fine.emplace(fine, name);
    to.parts.fine_number = number_of(*to.fine, name, is_signed);
    to.parts.fine = to.fine->dense(to.fine->type(), outputs * groups);
    if (coarse.is_none()) return;
    to.coarse.emplace(coarse, name);
    to.parts.coarse_number = number_of(*to.coarse, name, false);
    const std::int64_t each = to.coarse->count() / outputs;
    if (each < 1 || groups % each != 0) throw std::invalid_argument(std::string("expected coarse ") + name + " that divide the groups, got others");
    to.parts.coarse = to.coarse->dense(to.coarse->type(), outputs * each);
    to.parts.ratio = groups / each;
}

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
        .def_static(
            "of_codes",
            [](nb::handle codes, int bits, std::int64_t group, nb::tuple scales, nb::handle minimums, nb::handle zeros, float zero, nb::handle table,
               std::string_view dtype, std::optional<std::string> isa) {
                const Element element = element_named(dtype, "a weight");
                const Array given(codes, "codes");
                QuantizedParts parts;
                parts.num_outputs = given.num_dims() == 2 ? given.shape(0) : 0;
                parts.num_inputs = given.num_dims() == 2 ? given.shape(1) : 0;
                parts.codes = given.dense(Type::u8, parts.num_outputs * parts.num_inputs);
                parts.bits = bits;
                parts.group = group;
                const std::int64_t groups = group > 0 ? parts.num_inputs / group : 0;
                GivenFactor own_scales, own_minimums;
                take_factor(own_scales, scales[0], scales[1], nb::cast<bool>(scales[2]), "scales", parts.num_outputs, groups);
                if (!minimums.is_none()) {
                    const auto three = nb::cast<nb::tuple>(minimums);
                    take_factor(own_minimums, three[0], three[1], nb::cast<bool>(three[2]), "minimums", parts.num_outputs, groups);
                }
                parts.scales = own_scales.parts;
                parts.minimums = own_minimums.parts;
                std::optional<Array> own_zeros, own_table;
                parts.zero = zero;
                if (!zeros.is_none()) {
                    own_zeros.emplace(zeros, "zeros");
                    parts.zeros_number = number_of(*own_zeros, "zeros", false);
                    parts.zeros = own_zeros->dense(own_zeros->type(), parts.num_outputs * groups);
                }
                if (!table.is_none()) {
                    own_table.emplace(table, "table");
                    parts.table = reinterpret_cast<const float*>(own_table->dense(Type::f32, std::int64_t{1} << bits));
                }
                const Isa chosen = isa_or_current(isa);
                const Released released;
                return new BoundWeight{PackedWeight(element, parts, chosen), {}};
            },
            nb::arg("codes"), nb::arg("bits"), nb::arg("group"), nb::arg("scales"), nb::arg("minimums").none(), nb::arg("zeros").none(), nb::arg("zero"),
            nb::arg("table").none(), nb::arg("dtype"), nb::arg("isa").none(), nb::rv_policy::take_ownership,
            "A weight held as codes (quire.weights.codes.QuantizedWeight), uint8 [num_outputs, num_inputs] below 2**bits, for activations of a dtype. "
            "scales, minimums: (fine, coarse or None, whether the bytes of fine are signed). All contiguous; may be freed afterwards.")
        .def(
            "of_panels",
            [](const BoundWeight& self, std::int64_t num_outputs, nb::handle packed) {
                check_range("num_outputs", num_outputs, 1, kMostElements / self.num_inputs());
                if (packed.is_none()) return new BoundWeight{PackedWeight(self, num_outputs, nullptr), {}};
                const std::int64_t columns = QuantizedForm::kColumns, panels = (num_outputs + columns - 1) / columns;
                const std::int64_t panel_bytes = static_cast<std::int64_t>(self.num_bytes()) / ((self.num_outputs() + columns - 1) / columns);
                const Array given(packed, "packed");
                const unsigned char* const data = given.dense(Type::u8, panels * panel_bytes);
                return new BoundWeight{PackedWeight(self, num_outputs, data), given.owner()};
            },
            nb::arg("num_outputs"), nb::arg("packed") = nb::none(), nb::rv_policy::take_ownership,
            "A weight of num_outputs outputs in the form of this one, which is held as codes. packed: its panels (uint8, at a multiple of "
            "64), read where they lie and kept alive; None: memory of its own, to be filled by put_panels.")
        .def(
            "put_panels", [](BoundWeight& self, std::int64_t first, const BoundWeight& part) { self.put_panels(first, part); },
            nb::arg("first"), nb::arg("part"),
            "Copies the panels of part, outputs from first on, a multiple of 16. Before anybody multiplies by this weight.")
        .def(
            "goes_with", [](const BoundWeight& self, const BoundWeight& other) { return self.goes_with(other); }, nb::arg("other"),
            "Whether one fused product takes this weight and the other.")
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
        .def(
            "gather_rows_in",
            [](const BoundWeight& self, nb::handle ids, nb::handle out) {
                const Array given(ids, "ids"), result(out, "out", Array::Use::written);
                const auto* const wanted = reinterpret_cast<const std::int64_t*>(given.dense(Type::i64));
                const std::int64_t num_ids = given.count();
                const Element element = result.element("out");
                unsigned char* const to = result.dense(result.type(), num_ids * self.num_inputs());
                const Released released;
                self.gather_rows_in(element, wanted, num_ids, to);
            },
            nb::arg("ids"), nb::arg("out"), "gather_rows of codes, in the dtype of out: float32, bfloat16 or float16.")
        .def_prop_ro("num_outputs", [](const BoundWeight& self) { return self.num_outputs(); })
        .def_prop_ro("num_inputs", [](const BoundWeight& self) { return self.num_inputs(); })
        .def_prop_ro("is_quantized", [](const BoundWeight& self) { return self.is_quantized(); }, "Whether it is held as codes.")
        .def_prop_ro("num_bytes", [](const BoundWeight& self) { return self.num_bytes(); }, "Bytes of the packed form.")
        .def_prop_ro("address", [](const BoundWeight& self) { return reinterpret_cast<std::uintptr_t>(self.data()); },
                     "Where they are.")
        .def_prop_ro("isa", [](const BoundWeight& self) { return std::string(isa_name(self.isa())); }, "The variant it is packed for.");
    m.def(
        "multiply_each",
        [](const std::vector<const BoundWeight*>& weights, nb::handle x, nb::handle out) {
            if (weights.empty()) throw std::invalid_argument("expected at least 1 weight, got none");
            for (const BoundWeight* weight : weights) {
                if (weight == nullptr) throw std::invalid_argument("expected weights, got None among them");
            }
            const auto count = static_cast<std::int64_t>(weights.size());
            const Type type = type_of(weights[0]->element());
            const Array from(x, "x"), to(out, "out", Array::Use::written);
            const PartedRows rows{from.shaped(type, {-1, count, weights[0]->num_inputs()}), from.stride(0), from.stride(1)};
            const PartedRows results{to.shaped(type, {from.shape(0), count, weights[0]->num_outputs()}), to.stride(0), to.stride(1)};
            const std::vector<const PackedWeight*> packed(weights.begin(), weights.end());
            const Released released;
            multiply_each(packed.data(), count, rows, from.shape(0), results);
        },
        nb::arg("weights"), nb::arg("x"), nb::arg("out"),
        "out [rows, weights, num_outputs]: x [rows, i, num_inputs] times weight i, for every i. Weights of one dtype, variant and shape; "
        "only the last dimension of x and out has to be dense.");
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
