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

// Layers and what stands around them, with all that stays the same from step to step.
struct DecoderStack {
    std::vector<StackedLayer> layers;
    std::vector<std::size_t> tables;
    DecoderEnds ends;
};

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

    nb::class_<DecoderStack>(m, "Decoder", "Layers one after another over one cache, and what stands around them; keeps nothing of what it is given alive.")
        .def("__init__",
             [](DecoderStack* self, const std::vector<std::pair<const AttentionParts*, const MlpParts*>>& blocks,
                const std::vector<const PagedView*>& views, const std::vector<const AttentionOptions*>& options,
                const std::vector<std::size_t>& tables, const PackedWeight* embedding, const Norm& norm, const PackedWeight& head,
                Address head_bias) {
                 if (views.size() != blocks.size() || options.size() != blocks.size() || tables.size() != blocks.size()) {
                     throw std::invalid_argument("expected views, options and tables of " + std::to_string(blocks.size()) + " layers, got " +
                                                 std::to_string(views.size()) + ", " + std::to_string(options.size()) + " and " +
                                                 std::to_string(tables.size()));
                 }
                 std::vector<StackedLayer> layers;
                 for (std::size_t i = 0; i < blocks.size(); ++i) {
                     layers.push_back({blocks[i].first, blocks[i].second, views[i], nullptr, options[i], nullptr});
                 }
                 new (self) DecoderStack{std::move(layers), tables, {embedding, norm, {&head, at<const void>(head_bias)}}};
             },
             nb::arg("blocks"), nb::arg("views"), nb::arg("options"), nb::arg("tables"), nb::arg("embedding").none(), nb::arg("norm"),
             nb::arg("head"), nb::arg("head_bias"),
             "tables: which of a step's tables leads to each layer. embedding: None where the caller brings the embedded rows.")
        .def("run",
             [](DecoderStack& self, const std::vector<const AttentionBatch*>& batches, const std::vector<Address>& slots, Int rows, Address ids,
                Address hidden, Address positions, Address cos, Address sin, Int table_width, Int num_positions, Address logit_rows,
                Int num_logits, Address logits) {
                 for (std::size_t i = 0; i < self.layers.size(); ++i) {
                     if (self.tables[i] >= batches.size() || self.tables[i] >= slots.size()) {
                         throw std::invalid_argument("expected a batch and slots of table " + std::to_string(self.tables[i]) + ", got " +
                                                     std::to_string(batches.size()) + " and " + std::to_string(slots.size()));
                     }
                     self.layers[i].batch = batches[self.tables[i]];
                     self.layers[i].slots = at<const Int>(slots[self.tables[i]]);
                 }
                 const nb::gil_scoped_release released;
                 run_decoder(self.ends, self.layers.data(), static_cast<Int>(self.layers.size()),
                             {rows, at<const Int>(ids), at<void>(hidden), at<const Int>(positions), at<const void>(cos), at<const void>(sin),
                              table_width, num_positions, at<const Int>(logit_rows), num_logits},
                             at<void>(logits));
             },
             nb::arg("batches"), nb::arg("slots"), nb::arg("rows"), nb::arg("ids"), nb::arg("hidden"), nb::arg("positions"), nb::arg("cos"),
             nb::arg("sin"), nb::arg("table_width"), nb::arg("num_positions"), nb::arg("logit_rows"), nb::arg("num_logits"), nb::arg("logits"),
             "From token ids [rows], or embedded rows [rows, width] that are written over, to logits [num_logits, outputs] of logit_rows. "
             "batches and slots: of each table; cos and sin [num_positions, table_width]: a row takes its position's. Raises IndexError for "
             "a token, a position or a row that is not there, ValueError for a slot or a block outside a view.");

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
