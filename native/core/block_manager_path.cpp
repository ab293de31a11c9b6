// Known content of one path of the tree: its cache priority is changed, or its end leaves memory. The rules, and their
// reasons, stand in quire.cache.manager.known_path.
#include <algorithm>

#include "core/block_manager.hpp"

namespace quire {

// Puts the nodes of the prompt's path into path_: its full nodes, and behind them the closest child if all of its tokens
// agree with the prompt, or, for a raise, all of the prompt's with it. Only scratch changes.
void BlockManager::find_path(const Prompt& prompt, bool is_raise) {
    const auto num_tokens = static_cast<std::int64_t>(prompt.tokens.size());
    path_.clear();
    path_.reserve(static_cast<std::size_t>(num_nodes_for(num_tokens)));
    NodeId node = tree_.find_root(prompt.name);
    for (std::int64_t start = 0; start < num_tokens && node != kNone; start += block_size_) {
        const std::int64_t count = std::min(block_size_, num_tokens - start);
        const BlockView view = prompt.block(start, count);
        const auto [child, num_common] = tree_.longest(tree_.find(node, view), view);
        if (child == kNone || num_common < std::min<std::int64_t>(tree_.num_tokens(child), count)) return;
        if (num_common < tree_.num_tokens(child) && !is_raise) return;
        path_.push_back(child);
        if (num_common < block_size_) return;
        node = child;
    }
}

// The highest cache priority of the blocks in the children of a node; the lowest one without any.
std::int32_t BlockManager::highest_level_below(NodeId node) const noexcept {
    std::int32_t highest = kDiscard;
    for (NodeId child = tree_.find(node, {}).after; child != kNone; child = tree_.next_sibling(child)) {
        for (std::int32_t column = 0; column < num_columns(); ++column) {
            const BlockId block_id = tree_.block_id(child, column);
            if (block_id != kNone) highest = std::max(highest, pool_.order().cache_priority_of(block_id));
        }
        if (highest == kNumPriorities - 1) break;
    }
    return highest;
}

PriorityChange BlockManager::set_cache_priority(const Prompt& prompt, std::int32_t level, std::int64_t start) {
    PriorityChange change{0, static_cast<std::int64_t>(prompt.tokens.size())};
    find_path(prompt, level > kDiscard);
    const auto num_nodes = static_cast<std::int64_t>(path_.size());
    if (num_nodes == 0 || (num_nodes - 1) * block_size_ + tree_.num_tokens(path_.back()) <= start) return change;
    if (level != kNormal) pool_.start_marking();
    if (!pool_.is_marked()) return change;

    // From here on no call fails. Tails first: the level of a head depends on them.
    BlockId near = kNone;
    for (std::int64_t at = num_nodes - 1; at >= 0; --at) {
        const NodeId node = path_[static_cast<std::size_t>(at)];
        const bool is_in_range = at * block_size_ + tree_.num_tokens(node) > start;
        std::int32_t least = -1;  // unknown until a block is to be lowered
        for (std::int32_t column = 0; column < num_columns(); ++column) {
            const BlockId block_id = tree_.block_id(node, column);
            if (block_id == kNone) continue;
            const std::int32_t old = pool_.order().cache_priority_of(block_id);
            if (old == level || (old > level && !is_in_range)) continue;
            if (old > level && least < 0) least = highest_level_below(node);
            const std::int32_t changed = old < level ? level : std::max(level, std::min(old, least));
            if (changed == old) continue;
            near = pool_.set_cache_priority(block_id, changed, near);
            ++change.num_blocks;
            change.first_position = at * block_size_;
        }
    }
    return change;
}

std::int64_t BlockManager::evict_path(const Prompt& prompt) {
    find_path(prompt, false);
    if (events_.is_on()) events_.ensure_room(path_.size(), 0, 0);

    // From here on no call fails.
    const std::int64_t num_free = pool_.num_free();
    for (auto at = path_.rbegin(); at != path_.rend(); ++at) {
        bool may_go = tree_.num_ends(*at) == 0 && tree_.find(*at, {}).after == kNone;
        for (std::int32_t column = 0; may_go && column < num_columns(); ++column) {
            const BlockId block_id = tree_.block_id(*at, column);
            may_go = block_id == kNone || pool_.state(block_id) == BlockState::cached;
        }
        if (!may_go) break;
        forget(*at);
    }
    return pool_.num_free() - num_free;
}

}  // namespace quire
