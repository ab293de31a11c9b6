#include "kernels/attention_schedule.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels/attention_sharing.hpp"
#include "kernels/rounding.hpp"

namespace quire {

namespace {

void check_tables(const PagedView& view, const AttentionBatch& batch, const AttentionOptions& options) {
    for (std::int64_t s = 0; s < batch.num_sequences; ++s) {
        const std::int64_t context = batch.context_lengths[s], num_rows = batch.query_start[s + 1] - batch.query_start[s];
        if (num_rows < 1 || context < num_rows || (context - 1) / view.block_size >= batch.table_width) {
            throw std::invalid_argument("expected 1 to context_length query rows and a table of the context's blocks, got " +
                                        std::to_string(num_rows) + " rows, a context of " + std::to_string(context) + " and " +
                                        std::to_string(batch.table_width) + " blocks of " + std::to_string(view.block_size) +
                                        " for sequence " + std::to_string(s));
        }
        const std::int64_t begin = first_visible(options, context - num_rows);
        const std::int32_t* table = batch.block_tables + s * batch.table_width;
        std::uint32_t most = 0;  // -1 is the largest of all
        for (std::int64_t b = begin / view.block_size; b <= (context - 1) / view.block_size; ++b) {
            most = std::max(most, static_cast<std::uint32_t>(table[b]));
        }
        if (most >= static_cast<std::uint64_t>(view.num_blocks)) {
            throw std::invalid_argument("expected blocks of 0 to " + std::to_string(view.num_blocks - 1) + " for positions " +
                                        std::to_string(begin) + " to " + std::to_string(context - 1) + ", got " +
                                        std::to_string(static_cast<std::int32_t>(most)) + " in the table of sequence " + std::to_string(s));
        }
    }
}

// Cuts a call into items of about equal work: enough that no thread waits long for another, and none so small that
// scheduling it costs more than computing it.
class Partition {
  public:
    Partition(const AttentionKind& kind, const AttentionBatch& batch, const AttentionOptions& options, AttentionSchedule& schedule)
        : kind_(kind), batch_(batch), options_(options), schedule_(schedule), item_rows_(item_rows(kind, batch)) {
        if (batch.share_prefixes) shared_ = find_shared_runs(batch, kind.block_size, options, kind.group, item_rows_);
        constexpr std::int64_t kItemsPerThread = 16, kItemsOfFewRows = 2, kLeastCost = 4096;
        std::int64_t total = 0, unshared_tokens = 0;
        for (std::int64_t s = 0; s < batch.num_sequences; ++s) {
            each_row_tile(s, [&](const RowTile& tile) {
                total += tile.cost() * kind.num_kv_heads;
                unshared_tokens += tile.token_stop - first_visible(options, first_position(s) + tile.start / kind.group);
            });
        }
        for (std::size_t r = 0; r < shared_.runs.size(); ++r) {
            each_row_tile_of_run(r, [&](const RowTile& tile) { total += tile.cost() * kind.num_kv_heads; });
        }
        const auto target = [&](std::int64_t items) {
            return batch.num_threads == 1 ? total : std::max(kLeastCost, total / (items * batch.num_threads));
        };
        target_ = target(kItemsPerThread), few_rows_target_ = target(kItemsOfFewRows);
        for (std::size_t r = 0; r < shared_.runs.size(); ++r) cut_run(r);
        for (const bool shares : {false, true}) {
            for (std::int64_t s = 0; s < batch.num_sequences; ++s) {
                if ((last_run(s) >= 0) != shares) continue;
                const auto first = static_cast<std::ptrdiff_t>(schedule.items.size());
                each_row_tile(s, [&](const RowTile& tile) { cut(tile); });
                std::sort(schedule.items.begin() + first, schedule.items.end(), head_by_head);
            }
        }
        for (const std::int32_t s : shared_.order) {
            for (std::int32_t token = batch.query_start[s]; token < batch.query_start[s + 1]; ++token) schedule.shared_tokens.push_back(token);
        }
        schedule.traffic = {head_tokens_ * kind.token_bytes, unshared_tokens * kind.num_kv_heads * kind.token_bytes,
                            static_cast<std::int64_t>(schedule.runs.size())};
    }

