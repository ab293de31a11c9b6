#include "kernels/linear.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <sys/mman.h>

#include "kernels/profile.hpp"
#include "kernels/thread_pool.hpp"

namespace quire {

namespace {

constexpr std::int64_t kPageBytes = 2 << 20;      // a huge page: fewer address translations on the way through the weights
constexpr std::int64_t kSerialProducts = 1 << 18;  // below, waking another thread costs more than it saves
constexpr std::int64_t kFewTiles = 4;             // up to so many tiles of rows the weights' stream decides the order

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t round_up(std::int64_t a, std::int64_t b) { return divide_up(a, b) * b; }

const LinearKernel& kernel_of(Isa isa, Element element) {
    switch (isa) {
        case Isa::portable: return linear_kernel_portable(element);
        case Isa::emulated_avx512: return linear_kernel_emulated_avx512(element);
        case Isa::emulated_avx512_bf16: return linear_kernel_emulated_avx512_bf16(element);
        case Isa::emulated_amx_bf16: return linear_kernel_emulated_amx_bf16(element);
#if defined(__x86_64__)
        case Isa::avx2: return linear_kernel_avx2(element);
        case Isa::avx512: return linear_kernel_avx512(element);
        case Isa::avx512_bf16: return linear_kernel_avx512_bf16(element);
        case Isa::amx_bf16: return linear_kernel_amx_bf16(element);
#else
        default: break;
#endif
    }
    return linear_kernel_portable(element);
}

// A thread's buffer, as large as the largest request so far; 64-byte aligned, contents undefined.
class Scratch {
  public:
    ~Scratch() { std::free(data_); }
    unsigned char* get(std::size_t num_bytes) {
        if (num_bytes > size_) {
            std::free(data_);
            size_ = round_up(static_cast<std::int64_t>(num_bytes), 4096);
            data_ = static_cast<unsigned char*>(std::aligned_alloc(64, size_));
            if (data_ == nullptr) std::abort();  // a task must not throw (T3); a few MiB that cannot be had end the process anyway
        }
        return data_;
    }

