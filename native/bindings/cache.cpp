// quire._native.BlockManager, StepPlan and GroupPlan: core/block_manager.hpp behind quire.cache.backend's interface.
//
// Token and id arrays come in as numpy buffers and are not copied on the way; a plan's arrays go out as views that keep
// the plan alive. Calls that handle many tokens release the GIL; a second thread that calls meanwhile gets a RuntimeError.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/block_manager.hpp"
#include "core/block_manager.hpp"
#include "core/invariant.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

namespace {

// A group of a plan as Python sees it. Its arrays are views of the plan; the object is what they keep alive.
struct GroupView {
    std::shared_ptr<const StepPlan> plan;
    std::size_t index = 0;
    nb::object tables;  // made when first asked for

    const GroupPlan& group() const { return plan->groups[index]; }

    template <class T>
    Vector<T> view(const Slab<T>& values, std::int64_t count) {
        return Vector<T>(const_cast<T*>(values.data()), {static_cast<std::size_t>(count)}, nb::find(this));
    }
};

struct StepView : GroupView {};

nb::object block_tables(GroupView& self) {
    if (!self.tables.is_valid()) {
        const GroupPlan& group = self.group();
        const auto num_rows = static_cast<std::size_t>(self.plan->num_sequences);
        const auto width = static_cast<std::size_t>(group.widest_table());
        auto memory = std::make_unique<std::int32_t[]>(num_rows * width);
        group.padded_tables(memory.get());
        nb::capsule owner(memory.get(), [](void* pointer) noexcept { delete[] static_cast<std::int32_t*>(pointer); });
        self.tables = nb::cast(Matrix(memory.release(), {num_rows, width}, owner));
    }
    return self.tables;
}

Matrix copies(GroupView& self) {
    static std::int32_t nothing[3];
    const auto& rows = self.group().copies;
    auto* data = rows.empty() ? nothing : const_cast<std::int32_t*>(&rows.front().source);
    return Matrix(data, {rows.size(), 3}, nb::find(&self));
}

GroupView group_of(const GroupView& self, std::int64_t index) {
    const auto num_groups = static_cast<std::int64_t>(self.plan->groups.size());
    if (index < 0 || index >= num_groups)
        throw nb::index_error(("expected a group of 0 .. " + std::to_string(num_groups - 1) + ", got " +
                               std::to_string(index) + " in plan.group")
                                  .c_str());
    return {self.plan, static_cast<std::size_t>(index), {}};
}

std::vector<Retention> retentions_of(const std::vector<std::pair<std::string, std::int64_t>>& rules) {
    std::vector<Retention> retentions;
    for (const auto& [kind, size] : rules) {
        if (kind == "full") {
            retentions.push_back({Retention::Kind::full, 0});
        } else if (kind == "window") {
            retentions.push_back({Retention::Kind::window, size});
        } else if (kind == "chunked") {
            retentions.push_back({Retention::Kind::chunked, size});
        } else {
            throw BadArgument("expected full, window or chunked, got '" + kind + "' as a retention kind");
        }
    }
    return retentions;
}

nb::object plan_or_none(std::shared_ptr<const StepPlan> plan) {
    if (plan == nullptr) return nb::none();
    return nb::cast(StepView{{std::move(plan), 0, {}}});
}

nb::object reserve(PythonBlockManager& self, const Input<std::int64_t>& sequences,
                   const Input<std::int64_t>& num_new_tokens, std::int64_t num_lookahead) {
    return plan_or_none(
        self.use(0, [&] { return self.reserve(span_of(sequences), span_of(num_new_tokens), num_lookahead); }));
}

nb::object readmit(PythonBlockManager& self, SequenceId sequence, std::int64_t num_computed_tokens) {
    return plan_or_none(self.use(0, [&] { return self.readmit(sequence, num_computed_tokens); }));
}

nb::dict stats(const PythonBlockManager& self) {
    const Counts counts = self.counts();
    const Stats& counted = self.stats();
    nb::dict result;
    result["num_blocks"] = self.num_blocks();
    result["free"] = counts.num_free;
    result["cached"] = counts.num_cached;
    result["held"] = counts.num_held;
    result["leased"] = counts.num_leased;
    result["num_sequences"] = self.num_sequences();
    result["num_nodes"] = self.num_nodes();
    result["hit_tokens"] = counted.hit_tokens;
    result["query_tokens"] = counted.query_tokens;
    result["evicted_blocks"] = counted.evicted_blocks;
    result["copied_blocks"] = counted.copied_blocks;
    result["deduplicated_blocks"] = counted.deduplicated_blocks;
    return result;
}

// KeyError with the id, ValueError with the text, quire.errors.InvariantError; std::bad_alloc is MemoryError already.
void translate(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const UnknownSequence& error) {
        PyErr_SetObject(PyExc_KeyError, nb::int_(error.id).ptr());
    } catch (const BadArgument& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const InvariantBroken& error) {
        const nb::object type = nb::module_::import_("quire.errors").attr("InvariantError");
        PyErr_SetString(type.ptr(), error.what());
    }
}