  private:
    static constexpr std::int64_t kRowStep = 16;  // of the widest product's block of rows

    struct RowTile {
        std::int32_t run, sequence, before, shared_row;
        std::int64_t start, stop, token_start, token_stop;
        // Of one kv head, in tokens read: six rows are about as dear to compute as a token is to read.
        std::int64_t cost() const { return (token_stop - token_start) * (6 + stop - start); }
        std::int64_t first_partial() const { return token_start / kPartialTokens; }
        std::int64_t num_partials() const { return (token_stop - 1) / kPartialTokens + 1 - first_partial(); }
    };

    // A row tile finds a head's keys and values in the second cache if the tile before has read them.
    static bool head_by_head(const AttentionItem& a, const AttentionItem& b) {
        if (a.head_start != b.head_start) return a.head_start < b.head_start;
        return a.row_start != b.row_start ? a.row_start > b.row_start : a.token_start < b.token_start;
    }

    std::int64_t num_tokens(std::int64_t s) const { return batch_.query_start[s + 1] - batch_.query_start[s]; }
    std::int64_t first_position(std::int64_t s) const { return batch_.context_lengths[s] - num_tokens(s); }
    std::int32_t last_run(std::int64_t s) const { return shared_.last.empty() ? -1 : shared_.last[static_cast<std::size_t>(s)]; }
    std::int32_t first_row(std::int32_t place) const { return shared_.first_row[static_cast<std::size_t>(place)]; }

    // Rows of an item at most: many, as all of them share the work that a tile of tokens takes once, but some items for each
    // thread.
    static std::int64_t item_rows(const AttentionKind& kind, const AttentionBatch& batch) {
        constexpr std::int64_t kItemsPerThread = 8, kLeast = 96;
        const std::int64_t fitting = std::min<std::int64_t>(kItemRows, kItemFloats / kind.state_stride / kRowStep * kRowStep);
        const std::int64_t all = batch.query_start[batch.num_sequences] * kind.group * kind.num_kv_heads;
        return std::clamp(all / (kItemsPerThread * batch.num_threads) / kRowStep * kRowStep, kLeast, fitting);
    }

    template <class Visit>
    void each_piece(std::int64_t num_rows, Visit&& visit) const {  // the last rows first: in a prefill they see most
        const std::int64_t pieces = divide_up(num_rows, item_rows_), step = even_part(num_rows, item_rows_, kRowStep);
        for (std::int64_t piece = pieces; piece-- > 0;) {
            const std::int64_t start = piece * step, stop = std::min(num_rows, start + step);
            if (start < stop) visit(start, stop);
        }
    }

    // Of a sequence: the tokens that no run has.
    template <class Visit>
    void each_row_tile(std::int64_t s, Visit&& visit) const {
        const std::int32_t before = last_run(s);
        each_piece(num_tokens(s) * kind_.group, [&](std::int64_t start, std::int64_t stop) {
            const std::int64_t first = first_position(s) + start / kind_.group, last = first_position(s) + (stop - 1) / kind_.group;
            RowTile tile{-1, static_cast<std::int32_t>(s), before, 0, start, stop, first_visible(options_, first), last + 1};
            if (before >= 0) {
                tile.token_start = shared_.runs[static_cast<std::size_t>(before)].token_stop;
                tile.shared_row = first_row(shared_.place[static_cast<std::size_t>(s)]) + static_cast<std::int32_t>(start);
            }
            visit(tile);
        });
    }

    std::int64_t rows_of_run(const SharedRun& run) const {
        const std::int32_t last = run.member_stop - 1;
        return first_row(last) + num_tokens(shared_.order[static_cast<std::size_t>(last)]) * kind_.group - first_row(run.member_start);
    }

