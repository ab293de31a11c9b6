// Memory of exactly the size a kernel was promised, so that AddressSanitizer stops a test at the first byte beyond it.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>

#include "kernels/element.hpp"
#include "kernels/simd.hpp"
#include "tests/testing.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) (static_cast<void>(address), static_cast<void>(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) (static_cast<void>(address), static_cast<void>(bytes))
#endif

namespace quire::testing {

// Elements on the heap, no byte more than they need.
struct Buffer {
    Buffer(Element kind, std::int64_t size)
        : element(kind), count(size), data(new unsigned char[static_cast<std::size_t>(size * element_bytes(kind))]) {}
    Buffer(Buffer&&) noexcept = default;
    ~Buffer() {
        if (data) ASAN_UNPOISON_MEMORY_REGION(data.get(), static_cast<std::size_t>(count * element_bytes(element)));
    }

    double get(std::int64_t i) const {
        const unsigned char* from = data.get() + i * element_bytes(element);
        if (element == Element::f32) return read<float>(from);
        return element == Element::bf16 ? to_float(read<bf16>(from)) : to_float(read<f16>(from));
    }
    void set(std::int64_t i, float value) {
        unsigned char* to = data.get() + i * element_bytes(element);
        if (element == Element::f32) return write<float>(to, value);
        return element == Element::bf16 ? write<bf16>(to, value) : write<f16>(to, value);
    }
    void fill(Random& random) {
        for (std::int64_t i = 0; i < count; ++i) set(i, static_cast<float>(random.below(2001) - 1000) / 500.0f);
    }
    template <class T>
    static T read(const unsigned char* from) {
        T value;
        std::memcpy(&value, from, sizeof value);
        return value;
    }
    template <class T>
    static void write(unsigned char* to, float value) {
        T rounded;
        round_to(value, rounded);
        std::memcpy(to, &rounded, sizeof rounded);
    }

    Element element;
    std::int64_t count;
    std::unique_ptr<unsigned char[]> data;
};

}  // namespace quire::testing
