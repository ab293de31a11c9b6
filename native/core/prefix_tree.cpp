// See prefix_tree.hpp.
#include "core/prefix_tree.hpp"

#include <algorithm>
#include <cstring>

#include "core/invariant.hpp"

namespace quire {

namespace {

// Length of the common prefix of two runs of tokens. Eight bytes at a time: blocks may be 512 tokens long.
std::size_t num_equal(const Token* a, const Token* b, std::size_t count) noexcept {
    std::size_t at = 0;
    for (; at + 2 <= count; at += 2) {
        std::uint64_t left;
        std::uint64_t right;
        std::memcpy(&left, a + at, 8);
        std::memcpy(&right, b + at, 8);
        if (left != right) break;
    }
    while (at < count && a[at] == b[at]) ++at;
    return at;
}

// Number of leading positions with equal keys in two runs (which describe `count` positions from `a_start` and
// `b_start`).
std::size_t num_equal_keys(std::span<const ExtraKey> a, std::int64_t a_start, std::span<const ExtraKey> b,
                           std::int64_t b_start, std::size_t count) noexcept {
    for (std::size_t at = 0;; ++at) {
        const bool a_ends = at == a.size();
        const bool b_ends = at == b.size();
        const auto a_offset = a_ends ? count : std::min(count, static_cast<std::size_t>(a[at].position - a_start));
        const auto b_offset = b_ends ? count : std::min(count, static_cast<std::size_t>(b[at].position - b_start));
        if (a_offset != b_offset) return std::min(a_offset, b_offset);
        if (a_offset == count) return count;
        if (a[at].value != b[at].value) return a_offset;
    }
}

const std::string* key_at(std::span<const ExtraKey> keys, std::int64_t position) noexcept {
    for (const ExtraKey& key : keys)
        if (key.position == position) return &key.value;
    return nullptr;
}

}  // namespace

PrefixTree::PrefixTree(std::int32_t block_size, const std::vector<std::int32_t>& column_starts,
                       std::size_t num_nodes_expected)
    : block_size_(block_size),
      num_columns_(static_cast<std::int32_t>(column_starts.size())),
      starts_(column_starts),
      nodes_(num_nodes_expected),
      tokens_(num_nodes_expected * static_cast<std::size_t>(block_size)),
      blocks_(num_nodes_expected * column_starts.size()) {}

void PrefixTree::ensure_room(std::size_t more, std::size_t more_with_keys) {
    // The stack of free records is not subtracted: the estimate is too high by its size.
    const std::size_t used = index(num_used_records_);
    nodes_.ensure(used + more, used);
    tokens_.ensure((used + more) * static_cast<std::size_t>(block_size_), used * static_cast<std::size_t>(block_size_));
    blocks_.ensure((used + more) * static_cast<std::size_t>(num_columns_), used * static_cast<std::size_t>(num_columns_));
    if (next_id_ >= 0) ids_.ensure(used + more, used);
    if (more_with_keys != 0) keys_.reserve(keys_.size() + more_with_keys);
}

void PrefixTree::start_numbering() {
    if (next_id_ >= 0) return;
    const std::vector<NodeId> nodes = all_nodes();
    ids_ = Slab<std::int64_t>(nodes_.capacity());
    next_id_ = 0;
    for (const NodeId node : nodes) ids_[index(node)] = next_id_++;
}

PrefixTree::StagedKeys PrefixTree::stage_keys(const BlockView& block) {
    if (block.keys.empty()) return {};
    KeyTable table;
    auto& keys = table.emplace(kNone, std::vector<ExtraKey>(block.keys.begin(), block.keys.end())).first->second;
    for (ExtraKey& key : keys) key.position -= block.start;
    return table.extract(table.begin());
}

NodeId PrefixTree::find_root(std::string_view name) const noexcept {
    const auto found = roots_.find(name);
    return found == roots_.end() ? kNone : found->second;
}

NodeId PrefixTree::make_root(std::string_view name) {
    const NodeId known = find_root(name);
    if (known != kNone) return known;
    ensure_room(1, 0);
    std::string key(name);
    const NodeId root = free_ != kNone ? free_ : num_used_records_;
    const auto place = roots_.emplace(std::move(key), root).first;
    try {
        root_places_.emplace(root, place);
    } catch (...) {
        roots_.erase(place);
        throw;
    }
    take_record();
    nodes_[index(root)] = {kNone, kNone, kNone, kNone, 0, 1, 1, 0};
    std::fill_n(&blocks_[slot(root, 0)], num_columns_, kNone);
    return root;
}

int PrefixTree::compare(const BlockView& block, NodeId node) const noexcept {
    ++num_visited_;
    const auto other = tokens(node);
    const std::size_t shorter = std::min(block.tokens.size(), other.size());
    const std::size_t same_tokens = num_equal(block.tokens.data(), other.data(), shorter);
    const auto other_keys = keys(node);
    if (!block.keys.empty() || !other_keys.empty()) {
        const std::size_t same_keys = num_equal_keys(block.keys, block.start, other_keys, 0, shorter);
        if (same_keys < same_tokens) {
            const auto offset = static_cast<std::int64_t>(same_keys);
            const std::string* ours = key_at(block.keys, block.start + offset);
            const std::string* theirs = key_at(other_keys, offset);
            if (ours == nullptr || theirs == nullptr) return ours == nullptr ? -1 : 1;
            return *ours < *theirs ? -1 : 1;
        }
    }
    if (same_tokens < shorter) return block.tokens[same_tokens] < other[same_tokens] ? -1 : 1;
    if (block.tokens.size() == other.size()) return 0;
    return block.tokens.size() < other.size() ? -1 : 1;
}

std::int32_t PrefixTree::num_common(NodeId node, const BlockView& block) const noexcept {
    const auto other = tokens(node);
    const std::size_t shorter = std::min(block.tokens.size(), other.size());
    std::size_t common = num_equal(block.tokens.data(), other.data(), shorter);
    const auto other_keys = keys(node);
    if (!block.keys.empty() || !other_keys.empty())
        common = std::min(common, num_equal_keys(block.keys, block.start, other_keys, 0, shorter));
    return static_cast<std::int32_t>(common);
}

void PrefixTree::prefetch_tokens(NodeId node) const noexcept {
#if defined(__GNUC__)
    const Token* const first = &tokens_[index(node) * static_cast<std::size_t>(block_size_)];
    for (std::int32_t at = 0; at < std::min(block_size_, 128); at += 16) __builtin_prefetch(first + at);
#endif
}

Neighbours PrefixTree::find(NodeId parent, const BlockView& block) const noexcept {
    Neighbours found;
    for (NodeId at = nodes_[index(parent)].child; at != kNone;) {
        const int order = compare(block, at);
        if (order == 0) {
            found.equal = at;
            return found;
        }
        if (order < 0) {
            found.after = at;
            at = nodes_[index(at)].left;
        } else {
            found.before = at;
            at = nodes_[index(at)].right;
        }
    }
    return found;
}

std::pair<NodeId, std::int32_t> PrefixTree::longest(const Neighbours& near, const BlockView& block) const noexcept {
    if (near.equal != kNone) return {near.equal, static_cast<std::int32_t>(block.tokens.size())};
    const std::int32_t before = near.before == kNone ? 0 : num_common(near.before, block);
    const std::int32_t after = near.after == kNone ? 0 : num_common(near.after, block);
    if (before == 0 && after == 0) return {kNone, 0};
    return before > after ? std::pair{near.before, before} : std::pair{near.after, after};
}

std::pair<NodeId, std::int32_t> PrefixTree::longest_whole(const Neighbours& near, const BlockView& block,
                                                          std::int64_t& left) const noexcept {
    std::pair<NodeId, std::int32_t> best{kNone, 0};
    // Whether to continue with the next sibling on this side: the common prefix only becomes shorter.
    const auto look = [&](NodeId node) noexcept {
        --left;
        ++num_visited_;
        const std::int32_t common = num_common(node, block);
        if (common <= best.second) return false;
        if (!is_whole(node, common)) return true;
        best = {node, common};
        return false;
    };
    const bool is_there = near.equal != kNone;
    for (NodeId at = is_there ? near.equal : near.after; at != kNone && left != 0 && look(at);) at = next_sibling(at);
    for (NodeId at = is_there ? previous_sibling(near.equal) : near.before; at != kNone && left != 0 && look(at);)
        at = previous_sibling(at);
    return best;
}

bool PrefixTree::is_covered(const Neighbours& near, const BlockView& block) const noexcept {
    if (near.equal != kNone) return true;
    return near.after != kNone && num_common(near.after, block) == static_cast<std::int32_t>(block.tokens.size());
}

NodeId PrefixTree::insert(NodeId parent, const BlockView& block, StagedKeys&& keys) noexcept {
    const NodeId node = take_record();
    nodes_[index(node)] = {kNone, kNone, kNone, kNone, 0, 0, 0, 0};
    write_tokens(node, block);
    std::fill_n(&blocks_[slot(node, 0)], num_columns_, kNone);
    if (next_id_ >= 0) ids_[index(node)] = next_id_++;
    put_keys(node, std::move(keys));
    attach(parent, node, block);
    ++num_nodes_;
    return node;
}

void PrefixTree::extend(NodeId node, const BlockView& whole, StagedKeys&& keys) noexcept {
    const Node& record = nodes_[index(node)];
    const bool is_only_child = record.is_top && record.left == kNone && record.right == kNone;
    const NodeId below = is_only_child ? kNone : parent(node);
    if (!is_only_child) detach(node);
    write_tokens(node, whole);
    if (!keys.empty()) {
        keys_.erase(node);
        put_keys(node, std::move(keys));
    }
    if (!is_only_child) attach(below, node, whole);
}

NodeId PrefixTree::remove(NodeId node) noexcept {
    NodeId emptied = kNone;
    if (is_root(node)) {
        const auto place = root_places_.find(node);
        roots_.erase(place->second);
        root_places_.erase(place);
    } else {
        const NodeId up = nodes_[index(node)].is_top ? nodes_[index(node)].up : kNone;
        detach(node);
        if (up != kNone && nodes_[index(up)].child == kNone) emptied = up;
        if (!keys_.empty()) keys_.erase(node);
        --num_nodes_;
    }
    nodes_[index(node)].left = free_;
    free_ = node;
    return emptied;
}

void PrefixTree::clear() noexcept {
    keys_.clear();
    roots_.clear();
    root_places_.clear();
    free_ = kNone;
    num_used_records_ = 0;
    num_nodes_ = 0;
}

NodeId PrefixTree::parent(NodeId node) const noexcept {
    while (!nodes_[index(node)].is_top) node = nodes_[index(node)].up;
    return nodes_[index(node)].up;
}

NodeId PrefixTree::next_sibling(NodeId node) const noexcept {
    NodeId at = nodes_[index(node)].right;
    if (at != kNone) {
        while (nodes_[index(at)].left != kNone) at = nodes_[index(at)].left;
        return at;
    }
    for (at = node; !nodes_[index(at)].is_top; at = nodes_[index(at)].up)
        if (nodes_[index(nodes_[index(at)].up)].left == at) return nodes_[index(at)].up;
    return kNone;
}

NodeId PrefixTree::previous_sibling(NodeId node) const noexcept {
    NodeId at = nodes_[index(node)].left;
    if (at != kNone) {
        while (nodes_[index(at)].right != kNone) at = nodes_[index(at)].right;
        return at;
    }
    for (at = node; !nodes_[index(at)].is_top; at = nodes_[index(at)].up)
        if (nodes_[index(nodes_[index(at)].up)].right == at) return nodes_[index(at)].up;
    return kNone;
}

void PrefixTree::add_end(NodeId node) noexcept {
    if (nodes_[index(node)].num_ends < kMaxEnds) nodes_[index(node)].num_ends += 1;
}

void PrefixTree::drop_end(NodeId node) noexcept {
    if (nodes_[index(node)].num_ends < kMaxEnds) nodes_[index(node)].num_ends -= 1;
}

bool PrefixTree::is_whole(NodeId node, std::int32_t num_tokens) const noexcept {
    for (std::int32_t column = 0; column < num_columns_; ++column)
        if (block_id(node, column) == kNone && starts_[index(column)] < num_tokens) return false;
    return true;
}

bool PrefixTree::is_bare(NodeId node) const noexcept {
    const Node& record = nodes_[index(node)];
    if (record.child != kNone || record.num_ends != 0) return false;
    for (std::int32_t column = 0; column < num_columns_; ++column)
        if (block_id(node, column) != kNone) return false;
    return true;
}

std::span<const Token> PrefixTree::tokens(NodeId node) const noexcept {
    return {tokens_.data() + index(node) * static_cast<std::size_t>(block_size_), nodes_[index(node)].num_tokens};
}

std::span<const ExtraKey> PrefixTree::keys(NodeId node) const noexcept {
    if (keys_.empty()) return {};
    const auto found = keys_.find(node);
    return found == keys_.end() ? std::span<const ExtraKey>{} : found->second;
}

std::size_t PrefixTree::capacity_bytes() const noexcept {
    return nodes_.capacity_bytes() + tokens_.capacity_bytes() + blocks_.capacity_bytes() + ids_.capacity_bytes();
}

// A priority that is a fixed function of the record costs no memory; siblings come in any order of records.
std::uint32_t PrefixTree::priority(NodeId node) noexcept {
    auto mixed = static_cast<std::uint32_t>(node) * 0x9E3779B1u;
    mixed ^= mixed >> 15;
    mixed *= 0x85EBCA77u;
    return mixed ^ (mixed >> 13);
}

bool PrefixTree::stands_above(NodeId a, NodeId b) noexcept { return priority(a) > priority(b); }

NodeId PrefixTree::take_record() noexcept {
    if (free_ == kNone) return num_used_records_++;
    const NodeId node = free_;
    free_ = nodes_[index(node)].left;
    return node;
}

void PrefixTree::write_tokens(NodeId node, const BlockView& block) noexcept {
    std::copy(block.tokens.begin(), block.tokens.end(), &tokens_[index(node) * static_cast<std::size_t>(block_size_)]);
    nodes_[index(node)].num_tokens = static_cast<std::uint32_t>(block.tokens.size()) & 0x1FFF;
}

void PrefixTree::put_keys(NodeId node, StagedKeys&& keys) noexcept {
    if (keys.empty()) return;
    keys.key() = node;
    keys_.insert(std::move(keys));
}

void PrefixTree::attach(NodeId parent, NodeId node, const BlockView& block) noexcept {
    const Neighbours near = find(parent, block);
    if (near.before == kNone && near.after == kNone) {
        nodes_[index(node)].up = parent;
        nodes_[index(node)].is_top = 1;
        nodes_[index(parent)].child = node;
        return;
    }
    // In a search tree, one of two neighbours is below the other, and the lower one has the free link between them.
    const bool right_of_before = near.before != kNone && nodes_[index(near.before)].right == kNone;
    const NodeId up = right_of_before ? near.before : near.after;
    (right_of_before ? nodes_[index(up)].right : nodes_[index(up)].left) = node;
    nodes_[index(node)].up = up;
    while (!nodes_[index(node)].is_top && stands_above(node, nodes_[index(node)].up)) rotate_up(node);
}

void PrefixTree::detach(NodeId node) noexcept {
    Node& record = nodes_[index(node)];
    while (record.left != kNone && record.right != kNone)
        rotate_up(stands_above(record.left, record.right) ? record.left : record.right);
    replace_link(node, record.left != kNone ? record.left : record.right);
    record.left = record.right = kNone;
    record.is_top = 0;
}

// Replaces the link down to `node` by `by` (which may be kNone).
void PrefixTree::replace_link(NodeId node, NodeId by) noexcept {
    const Node& record = nodes_[index(node)];
    Node& above = nodes_[index(record.up)];
    if (record.is_top) {
        above.child = by;
    } else {
        (above.left == node ? above.left : above.right) = by;
    }
    if (by != kNone) {
        nodes_[index(by)].up = record.up;
        nodes_[index(by)].is_top = record.is_top;
    }
}

void PrefixTree::rotate_up(NodeId node) noexcept {
    Node& record = nodes_[index(node)];
    const NodeId up = record.up;
    Node& above = nodes_[index(up)];
    replace_link(up, node);
    NodeId moved;
    if (above.left == node) {
        moved = record.right;
        above.left = moved;
        record.right = up;
    } else {
        moved = record.left;
        above.right = moved;
        record.left = up;
    }
    if (moved != kNone) nodes_[index(moved)].up = up;
    above.up = node;
    above.is_top = 0;
}

}  // namespace quire
