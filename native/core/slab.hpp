// Growable arrays of plain records addressed by 32-bit index, and a ring queue made of one.
//
// A slab is uninitialised storage. Unwritten memory costs no page, so a slab may be created at its final size: a pool
// of a million blocks is ready in microseconds. Not a vector: it has no size and constructs no records; the owner knows
// which records are in use.
//
// Only growth can fail (std::bad_alloc), and a failed growth changes nothing. Owners grow before they change records,
// which gives every call of the block manager the strong guarantee.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

namespace quire {

template <class T>
class Slab {
    static_assert(std::is_trivially_copyable_v<T>);

public:
    Slab() = default;
    explicit Slab(std::size_t capacity) { grow(capacity); }

    T& operator[](std::size_t index) noexcept { return data_.get()[index]; }
    const T& operator[](std::size_t index) const noexcept { return data_.get()[index]; }
    T* data() noexcept { return data_.get(); }
    const T* data() const noexcept { return data_.get(); }
    std::size_t capacity() const noexcept { return capacity_; }
    std::size_t capacity_bytes() const noexcept { return capacity_ * sizeof(T); }

    // Room for `count` records; the first `used` keep their values.
    void ensure(std::size_t count, std::size_t used) {
        if (count <= capacity_) return;
        const std::size_t wanted = std::max(count, capacity_ + capacity_ / 2 + 16);
        std::unique_ptr<T, Free> bigger(allocate(wanted));
        if (used != 0) std::memcpy(static_cast<void*>(bigger.get()), data_.get(), used * sizeof(T));
        data_ = std::move(bigger);
        capacity_ = wanted;
    }

private:
    struct Free {
        void operator()(T* pointer) const noexcept { ::operator delete(static_cast<void*>(pointer)); }
    };

    static T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T))); }

    void grow(std::size_t capacity) {
        data_.reset(allocate(std::max<std::size_t>(capacity, 1)));
        capacity_ = capacity;
    }

    std::unique_ptr<T, Free> data_;
    std::size_t capacity_ = 0;
};

// First in, first out. `ensure_room` may fail; pushing within the room never does.
template <class T>
class Ring {
public:
    bool empty() const noexcept { return count_ == 0; }
    std::size_t size() const noexcept { return count_; }
    const T& front() const noexcept { return slab_[head_]; }
    const T& at(std::size_t index) const noexcept { return slab_[wrap(head_ + index)]; }

    void ensure_room(std::size_t more) {
        if (count_ + more <= slab_.capacity()) return;
        Slab<T> bigger(std::max(count_ + more, slab_.capacity() * 2));
        for (std::size_t index = 0; index < count_; ++index) bigger[index] = at(index);
        slab_ = std::move(bigger);
        head_ = 0;
    }

    void push(const T& value) noexcept { slab_[wrap(head_ + count_++)] = value; }

    void pop() noexcept {
        head_ = wrap(head_ + 1);
        --count_;
    }

private:
    std::size_t wrap(std::size_t index) const noexcept {
        return index < slab_.capacity() ? index : index - slab_.capacity();
    }

    Slab<T> slab_;
    std::size_t head_ = 0;
    std::size_t count_ = 0;
};

}  // namespace quire