    template <class Visit>
    void each_row_tile_of_run(std::size_t index, Visit&& visit) const {
        const SharedRun& run = shared_.runs[index];
        const std::int32_t first = first_row(run.member_start);
        each_piece(rows_of_run(run), [&](std::int64_t start, std::int64_t stop) {
            visit(RowTile{static_cast<std::int32_t>(index), shared_.order[static_cast<std::size_t>(run.member_start)], run.parent,
                          first + static_cast<std::int32_t>(start), start, stop, run.token_start, run.token_stop});
        });
    }

    struct Cut {
        std::int64_t heads, partials;  // of an item
    };

    // Few rows wait for memory: several heads together, in the order in which a block's heads lie in memory, and rather
    // fewer tokens. Items of eight times the size, because an item begins slowly and its partials' states come and go through
    // memory (two threads: Xeon with AMX, four times: 8 x 8 192 tokens at 25.0 instead of 22.8 GB/s, 1 x 32 768 at 24.4 instead
    // of 23.0; Zen 5, eight instead of four times: 1 x 2 048 tokens at 42 instead of 38, 8 x 8 192 at 45.0 instead of 42.8).
    // Where the heads of a token lie together and there are more rows, items of twice the size, of four times before their
    // heads are cut: an item begins and ends with a tile of all heads during which nothing is read ahead, and with half of
    // each token to read, two threads took 16 % longer than head by head (4 x 1 024 tokens; 11 % with all heads, 2 to 4 % in
    // larger items).
    // `heads_first`: rather fewer heads, and all the tokens.
    Cut cut_of(const RowTile& tile, bool heads_first) const {
        const std::int64_t num_partials = tile.num_partials(), cost = tile.cost();
        std::int64_t heads = std::min(kind_.num_kv_heads, std::max<std::int64_t>(1, item_rows_ / (tile.stop - tile.start)));
        std::int64_t partials = num_partials;
        if (heads_first && cost <= 2 * target_) {
            heads = std::clamp<std::int64_t>(target_ / cost, 1, heads);
        } else if (cost * heads > target_) {
            const bool few_rows = tile.stop - tile.start <= kRowStep;
            std::int64_t wanted = few_rows ? few_rows_target_ : target_, most = wanted;
            if (kind_.token_major) wanted = std::max(wanted, 2 * target_), most = std::max(most, 4 * target_);
            partials = std::clamp<std::int64_t>(num_partials * wanted / (cost * heads), 1, num_partials);
            const std::int64_t part = cost * partials / num_partials;
            if (part * heads > most) heads = std::clamp<std::int64_t>(most / std::max<std::int64_t>(part, 1), 1, heads);
        }
        const std::int64_t head_items = (kind_.num_kv_heads + heads - 1) / heads;
        return {(kind_.num_kv_heads + head_items - 1) / head_items, partials};
    }

    // Items of a tile's heads [head, head_stop), each of `partials`; how many there are.
    std::int32_t add_items(const RowTile& tile, std::int64_t head, std::int64_t head_stop, std::int64_t partials, std::int32_t split) {
        std::int32_t count = 0;
        for (std::int64_t start = tile.token_start; start < tile.token_stop; ++count) {
            const std::int64_t stop = std::min(tile.token_stop, (start / kPartialTokens + partials) * kPartialTokens);
            schedule_.items.push_back({tile.run, tile.sequence, static_cast<std::int32_t>(head), static_cast<std::int32_t>(head_stop),
                                       static_cast<std::int32_t>(tile.start), static_cast<std::int32_t>(tile.stop), start, stop, split,
                                       tile.before, tile.shared_row});
            head_tokens_ += (stop - start) * (head_stop - head);
            start = stop;
        }
        return count;
    }

