// quire._native.BlockManager: owners, events, explain, drop and the whole tree. Reports go out as dictionaries of numpy
// arrays, whose entries quire.cache.events and quire.cache.tree_view name.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

#include "bindings/array.hpp"
#include "bindings/block_manager.hpp"

namespace quire {

using namespace nb::literals;

namespace {

// One number of each record.
template <class T, class Record, class Get>
Vector<T> column(const std::vector<Record>& records, Get&& get) {
    std::vector<T> values;
    values.reserve(records.size());
    for (const Record& record : records) values.push_back(static_cast<T>(get(record)));
    return copy_of(std::span<const T>(values));
}

// As rows of `width`.
nb::object rows_of(const Vector<std::int32_t>& values, std::int64_t width) {
    return nb::cast(values).attr("reshape")(-1, width);
}

nb::bytes bytes_of(std::string_view text) { return nb::bytes(text.data(), text.size()); }

nb::list names_of(const std::vector<std::string>& names) {
    nb::list list;
    for (const std::string& name : names) list.append(bytes_of(name));
    return list;
}

nb::dict take_events(PythonBlockManager& self) {
    const EventBatch batch = self.use(0, [&] { return self.take_events(); });
    nb::dict arrays;
    arrays["kinds"] = column<std::int32_t>(batch.events, [](const Event& event) { return event.kind; });
    arrays["reasons"] = column<std::int32_t>(batch.events, [](const Event& event) { return event.reason; });
    arrays["node_ids"] = column<std::int64_t>(batch.events, [](const Event& event) { return event.node; });
    arrays["parent_ids"] = column<std::int64_t>(batch.events, [](const Event& event) { return event.parent; });
    arrays["owner_ids"] = column<std::int32_t>(batch.events, [](const Event& event) { return event.owner_id; });
    arrays["cache_priorities"] = column<std::int32_t>(batch.events, [](const Event& event) { return event.cache_priority; });
    arrays["namespace_index"] = column<std::int32_t>(batch.events, [](const Event& event) { return event.name; });
    arrays["block_ids"] = rows_of(copy_of(std::span(batch.block_ids)), self.num_columns());
    arrays["tokens"] = rows_of(copy_of(std::span(batch.tokens)), self.block_size());
    arrays["namespaces"] = names_of(batch.names);
    nb::list keys;
    for (const EventKey& key : batch.keys)
        keys.append(nb::make_tuple(key.event, key.key.position, bytes_of(key.key.value)));
    arrays["extra_keys"] = keys;
    return arrays;
}

nb::dict tree(PythonBlockManager& self) {
    const TreeReport report = self.use(0, [&] { return self.tree(); });
    const auto of_node = [&](auto get) { return column<std::int32_t>(report.nodes, get); };
    const auto of_block = [&](auto get) { return rows_of(column<std::int32_t>(report.block_ids, get), self.num_columns()); };
    nb::dict arrays;
    arrays["node_ids"] = column<std::int64_t>(report.nodes, [](const NodeReport& node) { return node.id; });
    arrays["parent_ids"] = column<std::int64_t>(report.nodes, [](const NodeReport& node) { return node.parent; });
    arrays["namespace_index"] = of_node([](const NodeReport& node) { return node.name; });
    arrays["depths"] = of_node([](const NodeReport& node) { return node.depth; });
    arrays["num_tokens"] = of_node([](const NodeReport& node) { return node.num_tokens; });
    arrays["block_ids"] = of_block([](const BlockReport& block_id) { return block_id.block_id; });
    arrays["num_references"] = of_block([](const BlockReport& block_id) { return block_id.num_references; });
    arrays["owner_ids"] = of_block([](const BlockReport& block_id) { return block_id.owner_id; });
    arrays["cache_priorities"] = of_block([](const BlockReport& block_id) { return block_id.cache_priority; });
    arrays["states"] = of_block([](const BlockReport& block_id) { return block_id.state; });
    arrays["namespaces"] = names_of(report.names);
    return arrays;
}

nb::object content_of(PythonBlockManager& self, BlockId block_id) {
    const std::optional<BlockContent> content = self.use(0, [&] { return self.content_of(block_id); });
    if (!content) return nb::none();
    return nb::make_tuple(bytes_of(content->name), copy_of(std::span(content->tokens)), content->num_own);
}

}  // namespace

void bind_cache_report(nb::class_<PythonBlockManager>& manager) {
    using Manager = PythonBlockManager;
    manager
        .def("explain",
             [](Manager& self, const Input<std::int32_t>& tokens, const nb::bytes& name,
                const Input<std::int64_t>& key_positions, const std::vector<nb::bytes>& keys) {
                 const Explanation found = with_prompt(self, tokens, name, key_positions, keys,
                                                       [&](const Prompt& prompt) { return self.explain(prompt); });
                 return std::tuple(found.num_hit, found.num_common, copy_of(std::span(found.nearest)));
             },
             "tokens"_a, "namespace"_a, "key_positions"_a, "keys"_a)
        .def("drop",
             [](Manager& self, const Input<std::int32_t>& tokens, const nb::bytes& name,
                const Input<std::int64_t>& key_positions, const std::vector<nb::bytes>& keys) {
                 const Dropped dropped = with_prompt(self, tokens, name, key_positions, keys,
                                                     [&](const Prompt& prompt) { return self.drop(prompt); });
                 return std::tuple(dropped.num_freed, dropped.num_in_use);
             },
             "tokens"_a, "namespace"_a, "key_positions"_a, "keys"_a)
        .def("evict_path",
             [](Manager& self, const Input<std::int32_t>& tokens, const nb::bytes& name,
                const Input<std::int64_t>& key_positions, const std::vector<nb::bytes>& keys) {
                 return with_prompt(self, tokens, name, key_positions, keys,
                                    [&](const Prompt& prompt) { return self.evict_path(prompt); });
             },
             "tokens"_a, "namespace"_a, "key_positions"_a, "keys"_a)
        .def("set_cache_priority",
             [](Manager& self, const Input<std::int32_t>& tokens, const nb::bytes& name,
                const Input<std::int64_t>& key_positions, const std::vector<nb::bytes>& keys, std::int32_t cache_priority,
                std::int64_t start) {
                 check_range("cache_priority", cache_priority, kDiscard, kNumPriorities - 1);
                 check_range("start", start, 0, INT64_MAX);
                 const PriorityChange change = with_prompt(self, tokens, name, key_positions, keys, [&](const Prompt& prompt) {
                     return self.set_cache_priority(prompt, cache_priority, start);
                 });
                 return std::tuple(change.num_blocks, change.first_position);
             },
             "tokens"_a, "namespace"_a, "key_positions"_a, "keys"_a, "cache_priority"_a, "start"_a)
        .def("set_limits",
             [](Manager& self, std::int32_t owner_id, std::int64_t floor_blocks, std::int64_t quota_blocks) {
                 check_range("owner_id", owner_id, 1, kMostOwner);
                 check_range("floor_blocks", floor_blocks, 0, kMostBlocks);
                 if (quota_blocks != kNoQuota) check_range("quota_blocks", quota_blocks, std::max<std::int64_t>(floor_blocks, 1), INT64_MAX);
                 self.use(0, [&] { self.set_limits(owner_id, floor_blocks, quota_blocks); });
             },
             "owner_id"_a, "floor_blocks"_a, "quota_blocks"_a)
        .def("owner_counts",
             [](Manager& self, std::int32_t owner_id) {
                 const Counts counts = self.use(0, [&] { return self.owner_counts(owner_id); });
                 return std::tuple(counts.num_held, counts.num_cached, counts.num_in_flight);
             },
             "owner_id"_a)
        .def("num_available_blocks",
             [](Manager& self, std::int32_t owner_id) { return self.use(0, [&] { return self.num_available_blocks(owner_id); }); },
             "owner_id"_a)
        .def("max_owner_blocks",
             [](Manager& self, std::int32_t owner_id) { return self.use(0, [&] { return self.max_owner_blocks(owner_id); }); },
             "owner_id"_a)
        .def("record_events", [](Manager& self, bool is_on) { self.use(0, [&] { self.record_events(is_on); }); },
             "is_on"_a)
        .def_prop_ro("num_events", [](const Manager& self) { return self.num_events(); })
        .def("take_events", &take_events, nb::sig("def take_events(self) -> dict[str, typing.Any]"))
        .def("tree", &tree, nb::sig("def tree(self) -> dict[str, typing.Any]"))
        .def("block_map", [](Manager& self) {
            const BlockMap map = self.use(0, [&] { return self.block_map(); });
            return std::tuple(copy_of(std::span(map.states)), copy_of(std::span(map.names)));
        })
        .def("content_of", &content_of, "block_id"_a,
             nb::sig("def content_of(self, block_id: int) -> tuple[bytes, NDArray[numpy.int32], int] | None"))
        .def("namespaces", [](Manager& self) {
            std::vector<nb::bytes> names;
            for (const std::string_view name : self.use(0, [&] { return self.namespaces(); })) names.push_back(bytes_of(name));
            return names;
        });
}

}  // namespace quire
