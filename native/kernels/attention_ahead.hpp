// Prefetching of the next keys and values in the order of their addresses: a list of pieces of memory, and a cursor
// that prefetches some of its lines between the products.
//
// Into the second cache, not the first: a core waits for few lines of its first cache at once, for many more of its second
// (Zen 4, shuffled pieces of 8 KiB: 11 and 27 GB/s; Emerald Rapids, decode on two threads: 17.3 to 17.6 and 17.9 to 19.7).
// It does not affect the results.
//
// Cost: one prefetch a line, a few instructions a piece.
#pragma once

#include "kernels/attention_kernel.hpp"

namespace quire {
namespace {

template <class S>
class LinesAhead {
  public:
    static constexpr int kMostPieces = 2 * kMostTileTokens;  // a key and a value of each token of a tile
    static constexpr int kLineBytes = 64;

    // Whether the products prefetch near rows once more, into the first cache, where their loads would otherwise wait
    // behind the lines from memory (Zen 4, one thread: blocks of 16 at 22.9 GB/s instead of 18.2). Not where each token
    // lies elsewhere (blocks of 1: 13.3 instead of 15.3).
    bool near = true;

    // Replaces the pieces: at most kMostPieces, to be prefetched in `shares` parts.
    void begin() {
        num_pieces_ = num_lines_ = 0;
        again(0);
    }
    // The same pieces, `offset` bytes from where they were added: a whole number of lines.
    void again(std::int64_t offset) {
        offset_ = offset;
        next_ = piece_.lines = 0;
    }
    template <class T>
    void add(const T* from, std::int64_t count) {
        const auto start = reinterpret_cast<std::uintptr_t>(from) & ~std::uintptr_t{kLineBytes - 1};
        const auto stop = reinterpret_cast<std::uintptr_t>(from + count);
        const int lines = static_cast<int>((stop - start + kLineBytes - 1) / kLineBytes);
        num_lines_ += lines;
        if (num_pieces_ > 0 && pieces_[num_pieces_ - 1].stop() == start) {
            pieces_[num_pieces_ - 1].lines += lines;
        } else {
            pieces_[num_pieces_++] = {reinterpret_cast<const unsigned char*>(start), lines};
        }
    }
    void end(int shares) { num_shares_ = shares; }

    // Lines to prefetch at each of `steps` steps, so that together they are `shares` parts.
    int lines_of(int shares, int steps) const { return (shares * num_lines_ + steps * num_shares_ - 1) / (steps * num_shares_); }

    void fetch(int lines) {
        if (__builtin_expect(piece_.lines < lines, 0)) {
            fetch_across(lines);
            return;
        }
        const unsigned char* at = piece_.at;
        piece_.lines -= lines;
        piece_.at += lines * kLineBytes;
        for (; lines >= 4; lines -= 4, at += 4 * kLineBytes) {
            S::prefetch_l2(at);
            S::prefetch_l2(at + kLineBytes);
            S::prefetch_l2(at + 2 * kLineBytes);
            S::prefetch_l2(at + 3 * kLineBytes);
        }
        for (; lines > 0; --lines, at += kLineBytes) S::prefetch_l2(at);
    }
    void fetch_rest() {
        if (piece_.lines > 0 || next_ < num_pieces_) fetch_across(num_lines_);
    }
    // Prefetches up to `lines` lines. Returns how many were missing.
    __attribute__((noinline)) int fetch_across(int lines) {
        while (lines > 0) {
            if (piece_.lines == 0) {
                if (next_ == num_pieces_) return lines;
                piece_ = pieces_[next_++];
                piece_.at += offset_;
            }
            const int count = piece_.lines < lines ? piece_.lines : lines;
            const unsigned char* at = piece_.at;
            piece_.lines -= count;
            piece_.at += count * kLineBytes;
            lines -= count;
            for (int i = 0; i < count; ++i, at += kLineBytes) S::prefetch_l2(at);
        }
        return 0;
    }

  private:
    struct Piece {
        const unsigned char* at;
        int lines;
        std::uintptr_t stop() const { return reinterpret_cast<std::uintptr_t>(at) + static_cast<std::uintptr_t>(lines) * kLineBytes; }
    };

    Piece piece_{};  // what is left of the piece under way
    Piece pieces_[kMostPieces];
    std::int64_t offset_ = 0;
    int num_pieces_ = 0, next_ = 0, num_lines_ = 0, num_shares_ = 1;
};

}  // namespace
}  // namespace quire
