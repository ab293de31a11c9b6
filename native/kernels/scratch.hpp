// A thread's buffer, as large as the largest request so far; 64-byte aligned, contents undefined.
#pragma once

#include <cstddef>
#include <cstdlib>

namespace quire {

class GrownBuffer {
  public:
    GrownBuffer() = default;
    GrownBuffer(const GrownBuffer&) = delete;
    GrownBuffer& operator=(const GrownBuffer&) = delete;
    ~GrownBuffer() { std::free(data_); }

    // What it held is lost where it grows. Ends the process where memory cannot be had: a task of the pool must not
    // throw, and it is a few MiB.
    unsigned char* get(std::size_t num_bytes) {
        if (num_bytes > size_) {
            std::free(data_);
            size_ = (num_bytes + 4095) / 4096 * 4096;
            data_ = static_cast<unsigned char*>(std::aligned_alloc(64, size_));
            if (data_ == nullptr) std::abort();
        }
        return data_;
    }

  private:
    unsigned char* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace quire
