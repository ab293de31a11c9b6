// The product of a packed linear layer: cutting the work into tasks and blocks. linear.hpp has the contract, the tiles
// (linear_tiles.hpp, linear_amx.hpp) the arithmetic.
#include "kernels/linear.hpp"

#include <algorithm>
#include <cstring>
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
constexpr std::int64_t kLeastTaskBytes = 1 << 17;  // of weights for few rows: a task begins with waiting for the memory
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

    Division(const LinearKernel& kernel, std::int64_t num_panels, std::int64_t panel_bytes, std::int64_t depth, std::int64_t unit, std::int64_t pass_rows,
             std::int64_t threads) {
        few = pass_rows <= kernel.tile_rows * kFewTiles;
        const auto panels_of = [&](std::int64_t tasks) { return std::clamp<std::int64_t>(num_panels / (threads * tasks) / 4 * 4, 4, 32); };
        chunk = few ? std::min(std::max(panels_of(8), round_up(divide_up(kLeastTaskBytes, panel_bytes), 4)), std::max(panels_of(8), panels_of(4))) : kernel.many_panels;
        // Activations that the second cache does not keep from one chunk to the next are worth a wider one.
        if (!few && pass_rows * depth * kernel.staged_bytes > kHalfCache && num_panels >= 2 * chunk * 2 * threads) chunk *= 2;
        chunk = round_up(chunk, std::lcm(unit, kernel.columns) / kernel.columns);
        num_chunks = divide_up(num_panels, chunk);
        const std::int64_t wanted = num_chunks < 2 * threads ? divide_up(4 * threads, num_chunks) : 1;
        group_rows = round_up(divide_up(pass_rows, wanted), kernel.tile_rows);
        num_tasks = num_chunks * divide_up(pass_rows, group_rows);
    }
};

// Rows in the kernel's type, close to each other but for a line: see kAliasBytes. In the caller's scratch; `stride` becomes theirs.
// sums: with stage_sums' behind each, from `round_up(depth * staged_bytes, kLineBytes)` on.
const unsigned char* stage(const LinearKernel& kernel, std::int64_t num_inputs, std::int64_t depth, const unsigned char* x, std::int64_t x_bytes,
                           std::int64_t rows, bool sums, std::int64_t& stride) {
    const std::int64_t of_x = round_up(depth * kernel.staged_bytes, kLineBytes);
    const std::int64_t own_stride = stride = of_x + (sums ? round_up(depth * 3 / 32 * 4, kLineBytes) : 0) + kLineBytes;
    unsigned char* staged = staged_scratch.get(static_cast<std::size_t>(own_stride * rows));
    const std::int64_t rows_a_task = std::max<std::int64_t>(1, 8192 / num_inputs);
    run_tasks(rows * num_inputs * 4, divide_up(rows, rows_a_task), [&](std::int64_t task) {
        const std::int64_t end = std::min((task + 1) * rows_a_task, rows);
        for (std::int64_t row = task * rows_a_task; row < end; ++row) {
            kernel.stage(x + row * x_bytes, num_inputs, staged + row * own_stride, depth);
            if (sums) kernel.stage_sums(staged + row * own_stride, depth, reinterpret_cast<float*>(staged + row * own_stride + of_x));
        }
    });
    return staged;
}

// What one thread multiplies at a time: rows by columns that begin with a panel.
struct Part {
    const QuantizedForm* form;               // of codes; null of a dense weight
    const unsigned char* panels;
    std::int64_t panel_bytes, bytes, depth;  // of a panel, of an element; of K
    const unsigned char* bias;               // of the columns, or null
    std::int64_t columns;
    const unsigned char* activations;
    std::int64_t stride, rows;
    unsigned char* out;
    std::int64_t out_stride;
    bool few, streams;
    const unsigned char* after;  // the panel that the thread is likely to take then
};

