// See eviction_order.hpp.
#include "core/eviction_order.hpp"

#include <algorithm>
#include <string>

#include "core/invariant.hpp"

namespace quire {

void EvictionOrder::start_marking(const Slab<UnitRecord>& units, std::int64_t num_ids, std::int64_t num_touched,
                                  std::int64_t num_units, std::int64_t num_cached, std::int64_t num_leased) {
    if (is_marked_) return;
    marks_ = Slab<Mark>(static_cast<std::size_t>(num_ids));
    std::fill_n(marks_.data(), num_touched, Mark{0, 0, static_cast<std::uint64_t>(kNormal)});
    Account& nobody = accounts_.front();
    for (UnitId unit = nobody.cached[kNormal].front; unit != kNone; unit = units[index(unit)].next)
        marks_[index(unit)].time = clock_++ & 0x3FFFFFFFFFFF;
    nobody.num_owned = num_units;
    nobody.num_cached = num_cached;
    nobody.num_leased = num_leased;
    is_marked_ = true;
}

void EvictionOrder::ensure_units(std::int64_t num_ids, std::int64_t num_touched) {
    if (is_marked_) marks_.ensure(static_cast<std::size_t>(num_ids), static_cast<std::size_t>(num_touched));
}

std::int32_t EvictionOrder::slot_of(std::int32_t number) {
    if (number == 0) return 0;
    const auto found = slots_.find(number);
    if (found != slots_.end()) return found->second;
    Account account;
    account.number = number;
    accounts_.push_back(account);
    const auto slot = static_cast<std::int32_t>(accounts_.size()) - 1;
    try {
        slots_.emplace(number, slot);
    } catch (...) {
        accounts_.pop_back();
        throw;
    }
    return slot;
}

const Account* EvictionOrder::find(std::int32_t number) const noexcept {
    if (number == 0) return &accounts_.front();
    const auto found = slots_.find(number);
    return found == slots_.end() ? nullptr : &accounts_[static_cast<std::size_t>(found->second)];
}

void EvictionOrder::own(UnitId unit, std::int32_t slot, std::int32_t retention) noexcept {
    marks_[index(unit)] = {0, static_cast<std::uint16_t>(slot), static_cast<std::uint64_t>(retention) & 3};
    ++account(slot).num_owned;
}

void EvictionOrder::raise(UnitId unit, std::int32_t retention) noexcept {
    Mark& mark = marks_[index(unit)];
    const auto wanted = static_cast<std::uint64_t>(retention) & 3;
    if (wanted > mark.retention) mark.retention = wanted & 3;
}

void EvictionOrder::append(Slab<UnitRecord>& units, UnitId unit) noexcept {
    UnitList& list = list_of(unit);
    UnitRecord& record = units[index(unit)];
    record.previous = list.back;
    record.next = kNone;
    (list.back == kNone ? list.front : units[index(list.back)].next) = unit;
    list.back = unit;
    if (!is_marked_) return;
    marks_[index(unit)].time = clock_++ & 0x3FFFFFFFFFFF;
    ++account_of(unit).num_cached;
}

void EvictionOrder::remove(Slab<UnitRecord>& units, UnitId unit) noexcept {
    UnitList& list = list_of(unit);
    const UnitRecord& record = units[index(unit)];
    (record.previous == kNone ? list.front : units[index(record.previous)].next) = record.next;
    (record.next == kNone ? list.back : units[index(record.next)].previous) = record.previous;
    if (is_marked_) --account_of(unit).num_cached;
}

void EvictionOrder::clear() noexcept {
    for (Account& account : accounts_) {
        std::fill_n(account.cached, kNumRetentions, UnitList{});
        account.num_cached = 0;
        account.num_owned = account.num_leased;
    }
}

void EvictionOrder::clear_needs() noexcept {
    for (Account& account : accounts_) account.need = 0;
}

std::int64_t EvictionOrder::begin_call() noexcept {
    std::int64_t num_evictable = 0;
    for (Account& account : accounts_) {
        account.budget = account.need + std::max<std::int64_t>(0, account.num_owned - account.floor);
        num_evictable += std::min(account.num_cached, account.budget);
    }
    return num_evictable;
}

UnitId EvictionOrder::first_of(const Account& account) const noexcept {
    for (const UnitList& list : account.cached)
        if (list.front != kNone) return list.front;
    return kNone;
}

UnitId EvictionOrder::first(bool of_all) const noexcept {
    if (!is_marked_) return accounts_.front().cached[kNormal].front;
    for (std::int32_t retention = 0; retention < kNumRetentions; ++retention) {
        UnitId best = kNone;
        for (const Account& account : accounts_) {
            const UnitId front = account.cached[retention].front;
            if (front == kNone || (!of_all && account.budget <= 0)) continue;
            if (best == kNone || marks_[index(front)].time < marks_[index(best)].time) best = front;
        }
        if (best != kNone) return best;
    }
    return kNone;
}

std::vector<std::int64_t> EvictionOrder::times(const Slab<UnitRecord>& units, std::int64_t num_ids,
                                               std::int64_t num_cached) const {
    const auto text = [](auto number) { return std::to_string(number); };
    std::vector<std::int64_t> times(static_cast<std::size_t>(num_ids), -1);
    std::int64_t num_listed = 0;
    for (const Account& account : accounts_) {
        const std::int64_t before = num_listed;
        for (std::int32_t retention = 0; retention < kNumRetentions; ++retention) {
            const UnitList& list = account.cached[retention];
            UnitId previous = kNone;
            std::int64_t last = -1;
            for (UnitId unit = list.front; unit != kNone; previous = unit, unit = units[index(unit)].next) {
                const std::int64_t time =
                    is_marked_ ? static_cast<std::int64_t>(marks_[index(unit)].time) : num_listed;
                prove(num_listed < num_cached, "C5", "the lists are longer than " + text(num_cached) + " cached units");
                prove(units[index(unit)].previous == previous, "C5", "unit " + text(unit) + " is linked back wrongly");
                prove(time > last, "C5", "unit " + text(unit) + " was let go before the one before it in its list");
                prove(!is_marked_ || (number_of(unit) == account.number && retention_of(unit) == retention), "C9",
                      "unit " + text(unit) + " is in the list of account " + text(account.number) + ", retention " +
                          text(retention));
                times[index(unit)] = last = time;
                ++num_listed;
            }
            prove(list.back == previous, "C5", "a list ends in unit " + text(list.back) + ", not " + text(previous));
        }
        prove(!is_marked_ || num_listed - before == account.num_cached, "C9",
              "account " + text(account.number) + " counts " + text(account.num_cached) + " cached units, its lists hold " +
                  text(num_listed - before));
    }
    prove(num_listed == num_cached, "C5", text(num_listed) + " units in the lists, " + text(num_cached) + " cached");
    return times;
}

}  // namespace quire
