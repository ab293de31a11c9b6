// The order of eviction: the lists of cached blocks, and the owners' counts.
//
// Lowest cache priority first (0 discard, 1 normal, 2 keep), then the highest age / (uses + 1): the age of a block is the number
// of blocks released since its own release, its uses are 1 and 1 for each hit, at most kMaxUses
// (quire.cache.manager.eviction has the reasons). If uses are not counted, the least recently used block goes first. There
// is a list for each owner, cache priority and number of uses, linked through the blocks' own records, least recently used
// first; a time on each block makes one order of all lists. Only owners that may lose a block in the present call take part: `budget` says how many, need +
// max(0, owned - floor) (quire.cache.owners has the reasons).
//
// Until an owner or a cache priority other than normal is used, there are the lists of one owner and priority, and a block
// has only its links. `start_marking` ends that permanently: 4 bytes more a block.
//
// Not here: the states of blocks (pool.hpp), and the blocks that are evicted together (the block manager).
//
//   E1  each list holds cached blocks of its owner, cache priority and uses, and the times in it rise
//   E2  an owner's counts are those of its blocks
//
// Cost: O(1) to append and to remove, O(blocks between the place and the start of the search) to insert, O(owners) to find
// the first and to begin a call. `start_marking`, `slot_of` and `ensure_blocks` can fail.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/slab.hpp"
#include "core/block_record.hpp"

namespace quire {

inline constexpr std::int32_t kDiscard = 0;
inline constexpr std::int32_t kNormal = 1;
inline constexpr std::int32_t kNumPriorities = 3;
inline constexpr std::int64_t kNoQuota = -1;

struct BlockList {
    BlockId front = kNone;
    BlockId back = kNone;
};

struct Owner {
    std::int32_t number = 0;
    std::int64_t floor = 0;
    std::int64_t quota = kNoQuota;
    std::int64_t num_owned = 0;  // held + cached + in flight
    std::int64_t num_cached = 0;
    std::int64_t num_in_flight = 0;
    std::int64_t need = 0;    // of the present call
    std::int64_t budget = 0;  // cached blocks it may still lose in this call
    BlockList cached[kNumPriorities][kMaxUses];

    // Blocks it may take within its quota if all its cached blocks are evicted.
    std::int64_t room(std::int64_t num_blocks) const noexcept {
        return quota == kNoQuota ? num_blocks : quota - num_owned + num_cached;
    }
};

class EvictionOrder {
public:
    explicit EvictionOrder(bool counts_uses) : counts_uses_(counts_uses), owners_(1) {}

    bool counts_uses() const noexcept { return counts_uses_; }

    bool is_marked() const noexcept { return is_marked_; }
    // Starts to record owners and priorities of blocks. All present blocks get owner 0 and priority normal:
    // `num_blocks` that are not free, among them `num_in_flight` in flight and `num_cached` in the list; ids from
    // `num_touched` on have no record yet.
    void start_marking(std::int64_t num_ids, std::int64_t num_touched, std::int64_t num_blocks, std::int64_t num_cached,
                       std::int64_t num_in_flight);
    void ensure_blocks(std::int64_t num_ids, std::int64_t num_touched);

    // Owners by slot; slot 0 is owner 0, the default.
    std::int32_t slot_of(std::int32_t number);
    const Owner* find(std::int32_t number) const noexcept;
    Owner& owner_id(std::int32_t slot) noexcept { return owners_[static_cast<std::size_t>(slot)]; }
    std::span<const Owner> owner_ids() const noexcept { return owners_; }
    Owner& owner_of(BlockId block_id) noexcept { return owners_[marks_[index(block_id)].owner_id]; }
    std::int32_t number_of(BlockId block_id) const noexcept {
        return is_marked_ ? owners_[marks_[index(block_id)].owner_id].number : 0;
    }
    std::int32_t cache_priority_of(BlockId block_id) const noexcept {
        return is_marked_ ? static_cast<std::int32_t>(marks_[index(block_id)].cache_priority) : kNormal;
    }

    // Counts a block just handed out in the owner.
    void own(BlockId block_id, std::int32_t slot, std::int32_t cache_priority) noexcept;
    void disown(BlockId block_id) noexcept { --owner_of(block_id).num_owned; }
    // Raises the priority of a block that is not cached.
    void raise(BlockId block_id, std::int32_t cache_priority) noexcept;

    // Sets the priority of a block that is in no list.
    void mark(BlockId block_id, std::int32_t cache_priority) noexcept {
        marks_[index(block_id)].cache_priority = static_cast<std::uint16_t>(cache_priority);
    }

    void append(Slab<BlockRecord>& block_ids, BlockId block_id) noexcept;
    // Puts a block that was removed into its list, by the time of its release. The search begins at the block `near`, if it
    // is in this list, else at the end.
    void insert(Slab<BlockRecord>& block_ids, BlockId block_id, BlockId near) noexcept;
    void remove(Slab<BlockRecord>& block_ids, BlockId block_id) noexcept;
    void clear() noexcept;

    // Begins a call: sets budgets from the owners' needs. Returns the number of blocks that may be evicted in it.
    void clear_needs() noexcept;
    std::int64_t begin_call() noexcept;
    // The next block to evict, of the owners with a budget, or of all; kNone without one.
    BlockId first(const Slab<BlockRecord>& block_ids, bool of_all) const noexcept;
    BlockId first_of(const Slab<BlockRecord>& block_ids, const Owner& owner_id) const noexcept;

    std::size_t capacity_bytes() const noexcept { return marks_.capacity_bytes(); }
    // The time of each cached block by block id, -1 for others; checks E1 and E2's counts of cached blocks.
    std::vector<std::int64_t> times(const Slab<BlockRecord>& block_ids, std::int64_t num_ids, std::int64_t num_cached) const;

private:
    struct Mark {
        std::uint16_t owner_id;
        std::uint16_t cache_priority;
    };
    static_assert(sizeof(Mark) == 4);

    // The block with the highest age / (uses + 1) among those given to `add`; the block released first among equals.
    class Oldest {
    public:
        Oldest(const EvictionOrder& order, const Slab<BlockRecord>& block_ids) : order_(order), block_ids_(block_ids) {}
        void add(const BlockList* lists) noexcept;
        BlockId block_id() const noexcept { return block_id_; }

    private:
        const EvictionOrder& order_;
        const Slab<BlockRecord>& block_ids_;
        BlockId block_id_ = kNone;
        std::uint64_t share_ = 0;
        std::uint64_t age_ = 0;
    };

    static std::size_t index(BlockId block_id) noexcept { return static_cast<std::size_t>(block_id); }
    BlockList& list_of(const BlockRecord& record, BlockId block_id) noexcept {
        if (!is_marked_) return owners_.front().cached[kNormal][record.uses - 1];
        const Mark mark = marks_[index(block_id)];
        return owners_[mark.owner_id].cached[mark.cache_priority][record.uses - 1];
    }
    std::uint64_t age_of(const BlockRecord& record) const noexcept { return (clock_ - record.time) & kTimeMask; }

    static constexpr std::uint64_t kTimeMask = (std::uint64_t{1} << 29) - 1;
    bool counts_uses_;

    bool is_marked_ = false;
    std::uint64_t clock_ = 0;
    Slab<Mark> marks_;
    std::vector<Owner> owners_;
    std::unordered_map<std::int32_t, std::int32_t> slots_;  // by owner, without owner 0
};

}  // namespace quire
