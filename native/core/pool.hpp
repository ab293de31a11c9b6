// The pool: the state of every block, the free ones, the cached ones in order of use, the blocks in flight.
//
// A block is in exactly one state: free (no known content), cached (content known, nobody refers to it), held (referred to)
// or in flight (nobody refers to it, but a running step may still see it); an id dropped by a resize is not a block of
// the pool until it grows again. 16 bytes a block; the lists of cached blocks (eviction_order.hpp) and the stack of
// dropped ids are linked through the records themselves, and the free blocks are a set of bits (free_blocks.hpp): the
// record of a free block has no meaning. Blocks never handed out are not even written, so creating a pool is free.
// Every block that is not free counts in one owner, once owners or priorities are used.
//
// It makes no decisions: the block manager decides which blocks go with an evicted block, and the state of a block
// after its lease.
//
//   P1  the counts of the four states add up to the number of blocks
//   P2  held blocks are those with references
//   P3  an owner's counts are those of its blocks
//
// Cost: O(1) a call except for the costs in eviction_order.hpp and free_blocks.hpp. Only `ensure_flight_room`,
// `ensure_ids`, `start_marking` and `slot_of` can fail.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/eviction_order.hpp"
#include "core/free_blocks.hpp"
#include "core/prefix_tree.hpp"
#include "core/slab.hpp"
#include "core/block_record.hpp"

namespace quire {

enum class BlockState { free, cached, held, in_flight, given_up };

class Pool {
public:
    // run: ids of a run, a power of two; see free_blocks.hpp.
    // counts_uses: see eviction_order.hpp.
    Pool(std::int64_t num_blocks, std::int64_t run, bool counts_uses);

    std::int64_t num_blocks() const noexcept { return num_ids_ - num_given_up_; }
    std::int64_t num_ids() const noexcept { return num_ids_; }  // of blocks and of dropped ids
    std::int64_t num_free() const noexcept { return free_.size(); }
    std::int64_t num_cached() const noexcept { return num_cached_; }
    std::int64_t num_in_flight() const noexcept { return num_in_flight_; }
    std::int64_t num_held() const noexcept { return num_blocks() - num_free() - num_cached_ - num_in_flight_; }

    BlockState state(BlockId block_id) const noexcept;
    std::int32_t num_refs(BlockId block_id) const noexcept { return is_free(block_id) ? 0 : refs(blocks_[index(block_id)]); }
    NodeId node(BlockId block_id) const noexcept { return is_free(block_id) ? kNone : blocks_[index(block_id)].node; }
    void set_node(BlockId block_id, NodeId node) noexcept { blocks_[index(block_id)].node = node; }

    // Hands out a free block with one reference and no node, counted in the owner: for a block at `position` behind
    // block `before` (kNone: no such block). Needs num_free() > 0.
    BlockId take(std::int32_t slot, std::int32_t cache_priority, BlockId before, std::int64_t position) noexcept;
    // Adds a reference and raises the block's cache priority to this one.
    void hold(BlockId block_id, std::int32_t cache_priority) noexcept;
    // Subtracts a reference, and adds it again, while a step is being planned; states do not change.
    void discount(BlockId block_id) noexcept { --blocks_[index(block_id)].next; }
    void recount(BlockId block_id) noexcept { ++blocks_[index(block_id)].next; }
    // Drops a reference; returns whether it was the last. Then the block has no state until one of the next three
    // calls.
    bool release(BlockId block_id) noexcept { return --blocks_[index(block_id)].next == 0; }
    void make_free(BlockId block_id) noexcept;
    void make_cached(BlockId block_id) noexcept;  // as the most recently used
    void flight(BlockId block_id, std::int64_t step) noexcept;

    std::uint32_t uses(BlockId block_id) const noexcept { return blocks_[index(block_id)].uses; }
    // For a block in no list.
    void set_uses(BlockId block_id, std::uint32_t uses) noexcept { blocks_[index(block_id)].uses = uses & 7; }
    // The node and its only use, of a block that was just written.
    void set_fresh(BlockId block_id, NodeId node) noexcept {
        BlockRecord& record = blocks_[index(block_id)];
        record = {record.previous, record.next, node, 0, 1};
    }
    // Counts one more use, up to `most`; the uses it has now.
    std::uint32_t count_use(BlockId block_id, std::uint32_t most) noexcept {
        const std::uint32_t had = uses(block_id);
        if (had < most && had < kMaxUses) set_uses(block_id, had + 1);
        return uses(block_id);
    }
    // The next block to evict, of the owners with a budget, or of all, or of one; kNone without one.
    BlockId first(bool of_all) const noexcept { return order_.first(blocks_, of_all); }
    // The block behind a block in its list, cached or evicted a moment ago; kNone without one.
    BlockId behind(BlockId block_id) const noexcept { return blocks_[index(block_id)].next; }
    BlockId first_of(const Owner& owner_id) const noexcept { return order_.first_of(blocks_, owner_id); }

