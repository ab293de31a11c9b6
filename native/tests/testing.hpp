// What the native tests share: a check that reports and exits, a small random source, and memory that fails on demand.
//
// Including this file replaces the global `operator new` of the executable: `FailAfter` makes the n-th allocation from now
// on throw std::bad_alloc. There is no hook for it in the sources under test. One source file an executable, so these
// definitions stand in a header.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>

namespace quire::testing {

inline std::int64_t allocations_left = -1;  // -1: all succeed
inline std::int64_t num_failed = 0;

inline void* allocate(std::size_t bytes) {
    if (allocations_left == 0) {
        ++num_failed;
        throw std::bad_alloc();
    }
    if (allocations_left > 0) --allocations_left;
    if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
    throw std::bad_alloc();
}

// While it lives, `count` more allocations succeed and all after them fail.
class FailAfter {
public:
    explicit FailAfter(std::int64_t count) { allocations_left = count; }
    FailAfter(const FailAfter&) = delete;
    ~FailAfter() { allocations_left = -1; }
};

class Random {
public:
    explicit Random(std::uint64_t seed) : state_(seed * 2 + 1) {}

    // Uniform in 0..bound-1.
    std::int64_t below(std::int64_t bound) {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        return static_cast<std::int64_t>((state_ >> 33) % static_cast<std::uint64_t>(bound));
    }

private:
    std::uint64_t state_;
};

}  // namespace quire::testing

[[gnu::noinline]] void* operator new(std::size_t bytes) { return quire::testing::allocate(bytes); }
[[gnu::noinline]] void* operator new[](std::size_t bytes) { return quire::testing::allocate(bytes); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

#define EXPECT(condition)                                                                \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            std::fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                                \
        }                                                                                \
    } while (false)
