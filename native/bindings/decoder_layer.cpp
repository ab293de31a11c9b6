// Binding of the fused decoder layer. Tensors are passed by address (array.hpp). A block keeps its referents alive and
// checks the shapes of its parts when it is made; a call checks its own tensors, the cache's view and the batch.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "bindings/array.hpp"
#include "bindings/attention.hpp"
#include "bindings/bindings.hpp"
#include "bindings/decoder_layer.hpp"
#include "bindings/linear.hpp"
#include "bindings/released.hpp"
#include "kernels/decoder_layer.hpp"

namespace nb = nanobind;

namespace quire {

void fit(bool fits, const std::string& what) {
    if (!fits) throw std::invalid_argument("expected a decoder layer whose parts fit together, got " + what);
}

Product product_of(const BoundWeight* weight, nb::handle bias, Kept& kept) {
    fit(weight != nullptr, "None for a weight");
    keep(kept, weight);
    if (bias.is_none()) return {weight, nullptr};
    const Array given(bias, "a bias");
    kept.push_back(given.owner());
    return {weight, given.dense(type_of(weight->element()), weight->num_outputs())};
}

std::vector<Product> products_of(const Inputs& inputs, Kept& kept) {
    std::vector<Product> products;
    for (const auto& [weight, bias] : inputs) products.push_back(product_of(weight, bias, kept));
    return products;
}

void check_norms(const BoundSurroundings& around, std::int64_t num_inputs, std::int64_t num_outputs) {
    fit(around.before_width == 0 || around.before_width == num_inputs,
        "a norm of " + std::to_string(around.before_width) + " elements before rows of " + std::to_string(num_inputs));
    fit(around.after_width == 0 || around.after_width == num_outputs,
        "a norm of " + std::to_string(around.after_width) + " elements after rows of " + std::to_string(num_outputs));
}

namespace {

using Int = std::int64_t;

struct BoundNorm : Norm {
    Int width;
    Kept kept;
};

struct BoundAttention : AttentionParts {
    Int q_width, k_width;  // of the norms; 0: none
    Kept kept;
};

struct BoundMlp : MlpParts {
    Kept kept;
};

// Layers and what stands around them, with all that stays the same from step to step.
struct DecoderStack {
    std::vector<StackedLayer> layers;
    std::vector<std::size_t> tables;
    DecoderEnds ends;
    Int most_q_heads;  // of a layer
    Kept kept;
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

Norm or_none(const BoundNorm* norm) { return norm == nullptr ? Norm{} : static_cast<const Norm&>(*norm); }

Int width_of(const BoundNorm* norm) { return norm == nullptr ? 0 : norm->width; }

// What run_attention does not look at: the norms of heads, and what attention itself takes.
void check_view(const BoundAttention& block, const BoundView& view, const BoundOptions& options, Int rows) {
    check_heads(view, options, block.num_q_heads, rows);
    const Int q_heads = block.norm_heads ? 1 : block.num_q_heads, k_heads = block.norm_heads ? 1 : view.num_kv_heads;
    fit((block.q_width == 0 || block.q_width == q_heads * view.k.width) && (block.k_width == 0 || block.k_width == k_heads * view.k.width),
        "norms of " + std::to_string(block.q_width) + " and " + std::to_string(block.k_width) + " elements for heads of " +
            std::to_string(view.k.width));
}

void check_rows(const BoundBatch& batch, Int rows) {
    if (batch.num_rows != rows) {
        throw std::invalid_argument("expected a batch of " + std::to_string(rows) + " rows, got one of " + std::to_string(batch.num_rows));
    }
}

// cos and sin, elements of a row of them and rows; nothing where nothing turns.
struct Angles {
    Angles(nb::handle cos_given, nb::handle sin_given, Type type) {
        if (cos_given.is_none() && sin_given.is_none()) return;
        cos_array.emplace(cos_given, "cos"), sin_array.emplace(sin_given, "sin");
        cos = cos_array->dense(type);
        sin = sin_array->dense(type, cos_array->count());
    }
    Int width(Int rows) const {
        const Int count = cos_array ? cos_array->count() : 0;
        if (count % std::max<Int>(rows, 1) != 0) {
            throw std::invalid_argument("expected cos and sin of " + std::to_string(rows) + " rows, got " + std::to_string(count) + " elements");
        }
        return count / std::max<Int>(rows, 1);
    }
    std::optional<Array> cos_array, sin_array;
    const unsigned char *cos = nullptr, *sin = nullptr;
};

const Int* int64s(const Array& array, Int count) { return reinterpret_cast<const Int*>(array.dense(Type::i64, count)); }

}  // namespace

void bind_decoder_layer(nb::module_& m) {
    nb::class_<BoundNorm>(m, "Norm", "A norm over a row; it keeps its weight and bias alive.")
        .def(
            "__init__",
            [](BoundNorm* self, std::string_view kind, nb::handle weight, nb::handle bias, float epsilon) {
                const Norm::Kind named_kind = named<Norm::Kind>(kind, {{"rms", Norm::rms}, {"layer", Norm::layer}});
                const Array given(weight, "weight");
                const auto* const scale = reinterpret_cast<const float*>(given.dense(Type::f32));
                const Int width = given.count();
                check_range("a norm's width", width, 1, 1 << 30);
                Kept kept{given.owner()};
                const float* shift = nullptr;
                if (!bias.is_none()) {
                    const Array added(bias, "bias");
                    shift = reinterpret_cast<const float*>(added.dense(Type::f32, width));
                    kept.push_back(added.owner());
                }
                new (self) BoundNorm{{named_kind, scale, shift, epsilon}, width, std::move(kept)};
            },
            nb::arg("kind"), nb::arg("weight"), nb::arg("bias").none(), nb::arg("epsilon"),
            "kind: rms or layer. weight, bias: float32 [width]; a bias may be None.")
        .def(
            "run",
            [](const BoundNorm& self, nb::handle x, nb::handle out) {
                const Array given(x, "x"), result(out, "out", Array::Use::written);
                const Element element = given.element("rows");
                const Int rows = given.rows(type_of(element), self.width);
                const unsigned char* const from = given.dense(type_of(element));
                unsigned char* const to = result.dense(type_of(element), rows * self.width);
                const Released released;
                run_norm(self, element, current_isa(), from, rows, self.width, to);
            },
            nb::arg("x"), nb::arg("out"), "The norm of each row of x [rows, width], contiguous.");

    nb::class_<BoundSurroundings>(m, "Surroundings", "Norms before and after a half of a layer, and its residual.")
        .def(
            "__init__",
            [](BoundSurroundings* self, const BoundNorm* before, const BoundNorm* after, std::optional<float> residual_scale) {
                Kept kept;
                keep(kept, before), keep(kept, after);
                new (self) BoundSurroundings{{or_none(before), or_none(after), residual_scale.has_value(), residual_scale.value_or(1.0f)},
                                             width_of(before), width_of(after), std::move(kept)};
            },
            nb::arg("before").none(), nb::arg("after").none(), nb::arg("residual_scale").none(),
            "residual_scale: of what is added to the input; None: nothing is added.");

    nb::class_<BoundAttention>(m, "AttentionBlock", "The attention half of a decoder layer. It keeps alive what it is made of.")
        .def(
            "__init__",
            [](BoundAttention* self, const BoundSurroundings& around, const Inputs& qkv, const BoundNorm* q_norm, const BoundNorm* k_norm,
               bool norm_heads, std::string_view rotation, const BoundWeight& output, nb::handle output_bias, Int num_q_heads, bool gated) {
                Kept kept;
                check_range("query heads", num_q_heads, 1, 1 << 20);
                std::vector<Product> inputs = products_of(qkv, kept);
                const Product last = product_of(&output, output_bias, kept);
                AttentionParts parts{around,     std::move(inputs),        or_none(q_norm), or_none(k_norm),
                                     norm_heads, rotation_named(rotation), last,            num_q_heads,     gated};
                check_parts(parts);
                check_norms(around, parts.qkv[0].weight->num_inputs(), output.num_outputs());
                keep(kept, &around), keep(kept, q_norm), keep(kept, k_norm);
                new (self) BoundAttention{std::move(parts), width_of(q_norm), width_of(k_norm), std::move(kept)};
            },
            nb::arg("around"), nb::arg("qkv"), nb::arg("q_norm").none(), nb::arg("k_norm").none(), nb::arg("norm_heads"), nb::arg("rotation"),
            nb::arg("output"), nb::arg("output_bias").none(), nb::arg("num_q_heads"), nb::arg("gated") = false,
            "gated: behind each head of q its gate, the sigmoid of which multiplies what the head attends to. qkv: weight and bias (or None) of q, k and v, or of one product that gives them in this order.")
        .def(
            "run",
            [](const BoundAttention& self, const BoundView& view, const BoundBatch& batch, const BoundOptions& options, nb::handle slots,
               nb::handle cos, nb::handle sin, nb::handle hidden, nb::handle out) {
                const PackedWeight& output = *self.output.weight;
                const Type type = type_of(output.element());
                const Array given(hidden, "hidden"), result(out, "out", Array::Use::written), places(slots, "slots");
                const Int rows = given.rows(type, output.num_outputs());
                check_rows(batch, rows);
                check_view(self, view, options, rows);
                const Angles angles(cos, sin, type);
                const Int* const slot = int64s(places, rows);
                const unsigned char* const from = given.dense(type);
                unsigned char* const to = result.dense(type, rows * output.num_outputs());
                const Int table_width = angles.width(rows);
                const Released released;
                run_attention(self, {rows, &view, &batch, &options, slot, angles.cos, angles.sin, table_width}, from, to);
            },
            nb::arg("view"), nb::arg("batch"), nb::arg("options"), nb::arg("slots"), nb::arg("cos").none(), nb::arg("sin").none(),
            nb::arg("hidden"), nb::arg("out"),
            "Stores the rows' K and V in int64 slots [rows] and writes out [rows, width] of hidden [rows, width]; cos and sin [rows, table "
            "width], or None where nothing turns. Raises ValueError for a slot or a block outside the view.");

    nb::class_<BoundMlp>(m, "MlpBlock", "The MLP half of a decoder layer. It keeps alive what it is made of.")
        .def(
            "__init__",
            [](BoundMlp* self, const BoundSurroundings& around, const Inputs& inputs, bool gated, std::string_view activation,
               const BoundWeight& output, nb::handle output_bias) {
                Kept kept;
                std::vector<Product> products = products_of(inputs, kept);
                MlpParts parts{around, std::move(products), gated, activation_named(activation), product_of(&output, output_bias, kept)};
                check_parts(parts);
                check_norms(around, parts.inputs[0].weight->num_inputs(), output.num_outputs());
                keep(kept, &around);
                new (self) BoundMlp{std::move(parts), std::move(kept)};
            },
            nb::arg("around"), nb::arg("inputs"), nb::arg("gated"), nb::arg("activation"), nb::arg("output"), nb::arg("output_bias").none(),
            "inputs: weight and bias (or None) of gate and up, or of one product.")
        .def(
            "run",
            [](const BoundMlp& self, nb::handle hidden, nb::handle out) {
                const PackedWeight& output = *self.output.weight;
                const Type type = type_of(output.element());
                const Array given(hidden, "hidden"), result(out, "out", Array::Use::written);
                const Int rows = given.rows(type, output.num_outputs());
                const unsigned char* const from = given.dense(type);
                unsigned char* const to = result.dense(type, rows * output.num_outputs());
                const Released released;
                run_mlp(self, rows, from, to);
            },
            nb::arg("hidden"), nb::arg("out"), "out [rows, width] of hidden [rows, width]; it may be hidden.");

    nb::class_<DecoderStack>(m, "Decoder", "Layers one after another over one cache, and what stands around them, all of which it keeps alive.")
        .def("__init__",
             [](DecoderStack* self, const std::vector<std::pair<const BoundAttention*, const BoundMlp*>>& blocks,
                const std::vector<const BoundView*>& views, const std::vector<const BoundOptions*>& options,
                const std::vector<std::size_t>& tables, const BoundWeight* embedding, const BoundNorm& norm, const BoundWeight& head,
                nb::handle head_bias) {
                 if (blocks.empty() || views.size() != blocks.size() || options.size() != blocks.size() || tables.size() != blocks.size()) {
                     throw std::invalid_argument("expected a layer or more, and views, options and tables of " + std::to_string(blocks.size()) +
                                                 " layers, got " + std::to_string(views.size()) + ", " + std::to_string(options.size()) +
                                                 " and " + std::to_string(tables.size()));
                 }
                 Kept kept;
                 std::vector<StackedLayer> layers;
                 const Int width = head.num_inputs();
                 Int most_q_heads = 1;
                 for (std::size_t i = 0; i < blocks.size(); ++i) {
                     const auto& [attention, mlp] = blocks[i];
                     fit(attention != nullptr && mlp != nullptr && views[i] != nullptr && options[i] != nullptr, "None for a part of a layer");
                     for (const PackedWeight* weight : {attention->output.weight, mlp->output.weight}) {
                         fit(weight->num_outputs() == width && weight->element() == head.element(), "layers of other rows than the vocabulary projection takes");
                     }
                     check_view(*attention, *views[i], *options[i], 1);
                     layers.push_back({attention, mlp, views[i], nullptr, options[i], nullptr});
                     most_q_heads = std::max(most_q_heads, attention->num_q_heads);
                     keep(kept, attention), keep(kept, mlp), keep(kept, views[i]), keep(kept, options[i]);
                 }
                 fit(norm.width == width, "a last norm of " + std::to_string(norm.width) + " elements for rows of " + std::to_string(width));
                 fit(embedding == nullptr || (embedding->num_inputs() == width && embedding->element() == head.element()),
                     "an embedding of other rows than the vocabulary projection takes");
                 keep(kept, embedding), keep(kept, &norm);
                 const Product last = product_of(&head, head_bias, kept);
                 new (self) DecoderStack{std::move(layers), tables, {embedding, norm, last}, most_q_heads, std::move(kept)};
             },
             nb::arg("blocks"), nb::arg("views"), nb::arg("options"), nb::arg("tables"), nb::arg("embedding").none(), nb::arg("norm"),
             nb::arg("head"), nb::arg("head_bias").none(),
             "tables: which of a step's tables leads to each layer. embedding: None where the caller brings the embedded rows.")
        .def("run",
             [](const DecoderStack& self, const std::vector<const BoundBatch*>& batches, const std::vector<nb::object>& slots, nb::handle ids,
                nb::handle hidden, nb::handle positions, nb::handle cos, nb::handle sin, nb::handle logit_rows, nb::handle logits) {
                 const PackedWeight& head = *self.ends.head.weight;
                 const Type type = type_of(head.element());
                 const Array tokens(ids, "ids"), where(positions, "positions"), asked(logit_rows, "logit_rows");
                 const Array result(logits, "logits", Array::Use::written);
                 const auto* const token = reinterpret_cast<const Int*>(tokens.dense(Type::i64));
                 const Int rows = tokens.count();
                 std::optional<Array> embedded;
                 unsigned char* rows_in = nullptr;
                 if (self.ends.embedding == nullptr) {
                     embedded.emplace(hidden, "hidden", Array::Use::written);
                     rows_in = embedded->dense(type, rows * head.num_inputs());
                 } else if (!hidden.is_none()) {
                     throw std::invalid_argument("expected None for hidden, as the decoder has an embedding");
                 }
                 std::vector<StackedLayer> layers = self.layers;
                 std::deque<Array> places;
                 std::vector<const Int*> slot_of;
                 for (const nb::object& given : slots) slot_of.push_back(int64s(places.emplace_back(given, "slots"), rows));
                 for (const BoundBatch* batch : batches) {
                     fit(batch != nullptr, "None for a batch");
                     check_rows(*batch, rows);
                 }
                 for (std::size_t i = 0; i < layers.size(); ++i) {
                     if (self.tables[i] >= batches.size() || self.tables[i] >= slots.size()) {
                         throw std::invalid_argument("expected a batch and slots of table " + std::to_string(self.tables[i]) + ", got " +
                                                     std::to_string(batches.size()) + " and " + std::to_string(slots.size()));
                     }
                     layers[i].batch = batches[self.tables[i]];
                     layers[i].slots = slot_of[self.tables[i]];
                 }
                 const Angles angles(cos, sin, type);
                 Int num_positions = 0;
                 if (angles.cos_array) {
                     angles.cos_array->shaped(type, {-1, -1}), angles.sin_array->shaped(type, {angles.cos_array->shape(0), angles.cos_array->shape(1)});
                     num_positions = angles.cos_array->shape(0);
                 }
                 const Int table_width = angles.width(num_positions);
                 const Int* const position = int64s(where, rows);
                 const auto* const wanted = reinterpret_cast<const Int*>(asked.dense(Type::i64));
                 const Int num_logits = asked.count();
                 unsigned char* const to = result.dense(type, num_logits * head.num_outputs());
                 check_range("the step's rows", rows, 1, ((Int{1} << 31) - 1) / self.most_q_heads);
                 const Released released;
                 run_decoder(self.ends, layers.data(), static_cast<Int>(layers.size()),
                             {rows, token, rows_in, position, angles.cos, angles.sin, table_width, num_positions, wanted, num_logits}, to);
             },
             nb::arg("batches"), nb::arg("slots"), nb::arg("ids"), nb::arg("hidden").none(), nb::arg("positions"), nb::arg("cos").none(),
             nb::arg("sin").none(), nb::arg("logit_rows"), nb::arg("logits"),
             "From token ids [rows], or embedded rows [rows, width] that are written over, to logits [num_logits, outputs] of logit_rows. "
             "batches and slots [rows]: of each table; cos and sin [num_positions, table width]: a row takes its position's; None where "
             "nothing turns. Indices are int64. Raises IndexError for a token, a position or a row that is not there, ValueError for a slot "
             "or a block outside a view.");

    m.def(
        "argmax_rows",
        [](nb::handle x, nb::handle indices, nb::handle best, std::optional<std::string> isa) {
            const Array given(x, "x"), places(indices, "indices", Array::Use::written), values(best, "best", Array::Use::written);
            const Element element = given.element("rows");
            given.shaped(type_of(element), {-1, -1});
            const unsigned char* const from = given.dense(type_of(element));
            const Int rows = given.shape(0), width = given.shape(1);
            check_range("a row's width", width, 1, INT64_MAX);
            auto* const index = reinterpret_cast<Int*>(places.dense(Type::i64, rows));
            auto* const value = reinterpret_cast<float*>(values.dense(Type::f32, rows));
            const Isa chosen = isa ? isa_from_name(*isa) : current_isa();
            require_isa(chosen);
            const Released released;
            run_argmax(element, chosen, from, rows, width, index, value);
        },
        nb::arg("x"), nb::arg("indices"), nb::arg("best"), nb::arg("isa") = nb::none(),
        "The first index (int64) of the largest element of each row of x [rows, width], contiguous, and the element as float32; of the "
        "first NaN where a row has one.");
}

}  // namespace quire
