#include "kernels/weight_memory.hpp"

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <sys/mman.h>
#include <vector>

namespace quire {

namespace {

constexpr std::size_t kLineBytes = 64;
constexpr std::size_t kPageBytes = 2 << 20;         // a huge page
constexpr std::size_t kSmallPageBytes = 4096;
constexpr std::size_t kRegionBytes = 128 << 20;
#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t kMostShared = 0;              // the sanitizer knows where each weight ends
#else
constexpr std::size_t kMostShared = 16 << 20;       // of a weight in a region
#endif
constexpr std::size_t kLeastShared = 64 << 10;

constexpr std::size_t round_up(std::size_t n, std::size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

struct Region {
    unsigned char* data;
    std::size_t used;
    std::size_t num_weights;

    bool holds(const unsigned char* at) const { return at >= data && at < data + kRegionBytes; }
};

std::mutex& lock() {
    static std::mutex one;
    return one;
}
// The last one is filled. Never destroyed: weights may be freed while the process ends.
std::vector<Region>& regions() {
    static auto* all = new std::vector<Region>;
    return *all;
}

unsigned char* own_memory(std::size_t num_bytes) {
    const bool huge = num_bytes >= kPageBytes;
    auto* data = static_cast<unsigned char*>(std::aligned_alloc(huge ? kPageBytes : kLineBytes, round_up(num_bytes, huge ? kPageBytes : kLineBytes)));
    if (data == nullptr) throw std::bad_alloc();
    if (huge) madvise(data, num_bytes, MADV_HUGEPAGE);
    return data;
}

// In whole huge pages; null where the address space is too small for it.
unsigned char* map_region() {
    const std::size_t whole = kRegionBytes + kPageBytes;
    void* mapped = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    auto* first = static_cast<unsigned char*>(mapped);
    auto* data = reinterpret_cast<unsigned char*>(round_up(reinterpret_cast<std::uintptr_t>(mapped), kPageBytes));
    if (data > first) munmap(first, static_cast<std::size_t>(data - first));
    const std::size_t behind = static_cast<std::size_t>(first + whole - (data + kRegionBytes));
    if (behind > 0) munmap(data + kRegionBytes, behind);
    madvise(data, kRegionBytes, MADV_HUGEPAGE);
    return data;
}

}  // namespace

unsigned char* take_weight_memory(std::size_t num_bytes) {
    if (num_bytes < kLeastShared || num_bytes > kMostShared) return own_memory(num_bytes);
    const std::size_t taken = round_up(num_bytes, kLineBytes);
    const std::lock_guard guard(lock());
    auto& all = regions();
    if (all.empty() || all.back().used + taken > kRegionBytes) {
        all.reserve(all.size() + 1);
        unsigned char* data = map_region();
        if (data == nullptr) return own_memory(num_bytes);
        all.push_back({data, 0, 0});
    }
    Region& region = all.back();
    unsigned char* data = region.data + region.used;
    region.used += taken;
    ++region.num_weights;
    return data;
}

void give_weight_memory_back(unsigned char* data, std::size_t num_bytes) noexcept {
    if (data == nullptr) return;
    const std::lock_guard guard(lock());
    auto& all = regions();
    for (auto region = all.begin(); region != all.end(); ++region) {
        if (!region->holds(data)) continue;
        if (--region->num_weights == 0) {
            munmap(region->data, kRegionBytes);
            all.erase(region);
        } else {
            // Pages that are wholly its own are the system's again.
            const auto first = round_up(reinterpret_cast<std::uintptr_t>(data), kSmallPageBytes);
            const auto end = (reinterpret_cast<std::uintptr_t>(data) + num_bytes) / kSmallPageBytes * kSmallPageBytes;
            if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
        }
        return;
    }
    std::free(data);
}

}  // namespace quire
