// See array.hpp.
#include "bindings/array.hpp"

#include <algorithm>
#include <stdexcept>

namespace nb = nanobind;

namespace quire {

namespace {

// Of DLPack 1.3 (dmlc/dlpack), what is used here: torch.Tensor.__dlpack_c_exchange_api__ leads to a table of C functions.
struct DlTensor {
    void* data;
    std::int32_t device_type, device_id;
    std::int32_t num_dims;
    std::uint8_t code, bits;
    std::uint16_t lanes;
    std::int64_t* shape;
    std::int64_t* strides;  // null: contiguous
    std::uint64_t byte_offset;
};

struct DlExchange {
    std::uint32_t major, minor;
    DlExchange* previous;
    void *allocate, *managed_from, *managed_to;
    int (*tensor_from)(void* object, DlTensor* out);
    void* stream;
};

constexpr std::int32_t kCpu = 1;
constexpr std::uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4;

struct Torch {
    PyTypeObject* tensor = nullptr;
    PyTypeObject* parameter = nullptr;
    const DlExchange* exchange = nullptr;
};

// torch, once somebody has imported it: before that there are no tensors.
const Torch& torch() {
    static Torch found;
    if (found.tensor != nullptr) return found;
    PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");
    if (module == nullptr || !PyObject_HasAttrString(module, "Tensor") || !PyObject_HasAttrString(module, "nn")) return found;
    nb::object tensor = nb::getattr(module, "Tensor"), parameter = nb::getattr(nb::getattr(module, "nn"), "Parameter", nb::none());
    const nb::object table = nb::getattr(tensor, "__dlpack_c_exchange_api__", nb::none());
    if (!PyType_Check(tensor.ptr()) || !PyType_Check(parameter.ptr()) || !PyCapsule_CheckExact(table.ptr())) return found;
    const auto* exchange = static_cast<const DlExchange*>(PyCapsule_GetPointer(table.ptr(), "dlpack_exchange_api"));
    while (exchange != nullptr && exchange->major != 1) exchange = exchange->previous;
    if (exchange == nullptr || exchange->tensor_from == nullptr) {
        PyErr_Clear();
        return found;
    }
    found = {reinterpret_cast<PyTypeObject*>(tensor.release().ptr()), reinterpret_cast<PyTypeObject*>(parameter.release().ptr()), exchange};
    return found;
}

Type typed(std::uint8_t code, std::int64_t bits) {
    if (code == kFloat) return bits == 32 ? Type::f32 : bits == 16 ? Type::f16 : Type::other;
    if (code == kBfloat) return bits == 16 ? Type::bf16 : Type::other;
    if (code == kInt) return bits == 64 ? Type::i64 : bits == 32 ? Type::i32 : Type::other;
    return code == kUInt && bits == 8 ? Type::u8 : Type::other;
}

// The code of a format of the struct module; 255 for others.
std::uint8_t code_of(const char* format) {
    if (format == nullptr) return kUInt;
    if (*format == '@' || *format == '=' || *format == '<') ++format;
    if (*format == '\0' || format[1] != '\0') return 255;
    switch (*format) {
        case 'e': case 'f': case 'd': return kFloat;
        case 'h': case 'i': case 'l': case 'q': return kInt;
        case 'b': case 'c': case 'B': case 'H': case 'I': case 'L': case 'Q': return kUInt;
        default: return 255;
    }
}

const char* name_of(Type type) {
    switch (type) {
        case Type::f32: return "float32";
        case Type::bf16: return "bfloat16";
        case Type::f16: return "float16";
        case Type::i64: return "int64";
        case Type::i32: return "int32";
        case Type::u8: return "uint8";
        default: return "another type";
    }
}

std::string listed(const std::int64_t* values, std::size_t count) {
    std::string text = "[";
    for (std::size_t i = 0; i < count; ++i) text += (i == 0 ? "" : ", ") + std::to_string(values[i]);
    return text + "]";
}

}  // namespace

Type type_of(Element element) {
    switch (element) {
        case Element::f32: return Type::f32;
        case Element::bf16: return Type::bf16;
        default: return Type::f16;
    }
}

Array::Array(nb::handle given, const char* name, Use use) : given_(given), name_(name) {
    buffer_.obj = nullptr;
    if (!take_tensor()) take_buffer(use);
}

Array::~Array() {
    if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
}

bool Array::take_tensor() {
    const Torch& known = torch();
    PyTypeObject* type = Py_TYPE(given_.ptr());
    if (known.tensor == nullptr || !PyType_IsSubtype(type, known.tensor)) return false;
    DlTensor tensor{};
    const bool has_memory = known.exchange->tensor_from(given_.ptr(), &tensor) == 0;
    if (!has_memory) PyErr_Clear();
    if (!has_memory || tensor.device_type != kCpu) {
        throw std::invalid_argument(std::string("expected ") + name_ + " as a dense tensor in this machine's memory, got one that is " +
                                    (has_memory ? "on another device" : "none (sparse, meta, ...)"));
    }
    if (tensor.num_dims > kMostDims || tensor.lanes != 1) {
        throw std::invalid_argument(std::string("expected ") + name_ + " of at most 4 dimensions, got " + std::to_string(tensor.num_dims));
    }
    code_ = tensor.code, bits_ = tensor.bits;
    type_ = typed(code_, bits_);
    item_bytes_ = static_cast<std::uint8_t>(tensor.bits / 8);
    num_dims_ = tensor.num_dims;
    std::int64_t adjacent = 1;
    for (int dim = num_dims_ - 1; dim >= 0; --dim) {
        shape_[dim] = tensor.shape[dim];
        strides_[dim] = tensor.strides == nullptr ? adjacent : tensor.strides[dim];
        if (tensor.strides == nullptr) adjacent *= shape_[dim];
    }
    data_ = static_cast<unsigned char*>(tensor.data) + tensor.byte_offset;
    if (type != known.tensor && type != known.parameter) {
        // A class of its own may keep its memory elsewhere (a packed weight's parameter makes it when asked).
        data_ = reinterpret_cast<unsigned char*>(nb::cast<std::uintptr_t>(given_.attr("data_ptr")()));  // NOLINT: an address
    }
    return true;
}

void Array::take_buffer(Use use) {
    if (!PyObject_CheckBuffer(given_.ptr())) {
        throw nb::type_error((std::string("expected ") + name_ + " as a torch tensor or a buffer, got " +
                              nb::type_name(nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(given_.ptr())))).c_str())
                                 .c_str());
    }
    if (PyObject_GetBuffer(given_.ptr(), &buffer_, PyBUF_STRIDES | PyBUF_FORMAT | (use == Use::written ? PyBUF_WRITABLE : 0)) != 0) {
        buffer_.obj = nullptr;
        PyErr_Clear();
        throw std::invalid_argument(std::string("expected ") + name_ + (use == Use::written ? " as a writable buffer" : " as a buffer") +
                                    ", got one that gives its memory only otherwise");
    }
    code_ = code_of(buffer_.format);
    bits_ = static_cast<std::uint8_t>(8 * std::min<Py_ssize_t>(buffer_.itemsize, 16));
    type_ = typed(code_, bits_);
    item_bytes_ = static_cast<std::uint8_t>(buffer_.itemsize);
    num_dims_ = buffer_.ndim;
    bool is_known = num_dims_ <= kMostDims && buffer_.itemsize >= 1 && buffer_.itemsize <= 16;
    Py_ssize_t adjacent = buffer_.itemsize;
    for (int dim = is_known ? num_dims_ - 1 : -1; dim >= 0; --dim) {
        const Py_ssize_t stride = buffer_.strides == nullptr ? adjacent : buffer_.strides[dim];  // ctypes gives none
        shape_[dim] = buffer_.shape[dim];
        strides_[dim] = stride / buffer_.itemsize;
        if (stride % buffer_.itemsize != 0) type_ = Type::other;
        if (buffer_.strides == nullptr) adjacent *= shape_[dim];
    }
    data_ = static_cast<unsigned char*>(buffer_.buf);
    if (!is_known) {
        const int given = num_dims_;
        PyBuffer_Release(&buffer_);
        buffer_.obj = nullptr;
        throw std::invalid_argument(std::string("expected ") + name_ + " of at most 4 dimensions of numbers, got " + std::to_string(given));
    }
}

