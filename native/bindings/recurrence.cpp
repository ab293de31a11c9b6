// Binding of the recurrences of state layers. Tensors are passed by address (array.hpp); the assignment of rows to
// sequences is passed once a step, as an object with its own copy.
#include "kernels/recurrence.hpp"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "bindings/array.hpp"
#include "bindings/bindings.hpp"
#include "bindings/recurrence.hpp"
#include "bindings/released.hpp"

namespace nb = nanobind;

namespace quire {

RecurrenceState state_of(const Array& state, int num_sizes, const RecurrenceStep& step) {
    unsigned char* const data = state.strided(Type::f32, num_sizes + 1);
    std::int64_t one_slot = 1;
    bool is_dense = true;
    for (int dim = num_sizes; dim >= 1; --dim) {
        check_range("a size of the state", state.shape(dim), 1, kMostStateColumns);
        is_dense = is_dense && (state.shape(dim) == 1 || state.stride(dim) == one_slot);
        if (__builtin_mul_overflow(one_slot, state.shape(dim), &one_slot)) is_dense = false;
    }
    if (!is_dense || (state.shape(0) > 1 && state.stride(0) < one_slot)) {
        throw std::invalid_argument("expected state with each slot contiguous and none over another, got other strides");
    }
    std::int64_t last = *std::max_element(step.slots.begin(), step.slots.end());
    for (const std::int64_t slot : step.checkpoint_slots) last = std::max(last, slot);
    check_range("the largest slot", last, 0, state.shape(0) - 1);
    return {reinterpret_cast<float*>(data), state.stride(0)};
}

namespace {

using Int = std::int64_t;

std::vector<Int> numbers(nb::handle given, const char* name) {
    const Array array(given, name);
    const auto* data = reinterpret_cast<const Int*>(array.dense(Type::i64));
    return {data, data + array.count()};
}

RecurrenceInput rows(const Array& array, Type type, Int num_rows, Int width) {
    const unsigned char* const data = array.shaped(type, {num_rows, width});
    return {data, array.stride(0), 0};
}

RecurrenceInput heads(const Array& array, Type type, Int num_rows, Int num_heads, Int width) {
    const unsigned char* const data = array.shaped(type, {num_rows, num_heads, width});
    return {data, array.stride(0), array.stride(1)};
}

unsigned char* result(const Array& out, Type type, std::initializer_list<Int> shape) {
    out.shaped(type, shape);
    return out.dense(type);
}

// Heads of `array`, each of which serves several of num_heads.
Int shared_heads(const Array& array, const char* name, Int num_heads) {
    const Int count = array.num_dims() == 3 ? array.shape(1) : 0;
    if (count < 1 || num_heads % count != 0) {
        throw std::invalid_argument(std::string("expected ") + name + " [rows, heads, size] with a number of heads that divides " +
                                    std::to_string(num_heads) + ", got " + std::to_string(count));
    }
    return count;
}

const float* floats(const std::optional<Array>& array, Int count) {
    return array ? reinterpret_cast<const float*>(array->dense(Type::f32, count)) : nullptr;
}

void scan(const RecurrenceStep& step, nb::handle state_, nb::handle x_, nb::handle dt_, nb::handle a_, nb::handle b_, nb::handle c_,
          nb::handle d_, nb::handle out_) {
    const Array state(state_, "state", Array::Use::written), x(x_, "x"), dt(dt_, "dt"), a(a_, "a"), b(b_, "b"), c(c_, "c"),
        out(out_, "out", Array::Use::written);
    std::optional<Array> d;
    if (!d_.is_none()) d.emplace(d_, "d");
    const bool per_channel = state.num_dims() == 3;
    ScanJob job{};
    job.step = &step;
    job.element = x.element("x");
    job.per_channel = per_channel;
    job.state = state_of(state, per_channel ? 2 : 3, step);
    job.num_heads = per_channel ? 1 : state.shape(1);
    job.head_dim = state.shape(per_channel ? 1 : 2);
    job.state_size = state.shape(per_channel ? 2 : 3);
    check_range("the number of heads", job.num_heads, 1, kMostHeads);
    check_range("the size of a state", job.state_size, 1, kMostSums);
    const Type type = type_of(job.element);
    const Int num_rows = step.num_rows();
    job.d = floats(d, per_channel ? job.head_dim : job.num_heads);
    if (per_channel) {
        job.num_groups = 1;
        job.x = rows(x, type, num_rows, job.head_dim);
        job.b = rows(b, type, num_rows, job.state_size);
        job.c = rows(c, type, num_rows, job.state_size);
        job.dt = rows(dt, Type::f32, num_rows, job.head_dim);
        a.shaped(Type::f32, {job.head_dim, job.state_size});
        job.a = reinterpret_cast<const float*>(a.dense(Type::f32));
        job.out = result(out, type, {num_rows, job.head_dim});
    } else {
        job.num_groups = shared_heads(b, "b", job.num_heads);
        job.x = heads(x, type, num_rows, job.num_heads, job.head_dim);
        job.b = heads(b, type, num_rows, job.num_groups, job.state_size);
        job.c = heads(c, type, num_rows, job.num_groups, job.state_size);
        job.dt = rows(dt, Type::f32, num_rows, job.num_heads);
        a.shaped(Type::f32, {job.num_heads});
        job.a = reinterpret_cast<const float*>(a.dense(Type::f32));
        job.out = result(out, type, {num_rows, job.num_heads, job.head_dim});
    }
    const Released released;
    run_scan(job);
}

void delta(const RecurrenceStep& step, nb::handle state_, nb::handle q_, nb::handle k_, nb::handle v_, nb::handle g_, nb::handle beta_,
           float scale, bool normalize, nb::handle out_) {
    const Array state(state_, "state", Array::Use::written), q(q_, "q"), k(k_, "k"), v(v_, "v"), g(g_, "g"),
        out(out_, "out", Array::Use::written);
    std::optional<Array> beta;
    if (!beta_.is_none()) beta.emplace(beta_, "beta");
    DeltaJob job{};
    job.step = &step;
    job.element = v.element("v");
    job.state = state_of(state, 3, step);
    job.num_heads = state.shape(1), job.k_dim = state.shape(2), job.v_dim = state.shape(3);
    check_range("the number of heads", job.num_heads, 1, kMostHeads);
    check_range("the size of a key", job.k_dim, 1, kMostSums);
    job.num_k_heads = shared_heads(q, "q", job.num_heads);
    job.corrects = beta.has_value();
    job.per_channel = job.corrects && g.num_dims() == 3;
    job.normalize = normalize;
    job.scale = scale;
    const Type type = type_of(job.element);
    const Int num_rows = step.num_rows();
    job.q = heads(q, type, num_rows, job.num_k_heads, job.k_dim);
    job.k = heads(k, type, num_rows, job.num_k_heads, job.k_dim);
    job.v = heads(v, type, num_rows, job.num_heads, job.v_dim);
    if (!job.corrects) {
        g.shaped(Type::f32, {job.num_heads});
        job.g = {g.dense(Type::f32), 0, 0};
    } else {
        job.g = job.per_channel ? heads(g, Type::f32, num_rows, job.num_heads, job.k_dim) : rows(g, Type::f32, num_rows, job.num_heads);
        job.beta = rows(*beta, Type::f32, num_rows, job.num_heads);
    }
    job.out = result(out, type, {num_rows, job.num_heads, job.v_dim});
    const Released released;
    run_delta(job);
}

void lru(const RecurrenceStep& step, nb::handle state_, nb::handle x_, nb::handle log_a_, nb::handle first_, nb::handle out_) {
    const Array state(state_, "state", Array::Use::written), x(x_, "x"), log_a(log_a_, "log_a"), out(out_, "out", Array::Use::written);
    std::optional<Array> first;
    if (!first_.is_none()) first.emplace(first_, "first");
    LruJob job{};
    job.step = &step;
    job.element = x.element("x");
    job.state = state_of(state, 1, step);
    job.num_channels = state.shape(1);
    const Type type = type_of(job.element);
    const Int num_rows = step.num_rows();
    job.x = rows(x, type, num_rows, job.num_channels);
    job.log_a = rows(log_a, Type::f32, num_rows, job.num_channels);
    job.first = first ? first->dense(Type::u8, num_rows) : nullptr;
    job.out = result(out, type, {num_rows, job.num_channels});
    const Released released;
    run_lru(job);
}

void convolution(const RecurrenceStep& step, nb::handle state_, nb::handle x_, nb::handle weight_, nb::handle bias_, bool silu,
                 nb::handle out_) {
    const Array state(state_, "state", Array::Use::written), x(x_, "x"), weight(weight_, "weight"), out(out_, "out", Array::Use::written);
    std::optional<Array> bias;
    if (!bias_.is_none()) bias.emplace(bias_, "bias");
    ConvolutionJob job{};
    job.step = &step;
    job.element = x.element("x");
    job.state = state_of(state, 2, step);
    job.width = state.shape(1) + 1, job.num_channels = state.shape(2);
    check_range("the width of a convolution", job.width, 2, kMostConvolutionWidth);
    job.silu = silu;
    const Type type = type_of(job.element);
    const Int num_rows = step.num_rows();
    job.x = rows(x, type, num_rows, job.num_channels);
    weight.shaped(Type::f32, {job.num_channels, job.width});
    job.weight = reinterpret_cast<const float*>(weight.dense(Type::f32));
    job.bias = floats(bias, job.num_channels);
    job.out = result(out, type, {num_rows, job.num_channels});
    const Released released;
    run_convolution(job);
}

}  // namespace

void bind_recurrence(nb::module_& m) {
    nb::class_<RecurrenceStep>(m, "RecurrenceStep", "The rows, slots and checkpoints of one call of a recurrence; a copy.")
        .def(
            "__init__",
            [](RecurrenceStep* self, nb::handle starts, nb::handle slots, nb::handle checkpoint_rows, nb::handle checkpoint_slots,
               const std::optional<std::string>& isa) {
                RecurrenceStep step{numbers(starts, "starts"), numbers(slots, "slots"), numbers(checkpoint_rows, "checkpoint_rows"),
                                    numbers(checkpoint_slots, "checkpoint_slots"), isa ? isa_from_name(*isa) : current_isa()};
                require_isa(step.isa);
                check_range("the number of sequences", step.num_sequences(), 1, (Int{1} << 31) - 1);
                check_range("the number of starts", static_cast<Int>(step.starts.size()), step.num_sequences() + 1, step.num_sequences() + 1);
                bool rises = step.starts[0] == 0;
                for (std::size_t s = 1; s < step.starts.size(); ++s) rises = rises && step.starts[s] > step.starts[s - 1];
                if (!rises) throw std::invalid_argument("expected starts to rise from 0, a row or more for each sequence, got others");
                const auto num_checkpoints = static_cast<Int>(step.checkpoint_rows.size());
                check_range("the number of checkpoint_slots", static_cast<Int>(step.checkpoint_slots.size()), num_checkpoints, num_checkpoints);
                if (!std::is_sorted(step.checkpoint_rows.begin(), step.checkpoint_rows.end())) {
                    throw std::invalid_argument("expected checkpoint_rows in rising order, got others");
                }
                for (const Int row : step.checkpoint_rows) check_range("a checkpoint's row", row, 0, step.num_rows() - 1);
                std::vector<Int> written = step.slots;
                written.insert(written.end(), step.checkpoint_slots.begin(), step.checkpoint_slots.end());
                std::sort(written.begin(), written.end());
                if (written[0] < 0 || std::adjacent_find(written.begin(), written.end()) != written.end()) {
                    throw std::invalid_argument("expected slots of 0 or more, all distinct, those of checkpoints included, got others");
                }
                new (self) RecurrenceStep(std::move(step));
            },
            nb::arg("starts"), nb::arg("slots"), nb::arg("checkpoint_rows"), nb::arg("checkpoint_slots"), nb::arg("isa") = nb::none(),
            "int64: starts [n + 1], rising from 0; slots [n]; checkpoint_rows (rising) and checkpoint_slots [c]. All slots are distinct. "
            "isa: a variant's name, default the one in use.");
    m.def("recurrent_scan", &scan, nb::arg("step"), nb::arg("state"), nb::arg("x"), nb::arg("dt"), nb::arg("a"), nb::arg("b"), nb::arg("c"),
          nb::arg("d").none(), nb::arg("out"),
          "Mamba 1 of a state [slots, channels, size], Mamba 2 of [slots, heads, head_dim, size], float32; x, b, c and out of one type, dt, a "
          "and d of float32. Shapes: quire.recurrence.recurrence_backend.");
    m.def("recurrent_delta", &delta, nb::arg("step"), nb::arg("state"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("g"),
          nb::arg("beta").none(), nb::arg("scale"), nb::arg("normalize"), nb::arg("out"),
          "Gated delta rule and KDA of a state [slots, heads, k_dim, v_dim], float32; q, k, v and out of one type, g and beta of float32. "
          "Without beta linear attention, with g [heads].");
    m.def("recurrent_lru", &lru, nb::arg("step"), nb::arg("state"), nb::arg("x"), nb::arg("log_a"), nb::arg("first").none(), nb::arg("out"),
          "RG-LRU of a state [slots, channels], float32; x and out of one type, log_a of float32; first: uint8 [rows] or None.");
    m.def("short_convolution", &convolution, nb::arg("step"), nb::arg("state"), nb::arg("x"), nb::arg("weight"), nb::arg("bias").none(),
          nb::arg("silu"), nb::arg("out"),
          "Causal convolution of each channel, state [slots, width - 1, channels] of float32; x and out of one type, weight [channels, width] "
          "and bias [channels] of float32.");
}

}  // namespace quire
