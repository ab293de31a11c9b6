// quire._native.BlockManager: accounts, events, explain, drop and the whole tree. Reports go out as dictionaries of numpy
// arrays, whose entries quire.cache.events and quire.cache.tree_view name.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

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
    arrays["accounts"] = column<std::int32_t>(batch.events, [](const Event& event) { return event.account; });
    arrays["retentions"] = column<std::int32_t>(batch.events, [](const Event& event) { return event.retention; });
    arrays["namespace_index"] = column<std::int32_t>(batch.events, [](const Event& event) { return event.name; });
    arrays["units"] = rows_of(copy_of(std::span(batch.units)), self.num_groups());
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
    const auto of_unit = [&](auto get) { return rows_of(column<std::int32_t>(report.units, get), self.num_groups()); };
    nb::dict arrays;
    arrays["node_ids"] = column<std::int64_t>(report.nodes, [](const NodeReport& node) { return node.id; });
    arrays["parent_ids"] = column<std::int64_t>(report.nodes, [](const NodeReport& node) { return node.parent; });
    arrays["namespace_index"] = of_node([](const NodeReport& node) { return node.name; });
    arrays["depths"] = of_node([](const NodeReport& node) { return node.depth; });
    arrays["num_tokens"] = of_node([](const NodeReport& node) { return node.num_tokens; });
    arrays["units"] = of_unit([](const UnitReport& unit) { return unit.unit; });
    arrays["num_references"] = of_unit([](const UnitReport& unit) { return unit.num_references; });
    arrays["accounts"] = of_unit([](const UnitReport& unit) { return unit.account; });
    arrays["retentions"] = of_unit([](const UnitReport& unit) { return unit.retention; });
    arrays["states"] = of_unit([](const UnitReport& unit) { return unit.state; });
    arrays["namespaces"] = names_of(report.names);
    return arrays;
}

nb::object content_of(const PythonBlockManager& self, UnitId unit) {
    const std::optional<UnitContent> content = self.content_of(unit);
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
                 return with_prompt(self, tokens, name, key_positions, keys,
                                    [&](const Prompt& prompt) { return self.drop(prompt); });
             },
             "tokens"_a, "namespace"_a, "key_positions"_a, "keys"_a)
        .def("set_limits",
             [](Manager& self, std::int32_t account, std::int64_t floor_units, std::int64_t quota_units) {
                 self.use(0, [&] { self.set_limits(account, floor_units, quota_units); });
             },
             "account"_a, "floor_units"_a, "quota_units"_a)
        .def("account_counts",
             [](const Manager& self, std::int32_t account) {
                 const Counts counts = self.account_counts(account);
                 return std::tuple(counts.num_held, counts.num_cached, counts.num_leased);
             },
             "account"_a)
        .def("num_available", [](const Manager& self, std::int32_t account) { return self.num_available(account); },
             "account"_a)
        .def("max_units", [](const Manager& self, std::int32_t account) { return self.max_units(account); },
             "account"_a)
        .def("record_events", [](Manager& self, bool is_on) { self.use(0, [&] { self.record_events(is_on); }); },
             "is_on"_a)
        .def_prop_ro("num_events", [](const Manager& self) { return self.num_events(); })
        .def("take_events", &take_events)
        .def("tree", &tree)
        .def("unit_map", [](const Manager& self) {
            const UnitMap map = self.unit_map();
            return std::tuple(copy_of(std::span(map.states)), copy_of(std::span(map.names)));
        })
        .def("content_of", &content_of, "unit"_a)
        .def("namespaces", [](const Manager& self) {
            std::vector<nb::bytes> names;
            for (const std::string_view name : self.namespaces()) names.push_back(bytes_of(name));
            return names;
        });
}

}  // namespace quire
