// commit makes computed tokens findable; rewind takes them back.
#include <algorithm>
#include <string>

#include "core/block_manager.hpp"

namespace quire {

void BlockManager::commit(SequenceId id, std::int64_t num_computed) {
    Sequence& sequence = find(id);
    const std::int64_t most = std::min(sequence.reserved, sequence.num_tokens());
    if (num_computed < sequence.num_computed || num_computed > most)
        throw BadArgument("expected " + std::to_string(sequence.num_computed) + " .. " + std::to_string(most) +
                          " computed tokens for sequence " + std::to_string(id) + " (" +
                          std::to_string(sequence.reserved) + " reserved, " + std::to_string(sequence.num_tokens()) +
                          " known), got " + std::to_string(num_computed) + " in commit");
    if (num_computed == sequence.num_computed) return;
    if (sequence.restored_to != 0 && sequence.restored_to != num_computed)
        throw BadArgument("expected " + std::to_string(sequence.restored_to) + " computed tokens for sequence " +
                          std::to_string(id) + ", which was restored to these, got " + std::to_string(num_computed) +
                          " in commit");

    // All memory first: nodes, their keys, tables that change in place, blocks in flight.
    const Prompt prompt = prompt_of(sequence);
    const std::int64_t first = sequence.num_computed / block_size_;
    const std::int64_t num_full = num_computed / block_size_;
    const bool is_findable = sequence.node != kNone;
    const std::int64_t num_nodes = is_findable ? num_nodes_for(num_computed) - first : 0;
    std::vector<PrefixTree::StagedKeys> keys;  // by node from `first`; empty if the sequence has no keys
    std::size_t num_deduplicated = 0;
    std::int64_t num_released = 0;
    if (is_findable) {
        if (!sequence.keys.empty())
            for (std::int64_t block = first; block < first + num_nodes; ++block)
                keys.push_back(PrefixTree::stage_keys(
                    prompt.block(block * block_size_, std::min(block_size_, num_computed - block * block_size_))));
        tree_.ensure_room(static_cast<std::size_t>(num_nodes), keys.size());
        // Only the first of the new full blocks can have equal full nodes: a node just made has no children.
        path_.clear();
        path_.reserve(static_cast<std::size_t>(num_full - first));
        for (NodeId node = sequence.node; first + static_cast<std::int64_t>(path_.size()) < num_full;) {
            const auto block = first + static_cast<std::int64_t>(path_.size());
            node = tree_.find(node, prompt.block(block * block_size_, block_size_)).equal;
            if (node == kNone) break;
            path_.push_back(node);
        }
        if (events_.is_on()) stage_events(sequence, first, num_full);
        num_deduplicated = path_.size();
        num_released = static_cast<std::int64_t>(num_deduplicated) * num_columns();
    }
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        const std::int64_t kept = sequence.first_kept[static_cast<std::size_t>(group)];
        const std::int64_t needed = first_block_needed(group, num_computed);
        if (needed > kept) num_released += needed - kept;
        BlockTable& entries = table(sequence, group);
        const std::int64_t in_first = first * shape_of(group).per_node;
        if (needed > kept || num_deduplicated != 0)
            entries.prepare(needed > kept ? std::min(kept, in_first) : in_first, entries.size());
    }
    ensure_flight_room(num_released);

    // From here on no call fails.
    if (sequence.restored_to != 0) {
        // Blocks behind the windows were not written: they go before nodes are made.
        release_behind_windows(sequence, num_computed);
        sequence.restored_to = 0;
    }
    if (is_findable) {
        const auto staged = [&](std::int64_t block) {
            return keys.empty() ? PrefixTree::StagedKeys{} : std::move(keys[static_cast<std::size_t>(block - first)]);
        };
        may_recall_ = pool_.order().counts_uses();
        for (std::int64_t block = first; block < num_full; ++block) {
            const auto at = static_cast<std::size_t>(block - first);
            commit_full_node(sequence, block, at < num_deduplicated ? path_[at] : kNone, staged(block));
        }
        if (num_computed % block_size_ != 0) commit_tail(sequence, num_computed, staged(num_full));
    }
    sequence.num_computed = num_computed;
    release_behind_windows(sequence, num_computed);
}

