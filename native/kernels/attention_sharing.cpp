#include "kernels/attention_sharing.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/attention_kernel.hpp"

namespace quire {

namespace {

// Entries that two tables have alike, of `count`.
std::int64_t agreeing(const std::int32_t* a, const std::int32_t* b, std::int64_t count) {
    if (std::memcmp(a, b, static_cast<std::size_t>(count) * sizeof(std::int32_t)) == 0) return count;  // nearly always
    return std::mismatch(a, a + count, b).first - a;
}

class Finder {
  public:
    Finder(const AttentionBatch& batch, std::int64_t block_size, const AttentionOptions& options, std::int64_t group, std::int64_t item_rows)
        : batch_(batch), block_size_(block_size), group_(group), item_rows_(item_rows) {
        const auto n = static_cast<std::size_t>(batch.num_sequences);
        found_.place.assign(n, -1);
        found_.last.assign(n, -1);
        for (std::int64_t s = 0; s < batch.num_sequences; ++s) add_candidate(s, options);
        std::sort(members_.begin(), members_.end(), [](const Member& a, const Member& b) { return a.begin < b.begin; });
        for (std::size_t i = 0, j; i < members_.size(); i = j) {
            for (j = i + 1; j < members_.size() && members_[j].begin == members_[i].begin;) ++j;
            part(i, j, members_[i].begin / block_size_, members_[i].begin, -1);
        }
    }

    SharedRuns take() {
        drop_unkept();
        std::int32_t rows = 0;
        for (const Member& member : members_) {
            found_.place[static_cast<std::size_t>(member.sequence)] = static_cast<std::int32_t>(found_.order.size());
            found_.order.push_back(member.sequence);
            found_.first_row.push_back(rows);
            rows += member.rows;
        }
        for (std::size_t r = 0; r < found_.runs.size(); ++r) {  // children come later and have the last word
            for (std::int32_t m = found_.runs[r].member_start; m < found_.runs[r].member_stop; ++m) {
                found_.last[static_cast<std::size_t>(found_.order[static_cast<std::size_t>(m)])] = static_cast<std::int32_t>(r);
            }
        }
        return std::move(found_);
    }

  private:
    struct Member {
        std::int32_t sequence, rows;
        std::int64_t begin, limit;  // of the tokens it may share
        std::int32_t entry;         // the table's, where the members are being parted
    };

    void add_candidate(std::int64_t s, const AttentionOptions& options) {
        const std::int64_t num_tokens = batch_.query_start[s + 1] - batch_.query_start[s], first = batch_.context_lengths[s] - num_tokens;
        const std::int64_t begin = first_visible(options, first), limit = first - first % kMostTileTokens;
        if (begin != first_visible(options, batch_.context_lengths[s] - 1) || begin % kPartialTokens != 0) return;
        if (limit <= begin || 2 * num_tokens * group_ > item_rows_) return;
        members_.push_back({static_cast<std::int32_t>(s), static_cast<std::int32_t>(num_tokens * group_), begin, limit, 0});
    }

    const std::int32_t* table(const Member& member) const { return batch_.block_tables + member.sequence * batch_.table_width; }

    // Members [first, last) agree on all blocks before `block`; tokens before `start` are in runs. Those that also agree on
    // `block` have something to share.
    void part(std::size_t first, std::size_t last, std::int64_t block, std::int64_t start, std::int32_t parent) {
        const auto from = members_.begin() + static_cast<std::ptrdiff_t>(first), to = members_.begin() + static_cast<std::ptrdiff_t>(last);
        const auto ended = std::partition(from, to, [&](const Member& m) { return m.limit > block * block_size_; });
        for (auto m = from; m != ended; ++m) m->entry = table(*m)[block];
        std::sort(from, ended, [](const Member& a, const Member& b) { return a.entry != b.entry ? a.entry < b.entry : a.sequence < b.sequence; });
        for (auto i = from, j = from; i != ended; i = j) {
            for (j = i + 1; j != ended && j->entry == i->entry;) ++j;
            if (j - i < 2) continue;
            share(static_cast<std::size_t>(i - members_.begin()), static_cast<std::size_t>(j - members_.begin()), block + 1, start, parent);
        }
    }

