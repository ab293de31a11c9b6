// The block manager: which token lives in which block. The native twin of quire.cache.manager.block_manager.PythonBlockManager; the
// rules, every order on which a block id depends, and the invariants C1 to C9 stand in docs/contracts.md, "The cache".
//
// What it is not: thread-safe (one owner at a time), or an owner of bytes. It knows no Python and no tensors.
//
// Every call has the strong guarantee: it checks its arguments, then allocates whatever it may need, and only then
// changes anything. UnknownSequence and BadArgument are thrown before any change, and so is std::bad_alloc.
//
// Files: block_manager.cpp (life of a sequence), block_manager_blocks.cpp (release, remove, allocate),
// block_manager_hit.cpp, block_manager_path.cpp (set_cache_priority, evict_path), block_manager_reserve.cpp,
// block_manager_commit.cpp (commit, rewind), block_manager_report.cpp
// (owners, events, explain, drop, the whole tree), block_manager_check.cpp.
//
// Cost: match and open O(blocks of the hit x log siblings); reserve O(sequences + new tokens + evicted blocks), no cost
// per cached prompt; commit O(new full blocks x log siblings); close O(blocks).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/event_log.hpp"
#include "core/ghosts.hpp"
#include "core/node_shape.hpp"
#include "core/pool.hpp"
#include "core/prefix_tree.hpp"
#include "core/span.hpp"
#include "core/sequence.hpp"
#include "core/step_plan.hpp"

namespace quire {

// An unknown or closed sequence id.
class UnknownSequence : public std::out_of_range {
public:
    explicit UnknownSequence(SequenceId sequence);
    SequenceId id;
};

// An argument out of a state-dependent range: expected, got, where.
class BadArgument : public std::invalid_argument {
public:
    using std::invalid_argument::invalid_argument;
};

// A prompt to look up or open: tokens, and extra keys by position, sorted.
struct Prompt {
    std::span<const Token> tokens;
    std::span<const ExtraKey> keys;
    std::string_view name;  // namespace

    // The block of `count` tokens from `start`.
    BlockView block(std::int64_t start, std::int64_t count) const noexcept;

    // The part that a hit of at most `most_cached` tokens may use: never the last token.
    Prompt up_to_hit(std::int64_t most_cached) const noexcept {
        const auto count = static_cast<std::size_t>(most_cached) + 1;
        return {tokens.first(std::min(tokens.size(), count)), keys, name};
    }
};

struct Counts {
    std::int64_t num_free;
    std::int64_t num_cached;
    std::int64_t num_held;
    std::int64_t num_in_flight;
};

struct Stats {
    std::int64_t hit_tokens = 0;
    std::int64_t query_tokens = 0;
    std::int64_t evicted_blocks = 0;
    std::int64_t copied_blocks = 0;
    std::int64_t deduplicated_blocks = 0;
    std::int64_t most_blocks = 0;  // maximum held and in flight together at the end of a reserve()
};

// Blocks of content that `drop` forgot: freed blocks, and blocks still held or in flight.
struct Dropped {
    std::int64_t num_freed = 0;
    std::int64_t num_in_use = 0;
};

// Blocks whose cache priority `set_cache_priority` changed, and the position of the first node with one; without any, that
// of the prompt's end.
struct PriorityChange {
    std::int64_t num_blocks = 0;
    std::int64_t first_position = 0;
};

// The result of a prompt's walk through the tree.
struct Explanation {
    std::int64_t num_hit;
    std::int64_t num_common;     // tokens shared with nodes, even nodes without blocks
    std::vector<Token> nearest;  // of the nearest block at the end of the walk
};

// A node as `tree` reports it, and one of its blocks.
struct NodeReport {
    std::int64_t id;
    std::int64_t parent;  // -1 below a root
    std::int32_t name;    // index of its root, in the order of their names
    std::int32_t depth;
    std::int32_t num_tokens;
};

struct BlockReport {
    BlockId block_id = kNone;
    std::int32_t num_references = -1;
    std::int32_t owner_id = -1;
    std::int32_t cache_priority = -1;
    std::int32_t state = 0;  // gone, cached, held, in flight
};

struct TreeReport {
    std::vector<NodeReport> nodes;
    std::vector<BlockReport> block_ids;  // [nodes, columns]
    std::vector<std::string> names;
};

// All blocks by id: their state, and the root (in the order of names) of their known content, or kNone.
struct BlockMap {
    std::vector<std::uint8_t> states;
    std::vector<std::int32_t> names;
};

// The content of a block with known content: the last `num_own` of `tokens`, which begin at the root.
struct BlockContent {
    std::string name;
    std::vector<Token> tokens;
    std::int32_t num_own;
};

class BlockManager {
public:
    // block_size: tokens of a node. blocks_per_node: of each group, divisors of it; empty: one each. counts_uses: the policy
    // of eviction is "frequency", else "lru".
    BlockManager(const std::vector<Span>& spans, std::int64_t num_blocks, std::int64_t block_size,
                 bool prefix_caching, std::int64_t watermark_blocks, bool overlapped_steps, std::int64_t run_blocks,
                 const std::vector<std::int32_t>& blocks_per_node = {}, bool counts_uses = true);

