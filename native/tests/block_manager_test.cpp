// The block manager on its own: long random workloads with every invariant proved after every call, memory that fails at
// every possible allocation, and named edge cases.
//
// The random workload drives two managers alike. In one of them each call is first made with the n-th allocation failing,
// for n = 0, 1, 2, ... until the call gets through: a failed call must have changed nothing, so in the end both agree in
// everything a caller can see, block ids included.
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "core/block_manager.hpp"
#include "tests/testing.hpp"

using namespace quire;
using quire::testing::FailAfter;
using quire::testing::Random;

namespace {

struct Setup {
    std::vector<Span> spans;
    std::int64_t num_blocks;
    std::int64_t block_size;
    bool prefix_caching = true;
    std::int64_t watermark_blocks = 0;
    bool overlapped_steps = false;
    std::int64_t run_blocks = 1;
    std::vector<std::int32_t> blocks_per_node = {};

    BlockManager make() const {
        return BlockManager(spans, num_blocks, block_size, prefix_caching, watermark_blocks, overlapped_steps, run_blocks,
                            blocks_per_node);
    }
};

const Span kFull{};
Span window(std::int64_t size) { return {Span::Kind::window, size}; }
Span chunked(std::int64_t size) { return {Span::Kind::chunked, size}; }

using Tokens = std::vector<Token>;

Prompt prompt(const Tokens& tokens, const std::vector<ExtraKey>& keys = {}, std::string_view name = "") {
    return {tokens, keys, name};
}

Tokens range(Token first, std::int64_t count) {
    Tokens tokens;
    for (std::int64_t at = 0; at < count; ++at) tokens.push_back(first + static_cast<Token>(at));
    return tokens;
}

std::shared_ptr<const StepPlan> reserve(BlockManager& manager, SequenceId id, std::int64_t num_new,
                                        std::int64_t num_lookahead = 0) {
    return manager.reserve({&id, 1}, {&num_new, 1}, num_lookahead);
}

// Opens, computes and commits a whole prompt; the id, left open. Null plans are errors.
SequenceId compute(BlockManager& manager, const Tokens& tokens, std::string_view name = "") {
    const SequenceId id = manager.open(prompt(tokens, {}, name));
    const std::int64_t num_cached = manager.num_cached_tokens(id);
    const auto num_tokens = static_cast<std::int64_t>(tokens.size());
    EXPECT(reserve(manager, id, num_tokens - num_cached) != nullptr);
    manager.commit(id, num_tokens);
    return id;
}

void compute_and_close(BlockManager& manager, const Tokens& tokens) { manager.close(compute(manager, tokens)); }

// Everything a caller can see of a manager.
std::vector<std::int64_t> visible(const BlockManager& manager, const std::vector<SequenceId>& open,
                                  std::size_t num_groups) {
    const Counts counts = manager.counts();
    const Stats& stats = manager.stats();
    std::vector<std::int64_t> all{counts.num_free,        counts.num_cached,     counts.num_held,
                                  counts.num_in_flight,      manager.num_nodes(),   manager.num_sequences(),
                                  stats.hit_tokens,       stats.query_tokens,    stats.evicted_blocks,
                                  stats.copied_blocks,    stats.deduplicated_blocks, manager.num_blocks()};
    for (const SequenceId id : open) {
        all.push_back(static_cast<std::int64_t>(manager.tokens(id).size()));
        all.push_back(manager.is_findable(id) ? 1 : 0);
        for (std::size_t group = 0; group < num_groups; ++group)
            for (const BlockId block_id : manager.block_table(id, static_cast<std::int64_t>(group))) all.push_back(block_id);
    }
    return all;
}

using Call = std::function<std::int64_t(BlockManager&)>;

// One step of the random workload. `look_at`: sequences that look for a longer hit first, which is a call of its own.
struct Step {
    Call call;
    std::vector<SequenceId> look_at{};
    bool reserves = false;
};

struct Workload {
    const Setup& setup;
    Random random;
    std::vector<SequenceId> open{};
    std::int64_t newest_step = 0;