  private:
    unsigned char* data_ = nullptr;
    std::size_t size_ = 0;
};

thread_local Scratch staged_scratch;  // the caller's: activations in the kernel's type, one pass
thread_local Scratch sums_scratch;    // each thread's: sums of one task

// Calls visit(position in the panel, k, column) for k and column below the bounds, in blocks that stay in the first cache.
template <PanelLayout layout, typename Visit>
void visit_panel(std::int64_t columns, std::int64_t num_columns, std::int64_t num_inputs, Visit&& visit) {
    constexpr std::int64_t kBlock = 32;
    for (std::int64_t start = 0; start < num_inputs; start += kBlock) {
        const std::int64_t end = std::min(start + kBlock, num_inputs);
        for (std::int64_t column = 0; column < num_columns; ++column) {
            for (std::int64_t k = start; k < end; ++k) visit(panel_index(layout, columns, k, column), k, column);
        }
    }
}

template <typename Visit>
void visit_panel(PanelLayout layout, std::int64_t columns, std::int64_t num_columns, std::int64_t num_inputs, Visit&& visit) {
    switch (layout) {
        case PanelLayout::rows: return visit_panel<PanelLayout::rows>(columns, num_columns, num_inputs, visit);
        case PanelLayout::split_pairs: return visit_panel<PanelLayout::split_pairs>(columns, num_columns, num_inputs, visit);
        case PanelLayout::depth_pairs: return visit_panel<PanelLayout::depth_pairs>(columns, num_columns, num_inputs, visit);
        case PanelLayout::tiles: return visit_panel<PanelLayout::tiles>(columns, num_columns, num_inputs, visit);
    }
}

// A panel of 16-bit elements in a layout that keeps pairs along k together, from rows contiguous along k: as visit_panel
// would, in pairs and a line of each row at a time.
template <PanelLayout layout>
void pack_pairs(const std::uint16_t* from, std::int64_t stride, std::int64_t columns, std::int64_t num_columns, std::int64_t num_inputs,
                std::uint16_t* to) {
    constexpr std::int64_t kBlock = 32, kColumns = 32;
    std::uint32_t lines[kColumns][kBlock / 2 + 1];  // one more, so that a column of it does not fall on one set of the cache
    for (std::int64_t first = 0; first < num_columns; first += kColumns) {
        const std::int64_t count = std::min(kColumns, num_columns - first);
        const std::uint16_t* rows = from + first * stride;
        std::int64_t start = 0;
        for (; start + kBlock <= num_inputs; start += kBlock) {
            for (std::int64_t c = 0; c < count; ++c) std::memcpy(lines[c], rows + c * stride + start, kBlock * 2);
            for (std::int64_t pair = 0; pair < kBlock / 2; ++pair) {
                for (std::int64_t c = 0; c < count; ++c) {
                    std::memcpy(to + panel_index(layout, columns, start + 2 * pair, first + c), &lines[c][pair], 4);
                }
            }
        }
        for (std::int64_t k = start; k < num_inputs; ++k) {
            for (std::int64_t c = 0; c < count; ++c) to[panel_index(layout, columns, k, first + c)] = rows[c * stride + k];
        }
    }
}

// Calls f with a value of the unsigned integer type as wide as the element.
template <typename Function>
void with_word(Element element, Function&& f) {
    if (element_bytes(element) == 4) {
        f(std::uint32_t{});
    } else {
        f(std::uint16_t{});
    }
}

unsigned char* allocate(std::size_t num_bytes) {
    const bool huge = num_bytes >= kPageBytes;
    const std::size_t alignment = huge ? kPageBytes : 64;
    auto* data = static_cast<unsigned char*>(std::aligned_alloc(alignment, round_up(static_cast<std::int64_t>(num_bytes), 64)));
    if (data == nullptr) throw std::bad_alloc();
    if (huge) madvise(data, num_bytes, MADV_HUGEPAGE);
    return data;
}

}  // namespace

void PackedWeight::Free::operator()(void* data) const { std::free(data); }

PackedWeight::PackedWeight(Element element, const void* weight, std::int64_t num_outputs, std::int64_t num_inputs,
                           std::int64_t output_stride, std::int64_t input_stride, Isa isa)
    : element_(element), isa_(isa), kernel_(&kernel_of(isa, element)), num_outputs_(num_outputs), num_inputs_(num_inputs) {
    if (num_outputs < 1 || num_inputs < 1) {
        throw std::invalid_argument("expected a weight of at least 1 x 1, got " + std::to_string(num_outputs) + " x " +
                                    std::to_string(num_inputs));
    }
    if (!isa_supported(isa)) {
        throw std::invalid_argument("this processor cannot run the variant " + std::string(isa_name(isa)));
    }
    const LinearKernel& kernel = *kernel_;
    depth_ = round_up(num_inputs, kernel.depth);
    panel_bytes_ = depth_ * kernel.columns * element_bytes(element);
    num_panels_ = divide_up(num_outputs, kernel.columns);
    num_bytes_ = static_cast<std::size_t>(num_panels_ * panel_bytes_);
    data_.reset(allocate(num_bytes_));
    with_word(element, [&](auto zero) {
        using Word = decltype(zero);
        ThreadPool::instance().run(num_panels_, [&](std::int64_t panel) {
            auto* to = reinterpret_cast<Word*>(data_.get() + panel * panel_bytes_);
            const std::int64_t first = panel * kernel.columns;
            const std::int64_t num_columns = std::min(kernel.columns, num_outputs - first);
            if (num_columns < kernel.columns || depth_ > num_inputs) std::memset(to, 0, static_cast<std::size_t>(panel_bytes_));
            const auto* from = static_cast<const Word*>(weight) + first * output_stride;
            if constexpr (sizeof(Word) == 2) {
                if (input_stride == 1 && kernel.layout == PanelLayout::depth_pairs) {
                    return pack_pairs<PanelLayout::depth_pairs>(from, output_stride, kernel.columns, num_columns, num_inputs, to);
                }
                if (input_stride == 1 && kernel.layout == PanelLayout::tiles) {
                    return pack_pairs<PanelLayout::tiles>(from, output_stride, kernel.columns, num_columns, num_inputs, to);
                }
            }
            visit_panel(kernel.layout, kernel.columns, num_columns, num_inputs,
                        [&](std::int64_t position, std::int64_t k, std::int64_t column) {
                            to[position] = from[column * output_stride + k * input_stride];
                        });
        });
    });
}

void PackedWeight::unpack(void* out) const {
    const LinearKernel& kernel = *kernel_;
    with_word(element_, [&](auto zero) {
        using Word = decltype(zero);
        ThreadPool::instance().run(num_panels_, [&](std::int64_t panel) {
            const auto* from = reinterpret_cast<const Word*>(data_.get() + panel * panel_bytes_);
            const std::int64_t first = panel * kernel.columns;
            auto* to = static_cast<Word*>(out) + first * num_inputs_;
            visit_panel(kernel.layout, kernel.columns, std::min(kernel.columns, num_outputs_ - first), num_inputs_,
                        [&](std::int64_t position, std::int64_t k, std::int64_t column) { to[column * num_inputs_ + k] = from[position]; });
        });
    });
}

void PackedWeight::gather_rows(const std::int64_t* ids, std::int64_t num_ids, void* out) const {
    for (std::int64_t i = 0; i < num_ids; ++i) {
        if (ids[i] < 0 || ids[i] >= num_outputs_) {
            throw std::out_of_range("expected ids in [0, " + std::to_string(num_outputs_) + "), got " + std::to_string(ids[i]) +
                                    " at position " + std::to_string(i));
        }
    }
    const LinearKernel& kernel = *kernel_;
    with_word(element_, [&](auto zero) {
        using Word = decltype(zero);
        const auto gather = [&](std::int64_t i) {
            const std::int64_t column = ids[i] % kernel.columns;
            const auto* from = reinterpret_cast<const Word*>(data_.get() + ids[i] / kernel.columns * panel_bytes_);
            auto* to = static_cast<Word*>(out) + i * num_inputs_;
            // A panel whose first column is the one wanted.
            const std::int64_t offset = panel_index(kernel.layout, kernel.columns, 0, column);
            visit_panel(kernel.layout, kernel.columns, 1, num_inputs_,
                        [&](std::int64_t position, std::int64_t k, std::int64_t) { to[k] = from[position + offset]; });
        };
        if (num_ids * num_inputs_ < kSerialProducts / 16) {
            for (std::int64_t i = 0; i < num_ids; ++i) gather(i);
        } else {
            ThreadPool::instance().run(num_ids, gather);
        }
    });
}

void PackedWeight::multiply(const void* x, std::int64_t rows, const void* bias, void* out) const {
    const Span span(Operator::linear);
    const LinearKernel& kernel = *kernel_;
    ThreadPool& pool = ThreadPool::instance();
    const std::int64_t bytes = element_bytes(element_), columns = kernel.columns;
    const auto run = [&](std::int64_t num_products, std::int64_t num_tasks, auto&& task) {
        if (num_products < kSerialProducts) {
            for (std::int64_t i = 0; i < num_tasks; ++i) task(i);
        } else {
            pool.run(num_tasks, task);
        }
    };
    for (std::int64_t start = 0; start < rows; start += kernel.pass_rows) {
        const std::int64_t pass_rows = std::min(kernel.pass_rows, rows - start);
        const auto* pass_x = static_cast<const unsigned char*>(x) + start * num_inputs_ * bytes;
        auto* pass_out = static_cast<unsigned char*>(out) + start * num_outputs_ * bytes;
        const bool direct = kernel.stage_is_copy && depth_ == num_inputs_ && pass_rows <= kernel.tile_rows;
        const unsigned char* activations = pass_x;
        std::int64_t stride = num_inputs_ * bytes;
        if (!direct) {
            // One line more than the row, so that the rows of a tile do not fall on the same lines of the cache.
            stride = round_up(depth_ * kernel.staged_bytes, 64) + 64;
            unsigned char* staged = staged_scratch.get(static_cast<std::size_t>(stride * pass_rows));
            const std::int64_t rows_a_task = std::max<std::int64_t>(1, 8192 / num_inputs_);
            run(pass_rows * num_inputs_ * 4, divide_up(pass_rows, rows_a_task), [&](std::int64_t task) {
                const std::int64_t end = std::min((task + 1) * rows_a_task, pass_rows);
                for (std::int64_t row = task * rows_a_task; row < end; ++row) {
                    kernel.stage(pass_x + row * num_inputs_ * bytes, num_inputs_, staged + row * stride, depth_);
                }
            });
            activations = staged;
        }

        // Tasks: some panels each; where there are too few of them for the threads, the rows are split too.
        const bool few = pass_rows <= kernel.tile_rows * kFewTiles;
        const std::int64_t threads = pool.num_threads();
        const std::int64_t chunk = few ? std::clamp<std::int64_t>(num_panels_ / (threads * 8) / 4 * 4, 4, 32) : 4;
        const std::int64_t num_chunks = divide_up(num_panels_, chunk);
        const std::int64_t wanted = num_chunks < 2 * threads ? divide_up(4 * threads, num_chunks) : 1;
        const std::int64_t group_rows = round_up(divide_up(pass_rows, wanted), kernel.tile_rows);
        const std::int64_t num_groups = divide_up(pass_rows, group_rows);
        run(pass_rows * num_inputs_ * num_outputs_, num_chunks * num_groups, [&](std::int64_t task) {
            const std::int64_t panel = task % num_chunks * chunk, row = task / num_chunks * group_rows;
            const std::int64_t num_panels = std::min(chunk, num_panels_ - panel);
            LinearBlock block;
            block.activation_stride = stride;
            block.rows = std::min(group_rows, pass_rows - row);
            block.panel_stride = panel_bytes_;
            block.sums_stride = num_panels * columns;
            auto* sums = reinterpret_cast<float*>(sums_scratch.get(static_cast<std::size_t>(block.rows * block.sums_stride * 4)));
            const auto multiply = [&](std::int64_t first_panel, std::int64_t count, std::int64_t k, std::int64_t depth) {
                block.activations = activations + row * stride + k * kernel.staged_bytes;
                block.panels = data_.get() + (panel + first_panel) * panel_bytes_ + k * columns * bytes;
                block.num_panels = count;
                block.depth = depth;
                block.sums = sums + first_panel * columns;
                block.first = k == 0;
                kernel.multiply(block);
            };
            if (block.rows <= kernel.tile_rows) {
                multiply(0, num_panels, 0, depth_);
            } else {
                const std::int64_t together = few ? 1 : num_panels;
                for (std::int64_t p = 0; p < num_panels; p += together) {
                    for (std::int64_t k = 0; k < depth_; k += kernel.range) multiply(p, together, k, std::min(kernel.range, depth_ - k));
                }
            }
            const std::int64_t first = panel * columns, count = std::min(num_panels * columns, num_outputs_ - first);
            const unsigned char* added = bias == nullptr ? nullptr : static_cast<const unsigned char*>(bias) + first * bytes;
            for (std::int64_t r = 0; r < block.rows; ++r) {
                kernel.finish(sums + r * block.sums_stride, added, pass_out + ((row + r) * num_outputs_ + first) * bytes, count);
            }
        });
    }
}

}  // namespace quire
