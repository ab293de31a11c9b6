// The free blocks: a set of ids that hands out runs.
//
// A sequence's blocks shall lie side by side: the virtual storage needs one memory mapping for neighbours at neighbouring
// positions, and whatever reads a sequence reads on. So the block at position b of a sequence gets, in this order,
//   1. the id behind that of the block before, if it is free;
//   2. id r * run + b % run of the lowest run r (ids r * run .. r * run + run - 1) that is wholly free;
//   3. the lowest free id.
// With runs of 1 the second is the third: only neighbours are sought. `run` is a power of two.
// A block of a group that forgets gets the lowest free id at once: what such a sequence gives back behind its window is what
// it needs next, and running on it would walk through the whole pool, and have memory behind all of it.
//
// A bit an id and a bit for each wholly free run, under a tree of bits (a bit is set where the word below is not 0), and a
// count for each run. Ids never handed out are not even written: they are those from `num_touched` on, all free, and a run
// (64 ids at least) of them is entered when its first is needed.
//
// What it is not: a judge of states. The pool says what is free.
//
//   F1  an id is in the set if its bit is set or it is not touched; `size` counts them
//   F2  a run's count is that of its bits; its bit is set if it has all of them
//
// Cost: `take`, `add`: O(levels), six at most, and once a run entering it, O(run). Only `ensure` can fail.
#pragma once

#include <array>
#include <cstdint>

#include "core/slab.hpp"
#include "core/block_record.hpp"

namespace quire {

// Ids 0, 1, ... of which the lowest is found in a few steps. An id is entered, in order, before it is inserted.
class IdSet {
public:
    void ensure(std::int64_t num_ids, std::int64_t num_entered);
    // The next id may be inserted; it is not in the set.
    void enter(std::int64_t id) noexcept;
    bool contains(std::int64_t id) const noexcept { return (word(0, id) >> (id & 63) & 1) != 0; }
    void insert(std::int64_t id) noexcept;
    void erase(std::int64_t id) noexcept;
    // The lowest id, -1 if there is none. num_entered: ids entered so far.
    std::int64_t first(std::int64_t num_entered) const noexcept;
    std::size_t capacity_bytes() const noexcept;

private:
    static constexpr std::size_t kLevels = 6;  // 64^6 is more than there are ids

    std::uint64_t word(std::size_t level, std::int64_t bit) const noexcept {
        return levels_[level][static_cast<std::size_t>(bit >> 6)];
    }

    std::array<Slab<std::uint64_t>, kLevels> levels_;
};

class FreeBlocks {
public:
    FreeBlocks(std::int64_t num_ids, std::int64_t run);

    std::int64_t size() const noexcept { return size_; }
    std::int64_t num_touched() const noexcept { return num_touched_; }  // ids from here on were never handed out
    bool contains(BlockId block_id) const noexcept { return block_id >= num_touched_ ? block_id < num_ids_ : ids_.contains(block_id); }

    // A free id for a block at `position` behind one whose id is `before` (kNone: there is none); the lowest for a position
    // of kNone. Needs size() > 0.
    BlockId take(BlockId before, std::int64_t position) noexcept;
    // The lowest free id leaves the set. Needs size() > 0.
    BlockId take_lowest() noexcept;
    void add(BlockId block_id) noexcept;

    // Room for `num_ids` ids.
    void ensure(std::int64_t num_ids);
    // There are `num_ids` ids, the new ones free. Needs room.
    void grow(std::int64_t num_ids) noexcept;
    // All ids are free.
    void fill() noexcept;

    std::size_t capacity_bytes() const noexcept {
        return ids_.capacity_bytes() + runs_.capacity_bytes() + counts_.capacity_bytes();
    }
    // Proves F1 and F2; throws InvariantBroken, as of the pool's C1 (docs/contracts.md).
    void check() const;

private:
    void touch_to(std::int64_t end) noexcept;
    bool touch_run() noexcept;
    void remove(BlockId block_id) noexcept;
    std::int64_t run_of(std::int64_t block_id) const noexcept { return block_id >> shift_; }
    std::int64_t num_runs_touched() const noexcept { return (num_touched_ + run_ - 1) >> shift_; }

    std::int64_t run_;
    int shift_;  // run_ = 1 << shift_
    std::int64_t num_ids_;
    std::int64_t size_;
    std::int64_t num_touched_ = 0;  // a multiple of the run, or all ids
    IdSet ids_;
    IdSet runs_;                    // wholly free ones; not kept where runs are of 1
    Slab<std::uint16_t> counts_;    // free ids of each run, likewise
};

}  // namespace quire
