// See pool.hpp.
#include "core/pool.hpp"

#include "core/invariant.hpp"

namespace quire {

Pool::Pool(std::int64_t num_blocks, std::int64_t run, bool counts_uses)
    : num_ids_(num_blocks),
      blocks_(static_cast<std::size_t>(num_blocks)),
      order_(counts_uses),
      free_(num_blocks, run) {}

BlockState Pool::state(BlockId block_id) const noexcept {
    if (is_free(block_id)) return BlockState::free;
    const BlockRecord& record = blocks_[index(block_id)];
    if (record.previous == kHeld) return BlockState::held;
    if (record.previous == kGivenUp) return BlockState::given_up;
    return record.previous == kInFlight ? BlockState::in_flight : BlockState::cached;
}

BlockId Pool::take(std::int32_t slot, std::int32_t cache_priority, BlockId before, std::int64_t position) noexcept {
    const BlockId block_id = free_.take(before, position);
    blocks_[index(block_id)] = {kHeld, 1, kNone, 0, 1};
    if (order_.is_marked()) order_.own(block_id, slot, cache_priority);
    return block_id;
}

void Pool::hold(BlockId block_id, std::int32_t cache_priority) noexcept {
    BlockRecord& record = blocks_[index(block_id)];
    if (record.previous == kHeld) {
        ++record.next;
    } else {
        if (record.previous == kInFlight) {
            --num_in_flight_;  // its entry in the queue is recognised as stale by the state or the stamp
            if (order_.is_marked()) --order_.owner_of(block_id).num_in_flight;
        } else {
            take_out(block_id);
        }
        record.previous = kHeld;
        record.next = 1;
    }
    if (order_.is_marked()) order_.raise(block_id, cache_priority);
}

void Pool::make_free(BlockId block_id) noexcept {
    if (order_.is_marked()) order_.disown(block_id);
    free_.add(block_id);
}

BlockId Pool::give_up() noexcept {
    const BlockId block_id = free_.take_lowest();
    blocks_[index(block_id)] = {kGivenUp, given_up_top_, kNone, 0, 1};
    given_up_top_ = block_id;
    ++num_given_up_;
    return block_id;
}

void Pool::grow(std::int64_t num_blocks) noexcept {
    while (this->num_blocks() < num_blocks && given_up_top_ != kNone) {
        const BlockId block_id = given_up_top_;
        given_up_top_ = blocks_[index(block_id)].next;
        --num_given_up_;
        free_.add(block_id);
    }
    const std::int64_t num_new = num_blocks - this->num_blocks();
    if (num_new <= 0) return;
    num_ids_ += num_new;
    free_.grow(num_ids_);
}

void Pool::make_cached(BlockId block_id) noexcept {
    order_.append(blocks_, block_id);
    ++num_cached_;
}

void Pool::take_out(BlockId block_id) noexcept {
    order_.remove(blocks_, block_id);
    --num_cached_;
}

void Pool::flight(BlockId block_id, std::int64_t step) noexcept {
    BlockRecord& record = blocks_[index(block_id)];
    record.previous = kInFlight;
    record.next = next_stamp_;
    flights_.push({step, block_id, next_stamp_});
    next_stamp_ = (next_stamp_ + 1) & 0x7FFFFFFF;
    ++num_in_flight_;
    if (order_.is_marked()) ++order_.owner_of(block_id).num_in_flight;
}

BlockId Pool::set_cache_priority(BlockId block_id, std::int32_t cache_priority, BlockId near) noexcept {
    const bool is_cached = state(block_id) == BlockState::cached;
    if (is_cached) order_.remove(blocks_, block_id);
    order_.mark(block_id, cache_priority);
    if (is_cached) order_.insert(blocks_, block_id, near);
    return is_cached ? block_id : near;
}

BlockId Pool::end_flight(std::int64_t step) noexcept {
    while (!flights_.empty() && flights_.front().step <= step) {
        const Flight flight = flights_.front();
        flights_.pop();
        if (state(flight.block_id) != BlockState::in_flight || blocks_[index(flight.block_id)].next != flight.stamp) continue;
        --num_in_flight_;
        if (order_.is_marked()) --order_.owner_of(flight.block_id).num_in_flight;
        return flight.block_id;
    }
    return kNone;
}

void Pool::clear() noexcept {
    order_.clear();
    num_cached_ = 0;
    if (num_in_flight_ == 0) {
        while (!flights_.empty()) flights_.pop();
        if (num_given_up_ == 0) return free_.fill();
    }
    for (BlockId block_id = 0; block_id < free_.num_touched(); ++block_id) {
        if (is_free(block_id) || state(block_id) == BlockState::given_up) continue;
        if (state(block_id) == BlockState::in_flight) {
            blocks_[index(block_id)].node = kNone;
        } else {
            free_.add(block_id);
        }
    }
}

void Pool::check() const {
    const auto text = [](auto number) { return std::to_string(number); };
    std::int64_t counts[5] = {num_ids_ - free_.num_touched(), 0, 0, 0, 0};
    for (BlockId block_id = 0; block_id < free_.num_touched(); ++block_id) {
        ++counts[static_cast<int>(state(block_id))];
        prove(state(block_id) != BlockState::held || num_refs(block_id) > 0, "C3", "block " + text(block_id) + " has " + text(num_refs(block_id)) + " references");
    }
    prove(counts[0] == num_free() && counts[1] == num_cached_ && counts[2] == num_held() && counts[3] == num_in_flight_ &&
              counts[4] == num_given_up_, "C1",
          "free " + text(counts[0]) + ", cached " + text(counts[1]) + ", held " + text(counts[2]) + ", in flight " +
              text(counts[3]) + " found; free " + text(num_free()) + ", cached " + text(num_cached_) + ", held " +
              text(num_held()) + ", in flight " + text(num_in_flight_) + " counted");
    const std::vector<std::int64_t> listed = times();
    for (BlockId block_id = 0; block_id < num_ids_; ++block_id)
        prove(listed[index(block_id)] < 0 || state(block_id) == BlockState::cached, "C5",
              "block " + text(block_id) + " is in a list of cached blocks and not cached");
    if (order_.is_marked()) {
        std::vector<std::int64_t> owned(order_.owner_ids().size(), 0);
        std::vector<std::int64_t> in_flight(order_.owner_ids().size(), 0);
        std::unordered_map<std::int32_t, std::size_t> slots;
        for (std::size_t slot = 0; slot < owned.size(); ++slot) slots[order_.owner_ids()[slot].number] = slot;
        for (BlockId block_id = 0; block_id < free_.num_touched(); ++block_id) {
            const BlockState now = state(block_id);
            if (now == BlockState::free || now == BlockState::given_up) continue;
            ++owned[slots.at(order_.number_of(block_id))];
            if (now == BlockState::in_flight) ++in_flight[slots.at(order_.number_of(block_id))];
        }
        for (std::size_t slot = 0; slot < owned.size(); ++slot) {
            const Owner& owner_id = order_.owner_ids()[slot];
            prove(owned[slot] == owner_id.num_owned && in_flight[slot] == owner_id.num_in_flight, "C9",
                  "owner " + text(owner_id.number) + " counts " + text(owner_id.num_owned) + " blocks, " +
                      text(owner_id.num_in_flight) + " in flight; " + text(owned[slot]) + " and " + text(in_flight[slot]) + " found");
        }
    }
    free_.check();
    std::int64_t num_listed_given_up = 0;
    for (BlockId block_id = given_up_top_; block_id != kNone; block_id = blocks_[index(block_id)].next, ++num_listed_given_up) {
        prove(state(block_id) == BlockState::given_up && num_listed_given_up < num_given_up_, "C1",
              "block " + text(block_id) + " is among the " + text(num_given_up_) + " given up and is not");
    }
    prove(num_listed_given_up == num_given_up_, "C1", text(num_listed_given_up) + " blocks found given up, " + text(num_given_up_) + " counted");
}

}  // namespace quire