    std::int64_t match(const Prompt& prompt);
    Explanation explain(const Prompt& prompt);
    // most_cached: limit of the hit, now and later, also after a rewind.
    SequenceId open(const Prompt& prompt, std::int32_t owner_id = 0, std::int32_t cache_priority = kNormal,
                    std::int64_t most_cached = kNoLimit);
    void append(SequenceId id, std::span<const Token> tokens);
    std::span<const Token> tokens(SequenceId id) const { return find(id).tokens; }
    std::int64_t num_cached_tokens(SequenceId id);
    std::int64_t num_computed_tokens(SequenceId id);
    std::int64_t num_blocks_needed(std::span<const SequenceId> ids, std::span<const std::int64_t> num_new_tokens,
                                   std::int64_t num_lookahead);
    // The plan of the next step; null, with nothing changed, if the blocks do not suffice.
    std::shared_ptr<const StepPlan> reserve(std::span<const SequenceId> ids,
                                            std::span<const std::int64_t> num_new_tokens, std::int64_t num_lookahead);
    // As `reserve`, for one sequence up to `num_computed`, whose KV the caller will copy: positions behind its windows
    // there get no block. It must be committed as a whole or rewound before it reserves again.
    std::int64_t num_blocks_to_restore(SequenceId id, std::int64_t num_computed);
    std::shared_ptr<const StepPlan> restore(SequenceId id, std::int64_t num_computed);
    void commit(SequenceId id, std::int64_t num_computed);
    // The end of a decode step: for each sequence in order `commit`, then `append` of one token. A sequence that cannot
    // be committed ends the call; the sequences before it are done.
    void advance(std::span<const SequenceId> ids, std::span<const std::int64_t> num_computed,
                 std::span<const Token> tokens);
    void complete(std::int64_t step);
    SequenceId fork(SequenceId id);
    std::int64_t rewind(SequenceId id, std::int64_t position);
    void close(SequenceId id);
    void reset();
    // Changes the number of blocks to `num_blocks`; returns the dropped ids, which were free or cached.
    std::vector<BlockId> resize(std::int64_t num_blocks, std::int64_t watermark_blocks);

    // Owners (1 ..) and their limits; see quire.cache.owners.
    void set_limits(std::int32_t owner_id, std::int64_t floor, std::int64_t quota);
    Counts owner_counts(std::int32_t owner_id) const noexcept;  // num_free is 0
    std::int64_t num_available_blocks(std::int32_t owner_id) const noexcept;
    std::int64_t max_owner_blocks(std::int32_t owner_id) const noexcept;

    // Forgets all content that begins with the prompt, and withdraws sequences that have computed such content.
    Dropped drop(const Prompt& prompt);
    // Sets the cache priority of the prompt's content from position `start` on; quire.cache.manager.known_path has the rules.
    PriorityChange set_cache_priority(const Prompt& prompt, std::int32_t level, std::int64_t start);
    // Evicts the nodes at the end of the prompt's content, up to one with children or with a block in use. Returns the number
    // of blocks that became free.
    std::int64_t evict_path(const Prompt& prompt);
    // Later commits of the sequence are not findable, and it looks for no hits. Twice is harmless.
    void withdraw(SequenceId id) { move_end(find(id), kNone); }
    bool is_findable(SequenceId id) const { return find(id).node != kNone; }
    void record_events(bool is_on);
    std::int64_t num_events() const noexcept { return events_.size(); }
    EventBatch take_events() noexcept { return events_.take(); }
    TreeReport tree();
    BlockMap block_map() const;
    std::optional<BlockContent> content_of(BlockId block_id) const;  // BadArgument for an id out of range
    std::vector<std::string_view> namespaces() const { return tree_.names(); }

