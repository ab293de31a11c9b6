// The life of a sequence: open, append, fork, close; and reset, resize, complete and the counts.
#include "core/block_manager.hpp"

#include <algorithm>
#include <utility>

namespace quire {

UnknownSequence::UnknownSequence(SequenceId sequence)
    : std::out_of_range("sequence " + std::to_string(sequence) + " is unknown or closed"), id(sequence) {}

BlockManager::BlockManager(const std::vector<Span>& spans, std::int64_t num_blocks, std::int64_t block_size,
                           bool prefix_caching, std::int64_t watermark_blocks, bool overlapped_steps,
                           std::int64_t run_blocks, const std::vector<std::int32_t>& blocks_per_node,
                           bool counts_uses)
    : shape_(spans, block_size, blocks_per_node),
      block_size_(block_size),
      prefix_caching_(prefix_caching),
      watermark_blocks_(watermark_blocks),
      overlapped_(overlapped_steps),
      pool_(num_blocks, run_blocks, counts_uses),
      // Room for as many nodes as blocks, and a root. More nodes (windows leave nodes without blocks) make the slabs
      // grow.
      tree_(static_cast<std::int32_t>(block_size), shape_.starts, static_cast<std::size_t>(num_blocks) + 1),
      ghosts_(num_blocks, block_size),
      events_(static_cast<std::int32_t>(block_size), num_columns()),
      missing_(shape_.groups.size()),
      stored_(shape_.starts.size()) {
    if (overlapped_) {
        busy_until_ = Slab<std::int64_t>(static_cast<std::size_t>(num_blocks));
        std::fill_n(busy_until_.data(), num_blocks, 0);
    }
}

Sequence& BlockManager::find(SequenceId id) const {
    Sequence* sequence = sequences_.find(id);
    if (sequence == nullptr) throw UnknownSequence(id);
    return *sequence;
}

std::int64_t BlockManager::match(const Prompt& prompt) { return find_hit(prompt); }

SequenceId BlockManager::open(const Prompt& prompt, std::int32_t owner_id, std::int32_t cache_priority,
                              std::int64_t most_cached) {
    if (owner_id != 0 || cache_priority != kNormal) pool_.start_marking();
    auto sequence = std::make_unique<Sequence>();
    sequence->id = next_id_;
    sequence->owner_id = pool_.slot_of(owner_id);
    sequence->cache_priority = cache_priority;
    sequence->most_cached = most_cached;
    sequence->tokens.assign(prompt.tokens.begin(), prompt.tokens.end());
    sequence->keys.assign(prompt.keys.begin(), prompt.keys.end());
    sequence->name = prompt.name;
    sequence->first_kept.assign(shape_.groups.size(), 0);
    const std::int64_t num_tokens = find_hit(prompt.up_to_hit(most_cached));
    prepare_tables(sequence->tables, num_tokens);
    sequences_.ensure_room();
    if (prefix_caching_) take_hit(*sequence, num_tokens, tree_.make_root(prompt.name));
    sequence->seen_version = version_;
    sequence->seen_tokens = sequence->num_tokens();
    sequences_.insert(std::move(sequence));
    return next_id_++;
}

void BlockManager::append(SequenceId id, std::span<const Token> tokens) {
    Sequence& sequence = find(id);
    sequence.tokens.insert(sequence.tokens.end(), tokens.begin(), tokens.end());
}

std::int64_t BlockManager::num_cached_tokens(SequenceId id) {
    Sequence& sequence = find(id);
    refresh_hit(sequence);
    return sequence.num_cached;
}

std::int64_t BlockManager::num_computed_tokens(SequenceId id) {
    Sequence& sequence = find(id);
    refresh_hit(sequence);
    return sequence.num_computed;
}

void BlockManager::complete(std::int64_t step) {
    if (step < 1 || step > newest_step_)
        throw BadArgument("expected a step of 1 .. " + std::to_string(newest_step_) + ", got " + std::to_string(step) +
                          " in complete");
    if (!overlapped_) return;
    completed_step_ = std::max(completed_step_, step);
    for (BlockId block_id = pool_.end_flight(step); block_id != kNone; block_id = pool_.end_flight(step)) settle(block_id);
}

SequenceId BlockManager::fork(SequenceId id) {
    Sequence& parent = find(id);
    auto child = std::make_unique<Sequence>();
    child->tokens = parent.tokens;
    child->keys = parent.keys;
    child->name = parent.name;
    child->owner_id = parent.owner_id;
    child->cache_priority = parent.cache_priority;
    child->most_cached = parent.most_cached;
    child->first_kept = parent.first_kept;
    prepare_tables(child->tables, parent.num_computed);
    sequences_.ensure_room();
    child->id = next_id_++;
    child->num_computed = child->reserved = parent.num_computed;
    child->num_cached = parent.num_cached;
    child->is_admitted = parent.is_admitted;
    child->seen_version = parent.seen_version;
    child->seen_tokens = parent.seen_tokens;
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        const BlockTable& theirs = table(parent, group);
        const std::int64_t num_shared = shape_of(group).num_blocks(parent.num_computed);
        for (std::int64_t block = 0; block < num_shared; ++block) {
            if (theirs[block] != kNone) pool_.hold(theirs[block], child->cache_priority);
            table(*child, group).push(theirs[block]);
        }
    }
    move_end(*child, parent.node);
    num_admitted_ += child->is_admitted ? 1 : 0;
    const SequenceId child_id = child->id;
    sequences_.insert(std::move(child));
    return child_id;
}

