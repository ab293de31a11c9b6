// A log of the changes of the prefix tree's full nodes, in order, until it is taken; quire.cache.events defines the
// kinds.
//
// Off at first. While on, an event costs its blocks, and a stored one a copy of its block's tokens and keys. Callers
// make room before any change (`ensure_room`, `name_index`); then adding an event cannot fail.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/eviction_order.hpp"
#include "core/prefix_tree.hpp"

namespace quire {

struct Event {
    enum class Kind : std::int32_t { stored, removed, cleared };
    enum class Reason : std::int32_t { none, evicted, forgotten, quota };

    Kind kind;
    Reason reason = Reason::none;
    std::int64_t node = -1;
    std::int64_t parent = -1;
    std::int32_t owner_id = 0;
    std::int32_t name = -1;  // index of the namespace
    std::int32_t cache_priority = kNormal;  // the highest of the blocks: of stored those told of, of removed the node's
};

// The key of a position in the block of an event.
struct EventKey {
    std::int64_t event;
    ExtraKey key;
};

struct EventBatch {
    std::vector<Event> events;
    std::vector<BlockId> block_ids;   // [events, columns]
    std::vector<Token> tokens;   // [stored events, block size]
    std::vector<EventKey> keys;
    std::vector<std::string> names;
};

class EventLog {
public:
    EventLog(std::int32_t block_size, std::int32_t num_columns)
        : block_size_(static_cast<std::size_t>(block_size)), num_columns_(static_cast<std::size_t>(num_columns)) {}

    bool is_on() const noexcept { return is_on_; }
    void turn_on() noexcept { is_on_ = true; }
    void turn_off() noexcept {
        is_on_ = false;
        batch_ = {};
    }

    void ensure_room(std::size_t num_events, std::size_t num_stored, std::size_t num_keys) {
        grow(batch_.events, num_events);
        grow(batch_.block_ids, num_events * num_columns_);
        grow(batch_.tokens, num_stored * block_size_);
        grow(batch_.keys, num_keys);
    }

    std::int32_t name_index(std::string_view name) {
        // Successive events nearly always have the same namespace.
        const auto found = std::find(batch_.names.rbegin(), batch_.names.rend(), name);
        if (found != batch_.names.rend()) return static_cast<std::int32_t>(batch_.names.rend() - found) - 1;
        batch_.names.emplace_back(name);
        return static_cast<std::int32_t>(batch_.names.size()) - 1;
    }

    // The event's blocks, all kNone, for the caller to fill.
    BlockId* add(const Event& event) noexcept {
        batch_.events.push_back(event);
        batch_.block_ids.resize(batch_.block_ids.size() + num_columns_, kNone);
        return batch_.block_ids.data() + batch_.block_ids.size() - num_columns_;
    }

    // Adds the block of the latest event; the keys' positions count from its start.
    void add_block(std::span<const Token> tokens, std::vector<ExtraKey>&& keys) noexcept {
        batch_.tokens.insert(batch_.tokens.end(), tokens.begin(), tokens.end());
        for (ExtraKey& key : keys)
            batch_.keys.push_back({static_cast<std::int64_t>(batch_.events.size()) - 1, std::move(key)});
    }

    std::int64_t size() const noexcept { return static_cast<std::int64_t>(batch_.events.size()); }
    EventBatch take() noexcept { return std::exchange(batch_, {}); }

private:
    template <class T>
    static void grow(std::vector<T>& values, std::size_t more) {
        const std::size_t wanted = values.size() + more;
        if (wanted > values.capacity()) values.reserve(std::max(wanted, 2 * values.capacity()));
    }

    bool is_on_ = false;
    std::size_t block_size_;
    std::size_t num_columns_;
    EventBatch batch_;
};

}  // namespace quire
