// See pool.hpp.
#include "core/pool.hpp"

#include "core/invariant.hpp"

namespace quire {

Pool::Pool(std::int64_t num_units, std::int64_t run)
    : num_ids_(num_units), units_(static_cast<std::size_t>(num_units)), free_(num_units, run) {}

UnitState Pool::state(UnitId unit) const noexcept {
    if (is_free(unit)) return UnitState::free;
    const UnitRecord& record = units_[index(unit)];
    if (record.previous == kHeld) return UnitState::held;
    if (record.previous == kGivenUp) return UnitState::given_up;
    return record.previous == kLeased ? UnitState::leased : UnitState::cached;
}

UnitId Pool::take(std::int32_t slot, std::int32_t retention, UnitId before, std::int64_t position) noexcept {
    const UnitId unit = free_.take(before, position);
    units_[index(unit)] = {kHeld, 1, kNone};
    if (order_.is_marked()) order_.own(unit, slot, retention);
    return unit;
}

void Pool::hold(UnitId unit, std::int32_t retention) noexcept {
    UnitRecord& record = units_[index(unit)];
    if (record.previous == kHeld) {
        ++record.next;
    } else {
        if (record.previous == kLeased) {
            --num_leased_;  // its entry in the queue is recognised as stale by the state or the stamp
            if (order_.is_marked()) --order_.account_of(unit).num_leased;
        } else {
            take_out(unit);
        }
        record.previous = kHeld;
        record.next = 1;
    }
    if (order_.is_marked()) order_.raise(unit, retention);
}

void Pool::make_free(UnitId unit) noexcept {
    if (order_.is_marked()) order_.disown(unit);
    free_.add(unit);
}

UnitId Pool::give_up() noexcept {
    const UnitId unit = free_.take_lowest();
    units_[index(unit)] = {kGivenUp, given_up_top_, kNone};
    given_up_top_ = unit;
    ++num_given_up_;
    return unit;
}

void Pool::grow(std::int64_t num_units) noexcept {
    while (this->num_units() < num_units && given_up_top_ != kNone) {
        const UnitId unit = given_up_top_;
        given_up_top_ = units_[index(unit)].next;
        --num_given_up_;
        free_.add(unit);
    }
    const std::int64_t num_new = num_units - this->num_units();
    if (num_new <= 0) return;
    num_ids_ += num_new;
    free_.grow(num_ids_);
}

void Pool::make_cached(UnitId unit) noexcept {
    order_.append(units_, unit);
    ++num_cached_;
}

void Pool::take_out(UnitId unit) noexcept {
    order_.remove(units_, unit);
    --num_cached_;
}

void Pool::lease(UnitId unit, std::int64_t step) noexcept {
    UnitRecord& record = units_[index(unit)];
    record.previous = kLeased;
    record.next = next_stamp_;
    leases_.push({step, unit, next_stamp_});
    next_stamp_ = (next_stamp_ + 1) & 0x7FFFFFFF;
    ++num_leased_;
    if (order_.is_marked()) ++order_.account_of(unit).num_leased;
}

UnitId Pool::end_lease(std::int64_t step) noexcept {
    while (!leases_.empty() && leases_.front().step <= step) {
        const Lease lease = leases_.front();
        leases_.pop();
        if (state(lease.unit) != UnitState::leased || units_[index(lease.unit)].next != lease.stamp) continue;
        --num_leased_;
        if (order_.is_marked()) --order_.account_of(lease.unit).num_leased;
        return lease.unit;
    }
    return kNone;
}

void Pool::clear() noexcept {
    order_.clear();
    num_cached_ = 0;
    if (num_leased_ == 0) {
        while (!leases_.empty()) leases_.pop();
        if (num_given_up_ == 0) return free_.fill();
    }
    for (UnitId unit = 0; unit < free_.num_touched(); ++unit) {
        if (is_free(unit) || state(unit) == UnitState::given_up) continue;
        if (state(unit) == UnitState::leased) {
            units_[index(unit)].node = kNone;
        } else {
            free_.add(unit);
        }
    }
}

void Pool::check() const {
    const auto text = [](auto number) { return std::to_string(number); };
    std::int64_t counts[5] = {num_ids_ - free_.num_touched(), 0, 0, 0, 0};
    for (UnitId unit = 0; unit < free_.num_touched(); ++unit) {
        ++counts[static_cast<int>(state(unit))];
        prove(state(unit) != UnitState::held || num_refs(unit) > 0, "C3", "unit " + text(unit) + " has " + text(num_refs(unit)) + " references");
    }
    prove(counts[0] == num_free() && counts[1] == num_cached_ && counts[2] == num_held() && counts[3] == num_leased_ &&
              counts[4] == num_given_up_, "C1",
          "free " + text(counts[0]) + ", cached " + text(counts[1]) + ", held " + text(counts[2]) + ", leased " +
              text(counts[3]) + " found; free " + text(num_free()) + ", cached " + text(num_cached_) + ", held " +
              text(num_held()) + ", leased " + text(num_leased_) + " counted");
    const std::vector<std::int64_t> listed = times();
    for (UnitId unit = 0; unit < num_ids_; ++unit)
        prove(listed[index(unit)] < 0 || state(unit) == UnitState::cached, "C5",
              "unit " + text(unit) + " is in a list of cached units and not cached");
    if (order_.is_marked()) {
        std::vector<std::int64_t> owned(order_.accounts().size(), 0);
        std::vector<std::int64_t> leased(order_.accounts().size(), 0);
        std::unordered_map<std::int32_t, std::size_t> slots;
        for (std::size_t slot = 0; slot < owned.size(); ++slot) slots[order_.accounts()[slot].number] = slot;
        for (UnitId unit = 0; unit < free_.num_touched(); ++unit) {
            const UnitState now = state(unit);
            if (now == UnitState::free || now == UnitState::given_up) continue;
            ++owned[slots.at(order_.number_of(unit))];
            if (now == UnitState::leased) ++leased[slots.at(order_.number_of(unit))];
        }
        for (std::size_t slot = 0; slot < owned.size(); ++slot) {
            const Account& account = order_.accounts()[slot];
            prove(owned[slot] == account.num_owned && leased[slot] == account.num_leased, "C9",
                  "account " + text(account.number) + " counts " + text(account.num_owned) + " units, " +
                      text(account.num_leased) + " leased; " + text(owned[slot]) + " and " + text(leased[slot]) + " found");
        }
    }
    free_.check();
    std::int64_t num_listed_given_up = 0;
    for (UnitId unit = given_up_top_; unit != kNone; unit = units_[index(unit)].next, ++num_listed_given_up) {
        prove(state(unit) == UnitState::given_up && num_listed_given_up < num_given_up_, "C1",
              "unit " + text(unit) + " is among the " + text(num_given_up_) + " given up and is not");
    }
    prove(num_listed_given_up == num_given_up_, "C1", text(num_listed_given_up) + " units found given up, " + text(num_given_up_) + " counted");
}

}  // namespace quire
