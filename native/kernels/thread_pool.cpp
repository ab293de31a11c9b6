#include "kernels/thread_pool.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <pthread.h>
#include <sched.h>
#include <stdexcept>
#include <string>
#include <system_error>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {

namespace {

constexpr int kSpins = 2000;  // 20 to 100 us
constexpr std::chrono::microseconds kYields{300};

int default_num_threads() {
    if (const char* given = std::getenv("QUIRE_NUM_THREADS"); given != nullptr && *given != '\0') {
        const long threads = std::strtol(given, nullptr, 10);
        if (threads > ThreadPool::kMostThreads) {
            std::fprintf(stderr, "quire: expected QUIRE_NUM_THREADS of 1 to %d, got %s; %d serve\n", ThreadPool::kMostThreads, given,
                         ThreadPool::kMostThreads);
        }
        if (threads >= 1) return static_cast<int>(std::min<long>(threads, ThreadPool::kMostThreads));
    }
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::clamp(CPU_COUNT(&set), 1, ThreadPool::kMostThreads);
    return 1;
}

}  // namespace

void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

ThreadPool& ThreadPool::instance() {
    static ThreadPool& pool = *new ThreadPool;  // T8
    return pool;
}

ThreadPool::ThreadPool() {
    num_threads_ = default_num_threads();
    start();
    pthread_atfork(nullptr, nullptr, [] { instance().forget_parent(); });
}

void ThreadPool::start() {
    stopping_.store(false);
    callers_processor_ = -1;
    const std::uint32_t seen = generation_.load();
    const int wanted = num_threads();
    workers_.reserve(static_cast<std::size_t>(wanted) - 1);
    try {
        while (static_cast<int>(workers_.size()) + 1 < wanted) workers_.emplace_back([this, seen] { work(seen); });
    } catch (const std::system_error& error) {  // T9
        num_threads_.store(static_cast<int>(workers_.size()) + 1);
        std::fprintf(stderr, "quire: expected %d threads for the kernels, got %d (%s); these serve\n", wanted, num_threads(), error.what());
    }
    started_ = true;
}

// T5. In the child, before anything else runs there. Threads that are not here can be neither joined nor detached: their
// handles are left where they are, as is what waits at the mutex.
void ThreadPool::forget_parent() {
    new (&workers_) std::vector<std::thread>();
    new (&owner_) std::mutex();
    job_.store(0);
    started_ = false;
}

void ThreadPool::stop() {
    stopping_.store(true);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
}

void ThreadPool::set_num_threads(int num_threads) {
    if (num_threads < 1 || num_threads > kMostThreads) {
        throw std::invalid_argument("expected 1 to " + std::to_string(kMostThreads) + " threads, got " + std::to_string(num_threads));
    }
    const std::lock_guard lock(owner_);
    if (num_threads == this->num_threads()) return;
    stop();
    num_threads_.store(num_threads);
    start();
}

void ThreadPool::place_workers(int processor) {
    callers_processor_ = processor;
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || !CPU_ISSET(processor, &allowed) || CPU_COUNT(&allowed) < 2) return;
    CPU_CLR(processor, &allowed);
    const bool one_each = static_cast<int>(workers_.size()) == CPU_COUNT(&allowed);
    int next = 0;
    for (auto& worker : workers_) {
        cpu_set_t own = allowed;
        if (one_each) {
            while (!CPU_ISSET(next, &allowed)) ++next;
            CPU_ZERO(&own);
            CPU_SET(next++, &own);
        }
        // Where that is refused the worker runs where it may.
        static_cast<void>(pthread_setaffinity_np(worker.native_handle(), sizeof own, &own));
    }
}

void ThreadPool::take_tasks() {
    for (;;) {
        const std::int64_t index = next_task_.fetch_add(1, std::memory_order_relaxed);
        if (index >= num_tasks_) return;
        function_(context_, index);
    }
}

// T2. Whether `ready` has come true meanwhile.
template <class Ready>
bool wait_briefly(Ready&& ready) {
    for (int spins = 0; spins < kSpins; ++spins) {
        if (ready()) return true;
        pause_briefly();
    }
    const auto end = std::chrono::steady_clock::now() + kYields;
    while (!ready()) {
        if (std::chrono::steady_clock::now() > end) return false;
        for (int spins = 0; spins < 32 && !ready(); ++spins) pause_briefly();
        sched_yield();
    }
    return true;
}

void ThreadPool::work(std::uint32_t seen) {
    for (;;) {
        if (!wait_briefly([&] { return generation_.load(std::memory_order_acquire) != seen; })) {
            generation_.wait(seen, std::memory_order_acquire);
        }
        seen = generation_.load(std::memory_order_acquire);
        if (stopping_.load()) return;
        if (!join_job()) continue;  // T4: it came too late
        take_tasks();
        leave_job();
    }
}

bool ThreadPool::join_job() {
    std::uint32_t job = job_.load(std::memory_order_acquire);
    while (job & kOpen) {
        if (job_.compare_exchange_weak(job, job + 1, std::memory_order_acq_rel)) return true;
    }
    return false;
}

void ThreadPool::leave_job() {
    if (job_.fetch_sub(1, std::memory_order_acq_rel) == 1) job_.notify_one();
}

void ThreadPool::run_erased(std::int64_t num_tasks, Function function, void* context) {
    if (num_tasks <= 0) return;
    const std::lock_guard lock(owner_);
    if (!started_) start();
    if (num_tasks == 1 || workers_.empty()) {
        for (std::int64_t index = 0; index < num_tasks; ++index) function(context, index);
        return;
    }
    if (const int processor = sched_getcpu(); processor >= 0 && processor != callers_processor_) place_workers(processor);
    function_ = function;
    context_ = context;
    num_tasks_ = num_tasks;
    next_task_.store(0, std::memory_order_relaxed);
    job_.store(kOpen, std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    take_tasks();
    job_.fetch_and(~kOpen, std::memory_order_acq_rel);
    std::uint32_t job = 0;
    const auto done = [&] { return (job = job_.load(std::memory_order_acquire)) == 0; };
    if (wait_briefly(done)) return;
    while (!done()) job_.wait(job, std::memory_order_acquire);
}

}  // namespace quire