std::string Array::type_name() const {
    const char* names[] = {"int", "uint", "float", nullptr, "bfloat", "complex", "bool"};
    if (code_ > 6 || names[code_] == nullptr) return "another type";
    return names[code_] + std::to_string(bits_);
}

void Array::refuse(const std::string& expected) const {
    throw std::invalid_argument("expected " + std::string(name_) + " as " + expected + ", got " + type_name() + " " +
                                listed(shape_, static_cast<std::size_t>(num_dims_)) + " with strides " +
                                listed(strides_, static_cast<std::size_t>(num_dims_)));
}

void Array::check_address(bool is_empty) const {
    const auto address = reinterpret_cast<std::uintptr_t>(data_);  // NOLINT: an address
    if (!is_empty && (data_ == nullptr || address % item_bytes_ != 0)) {
        throw std::invalid_argument("expected " + std::string(name_) + " with its memory, aligned to " + std::to_string(item_bytes_) +
                                    " bytes, got " + (data_ == nullptr ? "none" : "another alignment"));
    }
}

bool Array::is_dense() const {
    std::int64_t adjacent = 1;
    for (int dim = num_dims_ - 1; dim >= 0; --dim) {
        if (shape_[dim] == 1) continue;
        if (strides_[dim] != adjacent) return false;
        adjacent *= shape_[dim];
    }
    return true;
}

