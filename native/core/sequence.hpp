// A sequence of the block manager: its tokens, its block tables, the number of computed tokens and the end of its
// committed prefix in the tree; and the table of sequences by id.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "core/block_table.hpp"
#include "core/eviction_order.hpp"
#include "core/prefix_tree.hpp"
#include "core/slab.hpp"

namespace quire {

using SequenceId = std::int64_t;

// A hit without a limit.
inline constexpr std::int64_t kNoLimit = std::numeric_limits<std::int32_t>::max();

struct Sequence {
    SequenceId id = 0;
    std::int32_t owner_id = 0;            // slot of the owner its blocks count in
    std::int32_t cache_priority = kNormal;    // blocks it uses are raised to this
    std::int64_t num_computed = 0;
    std::int64_t num_cached = 0;  // taken from the tree
    std::int64_t most_cached = kNoLimit;  // limit of num_cached
    std::int64_t reserved = 0;    // end of the positions that have slots, lookahead included
    // End of a `restore` that is not committed yet, else 0: only then entries beyond num_computed may be kNone.
    std::int64_t restored_to = 0;
    std::int64_t last_call = 0;   // the planning call that saw it last: finds an id given twice
    // The node in which its first num_computed / block_size blocks end; kNone without prefix caching and once it is
    // withdrawn: its commits are not findable then.
    NodeId node = kNone;
    bool is_admitted = false;     // it, or its origin of a fork, has reserved
    bool is_writer = false;       // it may write the blocks of position num_computed in place
    // Entries below this are kNone, in each group: blocks behind a window.
    std::vector<std::int64_t> first_kept;
    std::vector<BlockTable> tables;  // one a group, all up to the same token
    std::vector<Token> tokens;
    std::vector<ExtraKey> keys;
    std::string name;  // namespace
    // The tree's version when it last looked for a longer hit.
    std::int64_t seen_version = -1;
    std::int64_t seen_tokens = -1;

    std::int64_t num_tokens() const noexcept { return static_cast<std::int64_t>(tokens.size()); }
    std::int64_t num_entries() const noexcept {
        std::int64_t count = 0;
        for (const BlockTable& entries : tables) count += entries.size();
        return count;
    }
};

// Open sequences by id: linear probing in a table at most half full. Ids count up, so the low bits spread them evenly.
class SequenceTable {
public:
    std::size_t size() const noexcept { return size_; }

    Sequence* find(SequenceId id) const noexcept {
        if (slots_.empty()) return nullptr;
        for (std::size_t at = home(id);; at = next(at)) {
            if (slots_[at].id == id) return slots_[at].sequence.get();
            if (slots_[at].sequence == nullptr) return nullptr;
        }
    }

    // Makes room for one more sequence; the only call that can fail.
    void ensure_room();
    void insert(std::unique_ptr<Sequence> sequence) noexcept;
    void erase(SequenceId id) noexcept;

    template <class Visit>
    void for_each(Visit&& visit) const {
        for (const Slot& slot : slots_)
            if (slot.sequence != nullptr) visit(*slot.sequence);
    }

private:
    struct Slot {
        SequenceId id = -1;
        std::unique_ptr<Sequence> sequence;
    };

    std::size_t home(SequenceId id) const noexcept { return static_cast<std::size_t>(id) & (slots_.size() - 1); }
    std::size_t next(std::size_t at) const noexcept { return (at + 1) & (slots_.size() - 1); }

    std::vector<Slot> slots_;  // a power of two
    std::size_t size_ = 0;
};

}  // namespace quire
