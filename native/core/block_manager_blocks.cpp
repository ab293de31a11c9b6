// The primitive moves of blocks: release, settle, remove a node, evict, allocate. None of them can fail.
#include "core/block_manager.hpp"

namespace quire {

void BlockManager::ensure_flight_room(std::int64_t num_released) {
    if (is_step_under_way()) pool_.ensure_flight_room(static_cast<std::size_t>(num_released));
}

bool BlockManager::is_referenced(NodeId node) const noexcept {
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        const BlockId block_id = tree_.block_id(node, group);
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
            // The block is in no state yet, so it leaves the node before the others do.
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

// Releases the blocks from `from` on, deepest first, at equal depth in group order, and cuts the tables there.
void BlockManager::release_blocks(Sequence& sequence, std::int64_t from) noexcept {
    for (std::int64_t block = sequence.num_blocks() - 1; block >= from; --block)
        for (BlockTable& entries : sequence.tables)
            if (entries[block] != kNone) release(entries[block]);
    for (BlockTable& entries : sequence.tables)
        if (entries.size() > from) entries.truncate(from);
    for (std::int64_t& first : sequence.first_kept)
        if (first > from) first = from;
}

void BlockManager::settle(BlockId block_id) noexcept {
    if (pool_.node(block_id) != kNone) {
        pool_.make_cached(block_id);
    } else {
        pool_.make_free(block_id);
    }
}

// Takes the block out of its node, which keeps a hole.
void BlockManager::leave_node(BlockId block_id) noexcept {
    const NodeId node = pool_.node(block_id);
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        if (tree_.block_id(node, group) != block_id) continue;
        tree_.set_block(node, group, kNone);
        break;
    }
    pool_.set_node(block_id, kNone);
}

// The tree forgets what the node says. It stays as a hole in every group while it has children.
void BlockManager::remove_node(NodeId node) noexcept {
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        const BlockId block_id = tree_.block_id(node, group);
        if (block_id == kNone) continue;
        tree_.set_block(node, group, kNone);
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

// Gives up cached content: a full-attention block takes its node along, a window's leaves a hole. What another owner may
// not lose in this call stays in the node, and so do the nodes below.
void BlockManager::evict(BlockId victim, std::int32_t owner_id, Event::Reason reason) noexcept {
    const NodeId node = pool_.node(victim);
    const std::int64_t had = pool_.num_cached();
    std::int32_t of_victim = 0;
    while (tree_.block_id(node, of_victim) != victim) ++of_victim;
    const bool takes_all = spans_[static_cast<std::size_t>(of_victim)].is_full();
    BlockId* const noted = note_removed(node, owner_id, reason);
    pool_.charge(victim);
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        const BlockId block_id = tree_.block_id(node, group);
        if (block_id == kNone || (block_id != victim && !takes_all)) continue;
        const bool is_cached = pool_.state(block_id) == BlockState::cached;
        if (block_id != victim && is_cached) {
            if (!pool_.may_lose(block_id)) continue;
            pool_.charge(block_id);
        }
        tree_.set_block(node, group, kNone);
        pool_.set_node(block_id, kNone);
        if (noted != nullptr) noted[group] = block_id;
        if (!is_cached) continue;
        pool_.take_out(block_id);
        pool_.make_free(block_id);
    }
    drop_bare(node);
    stats_.evicted_blocks += had - pool_.num_cached();
}

// Evicts until so many blocks are free, which the sequence will be given.
void BlockManager::make_room(const Sequence& sequence, std::int64_t num_blocks) noexcept {
    while (pool_.num_free() < num_blocks)
        evict(pool_.order().first(false), pool_.order().owner_id(sequence.owner_id).number, Event::Reason::evicted);
}

// A block for the sequence's block, behind one that has `before`, or kNone; kNone for the block: the lowest.
BlockId BlockManager::allocate(const Sequence& sequence, BlockId before, std::int64_t block) noexcept {
    return pool_.take(sequence.owner_id, sequence.cache_priority, before, block);
}

// The blocks of an event of blocks that leave the node, to be written; null where there is none to tell.
BlockId* BlockManager::note_removed(NodeId node, std::int32_t owner_id, Event::Reason reason) noexcept {
    if (!events_.is_on() || !tree_.is_full(node)) return nullptr;
    std::int32_t cache_priority = kDiscard;
    for (std::int32_t group = 0; group < num_groups(); ++group)
        if (const BlockId block_id = tree_.block_id(node, group); block_id != kNone)
            cache_priority = std::max(cache_priority, pool_.order().cache_priority_of(block_id));
    return events_.add({Event::Kind::removed, reason, tree_.id(node), -1, owner_id, -1, cache_priority});
}

std::int32_t BlockManager::highest_cache_priority(std::span<const BlockId> block_ids) const noexcept {
    std::int32_t cache_priority = kDiscard;
    for (const BlockId block_id : block_ids)
        if (block_id != kNone) cache_priority = std::max(cache_priority, pool_.order().cache_priority_of(block_id));
    return cache_priority;
}

// Makes `node` the one in which the sequence's full committed blocks end.
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
