// Hits: finding the longest valid hit, taking it, and looking for a longer one.
#include <algorithm>

#include "core/block_manager.hpp"

namespace quire {

namespace {

constexpr std::int64_t kMaxOthers = 64;

}  // namespace

BlockView Prompt::block(std::int64_t start, std::int64_t count) const noexcept {
    BlockView view{tokens.subspan(static_cast<std::size_t>(start), static_cast<std::size_t>(count)), {}, start};
    if (!keys.empty()) {
        const auto before = [](const ExtraKey& key, std::int64_t position) { return key.position < position; };
        const auto first = std::lower_bound(keys.begin(), keys.end(), start, before);
        view.keys = {first, std::lower_bound(first, keys.end(), start + count, before)};
    }
    return view;
}

// A hit is valid if every group has the blocks it needs; missing_ has the deepest block that the path lacks.
bool BlockManager::is_valid_hit(std::int64_t num_tokens) const noexcept {
    for (std::int32_t group = 0; group < num_groups(); ++group)
        if (missing_[static_cast<std::size_t>(group)] >= first_block_needed(group, num_tokens)) return false;
    return true;
}

// ... for a hit that ends in `child`, at depth `node` below the path.
bool BlockManager::is_valid_hit_in(NodeId child, std::int64_t node, std::int64_t num_tokens) const noexcept {
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        const GroupShape& shape = shape_of(group);
        const std::int64_t needed = shape.first_needed(num_tokens);
        if (missing_[static_cast<std::size_t>(group)] >= needed) return false;
        const std::int64_t first = node * shape.per_node;
        const std::int64_t stop = shape.end_in_node(node, num_tokens);
        for (std::int64_t block = std::max(first, needed); block < stop; ++block)
            if (tree_.block_id(child, shape.first_column + static_cast<std::int32_t>(block - first)) == kNone) return false;
    }
    return true;
}

// The longest valid hit; path_ has its nodes, the partial node last. Only scratch changes. If the closest child has
// lost a block, up to kMaxOthers siblings with a shorter common prefix and all blocks are tried: so pinned content
// stays findable next to a node whose blocks a window has given back.
std::int64_t BlockManager::find_hit(const Prompt& prompt) {
    const std::int64_t limit = static_cast<std::int64_t>(prompt.tokens.size()) - 1;
    path_.clear();
    NodeId node = tree_.find_root(prompt.name);
    if (node == kNone || limit < 1) return 0;
    path_.reserve(static_cast<std::size_t>(num_nodes_for(limit)));
    std::fill(missing_.begin(), missing_.end(), -1);
    std::int64_t longest = 0;
    std::int64_t num_others = kMaxOthers;
    NodeId last = kNone;
    for (std::int64_t start = 0; start < limit; start += block_size_) {
        const std::int64_t count = std::min(block_size_, limit - start);
        const BlockView view = prompt.block(start, count);
        const Neighbours near = tree_.find(node, view);
        const auto [child, num_common] = tree_.longest(near, view);
        if (child == kNone) break;
        const std::int64_t depth = static_cast<std::int64_t>(path_.size());
        path_.push_back(child);
        const bool is_whole = tree_.is_whole(child, num_common);
        if (!is_whole && is_valid_hit(start + count)) {
            const auto [other, num_shared] = tree_.longest_whole(near, view, num_others);
            if (other != kNone && is_valid_hit(start + num_shared)) {
                longest = start + num_shared;
                last = other;
            }
        }
        std::int64_t hit = start + num_common;
        while (hit > start && !(is_whole ? is_valid_hit(hit) : is_valid_hit_in(child, depth, hit)))
            hit = (hit - 1) / shape_.step * shape_.step;
        if (hit > start && hit >= longest) {
            longest = hit;
            last = child;
        }
        for (std::int32_t group = 0; !is_whole && group < num_groups(); ++group) {
            const GroupShape& shape = shape_of(group);
            const std::int64_t first = depth * shape.per_node;
            const std::int64_t stop = shape.end_in_node(depth, start + num_common);
            for (std::int64_t block = first; block < stop; ++block)
                if (tree_.block_id(child, shape.first_column + static_cast<std::int32_t>(block - first)) == kNone)
                    missing_[static_cast<std::size_t>(group)] = block;
        }
        if (num_common < block_size_) break;
        node = child;
    }
    path_.resize(static_cast<std::size_t>(num_nodes_for(longest)));
    if (longest != 0) path_.back() = last;
    return longest;
}

void BlockManager::prepare_tables(std::vector<BlockTable>& tables, std::int64_t num_tokens) const {
    tables.resize(static_cast<std::size_t>(num_groups()));
    for (std::size_t group = 0; group < tables.size(); ++group)
        tables[group].prepare(0, shape_.groups[group].num_blocks(num_tokens));
}

// Puts the blocks of path_ into the sequence's tables, which are empty and have room.
void BlockManager::take_hit(Sequence& sequence, std::int64_t num_tokens, NodeId root) noexcept {
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        const GroupShape& shape = shape_of(group);
        BlockTable& entries = table(sequence, group);
        const std::int64_t num_blocks = shape.num_blocks(num_tokens);
        const std::int64_t first = std::min(shape.first_needed(num_tokens), num_blocks);
        const std::int64_t num_counted = shape.num_blocks(sequence.num_computed);  // of its earlier, shorter hit
        const bool counts_uses = pool_.order().counts_uses();
        std::uint32_t most_uses = kMaxUses;
        sequence.first_kept[static_cast<std::size_t>(group)] = first;
        for (std::int64_t block = 0; block < first; ++block) entries.push(kNone);
        for (std::int64_t block = first; block < num_blocks; ++block) {
            const std::int64_t node = shape.per_node == 1 ? block : block / shape.per_node;
            const auto column = shape.first_column + static_cast<std::int32_t>(block - node * shape.per_node);
            const BlockId block_id = tree_.block_id(path_[static_cast<std::size_t>(node)], column);
            pool_.hold(block_id, sequence.cache_priority);
            if (counts_uses)
                most_uses = block >= num_counted ? pool_.count_use(block_id, most_uses) : pool_.uses(block_id);
            entries.push(block_id);
        }
    }
    const std::int64_t num_full = num_tokens / block_size_;
    move_end(sequence, num_full == 0 ? root : path_[static_cast<std::size_t>(num_full) - 1]);
    sequence.num_computed = sequence.num_cached = sequence.reserved = num_tokens;
    sequence.is_writer = false;
}

// A sequence that is not yet admitted looks for a longer hit if the tree has grown since its last look; a withdrawn
// sequence, or one without prefix caching, does not.
void BlockManager::refresh_hit(Sequence& sequence) {
    if (sequence.is_admitted || sequence.node == kNone ||
        (sequence.seen_version == version_ && sequence.seen_tokens == sequence.num_tokens()))
        return;
    const std::int64_t num_tokens = find_hit(prompt_of(sequence).up_to_hit(sequence.most_cached));
    if (num_tokens > sequence.num_computed) {
        std::vector<BlockTable> fresh;
        prepare_tables(fresh, num_tokens);
        ensure_flight_room(sequence.num_entries());
        sequence.tables.swap(fresh);
        take_hit(sequence, num_tokens, sequence.node);
        release_entries(fresh, 0);
    }
    sequence.seen_version = version_;
    sequence.seen_tokens = sequence.num_tokens();
}

}  // namespace quire
