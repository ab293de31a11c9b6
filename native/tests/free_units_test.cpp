// The free units against a plain set: random takes and gives, runs of several lengths, growth, and filling anew.
#include <cstdio>
#include <set>
#include <vector>

#include "core/free_units.hpp"
#include "tests/testing.hpp"

using namespace quire;
using quire::testing::Random;

namespace {

// What `take` is defined by.
UnitId expected(const std::set<UnitId>& free, std::int64_t num_ids, std::int64_t run, UnitId before, std::int64_t position) {
    if (before != kNone && free.contains(before + 1)) return before + 1;
    for (std::int64_t first = 0; first + run <= num_ids; first += run) {
        std::int64_t count = 0;
        while (count < run && free.contains(static_cast<UnitId>(first + count))) ++count;
        if (count == run) return static_cast<UnitId>(first + position % run);
    }
    return *free.begin();
}

void test_random(std::int64_t num_ids, std::int64_t run, std::uint64_t seed) {
    Random random(seed);
    FreeUnits units(num_ids, run);
    std::set<UnitId> free;
    for (UnitId unit = 0; unit < num_ids; ++unit) free.insert(unit);
    std::vector<UnitId> taken;
    for (int step = 0; step < 600; ++step) {
        const auto choice = random.below(20);
        if (choice < 11 && !free.empty()) {
            const UnitId before = taken.empty() || random.below(3) == 0 ? kNone : taken.back();
            const std::int64_t position = random.below(3 * run);
            const UnitId wanted = expected(free, num_ids, run, before, position);
            EXPECT(units.take(before, position) == wanted);
            free.erase(wanted);
            taken.push_back(wanted);
        } else if (choice < 12 && !free.empty()) {
            const UnitId wanted = *free.begin();
            EXPECT(units.take_lowest() == wanted);
            free.erase(wanted);
            taken.push_back(wanted);
        } else if (choice < 18 && !taken.empty()) {
            const auto at = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(taken.size())));
            units.add(taken[at]);
            free.insert(taken[at]);
            taken.erase(taken.begin() + static_cast<std::ptrdiff_t>(at));
        } else if (choice == 18 && random.below(20) == 0) {
            const std::int64_t more = num_ids + random.below(3 * run + 70);
            units.ensure(more);
            units.grow(more);
            for (auto unit = static_cast<UnitId>(num_ids); unit < more; ++unit) free.insert(unit);
            num_ids = more;
        } else if (choice == 19 && random.below(40) == 0) {
            units.fill();
            for (const UnitId unit : taken) free.insert(unit);
            taken.clear();
        }
        EXPECT(units.size() == static_cast<std::int64_t>(free.size()));
        if (step % 16 == 0) {
            units.check();
            for (UnitId unit = 0; unit < num_ids; ++unit) EXPECT(units.contains(unit) == free.contains(unit));
        }
    }
    units.check();
}

}  // namespace

int main() {
    std::uint64_t seed = 0;
    for (const std::int64_t run : {1, 2, 8, 32, 512})
        for (const std::int64_t num_ids : {1, 7, 40, 64, 100, 1000, 5000}) test_random(num_ids, run, ++seed);
    std::puts("free_units_test: ok");
}
