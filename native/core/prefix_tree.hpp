// The prefix tree: maps token sequences to the blocks of their KV.
//
// A node stands for 1..block_size token ids below its parent and has one block id per column (node_shape.hpp), or a hole. Only
// a full node has children. A root stands for a namespace and has no tokens. The tree compares tokens, never hashes; where
// a position has an extra key (an image, say), the element compared is (token, key), no key before any key.
//
// Not an owner of blocks: it stores their ids; the block manager counts and frees them.
//
// Shape in memory: 20 bytes a node, its tokens and blocks in separate slabs. Nodes are handed out from a stack, so a
// path inserted at once lies in adjacent records and a walk streams. The children of a node are a treap in the order of
// their (token, key) sequences, a prefix before what it begins, linked through the nodes themselves: no allocation, and
// the sibling with the longest common prefix is a neighbour of the insertion point.
//
//   T1  siblings are in strict order
//   T2  only a full node or a root has children
//   T3  the priority of a treap node is not below its children's
//
// Cost: find O(log siblings) comparisons; insert and remove the same, remove without comparing. The caller makes room
// (`ensure_room`, `make_root`, `stage_keys`) before it inserts: then no call can fail.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/slab.hpp"

namespace quire {

using Token = std::int32_t;
using NodeId = std::int32_t;
using BlockId = std::int32_t;
inline constexpr std::int32_t kNone = -1;

// An extra key of a position, in addition to its token. Several keys are sorted by position. In a sequence positions
// count from its start, in a node from the node's first token.
struct ExtraKey {
    std::int64_t position;
    std::string value;

    bool operator==(const ExtraKey&) const = default;
};

// One block's worth of a prompt: the tokens, and the extra keys of these positions (`start` is the first one's).
struct BlockView {
    std::span<const Token> tokens;
    std::span<const ExtraKey> keys;
    std::int64_t start = 0;
};

// The place of a block among the children of a node.
struct Neighbours {
    NodeId equal = kNone;   // the child with exactly these tokens and keys
    NodeId before = kNone;  // the last child that sorts before them
    NodeId after = kNone;   // the first child that sorts after them
};

class PrefixTree {
    using KeyTable = std::unordered_map<NodeId, std::vector<ExtraKey>>;
    using RootTable = std::map<std::string, NodeId, std::less<>>;

public:
    // The keys of a node to be inserted, in separate memory; empty without keys.
    using StagedKeys = KeyTable::node_type;

    // column_starts: the first token of each column in a node.
    PrefixTree(std::int32_t block_size, const std::vector<std::int32_t>& column_starts, std::size_t num_nodes_expected);

    // Makes room for `more` nodes, `more_with_keys` of them with keys.
    void ensure_room(std::size_t more, std::size_t more_with_keys);
    static StagedKeys stage_keys(const BlockView& block);

    NodeId find_root(std::string_view name) const noexcept;
    NodeId make_root(std::string_view name);

    Neighbours find(NodeId parent, const BlockView& block) const noexcept;
    // The neighbour with the longest common prefix with the block (among equals the later one), and the prefix's
    // length.
    std::pair<NodeId, std::int32_t> longest(const Neighbours& near, const BlockView& block) const noexcept;
    // As `longest`, among the children with all blocks of the common prefix. It visits at most `left` children (counted
    // down), outwards from the block's place, to the right first.
    std::pair<NodeId, std::int32_t> longest_whole(const Neighbours& near, const BlockView& block,
                                                  std::int64_t& left) const noexcept;
    std::int32_t num_common(NodeId node, const BlockView& block) const noexcept;
    // Whether a child starts with the whole block, given the block's place among the children.
    bool is_covered(const Neighbours& near, const BlockView& block) const noexcept;

    // Puts a new node below `parent`; its blocks are all kNone. No equal sibling may exist.
    NodeId insert(NodeId parent, const BlockView& block, StagedKeys&& keys) noexcept;
    // Adds tokens to a partial leaf, which may change its place among its siblings.
    void extend(NodeId node, const BlockView& whole, StagedKeys&& keys) noexcept;
    // Takes a childless node out of the tree. Returns its parent if that has no child left, else kNone.
    NodeId remove(NodeId node) noexcept;
    void clear() noexcept;

