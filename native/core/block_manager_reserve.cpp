// reserve decides a whole step before any change, then carries it out.
#include <algorithm>
#include <string>

#include "core/block_manager.hpp"

namespace quire {

// Checks the arguments, fills works_ and returns the number of blocks of the step, over all groups. Only scratch
// changes.
std::int64_t BlockManager::plan_works(std::span<const SequenceId> ids, std::span<const std::int64_t> num_new_tokens,
                                      std::int64_t num_lookahead, bool restores) {
    works_.clear();
    works_.reserve(ids.size());
    for (const SequenceId id : ids) works_.push_back({&find(id), 0, 0, 0, false, false, restores, 0, 0});
    ++num_calls_;
    for (std::size_t at = 0; at < works_.size(); ++at) {
        Work& work = works_[at];
        Sequence& sequence = *work.sequence;
        if (sequence.last_call == num_calls_)
            throw BadArgument("expected each sequence once in reserve, got sequence " + std::to_string(sequence.id) +
                              " twice");
        sequence.last_call = num_calls_;
        if (sequence.restored_to != 0)
            throw BadArgument("expected a commit of all " + std::to_string(sequence.restored_to) +
                              " tokens that sequence " + std::to_string(sequence.id) +
                              " was restored to, or a rewind, got another reserve");
        work.num_new = num_new_tokens[at];
        const std::int64_t num_known = sequence.num_tokens() - sequence.num_computed;
        if (work.num_new < 1 || work.num_new > num_known)
            throw BadArgument("expected 1 .. " + std::to_string(num_known) + " new tokens for sequence " +
                              std::to_string(sequence.id) + " (" + std::to_string(sequence.num_tokens()) + " known, " +
                              std::to_string(sequence.num_computed) + " computed), got " +
                              std::to_string(work.num_new) + " in reserve; append them first");
        work.end = sequence.num_computed + work.num_new + num_lookahead;
        work.num_nodes = num_nodes_for(work.end);
    }
    std::int64_t num_needed = 0;
    for (Work& work : works_) {
        const Sequence& sequence = *work.sequence;
        const bool may_write_in_place = sequence.is_writer && !gives_up_partial_block(work);
        if (!may_write_in_place && sequence.num_computed % block_size_ != 0) plan_copy(work);
        work.num_needed = blocks_of(work);
        num_needed += work.num_needed;
    }
    // plan_copy has already removed the references that copies release; here they are restored.
    for (const Work& work : works_)
        if (work.copies)
            for_each_partial(*work.sequence, [&](std::int32_t group, std::int64_t block) {
                pool_.recount(table(*work.sequence, group)[block]);
            });
    return num_needed;
}

std::int64_t BlockManager::plan_to_restore(SequenceId id, std::int64_t num_computed) {
    const Sequence& sequence = find(id);
    if (num_computed <= sequence.num_computed || num_computed > sequence.num_tokens())
        throw BadArgument("expected " + std::to_string(sequence.num_computed + 1) + " .. " +
                          std::to_string(sequence.num_tokens()) + " computed tokens for sequence " +
                          std::to_string(id) + " (" + std::to_string(sequence.num_computed) + " computed, " +
                          std::to_string(sequence.num_tokens()) + " known), got " + std::to_string(num_computed) +
                          " in restore");
    const std::int64_t num_new = num_computed - sequence.num_computed;
    return plan_works({&id, 1}, {&num_new, 1}, 0, true);
}

// New positions before it get no block.
std::int64_t BlockManager::first_block_with_block(const Work& work, std::int32_t group) const noexcept {
    return work.restores ? first_block_needed(group, work.sequence->num_computed + work.num_new) : 0;
}

// Blocks that a sequence takes, over all groups.
std::int64_t BlockManager::blocks_of(const Work& work) const noexcept {
    std::int64_t num_blocks = work.copies ? work.num_copied : 0;
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        const std::int64_t had = work.sequence->tables[static_cast<std::size_t>(group)].size();
        const std::int64_t first = std::max(had, first_block_with_block(work, group));
        num_blocks += std::max<std::int64_t>(num_blocks_of(work, shape_of(group)) - first, 0);
    }
    return num_blocks;
}

