// The primitive transitions of blocks: release, settle, remove a node, evict, allocate. They cannot fail.
#include "core/block_manager.hpp"

namespace quire {

namespace {

constexpr std::int32_t kFetchedAhead = 8;

}  // namespace

void BlockManager::ensure_flight_room(std::int64_t num_released) {
    if (is_step_under_way()) pool_.ensure_flight_room(static_cast<std::size_t>(num_released));
}

bool BlockManager::is_referenced(NodeId node) const noexcept {
    for (std::int32_t column = 0; column < num_columns(); ++column) {
        const BlockId block_id = tree_.block_id(node, column);
        if (block_id != kNone && pool_.num_refs(block_id) > 0) return true;
    }
    return false;
}

void BlockManager::release(BlockId block_id) noexcept {
    const bool under_way = is_step_under_way();
    if (under_way) busy_until_[static_cast<std::size_t>(block_id)] = newest_step_;
    if (!pool_.release(block_id)) return;
    const NodeId node = pool_.node(block_id);
    if (node != kNone && !tree_.is_full(node) && !is_referenced(node)) {
        const NodeId next = tree_.next_sibling(node);
        if (next != kNone && tree_.num_common(next, tree_.view(node)) == tree_.num_tokens(node)) {
            // The block has no state yet, so it leaves the node before the others do.
            leave_node(block_id);
            remove_node(node);
        }
    }
    if (under_way) {
        pool_.flight(block_id, newest_step_);
    } else {
        settle(block_id);
    }
}

// Releases the blocks that begin at token `from` or behind it: deepest node first, in a node group by group, in a group
// the last block first.
void BlockManager::release_entries(const std::vector<BlockTable>& tables, std::int64_t from) noexcept {
    std::int64_t num_nodes = 0;
    for (std::size_t group = 0; group < tables.size(); ++group) {
        const std::int64_t per_node = shape_.groups[group].per_node;
        num_nodes = std::max(num_nodes, (tables[group].size() + per_node - 1) / per_node);
    }
    for (std::int64_t node = num_nodes - 1; node >= from / block_size_; --node)
        for (std::size_t group = 0; group < tables.size(); ++group) {
            const GroupShape& shape = shape_.groups[group];
            const std::int64_t first = std::max(node * shape.per_node, shape.num_blocks(from));
            const std::int64_t stop = std::min<std::int64_t>((node + 1) * shape.per_node, tables[group].size());
            for (std::int64_t block = stop - 1; block >= first; --block)
                if (const BlockId block_id = tables[group][block]; block_id != kNone) release(block_id);
        }
}

// ... and cuts the tables there.
void BlockManager::release_blocks(Sequence& sequence, std::int64_t from) noexcept {
    release_entries(sequence.tables, from);
    for (std::size_t group = 0; group < sequence.tables.size(); ++group) {
        BlockTable& entries = sequence.tables[group];
        const std::int64_t num_blocks = shape_.groups[group].num_blocks(from);
        if (entries.size() > num_blocks) entries.truncate(num_blocks);
        sequence.first_kept[group] = std::min(sequence.first_kept[group], num_blocks);
    }
}

// The column of the block in the node.
std::int32_t BlockManager::column_of(NodeId node, BlockId block_id) const noexcept {
    std::int32_t column = 0;
    while (tree_.block_id(node, column) != block_id) ++column;
    return column;
}

void BlockManager::settle(BlockId block_id) noexcept {
    if (pool_.node(block_id) != kNone) {
        pool_.make_cached(block_id);
    } else {
        pool_.make_free(block_id);
    }
}

// Takes the block out of its node and leaves a hole.
void BlockManager::leave_node(BlockId block_id) noexcept {
    const NodeId node = pool_.node(block_id);
    tree_.set_block(node, column_of(node, block_id), kNone);
    pool_.set_node(block_id, kNone);
}

// The tree forgets the node's blocks. The node stays, with holes only, while it has children.
void BlockManager::remove_node(NodeId node) noexcept {
    for (std::int32_t column = 0; column < num_columns(); ++column) {
        const BlockId block_id = tree_.block_id(node, column);
        if (block_id == kNone) continue;
        tree_.set_block(node, column, kNone);
        pool_.set_node(block_id, kNone);
        if (pool_.state(block_id) != BlockState::cached) continue;
        pool_.take_out(block_id);
        pool_.make_free(block_id);
    }
    drop_bare(node);
}

void BlockManager::drop_bare(NodeId node) noexcept {
    while (node != kNone && tree_.is_bare(node)) node = tree_.remove(node);
}

// Gives up cached content: a full-attention block takes its node along, a window's leaves a hole. Blocks that a table
// refers to, or that another owner may not lose in this call, stay in the node, and so do the nodes below.
void BlockManager::evict(BlockId victim, std::int32_t owner_id, Event::Reason reason) noexcept {
    const NodeId node = pool_.node(victim);
    const std::int64_t had = pool_.num_cached();
    const bool takes_all = shape_.is_full[static_cast<std::size_t>(column_of(node, victim))];
    if (pool_.order().counts_uses() && takes_all && tree_.is_full(node)) ghosts_.add(tree_.view(node), pool_.uses(victim));
    BlockId* const noted = note_removed(node, owner_id, reason);
    pool_.charge(victim);
    for (std::int32_t column = 0; column < num_columns(); ++column) {
        const BlockId block_id = tree_.block_id(node, column);
        if (block_id == kNone || (block_id != victim && (!takes_all || pool_.num_refs(block_id) > 0))) continue;
        const bool is_cached = pool_.state(block_id) == BlockState::cached;
        if (block_id != victim && is_cached) {
            if (!pool_.may_lose(block_id)) continue;
            pool_.charge(block_id);
        }
        tree_.set_block(node, column, kNone);
        pool_.set_node(block_id, kNone);
        if (noted != nullptr) noted[column] = block_id;
        if (!is_cached) continue;
        pool_.take_out(block_id);
        pool_.make_free(block_id);
    }
    drop_bare(node);
    stats_.evicted_blocks += had - pool_.num_cached();
}

// Evicts until enough blocks for the sequence are free.
void BlockManager::make_room(const Sequence& sequence, std::int64_t num_blocks) noexcept {
    if (pool_.num_free() >= num_blocks) return;
    const std::int32_t number = pool_.order().owner_id(sequence.owner_id).number;
    // A ghost is made of tokens that are long out of the processor's cache: they are fetched some evictions ahead.
    const bool fetches = pool_.order().counts_uses() && num_blocks - pool_.num_free() > kFetchedAhead;
    BlockId ahead = fetches ? pool_.first(false) : kNone;
    const auto fetch_next = [&] {
        if (ahead == kNone) return;
        if (const NodeId node = pool_.node(ahead); node != kNone) tree_.prefetch_tokens(node);
        ahead = pool_.behind(ahead);
    };
    for (std::int32_t at = 0; at < kFetchedAhead; ++at) fetch_next();
    while (pool_.num_free() < num_blocks) {
        fetch_next();
        evict(pool_.first(false), number, Event::Reason::evicted);
    }
}

// Allocates a block for block `position` of the sequence, behind block `before` or kNone; kNone for the position: the
// lowest free block.
BlockId BlockManager::allocate(const Sequence& sequence, BlockId before, std::int64_t block) noexcept {
    return pool_.take(sequence.owner_id, sequence.cache_priority, before, block);
}

// The blocks of a removal event of the node, to be filled by the caller; null without an event.
BlockId* BlockManager::note_removed(NodeId node, std::int32_t owner_id, Event::Reason reason) noexcept {
    if (!events_.is_on() || !tree_.is_full(node)) return nullptr;
    std::int32_t cache_priority = kDiscard;
    for (std::int32_t column = 0; column < num_columns(); ++column)
        if (const BlockId block_id = tree_.block_id(node, column); block_id != kNone)
            cache_priority = std::max(cache_priority, pool_.order().cache_priority_of(block_id));
    return events_.add({Event::Kind::removed, reason, tree_.id(node), -1, owner_id, -1, cache_priority});
}

std::int32_t BlockManager::highest_cache_priority(std::span<const BlockId> block_ids) const noexcept {
    std::int32_t cache_priority = kDiscard;
    for (const BlockId block_id : block_ids)
        if (block_id != kNone) cache_priority = std::max(cache_priority, pool_.order().cache_priority_of(block_id));
    return cache_priority;
}

// Makes `node` the end of the sequence's full committed blocks.
void BlockManager::move_end(Sequence& sequence, NodeId node) noexcept {
    const NodeId before = sequence.node;
    if (node == before) return;
    if (node != kNone) tree_.add_end(node);
    sequence.node = node;
    if (before == kNone) return;
    tree_.drop_end(before);
    drop_bare(before);
}

}  // namespace quire
