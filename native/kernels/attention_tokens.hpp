// Addresses of the tokens of an item's tiles: their keys and values by head, and the memory of the next tiles as pieces
// for LinesAhead. Computed from the block table and the storage's strides, not from their contents.
#pragma once

#include "kernels/attention_ahead.hpp"

namespace quire {
namespace {

inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

template <class S, class Element, int kTileTokens>
class ItemTokens {
  public:
    static constexpr int kTileShares = 2 * kTileTokens;  // of memory to come: one for each key and value of a tile

    // Where a tile's tokens lie (offsets of head 0, in elements), which of them any row sees, and where those of a block
    // begin and end.
    struct Tile {
        std::int64_t k[kTileTokens], v[kTileTokens];
        int start, stop;
        int runs[kTileTokens + 1], num_runs;
        int head;  // for which their memory is listed as what comes next, or -1
    };
    // Of one head; zeros for tokens that no row sees.
    struct Rows {
        const Element* k[kTileTokens];
        const Element* v[kTileTokens];
    };

    ItemTokens(const PagedView& view, const std::int32_t* table)
        : view_(view),
          table_(table),
          k_(reinterpret_cast<const Element*>(view.k.data)),
          v_(reinterpret_cast<const Element*>(view.v.data)),
          zeros_(reinterpret_cast<const Element*>(kZeroRow)),
          head_bytes_(view.k.head_stride * static_cast<std::int64_t>(sizeof(Element))),
          heads_alike_(view.v.head_stride == view.k.head_stride && head_bytes_ % LinesAhead<S>::kLineBytes == 0),
          token_major_(view.token_major()) {}

    // The heads of a token lie together, not the tokens of a head.
    bool token_major() const { return token_major_; }

    // Tokens [begin, end) are those that any row of the item sees.
    void find(std::int64_t tile, std::int64_t begin, std::int64_t end, Tile& tokens) const {
        const std::int64_t base = tile * kTileTokens;
        tokens.start = static_cast<int>(larger(begin - base, 0));
        tokens.stop = static_cast<int>(smaller(end - base, kTileTokens));
        std::int64_t block = (base + tokens.start) / view_.block_size, offset = (base + tokens.start) % view_.block_size;
        tokens.num_runs = 0;
        tokens.head = -1;
        for (int t = tokens.start; t < tokens.stop;) {
            tokens.runs[tokens.num_runs++] = t;
            const std::int64_t id = table_[block];
            const std::int64_t k = id * view_.k.block_stride, v = id * view_.v.block_stride;
            for (; t < tokens.stop && offset < view_.block_size; ++t, ++offset) {
                tokens.k[t] = k + offset * view_.k.token_stride;
                tokens.v[t] = v + offset * view_.v.token_stride;
            }
            ++block;
            offset = 0;
        }
        tokens.runs[tokens.num_runs] = tokens.stop;
    }

    // Lists part `part` of `num_heads` equal parts of a tile's memory: block by block, the heads from `head` on, keys and
    // values; or, where a token's heads lie together, token by token.
    void list(Tile& tokens, int head, int num_heads, int part, LinesAhead<S>& ahead) const {
        if (num_heads == 1 && tokens.head >= 0) return ahead.again((head - tokens.head) * head_bytes_);
        ahead.begin();
        if (num_heads == 1 && heads_alike_) tokens.head = head;
        if (token_major_) {
            const int count = tokens.stop - tokens.start;
            const int first = tokens.start + count * part / num_heads, last = tokens.start + count * (part + 1) / num_heads;
            for (int t = first; t < last; ++t) {
                ahead.add(k_ + head * view_.k.head_stride + tokens.k[t], (num_heads - 1) * view_.k.head_stride + view_.k.extent());
            }
            for (int t = first; t < last; ++t) {
                ahead.add(v_ + head * view_.v.head_stride + tokens.v[t], (num_heads - 1) * view_.v.head_stride + view_.v.extent());
            }
            return ahead.end(kTileShares);
        }
        const int pieces = 2 * tokens.num_runs;
        for (int piece = part * pieces; piece < (part + 1) * pieces; ++piece) {
            const int run = piece / (2 * num_heads), start = tokens.runs[run];
            const std::int64_t at = head + piece / 2 % num_heads, more = tokens.runs[run + 1] - start - 1;
            if (piece % 2 == 0) {
                ahead.add(k_ + at * view_.k.head_stride + tokens.k[start], more * view_.k.token_stride + view_.k.extent());
            } else {
                ahead.add(v_ + at * view_.v.head_stride + tokens.v[start], more * view_.v.token_stride + view_.v.extent());
            }
        }
        ahead.end(kTileShares);
    }

    void rows(const Tile& tokens, int head, Rows& rows) const {
        const Element* k = k_ + head * view_.k.head_stride;
        const Element* v = v_ + head * view_.v.head_stride;
        for (int t = 0; t < tokens.start; ++t) rows.k[t] = rows.v[t] = zeros_;
        for (int t = tokens.start; t < tokens.stop; ++t) {
            rows.k[t] = k + tokens.k[t];
            rows.v[t] = v + tokens.v[t];
        }
        for (int t = tokens.stop; t < kTileTokens; ++t) rows.k[t] = rows.v[t] = zeros_;
    }

  private:
    const PagedView& view_;
    const std::int32_t* table_;
    const Element* k_;
    const Element* v_;
    const Element* zeros_;
    std::int64_t head_bytes_;  // from a head's keys to the next one's
    bool heads_alike_;         // a head's keys and values lie as the next one's do, on whole lines
    bool token_major_;
};

}  // namespace
}  // namespace quire