    // Members [first, last) agree on all blocks before `block`.
    void share(std::size_t first, std::size_t last, std::int64_t block, std::int64_t start, std::int32_t parent) {
        std::int64_t limit = members_[first].limit;
        for (std::size_t m = first; m < last; ++m) limit = std::min(limit, members_[m].limit);
        std::int64_t agreed = std::max(block, (limit + block_size_ - 1) / block_size_);
        const std::int32_t* one = table(members_[first]);
        for (std::size_t m = first + 1; m < last; ++m) {
            agreed = block + agreeing(one + block, table(members_[m]) + block, agreed - block);
        }
        const std::int64_t shared = std::min(limit, agreed * block_size_), stop = shared - shared % kMostTileTokens;
        const auto run = static_cast<std::int32_t>(found_.runs.size());
        found_.runs.push_back({parent, static_cast<std::int32_t>(first), static_cast<std::int32_t>(last), start, std::max(start, stop)});
        kept_.push_back(true);
        if (limit > agreed * block_size_) {
            part(first, last, agreed, std::max(start, stop), run);
        } else {  // some member has no more; the others still agree
            const auto from = members_.begin() + static_cast<std::ptrdiff_t>(first), to = members_.begin() + static_cast<std::ptrdiff_t>(last);
            const auto ended = std::partition(from, to, [&](const Member& m) { return m.limit > limit; });
            if (ended - from > 1) share(first, static_cast<std::size_t>(ended - members_.begin()), agreed, std::max(start, stop), run);
        }
        if (!worth_it(run)) leave_to_children(run);
    }

    std::int64_t rows_of(const SharedRun& run) const {
        std::int64_t rows = 0;
        for (std::int32_t m = run.member_start; m < run.member_stop; ++m) rows += members_[static_cast<std::size_t>(m)].rows;
        return rows;
    }

    std::int64_t items_of(std::int64_t rows) const { return (rows + item_rows_ - 1) / item_rows_; }

    // The rule of S3. All runs after `index` are below it.
    bool worth_it(std::int32_t index) const {
        constexpr std::int64_t kReadRows = 6, kStateRows = 20, kRunRows = 500;
        const SharedRun& run = found_.runs[static_cast<std::size_t>(index)];
        const std::int64_t rows = rows_of(run), tokens = run.token_stop - run.token_start;
        std::int64_t items = run.member_stop - run.member_start;
        for (auto r = static_cast<std::size_t>(index) + 1; r < found_.runs.size(); ++r) {
            const SharedRun& child = found_.runs[r];
            if (kept_[r] && child.parent == index) items -= child.member_stop - child.member_start - items_of(rows_of(child));
        }
        return tokens * kReadRows * (items - items_of(rows)) > rows * kStateRows + kRunRows;
    }

    void leave_to_children(std::int32_t index) {
        const SharedRun run = found_.runs[static_cast<std::size_t>(index)];
        kept_[static_cast<std::size_t>(index)] = false;
        for (auto r = static_cast<std::size_t>(index) + 1; r < found_.runs.size(); ++r) {
            SharedRun& child = found_.runs[r];
            if (child.parent == index) child.parent = run.parent, child.token_start = run.token_start;
        }
    }

    void drop_unkept() {
        std::vector<std::int32_t> index(found_.runs.size(), -1);
        std::size_t count = 0;
        for (std::size_t r = 0; r < found_.runs.size(); ++r) {
            if (!kept_[r]) continue;
            SharedRun run = found_.runs[r];
            if (run.parent >= 0) run.parent = index[static_cast<std::size_t>(run.parent)];
            index[r] = static_cast<std::int32_t>(count);
            found_.runs[count++] = run;
        }
        found_.runs.resize(count);
    }

    const AttentionBatch& batch_;
    const std::int64_t block_size_;
    const std::int64_t group_;
    const std::int64_t item_rows_;
    std::vector<Member> members_;
    std::vector<bool> kept_;  // of each run
    SharedRuns found_;
};

}  // namespace

SharedRuns find_shared_runs(const AttentionBatch& batch, std::int64_t block_size, const AttentionOptions& options, std::int64_t group,
                            std::int64_t item_rows) {
    return Finder(batch, block_size, options, group, item_rows).take();
}

}  // namespace quire
