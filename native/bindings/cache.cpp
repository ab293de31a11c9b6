// quire._native.BlockManager, StepPlan and GroupPlan: core/block_manager.hpp with the calls of the Python block manager
// (src/quire/cache/manager/block_manager.py), whose docstrings say what each does.
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

#include "bindings/array.hpp"
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

constexpr std::int64_t kMostLookahead = (std::int64_t{1} << 31) - 1;
constexpr std::int64_t kMostBlockSize = 8191;  // as a node of the tree counts
constexpr std::int64_t kMostRunBlocks = 1 << 15;
constexpr std::int64_t kMostGroups = 4096;

// Divisors of a node's tokens, one for each group; none where all are 1.
void check_blocks_per_node(const std::vector<std::int32_t>& counts, std::size_t num_groups, std::int64_t block_size) {
    if (counts.empty()) return;
    if (counts.size() != num_groups)
        throw BadArgument("expected blocks_per_node of " + std::to_string(num_groups) + " groups, got " +
                          std::to_string(counts.size()));
    for (const std::int32_t count : counts)
        if (count < 1 || block_size % count != 0)
            throw BadArgument("expected divisors of a node's " + std::to_string(block_size) +
                              " tokens as blocks_per_node, got " + std::to_string(count));
}

std::vector<Span> spans_of(const std::vector<std::pair<std::string, std::int64_t>>& rules) {
    check_range("the number of groups", static_cast<std::int64_t>(rules.size()), 1, kMostGroups);
    std::vector<Span> spans;
    for (const auto& [kind, size] : rules) {
        if (kind != "full") check_range("the size of a window or a chunk", size, 1, INT64_MAX);
        if (kind == "full") {
            spans.push_back({Span::Kind::full, 0});
        } else if (kind == "window") {
            spans.push_back({Span::Kind::window, size});
        } else if (kind == "chunked") {
            spans.push_back({Span::Kind::chunked, size});
        } else {
            throw BadArgument("expected full, window or chunked, got '" + kind + "' as a kind of layer");
        }
    }
    return spans;
}

nb::object plan_or_none(std::shared_ptr<const StepPlan> plan) {
    if (plan == nullptr) return nb::none();
    return nb::cast(StepView{{std::move(plan), 0, {}}});
}

nb::object reserve(PythonBlockManager& self, const Input<std::int64_t>& sequences,
                   const Input<std::int64_t>& num_new_tokens, std::int64_t num_lookahead) {
    check_same_length(sequences, num_new_tokens, "sequences and num_new_tokens");
    check_range("num_lookahead", num_lookahead, 0, kMostLookahead);
    return plan_or_none(
        self.use(0, [&] { return self.reserve(span_of(sequences), span_of(num_new_tokens), num_lookahead); }));
}

nb::object restore(PythonBlockManager& self, SequenceId sequence, std::int64_t num_computed_tokens) {
    return plan_or_none(self.use(0, [&] { return self.restore(sequence, num_computed_tokens); }));
}

