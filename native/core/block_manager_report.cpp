// Reports: owners, events, the reason why a hit ends, the present tree; and dropping content on request.
#include <algorithm>
#include <string>

#include "core/block_manager.hpp"

namespace quire {

namespace {

// Whether two runs of tokens with the same first position are equal, extra keys included.
bool is_same(const BlockView& a, const BlockView& b) noexcept {
    return std::ranges::equal(a.tokens, b.tokens) && std::ranges::equal(a.keys, b.keys);
}

}  // namespace

void BlockManager::set_limits(std::int32_t number, std::int64_t floor, std::int64_t quota) {
    std::int64_t others = 0;
    for (const Owner& owner_id : pool_.order().owner_ids())
        if (owner_id.number != number) others += owner_id.floor;
    if (others + floor > pool_.num_blocks())
        throw BadArgument("expected floors of at most " + std::to_string(pool_.num_blocks()) + " blocks together, got " +
                          std::to_string(floor) + " for owner " + std::to_string(number) + " beside " +
                          std::to_string(others) + " of the others in set_limits");
    pool_.start_marking();
    Owner& owner_id = pool_.order().owner_id(pool_.slot_of(number));
    owner_id.floor = floor;
    owner_id.quota = quota;
}

Counts BlockManager::owner_counts(std::int32_t number) const noexcept {
    if (!pool_.is_marked())
        return number != 0 ? Counts{} : Counts{0, pool_.num_cached(), pool_.num_held(), pool_.num_in_flight()};
    const Owner* owner_id = pool_.order().find(number);
    if (owner_id == nullptr) return {};
    const std::int64_t held = owner_id->num_owned - owner_id->num_cached - owner_id->num_in_flight;
    return {0, owner_id->num_cached, held, owner_id->num_in_flight};
}

std::int64_t BlockManager::num_available_blocks(std::int32_t number) const noexcept {
    if (!pool_.is_marked()) return pool_.num_free() + pool_.num_cached();
    // With an unlimited need, all cached blocks of the owner may go.
    std::int64_t available = pool_.num_free();
    std::int64_t room = pool_.num_ids();
    for (const Owner& owner_id : pool_.order().owner_ids()) {
        const std::int64_t above = std::max<std::int64_t>(0, owner_id.num_owned - owner_id.floor);
        available += owner_id.number == number ? owner_id.num_cached : std::min(owner_id.num_cached, above);
        if (owner_id.number == number) room = owner_id.room(pool_.num_ids());
    }
    return std::max<std::int64_t>(0, std::min(available, room));
}

std::int64_t BlockManager::max_owner_blocks(std::int32_t number) const noexcept {
    std::int64_t most = pool_.num_blocks();
    for (const Owner& owner_id : pool_.order().owner_ids())
        if (owner_id.number != number) most -= owner_id.floor;
    const Owner* owner_id = pool_.order().find(number);
    if (owner_id != nullptr && owner_id->quota != kNoQuota) most = std::min(most, owner_id->quota);
    return std::max<std::int64_t>(0, most);
}

Explanation BlockManager::explain(const Prompt& prompt) {
    Explanation found{find_hit(prompt), 0, {}};
    const auto num_tokens = static_cast<std::int64_t>(prompt.tokens.size());
    NodeId node = tree_.find_root(prompt.name);
    while (node != kNone && found.num_common < num_tokens) {
        const BlockView view = prompt.block(found.num_common, std::min(block_size_, num_tokens - found.num_common));
        const Neighbours near = tree_.find(node, view);
        auto [child, num_more] = tree_.longest(near, view);
        // Among children without a common prefix the child behind the block's place, else the child before it.
        if (child == kNone) child = near.after != kNone ? near.after : near.before;
        found.num_common += num_more;
        if (child != kNone && num_more < static_cast<std::int64_t>(view.tokens.size())) {
            const auto tokens = tree_.tokens(child);
            found.nearest.assign(tokens.begin(), tokens.end());
            break;
        }
        node = child;
    }
    return found;
}

Dropped BlockManager::drop(const Prompt& prompt) {
    const auto num_tokens = static_cast<std::int64_t>(prompt.tokens.size());
    const std::int64_t num_before = num_tokens == 0 ? 0 : (num_tokens - 1) / block_size_ * block_size_;
    NodeId above = tree_.find_root(prompt.name);
    for (std::int64_t start = 0; start < num_before && above != kNone; start += block_size_)
        above = tree_.find(above, prompt.block(start, block_size_)).equal;
    if (above == kNone) return {};
    // The nodes that contain the last token are adjacent among their siblings; then all nodes below them.
    const BlockView rest = prompt.block(num_before, num_tokens - num_before);
    const Neighbours near = tree_.find(above, rest);
    std::vector<NodeId> found;
    for (NodeId at = near.equal != kNone ? near.equal : near.after;
         at != kNone && tree_.num_common(at, rest) == num_tokens - num_before; at = tree_.next_sibling(at))
        found.push_back(at);
    for (std::size_t at = 0; at < found.size(); ++at)
        for (const NodeId child : tree_.children(found[at])) found.push_back(child);
    std::vector<bool> is_gone(static_cast<std::size_t>(tree_.num_records()), false);
    for (const NodeId node : found) is_gone[static_cast<std::size_t>(node)] = true;
    std::vector<Sequence*> holders;
    holders.reserve(sequences_.size());
    sequences_.for_each([&](Sequence& sequence) {
        if (sequence.node == kNone) return;
        if (is_gone[static_cast<std::size_t>(sequence.node)] || has_computed(sequence, above, num_before, prompt))
            holders.push_back(&sequence);
    });
    if (events_.is_on()) events_.ensure_room(found.size(), 0, 0);

    // From here on no call fails.
    for (Sequence* sequence : holders) move_end(*sequence, kNone);
    Dropped dropped;
    const std::int64_t num_free = pool_.num_free();
    for (auto at = found.rbegin(); at != found.rend(); ++at) dropped.num_in_use += forget(*at);
    dropped.num_freed = pool_.num_free() - num_free;
    return dropped;
}

// Whether a sequence that ends in `above` has computed the prompt's last block, which begins at `start`. It may have no
// node of its own: a sibling may have the same tokens.
bool BlockManager::has_computed(const Sequence& sequence, NodeId above, std::int64_t start,
                                const Prompt& prompt) const noexcept {
    const auto num_tokens = static_cast<std::int64_t>(prompt.tokens.size());
    if (sequence.node != above || sequence.num_computed < std::max<std::int64_t>(num_tokens, 1)) return false;
    return is_same(prompt_of(sequence).block(start, num_tokens - start), prompt.block(start, num_tokens - start));
}

// Makes the node's blocks unfindable; returns how many are still in use. 0 for a node that is already gone.
std::int64_t BlockManager::forget(NodeId node) noexcept {
    std::int64_t num_in_use = 0;
    bool any = false;
    for (std::int32_t column = 0; column < num_columns(); ++column) any |= tree_.block_id(node, column) != kNone;
    if (!any) return 0;
    BlockId* const noted = note_removed(node, 0, Event::Reason::forgotten);
    for (std::int32_t column = 0; column < num_columns(); ++column) {
        const BlockId block_id = tree_.block_id(node, column);
        if (block_id == kNone) continue;
        if (noted != nullptr) noted[column] = block_id;
        tree_.set_block(node, column, kNone);
        pool_.set_node(block_id, kNone);
        if (pool_.state(block_id) != BlockState::cached) {
            ++num_in_use;
            continue;
        }
        pool_.take_out(block_id);
        pool_.make_free(block_id);
    }
    drop_bare(node);
    return num_in_use;
}

void BlockManager::record_events(bool is_on) {
    if (!is_on) events_.turn_off();
    if (is_on == events_.is_on()) return;
    tree_.start_numbering();
    const std::vector<NodeId> nodes = tree_.all_nodes();
    const std::vector<NodeId> roots = tree_.roots();
    std::vector<std::vector<ExtraKey>> keys;
    std::size_t num_keys = 0;
    for (const NodeId node : nodes) {
        keys.emplace_back(tree_.keys(node).begin(), tree_.keys(node).end());
        num_keys += keys.back().size();
    }
    events_.ensure_room(nodes.size() + 1, nodes.size(), num_keys);
    std::unordered_map<NodeId, std::int32_t> names;
    for (std::size_t at = 0; at < roots.size(); ++at) names[roots[at]] = events_.name_index(tree_.names()[at]);
    for (const NodeId node : nodes) names[node] = names.at(tree_.parent(node));

    events_.turn_on();
    events_.add({Event::Kind::cleared});
    for (std::size_t at = 0; at < nodes.size(); ++at) {
        const NodeId node = nodes[at];
        BlockId first = kNone;
        for (std::int32_t column = num_columns() - 1; column >= 0; --column)
            if (tree_.block_id(node, column) != kNone) first = tree_.block_id(node, column);
        if (!tree_.is_full(node) || first == kNone) continue;
        const NodeId parent = tree_.parent(node);
        std::vector<BlockId> block_ids;
        for (std::int32_t column = 0; column < num_columns(); ++column) block_ids.push_back(tree_.block_id(node, column));
        BlockId* const noted = events_.add({Event::Kind::stored, Event::Reason::none, tree_.id(node),
                                           tree_.is_root(parent) ? -1 : tree_.id(parent), pool_.order().number_of(first),
                                           names.at(node), highest_cache_priority(block_ids)});
        std::copy(block_ids.begin(), block_ids.end(), noted);
        events_.add_block(tree_.tokens(node), std::move(keys[at]));
    }
}

TreeReport BlockManager::tree() {
    tree_.start_numbering();
    TreeReport report;
    for (const std::string_view name : tree_.names()) report.names.emplace_back(name);
    std::unordered_map<NodeId, std::pair<std::int32_t, std::int32_t>> places;  // name and depth
    std::int32_t next = 0;
    for (const NodeId root : tree_.roots()) places[root] = {next++, 0};
    for (const NodeId node : tree_.all_nodes()) {
        const NodeId parent = tree_.parent(node);
        const auto [name, depth] = places.at(parent);
        places[node] = {name, depth + 1};
        report.nodes.push_back({tree_.id(node), tree_.is_root(parent) ? -1 : tree_.id(parent), name, depth + 1,
                                tree_.num_tokens(node)});
        for (std::int32_t column = 0; column < num_columns(); ++column) {
            const BlockId block_id = tree_.block_id(node, column);
            report.block_ids.push_back(block_id == kNone ? BlockReport{}
                                                 : BlockReport{block_id, pool_.num_refs(block_id), pool_.order().number_of(block_id),
                                                              pool_.order().cache_priority_of(block_id),
                                                              static_cast<std::int32_t>(pool_.state(block_id))});
        }
    }
    return report;
}

BlockMap BlockManager::block_map() const {
    constexpr std::int32_t kUnknown = -2;
    const std::int64_t num_ids = pool_.num_ids();
    BlockMap map;
    map.states.reserve(static_cast<std::size_t>(num_ids));
    map.names.reserve(static_cast<std::size_t>(num_ids));
    // A walk up ends at a node that an earlier walk visited, so every node is visited once.
    std::vector<std::int32_t> name_of(static_cast<std::size_t>(tree_.num_records()), kUnknown);
    std::int32_t next = 0;
    for (const NodeId root : tree_.roots()) name_of[static_cast<std::size_t>(root)] = next++;
    std::vector<NodeId> walked;
    for (std::int64_t at = 0; at < num_ids; ++at) {
        const auto block_id = static_cast<BlockId>(at);
        map.states.push_back(static_cast<std::uint8_t>(pool_.state(block_id)));
        NodeId node = pool_.node(block_id);
        if (node == kNone) {
            map.names.push_back(kNone);
            continue;
        }
        walked.clear();
        for (; name_of[static_cast<std::size_t>(node)] == kUnknown; node = tree_.parent(node)) walked.push_back(node);
        const std::int32_t name = name_of[static_cast<std::size_t>(node)];
        for (const NodeId below : walked) name_of[static_cast<std::size_t>(below)] = name;
        map.names.push_back(name);
    }
    return map;
}

std::optional<BlockContent> BlockManager::content_of(BlockId block_id) const {
    if (block_id < 0 || block_id >= pool_.num_ids())
        throw BadArgument("expected a block of 0 .. " + std::to_string(pool_.num_ids() - 1) + ", got " +
                          std::to_string(block_id) + " in content_of");
    NodeId node = pool_.node(block_id);
    if (node == kNone) return std::nullopt;
    const std::int32_t column = column_of(node, block_id);
    const std::int32_t start = shape_.starts[static_cast<std::size_t>(column)];
    std::int64_t num_own = tree_.num_tokens(node) - start;
    for (const GroupShape& shape : shape_.groups)
        if (shape.first_column <= column && column < shape.first_column + shape.per_node) num_own = std::min(num_own, shape.tokens);
    BlockContent content{{}, {}, static_cast<std::int32_t>(num_own)};
    std::vector<NodeId> path;
    for (; !tree_.is_root(node); node = tree_.parent(node)) path.push_back(node);
    for (auto at = path.rbegin(); at != path.rend(); ++at) {
        const auto tokens = tree_.tokens(*at);
        content.tokens.insert(content.tokens.end(), tokens.begin(), tokens.end());
    }
    const std::int64_t before = (static_cast<std::int64_t>(path.size()) - 1) * block_size_;
    content.tokens.resize(static_cast<std::size_t>(before + start + num_own));
    const std::vector<NodeId> roots = tree_.roots();
    const auto place = std::find(roots.begin(), roots.end(), node) - roots.begin();
    content.name = tree_.names()[static_cast<std::size_t>(place)];
    return content;
}

}  // namespace quire