    void cut(const RowTile& tile) {
        const Cut cut = cut_of(tile, false);
        const std::int64_t num_partials = tile.num_partials(), num_items = (num_partials + cut.partials - 1) / cut.partials;
        for (std::int64_t head = 0; head < kind_.num_kv_heads; head += cut.heads) {
            const std::int64_t head_stop = std::min(kind_.num_kv_heads, head + cut.heads);
            std::int32_t split = -1;
            if (num_items > 1) {
                split = static_cast<std::int32_t>(schedule_.splits.size());
                schedule_.splits.push_back({schedule_.num_floats, static_cast<std::int32_t>(tile.first_partial()),
                                            static_cast<std::int32_t>(num_partials), static_cast<std::int32_t>(num_items)});
                schedule_.num_floats += (head_stop - head) * num_partials * state_floats(tile.stop - tile.start, kind_.state_stride);
            }
            add_items(tile, head, head_stop, cut.partials, split);
        }
    }

    void cut_run(std::size_t index) {
        const SharedRun& run = shared_.runs[index];
        AttentionRun made{run.parent, false, first_row(run.member_start), static_cast<std::int32_t>(rows_of_run(run)),
                          run.token_start, run.token_stop, schedule_.num_floats, 0, 0};
        RowTile widest{};
        each_row_tile_of_run(index, [&](const RowTile& tile) {
            if (tile.stop - tile.start > widest.stop - widest.start) widest = tile;
        });
        const Cut cut = cut_of(widest, made.num_rows * kind_.num_kv_heads > item_rows_);
        made.merged = cut.partials >= widest.num_partials() && (run.parent < 0 || schedule_.runs[static_cast<std::size_t>(run.parent)].merged);
        made.num_states = made.merged ? 1 + (run.token_stop % kPartialTokens != 0) : static_cast<std::int32_t>(widest.num_partials());
        each_row_tile_of_run(index, [&](const RowTile& tile) {
            for (std::int64_t head = 0; head < kind_.num_kv_heads; head += cut.heads) {
                made.num_items += add_items(tile, head, std::min(kind_.num_kv_heads, head + cut.heads), cut.partials, -1);
            }
        });
        schedule_.num_floats += kind_.num_kv_heads * made.num_states * state_floats(made.num_rows, kind_.state_stride);
        schedule_.runs.push_back(made);
    }

    const AttentionKind& kind_;
    const AttentionBatch& batch_;
    const AttentionOptions& options_;
    AttentionSchedule& schedule_;
    const std::int64_t item_rows_;
    SharedRuns shared_;
    std::int64_t target_ = 0, few_rows_target_ = 0;  // cost of an item
    std::int64_t head_tokens_ = 0;  // read by all items
};

}  // namespace

const AttentionSchedule& AttentionSchedules::of(const PagedView& view, const AttentionBatch& batch, const AttentionOptions& options,
                                                std::int64_t num_q_heads, Isa isa) {
    const AttentionKind kind{view.num_blocks, view.block_size, view.num_kv_heads, num_q_heads / view.num_kv_heads,
                             view.token_bytes(),
                             state_stride(view.v.width, sums_by_lanes(isa, view)),
                             options.window, options.chunk, view.token_major()};
    const std::lock_guard lock(mutex_);
    for (const auto& kept : kept_) {
        if (kept->kind == kind) return kept->schedule;
    }
    check_tables(view, batch, options);
    auto kept = std::make_unique<Kept>(Kept{kind, {}});
    const Partition partition(kept->kind, batch, options, kept->schedule);
    kept_.push_back(std::move(kept));
    return kept_.back()->schedule;
}

AttentionBatch::AttentionBatch(const std::int32_t* query_start_, const std::int32_t* context_lengths_, const std::int32_t* block_tables_,
                               std::int64_t num_sequences_, std::int64_t table_width_, int num_threads_, bool share_prefixes_)
    : query_start(query_start_), context_lengths(context_lengths_), block_tables(block_tables_), num_sequences(num_sequences_),
      table_width(table_width_), num_threads(num_threads_), share_prefixes(share_prefixes_), schedules(std::make_unique<AttentionSchedules>()) {}

AttentionBatch::~AttentionBatch() = default;

}  // namespace quire