    NodeId parent(NodeId node) const noexcept;
    NodeId next_sibling(NodeId node) const noexcept;
    NodeId previous_sibling(NodeId node) const noexcept;
    bool is_root(NodeId node) const noexcept { return nodes_[index(node)].is_root; }
    std::int32_t num_tokens(NodeId node) const noexcept { return nodes_[index(node)].num_tokens; }
    bool is_full(NodeId node) const noexcept { return num_tokens(node) == block_size_; }
    std::span<const Token> tokens(NodeId node) const noexcept;
    // Fetches the node's tokens into the processor's cache, for a use some 50 ns later.
    void prefetch_tokens(NodeId node) const noexcept;
    std::span<const ExtraKey> keys(NodeId node) const noexcept;
    BlockView view(NodeId node) const noexcept { return {tokens(node), keys(node), 0}; }
    BlockId block_id(NodeId node, std::int32_t column) const noexcept { return blocks_[slot(node, column)]; }
    void set_block(NodeId node, std::int32_t column, BlockId block_id) noexcept { blocks_[slot(node, column)] = block_id; }

    // Number of sequences whose committed prefix ends in the node. It saturates at kMaxEnds: such a node is never bare.
    void add_end(NodeId node) noexcept;
    void drop_end(NodeId node) noexcept;
    std::int64_t num_ends(NodeId node) const noexcept { return nodes_[index(node)].num_ends; }
    bool is_whole(NodeId node, std::int32_t num_tokens) const noexcept;  // has all blocks of its first tokens
    // No block, no children, no sequence that ends in it.
    bool is_bare(NodeId node) const noexcept;

    std::int64_t num_nodes() const noexcept { return num_nodes_; }
    NodeId num_records() const noexcept { return num_used_records_; }  // every node's number is below it
    std::int64_t num_visited() const noexcept { return num_visited_; }
    std::size_t capacity_bytes() const noexcept;

    // Unique ids of nodes, never reused: from `start_numbering` on (present nodes get theirs in the order of
    // `all_nodes`), 8 bytes a node. -1 before.
    void start_numbering();
    std::int64_t id(NodeId node) const noexcept { return next_id_ < 0 ? -1 : ids_[index(node)]; }

    // All children of a node in order; all roots; all other nodes, parents first. For `check` and the tests.
    std::vector<NodeId> children(NodeId node) const;
    std::vector<NodeId> roots() const;  // in the order of their names
    std::vector<std::string_view> names() const;  // of the roots, likewise
    std::vector<NodeId> all_nodes() const;
    // Checks T1 to T3; throws InvariantBroken.
    void check() const;

private:
    struct Node {
        NodeId up;     // the treap parent, or, for the top of a treap, the tree parent
        NodeId child;  // top of the treap of its children
        NodeId left;
        NodeId right;
        std::uint32_t num_tokens : 13;  // a block's: at most 8191
        std::uint32_t is_top : 1;  // `up` is the tree parent
        std::uint32_t is_root : 1;
        std::uint32_t num_ends : 17;
    };
    static_assert(sizeof(Node) == 20);
    static constexpr std::uint32_t kMaxEnds = (1u << 17) - 1;

    static std::size_t index(NodeId node) noexcept { return static_cast<std::size_t>(node); }
    std::size_t slot(NodeId node, std::int32_t column) const noexcept {
        return index(node) * static_cast<std::size_t>(num_columns_) + static_cast<std::size_t>(column);
    }
    static std::uint32_t priority(NodeId node) noexcept;
    static bool stands_above(NodeId a, NodeId b) noexcept;
    NodeId take_record() noexcept;
    void write_tokens(NodeId node, const BlockView& block) noexcept;
    int compare(const BlockView& block, NodeId node) const noexcept;
    void attach(NodeId parent, NodeId node, const BlockView& block) noexcept;
    void detach(NodeId node) noexcept;
    void replace_link(NodeId node, NodeId by) noexcept;
    void rotate_up(NodeId node) noexcept;
    void put_keys(NodeId node, StagedKeys&& keys) noexcept;

    std::int32_t block_size_;
    std::int32_t num_columns_;
    std::vector<std::int32_t> starts_;  // by column, its first token in a node
    Slab<Node> nodes_;
    Slab<Token> tokens_;
    Slab<BlockId> blocks_;
    Slab<std::int64_t> ids_;
    std::int64_t next_id_ = -1;    // below 0: nodes are not numbered
    NodeId free_ = kNone;          // stack through `left`
    NodeId num_used_records_ = 0;  // records ever handed out
    std::int64_t num_nodes_ = 0;   // without roots
    mutable std::int64_t num_visited_ = 0;
    KeyTable keys_;
    RootTable roots_;
    std::unordered_map<NodeId, RootTable::iterator> root_places_;
};

}  // namespace quire