nb::dict stats(const PythonBlockManager& self) {
    const Counts counts = self.counts();
    const Stats& counted = self.stats();
    nb::dict result;
    result["num_blocks"] = self.num_blocks();
    result["free"] = counts.num_free;
    result["cached"] = counts.num_cached;
    result["held"] = counts.num_held;
    result["in_flight"] = counts.num_in_flight;
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
    nb::class_<GroupView>(module, "GroupPlan", "One group's part of a step; see quire.cache.protocol.GroupPlan.")
        .def_prop_ro("step", [](GroupView& self) { return self.plan->step; },
             R"(Number of the step: 1 for a cache's first successful `reserve`, then 2, ...)")
        .def_prop_ro("query_start",
                     [](GroupView& self) { return self.view(self.plan->query_start, self.plan->num_sequences + 1); },
             R"(int32 [n + 1]: the new tokens of sequence i are rows query_start[i] .. query_start[i + 1] - 1.)")
        .def_prop_ro("context_lengths",
                     [](GroupView& self) { return self.view(self.plan->context_lengths, self.plan->num_sequences); },
             R"(int32 [n]: each sequence's length once the step's new tokens are in; lookahead not counted.)")
        .def_prop_ro("slot_mapping",
                     [](GroupView& self) { return self.view(self.group().slot_mapping, self.plan->num_tokens); },
             R"(int64 [query_start[n]]: block * size + offset of each new token, sequences in order. -1 only in the
plan of a `restore`, which no step computes: behind a window.)")
        .def_prop_ro("lookahead_slots",
                     [](GroupView& self) {
                         return self.view(self.group().lookahead_slots,
                                          self.plan->num_sequences * self.plan->num_lookahead);
                     },
             R"(int64 [n * num_lookahead]: block * size + offset of each lookahead position, which follow the
new tokens; those of sequence i are at i * num_lookahead .. (i + 1) * num_lookahead - 1.)")
        .def_prop_ro("block_tables", &block_tables, nb::sig("def block_tables(self) -> NDArray[numpy.int32]"),
             R"(int32 [n, widest], made when asked for. Row i has ceil((context_lengths[i] + num_lookahead) /
size) entries, then -1; -1 also where a block behind a window has been given up.)")
        .def_prop_ro("copies", &copies,
             R"(int32 [m, 3] (source block, destination block, tokens): to be done before the step writes.)");
    nb::class_<StepView, GroupView>(module, "StepPlan", "What `reserve` decided; see quire.cache.protocol.StepPlan.")
        .def_prop_ro("num_groups", [](StepView& self) { return self.plan->groups.size(); },
             R"(Groups of the cache, g.)")
        .def("group", &group_of, "index"_a,
             R"(The same arrays for group `index`; IndexError beyond the last group.)");
}

}  // namespace

