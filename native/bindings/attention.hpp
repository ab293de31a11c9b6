// Common parts of the bindings of attention and of the fused layer: views, batches and options that keep their
// referents alive.
#pragma once

#include <nanobind/nanobind.h>

#include "kernels/attention.hpp"

namespace quire {

struct BoundView : PagedView {
    nanobind::object k_owner, v_owner, scale_owners[2], offset_owner;
};

struct BoundBatch : AttentionBatch {
    BoundBatch(nanobind::handle query_start, nanobind::handle context_lengths, nanobind::handle block_tables, int num_threads,
               bool share_prefixes);

    std::int64_t num_rows;
    nanobind::object owners[3];
};

struct BoundOptions : AttentionOptions {
    std::int64_t num_sinks;  // where there are sinks
    nanobind::object sinks_owner;
    std::int64_t num_slopes;  // where there are slopes
    nanobind::object slopes_owner;
};

// std::invalid_argument where heads of the view's widths, `num_q_heads` of them for each row of the batch (of `num_rows` rows),
// are none that the kernels take.
void check_heads(const PagedView& view, const BoundOptions& options, std::int64_t num_q_heads, std::int64_t num_rows);

}  // namespace quire
