// The free blocks against a plain set: random takes and gives, runs of several lengths, growth, and filling anew.
#include <cstdio>
#include <set>
#include <vector>

#include "core/free_blocks.hpp"
#include "tests/testing.hpp"

using namespace quire;
using quire::testing::Random;

namespace {

// What `take` is defined by.
BlockId expected(const std::set<BlockId>& free, std::int64_t num_ids, std::int64_t run, BlockId before, std::int64_t position) {
    if (before != kNone && free.contains(before + 1)) return before + 1;
    for (std::int64_t first = 0; first + run <= num_ids; first += run) {
        std::int64_t count = 0;
        while (count < run && free.contains(static_cast<BlockId>(first + count))) ++count;
        if (count == run) return static_cast<BlockId>(first + position % run);
    }
    return *free.begin();
}

void test_random(std::int64_t num_ids, std::int64_t run, std::uint64_t seed) {
    Random random(seed);
    FreeBlocks block_ids(num_ids, run);
    std::set<BlockId> free;
    for (BlockId block_id = 0; block_id < num_ids; ++block_id) free.insert(block_id);
    std::vector<BlockId> taken;
    for (int step = 0; step < 600; ++step) {
        const auto choice = random.below(20);
        if (choice < 11 && !free.empty()) {
            const BlockId before = taken.empty() || random.below(3) == 0 ? kNone : taken.back();
            const std::int64_t position = random.below(3 * run);
            const BlockId wanted = expected(free, num_ids, run, before, position);
            EXPECT(block_ids.take(before, position) == wanted);
            free.erase(wanted);
            taken.push_back(wanted);
        } else if (choice < 12 && !free.empty()) {
            const BlockId wanted = *free.begin();
            EXPECT(block_ids.take_lowest() == wanted);
            free.erase(wanted);
            taken.push_back(wanted);
        } else if (choice < 18 && !taken.empty()) {
            const auto at = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(taken.size())));
            block_ids.add(taken[at]);
            free.insert(taken[at]);
            taken.erase(taken.begin() + static_cast<std::ptrdiff_t>(at));
        } else if (choice == 18 && random.below(20) == 0) {
            const std::int64_t more = num_ids + random.below(3 * run + 70);
            block_ids.ensure(more);
            block_ids.grow(more);
            for (auto block_id = static_cast<BlockId>(num_ids); block_id < more; ++block_id) free.insert(block_id);
            num_ids = more;
        } else if (choice == 19 && random.below(40) == 0) {
            block_ids.fill();
            for (const BlockId block_id : taken) free.insert(block_id);
            taken.clear();
        }
        EXPECT(block_ids.size() == static_cast<std::int64_t>(free.size()));
        if (step % 16 == 0) {
            block_ids.check();
            for (BlockId block_id = 0; block_id < num_ids; ++block_id) EXPECT(block_ids.contains(block_id) == free.contains(block_id));
        }
    }
    block_ids.check();
}

}  // namespace

int main() {
    std::uint64_t seed = 0;
    for (const std::int64_t run : {1, 2, 8, 32, 512})
        for (const std::int64_t num_ids : {1, 7, 40, 64, 100, 1000, 5000}) test_random(num_ids, run, ++seed);
    std::puts("free_blocks_test: ok");
}
