// A linear layer's weight packed once into panels, and its product with rows of activations: out = x W^T + bias.
//
// Not here: the register tiles of each instruction set (linear_tiles.hpp) and anything of Python or torch.
//
//   L1  The order of accumulation belongs to the layer: an output has one float32 accumulator that takes its K products in
//       order, by one kind of instruction whatever the number of rows. Threads split columns and rows, never K; blocks
//       of K pass on their float32 sums unrounded. So a row of `out` has the same bits with any other rows and any
//       number of threads. (For codes: quantized.hpp, U1.)
//   L2  unpack() and gather_rows() return the weight bit for bit.
//   L3  A panel is kColumns outputs x all of K, padded with zeros to whole panels and to a multiple of the kernel's
//       depth; without the padding the packed form has exactly the bytes of the weight.
//
// Cost of a call: one read of the packed weight per pass of 60 to 512 rows, a copy of the rows if their type is not the
// kernel's; plus about 0.5 us. Each thread keeps its largest buffers so far.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "kernels/isa.hpp"
#include "kernels/linear_kernel.hpp"
#include "kernels/quantized.hpp"

namespace quire {

class PackedWeight;

// A block of a product's outputs, in the cache of the thread that computed it: rows [row, row + rows) by columns
// [column, column + columns).
struct LinearResult {
    std::int64_t row, rows, column, columns;
    unsigned char* values[2];  // [rows][stride], for the taker to overwrite; of the second weight too, where there is one
    std::int64_t stride;       // bytes
};

// One of the products of multiply_together(): bias [num_outputs] or null, and what becomes of the outputs.
struct LinearTarget {
    const PackedWeight* weight;
    const void* bias;
    void* out;  // [rows, num_outputs] contiguous; or null, and `take` is called with every block once, by any thread; must not throw
    std::function<void(const LinearResult&)> take{};
    std::int64_t unit = 1;  // blocks begin at multiples of so many columns
    // A weight of the same shape, whose outputs come to `take` beside the first's.
    const PackedWeight* second = nullptr;
    const void* second_bias = nullptr;
};

// Products of the same rows x [rows, num_inputs] with several weights of one element, isa and num_inputs (q, k and v; gate and
// up), as multiply() of each would give them: the rows are staged once and the threads called once. No `out` may overlap
// anything else. x_stride: elements from a row of x to the next, 0 for rows that lie close together; with input_stride() they are
// read in place where the kernel can. Throws std::invalid_argument, before anything is written, for weights that do not go together.
void multiply_together(const LinearTarget* targets, int num_targets, const void* x, std::int64_t rows, std::int64_t x_stride = 0);

// Where the parts of rows lie: part i of a row begins at `data + row * row_stride + i * part_stride` (in elements), its elements
// side by side.
struct PartedRows {
    void* data;
    std::int64_t row_stride, part_stride;
};

// Part i of every row of x times weights[i], as multiply() of it would give them, to part i of the row of `out`: what the heads of
// a module do. Weights of one element, variant and shape; no `out` may overlap anything else. Of few rows a thread takes whole
// weights. Throws std::invalid_argument, before anything is written, for weights that do not go together.
void multiply_each(const PackedWeight* const* weights, std::int64_t num_weights, const PartedRows& x, std::int64_t rows, const PartedRows& out);

class PackedWeight {
  public:
    // Element (n, k) of the weight lies at `weight + n * output_stride + k * input_stride` (in elements).
    // Throws std::invalid_argument for sizes below 1 and for an `isa` that cannot run here.
    PackedWeight(Element element, const void* weight, std::int64_t num_outputs, std::int64_t num_inputs, std::int64_t output_stride,
                 std::int64_t input_stride, Isa isa);

    // A weight packed before, by the same `panel_layout`: num_bytes() bytes at `packed`, aligned to 64, which stay the
    // caller's and must outlive this object. Throws as above, and for another alignment.
    PackedWeight(Element element, const void* packed, std::int64_t num_outputs, std::int64_t num_inputs, Isa isa);

