// An argument that is memory: a torch tensor of this machine's memory, or an object with the buffer protocol (numpy,
// ctypes, bytearray). Type, shape and strides come from the object, so a caller cannot exceed its memory.
//
// Not an owner: an Array is valid during the call; a native object that refers to the memory for longer keeps `owner`.
//
//   N1  No access through an Array precedes a passed check. A check throws std::invalid_argument (ValueError) with the
//       expected form, the argument's name and the given form; an object without memory is a TypeError.
//   N2  Construction and destruction need the GIL; its addresses may be used without.
//
// Cost: about 50 ns for a tensor, by torch's table of C functions (DLPack 1.3; the conversion through __dlpack__ takes 9 us), and
// 100 ns for a buffer.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "kernels/element.hpp"

namespace quire {

enum class Type : std::uint8_t { f32, bf16, f16, i64, i32, u8, other };

Type type_of(Element element);

class Array {
  public:
    static constexpr int kMostDims = 4;
    enum class Use : std::uint8_t { read, written };

    // name: the argument's, for messages.
    Array(nanobind::handle given, const char* name, Use use = Use::read);
    ~Array();
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;

    Type type() const { return type_; }
    int num_dims() const { return num_dims_; }
    std::int64_t shape(int dim) const { return shape_[dim]; }
    std::int64_t stride(int dim) const { return strides_[dim]; }  // elements
    std::int64_t count() const;  // elements, INT64_MAX at most

    // float32, bfloat16 or float16, else it throws. what: whose type it is, as in "a weight".
    Element element(const char* what) const;

    // The address of elements of `type`, contiguous, `count` of them.
    unsigned char* dense(Type type, std::int64_t count) const;
    // Likewise, as many as there are.
    unsigned char* dense(Type type) const;
    // How many rows of `width` elements it holds, contiguous.
    std::int64_t rows(Type type, std::int64_t width) const;
    // The address of elements of `type` and of this shape (-1: any size) with a dense last dimension; other strides as they are.
    unsigned char* shaped(Type type, std::initializer_list<std::int64_t> shape) const;
    // The address of elements of `type`, of any shape of `num_dims` dimensions and any strides.
    unsigned char* strided(Type type, int num_dims) const;

    // What keeps the memory where it is.
    nanobind::object owner() const;

  private:
    static constexpr std::uint8_t kNoCode = 255;

    std::string type_name() const;
    [[noreturn]] void refuse(const std::string& expected) const;
    bool take_tensor();
    void take_buffer(Use use);
    void check_address(bool is_empty) const;
    bool is_dense() const;

    nanobind::handle given_;
    const char* name_;
    unsigned char* data_ = nullptr;
    Type type_ = Type::other;
    std::uint8_t code_ = kNoCode, bits_ = 0;  // as DLPack names types
    std::uint8_t item_bytes_ = 0;
    int num_dims_ = 0;
    std::int64_t shape_[kMostDims];
    std::int64_t strides_[kMostDims];
    Py_buffer buffer_;  // held where buffer_.obj is not null
};

// Throws std::invalid_argument unless low <= value <= high.
void check_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high);

}  // namespace quire
