// Binding of the fused decoder layer. Buffers cross as addresses; the caller (quire/model/fused) has checked types and
// shapes and keeps alive what they name: one call per layer must cost less than a microsecond or two.
#include "bindings/bindings.hpp"
#include "bindings/element_name.hpp"

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "kernels/decoder_layer.hpp"

namespace nb = nanobind;

namespace quire {

namespace {

using Address = std::uintptr_t;
using Int = std::int64_t;
using Inputs = std::vector<std::pair<const PackedWeight*, Address>>;  // weight, bias

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);  // NOLINT: the interface is addresses
}

template <typename Kind>
Kind named(std::string_view name, std::initializer_list<std::pair<std::string_view, Kind>> known) {
    std::string names;
    for (const auto& [candidate, kind] : known) {
        if (candidate == name) return kind;
        names += (names.empty() ? "" : ", ") + std::string(candidate);
    }
    throw std::invalid_argument("expected one of " + names + ", got " + std::string(name));
}

Rotation rotation_named(std::string_view name) {
    return named<Rotation>(name, {{"none", Rotation::none},
                                  {"halves", Rotation::halves},
                                  {"halves_short_table", Rotation::halves_short_table},
                                  {"pairs", Rotation::pairs},
                                  {"pairs_half_table", Rotation::pairs_half_table}});
}

Activation activation_named(std::string_view name) {
    return named<Activation>(name, {{"silu", Activation::silu},
                                    {"gelu", Activation::gelu},
                                    {"gelu_tanh", Activation::gelu_tanh},
                                    {"relu", Activation::relu},
                                    {"relu_squared", Activation::relu_squared}});
}

std::vector<Product> products_of(const Inputs& inputs) {
    std::vector<Product> products;
    for (const auto& [weight, bias] : inputs) products.push_back({weight, at<const void>(bias)});
    return products;
}

Norm or_none(const Norm* norm) { return norm == nullptr ? Norm{} : *norm; }

}  // namespace

