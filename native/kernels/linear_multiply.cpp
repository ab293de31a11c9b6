// The product of a packed linear layer: how the work is cut into tasks and blocks. linear.hpp has the contract, the tiles
// (linear_tiles.hpp, linear_amx.hpp) the arithmetic.
#include "kernels/linear.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "kernels/profile.hpp"
#include "kernels/rounding.hpp"
#include "kernels/scratch.hpp"
#include "kernels/thread_pool.hpp"

namespace quire {

namespace {

constexpr std::int64_t kSerialProducts = 1 << 18;  // below, waking another thread costs more than it saves
constexpr std::int64_t kLineBytes = 64;
constexpr std::int64_t kAliasBytes = 2048;         // rows that far apart fall on the same lines of the first cache
constexpr std::int64_t kFewTiles = 4;              // up to so many tiles of rows the weights' stream decides the order
constexpr std::int64_t kHalfCache = 1 << 20;       // of a second cache of 2 MiB

thread_local GrownBuffer staged_scratch;  // the caller's: activations in the kernel's type, one pass
thread_local GrownBuffer sums_scratch;    // each thread's: sums of one task
thread_local GrownBuffer wide_scratch;    // each thread's: one panel's range in float32
thread_local GrownBuffer taken_scratch;   // each thread's: results of one task that are taken, not written

template <typename Task>
void run_tasks(std::int64_t num_products, std::int64_t num_tasks, Task&& task) {
    if (num_products < kSerialProducts) {
        for (std::int64_t i = 0; i < num_tasks; ++i) task(i);
    } else {
        ThreadPool::instance().run(num_tasks, task);
    }
}

// Rows of a pass: as many as the kernel keeps of them, in parts as even as can be.
std::int64_t rows_of_pass(const LinearKernel& kernel, std::int64_t rows, std::int64_t depth) {
    const std::int64_t kept = kernel.pass_bytes / (std::min(kernel.many_range, depth) * kernel.staged_bytes);
    const std::int64_t most = std::clamp(kept / kernel.tile_rows * kernel.tile_rows, (kFewTiles + 1) * kernel.tile_rows, kernel.pass_rows);
    return even_part(rows, most, kernel.tile_rows);
}

// Tasks of one target and one pass: `chunk` panels by `group_rows` rows each. Where there are too few panels for the
// threads, the rows are split too.
struct Division {
    bool few;
    std::int64_t chunk, num_chunks, group_rows, num_tasks;