    Tokens some_tokens(std::int64_t most) {
        Tokens tokens;
        for (std::int64_t at = random.below(most + 1); at > 0; --at)
            tokens.push_back(static_cast<Token>(random.below(2)));
        return tokens;
    }

    Step open_step() {
        Tokens tokens = some_tokens(4 * setup.block_size + 6);
        std::vector<ExtraKey> keys;
        if (!tokens.empty() && random.below(4) == 0)
            keys.push_back({random.below(static_cast<std::int64_t>(tokens.size())), random.below(2) == 0 ? "a" : "b"});
        const std::string name = random.below(5) == 0 ? "a namespace too long to be kept inside the string" : "";
        return {[=](BlockManager& manager) { return manager.open(prompt(tokens, keys, name)); }};
    }

    Step reserve_step() {
        std::vector<SequenceId> chosen;
        std::vector<std::int64_t> shares;
        for (const SequenceId id : open) {
            if (chosen.size() == 4 || random.below(2) == 0) continue;
            chosen.push_back(id);
            shares.push_back(random.below(3));
        }
        const std::int64_t num_lookahead = random.below(4) == 0 ? random.below(4) : 0;
        Call call = [=](BlockManager& manager) -> std::int64_t {
            std::vector<SequenceId> ids;
            std::vector<std::int64_t> num_new;
            for (std::size_t at = 0; at < chosen.size(); ++at) {
                const std::int64_t most = static_cast<std::int64_t>(manager.tokens(chosen[at]).size()) -
                                          manager.num_computed_tokens(chosen[at]);
                if (most < 1) continue;
                ids.push_back(chosen[at]);
                num_new.push_back(shares[at] == 0 ? 1 : std::max<std::int64_t>(1, most / shares[at]));
            }
            const auto plan = manager.reserve(ids, num_new, num_lookahead);
            quire::testing::allocations_left = -1;  // what follows is the test's own
            if (plan == nullptr) return -1;
            auto sum = static_cast<std::uint64_t>(plan->step);
            const auto add = [&sum](std::int64_t value) { sum = sum * 31 + static_cast<std::uint64_t>(value); };
            for (const GroupPlan& group : plan->groups) {
                for (std::int64_t at = 0; at < plan->num_tokens; ++at)
                    add(group.slot_mapping[static_cast<std::size_t>(at)]);
                std::vector<std::int32_t> tables(ids.size() * static_cast<std::size_t>(group.widest_table()));
                group.padded_tables(tables.data());
                for (const std::int32_t block_id : tables) add(block_id);
                for (const BlockCopy& copy : group.copies) {
                    add(copy.source);
                    add(copy.destination);
                    add(copy.num_tokens);
                }
            }
            return static_cast<std::int64_t>(sum & 0x7FFFFFFF);
        };
        return {std::move(call), chosen, true};
    }

