// Checks C1 to C9 (docs/contracts.md, "The cache") on all of the block manager's state.
//
// Cost: O(blocks + nodes x block size + blocks of all sequences). It allocates, so it may fail, changing nothing.
#include <string>
#include <unordered_map>

#include "core/block_manager.hpp"
#include "core/invariant.hpp"

namespace quire {

namespace {

std::string text(std::int64_t number) { return std::to_string(number); }

}  // namespace

void BlockManager::check() const {
    pool_.check();  // C1, C5: the lists
    tree_.check();  // C6: order and shape
    check_blocks();
    check_nodes();
    sequences_.for_each([this](const Sequence& sequence) { check_sequence(sequence); });
}

void BlockManager::check_blocks() const {
    const auto num_blocks = static_cast<std::size_t>(pool_.num_ids());
    std::vector<std::int32_t> num_named(num_blocks, 0);
    std::int64_t num_admitted = 0;
    sequences_.for_each([&](const Sequence& sequence) {
        num_admitted += sequence.is_admitted ? 1 : 0;
        for (const BlockTable& entries : sequence.tables)
            for (const BlockId block_id : entries.entries())
                if (block_id != kNone) ++num_named[static_cast<std::size_t>(block_id)];
    });
    prove(num_admitted == num_admitted_, "C3",
          text(num_admitted) + " admitted sequences, " + text(num_admitted_) + " counted");
    for (std::size_t at = 0; at < num_blocks; ++at) {
        const auto block_id = static_cast<BlockId>(at);
        prove(num_named[at] == pool_.num_refs(block_id), "C3",
              "block " + text(block_id) + " counts " + text(pool_.num_refs(block_id)) + " references, tables name it " +
                  text(num_named[at]) + " times");
        const NodeId node = pool_.node(block_id);
        const BlockState state = pool_.state(block_id);
        prove(state != BlockState::free || node == kNone, "C2", "free block " + text(block_id) + " belongs to a node");
        prove(state != BlockState::cached || node != kNone, "C5", "cached block " + text(block_id) + " belongs to no node");
        if (node == kNone) continue;
        std::int64_t num_times = 0;
        for (std::int32_t column = 0; column < num_columns(); ++column)
            num_times += tree_.block_id(node, column) == block_id ? 1 : 0;
        prove(num_times == 1, "C2",
              "block " + text(block_id) + " stands " + text(num_times) + " times in node " + text(node));
    }
}

void BlockManager::check_nodes() const {
    std::unordered_map<NodeId, std::int64_t> num_ends;
    sequences_.for_each([&](const Sequence& sequence) {
        if (sequence.node != kNone) ++num_ends[sequence.node];
    });
    std::vector<NodeId> nodes = tree_.all_nodes();
    for (const NodeId root : tree_.roots()) nodes.push_back(root);
    for (const NodeId node : nodes) {
        const std::string name = "node " + text(node);
        const auto ends = num_ends.find(node);
        const std::int64_t expected = ends == num_ends.end() ? 0 : ends->second;
        prove(tree_.num_ends(node) == expected, "C8",
              name + " counts " + text(tree_.num_ends(node)) + " sequences, " + text(expected) + " end in it");
        prove(!tree_.is_bare(node), "C6", name + " is bare");
        for (std::int32_t column = 0; column < num_columns(); ++column) {
            const BlockId block_id = tree_.block_id(node, column);
            if (block_id == kNone) continue;
            prove(shape_.starts[static_cast<std::size_t>(column)] < tree_.num_tokens(node), "C6",
                  name + " of " + text(tree_.num_tokens(node)) + " tokens has a block in column " + text(column));
            prove(pool_.node(block_id) == node, "C2",
                  "block " + text(block_id) + " of " + name + " says it belongs to node " + text(pool_.node(block_id)));
        }
        if (tree_.is_root(node) || tree_.is_full(node) || is_referenced(node)) continue;
        const NodeId next = tree_.next_sibling(node);
        prove(next == kNone || tree_.num_common(next, tree_.view(node)) < tree_.num_tokens(node), "C6",
              name + ", partial and held by nobody, is a prefix of node " + text(next));
    }
    // C5: every full-attention block was released after its node's cached descendants and has at least their uses, and so comes
    // behind them.
    const std::vector<std::int64_t> times = pool_.times();
    for (BlockId block_id = 0; block_id < pool_.num_ids(); ++block_id) {
        const std::int64_t time = times[static_cast<std::size_t>(block_id)];
        if (time < 0) continue;
        const NodeId node = pool_.node(block_id);
        for (std::int32_t column = 0; column < num_columns(); ++column) {
            if (tree_.block_id(node, column) != block_id || !shape_.is_full[static_cast<std::size_t>(column)]) continue;
            for (NodeId up = tree_.parent(node); !tree_.is_root(up); up = tree_.parent(up)) {
                const BlockId above = tree_.block_id(up, column);
                const std::int64_t of_above = above == kNone ? -1 : times[static_cast<std::size_t>(above)];
                prove(of_above < 0 || of_above > time, "C5",
                      "block " + text(above) + " was let go before block " + text(block_id) + " below it");
                prove(above == kNone || pool_.uses(block_id) <= pool_.uses(above), "C5",
                      "block " + text(block_id) + " has " + text(pool_.uses(block_id)) + " uses, block " + text(above) +
                          " above it " + text(pool_.uses(above)));
                if (above != kNone) break;  // the rest follows when the loop reaches that block
            }
        }
    }
}

void BlockManager::check_sequence(const Sequence& sequence) const {
    const std::string name = "sequence " + text(sequence.id);
    const std::int64_t num_computed = sequence.num_computed;
    const std::int64_t partial = num_computed / block_size_;
    const std::int64_t offset = num_computed % block_size_;
    std::int64_t least = INT64_MAX;  // tokens covered by all tables
    for (std::int32_t group = 0; group < num_groups(); ++group)
        least = std::min(least, sequence.tables[static_cast<std::size_t>(group)].size() * shape_of(group).tokens);
    prove(num_computed <= sequence.num_tokens() && num_computed <= sequence.reserved && sequence.reserved <= least,
          "C7",
          name + " has " + text(num_computed) + " computed of " + text(sequence.num_tokens()) + " tokens, " +
              text(sequence.reserved) + " reserved in blocks of " + text(least));
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        const GroupShape& shape = shape_of(group);
        const BlockTable& entries = sequence.tables[static_cast<std::size_t>(group)];
        const std::int64_t first = first_block_needed(group, num_computed);
        prove((entries.size() - 1) * shape.tokens < least, "C7",
              name + " has " + text(entries.size()) + " blocks in group " + text(group) + ", another one's end at token " +
                  text(least));
        for (std::int64_t block = 0; block < entries.size(); ++block) {
            const BlockId block_id = entries[block];
            const std::string where = name + ", group " + text(group) + ", block " + text(block);
            // A restored sequence has no blocks at positions that it never writes.
            const bool may_lack = block * shape.tokens >= num_computed && sequence.restored_to != 0 &&
                                  block < first_block_needed(group, sequence.restored_to);
            prove((block_id == kNone) == (block < first) || may_lack, "C7",
                  where + ": block " + text(block_id) + ", " + text(first) + " is needed first");
            if (block_id == kNone) continue;
            prove(pool_.state(block_id) == BlockState::held, "C2", where + ": block " + text(block_id) + " is not held");
            const NodeId node = pool_.node(block_id);
            if (block * shape.tokens >= num_computed) {
                prove(pool_.num_refs(block_id) == 1 && node == kNone, "C4",
                      where + ": block " + text(block_id) + " is not its own, " + text(pool_.num_refs(block_id)) + " references");
            } else if (block / shape.per_node == partial && sequence.is_writer) {
                const NodeId own = own_partial_node(sequence, partial);
                const std::int64_t num_own = own == kNone ? 0 : tree_.num_tokens(own);
                prove(node == own || (node == kNone && block * shape.tokens - partial * block_size_ >= num_own), "C4",
                      where + ": block " + text(block_id) + " is written and in another node than the first one");
                const std::int64_t num_findable = node == kNone ? 0 : tree_.num_tokens(node);
                prove(num_findable <= offset, "C4",
                      where + ": block " + text(block_id) + " is written from " + text(offset) + ", found up to " +
                          text(num_findable));
            }
        }
    }
    if (sequence.node == kNone) return;
    NodeId node = sequence.node;
    for (std::int64_t block = partial - 1; block >= 0; --block) {
        prove(!tree_.is_root(node), "C8", name + " ends " + text(block + 1) + " blocks above where it should");
        const BlockView spelled = prompt_of(sequence).block(block * block_size_, block_size_);
        prove(tree_.is_full(node) && tree_.num_common(node, spelled) == block_size_, "C8",
              name + ": block " + text(block) + " is not what its node says");
        for (std::int32_t group = 0; group < num_groups(); ++group) {
            const GroupShape& shape = shape_of(group);
            for (std::int64_t part = 0; part < shape.per_node; ++part) {
                const BlockId block_id =
                    sequence.tables[static_cast<std::size_t>(group)][block * shape.per_node + part];
                const auto column = shape.first_column + static_cast<std::int32_t>(part);
                prove(block_id == kNone || block_id == tree_.block_id(node, column), "C8",
                      name + ": block " + text(block_id) + " is not its node's block");
            }
        }
        node = tree_.parent(node);
    }
    prove(tree_.is_root(node), "C8", name + " ends deeper than its " + text(partial) + " blocks");
}

}  // namespace quire