    Counts counts() const noexcept;
    const Stats& stats() const noexcept { return stats_; }
    std::int64_t num_blocks() const noexcept { return pool_.num_blocks(); }
    std::int64_t block_size() const noexcept { return block_size_; }
    std::int32_t num_groups() const noexcept { return static_cast<std::int32_t>(shape_.groups.size()); }
    std::int32_t num_columns() const noexcept { return shape_.num_columns(); }  // blocks of a whole node
    std::int64_t num_sequences() const noexcept { return static_cast<std::int64_t>(sequences_.size()); }
    std::int64_t num_nodes() const noexcept { return tree_.num_nodes(); }
    std::span<const BlockId> block_table(SequenceId id, std::int64_t group) const;
    // Tree nodes compared so far: the cost of look-ups.
    std::int64_t num_visited() const noexcept { return tree_.num_visited(); }
    // Address space of the pool and the tree; unused parts take no memory.
    std::size_t capacity_bytes() const noexcept {
        return pool_.capacity_bytes() + tree_.capacity_bytes() + ghosts_.capacity_bytes() + busy_until_.capacity_bytes();
    }
    // Checks C1 to C9; throws InvariantBroken.
    void check() const;

private:
    // A sequence's part of the step being planned.
    struct Work {
        Sequence* sequence;
        std::int64_t num_new;
        std::int64_t end;         // minimum end of its tables once the step is reserved, in tokens
        std::int64_t num_nodes;   // ... and nodes
        bool copies;              // the blocks of position num_computed's node are copied on write
        bool copies_for_node;     // ... only because their node has more tokens
        bool restores;            // blocks behind the windows at its end get no block
        std::int64_t num_copied;  // blocks to copy
        std::int64_t num_needed;  // blocks to take, over all groups
    };

    std::int64_t num_nodes_for(std::int64_t num_tokens) const noexcept {
        return (num_tokens + block_size_ - 1) / block_size_;
    }
    const GroupShape& shape_of(std::int32_t group) const noexcept {
        return shape_.groups[static_cast<std::size_t>(group)];
    }
    std::int64_t first_block_needed(std::int32_t group, std::int64_t position) const noexcept {
        return shape_of(group).first_needed(position);
    }
    // Minimum entries of a group's table once the step is reserved.
    static std::int64_t num_blocks_of(const Work& work, const GroupShape& shape) noexcept {
        return shape.per_node == 1 ? work.num_nodes : shape.num_blocks(work.end);
    }
    // Visits the blocks with computed tokens of the partly computed node: group after group, by position.
    template <class Visit>  // (group, entry of its table)
    void for_each_partial(const Sequence& sequence, Visit&& visit) const {
        const std::int64_t node = sequence.num_computed / block_size_;
        if (node * block_size_ == sequence.num_computed) return;
        for (std::int32_t group = 0; group < num_groups(); ++group) {
            const GroupShape& shape = shape_of(group);
            const BlockTable& entries = sequence.tables[static_cast<std::size_t>(group)];
            const std::int64_t stop = shape.end_in_node(node, sequence.num_computed);
            for (std::int64_t block = node * shape.per_node; block < stop; ++block)
                if (entries[block] != kNone) visit(group, block);
        }
    }
    BlockTable& table(Sequence& sequence, std::int32_t group) const noexcept {
        return sequence.tables[static_cast<std::size_t>(group)];
    }
    Sequence& find(SequenceId id) const;
    static Prompt prompt_of(const Sequence& sequence) noexcept {
        return {sequence.tokens, sequence.keys, sequence.name};
    }

    // block_manager_blocks.cpp
    bool is_step_under_way() const noexcept { return overlapped_ && newest_step_ > completed_step_; }
    bool is_referenced(NodeId node) const noexcept;
    void release(BlockId block_id) noexcept;
    void release_entries(const std::vector<BlockTable>& tables, std::int64_t from) noexcept;
    void release_blocks(Sequence& sequence, std::int64_t from) noexcept;
    std::int32_t column_of(NodeId node, BlockId block_id) const noexcept;
    void settle(BlockId block_id) noexcept;
    void remove_node(NodeId node) noexcept;
    void leave_node(BlockId block_id) noexcept;
    void drop_bare(NodeId node) noexcept;
    void evict(BlockId victim, std::int32_t owner_id, Event::Reason reason) noexcept;
    void make_room(const Sequence& sequence, std::int64_t num_blocks) noexcept;
    BlockId allocate(const Sequence& sequence, BlockId before, std::int64_t block) noexcept;
    BlockId* note_removed(NodeId node, std::int32_t owner_id, Event::Reason reason) noexcept;
    std::int32_t highest_cache_priority(std::span<const BlockId> block_ids) const noexcept;
    void move_end(Sequence& sequence, NodeId node) noexcept;
    void ensure_flight_room(std::int64_t num_released);