    Step next() {
        if (open.empty()) return open_step();
        const SequenceId id = open[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(open.size())))];
        const std::int64_t kind = random.below(23);
        if (kind < 4) return open_step();
        if (kind < 9) return reserve_step();
        if (kind < 14) {
            const std::int64_t back = random.below(3);
            Call call = [=](BlockManager& manager) {
                const std::int64_t computed = manager.num_computed_tokens(id);
                // The most that may be committed is found out by asking for too much.
                for (auto n = static_cast<std::int64_t>(manager.tokens(id).size()); n > computed; --n) {
                    try {
                        manager.commit(id, std::max(computed, n - back));
                        return n;
                    } catch (const BadArgument&) {
                    }
                }
                return computed;
            };
            return {std::move(call), {id}};
        }
        if (kind < 16) {
            const Tokens tokens = some_tokens(3);
            return {[=](BlockManager& manager) {
                manager.append(id, tokens);
                return std::int64_t{0};
            }};
        }
        if (kind == 16) return {[=](BlockManager& manager) { return manager.fork(id); }};
        if (kind == 17) {
            const std::int64_t back = random.below(2 * setup.block_size);
            return {[=](BlockManager& manager) {
                const auto count = static_cast<std::int64_t>(manager.tokens(id).size());
                return manager.rewind(id, std::max<std::int64_t>(0, count - back));
            }};
        }
        if (kind == 18) return {[=](BlockManager& manager) { return manager.num_computed_tokens(id); }};
        if (kind == 19 && newest_step > 0) {
            const std::int64_t step = std::max<std::int64_t>(1, newest_step - random.below(3));
            return {[=](BlockManager& manager) {
                manager.complete(step);
                return std::int64_t{0};
            }};
        }
        if (kind == 20) {
            const std::int64_t num_blocks = std::max<std::int64_t>(1, setup.num_blocks / 2 + random.below(setup.num_blocks + 1));
            return {[=, watermark = setup.watermark_blocks](BlockManager& manager) -> std::int64_t {
                try {
                    const std::vector<BlockId> given_up = manager.resize(num_blocks, watermark);
                    quire::testing::allocations_left = -1;
                    std::int64_t sum = 0;
                    for (const BlockId block_id : given_up) sum = (sum * 31 + block_id) & 0x7FFFFFFF;
                    return sum;
                } catch (const BadArgument&) {  // more are held
                    return -1;
                }
            }};
        }
        if (kind == 21) {
            // Of one that is open, so that it is held; of everything now and then.
            const std::int64_t num_tokens = random.below(2 * setup.block_size);
            const bool is_told = random.below(2) == 0;
            return {[=](BlockManager& manager) {
                if (is_told) manager.record_events(true);
                const auto known = manager.tokens(id);
                const Tokens head(known.begin(), known.begin() + std::min<std::ptrdiff_t>(num_tokens, std::ssize(known)));
                const Dropped dropped = manager.drop(prompt(head));
                (void)manager.take_events();
                return dropped.num_freed * 1000 + dropped.num_in_use;
            }};
        }
        open.erase(std::find(open.begin(), open.end(), id));
        return {[=](BlockManager& manager) {
            manager.close(id);
            return std::int64_t{0};
        }};
    }
};

void random_workload(const Setup& setup, std::uint64_t seed, int num_steps) {
    Workload workload{setup, Random(seed)};
    BlockManager plain = setup.make();
    BlockManager failing = setup.make();
    for (int step = 0; step < num_steps; ++step) {
        const std::int64_t num_open = plain.num_sequences();
        const std::vector<SequenceId> open = workload.open;
        const Step next = workload.next();
        for (const SequenceId id : next.look_at) EXPECT(plain.num_computed_tokens(id) == failing.num_computed_tokens(id));
        const auto before = visible(failing, open, setup.spans.size());
        std::int64_t answer = 0;
        for (std::int64_t count = 0;; ++count) {
            try {
                const FailAfter failure(count);
                answer = next.call(failing);
                break;
            } catch (const std::bad_alloc&) {
            }
            EXPECT(visible(failing, open, setup.spans.size()) == before);
            failing.check();
        }
        EXPECT(next.call(plain) == answer);
        plain.check();
        failing.check();
        if (plain.num_sequences() > num_open) workload.open.push_back(answer);
        if (next.reserves && answer != -1) ++workload.newest_step;
        EXPECT(visible(plain, workload.open, setup.spans.size()) ==
               visible(failing, workload.open, setup.spans.size()));
    }
    for (const SequenceId id : workload.open) plain.close(id);
    plain.check();
    EXPECT(plain.counts().num_held == 0);
}

void one_block_is_enough_for_a_lone_sequence() {
    BlockManager manager = Setup{{kFull}, 1, 4}.make();
    compute_and_close(manager, range(0, 4));
    // The cached block says more than the hit of 2 tokens: there is no room to copy it, so it is taken over.
    const SequenceId id = manager.open(prompt(Tokens{0, 1, 9}));
    EXPECT(manager.num_cached_tokens(id) == 2);
    EXPECT(reserve(manager, id, 1) != nullptr);
    manager.commit(id, 3);
    manager.check();
    EXPECT(manager.stats().copied_blocks == 0);
    EXPECT(manager.block_table(id, 0)[0] == 0);
    manager.append(id, range(0, 2));
    EXPECT(reserve(manager, id, 2) == nullptr);  // a second block would be needed
    EXPECT(reserve(manager, id, 1) != nullptr);
    manager.close(id);
    EXPECT(manager.match(prompt(Tokens{0, 1, 9, 9})) == 3);
    EXPECT(manager.match(prompt(range(0, 5))) == 2);
}

