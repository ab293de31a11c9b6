// Binding of attention. Tensors cross as addresses and strides (quire/attention/native.py reads them off and has checked
// shapes and types): that costs a tenth of what a conversion through DLPack does. What stays the same from call to
// call - a layer's view, a step's plan, a layer's options - crosses once, as an object.
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/bindings.hpp"
#include "bindings/element_name.hpp"

#include <nanobind/stl/string.h>

#include "kernels/attention.hpp"

namespace nb = nanobind;

namespace quire {

namespace {

using Address = std::uintptr_t;
using Int = std::int64_t;

unsigned char* bytes_at(Address address) { return reinterpret_cast<unsigned char*>(address); }

}  // namespace

void bind_attention(nb::module_& m) {
    nb::class_<PagedView>(m, "PagedView", "One layer's keys and values; strides in elements. Does not own the memory.")
        .def(
            "__init__",
            [](PagedView* self, const std::string& dtype, Int num_blocks, Int num_kv_heads, Int block_size, Address k, Int k_width,
               Int k_block_stride, Int k_head_stride, Int k_token_stride, Address v, Int v_width, Int v_block_stride, Int v_head_stride,
               Int v_token_stride) {
                new (self) PagedView{{bytes_at(k), k_block_stride, k_head_stride, k_token_stride, k_width},
                                     {bytes_at(v), v_block_stride, v_head_stride, v_token_stride, v_width},
                                     element_named(dtype, "keys and values"), num_blocks, num_kv_heads, block_size};
            },
            nb::arg("dtype"), nb::arg("num_blocks"), nb::arg("num_kv_heads"), nb::arg("block_size"), nb::arg("k"), nb::arg("k_width"),
            nb::arg("k_block_stride"), nb::arg("k_head_stride"), nb::arg("k_token_stride"), nb::arg("v"), nb::arg("v_width"),
            nb::arg("v_block_stride"), nb::arg("v_head_stride"), nb::arg("v_token_stride"));

    nb::class_<AttentionBatch>(m, "AttentionBatch", "A step's rows and block tables, int32 and contiguous. Does not own the memory.")
        .def(
            "__init__",
            [](AttentionBatch* self, Address query_start, Address context_lengths, Address block_tables, Int num_sequences, Int table_width,
               int num_threads, bool share_prefixes) {
                new (self) AttentionBatch(reinterpret_cast<const std::int32_t*>(query_start),
                                          reinterpret_cast<const std::int32_t*>(context_lengths),
                                          reinterpret_cast<const std::int32_t*>(block_tables), num_sequences, table_width, num_threads,
                                          share_prefixes);
            },
            nb::arg("query_start"), nb::arg("context_lengths"), nb::arg("block_tables"), nb::arg("num_sequences"), nb::arg("table_width"),
            nb::arg("num_threads"), nb::arg("share_prefixes") = true)
        .def(
            "traffic",
            [](const AttentionBatch& self, const PagedView& view, Int num_q_heads, const AttentionOptions& options) {
                const AttentionTraffic traffic = attention_traffic(view, num_q_heads, self, options);
                return nb::make_tuple(traffic.kv_bytes, traffic.unshared_kv_bytes, traffic.num_shared_runs);
            },
            nb::arg("view"), nb::arg("num_q_heads"), nb::arg("options"),
            nb::sig("def traffic(self, view: PagedView, num_q_heads: int, options: AttentionOptions) -> tuple[int, int, int]"),
            "Bytes of keys and values that a call reads, what they would be without sharing, and the number of shared runs.");

    nb::class_<AttentionOptions>(m, "AttentionOptions", "A layer's settings; `sinks` is an address, or 0. Does not own the memory.")
        .def(
            "__init__",
            [](AttentionOptions* self, float scale, Int window, Int chunk, float softcap, Address sinks) {
                new (self) AttentionOptions{scale, window, chunk, softcap, reinterpret_cast<const float*>(sinks)};
            },
            nb::arg("scale"), nb::arg("window"), nb::arg("chunk"), nb::arg("softcap"), nb::arg("sinks"));

    m.def(
        "attention_write",
        [](const PagedView& view, Address k, Int k_token_stride, Int k_head_stride, Address v, Int v_token_stride, Int v_head_stride,
           Address slots, Int num_tokens, int num_threads) {
            attention_write(view, {bytes_at(k), k_token_stride, k_head_stride}, {bytes_at(v), v_token_stride, v_head_stride},
                            reinterpret_cast<const std::int64_t*>(slots), num_tokens, num_threads);
        },
        nb::call_guard<nb::gil_scoped_release>(), "Stores keys and values in slots. Raises ValueError for a slot outside the view.");
    m.def(
        "attention_run",
        [](const PagedView& view, Address query, Int token_stride, Int head_stride, Address out, Int out_token_stride, Int out_head_stride,
           Int num_q_heads, const AttentionBatch& batch, const AttentionOptions& options) {
            attention_run(view, {bytes_at(query), token_stride, head_stride}, {bytes_at(out), out_token_stride, out_head_stride}, num_q_heads,
                          batch, options, current_isa());
        },
        nb::call_guard<nb::gil_scoped_release>(), "Attention of a batch. Raises ValueError for a block outside the view.");
    m.def("read_bandwidth", &read_bandwidth, nb::arg("num_bytes"), nb::arg("repetitions"), nb::call_guard<nb::gil_scoped_release>(),
          "Bytes per second at which all threads together read a buffer of num_bytes; the best of `repetitions`.");
}

}  // namespace quire