void bind_plans(nb::module_& module) {
    nb::class_<GroupView>(module, "GroupPlan", "One group's part of a step; see quire.cache.backend.GroupPlan.")
        .def_prop_ro("step", [](GroupView& self) { return self.plan->step; })
        .def_prop_ro("query_start",
                     [](GroupView& self) { return self.view(self.plan->query_start, self.plan->num_sequences + 1); })
        .def_prop_ro("context_lengths",
                     [](GroupView& self) { return self.view(self.plan->context_lengths, self.plan->num_sequences); })
        .def_prop_ro("slot_mapping",
                     [](GroupView& self) { return self.view(self.group().slot_mapping, self.plan->num_tokens); })
        .def_prop_ro("lookahead_slots",
                     [](GroupView& self) {
                         return self.view(self.group().lookahead_slots,
                                          self.plan->num_sequences * self.plan->num_lookahead);
                     })
        .def_prop_ro("block_tables", &block_tables, nb::sig("def block_tables(self) -> NDArray[numpy.int32]"))
        .def_prop_ro("copies", &copies);
    nb::class_<StepView, GroupView>(module, "StepPlan", "What `reserve` decided; see quire.cache.backend.StepPlan.")
        .def_prop_ro("num_groups", [](StepView& self) { return self.plan->groups.size(); })
        .def("group", &group_of, "index"_a);
}

}  // namespace