// What a sequence holds is found no more, whatever it commits, and free when it ends; forks go with it.
void what_is_dropped_is_gone_when_its_sequence_ends() {
    BlockManager manager = Setup{{kFull, window(4)}, 24, 4}.make();
    const SequenceId id = compute(manager, range(0, 10));
    const SequenceId child = manager.fork(id);
    const std::int64_t num_held = manager.counts().num_held;
    const Dropped dropped = manager.drop(prompt(range(0, 3)));
    manager.check();
    EXPECT(dropped.num_freed + dropped.num_in_use > 0 && manager.counts().num_held == num_held);
    EXPECT(!manager.is_findable(id) && !manager.is_findable(child) && manager.num_nodes() == 0);
    for (const SequenceId one : {id, child, id}) {
        manager.append(one, range(50, 5));
        EXPECT(reserve(manager, one, 5) != nullptr);
        manager.commit(one, static_cast<std::int64_t>(manager.tokens(one).size()));
        manager.check();
        EXPECT(manager.match(prompt(range(0, 10))) == 0 && manager.num_nodes() == 0);
    }
    manager.rewind(child, 2);
    manager.close(id);
    manager.close(child);
    manager.check();
    EXPECT(manager.counts().num_free == 24);
}

void every_block_size_works() {
    for (const std::int64_t block_size : {1, 2, 3, 16, 17, 511, 512}) {
        BlockManager manager = Setup{{kFull, window(8)}, 4096, block_size}.make();
        const Tokens tokens = range(0, 1100);
        compute_and_close(manager, tokens);
        manager.check();
        EXPECT(manager.match(prompt(tokens)) == 1099);
        Tokens half = range(0, 1100);
        half[700] = 5000;
        // The window's blocks of the middle are still cached: nothing has needed their room.
        EXPECT(manager.match(prompt(half)) == 700);
    }
}

void a_plan_is_never_written_again() {
    BlockManager manager = Setup{{window(4)}, 16, 2, true, 0, true}.make();
    const SequenceId id = manager.open(prompt(range(0, 12)));
    const auto plan = reserve(manager, id, 12);
    std::vector<std::int32_t> before(6);
    plan->groups[0].padded_tables(before.data());
    EXPECT(before == std::vector<std::int32_t>({0, 1, 2, 3, 4, 5}));
    manager.commit(id, 12);  // gives up four blocks
    manager.rewind(id, 11);
    EXPECT(manager.block_table(id, 0)[0] == kNone);
    manager.append(id, range(99, 2));
    EXPECT(reserve(manager, id, 2) != nullptr);
    EXPECT(manager.block_table(id, 0)[5] != 5 && manager.block_table(id, 0)[6] != kNone);
    std::vector<std::int32_t> after(6);
    plan->groups[0].padded_tables(after.data());
    EXPECT(after == before);
}

void bad_arguments_change_nothing() {
    BlockManager manager = Setup{{kFull}, 8, 4}.make();
    const SequenceId id = manager.open(prompt(range(0, 6)));
    const auto refuses = [&](const std::function<void()>& call) {
        const auto before = visible(manager, {id}, 1);
        try {
            call();
        } catch (const BadArgument&) {
            EXPECT(visible(manager, {id}, 1) == before);
            manager.check();
            return true;
        } catch (const UnknownSequence&) {
            return visible(manager, {id}, 1) == before;
        }
        return false;
    };
    const std::vector<SequenceId> twice{id, id};
    const std::vector<std::int64_t> ones{1, 1};
    EXPECT(refuses([&] { (void)manager.reserve(twice, ones, 0); }));
    EXPECT(refuses([&] { (void)reserve(manager, id, 0); }));
    EXPECT(refuses([&] { (void)reserve(manager, id, 7); }));
    EXPECT(refuses([&] { (void)reserve(manager, id + 1, 1); }));
    EXPECT(refuses([&] { manager.commit(id, 1); }));
    EXPECT(refuses([&] { (void)manager.rewind(id, 7); }));
    EXPECT(refuses([&] { (void)manager.rewind(id, -1); }));
    EXPECT(refuses([&] { manager.complete(1); }));
    EXPECT(refuses([&] { manager.reset(); }));
    EXPECT(refuses([&] { (void)manager.block_table(id, 1); }));
    manager.close(id);
    EXPECT(manager.num_sequences() == 0);
    manager.reset();
}

