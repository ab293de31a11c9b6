// Binding of the mixer half of a state layer. A block keeps its referents alive and checks the shapes of its parts when
// it is made; a call checks its own tensors and its states.
#include "kernels/state_mixer.hpp"

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/array.hpp"
#include "bindings/bindings.hpp"
#include "bindings/decoder_layer.hpp"
#include "bindings/recurrence.hpp"
#include "bindings/released.hpp"

namespace nb = nanobind;

namespace quire {

namespace {

using Int = std::int64_t;
using Columns = std::vector<std::tuple<Int, Int, Int>>;

struct BoundMixer : MixerParts {
    Kept kept;
};

std::vector<ProductColumns> columns_of(const Columns& given) {
    std::vector<ProductColumns> columns;
    for (const auto& [product, column, width] : given) columns.push_back({product, column, width});
    return columns;
}

const float* floats(nb::handle given, const char* name, Int count, Kept& kept) {
    if (given.is_none()) return nullptr;
    const Array array(given, name);
    kept.push_back(array.owner());
    return reinterpret_cast<const float*>(array.dense(Type::f32, count));
}

}  // namespace

void bind_state_mixer(nb::module_& m) {
    nb::class_<BoundMixer>(m, "MixerBlock", "The mixer half of a state layer. It keeps alive what it is made of.")
        .def(
            "__init__",
            [](BoundMixer* self, const std::string& kind, const BoundSurroundings& around, const Inputs& inputs, const std::vector<Columns>& columns,
               nb::handle convolution, nb::handle convolution_bias, std::tuple<Int, Int, Int, Int> heads, nb::handle rate, nb::handle shift,
               nb::handle skip, std::pair<float, float> limits, float factor, nb::handle norm, float epsilon, Int norm_width, bool gates_first,
               const BoundWeight& output, nb::handle output_bias) {
                Kept kept;
                MixerParts parts;
                const bool is_alone = kind == "convolution";
                if (kind != "delta" && kind != "scan" && !is_alone) {
                    throw std::invalid_argument("expected a mixer of kind delta, scan or convolution, got " + kind);
                }
                if (columns.size() != 4) throw std::invalid_argument("expected columns of x, gate, a and b, got " + std::to_string(columns.size()) + " lists");
                parts.kind = is_alone ? MixerParts::convolution_alone : kind == "delta" ? MixerParts::delta : MixerParts::scan;
                parts.around = around;
                parts.inputs = products_of(inputs, kept);
                parts.x = columns_of(columns[0]), parts.gate = columns_of(columns[1]), parts.a = columns_of(columns[2]), parts.b = columns_of(columns[3]);
                std::tie(parts.num_heads, parts.head_dim, parts.size, parts.num_groups) = heads;
                check_range("the number of heads", parts.num_heads, 1, kMostHeads);
                check_range("the number of groups", parts.num_groups, 1, kMostHeads);
                check_range("the size of a head", parts.head_dim, 1, kMostSums);
                check_range("the size of a key or a state", parts.size, 1, kMostSums);
                const Array weight(convolution, "convolution");
                weight.shaped(Type::f32, {parts.channels(), -1});
                parts.convolution_width = weight.shape(1);
                parts.convolution = floats(convolution, "convolution", weight.count(), kept);
                parts.convolution_bias = floats(convolution_bias, "convolution_bias", parts.channels(), kept);
                parts.rate = floats(rate, "rate", parts.num_heads, kept), parts.shift = floats(shift, "shift", parts.num_heads, kept);
                parts.skip = floats(skip, "skip", parts.num_heads, kept);
                if (!is_alone && (parts.rate == nullptr || parts.shift == nullptr)) throw std::invalid_argument("expected rate and shift, got None");
                parts.least_step = limits.first, parts.most_step = limits.second, parts.factor = factor;
                if (!is_alone) {
                    const Array scale(norm, "norm");
                    parts.weight_width = scale.count();
                    check_range("a norm's width", parts.weight_width, 1, parts.width());
                    check_range("what is normed together", norm_width, 1, parts.weight_width);
                    parts.norm = {floats(norm, "norm", parts.weight_width, kept), epsilon, gates_first};
                    parts.norm_width = norm_width;
                }
                parts.output = product_of(&output, output_bias, kept);
                check_parts(parts);
                check_norms(around, parts.inputs[0].weight->num_inputs(), output.num_outputs());
                keep(kept, &around);
                new (self) BoundMixer{std::move(parts), std::move(kept)};
            },
            nb::arg("kind"), nb::arg("around"), nb::arg("inputs"), nb::arg("columns"), nb::arg("convolution"), nb::arg("convolution_bias").none(),
            nb::arg("heads"), nb::arg("rate").none(), nb::arg("shift").none(), nb::arg("skip").none(), nb::arg("limits"), nb::arg("factor"), nb::arg("norm").none(),
            nb::arg("epsilon"), nb::arg("norm_width"), nb::arg("gates_first"), nb::arg("output"), nb::arg("output_bias").none(),
            "kind: delta, scan, or convolution, which has neither steps nor a norm: b * x, convolved, times the gate. inputs: weight and bias (or None) of each product. columns: of x (q, k, v or x, b, c), gate, a and b, each a "
            "list of (product, column, width). convolution: float32 [channels, width]. heads: their number, their size, that of a key or a "
            "state, and the number of heads of q and k, or groups of b and c. rate, shift, skip: float32 [heads]. limits: of a step (scan). "
            "factor: of sigmoid(b) (delta). norm: float32, which repeats along a row; norm_width: elements normed together.")
        .def(
            "run",
            [](const BoundMixer& self, const RecurrenceStep& step, nb::handle convolution, nb::handle state, nb::handle hidden, nb::handle out) {
                const PackedWeight& output = *self.output.weight;
                const Type type = type_of(output.element());
                const Array given(hidden, "hidden"), result(out, "out", Array::Use::written);
                const Array inputs(convolution, "convolution", Array::Use::written);
                const Int rows = given.rows(type, output.num_outputs());
                if (rows != step.num_rows()) {
                    throw std::invalid_argument("expected the " + std::to_string(step.num_rows()) + " rows of the step, got " + std::to_string(rows));
                }
                const bool is_delta = self.kind == MixerParts::delta;
                const RecurrenceState before = state_of(inputs, 2, step);
                inputs.shaped(Type::f32, {-1, self.convolution_width - 1, self.channels()});
                RecurrenceState recurrent{};
                std::optional<Array> states;
                if (self.kind != MixerParts::convolution_alone) {
                    states.emplace(state, "state", Array::Use::written);
                    recurrent = state_of(*states, 3, step);
                    states->shaped(Type::f32, {-1, self.num_heads, is_delta ? self.size : self.head_dim, is_delta ? self.head_dim : self.size});
                }
                const unsigned char* const from = given.dense(type);
                unsigned char* const to = result.dense(type, rows * output.num_outputs());
                const Released released;
                run_mixer(self, step, before, recurrent, from, to);
            },
            nb::arg("step"), nb::arg("convolution"), nb::arg("state").none(), nb::arg("hidden"), nb::arg("out"),
            "out [rows, width] of hidden [rows, width], which it may be; states, float32 [slots, ...], of the step's slots are updated.");
}

}  // namespace quire
