// Binding of attention. Tensors are passed by address, shape and strides (array.hpp). Arguments that stay the same from
// call to call - a layer's view, a step's plan, a layer's options - are passed once, as an object.
#include "bindings/attention.hpp"

#include <stdexcept>
#include <string>
#include <utility>

#include <nanobind/stl/string_view.h>

#include "bindings/array.hpp"
#include "bindings/bindings.hpp"
#include "bindings/element_name.hpp"
#include "bindings/released.hpp"

namespace nb = nanobind;

namespace quire {

namespace {

using Int = std::int64_t;

constexpr Int kMost = (Int{1} << 31) - 1;  // of what the kernels count in 32 bits

PagedTensor paged(const Array& array, unsigned char* data) {
    return {data, array.stride(0), array.stride(1), array.stride(2), array.shape(3)};
}

// Codes uint8 [blocks, heads, tokens, width] of rows whose scales, bf16 [blocks, heads, tokens], lie behind the codes; of 4 bits two
// in each, and scales [blocks, heads, tokens, groups].
PagedTensor paged_codes(const Array& codes, const Array& scales) {
    PagedTensor found = paged(codes, codes.shaped(Type::u8, {-1, -1, -1, -1}));
    const bool grouped = scales.num_dims() == 4;
    if (grouped) found.bits = 4, found.width *= 2;
    check_range("a head's width", found.width, 1, kMaxHeadWidth);
    const unsigned char* first = grouped ? scales.shaped(Type::bf16, {-1, -1, -1, found.num_scales()}) : scales.strided(Type::bf16, 3);
    bool together = true;
    for (int dim = 0; dim < 3; ++dim) {
        const bool alike = codes.shape(dim) == scales.shape(dim) && (codes.shape(dim) < 2 || codes.stride(dim) == 2 * scales.stride(dim));
        together = together && alike;
    }
    found.scale = first - found.data;
    if (!together || found.scale < codes.shape(3) || found.scale > 2 * kMaxHeadWidth) {
        throw std::invalid_argument("expected the scales of each row close behind its codes, at the same distance in all rows, got other places");
    }
    return found;
}

const std::int32_t* int32s(const Array& array, Int count) { return reinterpret_cast<const std::int32_t*>(array.dense(Type::i32, count)); }

Int num_sequences_of(const Array& context_lengths) {
    context_lengths.dense(Type::i32);
    const Int count = context_lengths.count();
    check_range("the number of sequences", count, 1, kMost);
    return count;
}

Int table_width_of(const Array& block_tables, Int num_sequences) {
    block_tables.shaped(Type::i32, {num_sequences, -1});
    block_tables.dense(Type::i32);
    return block_tables.shape(1);
}

}  // namespace

BoundBatch::BoundBatch(nb::handle query_start_, nb::handle context_lengths_, nb::handle block_tables_, int num_threads_, bool share_prefixes_)
    : AttentionBatch(nullptr, nullptr, nullptr, 0, 0, num_threads_, share_prefixes_), num_rows(0) {
    const Array starts(query_start_, "query_start"), contexts(context_lengths_, "context_lengths"), tables(block_tables_, "block_tables");
    check_range("num_threads", num_threads_, 1, kMost);
    num_sequences = num_sequences_of(contexts);
    table_width = table_width_of(tables, num_sequences);
    query_start = int32s(starts, num_sequences + 1);
    context_lengths = int32s(contexts, num_sequences);
    block_tables = int32s(tables, num_sequences * table_width);
    bool rises = query_start[0] == 0;
    for (Int s = 0; s < num_sequences; ++s) rises = rises && query_start[s + 1] > query_start[s];
    if (!rises) throw std::invalid_argument("expected query_start to rise from 0, a row or more for each sequence, got others");
    num_rows = query_start[num_sequences];
    owners[0] = starts.owner(), owners[1] = contexts.owner(), owners[2] = tables.owner();
}

void check_heads(const PagedView& view, const BoundOptions& options, Int num_q_heads, Int num_rows) {
    for (const Int width : {view.k.width, view.v.width}) {
        if (width % 8 != 0 || width < 8 || width > kMaxHeadWidth) {
            throw std::invalid_argument("expected heads of 8 to " + std::to_string(kMaxHeadWidth) + " elements, in multiples of 8, got " +
                                        std::to_string(view.k.width) + " for keys and " + std::to_string(view.v.width) + " for values");
        }
    }
    if (num_q_heads < 1 || num_q_heads % view.num_kv_heads != 0 || num_q_heads > kMost / std::max<Int>(num_rows, 1)) {
        throw std::invalid_argument("expected query heads in a multiple of the " + std::to_string(view.num_kv_heads) +
                                    " heads of keys and values, and fewer than 2^31 with those of all " + std::to_string(num_rows) +
                                    " rows, got " + std::to_string(num_q_heads));
    }
    if (options.sinks != nullptr && options.num_sinks != num_q_heads) {
        throw std::invalid_argument("expected " + std::to_string(num_q_heads) + " sinks, one for each query head, got " +
                                    std::to_string(options.num_sinks));
    }
    if (options.slopes != nullptr && options.num_slopes != num_q_heads) {
        throw std::invalid_argument("expected " + std::to_string(num_q_heads) + " slopes, one for each query head, got " +
                                    std::to_string(options.num_slopes));
    }
}

void bind_attention(nb::module_& m) {
    nb::class_<BoundView>(m, "PagedView", "One layer's keys and values, which it keeps alive.")
        .def(
            "__init__",
            [](BoundView* self, nb::handle k, nb::handle v, nb::handle k_scale, nb::handle v_scale, std::string_view dtype, nb::handle k_offset) {
                const Array keys(k, "k", Array::Use::written), values(v, "v", Array::Use::written);
                const Array key_scales(k_scale, "k_scale", Array::Use::written), value_scales(v_scale, "v_scale", Array::Use::written);
                const Element element = element_named(dtype, "keys and values");
                const PagedTensor k_codes = paged_codes(keys, key_scales), v_codes = paged_codes(values, value_scales);
                values.shaped(Type::u8, {keys.shape(0), keys.shape(1), keys.shape(2), -1});
                check_range("the number of blocks", keys.shape(0), 0, kMost);
                check_range("the number of heads", keys.shape(1), 1, 1 << 20);
                check_range("the block size", keys.shape(2), 1, kMost);
                if (k_codes.bits < v_codes.bits) throw std::invalid_argument("expected keys of 8 bits beside values of 8 bits, got keys of 4");
                BoundView made{{k_codes, v_codes, element, keys.shape(0), keys.shape(1), keys.shape(2), true},
                               keys.owner(), values.owner(), {key_scales.owner(), value_scales.owner()}, {}};
                if (!k_offset.is_none()) {
                    const Array offset(k_offset, "k_offset");
                    made.k_offset = reinterpret_cast<const float*>(offset.dense(Type::f32, keys.shape(1) * made.k.width));
                    made.offset_owner = offset.owner();
                }
                new (self) BoundView(std::move(made));
            },
            nb::arg("k"), nb::arg("v"), nb::arg("k_scale"), nb::arg("v_scale"), nb::arg("dtype"), nb::arg("k_offset").none() = nb::none(),
            "k [num_blocks, num_kv_heads, block_size, k_width] and v likewise (v_width): codes of 8 bits as uint8; k_scale and v_scale "
            "[num_blocks, num_kv_heads, block_size], bfloat16, behind the codes of their rows. Codes of 4 bits: two in a byte, of v or of both, and scales "
            "[.., block_size, groups], one for each 32. dtype: of what is written and of queries. k_offset: float32 "
            "[num_kv_heads, k_width], taken from keys before they are turned, or None.")
        .def(
            "__init__",
            [](BoundView* self, nb::handle k, nb::handle v) {
                const Array keys(k, "k", Array::Use::written), values(v, "v", Array::Use::written);
                const Element element = keys.element("keys and values");
                const Type type = type_of(element);
                unsigned char* const k_data = keys.shaped(type, {-1, -1, -1, -1});
                unsigned char* const v_data = values.shaped(type, {keys.shape(0), keys.shape(1), keys.shape(2), -1});
                check_range("the number of blocks", keys.shape(0), 0, kMost);
                check_range("the number of heads", keys.shape(1), 1, 1 << 20);
                check_range("the block size", keys.shape(2), 1, kMost);
                for (const Array* array : {&keys, &values}) check_range("a head's width", array->shape(3), 1, 1 << 20);
                new (self) BoundView{{paged(keys, k_data), paged(values, v_data), element, keys.shape(0), keys.shape(1), keys.shape(2)},
                                     keys.owner(), values.owner(), {}, {}};
            },
            nb::arg("k"), nb::arg("v"),
            "k [num_blocks, num_kv_heads, block_size, k_width] and v likewise (v_width), of float32, bfloat16 or float16; the last "
            "dimension is dense, other strides are as they are. Where v begins where k does, values are the keys' first columns.");

    nb::class_<BoundBatch>(m, "AttentionBatch", "A step's rows and block tables, int32 and contiguous, which it keeps alive.")
        .def(nb::init<nb::handle, nb::handle, nb::handle, int, bool>(), nb::arg("query_start"), nb::arg("context_lengths"),
             nb::arg("block_tables"), nb::arg("num_threads"), nb::arg("share_prefixes") = true,
             "query_start [n + 1], rising from 0; context_lengths [n]; block_tables [n, widest]. None of them may change.")
        .def(
            "traffic",
            [](const BoundBatch& self, const BoundView& view, Int num_q_heads, const BoundOptions& options) {
                check_heads(view, options, num_q_heads, self.num_rows);
                const AttentionTraffic traffic = attention_traffic(view, num_q_heads, self, options);
                return nb::make_tuple(traffic.kv_bytes, traffic.unshared_kv_bytes, traffic.num_shared_runs);
            },
            nb::arg("view"), nb::arg("num_q_heads"), nb::arg("options"),
            nb::sig("def traffic(self, view: PagedView, num_q_heads: int, options: AttentionOptions) -> tuple[int, int, int]"),
            "Bytes of keys and values that a call reads, what they would be without sharing, and the number of shared runs.");

    nb::class_<BoundOptions>(m, "AttentionOptions", "A layer's settings; it keeps `sinks` and `slopes` alive.")
        .def(
            "__init__",
            [](BoundOptions* self, float scale, Int window, Int chunk, float softcap, nb::handle sinks, nb::handle slopes) {
                check_range("a window", window, 0, INT64_MAX);
                check_range("a chunk", chunk, 0, INT64_MAX);
                BoundOptions made{{scale, window, chunk, softcap, nullptr, nullptr}, 0, {}, 0, {}};
                if (!sinks.is_none()) {
                    const Array given(sinks, "sinks");
                    made.sinks = reinterpret_cast<const float*>(given.dense(Type::f32));
                    made.num_sinks = given.count();
                    made.sinks_owner = given.owner();
                }
                if (!slopes.is_none()) {
                    const Array given(slopes, "slopes");
                    made.slopes = reinterpret_cast<const float*>(given.dense(Type::f32));
                    made.num_slopes = given.count();
                    made.slopes_owner = given.owner();
                }
                new (self) BoundOptions(std::move(made));
            },
            nb::arg("scale"), nb::arg("window"), nb::arg("chunk"), nb::arg("softcap"), nb::arg("sinks").none(), nb::arg("slopes").none() = nb::none(),
            "window, chunk, softcap: 0 for none. sinks: float32 [num_q_heads], or None. slopes: likewise; a head's, times the key's position less the "
            "query's, is added to a score.");

    m.def(
        "attention_write",
        [](const BoundView& view, nb::handle k, nb::handle v, nb::handle slots, int num_threads) {
            const Array keys(k, "k"), values(v, "v"), given(slots, "slots");
            const Type type = type_of(view.element);
            const auto* slot = reinterpret_cast<const Int*>(given.dense(Type::i64));
            const Int num_tokens = given.count();
            unsigned char* const from_k = keys.shaped(type, {num_tokens, view.num_kv_heads, view.k.width});
            unsigned char* const from_v = values.shaped(type, {num_tokens, view.num_kv_heads, view.v.width});
            check_range("num_threads", num_threads, 1, kMost);
            const Released released;
            attention_write(view, {from_k, keys.stride(0), keys.stride(1)}, {from_v, values.stride(0), values.stride(1)}, slot, num_tokens,
                            num_threads);
        },
        nb::arg("view"), nb::arg("k"), nb::arg("v"), nb::arg("slots"), nb::arg("num_threads"),
        "Stores keys [tokens, num_kv_heads, k_width] and values of the view's type in int64 slots [tokens]. Raises ValueError for a slot "
        "outside the view.");
    m.def(
        "attention_run",
        [](const BoundView& view, nb::handle query, nb::handle out, const BoundBatch& batch, const BoundOptions& options) {
            const Array queries(query, "query"), given(out, "out", Array::Use::written);
            const Type type = type_of(view.element);
            unsigned char* const from = queries.shaped(type, {batch.num_rows, -1, view.k.width});
            const Int num_q_heads = queries.shape(1);
            unsigned char* const to = given.shaped(type, {batch.num_rows, num_q_heads, view.v.width});
            check_heads(view, options, num_q_heads, batch.num_rows);
            const Released released;
            attention_run(view, {from, queries.stride(0), queries.stride(1)}, {to, given.stride(0), given.stride(1)}, num_q_heads, batch,
                          options, current_isa());
        },
        nb::arg("view"), nb::arg("query"), nb::arg("out"), nb::arg("batch"), nb::arg("options"),
        "Attention of a batch: out [rows, num_q_heads, v_width] of query [rows, num_q_heads, k_width], both of the view's type. Raises "
        "ValueError for a block outside the view.");
    m.def("read_bandwidth", &read_bandwidth, nb::arg("num_bytes"), nb::arg("repetitions"), nb::call_guard<Released>(),
          "Bytes per second at which all threads together read a buffer of num_bytes; the best of `repetitions`.");
}

}  // namespace quire