void bind_cache(nb::module_& module) {
    using Manager = PythonBlockManager;
    nb::register_exception_translator(translate);
    bind_plans(module);
    nb::class_<Manager> manager(module, "BlockManager", "The native back end of quire.cache.backend.BlockManager.");
    manager
        .def("__init__",
             [](Manager* self, const std::vector<std::pair<std::string, std::int64_t>>& retentions,
                std::int64_t num_blocks, std::int64_t block_size, bool prefix_caching, std::int64_t watermark_blocks,
                bool overlapped_steps, std::int64_t run_blocks) {
                 new (self) Manager(retentions_of(retentions), num_blocks, block_size, prefix_caching,
                                    watermark_blocks, overlapped_steps, run_blocks);
             },
             "retentions"_a, "num_blocks"_a, "block_size"_a, "prefix_caching"_a, "watermark_blocks"_a,
             "overlapped_steps"_a, "run_blocks"_a)
        .def("match",
             [](Manager& self, const Input<std::int32_t>& tokens, const nb::bytes& name,
                const Input<std::int64_t>& key_positions, const std::vector<nb::bytes>& keys) {
                 return with_prompt(self, tokens, name, key_positions, keys,
                                    [&](const Prompt& prompt) { return self.match(prompt); });
             },
             "tokens"_a, "namespace"_a, "key_positions"_a, "keys"_a)
        .def("open",
             [](Manager& self, const Input<std::int32_t>& tokens, const nb::bytes& name,
                const Input<std::int64_t>& key_positions, const std::vector<nb::bytes>& keys, std::int32_t account,
                std::int32_t retention) {
                 return with_prompt(self, tokens, name, key_positions, keys,
                                    [&](const Prompt& prompt) { return self.open(prompt, account, retention); });
             },
             "tokens"_a, "namespace"_a, "key_positions"_a, "keys"_a, "account"_a = 0, "retention"_a = kNormal)
        .def("append",
             [](Manager& self, SequenceId sequence, const Input<std::int32_t>& tokens) {
                 self.use(0, [&] { self.append(sequence, span_of(tokens)); });
             },
             "sequence"_a, "tokens"_a)
        .def("tokens",
             [](Manager& self, SequenceId sequence) {
                 return self.use(0, [&] { return copy_of(self.tokens(sequence)); });
             },
             "sequence"_a)
        .def("num_tokens",
             [](Manager& self, SequenceId sequence) {
                 return self.use(0, [&] { return self.tokens(sequence).size(); });
             },
             "sequence"_a)
        .def("num_cached_tokens",
             [](Manager& self, SequenceId sequence) {
                 return self.use(0, [&] { return self.num_cached_tokens(sequence); });
             },
             "sequence"_a)
        .def("num_computed_tokens",
             [](Manager& self, SequenceId sequence) {
                 return self.use(0, [&] { return self.num_computed_tokens(sequence); });
             },
             "sequence"_a)
        .def("num_blocks_needed",
             [](Manager& self, const Input<std::int64_t>& sequences, const Input<std::int64_t>& num_new_tokens,
                std::int64_t num_lookahead) {
                 return self.use(0, [&] {
                     return self.num_blocks_needed(span_of(sequences), span_of(num_new_tokens), num_lookahead);
                 });
             },
             "sequences"_a, "num_new_tokens"_a, "num_lookahead"_a)
        .def("reserve", &reserve, "sequences"_a, "num_new_tokens"_a, "num_lookahead"_a,
             nb::sig("def reserve(self, sequences: NDArray[numpy.int64], num_new_tokens: NDArray[numpy.int64], "
                     "num_lookahead: int) -> StepPlan | None"))
        .def("num_blocks_to_readmit",
             [](Manager& self, SequenceId sequence, std::int64_t num_computed_tokens) {
                 return self.use(0, [&] { return self.num_blocks_to_readmit(sequence, num_computed_tokens); });
             },
             "sequence"_a, "num_computed_tokens"_a)
        .def("readmit", &readmit, "sequence"_a, "num_computed_tokens"_a,
             nb::sig("def readmit(self, sequence: int, num_computed_tokens: int) -> StepPlan | None"))
        .def("commit",
             [](Manager& self, SequenceId sequence, std::int64_t num_computed_tokens) {
                 self.use(0, [&] { self.commit(sequence, num_computed_tokens); });
             },
             "sequence"_a, "num_computed_tokens"_a)
        .def("advance",
             [](Manager& self, const Input<std::int64_t>& sequences, const Input<std::int64_t>& num_computed_tokens,
                const Input<std::int32_t>& tokens) {
                 self.use(0, [&] {
                     self.advance(span_of(sequences), span_of(num_computed_tokens), span_of(tokens));
                 });
             },
             "sequences"_a, "num_computed_tokens"_a, "tokens"_a)
        .def("complete", [](Manager& self, std::int64_t step) { self.use(0, [&] { self.complete(step); }); }, "step"_a)
        .def("fork",
             [](Manager& self, SequenceId sequence) { return self.use(0, [&] { return self.fork(sequence); }); },
             "sequence"_a)
        .def("rewind",
             [](Manager& self, SequenceId sequence, std::int64_t position) {
                 return self.use(0, [&] { return self.rewind(sequence, position); });
             },
             "sequence"_a, "position"_a)
        .def("close", [](Manager& self, SequenceId sequence) { self.use(0, [&] { self.close(sequence); }); },
             "sequence"_a)
        .def("reset", [](Manager& self) { self.use(0, [&] { self.reset(); }); })
        .def("resize",
             [](Manager& self, std::int64_t num_blocks, std::int64_t watermark_blocks) {
                 const std::vector<UnitId> given_up = self.use(0, [&] { return self.resize(num_blocks, watermark_blocks); });
                 return copy_of(std::span(given_up));
             },
             "num_blocks"_a, "watermark_blocks"_a)
        .def("counts",
             [](const Manager& self) {
                 const Counts counts = self.counts();
                 return std::tuple(counts.num_free, counts.num_cached, counts.num_held, counts.num_leased);
             })
        .def("stats", &stats)
        .def("check", [](Manager& self) { self.use(kTokensToReleaseFor, [&] { self.check(); }); })
        .def("block_table",
             [](Manager& self, SequenceId sequence, std::int64_t group) {
                 return self.use(0, [&] { return copy_of(self.block_table(sequence, group)); });
             },
             "sequence"_a, "group"_a)
        .def_prop_ro("most_units", [](const Manager& self) { return self.stats().most_units; })
        .def_prop_ro("num_visited", &Manager::num_visited, "Tree nodes compared so far: what look-ups have cost.")
        .def_prop_ro("capacity_bytes", &Manager::capacity_bytes,
                     "Address space of pool and tree; memory is taken by what has been in use.");
    bind_cache_report(manager);
}

}  // namespace quire
