#include "kernels/linear.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

#include "kernels/profile.hpp"
#include "kernels/rounding.hpp"
#include "kernels/simd.hpp"
#include "kernels/scratch.hpp"
#include "kernels/thread_pool.hpp"
#include "kernels/weight_memory.hpp"

namespace quire {

namespace {

constexpr std::int64_t kSerialGather = 1 << 14;   // elements; below, waking another thread costs more than it saves

thread_local GrownBuffer row_scratch;  // each thread's: a row of codes, dequantized

const LinearKernel& kernel_of(Isa isa, Element element) {
    [[maybe_unused]] const bool bf16 = element == Element::bf16;
    switch (isa) {
#if defined(__x86_64__)
        case Isa::amx_bf16: return bf16 ? linear_kernel_amx_bf16(element) : linear_kernel_avx512(element);
        case Isa::avx512_bf16: return linear_kernel_avx512_bf16(element);
        case Isa::avx512: return linear_kernel_avx512(element);
        case Isa::avx2: return linear_kernel_avx2(element);
#endif
#if defined(QUIRE_TEST_KERNELS)
        case Isa::emulated_amx_bf16: return bf16 ? linear_kernel_emulated_amx_bf16(element) : linear_kernel_emulated_avx512(element);
        case Isa::emulated_avx512_bf16: return bf16 ? linear_kernel_emulated_avx512_bf16(element) : linear_kernel_emulated_avx512(element);
        case Isa::emulated_avx512: return linear_kernel_emulated_avx512(element);
#endif
        default: return linear_kernel_portable(element);
    }
}

const LinearKernel& quantized_kernel_of(Isa isa, Element element, bool exact) {
    [[maybe_unused]] const bool by_pairs = element == Element::bf16 && exact;
    switch (isa) {
#if defined(__x86_64__)
        case Isa::amx_bf16: return by_pairs ? quantized_kernel_amx_bf16(element) : quantized_kernel_avx512(element);
        case Isa::avx512_bf16: {
            static const bool keeps_order = isa_supported(Isa::avx512_bf16) && pairs_keep_order_avx512_bf16();
            return by_pairs && keeps_order ? quantized_kernel_avx512_bf16(element) : quantized_kernel_avx512(element);
        }
        case Isa::avx512: return quantized_kernel_avx512(element);
        case Isa::avx2: return quantized_kernel_avx2(element);
#endif
#if defined(QUIRE_TEST_KERNELS)
        case Isa::emulated_amx_bf16: return by_pairs ? quantized_kernel_emulated_amx_bf16(element) : quantized_kernel_emulated_avx512(element);
        case Isa::emulated_avx512_bf16: return by_pairs ? quantized_kernel_emulated_avx512_bf16(element) : quantized_kernel_emulated_avx512(element);
        case Isa::emulated_avx512: return quantized_kernel_emulated_avx512(element);
#endif
        default: return quantized_kernel_portable(element);
    }
}

// That of up to kFewRows rows, where it is another; its bits are the same.
const LinearKernel* few_kernel_of(Isa isa, Element element, bool exact) {
#if defined(__x86_64__)
    if (isa == Isa::amx_bf16 && element == Element::bf16 && exact) return &quantized_kernel_avx512(element);
#endif
    return nullptr;
}

void round_row(Element element, const float* from, std::int64_t count, unsigned char* to) {
    const auto round = [&](auto* out) {
        for (std::int64_t i = 0; i < count; ++i) round_to(from[i], out[i]);
    };
    switch (element) {
        case Element::f32: return round(reinterpret_cast<float*>(to));
        case Element::bf16: return round(reinterpret_cast<bf16*>(to));
        case Element::f16: return round(reinterpret_cast<f16*>(to));
    }
}

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

// Four pairs of each of four rows, turned: pair i of the rows goes to `to(i)`, side by side. Every 64-bit target has 16-byte
// vectors, so this needs no variant.
template <typename To>
void turn_quads(const std::uint16_t* rows, std::int64_t stride, To&& to) {
    using Quad [[gnu::vector_size(16)]] = std::uint32_t;
    Quad r[4];
    for (int i = 0; i < 4; ++i) std::memcpy(&r[i], rows + i * stride, 16);
    const Quad low01 = __builtin_shuffle(r[0], r[1], Quad{0, 4, 1, 5}), high01 = __builtin_shuffle(r[0], r[1], Quad{2, 6, 3, 7});
    const Quad low23 = __builtin_shuffle(r[2], r[3], Quad{0, 4, 1, 5}), high23 = __builtin_shuffle(r[2], r[3], Quad{2, 6, 3, 7});
    const Quad turned[4] = {__builtin_shuffle(low01, low23, Quad{0, 1, 4, 5}), __builtin_shuffle(low01, low23, Quad{2, 3, 6, 7}),
                            __builtin_shuffle(high01, high23, Quad{0, 1, 4, 5}), __builtin_shuffle(high01, high23, Quad{2, 3, 6, 7})};
    for (int i = 0; i < 4; ++i) std::memcpy(to(i), &turned[i], 16);
}

// A panel of 16-bit elements in a layout that keeps pairs along k together and four columns' pairs side by side, from rows
// contiguous along k: as visit_panel would, four columns and a line of each at a time.
template <PanelLayout layout>
void pack_pairs(const std::uint16_t* from, std::int64_t stride, std::int64_t columns, std::int64_t num_columns, std::int64_t num_inputs,
                std::uint16_t* to) {
    constexpr std::int64_t kBlock = 32;
    const std::int64_t whole = num_inputs / kBlock * kBlock, quads = num_columns / 4 * 4;
    const auto copy = [&](std::int64_t column, std::int64_t start, std::int64_t end) {
        for (std::int64_t k = start; k < end; ++k) to[panel_index(layout, columns, k, column)] = from[column * stride + k];
    };
    for (std::int64_t start = 0; start < whole; start += kBlock) {
        for (std::int64_t column = 0; column < quads; column += 4) {
            for (std::int64_t k = start; k < start + kBlock; k += 8) {
                turn_quads(from + column * stride + k, stride, [&](int i) { return to + panel_index(layout, columns, k + 2 * i, column); });
            }
        }
    }
    for (std::int64_t column = 0; column < num_columns; ++column) copy(column, column < quads ? whole : 0, num_inputs);
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

}  // namespace

void PackedWeight::Free::operator()(unsigned char* data) const { give_weight_memory_back(data, num_bytes); }

PackedWeight::PackedWeight(Element element, std::int64_t num_outputs, std::int64_t num_inputs, Isa isa)
    : element_(element), isa_(isa), kernel_(&kernel_of(isa, element)), num_outputs_(num_outputs), num_inputs_(num_inputs), data_(nullptr) {
    num_bytes_ = packed_num_bytes(element, num_outputs, num_inputs, isa);
    require_isa(isa);
    depth_ = round_up(num_inputs, kernel_->depth);
    panel_bytes_ = depth_ * kernel_->columns * element_bytes(element);
    num_panels_ = divide_up(num_outputs, kernel_->columns);
}

PackedWeight::PackedWeight(Element element, const void* packed, std::int64_t num_outputs, std::int64_t num_inputs, Isa isa)
    : PackedWeight(element, num_outputs, num_inputs, isa) {
    if (packed == nullptr || reinterpret_cast<std::uintptr_t>(packed) % 64 != 0) {
        throw std::invalid_argument("expected packed memory at a multiple of 64 bytes, got another address");
    }
    data_ = static_cast<const unsigned char*>(packed);
}

PackedWeight::PackedWeight(Element element, const void* weight, std::int64_t num_outputs, std::int64_t num_inputs,
                           std::int64_t output_stride, std::int64_t input_stride, Isa isa)
    : PackedWeight(element, num_outputs, num_inputs, isa) {
    const LinearKernel& kernel = *kernel_;
    owned_ = {take_weight_memory(num_bytes_), Free{num_bytes_}};
    data_ = owned_.get();
    with_word(element, [&](auto zero) {
        using Word = decltype(zero);
        ThreadPool::instance().run(num_panels_, [&](std::int64_t panel) {
            auto* to = reinterpret_cast<Word*>(owned_.get() + panel * panel_bytes_);
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

PackedWeight::PackedWeight(Element element, const QuantizedParts& parts, Isa isa)
    : element_(element), isa_(isa), num_outputs_(parts.num_outputs), num_inputs_(parts.num_inputs), data_(nullptr) {
    require_isa(isa);
    const auto form = std::make_shared<const QuantizedForm>(quantized_form(parts));
    form_ = form;
    kernel_ = &quantized_kernel_of(isa, element, form->exact);
    few_kernel_ = few_kernel_of(isa, element, form->exact);
    depth_ = form->depth;
    panel_bytes_ = form->panel_bytes;
    num_panels_ = divide_up(num_outputs_, QuantizedForm::kColumns);
    num_bytes_ = static_cast<std::size_t>(num_panels_ * panel_bytes_);
    owned_ = {take_weight_memory(num_bytes_), Free{num_bytes_}};
    data_ = owned_.get();
    ThreadPool::instance().run(num_panels_, [&](std::int64_t panel) { pack_quantized(*form, parts, panel, owned_.get() + panel * panel_bytes_); });
}

PackedWeight::PackedWeight(const PackedWeight& like, std::int64_t num_outputs, const void* packed)
    : element_(like.element_), isa_(like.isa_), kernel_(like.kernel_), few_kernel_(like.few_kernel_), num_outputs_(num_outputs), num_inputs_(like.num_inputs_),
      depth_(like.depth_), panel_bytes_(like.panel_bytes_), data_(static_cast<const unsigned char*>(packed)), form_(like.form_) {
    if (form_ == nullptr) throw std::invalid_argument("expected a weight that is held as codes, got a dense one");
    if (num_outputs < 1) throw std::invalid_argument("expected at least one output, got " + std::to_string(num_outputs));
    if (reinterpret_cast<std::uintptr_t>(packed) % 64 != 0) {
        throw std::invalid_argument("expected packed memory at a multiple of 64 bytes, got another address");
    }
    num_panels_ = divide_up(num_outputs_, QuantizedForm::kColumns);
    num_bytes_ = static_cast<std::size_t>(num_panels_ * panel_bytes_);
    if (packed == nullptr) {
        owned_ = {take_weight_memory(num_bytes_), Free{num_bytes_}};
        data_ = owned_.get();
    }
}

void PackedWeight::put_panels(std::int64_t first, const PackedWeight& part) {
    const bool alike = form_ != nullptr && part.form_ != nullptr && panel_bytes_ == part.panel_bytes_ && num_inputs_ == part.num_inputs_ &&
                       kernel_ == part.kernel_ && form_->bits == part.form_->bits && form_->group == part.form_->group &&
                       form_->values == part.form_->values;
    const std::int64_t columns = QuantizedForm::kColumns, left = num_outputs_ - part.num_outputs_;
    const bool whole = part.num_outputs_ % columns == 0 || first == left;
    if (owned_ == nullptr || !alike || first < 0 || first % columns != 0 || first > left || !whole) {
        throw std::invalid_argument("expected whole panels of the same form within " + std::to_string(num_outputs_) + " outputs, got " +
                                    std::to_string(part.num_outputs_) + " outputs at " + std::to_string(first));
    }
    std::memcpy(owned_.get() + first / columns * panel_bytes_, part.data_, part.num_bytes_);
}

void PackedWeight::dequantize_row(std::int64_t row, float* scratch, Element element, unsigned char* to) const {
    const std::int64_t columns = QuantizedForm::kColumns;
    dequantize_column(*form_, data_ + row / columns * panel_bytes_, row % columns, num_inputs_, scratch);
    round_row(element, scratch, num_inputs_, to);
}

std::size_t packed_num_bytes(Element element, std::int64_t num_outputs, std::int64_t num_inputs, Isa isa) {
    constexpr std::int64_t kMostElements = std::int64_t{1} << 46;  // of all that a processor can address
    if (num_outputs < 1 || num_inputs < 1 || num_outputs > kMostElements / num_inputs) {
        throw std::invalid_argument("expected a weight of at least 1 x 1, at most 2^46 elements, got " + std::to_string(num_outputs) +
                                    " x " + std::to_string(num_inputs));
    }
    const LinearKernel& kernel = kernel_of(isa, element);
    return static_cast<std::size_t>(divide_up(num_outputs, kernel.columns) * kernel.columns * round_up(num_inputs, kernel.depth) *
                                    element_bytes(element));
}

std::string panel_layout(Element element, Isa isa) {
    // Raise it when the bytes of a packed weight change while the names and numbers below stay.
    constexpr int kVersion = 1;
    const LinearKernel& kernel = kernel_of(isa, element);
    constexpr std::string_view kNames[] = {"rows", "split_pairs", "depth_pairs", "tiles"};
    return std::string(isa_name(isa)) + " version " + std::to_string(kVersion) + " " +
           std::string(kNames[static_cast<int>(kernel.layout)]) + " of " + std::to_string(kernel.columns) + " columns, depth " +
           std::to_string(kernel.depth);
}

void PackedWeight::unpack(void* out) const {
    if (is_quantized()) {
        const std::int64_t row_bytes = num_inputs_ * element_bytes(element_);
        return ThreadPool::instance().run(num_panels_, [&](std::int64_t panel) {
            float* scratch = reinterpret_cast<float*>(row_scratch.get(static_cast<std::size_t>(num_inputs_ * 4)));
            const std::int64_t first = panel * QuantizedForm::kColumns, end = std::min(first + QuantizedForm::kColumns, num_outputs_);
            for (std::int64_t row = first; row < end; ++row) dequantize_row(row, scratch, element_, static_cast<unsigned char*>(out) + row * row_bytes);
        });
    }
    const LinearKernel& kernel = *kernel_;
    with_word(element_, [&](auto zero) {
        using Word = decltype(zero);
        ThreadPool::instance().run(num_panels_, [&](std::int64_t panel) {
            const auto* from = reinterpret_cast<const Word*>(data_ + panel * panel_bytes_);
            const std::int64_t first = panel * kernel.columns;
            auto* to = static_cast<Word*>(out) + first * num_inputs_;
            visit_panel(kernel.layout, kernel.columns, std::min(kernel.columns, num_outputs_ - first), num_inputs_,
                        [&](std::int64_t position, std::int64_t k, std::int64_t column) { to[column * num_inputs_ + k] = from[position]; });
        });
    });
}

void PackedWeight::gather_rows(const std::int64_t* ids, std::int64_t num_ids, void* out) const {
    gather_rows_in(element_, ids, num_ids, out);
}

void PackedWeight::gather_rows_in(Element element, const std::int64_t* ids, std::int64_t num_ids, void* out) const {
    if (!is_quantized() && element != element_) throw std::invalid_argument("expected rows of the weight's own element, got another");
    for (std::int64_t i = 0; i < num_ids; ++i) {
        if (ids[i] < 0 || ids[i] >= num_outputs_) {
            throw std::out_of_range("expected ids in [0, " + std::to_string(num_outputs_) + "), got " + std::to_string(ids[i]) +
                                    " at position " + std::to_string(i));
        }
    }
    if (is_quantized()) {
        const std::int64_t row_bytes = num_inputs_ * element_bytes(element);
        const auto gather = [&](std::int64_t i) {
            float* scratch = reinterpret_cast<float*>(row_scratch.get(static_cast<std::size_t>(num_inputs_ * 4)));
            dequantize_row(ids[i], scratch, element, static_cast<unsigned char*>(out) + i * row_bytes);
        };
        if (num_ids * num_inputs_ >= kSerialGather) return ThreadPool::instance().run(num_ids, gather);
        for (std::int64_t i = 0; i < num_ids; ++i) gather(i);
        return;
    }
    const LinearKernel& kernel = *kernel_;
    with_word(element_, [&](auto zero) {
        using Word = decltype(zero);
        const auto gather = [&](std::int64_t i) {
            const std::int64_t column = ids[i] % kernel.columns;
            const auto* from = reinterpret_cast<const Word*>(data_ + ids[i] / kernel.columns * panel_bytes_);
            auto* to = static_cast<Word*>(out) + i * num_inputs_;
            // A panel whose first column is the one wanted.
            const std::int64_t offset = panel_index(kernel.layout, kernel.columns, 0, column);
            visit_panel(kernel.layout, kernel.columns, 1, num_inputs_,
                        [&](std::int64_t position, std::int64_t k, std::int64_t) { to[k] = from[position + offset]; });
        };
        if (num_ids * num_inputs_ < kSerialGather) {
            for (std::int64_t i = 0; i < num_ids; ++i) gather(i);
        } else {
            ThreadPool::instance().run(num_ids, gather);
        }
    });
}

}  // namespace quire