// What it costs to evict does not depend on how many prompts are cached: no node is compared for it.
void evicting_visits_nothing() {
    for (const std::int64_t num_prompts : {500, 2000}) {
        BlockManager manager = Setup{{kFull}, 2 * num_prompts, 4}.make();
        for (std::int64_t at = 0; at < num_prompts; ++at)
            compute_and_close(manager, range(static_cast<Token>(10 * at), 8));
        EXPECT(manager.counts().num_free == 0);
        const SequenceId id = manager.open(prompt(range(1 << 20, 400)));
        const std::int64_t before = manager.num_visited();
        EXPECT(reserve(manager, id, 400) != nullptr);
        EXPECT(manager.num_visited() == before);
        EXPECT(manager.stats().evicted_blocks == 100);
        manager.check();
    }
}

void resizing_gives_up_what_nobody_holds_and_grows_again() {
    for (const bool overlapped : {false, true}) {
        BlockManager manager = Setup{{kFull}, 10, 4, true, 0, overlapped}.make();
        compute_and_close(manager, range(0, 16));  // four cached blocks
        const SequenceId id = compute(manager, range(100, 12));
        if (overlapped) manager.complete(2);
        const Counts before = manager.counts();
        EXPECT(before.num_held == 3 && before.num_cached == 4 && before.num_free == 3);
        bool refused = false;
        try {
            manager.resize(2, 0);
        } catch (const BadArgument&) {
            refused = true;
        }
        EXPECT(refused && manager.num_blocks() == 10 && manager.counts().num_cached == 4);
        EXPECT(manager.resize(8, 0).size() == 2);  // free ones first
        EXPECT(manager.counts().num_cached == 4 && manager.counts().num_free == 1);
        EXPECT(manager.match(prompt(range(0, 16))) == 15);
        std::vector<BlockId> given_up = manager.resize(3, 0);
        EXPECT(given_up.size() == 5 && manager.counts().num_cached == 0 && manager.stats().evicted_blocks == 4);
        for (const BlockId block_id : manager.block_table(id, 0)) {
            EXPECT(std::find(given_up.begin(), given_up.end(), block_id) == given_up.end());
        }
        EXPECT(manager.match(prompt(range(0, 16))) == 0 && manager.match(prompt(range(100, 12))) == 11);
        manager.check();
        manager.append(id, range(0, 1));
        EXPECT(reserve(manager, id, 1) == nullptr);
        EXPECT(manager.resize(40, 0).empty());
        EXPECT(manager.counts().num_free == 37);
        manager.append(id, range(0, 147));
        EXPECT(reserve(manager, id, 148) != nullptr);  // every new block
        EXPECT(manager.counts().num_free == 0);
        manager.check();
        manager.close(id);
        manager.check();
    }
}

void a_million_blocks_take_no_memory_before_they_are_used() {
    BlockManager manager = Setup{{kFull}, 1 << 20, 16}.make();
    // 16 bytes a block, 24 a node, 4 of ghosts, a few bits of the free blocks, and its tokens.
    EXPECT(manager.capacity_bytes() <= ((1 << 20) + 1) * (45 + 16 * sizeof(Token)));
    compute_and_close(manager, range(0, 100));
    manager.check();
}