    // A weight given as codes, held as such, for activations of `element` (quantized.hpp has the form and the product's definition).
    // Throws as above, and for what has no panels.
    PackedWeight(Element element, const QuantizedParts& parts, Isa isa);

    // `num_outputs` outputs in the form of `like`, which is held as codes. packed: their panels, as above; null: memory of its own for
    // them, to be filled by put_panels(). Throws std::invalid_argument for a dense `like`, sizes below 1, another alignment.
    PackedWeight(const PackedWeight& like, std::int64_t num_outputs, const void* packed);

    // Copies the panels of `part`, outputs [first, first + part.num_outputs()) of this weight. Throws std::invalid_argument for memory of the
    // caller's, a part of another form, a `first` that is no multiple of a panel's outputs, and outputs that are not there.
    void put_panels(std::int64_t first, const PackedWeight& part);

    // x [rows, num_inputs] and out [rows, num_outputs], contiguous, of the weight's element; bias [num_outputs] or null.
    // out may not overlap the others.
    void multiply(const void* x, std::int64_t rows, const void* bias, void* out) const;

    // Elements from a row to the next, at least num_inputs, that do not fall on the same lines of the first cache.
    std::int64_t input_stride() const;

    // The whole weight, contiguous [num_outputs, num_inputs]; codes dequantized in float32, then rounded to the element.
    void unpack(void* out) const;

    // Rows of the weight, contiguous [num_ids, num_inputs]: an embedding lookup. Throws std::out_of_range, before
    // anything is written, for an id outside [0, num_outputs).
    void gather_rows(const std::int64_t* ids, std::int64_t num_ids, void* out) const;

    // The same of codes, rounded to another element. Throws std::invalid_argument for a dense weight of another one.
    void gather_rows_in(Element element, const std::int64_t* ids, std::int64_t num_ids, void* out) const;

    Element element() const { return element_; }
    Isa isa() const { return isa_; }
    std::int64_t num_outputs() const { return num_outputs_; }
    std::int64_t num_inputs() const { return num_inputs_; }
    std::size_t num_bytes() const { return num_bytes_; }
    const unsigned char* data() const { return data_; }
    bool is_quantized() const { return form_ != nullptr; }
    // Whether one call of multiply_together takes this weight and that one.
    bool goes_with(const PackedWeight& other) const {
        return element_ == other.element_ && isa_ == other.isa_ && kernel_ == other.kernel_ && num_inputs_ == other.num_inputs_;
    }

  private:
    friend void multiply_together(const LinearTarget* targets, int num_targets, const void* x, std::int64_t rows, std::int64_t x_stride);

    // All but the memory.
    PackedWeight(Element element, std::int64_t num_outputs, std::int64_t num_inputs, Isa isa);

    // A row, dequantized and rounded. scratch: num_inputs_.
    void dequantize_row(std::int64_t row, float* scratch, Element element, unsigned char* to) const;

    struct Free {
        std::size_t num_bytes;
        void operator()(unsigned char* data) const;
    };

    Element element_;
    Isa isa_;
    const LinearKernel* kernel_;
    const LinearKernel* few_kernel_ = nullptr;  // of up to kFewRows rows, where it is another one
    std::int64_t num_outputs_;
    std::int64_t num_inputs_;
    std::int64_t depth_;         // num_inputs padded to the kernel's depth
    std::int64_t panel_bytes_;
    std::int64_t num_panels_;
    std::size_t num_bytes_;
    std::unique_ptr<unsigned char, Free> owned_;  // null where the memory is the caller's
    const unsigned char* data_;
    std::shared_ptr<const QuantizedForm> form_;  // null of a dense weight
};

// Names the packed form of `element` for `isa`: equal names, equal bytes for equal weights, in any build.
std::string panel_layout(Element element, Isa isa);

// Bytes of the packed form, without making it.
std::size_t packed_num_bytes(Element element, std::int64_t num_outputs, std::int64_t num_inputs, Isa isa);

}  // namespace quire