    // Changes the cache priority of a block that is not free; a cached one keeps the time of its release. near: a cached
    // block changed before, or kNone (see `EvictionOrder::insert`). Returns the block if it is cached, else `near`.
    BlockId set_cache_priority(BlockId block_id, std::int32_t cache_priority, BlockId near) noexcept;

    // Takes a cached block out of the list; it has no state until the next call.
    void take_out(BlockId block_id) noexcept;

    // Owners and the order of eviction.
    bool is_marked() const noexcept { return order_.is_marked(); }
    void start_marking() {
        order_.start_marking(num_ids_, free_.num_touched(), num_blocks() - num_free(), num_cached_, num_in_flight_);
    }
    std::int32_t slot_of(std::int32_t number) { return order_.slot_of(number); }
    EvictionOrder& order() noexcept { return order_; }
    const EvictionOrder& order() const noexcept { return order_; }
    // Begins a call whose needs are set; returns the blocks it could get.
    std::int64_t begin_call() noexcept {
        return num_free() + (order_.is_marked() ? order_.begin_call() : num_cached_);
    }
    // Counts a cached block that this call evicts.
    void charge(BlockId block_id) noexcept {
        if (order_.is_marked()) --order_.owner_of(block_id).budget;
    }
    bool may_lose(BlockId block_id) noexcept { return !order_.is_marked() || order_.owner_of(block_id).budget > 0; }

    // Drops the lowest free block from the pool. Needs num_free() > 0.
    BlockId give_up() noexcept;
    // Makes room for `num_ids` ids.
    void ensure_ids(std::int64_t num_ids) {
        blocks_.ensure(static_cast<std::size_t>(num_ids), static_cast<std::size_t>(free_.num_touched()));
        order_.ensure_blocks(num_ids, free_.num_touched());
        free_.ensure(num_ids);
    }
    // Grows to `num_blocks` blocks: the ids dropped last come back first, then new ids. Needs room.
    void grow(std::int64_t num_blocks) noexcept;

    void ensure_flight_room(std::size_t more) { flights_.ensure_room(more); }
    // Ends the oldest lease of a step up to `step` and returns its block (in no state), or kNone. Call until it returns
    // kNone.
    BlockId end_flight(std::int64_t step) noexcept;

    // Frees every block that is not in flight (dropped ids stay dropped); no block has a node then. No block may be
    // held.
    void clear() noexcept;
    std::size_t capacity_bytes() const noexcept {
        return blocks_.capacity_bytes() + order_.capacity_bytes() + free_.capacity_bytes();
    }
    // Checks P1 to P3 and the lists; throws InvariantBroken.
    void check() const;
    std::vector<std::int64_t> times() const { return order_.times(blocks_, num_ids_, num_cached_); }

private:
    // Values of a record's `previous` that are not links of a list.
    static constexpr BlockId kInFlight = -3;
    static constexpr BlockId kGivenUp = -4;
    static constexpr BlockId kHeld = -5;  // `next` counts its references

    struct Flight {
        std::int64_t step;
        BlockId block_id;
        std::int32_t stamp;
    };

    static std::size_t index(BlockId block_id) noexcept { return static_cast<std::size_t>(block_id); }
    static std::int32_t refs(const BlockRecord& record) noexcept { return record.previous == kHeld ? record.next : 0; }
    bool is_free(BlockId block_id) const noexcept { return free_.contains(block_id); }

    std::int64_t num_ids_;
    std::int64_t num_given_up_ = 0;
    std::int64_t num_cached_ = 0;
    std::int64_t num_in_flight_ = 0;
    Slab<BlockRecord> blocks_;
    EvictionOrder order_;
    FreeBlocks free_;
    BlockId given_up_top_ = kNone;
    std::int32_t next_stamp_ = 0;
    Ring<Flight> flights_;
};

}  // namespace quire
