// Start and duration of a step's native work: one record for each call of an operator, for the profile of a step.
//
// `const Span span(Operator::linear);` at the top of an operator records the time from there to the end of the scope.
// Recording belongs to a thread: `start_recording()` and `take_records()` are called by the thread that runs the steps,
// and spans on other threads (the pool's workers among them) record nothing, so a record is the wall time of a call.
// Scopes may nest; `fused` is the operator whose scope contains others.
//
// Cost: a thread-local load while nothing is recorded, else two readings of the clock and 24 bytes.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace quire {

enum class Operator : std::int64_t { linear, attention, kv_write, fused };

// As CLOCK_MONOTONIC counts nanoseconds, which is also what Python's time.perf_counter_ns does.
struct SpanRecord {
    std::int64_t operator_index;
    std::int64_t start_ns;
    std::int64_t duration_ns;
};

// Forgets what this thread recorded so far and records from now on.
void start_recording();
// What this thread recorded since then, in the order in which the spans ended; ends the recording.
std::vector<SpanRecord> take_records();

namespace detail {

extern thread_local constinit bool recording;
void add_record(const SpanRecord& record);

inline std::int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace detail

class Span {
  public:
    explicit Span(Operator which) : which_(which), start_ns_(detail::recording ? detail::now_ns() : 0) {}
    ~Span() {
        if (start_ns_ != 0 && detail::recording) {
            detail::add_record({static_cast<std::int64_t>(which_), start_ns_, detail::now_ns() - start_ns_});
        }
    }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

  private:
    Operator which_;
    std::int64_t start_ns_;
};

}  // namespace quire
