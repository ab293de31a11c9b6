// Binding of the instruction set in use, of the thread pool and of the profile's records.
#include "bindings/bindings.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kernels/isa.hpp"
#include "kernels/profile.hpp"
#include "kernels/thread_pool.hpp"

namespace nb = nanobind;

namespace quire {

void bind_runtime(nb::module_& m) {
    m.def(
        "isa", [] { return std::string(isa_name(current_isa())); },
        "Name of the instruction set the kernels use. Raises ValueError where QUIRE_ISA names one that cannot run.");
    m.def(
        "supported_isas",
        [] {
            std::vector<std::string> names;
            for (const Isa isa : supported_isas()) names.emplace_back(isa_name(isa));
            return names;
        },
        "Names of all variants that run on this processor, the richest instruction set first. Those of a build with "
        "QUIRE_TEST_KERNELS end in the emulated ones.");
    m.def(
        "num_threads", [] { return ThreadPool::instance().num_threads(); }, "Threads the kernels use.");
    m.def(
        "set_num_threads", [](int num_threads) { ThreadPool::instance().set_num_threads(num_threads); },
        nb::arg("num_threads"), "Sets the threads the kernels use, at least 1.");
    m.def("start_recording", &start_recording, "Records this thread's operators from now on; what was recorded is forgotten.");
    m.def(
        "take_records",
        [] {
            const std::vector<SpanRecord> records = take_records();
            return nb::bytes(records.data(), records.size() * sizeof(SpanRecord));
        },
        "Ends the recording. int64 [n, 3] as bytes: operator (0 linear, 1 attention, 2 KV write, 3 a fused one that holds such), "
        "start and duration in ns of time.perf_counter_ns().");
}

}  // namespace quire
