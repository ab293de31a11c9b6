// The threads of the native kernels: one pool for the process, without a second OpenMP runtime in addition to torch's.
//
// `run(n, task)` calls task(i) for every i in [0, n), each exactly once, on the calling thread and the workers, and
// returns when all have ended. The assignment of indices to threads varies, so a task's result must depend on its index
// only (so kernels have the same bits with any number of threads).
//
//   T1  One owner at a time: a second thread calling run() waits for the first (a mutex). run() does not nest.
//   T2  Idle workers sleep (futex), and so does a caller whose workers are late. Before that they wait for at most
//       about 0.4 ms, most of which they yield to other threads: waking a sleeper takes 50 to 90 us, and a step has
//       hundreds of products, of which one thread is done before the other (Xeon with AMX, seven products of 480 rows:
//       8.0 ms asleep after 0.1 ms, 7.4 so; a small model's step takes 5 to 10 % more processor time for it).
//   T3  A task must not throw.
//   T4  The caller does not wait for a late worker (whose processor is busy): it takes the tasks itself, closes the
//       job, and waits only for workers that have begun.
//   T5  After fork() the child has a pool of its own, as large: workers begin with its first job. It drops the state of
//       the parent's other threads (a running job, a locked mutex).
//   T6  Indices are taken in rising order, so that a task may wait for one with a smaller index, which has begun.
//   T7  A worker is kept off the processor that the caller runs on, and has one of its own if there are enough: some
//       kernels put a woken thread beside the one that wakes it, where it waits for the end of its time slice (measured
//       on one that packs virtual processors: 3.9 ms from notify to running, 0.09 ms so).
//   T8  The pool is never destroyed: threads that compute while the process ends can still use it, and end with the
//       process.
//   T9  If the system refuses some threads, the pool works with the started ones and reports that on stderr.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace quire {

// Tells the processor that this is a loop that waits.
void pause_briefly();

class ThreadPool {
  public:
    static ThreadPool& instance();

    // Threads that take part, the caller's included. Default: QUIRE_NUM_THREADS, else the processors this process
    // may run on. While none of the others has been started: those that will be.
    int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }
    // 1 to kMostThreads. Waits for a running run() to end.
    void set_num_threads(int num_threads);

    template <typename Task>
    void run(std::int64_t num_tasks, Task&& task) {
        using Callable = std::remove_reference_t<Task>;
        run_erased(
            num_tasks, [](void* context, std::int64_t index) { (*static_cast<Callable*>(context))(index); },
            const_cast<void*>(static_cast<const void*>(std::addressof(task))));
    }

    static constexpr int kMostThreads = 1024;

    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

  private:
    ThreadPool();
    using Function = void (*)(void* context, std::int64_t index);
    void run_erased(std::int64_t num_tasks, Function function, void* context);
    void start();
    void stop();
    void forget_parent();
    void work(std::uint32_t seen);
    bool join_job();
    void leave_job();
    void take_tasks();
    void place_workers(int processor);

    std::mutex owner_;
    std::atomic<int> num_threads_{1};  // written by the owner, read by anybody
    bool started_ = false;  // not yet in a child
    std::vector<std::thread> workers_;
    int callers_processor_ = -1;  // that the workers are kept off

    // The job under way. `generation_` announces it; `job_` is kOpen while it may be joined, plus the number of workers
    // that have joined. A worker reads the fields below only between joining and leaving.
    static constexpr std::uint32_t kOpen = 1u << 31;
    std::atomic<std::uint32_t> generation_{0};
    std::atomic<std::uint32_t> job_{0};
    std::atomic<bool> stopping_{false};
    Function function_ = nullptr;
    void* context_ = nullptr;
    std::int64_t num_tasks_ = 0;
    alignas(64) std::atomic<std::int64_t> next_task_{0};
};

}  // namespace quire