    Division(const LinearKernel& kernel, std::int64_t num_panels, std::int64_t depth, std::int64_t unit, std::int64_t pass_rows, std::int64_t threads) {
        few = pass_rows <= kernel.tile_rows * kFewTiles;
        chunk = few ? std::clamp<std::int64_t>(num_panels / (threads * 8) / 4 * 4, 4, 32) : 4;
        // Activations that the second cache does not keep from one chunk to the next are worth a wider one.
        if (!few && pass_rows * depth * kernel.staged_bytes > kHalfCache && num_panels >= 2 * chunk * 2 * threads) chunk *= 2;
        chunk = round_up(chunk, std::lcm(unit, kernel.columns) / kernel.columns);
        num_chunks = divide_up(num_panels, chunk);
        const std::int64_t wanted = num_chunks < 2 * threads ? divide_up(4 * threads, num_chunks) : 1;
        group_rows = round_up(divide_up(pass_rows, wanted), kernel.tile_rows);
        num_tasks = num_chunks * divide_up(pass_rows, group_rows);
    }
};

}  // namespace

void PackedWeight::multiply(const void* x, std::int64_t rows, const void* bias, void* out) const {
    const LinearTarget target{this, bias, out};
    multiply_together(&target, 1, x, rows);
}

std::int64_t PackedWeight::input_stride() const {
    const std::int64_t bytes = element_bytes(element_);
    return num_inputs_ * bytes % kAliasBytes == 0 ? num_inputs_ + kLineBytes / bytes : num_inputs_;
}

void multiply_together(const LinearTarget* targets, int num_targets, const void* x, std::int64_t rows, std::int64_t x_stride) {
    const Span span(Operator::linear);
    if (num_targets < 1) throw std::invalid_argument("expected at least 1 weight to multiply with, got " + std::to_string(num_targets));
    const PackedWeight& like = *targets[0].weight;
    for (int i = 0; i < num_targets; ++i) {
        for (const PackedWeight* weight : {targets[i].weight, targets[i].second}) {
            if (weight == nullptr) continue;
            if (weight->element_ != like.element_ || weight->isa_ != like.isa_ || weight->num_inputs_ != like.num_inputs_) {
                throw std::invalid_argument("expected weights of one element, variant and number of inputs (" +
                                            std::string(isa_name(like.isa_)) + ", " + std::to_string(like.num_inputs_) + "), got (" +
                                            std::string(isa_name(weight->isa_)) + ", " + std::to_string(weight->num_inputs_) +
                                            ") or another element at position " + std::to_string(i));
            }
            if (weight->num_outputs_ != targets[i].weight->num_outputs_) {
                throw std::invalid_argument("expected a second weight of as many outputs as the first, got " + std::to_string(weight->num_outputs_));
            }
        }
    }
    const LinearKernel& kernel = *like.kernel_;
    const std::int64_t bytes = element_bytes(like.element_), num_inputs = like.num_inputs_, depth = like.depth_;
    const std::int64_t x_bytes = (x_stride == 0 ? num_inputs : x_stride) * bytes;
    const std::int64_t threads = ThreadPool::instance().num_threads();
    std::int64_t num_outputs = 0;
    for (int i = 0; i < num_targets; ++i) num_outputs += targets[i].weight->num_outputs_ * (targets[i].second == nullptr ? 1 : 2);

    const std::int64_t most_rows = rows_of_pass(kernel, rows, depth);
    for (std::int64_t start = 0; start < rows; start += most_rows) {
        const std::int64_t pass_rows = std::min(most_rows, rows - start);
        const auto* pass_x = static_cast<const unsigned char*>(x) + start * x_bytes;
        const bool direct = kernel.stage_is_copy && depth == num_inputs &&
                            (pass_rows <= kernel.tile_rows || x_bytes % kAliasBytes != 0);
        const unsigned char* activations = pass_x;
        std::int64_t stride = x_bytes;
        if (!direct) {
            // One line more than the row: see kAliasBytes.
            stride = round_up(depth * kernel.staged_bytes, kLineBytes) + kLineBytes;
            unsigned char* staged = staged_scratch.get(static_cast<std::size_t>(stride * pass_rows));
            const std::int64_t rows_a_task = std::max<std::int64_t>(1, 8192 / num_inputs);
            run_tasks(pass_rows * num_inputs * 4, divide_up(pass_rows, rows_a_task), [&](std::int64_t task) {
                const std::int64_t end = std::min((task + 1) * rows_a_task, pass_rows);
                for (std::int64_t row = task * rows_a_task; row < end; ++row) {
                    kernel.stage(pass_x + row * x_bytes, num_inputs, staged + row * stride, depth);
                }
            });
            activations = staged;
        }

        // Columns [first, first + count) of rows [row, row + num_rows) of the pass, written to `out`. `after`: the panel that the thread is
        // likely to take then.
        const auto multiply = [&](const PackedWeight& weight, const void* all_bias, std::int64_t first, std::int64_t count, std::int64_t row,
                                  std::int64_t num_rows, unsigned char* out, std::int64_t out_stride, bool few, bool streams,
                                  const unsigned char* after) {
            const std::int64_t columns = kernel.columns, panel_bytes = weight.panel_bytes_;
            const std::int64_t panel = first / columns, num_panels = divide_up(count, columns);
            LinearBlock block;
            block.activation_stride = stride;
            block.rows = num_rows;
            block.panel_stride = panel_bytes;
            block.sums_stride = num_panels * columns;
            auto* sums = reinterpret_cast<float*>(sums_scratch.get(static_cast<std::size_t>(round_up(num_rows, kernel.tile_rows) * block.sums_stride * 4)));
            const std::int64_t most_range = num_rows <= kernel.tile_rows ? depth : few ? kernel.few_range : kernel.many_range;
            const std::int64_t part = even_part(depth, most_range, kernel.depth);
            block.wide = nullptr;
            if (kernel.widens && num_rows > 2 * kernel.tile_rows) {
                block.wide = reinterpret_cast<float*>(wide_scratch.get(static_cast<std::size_t>(part * columns * 4)));
            }
            const auto* bias = all_bias == nullptr ? nullptr : static_cast<const unsigned char*>(all_bias) + first * bytes;
            block.out_stride = out_stride;
            const auto run = [&](std::int64_t first_panel, std::int64_t panels, std::int64_t k, std::int64_t range) {
                block.activations = activations + row * stride + k * kernel.staged_bytes;
                const unsigned char* panels_data = weight.data_ + (panel + first_panel) * panel_bytes;
                block.panels = panels_data + k * columns * bytes;
                block.num_panels = panels;
                block.ahead_bytes = kernel.ahead_bytes;
                block.after = k + range < depth                     ? block.panels + range * columns * bytes
                              : first_panel + panels < num_panels ? panels_data + panels * panel_bytes
                                                                    : after;
                block.depth = range;
                block.sums = sums + first_panel * columns;
                block.first = k == 0;
                const bool last = k + range == depth;
                block.out = last ? out + first_panel * columns * bytes : nullptr;
                block.streams = last && streams;
                block.out_columns = count - first_panel * columns;
                block.bias = bias == nullptr ? nullptr : bias + first_panel * columns * bytes;
                kernel.multiply(block);
            };
            const std::int64_t together = few && num_rows > kernel.tile_rows ? 1 : num_panels;
            for (std::int64_t p = 0; p < num_panels; p += together) {
                for (std::int64_t k = 0; k < depth; k += part) run(p, together, k, std::min(part, depth - k));
            }
        };
        const auto division = [&](int i) { return Division(kernel, targets[i].weight->num_panels_, like.depth_, targets[i].unit, pass_rows, threads); };
        // Calls visit(target, its division, task of it) for a task of all targets, if there are as many.
        const auto find_task = [&](std::int64_t task, auto&& visit) {
            for (int i = 0; i < num_targets; ++i) {
                const Division own = division(i);
                if (task < own.num_tasks) return visit(targets[i], own, task);
                task -= own.num_tasks;
            }
        };
        const auto work = [&](const LinearTarget& target, const Division& division, std::int64_t task, const unsigned char* after) {
            const PackedWeight& weight = *target.weight;
            const std::int64_t first = task % division.num_chunks * division.chunk * kernel.columns;
            const std::int64_t row = task / division.num_chunks * division.group_rows;
            const std::int64_t count = std::min(division.chunk * kernel.columns, weight.num_outputs_ - first);
            const std::int64_t num_rows = std::min(division.group_rows, pass_rows - row);
            if (target.out != nullptr) {
                const std::int64_t out_stride = weight.num_outputs_ * bytes;
                auto* out = static_cast<unsigned char*>(target.out) + (start + row) * out_stride + first * bytes;
                // What the second cache would not keep for its reader need not be read into it to be written.
                const bool streams = !division.few && pass_rows * out_stride >= kHalfCache && out_stride % kLineBytes == 0 &&
                                     reinterpret_cast<std::uintptr_t>(target.out) % kLineBytes == 0;
                return multiply(weight, target.bias, first, count, row, num_rows, out, out_stride, division.few, streams, after);
            }
            const std::int64_t own_stride = round_up(count * bytes, kLineBytes), own_bytes = num_rows * own_stride;
            unsigned char* taken = taken_scratch.get(static_cast<std::size_t>(own_bytes * (target.second == nullptr ? 1 : 2)));
            LinearResult result{start + row, num_rows, first, count, {taken, nullptr}, own_stride};
            if (target.second == nullptr) {
                multiply(weight, target.bias, first, count, row, num_rows, taken, own_stride, division.few, false, after);
            } else {
                const unsigned char* seconds = target.second->data_ + first / kernel.columns * target.second->panel_bytes_;
                multiply(weight, target.bias, first, count, row, num_rows, taken, own_stride, division.few, false, seconds);
                result.values[1] = taken + own_bytes;
                multiply(*target.second, target.second_bias, first, count, row, num_rows, taken + own_bytes, own_stride, division.few, false, after);
            }
            target.take(result);
        };
        std::int64_t num_tasks = 0;
        for (int i = 0; i < num_targets; ++i) num_tasks += division(i).num_tasks;
        run_tasks(pass_rows * num_inputs * num_outputs, num_tasks, [&](std::int64_t task) {
            // Threads take their tasks in turn, so this one's next is likely to be `threads` further.
            const unsigned char* after = like.data_;
            find_task(task + threads, [&](const LinearTarget& target, const Division& own, std::int64_t next) {
                after = target.weight->data_ + next % own.num_chunks * own.chunk * target.weight->panel_bytes_;
            });
            find_task(task, [&](const LinearTarget& target, const Division& own, std::int64_t own_task) { work(target, own, own_task, after); });
        });
    }
}

}  // namespace quire
