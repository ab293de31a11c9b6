// Ghosts: hashes of content that was evicted a short time ago, with the number of its uses.
//
// A fixed table of 16 bits an entry (13 of the hash, 3 of the uses), two entries a block of the pool. A bucket is 8
// entries, the latest first; a new one drops the oldest of its bucket. About one look-up in 1 000 finds an entry of other
// content, which costs a place in the order of eviction, never a wrong hit.
//
// src/quire/cache/manager/ghosts.py is the same table, bit by bit, and has the reasons.
//
// Cost: O(tokens of a node) a call, for the hash; 4 bytes a block, of which unused parts take no memory. Only the
// constructor and `grow` can fail.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "core/prefix_tree.hpp"

namespace quire {

class Ghosts {
public:
    Ghosts(std::int64_t num_blocks, std::int64_t node_tokens) {
        make(num_blocks);
        multipliers_.reserve(static_cast<std::size_t>(node_tokens));
        for (std::int64_t at = 1; at <= node_tokens; ++at) {
            std::uint64_t value = static_cast<std::uint64_t>(at) * 0x9E3779B97F4A7C15u;
            value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
            value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
            multipliers_.push_back((value ^ (value >> 31)) | 1);
        }
    }

    // A new, empty table once the pool has more than twice the blocks the table was made for.
    void grow(std::int64_t num_blocks) {
        if (num_blocks > 2 * num_blocks_) make(num_blocks);
    }
    void clear() noexcept {
        num_pending_ = 0;
        if (!is_empty_) std::memset(entries_.get(), 0, capacity_bytes());
        is_empty_ = true;
    }

    // The content of a full node is evicted; its block was used so often (1 .. 7).
    void add(const BlockView& content, std::uint32_t uses) noexcept {
        const std::uint64_t value = hash(content);
#if defined(__GNUC__)
        __builtin_prefetch(bucket_of(value), 1);
#endif
        pending_[num_pending_++] = {value, uses};
        if (num_pending_ == kPending) write_pending();
        is_empty_ = false;
    }
    // Takes the latest entry of the content out; its uses, 0 without an entry.
    std::uint32_t pop(const BlockView& content) noexcept {
        if (is_empty_) return 0;
        write_pending();
        const std::uint64_t value = hash(content);
        std::uint16_t* const bucket = bucket_of(value);
        for (std::size_t at = 0; at < kEntries; ++at) {
            if (bucket[at] >> 3 != fingerprint(value)) continue;
            const std::uint32_t uses = bucket[at] & 7;
            std::memmove(bucket + at, bucket + at + 1, (kEntries - 1 - at) * sizeof(std::uint16_t));
            bucket[kEntries - 1] = 0;
            return uses;
        }
        return 0;
    }

    std::size_t capacity_bytes() const noexcept { return num_buckets_ * kEntries * sizeof(std::uint16_t); }

private:
    static constexpr std::size_t kEntries = 8;  // of a bucket

    static constexpr std::size_t kPending = 16;

    struct Entry {
        std::uint64_t value;
        std::uint32_t uses;
    };
    struct Free {
        void operator()(void* pointer) const noexcept { std::free(pointer); }
    };

    void make(std::int64_t num_blocks) {
        const auto num_buckets = (static_cast<std::uint64_t>(num_blocks) + 3) / 4;
        void* const memory = std::calloc(num_buckets * kEntries, sizeof(std::uint16_t));  // zeros without a page
        if (memory == nullptr) throw std::bad_alloc();
        entries_.reset(static_cast<std::uint16_t*>(memory));
        num_buckets_ = num_buckets;
        num_blocks_ = num_blocks;
        num_pending_ = 0;
        is_empty_ = true;
    }

    void write_pending() noexcept {
        for (std::size_t at = 0; at < num_pending_; ++at) {
            std::uint16_t* const bucket = bucket_of(pending_[at].value);
            std::memmove(bucket + 1, bucket, (kEntries - 1) * sizeof(std::uint16_t));
            bucket[0] = static_cast<std::uint16_t>(fingerprint(pending_[at].value) << 3 | pending_[at].uses);
        }
        num_pending_ = 0;
    }

    std::uint64_t hash(const BlockView& content) const noexcept {
        std::uint64_t value = 0;
        for (std::size_t at = 0; at < content.tokens.size(); ++at)
            value += (static_cast<std::uint64_t>(content.tokens[at]) << 1) * multipliers_[at];
        for (const ExtraKey& key : content.keys) {
            std::uint64_t hashed = 0xCBF29CE484222325u;
            for (const char byte : key.value) hashed = (hashed ^ static_cast<unsigned char>(byte)) * 0x100000001B3u;
            value += hashed * multipliers_[static_cast<std::size_t>(key.position - content.start)];
        }
        return value;
    }
    std::uint16_t* bucket_of(std::uint64_t value) const noexcept {
        return entries_.get() + ((value >> 32) * num_buckets_ >> 32) * kEntries;
    }
    static std::uint32_t fingerprint(std::uint64_t value) noexcept {
        const auto bits = static_cast<std::uint32_t>(value >> 16) & 0x1FFF;
        return bits == 0 ? 1 : bits;
    }

    std::unique_ptr<std::uint16_t, Free> entries_;
    std::uint64_t num_buckets_ = 0;
    std::int64_t num_blocks_ = 0;  // that it was made for
    bool is_empty_ = true;
    // New entries, written together: their buckets lie anywhere in memory and are fetched meanwhile.
    Entry pending_[kPending];
    std::size_t num_pending_ = 0;
    std::vector<std::uint64_t> multipliers_;  // of the positions of a node
};

}  // namespace quire