void BlockManager::close(SequenceId id) {
    Sequence& sequence = find(id);
    ensure_flight_room(sequence.num_entries());
    release_blocks(sequence, 0);
    num_admitted_ -= sequence.is_admitted ? 1 : 0;
    move_end(sequence, kNone);
    sequences_.erase(id);
}

void BlockManager::reset() {
    if (sequences_.size() != 0)
        throw BadArgument("expected no open sequence in reset, got " + std::to_string(sequences_.size()) +
                          "; close them first");
    if (events_.is_on()) events_.ensure_room(1, 0, 0);
    tree_.clear();
    pool_.clear();
    ghosts_.clear();
    if (events_.is_on()) events_.add({Event::Kind::cleared});
}

std::vector<BlockId> BlockManager::resize(std::int64_t num_blocks, std::int64_t watermark_blocks) {
    const std::int64_t num_available_blocks = pool_.num_free() + pool_.num_cached();
    if (pool_.num_blocks() - num_blocks > num_available_blocks)
        throw BadArgument("expected at least " + std::to_string(pool_.num_blocks() - num_available_blocks) +
                          " blocks in resize, as " + std::to_string(pool_.num_held()) + " are held and " +
                          std::to_string(pool_.num_in_flight()) + " in flight, got " + std::to_string(num_blocks));
    std::vector<BlockId> given_up;
    given_up.reserve(static_cast<std::size_t>(std::max<std::int64_t>(pool_.num_blocks() - num_blocks, 0)));
    const std::int64_t num_ids = std::max(pool_.num_ids(), num_blocks);
    pool_.ensure_ids(num_ids);
    ghosts_.grow(num_ids);
    if (overlapped_) {
        const auto had = static_cast<std::size_t>(pool_.num_ids());
        busy_until_.ensure(static_cast<std::size_t>(num_ids), had);
        std::fill_n(busy_until_.data() + had, static_cast<std::size_t>(num_ids) - had, 0);
    }
    if (events_.is_on()) events_.ensure_room(given_up.capacity(), 0, 0);
    watermark_blocks_ = watermark_blocks;
    pool_.order().clear_needs();
    pool_.begin_call();
    while (pool_.num_blocks() > num_blocks) {
        if (pool_.num_free() == 0) {
            // Floors hold while other blocks can go, and then yield: no other owner takes the room.
            BlockId victim = pool_.first(false);
            if (victim == kNone) victim = pool_.first(true);
            evict(victim, 0, Event::Reason::forgotten);
        }
        given_up.push_back(pool_.give_up());
    }
    pool_.grow(num_blocks);
    return given_up;
}

Counts BlockManager::counts() const noexcept {
    return {pool_.num_free(), pool_.num_cached(), pool_.num_held(), pool_.num_in_flight()};
}

std::span<const BlockId> BlockManager::block_table(SequenceId id, std::int64_t group) const {
    const Sequence& sequence = find(id);
    if (group < 0 || group >= num_groups())
        throw BadArgument("expected a group of 0 .. " + std::to_string(num_groups() - 1) + ", got " +
                          std::to_string(group) + " in block_table");
    return sequence.tables[static_cast<std::size_t>(group)].entries();
}

}  // namespace quire