void multiply_part(const LinearKernel& kernel, const Part& part) {
    const std::int64_t num_panels = divide_up(part.columns, kernel.columns), k_bytes = kernel.columns * part.bytes;
    LinearBlock block;
    block.activation_stride = part.stride;
    block.rows = part.rows;
    block.panel_stride = part.panel_bytes;
    block.sums_stride = num_panels * kernel.columns;
    block.ahead_bytes = kernel.ahead_bytes;
    block.next_to_second = kernel.next_to_second;
    block.out_stride = part.out_stride;
    auto* sums = reinterpret_cast<float*>(sums_scratch.get(static_cast<std::size_t>(round_up(part.rows, kernel.tile_rows) * block.sums_stride * 4)));
    const std::int64_t most_range = part.rows <= kernel.tile_rows ? part.depth : part.few ? kernel.few_range : kernel.many_range;
    const std::int64_t range = even_part(part.depth, most_range, kernel.depth);
    block.wide = nullptr;
    block.form = part.form;
    if (part.form != nullptr) {  // whole panels, all of K
        const auto padded = round_up(part.rows, kernel.tile_rows);
        block.wide = reinterpret_cast<float*>(wide_scratch.get(part.form->scratch_floats(padded, num_panels) * 4));
        block.activations = part.activations;
        block.sums_of_x_offset = round_up(part.depth * kernel.staged_bytes, kLineBytes);
        block.panels = part.panels;
        block.num_panels = num_panels;
        block.after = part.after;
        block.depth = part.depth;
        block.sums = sums;
        block.first = true;
        block.out = part.out;
        block.streams = part.streams;
        block.out_columns = part.columns;
        block.bias = part.bias;
        return kernel.multiply(block);
    }
    if (kernel.widens && part.rows > 2 * kernel.tile_rows) {
        block.wide = reinterpret_cast<float*>(wide_scratch.get(static_cast<std::size_t>(range * kernel.columns * 4)));
    }
    const std::int64_t together = part.few && part.rows > kernel.tile_rows ? 1 : num_panels;
    for (std::int64_t p = 0; p < num_panels; p += together) {
        const unsigned char* panels = part.panels + p * part.panel_bytes;
        for (std::int64_t k = 0; k < part.depth; k += range) {
            const bool last = k + range >= part.depth;
            block.activations = part.activations + k * kernel.staged_bytes;
            block.panels = panels + k * k_bytes;
            block.num_panels = together;
            block.depth = std::min(range, part.depth - k);
            block.after = !last ? block.panels + range * k_bytes : p + together < num_panels ? panels + together * part.panel_bytes : part.after;
            block.sums = sums + p * kernel.columns;
            block.first = k == 0;
            block.out = last ? part.out + p * k_bytes : nullptr;
            block.streams = last && part.streams;
            block.out_columns = part.columns - p * kernel.columns;
            block.bias = part.bias == nullptr ? nullptr : part.bias + p * k_bytes;
            kernel.multiply(block);
        }
    }
}

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
            if (!weight->goes_with(like)) {
                throw std::invalid_argument("expected weights of one element, variant and number of inputs (" +
                                            std::string(isa_name(like.isa_)) + ", " + std::to_string(like.num_inputs_) + "), got (" +
                                            std::string(isa_name(weight->isa_)) + ", " + std::to_string(weight->num_inputs_) +
                                            "), another element, or codes beside dense weights at position " + std::to_string(i));
            }
            if (weight->num_outputs_ != targets[i].weight->num_outputs_) {
                throw std::invalid_argument("expected a second weight of as many outputs as the first, got " + std::to_string(weight->num_outputs_));
            }
        }
    }
    const LinearKernel& kernel = like.few_kernel_ != nullptr && rows <= kFewRows ? *like.few_kernel_ : *like.kernel_;
    const std::int64_t bytes = element_bytes(like.element_), num_inputs = like.num_inputs_, depth = like.depth_;
    const std::int64_t x_bytes = (x_stride == 0 ? num_inputs : x_stride) * bytes;
    const std::int64_t threads = ThreadPool::instance().num_threads();
    std::int64_t num_outputs = 0;
    for (int i = 0; i < num_targets; ++i) num_outputs += targets[i].weight->num_outputs_ * (targets[i].second == nullptr ? 1 : 2);

    bool takes_sums = false;  // of x over groups
    for (int i = 0; i < num_targets; ++i) {
        for (const PackedWeight* weight : {targets[i].weight, targets[i].second}) {
            takes_sums = takes_sums || (weight != nullptr && weight->is_quantized() && weight->form_->has_minimums());
        }
    }

    // Passes whose rows are read in place have their tasks in one go: no thread waits for another between them.
    const std::int64_t most_rows = rows_of_pass(kernel, rows, depth);
    const bool direct = kernel.stage_is_copy && depth == num_inputs && (std::min(most_rows, rows) <= kernel.tile_rows || x_bytes % kAliasBytes != 0);
    const std::int64_t together = direct ? rows : most_rows;
    for (std::int64_t start = 0; start < rows; start += together) {
        const std::int64_t count = std::min(together, rows - start);
        const unsigned char* activations = static_cast<const unsigned char*>(x) + start * x_bytes;
        std::int64_t stride = x_bytes;
        if (!direct) activations = stage(kernel, num_inputs, depth, activations, x_bytes, count, takes_sums, stride);

        const auto division = [&](int i, std::int64_t pass_rows) {
            return Division(kernel, targets[i].weight->num_panels_, targets[i].weight->panel_bytes_, depth, targets[i].unit, pass_rows, threads);
        };
        const auto tasks_of_pass = [&](std::int64_t pass_rows) {
            std::int64_t num_tasks = 0;
            for (int i = 0; i < num_targets; ++i) num_tasks += division(i, pass_rows).num_tasks;
            return num_tasks;
        };
        const std::int64_t full_rows = std::min(most_rows, count), full_tasks = tasks_of_pass(full_rows);
        const std::int64_t full_passes = count / full_rows, last_rows = count - full_passes * full_rows;
        const std::int64_t num_tasks = full_passes * full_tasks + (last_rows > 0 ? tasks_of_pass(last_rows) : 0);
        // Calls visit(target, its division, task of it, the pass's first row and its rows), if there are as many tasks.
        const auto find_task = [&](std::int64_t task, auto&& visit) {
            if (task >= num_tasks) return;
            const std::int64_t pass = std::min(task / full_tasks, full_passes), pass_rows = pass < full_passes ? full_rows : last_rows;
            task -= pass * full_tasks;
            for (int i = 0;; ++i) {
                const Division own = division(i, pass_rows);
                if (task < own.num_tasks) return visit(targets[i], own, task, pass * full_rows, pass_rows);
                task -= own.num_tasks;
            }
        };
        run_tasks(count * num_inputs * num_outputs, num_tasks, [&](std::int64_t index) {
            // Threads take their tasks in turn, so this one's next is likely to be `threads` further.
            const unsigned char* after = like.data_;
            find_task(index + threads, [&](const LinearTarget& target, const Division& own, std::int64_t task, std::int64_t, std::int64_t) {
                after = target.weight->data_ + task % own.num_chunks * own.chunk * target.weight->panel_bytes_;
            });
            find_task(index, [&](const LinearTarget& target, const Division& own, std::int64_t task, std::int64_t pass_start, std::int64_t pass_rows) {
                const PackedWeight& weight = *target.weight;
                const std::int64_t first = task % own.num_chunks * own.chunk * kernel.columns;
                const std::int64_t row = pass_start + task / own.num_chunks * own.group_rows;
                const std::int64_t columns = std::min(own.chunk * kernel.columns, weight.num_outputs_ - first);
                const std::int64_t num_rows = std::min(own.group_rows, pass_start + pass_rows - row);
                const auto part_of = [&](const PackedWeight& of, const void* bias, unsigned char* out, std::int64_t out_stride, bool streams, const unsigned char* next) {
                    const auto* own_bias = bias == nullptr ? nullptr : static_cast<const unsigned char*>(bias) + first * bytes;
                    return Part{of.form_.get(), of.data_ + first / kernel.columns * of.panel_bytes_, of.panel_bytes_, bytes, depth, own_bias, columns, activations + row * stride,
                                stride, num_rows, out, out_stride, own.few, streams, next};
                };
                if (target.out != nullptr) {
                    const std::int64_t out_stride = weight.num_outputs_ * bytes;
                    auto* out = static_cast<unsigned char*>(target.out) + (start + row) * out_stride + first * bytes;
                    // What the second cache would not keep for its reader need not be read into it to be written.
                    const bool streams = !own.few && pass_rows * out_stride >= kHalfCache && out_stride % kLineBytes == 0 &&
                                         reinterpret_cast<std::uintptr_t>(target.out) % kLineBytes == 0;
                    return multiply_part(kernel, part_of(weight, target.bias, out, out_stride, streams, after));
                }
                const std::int64_t out_stride = round_up(columns * bytes, kLineBytes), own_bytes = num_rows * out_stride;
                unsigned char* taken = taken_scratch.get(static_cast<std::size_t>(own_bytes * (target.second == nullptr ? 1 : 2)));
                LinearResult result{start + row, num_rows, first, columns, {taken, nullptr}, out_stride};
                if (target.second == nullptr) {
                    multiply_part(kernel, part_of(weight, target.bias, taken, out_stride, false, after));
                } else {
                    const unsigned char* second = target.second->data_ + first / kernel.columns * target.second->panel_bytes_;
                    multiply_part(kernel, part_of(weight, target.bias, taken, out_stride, false, second));
                    result.values[1] = taken + own_bytes;
                    multiply_part(kernel, part_of(*target.second, target.second_bias, result.values[1], out_stride, false, after));
                }
                target.take(result);
            });
        });
    }
}