void BlockManager::advance(std::span<const SequenceId> ids, std::span<const std::int64_t> num_computed,
                           std::span<const Token> tokens) {
    for (std::size_t at = 0; at < ids.size(); ++at) {
        commit(ids[at], num_computed[at]);
        append(ids[at], tokens.subspan(at, 1));
    }
}

// The partial node of the sequence's blocks, which only this sequence may extend: it has all blocks that begin before
// its end. Later blocks are in no node: a sibling had the same tokens when they were committed.
NodeId BlockManager::own_partial_node(const Sequence& sequence, std::int64_t depth) const noexcept {
    if (sequence.num_computed <= depth * block_size_) return kNone;
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        const GroupShape& shape = shape_of(group);
        const BlockTable& entries = sequence.tables[static_cast<std::size_t>(group)];
        const std::int64_t stop = shape.end_in_node(depth, sequence.num_computed);
        for (std::int64_t block = depth * shape.per_node; block < stop; ++block)
            if (entries[block] != kNone && pool_.node(entries[block]) != kNone) return pool_.node(entries[block]);
    }
    return kNone;
}

void BlockManager::commit_full_node(Sequence& sequence, std::int64_t depth, NodeId equal,
                                    PrefixTree::StagedKeys&& keys) noexcept {
    if (equal == kNone) {
        const NodeId made =
            make_node(sequence, depth, prompt_of(sequence).block(depth * block_size_, block_size_), std::move(keys));
        if (events_.is_on()) {
            for (std::int32_t column = 0; column < num_columns(); ++column)
                stored_[static_cast<std::size_t>(column)] = tree_.block_id(made, column);
            note_stored(sequence, depth, made, stored_);
        }
        move_end(sequence, made);
        return;
    }
    // The full node covers the tokens of the partial node; holders of the partial node's blocks keep them.
    const NodeId own = own_partial_node(sequence, depth);
    if (own != kNone) remove_node(own);
    std::fill(stored_.begin(), stored_.end(), kNone);
    bool has_filled = false;
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        const GroupShape& shape = shape_of(group);
        BlockTable& entries = table(sequence, group);
        for (std::int64_t part = 0; part < shape.per_node; ++part) {
            const std::int64_t block = depth * shape.per_node + part;
            const auto column = shape.first_column + static_cast<std::int32_t>(part);
            const BlockId ours = entries[block];
            const BlockId theirs = tree_.block_id(equal, column);
            if (ours == kNone) continue;  // behind a window: released, or never written after a restore
            if (theirs == kNone) {
                tree_.set_block(equal, column, ours);
                pool_.set_node(ours, equal);
                if (pool_.order().counts_uses()) pool_.set_uses(ours, uses_above(equal, column));
                stored_[static_cast<std::size_t>(column)] = ours;
                has_filled = true;
                ++version_;
                continue;
            }
            pool_.hold(theirs, sequence.cache_priority);
            entries.set(block, theirs);
            release(ours);
            ++stats_.deduplicated_blocks;
        }
    }
    if (has_filled && events_.is_on()) note_stored(sequence, depth, equal, stored_);
    move_end(sequence, equal);
}

// Makes room for the events of the blocks `first` .. `num_full` - 1, at most one each.
void BlockManager::stage_events(const Sequence& sequence, std::int64_t first, std::int64_t num_full) {
    const auto num_blocks = static_cast<std::size_t>(num_full - first);
    std::size_t num_keys = 0;
    event_keys_.clear();
    event_block_ = first;
    if (num_blocks == 0) return;
    event_keys_.resize(num_blocks);
    for (std::size_t at = 0; at < num_blocks && !sequence.keys.empty(); ++at) {
        const std::int64_t start = (first + static_cast<std::int64_t>(at)) * block_size_;
        const BlockView view = prompt_of(sequence).block(start, block_size_);
        event_keys_[at].assign(view.keys.begin(), view.keys.end());
        for (ExtraKey& key : event_keys_[at]) key.position -= start;
        num_keys += view.keys.size();
    }
    events_.ensure_room(num_blocks, num_blocks, num_keys);
    event_name_ = events_.name_index(sequence.name);
}

