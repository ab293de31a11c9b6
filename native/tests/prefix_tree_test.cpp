// The prefix tree against a list of sorted strings: random inserts, extensions, removals and look-ups, keys included; and
// that a look-up among many siblings visits few of them.
#include <algorithm>
#include <string>
#include <vector>

#include "core/prefix_tree.hpp"
#include "tests/testing.hpp"

using namespace quire;
using quire::testing::Random;

namespace {

constexpr std::int32_t kBlockSize = 4;

struct Block {
    std::vector<Token> tokens;
    std::vector<ExtraKey> keys;

    // What the order is defined by: per position, (token, key), no key before every key.
    std::vector<std::pair<Token, std::string>> elements() const {
        std::vector<std::pair<Token, std::string>> all;
        for (std::size_t at = 0; at < tokens.size(); ++at) {
            all.emplace_back(tokens[at], "");
            for (const ExtraKey& key : keys)
                if (key.position == static_cast<std::int64_t>(at)) all.back().second = "+" + key.value;
        }
        return all;
    }
    BlockView view() const { return {tokens, keys, 0}; }
};

Block random_block(Random& random, std::size_t max_tokens) {
    Block block;
    const auto count = 1 + random.below(static_cast<std::int64_t>(max_tokens));
    for (std::int64_t at = 0; at < count; ++at) {
        block.tokens.push_back(static_cast<Token>(random.below(3)));
        if (random.below(6) == 0) block.keys.push_back({at, random.below(2) == 0 ? "a" : "b"});
    }
    return block;
}

struct Known {
    Block block;
    NodeId node;
};

void random_siblings(std::uint64_t seed) {
    Random random(seed);
    PrefixTree tree(kBlockSize, {0}, 2);
    const NodeId root = tree.make_root("tenant");
    std::vector<Known> known;
    const auto find = [&](const Block& block) {
        return std::find_if(known.begin(), known.end(),
                            [&](const Known& one) { return one.block.elements() == block.elements(); });
    };
    for (int step = 0; step < 300; ++step) {
        const Block block = random_block(random, kBlockSize);
        const auto place = find(block);
        const Neighbours near = tree.find(root, block.view());
        EXPECT((near.equal != kNone) == (place != known.end()));
        std::int32_t longest = 0;
        for (const Known& one : known) {
            const auto a = one.block.elements();
            const auto b = block.elements();
            const auto differs = std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first;
            longest = std::max(longest, static_cast<std::int32_t>(differs - a.begin()));
        }
        EXPECT(tree.longest(near, block.view()).second == longest);
        if (near.equal != kNone) {
            EXPECT(place->node == near.equal);
            const NodeId next = tree.next_sibling(near.equal);
            EXPECT(next == kNone || tree.previous_sibling(next) == near.equal);
            if (random.below(3) == 0) {
                tree.remove(place->node);
                known.erase(place);
            } else if (block.tokens.size() < kBlockSize) {
                Block whole = block;
                whole.tokens.push_back(static_cast<Token>(random.below(3)));
                if (find(whole) == known.end()) {
                    tree.extend(place->node, whole.view(), PrefixTree::stage_keys(whole.view()));
                    place->block = whole;
                }
            }
        } else {
            tree.ensure_room(1, 1);
            known.push_back({block, tree.insert(root, block.view(), PrefixTree::stage_keys(block.view()))});
        }
        tree.check();
        EXPECT(tree.num_nodes() == static_cast<std::int64_t>(known.size()));
        for (const NodeId child : tree.children(root)) EXPECT(tree.parent(child) == root);
    }
}

void many_siblings_are_found_in_few_steps() {
    constexpr int kNum = 1 << 16;
    PrefixTree tree(1, {0}, kNum + 1);
    const NodeId root = tree.make_root("");
    for (Token token = 0; token < kNum; ++token) tree.insert(root, {{&token, 1}, {}, 0}, {});
    const std::int64_t before = tree.num_visited();
    for (Token token = 0; token < 1000; ++token) EXPECT(tree.find(root, {{&token, 1}, {}, 0}).equal != kNone);
    EXPECT(tree.num_visited() - before < 1000 * 40);  // a list would visit half of them: 32 768 each
    const std::int64_t before_removing = tree.num_visited();
    for (const NodeId node : tree.children(root)) tree.remove(node);
    EXPECT(tree.num_visited() == before_removing && tree.num_nodes() == 0);
}

void roots_and_paths() {
    PrefixTree tree(2, {0, 0, 0}, 1);
    const NodeId a = tree.make_root("a");
    const NodeId b = tree.make_root("b");
    EXPECT(a != b && tree.make_root("a") == a && tree.find_root("c") == kNone);
    const std::vector<Token> tokens{7, 8};
    NodeId at = a;
    std::vector<NodeId> path;
    for (int depth = 0; depth < 50; ++depth) {
        tree.ensure_room(1, 0);
        at = tree.insert(at, {tokens, {}, 2 * depth}, {});
        path.push_back(at);
        EXPECT(tree.block_id(at, 2) == kNone);
    }
    tree.check();
    EXPECT(tree.all_nodes() == path);
    for (; !path.empty(); path.pop_back()) tree.remove(path.back());
    tree.remove(a);
    EXPECT(tree.find_root("a") == kNone && tree.find_root("b") == b);
    tree.check();
}

}  // namespace

int main() {
    for (std::uint64_t seed = 0; seed < 12; ++seed) random_siblings(seed);
    many_siblings_are_found_in_few_steps();
    roots_and_paths();
    std::puts("prefix_tree_test: ok");
}