    // block_manager_hit.cpp
    std::int64_t find_hit(const Prompt& prompt);
    bool is_valid_hit(std::int64_t num_tokens) const noexcept;
    bool is_valid_hit_in(NodeId child, std::int64_t node, std::int64_t num_tokens) const noexcept;
    void prepare_tables(std::vector<BlockTable>& tables, std::int64_t num_tokens) const;
    void take_hit(Sequence& sequence, std::int64_t num_tokens, NodeId root) noexcept;
    void refresh_hit(Sequence& sequence);

    // block_manager_path.cpp
    void find_path(const Prompt& prompt, bool is_raise);
    std::int32_t highest_level_below(NodeId node) const noexcept;

    // block_manager_reserve.cpp
    std::int64_t plan_works(std::span<const SequenceId> ids, std::span<const std::int64_t> num_new_tokens,
                            std::int64_t num_lookahead, bool restores = false);
    bool gives_up_partial_block(const Work& work) const noexcept;
    void plan_copy(Work& work) noexcept;
    std::int64_t plan_to_restore(SequenceId id, std::int64_t num_computed);
    std::shared_ptr<const StepPlan> apply(std::int64_t num_needed, std::int64_t num_lookahead);
    std::int64_t first_block_with_block(const Work& work, std::int32_t group) const noexcept;
    std::int64_t blocks_of(const Work& work) const noexcept;
    void count_needs() noexcept;
    bool fits(std::int64_t num_needed, std::int64_t num_left) noexcept;
    void keep_quotas() noexcept;
    void allocate_blocks(const Work& work, StepPlan& plan) noexcept;
    void write_row(const Work& work, std::int64_t row, StepPlan& plan) const noexcept;

    // block_manager_commit.cpp
    void commit_full_node(Sequence& sequence, std::int64_t depth, NodeId equal, PrefixTree::StagedKeys&& keys) noexcept;
    void stage_events(const Sequence& sequence, std::int64_t first, std::int64_t num_full);
    void note_stored(const Sequence& sequence, std::int64_t block, NodeId node, std::span<const BlockId> block_ids) noexcept;
    void commit_tail(Sequence& sequence, std::int64_t num_computed, PrefixTree::StagedKeys&& keys) noexcept;
    NodeId own_partial_node(const Sequence& sequence, std::int64_t depth) const noexcept;
    NodeId make_node(Sequence& sequence, std::int64_t depth, const BlockView& view, PrefixTree::StagedKeys&& keys) noexcept;
    void remove_covered_sibling(NodeId node) noexcept;
    std::uint32_t most_uses_below(NodeId node) const noexcept;
    std::uint32_t uses_above(NodeId node, std::int32_t column) const noexcept;
    bool recall_uses(NodeId node, NodeId parent) noexcept;
    void release_behind_windows(Sequence& sequence, std::int64_t num_computed) noexcept;
    bool is_kept(const Sequence& sequence, std::int64_t num_tokens) const noexcept;

    // block_manager_report.cpp
    bool has_computed(const Sequence& sequence, NodeId above, std::int64_t start, const Prompt& prompt) const noexcept;
    std::int64_t forget(NodeId node) noexcept;

    void check_blocks() const;
    void check_nodes() const;
    void check_sequence(const Sequence& sequence) const;

    NodeShape shape_;
    std::int64_t block_size_;  // tokens of a node
    bool prefix_caching_;
    std::int64_t watermark_blocks_;
    bool overlapped_;
    Pool pool_;
    PrefixTree tree_;
    Ghosts ghosts_;
    bool may_recall_ = false;  // whether the next node of this commit can have a ghost; see recall_uses
    SequenceTable sequences_;
    Slab<std::int64_t> busy_until_;  // by block, with overlapped steps: the last step that may still use what was released
    SequenceId next_id_ = 0;
    std::int64_t num_admitted_ = 0;
    std::int64_t newest_step_ = 0;
    std::int64_t completed_step_ = 0;
    std::int64_t version_ = 0;  // count of nodes inserted or extended, and of holes filled
    Stats stats_;
    EventLog events_;

    // Scratch of one call, kept to spare allocations.
    std::vector<NodeId> path_;           // find_hit: the nodes of the hit; find_path: a prompt's; commit: equal nodes found
    std::vector<std::int64_t> missing_;  // find_hit: by group, the deepest block that the path lacks
    std::vector<Work> works_;
    std::vector<BlockId> sources_;  // reserve: source blocks of copies, in order
    std::vector<BlockId> stored_;  // commit: newly findable blocks of a node, by column
    std::vector<std::vector<ExtraKey>> event_keys_;  // commit: for the events of full blocks, from event_block_ on
    std::int64_t event_block_ = 0;
    std::int32_t event_name_ = -1;
    std::int64_t num_calls_ = 0;
};

}  // namespace quire
