// See pool.hpp.
#include "core/pool.hpp"

#include "core/invariant.hpp"

namespace quire {

Pool::Pool(std::int64_t num_units)
    : num_ids_(num_units), num_free_(num_units), units_(static_cast<std::size_t>(num_units)) {}

UnitState Pool::state(UnitId unit) const noexcept {
    if (is_fresh(unit)) return UnitState::free;
    const Unit& record = units_[index(unit)];
    if (record.refs > 0) return UnitState::held;
    if (record.previous == kInFreeStack) return UnitState::free;
    if (record.previous == kGivenUp) return UnitState::given_up;
    return record.previous == kLeased ? UnitState::leased : UnitState::cached;
}

UnitId Pool::take() noexcept {
    --num_free_;
    UnitId unit = free_top_;
    if (unit != kNone) {
        free_top_ = units_[index(unit)].next;
    } else {
        unit = num_touched_++;
    }
    units_[index(unit)] = {1, kNone, kNone, kNone};
    return unit;
}

void Pool::hold(UnitId unit) noexcept {
    Unit& record = units_[index(unit)];
    if (record.refs++ > 0) return;
    if (record.previous == kLeased) {
        --num_leased_;  // its entry in the queue is recognised as stale by the stamp
    } else {
        take_out(unit);
    }
}

void Pool::make_free(UnitId unit) noexcept {
    units_[index(unit)] = {0, kInFreeStack, free_top_, kNone};
    free_top_ = unit;
    ++num_free_;
}

UnitId Pool::give_up() noexcept {
    const UnitId unit = take();
    units_[index(unit)] = {0, kGivenUp, given_up_top_, kNone};
    given_up_top_ = unit;
    ++num_given_up_;
    return unit;
}

void Pool::grow(std::int64_t num_units) noexcept {
    while (this->num_units() < num_units && given_up_top_ != kNone) {
        const UnitId unit = given_up_top_;
        given_up_top_ = units_[index(unit)].next;
        --num_given_up_;
        make_free(unit);
    }
    const std::int64_t num_new = num_units - this->num_units();
    if (num_new <= 0) return;
    num_ids_ += num_new;
    num_free_ += num_new;
}

void Pool::make_cached(UnitId unit) noexcept {
    Unit& record = units_[index(unit)];
    record.previous = lru_back_;
    record.next = kNone;
    (lru_back_ == kNone ? lru_front_ : units_[index(lru_back_)].next) = unit;
    lru_back_ = unit;
    ++num_cached_;
}

void Pool::take_out(UnitId unit) noexcept {
    const Unit& record = units_[index(unit)];
    (record.previous == kNone ? lru_front_ : units_[index(record.previous)].next) = record.next;
    (record.next == kNone ? lru_back_ : units_[index(record.next)].previous) = record.previous;
    --num_cached_;
}

void Pool::lease(UnitId unit, std::int64_t step) noexcept {
    Unit& record = units_[index(unit)];
    record.previous = kLeased;
    record.next = next_stamp_;
    leases_.push({step, unit, next_stamp_});
    next_stamp_ = (next_stamp_ + 1) & 0x7FFFFFFF;
    ++num_leased_;
}

UnitId Pool::end_lease(std::int64_t step) noexcept {
    while (!leases_.empty() && leases_.front().step <= step) {
        const Lease lease = leases_.front();
        leases_.pop();
        if (state(lease.unit) != UnitState::leased || units_[index(lease.unit)].next != lease.stamp) continue;
        --num_leased_;
        return lease.unit;
    }
    return kNone;
}

void Pool::clear() noexcept {
    lru_front_ = lru_back_ = free_top_ = kNone;
    num_cached_ = 0;
    num_free_ = num_units() - num_leased_;
    if (num_leased_ == 0 && num_given_up_ == 0) {
        num_touched_ = 0;
        while (!leases_.empty()) leases_.pop();
        return;
    }
    num_free_ = num_ids_ - num_touched_;
    for (UnitId unit = num_touched_ - 1; unit >= 0; --unit) {
        if (state(unit) == UnitState::given_up) continue;
        if (state(unit) == UnitState::leased) {
            units_[index(unit)].node = kNone;
        } else {
            make_free(unit);
        }
    }
}

void Pool::check() const {
    const auto text = [](auto number) { return std::to_string(number); };
    std::int64_t counts[5] = {num_ids_ - num_touched_, 0, 0, 0, 0};
    for (UnitId unit = 0; unit < num_touched_; ++unit) {
        ++counts[static_cast<int>(state(unit))];
        prove(units_[index(unit)].refs >= 0, "C3", "unit " + text(unit) + " has " + text(num_refs(unit)) + " references");
    }
    prove(counts[0] == num_free_ && counts[1] == num_cached_ && counts[2] == num_held() && counts[3] == num_leased_ &&
              counts[4] == num_given_up_, "C1",
          "free " + text(counts[0]) + ", cached " + text(counts[1]) + ", held " + text(counts[2]) + ", leased " +
              text(counts[3]) + " found; free " + text(num_free_) + ", cached " + text(num_cached_) + ", held " +
              text(num_held()) + ", leased " + text(num_leased_) + " counted");
    std::int64_t num_listed = 0;
    UnitId previous = kNone;
    for (UnitId unit = lru_front_; unit != kNone; previous = unit, unit = units_[index(unit)].next, ++num_listed) {
        prove(state(unit) == UnitState::cached, "C5", "unit " + text(unit) + " is in the LRU list and not cached");
        prove(units_[index(unit)].previous == previous, "C5", "unit " + text(unit) + " is linked back wrongly");
        prove(num_listed < num_cached_, "C5", "the LRU list is longer than " + text(num_cached_) + " cached units");
    }
    prove(num_listed == num_cached_ && lru_back_ == previous, "C5",
          text(num_listed) + " units in the LRU list, " + text(num_cached_) + " cached");
    std::int64_t num_stacked = num_ids_ - num_touched_;
    for (UnitId unit = free_top_; unit != kNone; unit = units_[index(unit)].next, ++num_stacked) {
        prove(state(unit) == UnitState::free, "C1", "unit " + text(unit) + " is in the free stack and not free");
        prove(num_stacked < num_free_, "C1", "the free stack is longer than " + text(num_free_) + " free units");
    }
    prove(num_stacked == num_free_, "C1", text(num_stacked) + " units in the free stack, " + text(num_free_) + " free");
    std::int64_t num_listed_given_up = 0;
    for (UnitId unit = given_up_top_; unit != kNone; unit = units_[index(unit)].next, ++num_listed_given_up) {
        prove(state(unit) == UnitState::given_up && num_listed_given_up < num_given_up_, "C1",
              "unit " + text(unit) + " is among the " + text(num_given_up_) + " given up and is not");
    }
    prove(num_listed_given_up == num_given_up_, "C1", text(num_listed_given_up) + " units found given up, " + text(num_given_up_) + " counted");
}

}  // namespace quire