void bind_decoder_layer(nb::module_& m) {
    const auto release = nb::call_guard<nb::gil_scoped_release>();
    nb::class_<Norm>(m, "Norm", "A norm over a row; does not own its float32 weight and bias, given as addresses.")
        .def(
            "__init__",
            [](Norm* self, std::string_view kind, Address weight, Address bias, float epsilon) {
                new (self) Norm{named<Norm::Kind>(kind, {{"rms", Norm::rms}, {"layer", Norm::layer}}), at<const float>(weight),
                                at<const float>(bias), epsilon};
            },
            nb::arg("kind"), nb::arg("weight"), nb::arg("bias"), nb::arg("epsilon"))
        .def(
            "run",
            [](const Norm& self, std::string_view dtype, Address x, Int rows, Int width, Address out) {
                run_norm(self, element_named(dtype, "rows"), current_isa(), at<const void>(x), rows, width, at<void>(out));
            },
            nb::arg("dtype"), nb::arg("x"), nb::arg("rows"), nb::arg("width"), nb::arg("out"), release,
            "The norm of each row of x [rows, width], contiguous.");

    nb::class_<Surroundings>(m, "Surroundings", "Norms before and after a half of a layer, and its residual.")
        .def(
            "__init__",
            [](Surroundings* self, const Norm* before, const Norm* after, std::optional<float> residual_scale) {
                new (self) Surroundings{or_none(before), or_none(after), residual_scale.has_value(), residual_scale.value_or(1.0f)};
            },
            nb::arg("before").none(), nb::arg("after").none(), nb::arg("residual_scale").none(),
            "residual_scale: of what is added to the input; None: nothing is added.");

    nb::class_<AttentionParts>(m, "AttentionBlock", "The attention half of a decoder layer. Owns nothing it is made of.")
        .def(
            "__init__",
            [](AttentionParts* self, const Surroundings& around, const Inputs& qkv, const Norm* q_norm, const Norm* k_norm, bool norm_heads,
               std::string_view rotation, const PackedWeight& output, Address output_bias, Int num_q_heads) {
                AttentionParts parts{around,     products_of(qkv),         or_none(q_norm), or_none(k_norm),
                                     norm_heads, rotation_named(rotation), {&output, at<const void>(output_bias)}, num_q_heads};
                check_parts(parts);
                new (self) AttentionParts(std::move(parts));
            },
            nb::arg("around"), nb::arg("qkv"), nb::arg("q_norm").none(), nb::arg("k_norm").none(), nb::arg("norm_heads"), nb::arg("rotation"),
            nb::arg("output"), nb::arg("output_bias"), nb::arg("num_q_heads"))
        .def(
            "run",
            [](const AttentionParts& self, Int rows, const PagedView& view, const AttentionBatch& batch, const AttentionOptions& options,
               Address slots, Address cos, Address sin, Int table_width, Address hidden, Address out) {
                run_attention(self, {rows, &view, &batch, &options, at<const Int>(slots), at<const void>(cos), at<const void>(sin), table_width},
                              at<const void>(hidden), at<void>(out));
            },
            nb::arg("rows"), nb::arg("view"), nb::arg("batch"), nb::arg("options"), nb::arg("slots"), nb::arg("cos"), nb::arg("sin"),
            nb::arg("table_width"), nb::arg("hidden"), nb::arg("out"), release,
            "Stores the rows' K and V and writes out [rows, width]. Raises ValueError for a slot or a block outside the view.");

    nb::class_<MlpParts>(m, "MlpBlock", "The MLP half of a decoder layer. Owns nothing it is made of.")
        .def(
            "__init__",
            [](MlpParts* self, const Surroundings& around, const Inputs& inputs, bool gated, std::string_view activation,
               const PackedWeight& output, Address output_bias) {
                MlpParts parts{around, products_of(inputs), gated, activation_named(activation), {&output, at<const void>(output_bias)}};
                check_parts(parts);
                new (self) MlpParts(std::move(parts));
            },
            nb::arg("around"), nb::arg("inputs"), nb::arg("gated"), nb::arg("activation"), nb::arg("output"), nb::arg("output_bias"))
        .def(
            "run",
            [](const MlpParts& self, Int rows, Address hidden, Address out) { run_mlp(self, rows, at<const void>(hidden), at<void>(out)); },
            nb::arg("rows"), nb::arg("hidden"), nb::arg("out"), release, "out [rows, width] may be hidden.");

    m.def(
        "run_layers",
        [](const std::vector<std::pair<const AttentionParts*, const MlpParts*>>& blocks,
           const std::vector<std::tuple<const PagedView*, const AttentionBatch*, const AttentionOptions*>>& handles,
           const std::vector<Address>& slots, Int rows, Address cos, Address sin, Int table_width, Address hidden) {
            if (handles.size() != blocks.size() || slots.size() != blocks.size()) {
                throw std::invalid_argument("expected handles and slots of " + std::to_string(blocks.size()) + " layers, got " +
                                            std::to_string(handles.size()) + " and " + std::to_string(slots.size()));
            }
            std::vector<StackedLayer> layers;
            for (std::size_t i = 0; i < blocks.size(); ++i) {
                const auto& [view, batch, options] = handles[i];
                layers.push_back({blocks[i].first, blocks[i].second, view, batch, options, at<const Int>(slots[i])});
            }
            const nb::gil_scoped_release released;
            run_layers(layers.data(), static_cast<Int>(layers.size()),
                       {rows, nullptr, nullptr, nullptr, nullptr, at<const void>(cos), at<const void>(sin), table_width}, at<void>(hidden));
        },
        nb::arg("blocks"), nb::arg("handles"), nb::arg("slots"), nb::arg("rows"), nb::arg("cos"), nb::arg("sin"), nb::arg("table_width"),
        nb::arg("hidden"),
        "Runs layers one after another on hidden [rows, width], in place. Raises ValueError for a slot or a block outside a view.");

    m.def(
        "argmax_rows",
        [](std::string_view dtype, Address x, Int rows, Int width, Address indices, Address best, std::optional<std::string> isa) {
            run_argmax(element_named(dtype, "rows"), isa ? isa_from_name(*isa) : current_isa(), at<const void>(x), rows, width, at<Int>(indices), at<float>(best));
        },
        nb::arg("dtype"), nb::arg("x"), nb::arg("rows"), nb::arg("width"), nb::arg("indices"), nb::arg("best"),
        nb::arg("isa") = nb::none(), release,
        "The first index (int64) of the largest element of each row of x [rows, width], contiguous, and the element as float32; of the "
        "first NaN where a row has one.");
}

}  // namespace quire