void bind_cache(nb::module_& module) {
    using Manager = PythonBlockManager;
    nb::register_exception_translator(translate);
    bind_plans(module);
    nb::class_<Manager> manager(module, "BlockManager",
        "The calls of quire.cache.manager.block_manager.PythonBlockManager in C++: the same names, arguments, answers and "
        "errors. Not thread-safe.");
    manager
        .def("__init__",
             [](Manager* self, const std::vector<std::pair<std::string, std::int64_t>>& spans,
                std::int64_t num_blocks, std::int64_t block_size, bool prefix_caching, std::int64_t watermark_blocks,
                bool overlapped_steps, std::int64_t run_blocks, const std::vector<std::int32_t>& blocks_per_node,
                const std::string& eviction) {
                 check_range("num_blocks", num_blocks, 0, kMostBlocks);
                 check_range("block_size", block_size, 1, kMostBlockSize);
                 check_range("watermark_blocks", watermark_blocks, 0, kMostBlocks);
                 check_range("run_blocks", run_blocks, 1, kMostRunBlocks);
                 if ((run_blocks & (run_blocks - 1)) != 0)
                     throw BadArgument("expected a power of two for run_blocks, got " + std::to_string(run_blocks));
                 check_blocks_per_node(blocks_per_node, spans.size(), block_size);
                 if (eviction != "frequency" && eviction != "lru")
                     throw BadArgument("expected frequency or lru as eviction, got '" + eviction + "'");
                 new (self) Manager(spans_of(spans), num_blocks, block_size, prefix_caching,
                                    watermark_blocks, overlapped_steps, run_blocks, blocks_per_node, eviction == "frequency");
             },
             "spans"_a, "num_blocks"_a, "block_size"_a, "prefix_caching"_a, "watermark_blocks"_a,
             "overlapped_steps"_a, "run_blocks"_a, "blocks_per_node"_a = std::vector<std::int32_t>{}, "eviction"_a = "frequency")
        .def("match",
             [](Manager& self, const Input<std::int32_t>& tokens, const nb::bytes& name,
                const Input<std::int64_t>& key_positions, const std::vector<nb::bytes>& keys) {
                 return with_prompt(self, tokens, name, key_positions, keys,
                                    [&](const Prompt& prompt) { return self.match(prompt); });
             },
             "tokens"_a, "namespace"_a, "key_positions"_a, "keys"_a)
        .def("open",
             [](Manager& self, const Input<std::int32_t>& tokens, const nb::bytes& name,
                const Input<std::int64_t>& key_positions, const std::vector<nb::bytes>& keys, std::int32_t owner_id,
                std::int32_t cache_priority, std::int64_t most_cached) {
                 check_range("owner_id", owner_id, 0, kMostOwner);
                 check_range("cache_priority", cache_priority, kDiscard, kNumPriorities - 1);
                 check_range("most_cached", most_cached, 0, kNoLimit);
                 return with_prompt(self, tokens, name, key_positions, keys, [&](const Prompt& prompt) {
                     return self.open(prompt, owner_id, cache_priority, most_cached);
                 });
             },
             "tokens"_a, "namespace"_a, "key_positions"_a, "keys"_a, "owner_id"_a = 0, "cache_priority"_a = kNormal,
             "most_cached"_a = kNoLimit)
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
                 check_same_length(sequences, num_new_tokens, "sequences and num_new_tokens");
                 check_range("num_lookahead", num_lookahead, 0, kMostLookahead);
                 return self.use(0, [&] {
                     return self.num_blocks_needed(span_of(sequences), span_of(num_new_tokens), num_lookahead);
                 });
             },
             "sequences"_a, "num_new_tokens"_a, "num_lookahead"_a)
        .def("reserve", &reserve, "sequences"_a, "num_new_tokens"_a, "num_lookahead"_a,
             nb::sig("def reserve(self, sequences: NDArray[numpy.int64], num_new_tokens: NDArray[numpy.int64], "
                     "num_lookahead: int) -> StepPlan | None"))
        .def("num_blocks_to_restore",
             [](Manager& self, SequenceId sequence, std::int64_t num_computed_tokens) {
                 return self.use(0, [&] { return self.num_blocks_to_restore(sequence, num_computed_tokens); });
             },
             "sequence"_a, "num_computed_tokens"_a)
        .def("restore", &restore, "sequence"_a, "num_computed_tokens"_a,
             nb::sig("def restore(self, sequence: int, num_computed_tokens: int) -> StepPlan | None"))
        .def("commit",
             [](Manager& self, SequenceId sequence, std::int64_t num_computed_tokens) {
                 self.use(0, [&] { self.commit(sequence, num_computed_tokens); });
             },
             "sequence"_a, "num_computed_tokens"_a)
        .def("advance",
             [](Manager& self, const Input<std::int64_t>& sequences, const Input<std::int64_t>& num_computed_tokens,
                const Input<std::int32_t>& tokens) {
                 check_same_length(sequences, num_computed_tokens, "sequences and num_computed_tokens");
                 check_same_length(sequences, tokens, "sequences and tokens");
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
        .def("withdraw", [](Manager& self, SequenceId sequence) { self.use(0, [&] { self.withdraw(sequence); }); },
             "sequence"_a)
        .def("is_findable",
             [](Manager& self, SequenceId sequence) { return self.use(0, [&] { return self.is_findable(sequence); }); },
             "sequence"_a)
        .def("reset", [](Manager& self) { self.use(0, [&] { self.reset(); }); })
        .def("resize",
             [](Manager& self, std::int64_t num_blocks, std::int64_t watermark_blocks) {
                 check_range("num_blocks", num_blocks, 0, kMostBlocks);
                 check_range("watermark_blocks", watermark_blocks, 0, kMostBlocks);
                 const std::vector<BlockId> given_up = self.use(0, [&] { return self.resize(num_blocks, watermark_blocks); });
                 return copy_of(std::span(given_up));
             },
             "num_blocks"_a, "watermark_blocks"_a)
        .def("counts",
             [](const Manager& self) {
                 const Counts counts = self.counts();
                 return std::tuple(counts.num_free, counts.num_cached, counts.num_held, counts.num_in_flight);
             })
        .def("stats", &stats, nb::sig("def stats(self) -> dict[str, int]"))
        .def("check", [](Manager& self) { self.use(kTokensToReleaseFor, [&] { self.check(); }); })
        .def("block_table",
             [](Manager& self, SequenceId sequence, std::int64_t group) {
                 return self.use(0, [&] { return copy_of(self.block_table(sequence, group)); });
             },
             "sequence"_a, "group"_a)
        .def_prop_ro("most_blocks", [](const Manager& self) { return self.stats().most_blocks; })
        .def_prop_ro("num_visited", &Manager::num_visited);
    bind_cache_report(manager);
}

}  // namespace quire
