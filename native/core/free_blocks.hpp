// The free blocks: a set of ids that hands out runs.
//
// A sequence's blocks should be adjacent: the virtual storage needs one memory mapping for neighbours at neighbouring
// positions, and a sequence is read sequentially. So the block at position b of a sequence gets, in this order,
//   1. the id behind that of the block before, if it is free;
//   2. id r * run + b % run of the lowest run r (ids r * run .. r * run + run - 1) that is wholly free;
//   3. the lowest free id.
// With runs of 1 rule 2 equals rule 3: only neighbours are sought. `run` is a power of two. A block of a group with a
// window gets the lowest free id at once: such a sequence reuses the blocks behind its window, and with runs it would
// walk through the whole pool and commit memory for all of it.
//
// A bit an id and a bit for each wholly free run, under a tree of bits (a bit is set where the word below is not 0), and a
// count for each run. Ids never handed out are not even written: they are the ids from `num_touched` on, all free, and
// a run of them (at least 64 ids) is entered when its first id is needed.
//
// Not here: the states of blocks. The pool decides which are free.
//
//   F1  an id is in the set if its bit is set or it is untouched; `size` counts these ids
//   F2  a run's count is the number of its set bits; the run's bit is set if all are set
//
// Cost: `take`, `add`: O(levels), six at most, and once a run entering it, O(run). Only `ensure` can fail.
#pragma once

#include <array>
#include <cstdint>

#include "core/slab.hpp"
#include "core/block_record.hpp"

namespace quire {

// A set of ids 0, 1, ... that finds the lowest in a few steps. An id is entered, in order, before it is inserted.
class IdSet {
public:
    void ensure(std::int64_t num_ids, std::int64_t num_entered);
    // Enters the next id, without inserting it.
    void enter(std::int64_t id) noexcept;
    bool contains(std::int64_t id) const noexcept { return (word(0, id) >> (id & 63) & 1) != 0; }
    void insert(std::int64_t id) noexcept;
    void erase(std::int64_t id) noexcept;
    // The lowest id, -1 in an empty set. num_entered: ids entered so far.
    std::int64_t first(std::int64_t num_entered) const noexcept;
    std::size_t capacity_bytes() const noexcept;

private:
    static constexpr std::size_t kLevels = 6;  // 64^6 exceeds the number of ids

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

    // Takes a free id for a block at `position` behind block `before` (kNone: no such block); the lowest id for a
    // position of kNone. Needs size() > 0.
    BlockId take(BlockId before, std::int64_t position) noexcept;
    // Takes the lowest free id. Needs size() > 0.
    BlockId take_lowest() noexcept;
    void add(BlockId block_id) noexcept;

    // Makes room for `num_ids` ids.
    void ensure(std::int64_t num_ids);
    // Grows to `num_ids` ids, the new ones free. Needs room.
    void grow(std::int64_t num_ids) noexcept;
    // Frees all ids.
    void fill() noexcept;

    std::size_t capacity_bytes() const noexcept {
        return ids_.capacity_bytes() + runs_.capacity_bytes() + counts_.capacity_bytes();
    }
    // Checks F1 and F2; throws InvariantBroken for the pool's C1 (docs/contracts.md).
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
    IdSet runs_;                    // wholly free ones; unused with runs of 1
    Slab<std::uint16_t> counts_;    // free ids of each run, likewise
};

}  // namespace quire
