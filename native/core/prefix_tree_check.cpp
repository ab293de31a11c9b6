// Checks the shape of the prefix tree (T1 to T3), with the listings that needs.
#include <algorithm>
#include <string>

#include "core/invariant.hpp"
#include "core/prefix_tree.hpp"

namespace quire {

std::vector<NodeId> PrefixTree::children(NodeId node) const {
    std::vector<NodeId> ordered;
    std::vector<NodeId> path;
    NodeId at = nodes_[index(node)].child;
    while (at != kNone || !path.empty()) {
        for (; at != kNone; at = nodes_[index(at)].left) path.push_back(at);
        at = path.back();
        path.pop_back();
        ordered.push_back(at);
        at = nodes_[index(at)].right;
    }
    return ordered;
}

std::vector<NodeId> PrefixTree::roots() const {
    std::vector<NodeId> found;
    for (const auto& [name, root] : roots_) found.push_back(root);
    return found;
}

std::vector<std::string_view> PrefixTree::names() const {
    std::vector<std::string_view> found;
    for (const auto& [name, root] : roots_) found.push_back(name);
    return found;
}

std::vector<NodeId> PrefixTree::all_nodes() const {
    std::vector<NodeId> found;
    for (const NodeId root : roots())
        for (const NodeId child : children(root)) found.push_back(child);
    for (std::size_t at = 0; at < found.size(); ++at)
        for (const NodeId child : children(found[at])) found.push_back(child);
    return found;
}

void PrefixTree::check() const {
    std::int64_t num_seen = 0;
    std::vector<NodeId> open = roots();
    while (!open.empty()) {
        const NodeId node = open.back();
        open.pop_back();
        NodeId previous = kNone;
        for (const NodeId child : children(node)) {
            const std::string name = "node " + std::to_string(child);
            const Node& record = nodes_[index(child)];
            prove(num_tokens(child) >= 1 && num_tokens(child) <= block_size_, "T2",
                  name + " has " + std::to_string(num_tokens(child)) + " tokens of " + std::to_string(block_size_));
            prove(record.child == kNone || is_full(child), "T2", name + " has children and is not full");
            prove(parent(child) == node, "T3", name + " has another parent than the one it was reached from");
            prove(record.is_top == (nodes_[index(node)].child == child), "T3", name + " is marked wrongly as top");
            prove(record.is_top || !stands_above(child, record.up), "T3", name + " is below a lower priority");
            for (const ExtraKey& key : keys(child))
                prove(key.position >= 0 && key.position < num_tokens(child), "T1",
                      name + " has a key at " + std::to_string(key.position) + ", outside its tokens");
            if (previous != kNone)
                prove(compare(view(child), previous) > 0, "T1",
                      name + " does not sort after its left sibling");
            previous = child;
            open.push_back(child);
            ++num_seen;
        }
    }
    prove(num_seen == num_nodes_, "T2",
          std::to_string(num_seen) + " nodes reached of " + std::to_string(num_nodes_) + " counted");
}

}  // namespace quire