void multiply_each(const PackedWeight* const* weights, std::int64_t num_weights, const PartedRows& x, std::int64_t rows, const PartedRows& out) {
    for (std::int64_t i = 0; i < num_weights; ++i) {
        if (!weights[i]->goes_with(*weights[0]) || weights[i]->num_outputs() != weights[0]->num_outputs()) {
            throw std::invalid_argument("expected weights of one element, variant and shape, got another at position " + std::to_string(i));
        }
    }
    if (num_weights == 0) return;
    const std::int64_t bytes = element_bytes(weights[0]->element());
    const auto multiply = [&](std::int64_t i) {
        auto* const to = static_cast<unsigned char*>(out.data) + i * out.part_stride * bytes;
        const auto take = [&](const LinearResult& result) {
            for (std::int64_t row = 0; row < result.rows; ++row) {
                std::memcpy(to + ((result.row + row) * out.row_stride + result.column) * bytes, result.values[0] + row * result.stride,
                            static_cast<std::size_t>(result.columns * bytes));
            }
        };
        const LinearTarget target{weights[i], nullptr, nullptr, take};
        multiply_together(&target, 1, static_cast<const unsigned char*>(x.data) + i * x.part_stride * bytes, rows, x.row_stride);
    };
    // Products below kSerialProducts call no other thread, so that threads may take them whole.
    const std::int64_t products = rows * weights[0]->num_inputs() * weights[0]->num_outputs();
    if (products < kSerialProducts && products * num_weights >= kSerialProducts) return ThreadPool::instance().run(num_weights, multiply);
    for (std::int64_t i = 0; i < num_weights; ++i) multiply(i);
}

}  // namespace quire