// Records that these blocks of a full node are now findable; the sequence still ends in the node above.
void BlockManager::note_stored(const Sequence& sequence, std::int64_t block, NodeId node,
                               std::span<const BlockId> block_ids) noexcept {
    const auto first = std::find_if(block_ids.begin(), block_ids.end(), [](BlockId block_id) { return block_id != kNone; });
    if (first == block_ids.end()) return;  // a node of holes: no event
    const std::int64_t parent = tree_.is_root(sequence.node) ? -1 : tree_.id(sequence.node);
    BlockId* const noted = events_.add({Event::Kind::stored, Event::Reason::none, tree_.id(node), parent,
                                       pool_.order().number_of(*first), event_name_, highest_cache_priority(block_ids)});
    std::copy(block_ids.begin(), block_ids.end(), noted);
    events_.add_block(tree_.tokens(node), std::move(event_keys_[static_cast<std::size_t>(block - event_block_)]));
}

// Makes the last, partial block findable unless a sibling has the same tokens.
void BlockManager::commit_tail(Sequence& sequence, std::int64_t num_computed, PrefixTree::StagedKeys&& keys) noexcept {
    const std::int64_t count = num_computed % block_size_;
    const BlockView view = prompt_of(sequence).block(num_computed - count, count);
    if (tree_.is_covered(tree_.find(sequence.node, view), view)) return;
    make_node(sequence, num_computed / block_size_, view, std::move(keys));
}

// Extends the sequence's partial node to `view`, or makes a node of its blocks.
NodeId BlockManager::make_node(Sequence& sequence, std::int64_t depth, const BlockView& view,
                               PrefixTree::StagedKeys&& keys) noexcept {
    NodeId node = own_partial_node(sequence, depth);
    const std::int64_t had = node == kNone ? 0 : tree_.num_tokens(node);
    if (node != kNone) {
        tree_.extend(node, view, std::move(keys));
    } else {
        node = tree_.insert(sequence.node, view, std::move(keys));
    }
    // Blocks that begin behind its old end are new to the node.
    const std::int64_t end = depth * block_size_ + static_cast<std::int64_t>(view.tokens.size());
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        const GroupShape& shape = shape_of(group);
        if (had != 0 && shape.per_node == 1) continue;
        const BlockTable& entries = table(sequence, group);
        const std::int64_t first = depth * shape.per_node;
        const std::int64_t new_ones = had == 0 ? first : shape.num_blocks(depth * block_size_ + had);
        const std::int64_t stop = shape.end_in_node(depth, end);
        for (std::int64_t block = new_ones; block < stop; ++block) {
            const BlockId block_id = entries[block];
            if (block_id == kNone) continue;
            tree_.set_block(node, shape.first_column + static_cast<std::int32_t>(block - first), block_id);
            if (had == 0) {
                pool_.set_fresh(block_id, node);
            } else {
                pool_.set_node(block_id, node);
            }
        }
    }
    if (may_recall_ && tree_.is_full(node)) may_recall_ = recall_uses(node, sequence.node);
    ++version_;
    remove_covered_sibling(node);
    return node;
}

// The uses of the nearest block above the node in this column, so of the block that fills a hole of the node: no block below
// it has more. kMaxUses without one.
std::uint32_t BlockManager::uses_above(NodeId node, std::int32_t column) const noexcept {
    for (NodeId up = tree_.parent(node); !tree_.is_root(up); up = tree_.parent(up))
        if (const BlockId above = tree_.block_id(up, column); above != kNone) return pool_.uses(above);
    return kMaxUses;
}