// Sets the need of works_ on each owner.
void BlockManager::count_needs() noexcept {
    if (!pool_.is_marked()) return;
    pool_.order().clear_needs();
    for (const Work& work : works_) pool_.order().owner_id(work.sequence->owner_id).need += blocks_of(work);
}

// Whether works_ can get `num_needed` blocks and leave `num_left` available. Begins the call in the pool.
bool BlockManager::fits(std::int64_t num_needed, std::int64_t num_left) noexcept {
    if (pool_.is_marked())
        for (const Owner& owner_id : pool_.order().owner_ids())
            if (owner_id.need > 0 && owner_id.room(pool_.num_ids()) < owner_id.need) return false;
    return num_needed + num_left <= pool_.begin_call();
}

// Evicts from each owner that needs blocks as many as exceed its quota.
void BlockManager::keep_quotas() noexcept {
    if (!pool_.is_marked()) return;
    for (const Work& work : works_) {
        const Owner& owner_id = pool_.order().owner_id(work.sequence->owner_id);
        while (owner_id.need > 0 && owner_id.quota != kNoQuota && owner_id.num_owned + owner_id.need > owner_id.quota)
            evict(pool_.first_of(owner_id), owner_id.number, Event::Reason::quota);
    }
}

// Whether a block with position num_computed lies behind a window at the end of a restore. Not all blocks of its node
// are written then, so the node must not be extended.
bool BlockManager::gives_up_partial_block(const Work& work) const noexcept {
    if (!work.restores) return false;
    for (std::int32_t group = 0; group < num_groups(); ++group)
        if (work.sequence->num_computed / shape_of(group).tokens < first_block_with_block(work, group)) return true;
    return false;
}

// Decides whether the blocks of the node with position num_computed must be copied before a write.
void BlockManager::plan_copy(Work& work) noexcept {
    const Sequence& sequence = *work.sequence;
    const std::int64_t offset = sequence.num_computed % block_size_;
    bool is_findable_beyond = false;
    bool is_in_use = gives_up_partial_block(work);
    for_each_partial(sequence, [&](std::int32_t group, std::int64_t block) {
        const BlockId block_id = sequence.tables[static_cast<std::size_t>(group)][block];
        const NodeId node = pool_.node(block_id);
        ++work.num_copied;
        is_findable_beyond |= node != kNone && tree_.num_tokens(node) > offset;
        is_in_use |= pool_.num_refs(block_id) > 1;
        is_in_use |= overlapped_ && busy_until_[static_cast<std::size_t>(block_id)] > completed_step_;
    });
    work.copies = is_findable_beyond || is_in_use;
    work.copies_for_node = work.copies && !is_in_use;
    if (work.copies)
        for_each_partial(sequence, [&](std::int32_t group, std::int64_t block) {
            pool_.discount(sequence.tables[static_cast<std::size_t>(group)][block]);
        });
}

std::int64_t BlockManager::num_blocks_needed(std::span<const SequenceId> ids,
                                             std::span<const std::int64_t> num_new_tokens,
                                             std::int64_t num_lookahead) {
    return plan_works(ids, num_new_tokens, num_lookahead);
}

std::shared_ptr<const StepPlan> BlockManager::reserve(std::span<const SequenceId> ids,
                                                      std::span<const std::int64_t> num_new_tokens,
                                                      std::int64_t num_lookahead) {
    return apply(plan_works(ids, num_new_tokens, num_lookahead), num_lookahead);
}

std::int64_t BlockManager::num_blocks_to_restore(SequenceId id, std::int64_t num_computed) {
    return plan_to_restore(id, num_computed);
}

std::shared_ptr<const StepPlan> BlockManager::restore(SequenceId id, std::int64_t num_computed) {
    auto plan = apply(plan_to_restore(id, num_computed), 0);
    if (plan != nullptr) find(id).restored_to = num_computed;
    return plan;
}