std::int64_t Array::count() const {
    std::int64_t count = 1;
    for (int dim = 0; dim < num_dims_; ++dim) {
        if (shape_[dim] == 0) return 0;
    }
    for (int dim = 0; dim < num_dims_; ++dim) {
        // Of an expanded tensor, which has more elements than memory.
        if (__builtin_mul_overflow(count, shape_[dim], &count)) return INT64_MAX;
    }
    return count;
}

Element Array::element(const char* what) const {
    switch (type_) {
        case Type::f32: return Element::f32;
        case Type::bf16: return Element::bf16;
        case Type::f16: return Element::f16;
        default:
            throw std::invalid_argument("expected " + std::string(what) + " of float32, bfloat16 or float16, got " + type_name());
    }
}

unsigned char* Array::dense(Type type) const {
    bool is_empty = false;
    for (int dim = 0; dim < num_dims_; ++dim) is_empty = is_empty || shape_[dim] == 0;
    if (type_ != type || !(is_empty || is_dense())) refuse("contiguous " + std::string(name_of(type)));
    check_address(is_empty);
    return data_;
}

unsigned char* Array::dense(Type type, std::int64_t expected) const {
    unsigned char* data = dense(type);
    if (count() != expected) refuse("contiguous " + std::string(name_of(type)) + " of " + std::to_string(expected) + " elements");
    return data;
}

std::int64_t Array::rows(Type type, std::int64_t width) const {
    dense(type);
    const std::int64_t all = count();
    if (all % width != 0) refuse("contiguous " + std::string(name_of(type)) + " in rows of " + std::to_string(width) + " elements");
    return all / width;
}

unsigned char* Array::shaped(Type type, std::initializer_list<std::int64_t> expected) const {
    bool fits = type_ == type && num_dims_ == static_cast<int>(expected.size()), is_empty = false;
    for (int dim = 0; fits && dim < num_dims_; ++dim) {
        const std::int64_t size = expected.begin()[dim];
        fits = size < 0 || shape_[dim] == size;
        is_empty = is_empty || shape_[dim] == 0;
    }
    if (fits && num_dims_ > 0 && shape_[num_dims_ - 1] > 1) fits = strides_[num_dims_ - 1] == 1;
    if (!fits) refuse(std::string(name_of(type)) + " " + listed(expected.begin(), expected.size()) + " (-1: any) with a dense last dimension");
    check_address(is_empty);
    return data_;
}

unsigned char* Array::strided(Type type, int num_dims) const {
    if (type_ != type || num_dims_ != num_dims) refuse(std::string(name_of(type)) + " of " + std::to_string(num_dims) + " dimensions");
    check_address(count() == 0);
    return data_;
}

nb::object Array::owner() const {
    if (buffer_.obj == nullptr) return nb::borrow(given_);
    nb::object view = nb::steal(PyMemoryView_FromObject(given_.ptr()));  // which a bytearray may not grow under
    if (!view.is_valid()) nb::raise_python_error();
    return view;
}

void check_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (value < low || value > high) {
        throw std::invalid_argument("expected " + std::string(name) + " of " + std::to_string(low) + " to " + std::to_string(high) + ", got " +
                                    std::to_string(value));
    }
}

}  // namespace quire