// The most uses that a block below the node may have, so that it has no more than the blocks above it.
std::uint32_t BlockManager::most_uses_below(NodeId node) const noexcept {
    if (tree_.is_root(node)) return kMaxUses;
    std::uint32_t most = 0;  // no block yet
    for (std::int32_t column = 0; column < num_columns(); ++column) {
        if (!shape_.is_full[static_cast<std::size_t>(column)]) continue;
        const BlockId block_id = tree_.block_id(node, column);
        const std::uint32_t uses = block_id == kNone ? 1 : pool_.uses(block_id);
        most = most == 0 ? uses : std::min(most, uses);
    }
    return std::max<std::uint32_t>(most, 1);
}

// Counts on the uses of a full node's content, if it was evicted a short time ago. Returns whether the node's blocks may have
// more than one use: if not, the nodes that are made below it have no more either.
bool BlockManager::recall_uses(NodeId node, NodeId parent) noexcept {
    const std::uint32_t most = most_uses_below(parent);
    if (most == 1) return false;
    const std::uint32_t before = ghosts_.pop(tree_.view(node));
    bool has_more = false;
    for (std::int32_t column = 0; column < num_columns(); ++column) {
        const BlockId block_id = tree_.block_id(node, column);
        if (block_id == kNone) continue;
        if (before != 0) pool_.set_uses(block_id, std::max(pool_.uses(block_id), std::min(before + 1, most)));
        has_more = has_more || pool_.uses(block_id) > 1;
    }
    return has_more;
}

// A partial node without holders goes once a sibling has its tokens and more.
void BlockManager::remove_covered_sibling(NodeId node) noexcept {
    const NodeId left = tree_.previous_sibling(node);
    if (left == kNone || tree_.is_full(left) || is_referenced(left)) return;
    if (tree_.num_common(left, tree_.view(node)) == tree_.num_tokens(left)) remove_node(left);
}

void BlockManager::release_behind_windows(Sequence& sequence, std::int64_t num_computed) noexcept {
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        std::int64_t& kept = sequence.first_kept[static_cast<std::size_t>(group)];
        const std::int64_t needed = first_block_needed(group, num_computed);
        BlockTable& entries = table(sequence, group);
        for (std::int64_t block = needed - 1; block >= kept; --block) {
            if (entries[block] == kNone) continue;
            release(entries[block]);
            entries.set(block, kNone);
        }
        kept = std::max(kept, needed);
    }
}

// Whether the sequence's tables have all blocks that a query at position `num_tokens` needs.
bool BlockManager::is_kept(const Sequence& sequence, std::int64_t num_tokens) const noexcept {
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        const std::int64_t last = (num_tokens - 1) / shape_of(group).tokens;
        const std::int64_t first = first_block_needed(group, num_tokens);
        if (first <= last && first < sequence.first_kept[static_cast<std::size_t>(group)]) return false;
    }
    return true;
}

std::int64_t BlockManager::rewind(SequenceId id, std::int64_t position) {
    Sequence& sequence = find(id);
    if (position < 0 || position > sequence.num_tokens())
        throw BadArgument("expected a position of 0 .. " + std::to_string(sequence.num_tokens()) + " for sequence " +
                          std::to_string(id) + ", got " + std::to_string(position) + " in rewind");
    ensure_flight_room(sequence.num_entries());

    sequence.tokens.resize(static_cast<std::size_t>(position));
    while (!sequence.keys.empty() && sequence.keys.back().position >= position) sequence.keys.pop_back();
    std::int64_t kept = std::min(position, sequence.num_computed);
    while (kept > 0 && !is_kept(sequence, kept)) kept = (kept - 1) / shape_.step * shape_.step;
    if (kept < sequence.num_computed) sequence.is_writer = false;
    release_blocks(sequence, kept);
    if (sequence.node != kNone) {
        NodeId node = sequence.node;
        for (std::int64_t depth = sequence.num_computed / block_size_; depth > kept / block_size_; --depth)
            node = tree_.parent(node);
        move_end(sequence, node);
    }
    sequence.num_computed = sequence.reserved = kept;
    sequence.restored_to = 0;
    sequence.num_cached = std::min(sequence.num_cached, kept);
    if (sequence.most_cached != kNoLimit) sequence.most_cached = std::min(sequence.most_cached, kept);
    return kept;
}

}  // namespace quire
