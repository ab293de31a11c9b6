#include "kernels/profile.hpp"

#include <utility>

namespace quire {

namespace detail {

thread_local constinit bool recording = false;

namespace {
thread_local std::vector<SpanRecord> records;
}  // namespace

void add_record(const SpanRecord& record) { records.push_back(record); }

}  // namespace detail

void start_recording() {
    detail::records.clear();
    detail::recording = true;
}

std::vector<SpanRecord> take_records() {
    detail::recording = false;
    return std::exchange(detail::records, {});
}

}  // namespace quire
