// See eviction_order.hpp.
#include "core/eviction_order.hpp"

#include <algorithm>
#include <string>

#include "core/invariant.hpp"

namespace quire {

namespace {

// By number of uses: 60 / (uses + 1), so that quotients of ages are compared in integers.
constexpr std::uint64_t kShares[kMaxUses + 1] = {0, 30, 20, 15, 12, 10};

}  // namespace

void EvictionOrder::start_marking(std::int64_t num_ids, std::int64_t num_touched, std::int64_t num_blocks,
                                  std::int64_t num_cached, std::int64_t num_in_flight) {
    if (is_marked_) return;
    marks_ = Slab<Mark>(static_cast<std::size_t>(num_ids));
    std::fill_n(marks_.data(), num_touched, Mark{0, kNormal});
    Owner& nobody = owners_.front();
    nobody.num_owned = num_blocks;
    nobody.num_cached = num_cached;
    nobody.num_in_flight = num_in_flight;
    is_marked_ = true;
}

void EvictionOrder::ensure_blocks(std::int64_t num_ids, std::int64_t num_touched) {
    if (is_marked_) marks_.ensure(static_cast<std::size_t>(num_ids), static_cast<std::size_t>(num_touched));
}

std::int32_t EvictionOrder::slot_of(std::int32_t number) {
    if (number == 0) return 0;
    const auto found = slots_.find(number);
    if (found != slots_.end()) return found->second;
    Owner owner_id;
    owner_id.number = number;
    owners_.push_back(owner_id);
    const auto slot = static_cast<std::int32_t>(owners_.size()) - 1;
    try {
        slots_.emplace(number, slot);
    } catch (...) {
        owners_.pop_back();
        throw;
    }
    return slot;
}

const Owner* EvictionOrder::find(std::int32_t number) const noexcept {
    if (number == 0) return &owners_.front();
    const auto found = slots_.find(number);
    return found == slots_.end() ? nullptr : &owners_[static_cast<std::size_t>(found->second)];
}

void EvictionOrder::own(BlockId block_id, std::int32_t slot, std::int32_t cache_priority) noexcept {
    marks_[index(block_id)] = {static_cast<std::uint16_t>(slot), static_cast<std::uint16_t>(cache_priority)};
    ++owner_id(slot).num_owned;
}

void EvictionOrder::raise(BlockId block_id, std::int32_t cache_priority) noexcept {
    Mark& mark = marks_[index(block_id)];
    mark.cache_priority = std::max(mark.cache_priority, static_cast<std::uint16_t>(cache_priority));
}

void EvictionOrder::append(Slab<BlockRecord>& block_ids, BlockId block_id) noexcept {
    BlockRecord& record = block_ids[index(block_id)];
    BlockList& list = list_of(record, block_id);
    record.previous = list.back;
    record.next = kNone;
    (list.back == kNone ? list.front : block_ids[index(list.back)].next) = block_id;
    list.back = block_id;
    record.time = static_cast<std::uint32_t>(clock_++ & kTimeMask);
    if (is_marked_) ++owner_of(block_id).num_cached;
}

void EvictionOrder::insert(Slab<BlockRecord>& block_ids, BlockId block_id, BlockId near) noexcept {
    BlockRecord& record = block_ids[index(block_id)];
    BlockList& list = list_of(record, block_id);
    const bool is_near = near != kNone && &list_of(block_ids[index(near)], near) == &list;
    const auto next_of = [&](BlockId at) { return at == kNone ? list.front : block_ids[index(at)].next; };
    const auto is_older = [&](BlockId at) { return age_of(block_ids[index(at)]) > age_of(record); };
    BlockId before = is_near ? near : list.back;
    while (before != kNone && !is_older(before)) before = block_ids[index(before)].previous;
    while (next_of(before) != kNone && is_older(next_of(before))) before = next_of(before);
    const BlockId after = next_of(before);
    record.previous = before;
    record.next = after;
    (before == kNone ? list.front : block_ids[index(before)].next) = block_id;
    (after == kNone ? list.back : block_ids[index(after)].previous) = block_id;
    if (is_marked_) ++owner_of(block_id).num_cached;
}

void EvictionOrder::remove(Slab<BlockRecord>& block_ids, BlockId block_id) noexcept {
    const BlockRecord& record = block_ids[index(block_id)];
    BlockList& list = list_of(record, block_id);
    (record.previous == kNone ? list.front : block_ids[index(record.previous)].next) = record.next;
    (record.next == kNone ? list.back : block_ids[index(record.next)].previous) = record.previous;
    if (is_marked_) --owner_of(block_id).num_cached;
}

void EvictionOrder::clear() noexcept {
    for (Owner& owner_id : owners_) {
        for (auto& lists : owner_id.cached) std::fill_n(lists, kMaxUses, BlockList{});
        owner_id.num_cached = 0;
        owner_id.num_owned = owner_id.num_in_flight;
    }
}

void EvictionOrder::clear_needs() noexcept {
    for (Owner& owner_id : owners_) owner_id.need = 0;
}

std::int64_t EvictionOrder::begin_call() noexcept {
    std::int64_t num_evictable = 0;
    for (Owner& owner_id : owners_) {
        owner_id.budget = owner_id.need + std::max<std::int64_t>(0, owner_id.num_owned - owner_id.floor);
        num_evictable += std::min(owner_id.num_cached, owner_id.budget);
    }
    return num_evictable;
}

// lists: kMaxUses of them, by number of uses.
void EvictionOrder::Oldest::add(const BlockList* lists) noexcept {
    const std::uint32_t num_lists = order_.counts_uses_ ? kMaxUses : 1;
    for (std::uint32_t uses = 1; uses <= num_lists; ++uses) {
        const BlockId front = lists[uses - 1].front;
        if (front == kNone) continue;
        const std::uint64_t age = order_.age_of(block_ids_[index(front)]);
        const std::uint64_t share = age * kShares[uses];
        if (block_id_ != kNone && (share < share_ || (share == share_ && age < age_))) continue;
        block_id_ = front;
        share_ = share;
        age_ = age;
    }
}

BlockId EvictionOrder::first_of(const Slab<BlockRecord>& block_ids, const Owner& owner_id) const noexcept {
    for (const auto& lists : owner_id.cached) {
        Oldest oldest(*this, block_ids);
        oldest.add(lists);
        if (oldest.block_id() != kNone) return oldest.block_id();
    }
    return kNone;
}

BlockId EvictionOrder::first(const Slab<BlockRecord>& block_ids, bool of_all) const noexcept {
    for (std::int32_t cache_priority = is_marked_ ? 0 : kNormal; cache_priority < kNumPriorities; ++cache_priority) {
        Oldest oldest(*this, block_ids);
        for (const Owner& owner_id : owners_)
            if (!is_marked_ || of_all || owner_id.budget > 0) oldest.add(owner_id.cached[cache_priority]);
        if (oldest.block_id() != kNone || !is_marked_) return oldest.block_id();
    }
    return kNone;
}

std::vector<std::int64_t> EvictionOrder::times(const Slab<BlockRecord>& block_ids, std::int64_t num_ids,
                                               std::int64_t num_cached) const {
    const auto text = [](auto number) { return std::to_string(number); };
    std::vector<std::int64_t> times(static_cast<std::size_t>(num_ids), -1);
    std::int64_t num_listed = 0;
    for (const Owner& owner_id : owners_) {
        const std::int64_t before = num_listed;
        for (std::int32_t at = 0; at < kNumPriorities * static_cast<std::int32_t>(kMaxUses); ++at) {
            const std::int32_t cache_priority = at / static_cast<std::int32_t>(kMaxUses);
            const std::uint32_t uses = static_cast<std::uint32_t>(at) % kMaxUses + 1;
            const BlockList& list = owner_id.cached[cache_priority][uses - 1];
            BlockId previous = kNone;
            std::int64_t last = -1;
            for (BlockId block_id = list.front; block_id != kNone; previous = block_id, block_id = block_ids[index(block_id)].next) {
                const BlockRecord& record = block_ids[index(block_id)];
                const auto time = static_cast<std::int64_t>(clock_ - age_of(record));
                prove(num_listed < num_cached, "C5", "the lists are longer than " + text(num_cached) + " cached blocks");
                prove(record.previous == previous, "C5", "block " + text(block_id) + " is linked back wrongly");
                prove(time > last, "C5", "block " + text(block_id) + " was let go before the one before it in its list");
                prove(!is_marked_ || (number_of(block_id) == owner_id.number && cache_priority_of(block_id) == cache_priority), "C9",
                      "block " + text(block_id) + " is in the list of owner " + text(owner_id.number) + ", cache priority " +
                          text(cache_priority));
                prove(record.uses == uses, "C5",
                      "block " + text(block_id) + " of " + text(record.uses) + " uses is in the list of " + text(uses));
                times[index(block_id)] = last = time;
                ++num_listed;
            }
            prove(list.back == previous, "C5", "a list ends in block " + text(list.back) + ", not " + text(previous));
        }
        prove(!is_marked_ || num_listed - before == owner_id.num_cached, "C9",
              "owner " + text(owner_id.number) + " counts " + text(owner_id.num_cached) + " cached blocks, its lists hold " +
                  text(num_listed - before));
    }
    prove(num_listed == num_cached, "C5", text(num_listed) + " blocks in the lists, " + text(num_cached) + " cached");
    return times;
}

}  // namespace quire