// Turns works_ into a step if the blocks suffice.
std::shared_ptr<const StepPlan> BlockManager::apply(std::int64_t num_needed, std::int64_t num_lookahead) {
    count_needs();
    std::int64_t num_new = 0;
    std::int64_t num_copying = 0;  // sequences
    std::int64_t num_copied = 0;   // blocks
    std::int64_t num_tokens = 0;
    for (const Work& work : works_) {
        num_new += work.sequence->is_admitted ? 0 : 1;
        num_copying += work.copies ? 1 : 0;
        num_copied += work.copies ? work.num_copied : 0;
        num_tokens += work.num_new;
    }
    const auto num_works = static_cast<std::int64_t>(works_.size());
    const bool is_alone = num_works == 1 && num_admitted_ == num_works - num_new;
    // A lone sequence without room to copy its block takes the block from the tree instead.
    const bool takes_over = is_alone && works_[0].copies_for_node && !fits(num_needed, 0);
    if (takes_over) {
        num_needed -= num_copied;
        pool_.order().owner_id(works_[0].sequence->owner_id).need -= num_copied;
        num_copying = num_copied = 0;
    }
    if (!fits(num_needed, num_new != 0 && !is_alone ? watermark_blocks_ : 0)) return nullptr;

    // All memory first.
    const auto rows = static_cast<std::size_t>(num_works);
    auto plan = std::make_shared<StepPlan>();
    plan->num_sequences = num_works;
    plan->num_tokens = num_tokens;
    plan->num_lookahead = num_lookahead;
    plan->query_start = Slab<std::int32_t>(rows + 1);
    plan->context_lengths = Slab<std::int32_t>(rows);
    plan->groups.resize(shape_.groups.size());
    sources_.clear();
    sources_.reserve(static_cast<std::size_t>(num_copied));
    for (std::size_t at = 0; at < plan->groups.size(); ++at) {
        GroupPlan& group = plan->groups[at];
        group.slot_mapping = Slab<std::int64_t>(static_cast<std::size_t>(num_tokens));
        group.lookahead_slots = Slab<std::int64_t>(rows * static_cast<std::size_t>(num_lookahead));
        group.copies.reserve(static_cast<std::size_t>(num_copying * shape_.groups[at].per_node));
        group.tables.reserve(rows);
    }
    for (const Work& work : works_) {
        const Sequence& sequence = *work.sequence;
        const bool writes_over = work.copies && !takes_over;
        const std::int64_t node = writes_over ? sequence.num_computed / block_size_ : 0;
        for (std::int32_t group = 0; group < num_groups(); ++group) {
            BlockTable& entries = table(*work.sequence, group);
            const GroupShape& shape = shape_of(group);
            const std::int64_t num_blocks = num_blocks_of(work, shape);
            if (writes_over || num_blocks > entries.size())
                entries.prepare(writes_over ? node * shape.per_node : entries.size(),
                                std::max<std::int64_t>(num_blocks, entries.size()));
        }
    }
    if (overlapped_) pool_.ensure_flight_room(static_cast<std::size_t>(num_copied));
    if (events_.is_on()) {
        // At most one event for each block evicted, for room or for a quota, and one for each block taken from the
        // tree.
        std::int64_t num_events = num_needed + num_columns();
        if (pool_.is_marked())
            for (const Owner& owner_id : pool_.order().owner_ids())
                if (owner_id.need > 0 && owner_id.quota != kNoQuota) num_events += owner_id.num_cached;
        events_.ensure_room(static_cast<std::size_t>(num_events), 0, 0);
    }

    // From here on no call fails.
    if (takes_over) {
        const Sequence& sequence = *works_[0].sequence;
        for_each_partial(sequence, [&](std::int32_t group, std::int64_t block) {
            const BlockId block_id = sequence.tables[static_cast<std::size_t>(group)][block];
            const NodeId node = pool_.node(block_id);
            if (node == kNone) return;
            const std::int32_t owner_id = pool_.order().owner_id(sequence.owner_id).number;
            BlockId* const noted = note_removed(node, owner_id, Event::Reason::evicted);
            if (noted != nullptr) noted[column_of(node, block_id)] = block_id;
            leave_node(block_id);
            drop_bare(node);
        });
        works_[0].copies = false;
        works_[0].num_needed = blocks_of(works_[0]);
    }
    keep_quotas();
    plan->step = ++newest_step_;
    plan->query_start[0] = 0;
    for (std::int64_t row = 0; row < num_works; ++row) {
        const Work& work = works_[static_cast<std::size_t>(row)];
        allocate_blocks(work, *plan);
        write_row(work, row, *plan);
    }
    for (const BlockId source : sources_) release(source);
    stats_.copied_blocks += num_copied;
    stats_.most_blocks = std::max(stats_.most_blocks, pool_.num_held() + pool_.num_in_flight());
    return plan;
}

