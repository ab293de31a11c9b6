// The primitive moves of units: release, settle, remove a node, evict, allocate. None of them can fail.
#include "core/block_manager.hpp"

namespace quire {

void BlockManager::ensure_lease_room(std::int64_t num_released) {
    if (is_step_under_way()) pool_.ensure_lease_room(static_cast<std::size_t>(num_released));
}

bool BlockManager::is_referenced(NodeId node) const noexcept {
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        const UnitId unit = tree_.unit(node, group);
        if (unit != kNone && pool_.num_refs(unit) > 0) return true;
    }
    return false;
}

void BlockManager::release(UnitId unit) noexcept {
    const bool under_way = is_step_under_way();
    if (under_way) busy_until_[static_cast<std::size_t>(unit)] = newest_step_;
    if (!pool_.release(unit)) return;
    const NodeId node = pool_.node(unit);
    if (node != kNone && !tree_.is_full(node) && !is_referenced(node)) {
        const NodeId next = tree_.next_sibling(node);
        if (next != kNone && tree_.num_common(next, tree_.view(node)) == tree_.num_tokens(node)) {
            // The unit is in no state yet, so it leaves the node before the others do.
            leave_node(unit);
            remove_node(node);
        }
    }
    if (under_way) {
        pool_.lease(unit, newest_step_);
    } else {
        settle(unit);
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

void BlockManager::settle(UnitId unit) noexcept {
    if (pool_.node(unit) != kNone) {
        pool_.make_cached(unit);
    } else {
        pool_.make_free(unit);
    }
}

// Takes the unit out of its node, which keeps a hole.
void BlockManager::leave_node(UnitId unit) noexcept {
    const NodeId node = pool_.node(unit);
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        if (tree_.unit(node, group) != unit) continue;
        tree_.set_unit(node, group, kNone);
        break;
    }
    pool_.set_node(unit, kNone);
}

// The tree forgets what the node says. It stays as a hole in every group while it has children.
void BlockManager::remove_node(NodeId node) noexcept {
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        const UnitId unit = tree_.unit(node, group);
        if (unit == kNone) continue;
        tree_.set_unit(node, group, kNone);
        pool_.set_node(unit, kNone);
        if (pool_.state(unit) != UnitState::cached) continue;
        pool_.take_out(unit);
        pool_.make_free(unit);
    }
    drop_bare(node);
}

void BlockManager::drop_bare(NodeId node) noexcept {
    while (node != kNone && tree_.is_bare(node)) node = tree_.remove(node);
}

// Gives up cached content: a full-attention unit takes its node along, a window's leaves a hole. What another account may
// not lose in this call stays in the node, and so do the nodes below.
void BlockManager::evict(UnitId victim, std::int32_t account, Event::Reason reason) noexcept {
    const NodeId node = pool_.node(victim);
    const std::int64_t had = pool_.num_cached();
    std::int32_t of_victim = 0;
    while (tree_.unit(node, of_victim) != victim) ++of_victim;
    const bool takes_all = retentions_[static_cast<std::size_t>(of_victim)].is_full();
    UnitId* const noted = note_removed(node, account, reason);
    pool_.charge(victim);
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        const UnitId unit = tree_.unit(node, group);
        if (unit == kNone || (unit != victim && !takes_all)) continue;
        const bool is_cached = pool_.state(unit) == UnitState::cached;
        if (unit != victim && is_cached) {
            if (!pool_.may_lose(unit)) continue;
            pool_.charge(unit);
        }
        tree_.set_unit(node, group, kNone);
        pool_.set_node(unit, kNone);
        if (noted != nullptr) noted[group] = unit;
        if (!is_cached) continue;
        pool_.take_out(unit);
        pool_.make_free(unit);
    }
    drop_bare(node);
    stats_.evicted_blocks += had - pool_.num_cached();
}

// Evicts until so many units are free, which the sequence will be given.
void BlockManager::make_room(const Sequence& sequence, std::int64_t num_units) noexcept {
    while (pool_.num_free() < num_units)
        evict(pool_.order().first(false), pool_.order().account(sequence.account).number, Event::Reason::evicted);
}

// A unit for the sequence's block, behind one that has `before`, or kNone; kNone for the block: the lowest.
UnitId BlockManager::allocate(const Sequence& sequence, UnitId before, std::int64_t block) noexcept {
    return pool_.take(sequence.account, sequence.retention, before, block);
}

// The units of an event of units that leave the node, to be written; null where there is none to tell.
UnitId* BlockManager::note_removed(NodeId node, std::int32_t account, Event::Reason reason) noexcept {
    if (!events_.is_on() || !tree_.is_full(node)) return nullptr;
    std::int32_t retention = kDiscard;
    for (std::int32_t group = 0; group < num_groups(); ++group)
        if (const UnitId unit = tree_.unit(node, group); unit != kNone)
            retention = std::max(retention, pool_.order().retention_of(unit));
    return events_.add({Event::Kind::removed, reason, tree_.id(node), -1, account, -1, retention});
}

std::int32_t BlockManager::highest_retention(std::span<const UnitId> units) const noexcept {
    std::int32_t retention = kDiscard;
    for (const UnitId unit : units)
        if (unit != kNone) retention = std::max(retention, pool_.order().retention_of(unit));
    return retention;
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
