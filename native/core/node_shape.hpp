// The number of blocks of each group in a node of the tree, and the tokens of each block: the twin of
// quire.cache.manager.node_shape. The blocks of a node, group after group, are its columns. In most caches all groups
// have one block to a node, and a column is a group.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/span.hpp"

namespace quire {

struct GroupShape {
    Span span;
    std::int64_t tokens;        // of a block
    std::int64_t per_node;      // blocks of a whole node
    std::int32_t first_column;  // in a node, of them

    // Entries of a table of `num_tokens` tokens.
    std::int64_t num_blocks(std::int64_t num_tokens) const noexcept { return (num_tokens + tokens - 1) / tokens; }
    // The first entry that the query at `position` may read.
    std::int64_t first_needed(std::int64_t position) const noexcept { return span.first_needed(position) / tokens; }
    // The entries of the node at depth `node` (0 for the first) that begin before token `num_tokens`: from `node * per_node`
    // up to this one. With one block to a node it needs no division; the node must begin before `num_tokens`.
    std::int64_t end_in_node(std::int64_t node, std::int64_t num_tokens) const noexcept {
        return per_node == 1 ? node + 1 : std::min((node + 1) * per_node, num_blocks(num_tokens));
    }
};

struct NodeShape {
    // blocks_per_node: of each group, divisors of `size`; empty: one each.
    NodeShape(const std::vector<Span>& spans, std::int64_t size, const std::vector<std::int32_t>& blocks_per_node)
        : step(size) {
        for (std::size_t at = 0; at < spans.size(); ++at) {
            const std::int32_t count = blocks_per_node.empty() ? 1 : blocks_per_node[at];
            const std::int64_t tokens = size / count;
            groups.push_back({spans[at], tokens, count, num_columns()});
            for (std::int32_t part = 0; part < count; ++part) starts.push_back(static_cast<std::int32_t>(part * tokens));
            is_full.insert(is_full.end(), static_cast<std::size_t>(count), spans[at].is_full());
            step = std::min(step, tokens);
        }
    }

    std::int32_t num_columns() const noexcept { return static_cast<std::int32_t>(starts.size()); }

    std::vector<GroupShape> groups;
    std::vector<std::int32_t> starts;  // by column, its first token in the node
    std::vector<bool> is_full;         // by column, whether its group keeps everything
    std::int64_t step;                 // tokens of the smallest blocks: where a hit may end inside of a node
};

}  // namespace quire