// Gives a sequence its blocks: copies, then new blocks by position, group after group. All evictions come first, so
// that blocks freed together are handed out in runs.
void BlockManager::allocate_blocks(const Work& work, StepPlan& plan) noexcept {
    Sequence& sequence = *work.sequence;
    if (work.num_needed != 0) make_room(sequence, work.num_needed);
    for (std::size_t group = 0; group < sequence.tables.size(); ++group) {
        const GroupShape& shape = shape_.groups[group];
        BlockTable& entries = sequence.tables[group];
        const auto take = [&](std::int64_t block) {
            if (!shape.span.is_full()) return allocate(sequence, kNone, kNone);
            return allocate(sequence, block == 0 ? kNone : entries[block - 1], block);
        };
        if (work.copies) {
            const std::int64_t node = sequence.num_computed / block_size_;
            const std::int64_t stop = shape.end_in_node(node, sequence.num_computed);
            for (std::int64_t block = node * shape.per_node; block < stop; ++block) {
                const BlockId source = entries[block];
                if (source == kNone) continue;
                entries.set(block, take(block));
                const std::int64_t num_tokens = std::min(shape.tokens, sequence.num_computed - block * shape.tokens);
                plan.groups[group].copies.push_back({source, entries[block], static_cast<std::int32_t>(num_tokens)});
                sources_.push_back(source);
            }
        }
        const std::int64_t num_blocks = num_blocks_of(work, shape);
        if (entries.size() >= num_blocks) continue;
        const std::int64_t first = first_block_with_block(work, static_cast<std::int32_t>(group));
        while (entries.size() < num_blocks)
            entries.push(entries.size() < first ? kNone : take(entries.size()));
    }
    sequence.reserved = sequence.num_computed + work.num_new + plan.num_lookahead;
    sequence.is_writer = true;
    if (sequence.is_admitted) return;
    sequence.is_admitted = true;
    ++num_admitted_;
    stats_.hit_tokens += sequence.num_cached;
    stats_.query_tokens += sequence.num_tokens();
}

namespace {

// The slots of `count` positions from `position` on; -1 without a block.
void write_slots(const BlockTable& entries, std::int64_t block_size, std::int64_t position, std::int64_t count,
                 std::int64_t* out) noexcept {
    std::int64_t block = position / block_size;
    std::int64_t offset = position % block_size;
    while (count > 0) {
        const std::int64_t here = std::min(count, block_size - offset);
        if (entries[block] == kNone) {
            std::fill_n(out, here, kNone);
        } else {
            const std::int64_t first = entries[block] * block_size + offset;
            for (std::int64_t at = 0; at < here; ++at) out[at] = first + at;
        }
        out += here;
        count -= here;
        offset = 0;
        ++block;
    }
}

}  // namespace

void BlockManager::write_row(const Work& work, std::int64_t row, StepPlan& plan) const noexcept {
    Sequence& sequence = *work.sequence;
    const auto at = static_cast<std::size_t>(row);
    const std::int32_t start = plan.query_start[at];
    const std::int64_t context = sequence.num_computed + work.num_new;
    plan.query_start[at + 1] = start + static_cast<std::int32_t>(work.num_new);
    plan.context_lengths[at] = static_cast<std::int32_t>(context);
    for (std::size_t group = 0; group < plan.groups.size(); ++group) {
        GroupPlan& out = plan.groups[group];
        BlockTable& entries = sequence.tables[group];
        const GroupShape& shape = shape_.groups[group];
        write_slots(entries, shape.tokens, sequence.num_computed, work.num_new, out.slot_mapping.data() + start);
        if (plan.num_lookahead != 0)
            write_slots(entries, shape.tokens, context, plan.num_lookahead,
                        out.lookahead_slots.data() + row * plan.num_lookahead);
        out.tables.push_back(entries.publish(num_blocks_of(work, shape)));
    }
}

}  // namespace quire
