// See free_blocks.hpp.
#include "core/free_blocks.hpp"

#include <algorithm>
#include <bit>
#include <string>

#include "core/invariant.hpp"

namespace quire {

void IdSet::ensure(std::int64_t num_ids, std::int64_t num_entered) {
    for (Slab<std::uint64_t>& level : levels_) {
        num_ids = (num_ids + 63) >> 6;
        num_entered = (num_entered + 63) >> 6;
        level.ensure(static_cast<std::size_t>(std::max<std::int64_t>(num_ids, 1)), static_cast<std::size_t>(num_entered));
    }
}

void IdSet::enter(std::int64_t id) noexcept {
    for (Slab<std::uint64_t>& level : levels_) {
        if ((id & 63) != 0) return;
        id >>= 6;
        level[static_cast<std::size_t>(id)] = 0;
    }
}

void IdSet::insert(std::int64_t id) noexcept {
    for (Slab<std::uint64_t>& level : levels_) {
        std::uint64_t& bits = level[static_cast<std::size_t>(id >> 6)];
        const bool was_there = bits != 0;
        bits |= std::uint64_t{1} << (id & 63);
        if (was_there) return;
        id >>= 6;
    }
}

void IdSet::erase(std::int64_t id) noexcept {
    for (Slab<std::uint64_t>& level : levels_) {
        std::uint64_t& bits = level[static_cast<std::size_t>(id >> 6)];
        bits &= ~(std::uint64_t{1} << (id & 63));
        if (bits != 0) return;
        id >>= 6;
    }
}

std::int64_t IdSet::first(std::int64_t num_entered) const noexcept {
    if (num_entered == 0 || levels_.back()[0] == 0) return -1;
    std::int64_t at = 0;
    for (std::size_t level = kLevels; level-- > 0;) at = (at << 6) + std::countr_zero(levels_[level][static_cast<std::size_t>(at)]);
    return at;
}

std::size_t IdSet::capacity_bytes() const noexcept {
    std::size_t bytes = 0;
    for (const Slab<std::uint64_t>& level : levels_) bytes += level.capacity_bytes();
    return bytes;
}

FreeBlocks::FreeBlocks(std::int64_t num_ids, std::int64_t run)
    : run_(run), shift_(std::countr_zero(static_cast<std::uint64_t>(run))), num_ids_(num_ids), size_(num_ids) {
    ensure(num_ids);
}

void FreeBlocks::ensure(std::int64_t num_ids) {
    ids_.ensure(num_ids, num_touched_);
    if (run_ == 1) return;
    const std::int64_t num_runs = (num_ids + run_ - 1) >> shift_;
    runs_.ensure(num_runs, num_runs_touched());
    counts_.ensure(static_cast<std::size_t>(num_runs), static_cast<std::size_t>(num_runs_touched()));
}

// Enters ids up to `end`, all free, which begin a run or complete a shortened one.
void FreeBlocks::touch_to(std::int64_t end) noexcept {
    for (; num_touched_ < end; ++num_touched_) {
        if (run_ != 1 && (num_touched_ & (run_ - 1)) == 0) {
            runs_.enter(run_of(num_touched_));
            counts_[static_cast<std::size_t>(run_of(num_touched_))] = 0;
        }
        ids_.enter(num_touched_);
        --size_;  // `add` counts it again
        add(static_cast<BlockId>(num_touched_));
    }
}

// Enters the next run, or a word of ids. Returns false if all ids are entered.
bool FreeBlocks::touch_run() noexcept {
    const std::int64_t step = std::max<std::int64_t>(run_, 64);
    const std::int64_t before = num_touched_;
    touch_to(std::min(num_ids_, (num_touched_ / step + 1) * step));
    return num_touched_ != before;
}

BlockId FreeBlocks::take(BlockId before, std::int64_t position) noexcept {
    if (position == kNone) return take_lowest();
    if (before != kNone) {
        const std::int64_t next = std::int64_t{before} + 1;
        if (next == num_touched_) touch_run();
        if (next < num_touched_ && ids_.contains(next)) {
            remove(static_cast<BlockId>(next));
            return static_cast<BlockId>(next);
        }
    }
    if (run_ != 1) {
        std::int64_t run = runs_.first(num_runs_touched());
        if (run < 0 && num_touched_ + run_ <= num_ids_ && touch_run()) run = runs_.first(num_runs_touched());
        if (run >= 0) {
            const auto block_id = static_cast<BlockId>((run << shift_) + (position & (run_ - 1)));
            remove(block_id);
            return block_id;
        }
    }
    return take_lowest();
}

BlockId FreeBlocks::take_lowest() noexcept {
    std::int64_t block_id = ids_.first(num_touched_);
    if (block_id < 0) {
        block_id = num_touched_;
        touch_run();
    }
    remove(static_cast<BlockId>(block_id));
    return static_cast<BlockId>(block_id);
}

void FreeBlocks::remove(BlockId block_id) noexcept {
    --size_;
    ids_.erase(block_id);
    if (run_ == 1) return;
    if (counts_[static_cast<std::size_t>(run_of(block_id))]-- == run_) runs_.erase(run_of(block_id));
}

void FreeBlocks::add(BlockId block_id) noexcept {
    ++size_;
    ids_.insert(block_id);
    if (run_ == 1) return;
    if (++counts_[static_cast<std::size_t>(run_of(block_id))] == run_) runs_.insert(run_of(block_id));
}

void FreeBlocks::grow(std::int64_t num_ids) noexcept {
    size_ += num_ids - num_ids_;
    num_ids_ = num_ids;
    // The rest of a shortened run.
    const std::int64_t end = num_runs_touched() << shift_;
    if (num_touched_ < end) touch_to(std::min(end, num_ids_));
}

void FreeBlocks::fill() noexcept {
    num_touched_ = 0;
    size_ = num_ids_;
}

void FreeBlocks::check() const {
    const auto text = [](auto number) { return std::to_string(number); };
    std::int64_t found = num_ids_ - num_touched_;
    std::int64_t of_run = 0;
    std::int64_t lowest = -1;
    std::int64_t lowest_run = -1;
    for (std::int64_t block_id = 0; block_id < num_touched_; ++block_id) {
        if ((block_id & (run_ - 1)) == 0) of_run = 0;
        if (ids_.contains(block_id)) {
            ++found;
            ++of_run;
            if (lowest < 0) lowest = block_id;
        }
        if (run_ == 1 || ((block_id + 1) & (run_ - 1)) != 0) continue;
        const std::int64_t run = run_of(block_id);
        prove(counts_[static_cast<std::size_t>(run)] == of_run && runs_.contains(run) == (of_run == run_), "C1",
              "run " + text(run) + " counts " + text(counts_[static_cast<std::size_t>(run)]) + " free blocks, " + text(of_run) + " found");
        if (of_run == run_ && lowest_run < 0) lowest_run = run;
    }
    prove(found == size_, "C1", text(found) + " free blocks found, " + text(size_) + " counted");
    prove(ids_.first(num_touched_) == lowest && (run_ == 1 || runs_.first(num_runs_touched()) == lowest_run), "C1",
          "the lowest free block is " + text(lowest) + " and the lowest free run " + text(lowest_run) + ", others were found");
}

}  // namespace quire
