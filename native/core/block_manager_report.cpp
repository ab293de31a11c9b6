// What is told about the whole: accounts, events, why a hit ends, the tree as it is; and forgetting content on purpose.
#include <algorithm>
#include <string>

#include "core/block_manager.hpp"

namespace quire {

void BlockManager::set_limits(std::int32_t number, std::int64_t floor, std::int64_t quota) {
    std::int64_t others = 0;
    for (const Account& account : pool_.order().accounts())
        if (account.number != number) others += account.floor;
    if (others + floor > pool_.num_units())
        throw BadArgument("expected floors of at most " + std::to_string(pool_.num_units()) + " units together, got " +
                          std::to_string(floor) + " for account " + std::to_string(number) + " beside " +
                          std::to_string(others) + " of the others in set_limits");
    pool_.start_marking();
    Account& account = pool_.order().account(pool_.slot_of(number));
    account.floor = floor;
    account.quota = quota;
}

Counts BlockManager::account_counts(std::int32_t number) const noexcept {
    if (!pool_.is_marked())
        return number != 0 ? Counts{} : Counts{0, pool_.num_cached(), pool_.num_held(), pool_.num_leased()};
    const Account* account = pool_.order().find(number);
    if (account == nullptr) return {};
    const std::int64_t held = account->num_owned - account->num_cached - account->num_leased;
    return {0, account->num_cached, held, account->num_leased};
}

std::int64_t BlockManager::num_available(std::int32_t number) const noexcept {
    if (!pool_.is_marked()) return pool_.num_free() + pool_.num_cached();
    // It needs as many as it can get, so all of its own cached units may go.
    std::int64_t available = pool_.num_free();
    std::int64_t room = pool_.num_ids();
    for (const Account& account : pool_.order().accounts()) {
        const std::int64_t above = std::max<std::int64_t>(0, account.num_owned - account.floor);
        available += account.number == number ? account.num_cached : std::min(account.num_cached, above);
        if (account.number == number) room = account.room(pool_.num_ids());
    }
    return std::max<std::int64_t>(0, std::min(available, room));
}

std::int64_t BlockManager::max_units(std::int32_t number) const noexcept {
    std::int64_t most = pool_.num_units();
    for (const Account& account : pool_.order().accounts())
        if (account.number != number) most -= account.floor;
    const Account* account = pool_.order().find(number);
    if (account != nullptr && account->quota != kNoQuota) most = std::min(most, account->quota);
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
        // Of children that share nothing the one behind where the block would stand, else the one before.
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

std::int64_t BlockManager::drop(const Prompt& prompt) {
    const auto num_tokens = static_cast<std::int64_t>(prompt.tokens.size());
    const std::int64_t num_before = num_tokens == 0 ? 0 : (num_tokens - 1) / block_size_ * block_size_;
    NodeId node = tree_.find_root(prompt.name);
    for (std::int64_t start = 0; start < num_before && node != kNone; start += block_size_)
        node = tree_.find(node, prompt.block(start, block_size_)).equal;
    if (node == kNone) return 0;
    // The nodes in which the last token lies stand together among their siblings; then all below them.
    const BlockView rest = prompt.block(num_before, num_tokens - num_before);
    const Neighbours near = tree_.find(node, rest);
    std::vector<NodeId> found;
    for (NodeId at = near.equal != kNone ? near.equal : near.after;
         at != kNone && tree_.num_common(at, rest) == num_tokens - num_before; at = tree_.next_sibling(at))
        found.push_back(at);
    for (std::size_t at = 0; at < found.size(); ++at)
        for (const NodeId child : tree_.children(found[at])) found.push_back(child);
    if (events_.is_on()) events_.ensure_room(found.size(), 0, 0);

    const std::int64_t num_free = pool_.num_free();
    for (auto at = found.rbegin(); at != found.rend(); ++at) forget(*at);
    return pool_.num_free() - num_free;
}

// What no table names of the node is found no more. Of a node that is gone already there is nothing left.
void BlockManager::forget(NodeId node) noexcept {
    const auto may_go = [&](UnitId unit) { return unit != kNone && pool_.num_refs(unit) == 0; };
    bool any = false;
    for (std::int32_t group = 0; group < num_groups(); ++group) any |= may_go(tree_.unit(node, group));
    if (!any) return;
    UnitId* const noted = note_removed(node, 0, Event::Reason::forgotten);
    for (std::int32_t group = 0; group < num_groups(); ++group) {
        const UnitId unit = tree_.unit(node, group);
        if (!may_go(unit)) continue;
        if (noted != nullptr) noted[group] = unit;
        tree_.set_unit(node, group, kNone);
        pool_.set_node(unit, kNone);
        if (pool_.state(unit) != UnitState::cached) continue;
        pool_.take_out(unit);
        pool_.make_free(unit);
    }
    drop_bare(node);
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
        UnitId first = kNone;
        for (std::int32_t group = num_groups() - 1; group >= 0; --group)
            if (tree_.unit(node, group) != kNone) first = tree_.unit(node, group);
        if (!tree_.is_full(node) || first == kNone) continue;
        const NodeId parent = tree_.parent(node);
        std::vector<UnitId> units;
        for (std::int32_t group = 0; group < num_groups(); ++group) units.push_back(tree_.unit(node, group));
        UnitId* const noted = events_.add({Event::Kind::stored, Event::Reason::none, tree_.id(node),
                                           tree_.is_root(parent) ? -1 : tree_.id(parent), pool_.order().number_of(first),
                                           names.at(node), highest_retention(units)});
        std::copy(units.begin(), units.end(), noted);
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
        for (std::int32_t group = 0; group < num_groups(); ++group) {
            const UnitId unit = tree_.unit(node, group);
            report.units.push_back(unit == kNone ? UnitReport{}
                                                 : UnitReport{unit, pool_.num_refs(unit), pool_.order().number_of(unit),
                                                              pool_.order().retention_of(unit),
                                                              static_cast<std::int32_t>(pool_.state(unit))});
        }
    }
    return report;
}

UnitMap BlockManager::unit_map() const {
    constexpr std::int32_t kUnknown = -2;
    const std::int64_t num_ids = pool_.num_ids();
    UnitMap map;
    map.states.reserve(static_cast<std::size_t>(num_ids));
    map.names.reserve(static_cast<std::size_t>(num_ids));
    // A walk up ends where an earlier one has been: every node is walked once.
    std::vector<std::int32_t> name_of(static_cast<std::size_t>(tree_.num_records()), kUnknown);
    std::int32_t next = 0;
    for (const NodeId root : tree_.roots()) name_of[static_cast<std::size_t>(root)] = next++;
    std::vector<NodeId> walked;
    for (std::int64_t at = 0; at < num_ids; ++at) {
        const auto unit = static_cast<UnitId>(at);
        map.states.push_back(static_cast<std::uint8_t>(pool_.state(unit)));
        NodeId node = pool_.node(unit);
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

std::optional<UnitContent> BlockManager::content_of(UnitId unit) const {
    if (unit < 0 || unit >= pool_.num_ids())
        throw BadArgument("expected a unit of 0 .. " + std::to_string(pool_.num_ids() - 1) + ", got " +
                          std::to_string(unit) + " in content_of");
    NodeId node = pool_.node(unit);
    if (node == kNone) return std::nullopt;
    UnitContent content{{}, {}, tree_.num_tokens(node)};
    std::vector<NodeId> path;
    for (; !tree_.is_root(node); node = tree_.parent(node)) path.push_back(node);
    for (auto at = path.rbegin(); at != path.rend(); ++at) {
        const auto tokens = tree_.tokens(*at);
        content.tokens.insert(content.tokens.end(), tokens.begin(), tokens.end());
    }
    const std::vector<NodeId> roots = tree_.roots();
    const auto place = std::find(roots.begin(), roots.end(), node) - roots.begin();
    content.name = tree_.names()[static_cast<std::size_t>(place)];
    return content;
}

}  // namespace quire
