// Which cached unit is given up next, and whose it is: the lists of cached units, and the accounts.
//
// Lowest retention first (0 discard, 1 normal, 2 keep), then least recently used. There is a list for each account and
// retention, linked through the units' own records, least recently used first; a time on each unit makes one order of the
// lists of all accounts. Of the accounts only those are asked that may lose a unit in the call under way: `budget` says
// how many, need + max(0, owned - floor) (quire.cache.accounts has the reasons).
//
// While nobody has used an account or another retention than normal there is one list, and nothing is kept of a unit but
// its links. `start_marking` ends that, for good: 8 bytes more a unit.
//
// What it is not: the states of units (pool.hpp), or the judge of what goes along with a unit (the block manager).
//
//   E1  each list holds cached units of its account and retention, and the times in it rise
//   E2  an account's counts are those of its units
//
// Cost: O(1) to append and to remove, O(accounts) to find the first and to begin a call. `start_marking`, `slot_of` and
// `ensure_units` can fail.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/slab.hpp"
#include "core/unit_record.hpp"

namespace quire {

inline constexpr std::int32_t kDiscard = 0;
inline constexpr std::int32_t kNormal = 1;
inline constexpr std::int32_t kNumRetentions = 3;
inline constexpr std::int64_t kNoQuota = -1;

struct UnitList {
    UnitId front = kNone;
    UnitId back = kNone;
};

struct Account {
    std::int32_t number = 0;
    std::int64_t floor = 0;
    std::int64_t quota = kNoQuota;
    std::int64_t num_owned = 0;  // held + cached + leased
    std::int64_t num_cached = 0;
    std::int64_t num_leased = 0;
    std::int64_t need = 0;    // of the call under way
    std::int64_t budget = 0;  // cached units it may still lose in it
    UnitList cached[kNumRetentions];

    // What it may take before its quota, its cached units given up.
    std::int64_t room(std::int64_t num_units) const noexcept {
        return quota == kNoQuota ? num_units : quota - num_owned + num_cached;
    }
};

class EvictionOrder {
public:
    EvictionOrder() : accounts_(1) {}

    bool is_marked() const noexcept { return is_marked_; }
    // From now on units have accounts and retentions. So far all are nobody's and normal: `num_units` of them that are not
    // free, of which `num_leased` are leased and `num_cached` in the list; ids from `num_touched` on have no record yet.
    void start_marking(const Slab<UnitRecord>& units, std::int64_t num_ids, std::int64_t num_touched,
                       std::int64_t num_units, std::int64_t num_cached, std::int64_t num_leased);
    void ensure_units(std::int64_t num_ids, std::int64_t num_touched);

    // Accounts by slot; slot 0 is account 0, nobody's.
    std::int32_t slot_of(std::int32_t number);
    const Account* find(std::int32_t number) const noexcept;
    Account& account(std::int32_t slot) noexcept { return accounts_[static_cast<std::size_t>(slot)]; }
    std::span<const Account> accounts() const noexcept { return accounts_; }
    Account& account_of(UnitId unit) noexcept { return accounts_[marks_[index(unit)].account]; }
    std::int32_t number_of(UnitId unit) const noexcept {
        return is_marked_ ? accounts_[marks_[index(unit)].account].number : 0;
    }
    std::int32_t retention_of(UnitId unit) const noexcept {
        return is_marked_ ? static_cast<std::int32_t>(marks_[index(unit)].retention) : kNormal;
    }

    // Of a unit just handed out, which counts in the account from now on.
    void own(UnitId unit, std::int32_t slot, std::int32_t retention) noexcept;
    void disown(UnitId unit) noexcept { --account_of(unit).num_owned; }
    // Of a unit that is not cached.
    void raise(UnitId unit, std::int32_t retention) noexcept;

    void append(Slab<UnitRecord>& units, UnitId unit) noexcept;
    void remove(Slab<UnitRecord>& units, UnitId unit) noexcept;
    void clear() noexcept;

    // Begins a call: budgets by what the accounts need. Units that may be evicted in it.
    void clear_needs() noexcept;
    std::int64_t begin_call() noexcept;
    // The unit to go next, of the accounts that have a budget, or of all; kNone if there is none.
    UnitId first(bool of_all) const noexcept;
    UnitId first_of(const Account& account) const noexcept;

    std::size_t capacity_bytes() const noexcept { return marks_.capacity_bytes(); }
    // The time of each cached unit by unit id, -1 for others; proves E1 and E2's counts of cached units.
    std::vector<std::int64_t> times(const Slab<UnitRecord>& units, std::int64_t num_ids, std::int64_t num_cached) const;

private:
    struct Mark {
        std::uint64_t time : 46;  // when it was cached, in units cached so far
        std::uint64_t account : 16;
        std::uint64_t retention : 2;
    };
    static_assert(sizeof(Mark) == 8);

    static std::size_t index(UnitId unit) noexcept { return static_cast<std::size_t>(unit); }
    UnitList& list_of(UnitId unit) noexcept {
        if (!is_marked_) return accounts_.front().cached[kNormal];
        const Mark mark = marks_[index(unit)];
        return accounts_[mark.account].cached[mark.retention];
    }

    bool is_marked_ = false;
    std::uint64_t clock_ = 0;
    Slab<Mark> marks_;
    std::vector<Account> accounts_;
    std::unordered_map<std::int32_t, std::int32_t> slots_;  // of accounts but 0
};

}  // namespace quire
