// The pool: the state of every unit, the free ones, the cached ones in order of use, the leases.
//
// A unit is in exactly one state: free (no known content), cached (content known, nobody refers to it), held (referred to)
// or leased (nobody refers to it, but a running step may still see it); an id given up by a resize is no unit of the pool
// until it grows again. 12 bytes a unit; the lists of cached units (eviction_order.hpp) and the stack of those given up are
// linked through the units themselves, and which are free is a set of bits (free_units.hpp): the record of a free unit says
// nothing. Units never handed out are not even written: a pool costs nothing to create. Every unit that is not free counts
// in one account; this is kept once accounts or retentions are used.
//
// What it is not: a judge. What goes along with an evicted unit, and what a lease's end makes of a unit, the block manager
// decides.
//
//   P1  the counts of the four states add up to the number of units
//   P2  held units are those with references
//   P3  an account's counts are those of its units
//
// Cost: O(1) a call but for what eviction_order.hpp and free_units.hpp say. Only `ensure_lease_room`, `ensure_ids`,
// `start_marking` and `slot_of` can fail.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/eviction_order.hpp"
#include "core/free_units.hpp"
#include "core/prefix_tree.hpp"
#include "core/slab.hpp"
#include "core/unit_record.hpp"

namespace quire {

enum class UnitState { free, cached, held, leased, given_up };

class Pool {
public:
    // run: ids of a run, a power of two; see free_units.hpp.
    Pool(std::int64_t num_units, std::int64_t run);

    std::int64_t num_units() const noexcept { return num_ids_ - num_given_up_; }
    std::int64_t num_ids() const noexcept { return num_ids_; }  // of units and of those given up
    std::int64_t num_given_up() const noexcept { return num_given_up_; }
    std::int64_t num_free() const noexcept { return free_.size(); }
    std::int64_t num_cached() const noexcept { return num_cached_; }
    std::int64_t num_leased() const noexcept { return num_leased_; }
    std::int64_t num_held() const noexcept { return num_units() - num_free() - num_cached_ - num_leased_; }

    UnitState state(UnitId unit) const noexcept;
    std::int32_t num_refs(UnitId unit) const noexcept { return is_free(unit) ? 0 : refs(units_[index(unit)]); }
    NodeId node(UnitId unit) const noexcept { return is_free(unit) ? kNone : units_[index(unit)].node; }
    void set_node(UnitId unit, NodeId node) noexcept { units_[index(unit)].node = node; }

    // Hands out a free unit with one reference and no node, to count in the account: for a block at `position` behind the
    // one that has `before` (kNone: none). Needs num_free() > 0.
    UnitId take(std::int32_t slot, std::int32_t retention, UnitId before, std::int64_t position) noexcept;
    // One reference more; the unit's retention is raised to this one.
    void hold(UnitId unit, std::int32_t retention) noexcept;
    // Counts a reference less, and again more, while a step is being planned; the states do not follow.
    void discount(UnitId unit) noexcept { --units_[index(unit)].next; }
    void recount(UnitId unit) noexcept { ++units_[index(unit)].next; }
    // Drops a reference; whether it was the last. Then the unit is in no state until one of the next three is called.
    bool release(UnitId unit) noexcept { return --units_[index(unit)].next == 0; }
    void make_free(UnitId unit) noexcept;
    void make_cached(UnitId unit) noexcept;  // as the most recently used
    void lease(UnitId unit, std::int64_t step) noexcept;

    // A cached unit out of the list; it is in no state until the next call.
    void take_out(UnitId unit) noexcept;

    // Accounts and the order of eviction.
    bool is_marked() const noexcept { return order_.is_marked(); }
    void start_marking() {
        order_.start_marking(units_, num_ids_, free_.num_touched(), num_units() - num_free(), num_cached_, num_leased_);
    }
    std::int32_t slot_of(std::int32_t number) { return order_.slot_of(number); }
    EvictionOrder& order() noexcept { return order_; }
    const EvictionOrder& order() const noexcept { return order_; }
    // Begins a call whose needs are set: the units it could be given.
    std::int64_t begin_call() noexcept {
        return num_free() + (order_.is_marked() ? order_.begin_call() : num_cached_);
    }
    // Counts a cached unit that leaves in this call.
    void charge(UnitId unit) noexcept {
        if (order_.is_marked()) --order_.account_of(unit).budget;
    }
    bool may_lose(UnitId unit) noexcept { return !order_.is_marked() || order_.account_of(unit).budget > 0; }

    // The lowest free unit leaves the pool. Needs num_free() > 0.
    UnitId give_up() noexcept;
    // Room for `num_ids` ids.
    void ensure_ids(std::int64_t num_ids) {
        units_.ensure(static_cast<std::size_t>(num_ids), static_cast<std::size_t>(free_.num_touched()));
        order_.ensure_units(num_ids, free_.num_touched());
        free_.ensure(num_ids);
    }
    // Has `num_units` units: those given up last come back first, then there are new ones. Needs room.
    void grow(std::int64_t num_units) noexcept;

    void ensure_lease_room(std::size_t more) { leases_.ensure_room(more); }
    // Ends the oldest lease of a step up to `step` and returns its unit (in no state), or kNone. Call until it is kNone.
    UnitId end_lease(std::int64_t step) noexcept;

    // Every unit that is not leased is free again (what was given up stays so); no unit has a node. No unit may be held.
    void clear() noexcept;
    std::size_t capacity_bytes() const noexcept {
        return units_.capacity_bytes() + order_.capacity_bytes() + free_.capacity_bytes();
    }
    // Proves P1 to P3 and the lists; throws InvariantBroken.
    void check() const;
    std::vector<std::int64_t> times() const { return order_.times(units_, num_ids_, num_cached_); }

private:
    // What a record's `previous` says where it is not the link of a list.
    static constexpr UnitId kLeased = -3;
    static constexpr UnitId kGivenUp = -4;
    static constexpr UnitId kHeld = -5;  // `next` counts its references

    struct Lease {
        std::int64_t step;
        UnitId unit;
        std::int32_t stamp;
    };

    static std::size_t index(UnitId unit) noexcept { return static_cast<std::size_t>(unit); }
    static std::int32_t refs(const UnitRecord& record) noexcept { return record.previous == kHeld ? record.next : 0; }
    bool is_free(UnitId unit) const noexcept { return free_.contains(unit); }

    std::int64_t num_ids_;
    std::int64_t num_given_up_ = 0;
    std::int64_t num_cached_ = 0;
    std::int64_t num_leased_ = 0;
    Slab<UnitRecord> units_;
    EvictionOrder order_;
    FreeUnits free_;
    UnitId given_up_top_ = kNone;
    std::int32_t next_stamp_ = 0;
    Ring<Lease> leases_;
};

}  // namespace quire