// A call of several owners is decided as a whole: the one below its floor takes what is free, and what it has cached
// serves the other.
void floors_and_quotas_are_kept() {
    BlockManager manager = Setup{{kFull}, 10, 4}.make();
    manager.set_limits(1, 10, -1);
    const auto open = [&](Token first, std::int32_t owner_id) { return manager.open(prompt(range(first, 20)), owner_id); };
    SequenceId id = open(0, 1);
    EXPECT(reserve(manager, id, 20) != nullptr);
    manager.commit(id, 20);
    manager.close(id);
    const std::vector<SequenceId> ids{open(100, 1), open(200, 2)};
    const std::vector<std::int64_t> counts{20, 20};
    EXPECT(manager.num_available_blocks(2) == 5);
    EXPECT(manager.reserve(ids, counts, 0) != nullptr);
    manager.check();
    EXPECT(manager.owner_counts(1).num_held == 5 && manager.owner_counts(2).num_held == 5);
    for (const SequenceId open_id : ids) manager.close(open_id);
    manager.set_limits(1, 0, 2);
    id = open(300, 1);
    EXPECT(reserve(manager, id, 12) == nullptr);
    EXPECT(reserve(manager, id, 8) != nullptr);
    manager.check();
}

// Events survive failing memory: a call that fails notes nothing, and is made again.
void events_are_noted_once_whatever_allocation_fails() {
    BlockManager manager = Setup{{kFull, window(4)}, 12, 4}.make();
    manager.record_events(true);
    (void)manager.take_events();
    std::size_t num_stored = 0;
    std::size_t num_removed = 0;
    const auto insist = [&](const std::function<void()>& call) {
        for (std::int64_t count = 0;; ++count) {
            try {
                const FailAfter failure(count);
                call();
                break;
            } catch (const std::bad_alloc&) {
            }
            EXPECT(manager.take_events().events.empty());
            manager.check();
        }
        for (const Event& event : manager.take_events().events)
            ++(event.kind == Event::Kind::stored ? num_stored : num_removed);
    };
    for (Token first = 0; first < 500; first += 100) {
        const SequenceId id = manager.open(prompt(range(first, 16)), first / 100, 2);
        insist([&] { EXPECT(reserve(manager, id, 16) != nullptr); });
        insist([&] { manager.commit(id, 16); });
        manager.close(id);
    }
    EXPECT(num_stored == 20 && num_removed > 10);
    insist([&] { (void)manager.drop(prompt(range(400, 5))); });
    insist([&] { (void)manager.resize(4, 0); });
    insist([&] { (void)manager.resize(16, 0); });
    insist([&] { manager.reset(); });
    manager.check();
    EXPECT(manager.tree().nodes.empty());
}

}  // namespace

int main() {
    one_block_is_enough_for_a_lone_sequence();
    what_is_dropped_is_gone_when_its_sequence_ends();
    every_block_size_works();
    a_plan_is_never_written_again();
    bad_arguments_change_nothing();
    evicting_visits_nothing();
    resizing_gives_up_what_nobody_holds_and_grows_again();
    a_million_blocks_take_no_memory_before_they_are_used();
    floors_and_quotas_are_kept();
    events_are_noted_once_whatever_allocation_fails();
    const std::vector<Setup> setups{
        {{kFull}, 12, 4},
        {{kFull}, 24, 1},
        {{kFull, window(5)}, 24, 2, true, 2},
        {{window(3)}, 10, 2},
        {{window(1), chunked(4)}, 20, 3, true, 0, true},
        {{kFull, kFull}, 16, 2, true, 1, true},
        {{chunked(6), kFull}, 20, 4, false},
        {{kFull, window(3)}, 20, 6, true, 0, true, 1, {1, 3}},
        {{kFull, window(5)}, 24, 4, true, 1, false, 1, {2, 1}},
    };
    for (std::size_t at = 0; at < setups.size(); ++at)
        for (std::uint64_t seed = 0; seed < 3; ++seed) random_workload(setups[at], 100 * at + seed, 200);
    EXPECT(quire::testing::num_failed > 1000);
    std::printf("block_manager_test: ok, %lld failed allocations survived\n",
                static_cast<long long>(quire::testing::num_failed));
}
