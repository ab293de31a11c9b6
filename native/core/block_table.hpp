// A sequence's block table in one group: block ids by block, kNone where a window has released one. It only grows at
// its end, so a plan refers to it instead of copying it.
//
// Table entries that a plan can see are never written again: growing writes beyond them, a reallocation leaves the old
// memory to the plan, and a change of an entry in place first copies the table if a plan still refers to it. A plan may
// be read and dropped on any thread.
//
// Cost: publishing a table to a plan is one counter; `prepare` is O(1) amortised, O(entries) when it has to copy.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <utility>

#include "core/prefix_tree.hpp"

namespace quire {

// Reference-counted memory of the entries.
class TableMemory {
public:
    TableMemory() = default;
    explicit TableMemory(std::int32_t capacity)
        : header_(new (::operator new(sizeof(Header) + static_cast<std::size_t>(capacity) * sizeof(BlockId)))
                      Header{1, capacity}) {}
    TableMemory(const TableMemory& other) noexcept : header_(other.header_) {
        if (header_ != nullptr) header_->refs.fetch_add(1, std::memory_order_relaxed);
    }
    TableMemory(TableMemory&& other) noexcept : header_(std::exchange(other.header_, nullptr)) {}
    TableMemory& operator=(TableMemory other) noexcept {
        std::swap(header_, other.header_);
        return *this;
    }
    ~TableMemory() {
        if (header_ == nullptr || header_->refs.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        header_->~Header();
        ::operator delete(header_);
    }

    BlockId* entries() const noexcept { return reinterpret_cast<BlockId*>(header_ + 1); }
    std::int32_t capacity() const noexcept { return header_ == nullptr ? 0 : header_->capacity; }
    bool is_shared() const noexcept {
        return header_ != nullptr && header_->refs.load(std::memory_order_acquire) != 1;
    }

private:
    struct Header {
        std::atomic<std::int32_t> refs;
        std::int32_t capacity;
    };

    Header* header_ = nullptr;
};

// A plan's view of a table.
struct TableView {
    TableMemory memory;
    std::int32_t size = 0;

    std::span<const BlockId> entries() const noexcept {
        return size == 0 ? std::span<const BlockId>{} : std::span{memory.entries(), static_cast<std::size_t>(size)};
    }
};

class BlockTable {
public:
    std::int32_t size() const noexcept { return size_; }
    BlockId operator[](std::int64_t block) const noexcept { return memory_.entries()[block]; }
    std::span<const BlockId> entries() const noexcept {
        return size_ == 0 ? std::span<const BlockId>{}
                          : std::span<const BlockId>{memory_.entries(), static_cast<std::size_t>(size_)};
    }

    // After this, entries from `first_written` on may be set, and the table may grow to `new_size`, without failing.
    void prepare(std::int64_t first_written, std::int64_t new_size) {
        if (new_size <= memory_.capacity() && (first_written >= num_published_ || !memory_.is_shared())) return;
        const std::int64_t wanted = new_size > memory_.capacity() ? new_size + new_size / 2 + 4 : memory_.capacity();
        TableMemory fresh(static_cast<std::int32_t>(wanted));
        if (size_ != 0)
            std::memcpy(fresh.entries(), memory_.entries(), static_cast<std::size_t>(size_) * sizeof(BlockId));
        memory_ = std::move(fresh);
        num_published_ = 0;
    }

    void set(std::int64_t block, BlockId block_id) noexcept { memory_.entries()[block] = block_id; }
    void push(BlockId block_id) noexcept { memory_.entries()[size_++] = block_id; }
    void truncate(std::int64_t size) noexcept { size_ = static_cast<std::int32_t>(size); }

    // The first `size` entries, for a plan.
    TableView publish(std::int64_t size) noexcept {
        if (size > num_published_) num_published_ = static_cast<std::int32_t>(size);
        return {memory_, static_cast<std::int32_t>(size)};
    }

private:
    TableMemory memory_;
    std::int32_t size_ = 0;
    std::int32_t num_published_ = 0;  // a plan may still see entries below this
};

}  // namespace quire
