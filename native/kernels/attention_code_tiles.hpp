// Both products of attention over keys and values in codes (kv_codes.hpp), by AMX tiles of whole numbers; one row or sixteen.
//
// Codes are multiplied directly. The other factor becomes integers of 16 bits, in two limbs of 8: a rotated query, as
// fractions of its largest number; and the weights of 64 tokens times the scales of their values, as fractions of the
// largest weight times the largest scale. So the sums of a product are exact, in any order and with any other rows. The
// two limbs become float32 with one rounding; the unit of the fractions is multiplied in afterwards.
//
// Scores: A = 16 tokens x 64 codes (32 of 4 bits: a group, which has a scale) as they lie in memory, B = 64 of a query's numbers
// for each row and limb, C = 16 tokens x rows and limbs. Values: A = weights, rows and limbs x 64 tokens; B = 64 tokens x 16
// columns, four tokens interleaved into scratch on the way. Codes of 4 bits are made bytes first, each group's even ones before
// its odd ones.
//
// Eight rows at most have both limbs in one tile: 0 and 1 sums of scores, 2 of values; 4 keys, 5 values, 6 queries, 7 weights.
// More have a tile for each limb: 0 to 3 sums of scores, 4 keys, 6 and 7 queries; then 0 and 1 weights, 2 and 3 sums of values, 5
// values.
//
// A NaN in a query, a weight or a key's scale makes all of the row's output NaN; a NaN in a value's scale, the columns
// of its group.
#pragma once

#include "kernels/amx.hpp"
#include "kernels/attention_tile_packing.hpp"
#include "kernels/kv_codes.hpp"

namespace quire {
namespace {

// M, N: of keys and of values in memory.
template <class S, class TileSet, class M, class N>
class CodeTileProducts : TilePacking<S> {
    using Packing = TilePacking<S>;
    using Pairs = typename S::Pairs;
    using Vec = typename S::Vec;
    using Packing::kSide;
    static constexpr bool kGroupedKeys = std::is_same_v<M, code4>, kGroupedValues = std::is_same_v<N, code4>;
    static constexpr int kLine = 64;                         // bytes of a tile's row
    static constexpr int kStep = kGroupedKeys ? kCodeGroup : kLine;  // codes of a key in one product
    static constexpr int kSideBytes = kSide * kLine;         // of a tile
    static constexpr int kSums = kSide * kSide;              // numbers of a tile
    static constexpr int kHalves = Packing::kTileTokens / kSide, kTogether = 2 * kSide;  // tokens: sixteens of a tile, and those of two sums
    static constexpr int kRowsTogether = 8;                  // whose limbs share a tile
    static constexpr int kColumnsTogether = 4;               // tiles of columns whose sums are there at once
    static constexpr int kMostGroups = (kMaxHeadWidth / kCodeGroup + 3) / 4 * 4;
    static constexpr float kMost = 127 * 256 + 127, kLimb = 256.0f;  // limbs are of -128 to 127
    static constexpr float kWhole = 32767.0f;                // of a weight in words; a product of words is one of 2^15
    static constexpr float kSmallest = 0x1p-100f;            // what scales are made of, at least: their inverse is finite

  public:
    using Simd = S;
    using Element = bf16;
    using Stored = M;
    using Packing::kTileTokens, Packing::kHeadroom;
    static_assert(kTileTokens == kLine);
    static constexpr int kBlockRows = kSide;
    static constexpr bool kHeadsTogether = false;
    static constexpr bool kRoundsWeights = true;
    static constexpr int kManyRows = kSide;
    // Of 2 kTileTokens shares of the memory to come, as long as each part takes.
    static constexpr int kPackShares = kTileTokens * 3 / 4, kScoresShares = kTileTokens / 2;
    static constexpr int kSoftmaxShares = kTileTokens / 4, kValuesShares = kTileTokens / 2;

    CodeTileProducts(const PagedView& view, int rows, Scratch& scratch)
        : view_(view),
          k_width_(static_cast<int>(view.k.width)),
          v_width_(static_cast<int>(view.v.width)),
          k_padded_(static_cast<int>(padded_to(k_width_, kGroupedKeys ? 2 * kLine : kLine))),
          k_steps_((k_width_ + kStep - 1) / kStep),
          v_tiles_(static_cast<int>(padded_to(v_width_, kGroupedValues ? kCodeGroup : kSide)) / kSide),
          rows_(rows),
          block_bytes_(2 * kSide * k_padded_ + kSide * static_cast<int>(sizeof(float))),
          keys_(scratch.take<code8>(std::int64_t{kTileTokens} * k_padded_)),
          values_(scratch.take<code8>(std::int64_t{v_tiles_} * kSideBytes)),
          k_scales_(scratch.take<float>(std::int64_t{kTileTokens} * (kGroupedKeys ? kMostGroups : 1))),
          v_scales_(scratch.take<float>(std::int64_t{kTileTokens} * (kGroupedValues ? kMostGroups : 1))),
          sums_(scratch.take<std::int32_t>(2 * kSums * larger(kColumnsTogether, kHalves * (kGroupedKeys ? k_steps_ : 1)))),
          words_(scratch.take<bf16>(std::int64_t{kTileTokens} * num_groups())),
          weights_(scratch.take<float>(kSide * kTileTokens)),
          limbs_(scratch.take<code8>(std::int64_t{2} * kSideBytes * num_groups())),
          turned_(scratch.take<code8>(std::int64_t{2} * kSide * k_padded_)),
          configured_rows_(block_rows(0)),
          columns_(columns_of(configured_rows_)),
          tiles_(config(configured_rows_)) {
        std::memset(static_cast<void*>(limbs_), 0, std::size_t{2} * kSideBytes * static_cast<std::size_t>(num_groups()));
    }

    std::int64_t query_bytes() const { return padded_to(rows_, kSide) / kSide * block_bytes_; }

    // Of a block of 16 rows: their scales; then [64 codes][16 fours of codes][16 columns][4], a column for each row and limb, or
    // for each row, and once more for the lower limbs. A block is packed with its last row.
    __attribute__((noinline)) void pack_query(unsigned char* packed, int row, const bf16* query) {
        unsigned char* block = packed + row / kSide * std::int64_t{block_bytes_};
        const int r = row % kSide;
        float wide[kMaxHeadWidth + 2 * kLine] = {};
        widen_row<bf16>(reinterpret_cast<const unsigned char*>(query), k_width_, wide);
        turn_query(wide, k_width_);
        reinterpret_cast<float*>(block)[r] = split_query(wide, turned_ + 2 * r * k_padded_);
        if (r != kSide - 1 && row != rows_ - 1) return;
        const bool together = r < kRowsTogether;
        const int columns = columns_of(r + 1);
        code8* to = reinterpret_cast<code8*>(block + kSide * sizeof(float));
        for (int tile = 0; tile < (together ? 1 : 2); ++tile, to += kSide * k_padded_) {
            const bf16* rows[kSide];
            for (int i = 0; i < kSide; ++i) {
                const int limb = together ? i / columns : tile, of = together ? i % columns : i;
                rows[i] = reinterpret_cast<const bf16*>(limb < 2 && of <= r ? turned_ + (2 * of + limb) * k_padded_ : reinterpret_cast<const code8*>(kZeroRow));
            }
            Packing::pack_pairs(rows, k_padded_ / 2, reinterpret_cast<bf16*>(to), [] {});
        }
    }

    int block_rows(int row) const { return rows_ - row < kSide ? rows_ - row : kSide; }

    __attribute__((noinline)) void begin(const M* const* k, const M* const* v, LinesAhead<S>& ahead, int start, int stop) {
        ahead_ = &ahead;
        first_ = start / kTogether * kTogether, last_ = static_cast<int>(padded_to(stop, kTogether));
        if (kGroupedKeys) list_scales(k, view_.k.scale, k_steps_, k_scales_);
        for (int t = first_; t < last_; t += kSide) find_keys(k, t / kSide, start, stop);
        // Tokens that no row sees have zero weights.
        if (kGroupedValues) {
            list_scales(v, view_.v.scale, num_groups(), v_scales_);
        } else {
            for (int t = first_; t < last_; ++t) v_scales_[t] = code_scale(v[t], view_.v.scale);
        }
        const int lines = ahead.lines_of(kPackShares, kSide);
        for (int i = 0; i < kSide; ++i) {
            ahead.fetch(lines);
            const int t = S::first_of_four(i);
            const N* four[4] = {reinterpret_cast<const N*>(v[t]), reinterpret_cast<const N*>(v[t + kTogether]), reinterpret_cast<const N*>(v[t + 1]),
                                reinterpret_cast<const N*>(v[t + kTogether + 1])};
            code8* to = values_ + i * kLine;
            if constexpr (kGroupedValues) {
                for (int d = 0; d < v_width_; d += kCodeGroup, to += 2 * kSideBytes) {
                    Pairs even, odd;
                    S::interleave_codes(four, d, v_width_ - d, even, odd);
                    S::store_pairs(reinterpret_cast<bf16*>(to), even);
                    S::store_pairs(reinterpret_cast<bf16*>(to + kSideBytes), odd);
                }
            } else {
                for (int d = 0; d < v_width_; d += kSide, to += kSideBytes) {
                    S::store_pairs(reinterpret_cast<bf16*>(to), S::interleave_codes(four, d, v_width_ - d));
                }
            }
        }
        find_units();
    }

    __attribute__((noinline)) void scores(const unsigned char* packed, int row, int rows, int start, int stop, float* s) {
        if (rows != configured_rows_) {
            tiles_.configure(config(rows));
            configured_rows_ = rows;
            columns_ = columns_of(rows);
        }
        const unsigned char* block = packed + row / kSide * std::int64_t{block_bytes_};
        const auto* scales = reinterpret_cast<const float*>(block);
        const auto* query = reinterpret_cast<const code8*>(block + kSide * sizeof(float));
        const int lines = row == 0 ? ahead_->lines_of(kScoresShares, (last_ - first_) / kTogether * k_steps_) : 0;
        start = start / kTogether * kTogether, stop = static_cast<int>(padded_to(stop, kTogether));
        // The sums of one or two pairs of sixteens, then what becomes of them: reading a sum waits for it, and more
        // sums would not stay in the first cache.
        const int together = rows > kRowsTogether && kGroupedKeys ? kTogether : kTileTokens;
        for (; start < stop; start += together) {
            const int end = stop - start < together ? stop : start + together;
            for (int t = start; t < end; t += kTogether) {
                if (rows > kRowsTogether) {
                    many_sums(query, t / kSide, (t - start) / kSide, lines);
                } else {
                    few_sums(query, t / kSide, (t - start) / kSide, lines);
                }
            }
            for (int t = start; t < end; t += kSide) {
                const int half = (t - start) / kSide;
                if (rows > kRowsTogether) {
                    many_scores(scales, half, t, rows, s + t);
                    continue;
                }
                switch (columns_) {
                    case 1: few_scores<1>(scales, half, t, rows, s + t); break;
                    case 2: few_scores<2>(scales, half, t, rows, s + t); break;
                    case 4: few_scores<4>(scales, half, t, rows, s + t); break;
                    default: few_scores<8>(scales, half, t, rows, s + t);
                }
            }
        }
    }

    void keep_weights(int r, int vector, Vec first, Vec second) {
        S::store(weights_ + r * kTileTokens + vector * kSide, first);
        S::store(weights_ + r * kTileTokens + (vector + 1) * kSide, second);
    }

    // All tokens of the tile: those that no row sees have weights of zero.
    __attribute__((noinline)) void values(const float*, int row, int rows, int, int, float* o, std::int64_t stride) {
        const int lines = row == 0 ? ahead_->lines_of(kValuesShares, v_tiles_) : 0;
        split_weights(rows);
        for (int first = 0; first < v_tiles_; first += kColumnsTogether) {
            const int columns = v_tiles_ - first < kColumnsTogether ? v_tiles_ - first : kColumnsTogether;
            for (int i = 0; i < columns; ++i) {
                ahead_->fetch(lines);
                const int group = group_of(first + i);
                const code8* limbs = i == 0 || group != group_of(first + i - 1) ? limbs_of(group) : nullptr;
                if (rows > kRowsTogether) {
                    many_values(first + i, limbs, sums_ + 2 * i * kSums);
                } else {
                    few_values(first + i, limbs, sums_ + 2 * i * kSums);
                }
            }
            for (int i = 0; i < columns; ++i) add_rows(sums_ + 2 * i * kSums, group_of(first + i), rows, o + (first + i) * kSide, stride);
        }
    }

    void finish(const float* o, float factor, bf16* out) const {
        const Vec factors = S::broadcast(factor);
        for (int d = 0; d < v_width_; d += kCodeGroup) {
            float in_order[kCodeGroup];
            for (int i = 0; i < kCodeGroup; ++i) in_order[i] = o[d + (kGroupedValues ? i % 2 * kSide + i / 2 : i)];
            for (int i = 0; i < kCodeGroup && d + i < v_width_; i += kSide) store_scaled<S>(S::load(in_order + i), factors, out + d + i, v_width_ - d - i);
        }
    }

  private:
    int num_groups() const { return kGroupedValues ? static_cast<int>(view_.v.num_scales()) : 1; }

    static int columns_of(int rows) { return rows > kRowsTogether ? kSide : rows > 4 ? 8 : rows > 2 ? 4 : rows; }
    static TileConfig config(int rows) {
        const bool together = rows <= kRowsTogether;
        const int query_bytes = together ? 8 * columns_of(rows) : kLine;
        TileConfig config;
        config.tile(4, kSide, kStep).tile(5, kSide, kLine).tile(6, kStep / 4, query_bytes);
        for (const int tile : {0, 1}) config.tile(tile, kSide, query_bytes);
        if (together) {
            for (const int tile : {2, 7}) config.tile(tile, 2 * rows, kLine);
        } else {
            config.tile(2, kSide, kLine).tile(3, kSide, kLine).tile(7, kStep / 4, kLine);
        }
        return config;
    }

    // A query's numbers, zeros behind them -> upper limbs, and k_padded_ behind them the lower ones, in the order of the keys' bytes. Returns
    // what one of them is worth.
    float split_query(const float* query, code8* to) const {
        Vec most = S::broadcast(kSmallest), poison = S::zero();
        for (int d = 0; d < k_width_; d += kSide) {
            const Vec numbers = S::load(query + d);
            most = S::max(S::max(numbers, S::sub(S::zero(), numbers)), most);
            poison = S::fma(numbers, S::zero(), poison);
        }
        const float top = S::reduce_max(most);
        const Vec inverse = S::broadcast(kMost / top);
        for (int d = 0; d < k_padded_; d += kLine) {
            Vec numbers[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) numbers[i] = S::mul(S::load(query + d + i * kSide), inverse);
            if constexpr (kGroupedKeys) {
                S::unzip(numbers[0], numbers[1], numbers[0], numbers[1]);
                S::unzip(numbers[2], numbers[3], numbers[2], numbers[3]);
            }
            S::split_in_order(numbers, to + d, to + k_padded_ + d);
        }
        return top / kMost + S::reduce_add(poison);
    }

    // Scales of tokens [first_, last_) -> to[group][token], and maybe of three groups behind the last; scale: bytes from a row to its first
    // group's.
    void list_scales(const M* const* rows, std::int64_t scale, int num_groups, float* to) const {
        constexpr int kFour = 4;
        alignas(64) float of_tokens[kTileTokens * kFour];  // of four groups: [token][group]
        for (int g = 0; g < num_groups; g += kFour, to += kFour * kTileTokens) {
            const int count = num_groups - g < kFour ? num_groups - g : kFour;
            for (int t = first_; t < last_; ++t) {
                const auto* from = reinterpret_cast<const bf16*>(reinterpret_cast<const unsigned char*>(rows[t]) + scale) + g;
                S::store_part(of_tokens + t * kFour, S::load_part(from, count), kFour);
            }
            for (int t = first_; t < last_; t += kSide) {
                const float* four = of_tokens + t * kFour;
                Vec even[2], odd[2], of_group[kFour];
                for (int i = 0; i < 2; ++i, four += 2 * kSide) S::unzip(S::load(four), S::load(four + kSide), even[i], odd[i]);
                S::unzip(even[0], even[1], of_group[0], of_group[2]);
                S::unzip(odd[0], odd[1], of_group[1], of_group[3]);
                for (int i = 0; i < kFour; ++i) S::store(to + i * kTileTokens + t, of_group[i]);
            }
        }
    }

    // Sixteen keys as a tile's rows: in place where they lie at one stride and fill their last tile, else a copy.
    void find_keys(const M* const* k, int half, int start, int stop) {
        const int first = half * kSide;
        if constexpr (!kGroupedKeys) {
            for (int t = first; t < first + kSide; ++t) k_scales_[t] = code_scale(k[t], view_.k.scale);
            const std::int64_t stride = k[first + 1] - k[first];
            bool in_place = k_width_ == k_padded_ && start <= first && stop >= first + kSide;
            for (int t = first + 1; in_place && t < first + kSide; ++t) in_place = k[t] - k[t - 1] == stride;
            if (in_place) {
                key_base_[half] = reinterpret_cast<const code8*>(k[first]);
                key_stride_[half] = stride;
                return;
            }
        }
        for (int t = first; t < first + kSide; ++t) {
            code8* to = keys_ + t * k_padded_;
            if constexpr (kGroupedKeys) {
                for (int d = 0; d < k_width_; d += 2 * kLine) S::widen_codes(k[t] + d / 2, k_width_ - d, to + d);
            } else {
                std::memcpy(to, k[t], static_cast<std::size_t>(k_width_));
                if (k_padded_ != k_width_) std::memset(static_cast<void*>(to + k_width_), 0, static_cast<std::size_t>(k_padded_ - k_width_));
            }
        }
        key_base_[half] = keys_ + first * k_padded_;
        key_stride_[half] = k_padded_;
    }

    // The numbers of a query that meet step `step` of the keys.
    static const code8* of_step(const code8* query, int step) { return query + step * kStep * kSide; }

    // A sum of scores as float32, from its upper and its lower limb.
    static Vec joined(Vec upper, Vec lower) { return S::fma(upper, S::broadcast(kLimb), lower); }

    // Where the sums of a step and the half-th sixteen tokens lie: [token][limb][row], or [limb][token][row] of more than eight rows.
    std::int32_t* sums_of(int step, int half) const { return sums_ + 2 * (step * kHalves + half) * kSums; }

    // Two sixteens of tokens from the half-th on, by all rows -> sums of the to-th sixteen and the next.
    void few_sums(const code8* query, int half, int to, int lines) {
        const int row_bytes = 8 * columns_;
        for (int step = 0; step < k_steps_; ++step) {
            ahead_->fetch(lines);
            if (kGroupedKeys || step == 0) {
                tiles_.template zero<0>();
                tiles_.template zero<1>();
            }
            tiles_.template load<6>(of_step(query, step), kLine);
            load_keys(half, step);
            tiles_.template dot_int8<0, 4, 6>();
            load_keys(half + 1, step);
            tiles_.template dot_int8<1, 4, 6>();
            if (!kGroupedKeys && step + 1 < k_steps_) continue;
            tiles_.template store<0>(sums_of(kGroupedKeys ? step : 0, to), row_bytes);
            tiles_.template store<1>(sums_of(kGroupedKeys ? step : 0, to + 1), row_bytes);
        }
    }
    void many_sums(const code8* query, int half, int to, int lines) {
        const code8* lower = query + kSide * k_padded_;
        for (int step = 0; step < k_steps_; ++step) {
            ahead_->fetch(lines);
            if (kGroupedKeys || step == 0) {
                tiles_.template zero<0>();
                tiles_.template zero<1>();
                tiles_.template zero<2>();
                tiles_.template zero<3>();
            }
            tiles_.template load<6>(of_step(query, step), kLine);
            tiles_.template load<7>(of_step(lower, step), kLine);
            load_keys(half, step);
            tiles_.template dot_int8<0, 4, 6>();
            tiles_.template dot_int8<1, 4, 7>();
            load_keys(half + 1, step);
            tiles_.template dot_int8<2, 4, 6>();
            tiles_.template dot_int8<3, 4, 7>();
            if (!kGroupedKeys && step + 1 < k_steps_) continue;
            std::int32_t *sums = sums_of(kGroupedKeys ? step : 0, to), *second = sums_of(kGroupedKeys ? step : 0, to + 1);
            tiles_.template store<0>(sums, kLine);
            tiles_.template store<1>(sums + kSums, kLine);
            tiles_.template store<2>(second, kLine);
            tiles_.template store<3>(second + kSums, kLine);
        }
    }
    void load_keys(int half, int step) { tiles_.template load<4>(key_base_[half] + step * kStep, key_stride_[half]); }

    // The sums of the half-th sixteen -> s[row][token], of tokens from t on.
    template <int kRows>
    void few_scores(const float* scales, int half, int t, int rows, float* s) const {
        Vec made[kRows], of_group[kRows];
        for (int g = 0; g < (kGroupedKeys ? k_steps_ : 1); ++g) {
            const Vec of_tokens = S::load(k_scales_ + g * kTileTokens + t);
            join_rows<kRows>(sums_of(g, half), of_group);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) made[r] = g == 0 ? S::mul(of_group[r], of_tokens) : S::fma(of_group[r], of_tokens, made[r]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            if (r < rows) S::store(s + r * kTileTokens, S::mul(made[r], S::broadcast(scales[r])));
        }
    }

    // Sums [token][limb][row] of 16 tokens -> a vector of tokens for each row.
    template <int kRows>
    static void join_rows(const std::int32_t* sums, Vec (&joint)[kRows]) {
        Vec rows[2 * kRows];
#pragma GCC unroll 16
        for (int i = 0; i < 2 * kRows; ++i) rows[i] = S::from_numbers(sums + i * kSide);
#pragma GCC unroll 4
        for (int step = 2 * kRows; step > 1; step /= 2) {
            Vec even_odd[2 * kRows];
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) S::unzip(rows[2 * i], rows[2 * i + 1], even_odd[i], even_odd[kRows + i]);
#pragma GCC unroll 16
            for (int i = 0; i < 2 * kRows; ++i) rows[i] = even_odd[i];
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) joint[r] = joined(rows[r], rows[kRows + r]);
    }

    // The same of more rows.
    void many_scores(const float* scales, int half, int t, int rows, float* s) const {
        const Vec of_queries = S::load(scales);
        Pairs square[kSide];
#pragma GCC unroll 16
        for (int i = 0; i < kSide; ++i) {
            Vec made = S::zero();
            for (int g = 0; g < (kGroupedKeys ? k_steps_ : 1); ++g) {
                const std::int32_t* sums = sums_of(g, half) + i * kSide;
                const Vec joint = joined(S::from_numbers(sums), S::from_numbers(sums + kSums)), scale = S::broadcast(k_scales_[g * kTileTokens + t + i]);
                made = g == 0 ? S::mul(joint, scale) : S::fma(joint, scale, made);
            }
            square[i] = S::as_pairs(S::mul(made, of_queries));
        }
        S::transpose(square);
#pragma GCC unroll 16
        for (int r = 0; r < kSide; ++r) {
            if (r < rows) S::store_pairs(reinterpret_cast<bf16*>(s + r * kTileTokens), square[r]);
        }
    }

    // Four vectors of scales as parts of the largest, in words; and what one of these is worth.
    static float to_parts(const Vec (&scales)[kHalves], Pairs& first, Pairs& second) {
        Vec most = S::broadcast(kSmallest), parts[kHalves];
#pragma GCC unroll 4
        for (int i = 0; i < kHalves; ++i) most = S::max(S::max(scales[i], S::sub(S::zero(), scales[i])), most);
        const float top = S::reduce_max(most);
        const Vec inverse = S::broadcast(kMost / top);
#pragma GCC unroll 4
        for (int i = 0; i < kHalves; ++i) parts[i] = S::mul(scales[i], inverse);
        S::to_words(parts, first, second);
        return top / kMost * (32768.0f / kWhole);
    }

    // Of the values' scales in each group, for rows that see the whole tile.
    void find_units() {
        for (int g = 0; g < num_groups(); ++g) {
            float* scales = v_scales_ + g * kTileTokens;
            for (int t = 0; t < first_; ++t) scales[t] = 0.0f;
            for (int t = last_; t < kTileTokens; ++t) scales[t] = 0.0f;
            Vec loaded[kHalves], poison = S::zero();
#pragma GCC unroll 4
            for (int i = 0; i < kHalves; ++i) {
                loaded[i] = S::load(scales + i * kSide);
                poison = S::fma(loaded[i], S::zero(), poison);
            }
            Pairs first, second;
            units_[g] = to_parts(loaded, first, second) + S::reduce_add(poison);
            S::store_pairs(words_ + g * kTileTokens, first);
            S::store_pairs(words_ + g * kTileTokens + kTogether, second);
        }
    }

    // Kept weights as parts of a row's largest, in words, times those of the scales in each group -> limbs of the group: rows of upper ones,
    // and of lower ones behind them (of more than eight rows: a tile behind them); and what one of a row's numbers is worth. A row that has
    // no weight for some token goes by the scales of the others alone: what others of the item see is not to be seen in its bits.
    void split_weights(int rows) {
        const int lower = (rows > kRowsTogether ? kSide : rows) * kLine;
        for (int r = 0; r < rows; ++r) {
            Vec weights[kHalves], parts[kHalves], most = S::broadcast(kSmallest);
            bool sees_all = true;
#pragma GCC unroll 4
            for (int i = 0; i < kHalves; ++i) {
                weights[i] = S::load(weights_ + r * kTileTokens + i * kSide);
                most = S::max(weights[i], most);
                sees_all = sees_all && !S::any_from(S::zero(), weights[i]);
            }
            const float top = S::reduce_max(most);
            const Vec inverse = S::broadcast(kWhole / top);
#pragma GCC unroll 4
            for (int i = 0; i < kHalves; ++i) parts[i] = S::mul(weights[i], inverse);
            Pairs first, second;
            S::to_words(parts, first, second);
            for (int g = 0; g < num_groups(); ++g) {
                const bf16* words = words_ + g * kTileTokens;
                Pairs first_scales = S::load_pairs(words), second_scales = S::load_pairs(words + kTogether);
                float unit = units_[g];
                if (!sees_all) {
                    Vec scales[kHalves];
#pragma GCC unroll 4
                    for (int i = 0; i < kHalves; ++i) scales[i] = S::keep_from(weights[i], S::load(v_scales_ + g * kTileTokens + i * kSide), S::broadcast(0x1p-149f));
                    unit = to_parts(scales, first_scales, second_scales) + units_[g] * 0.0f;
                }
                steps_[g * kSide + r] = top * unit;
                code8* to = limbs_of(g) + r * kLine;
                S::store_limbs(S::times_words(first, first_scales), S::times_words(second, second_scales), to, to + lower);
            }
        }
    }

    static int group_of(int column) { return kGroupedValues ? column / 2 : 0; }

    code8* limbs_of(int group) const { return limbs_ + group * 2 * kSideBytes; }

    // A tile of columns -> sums [limb][row]. limbs: null where the tiles have them.
    void few_values(int column, const code8* limbs, std::int32_t* sums) {
        if (limbs != nullptr) tiles_.template load<7>(limbs, kLine);
        tiles_.template load<5>(values_ + column * kSideBytes, kLine);
        tiles_.template zero<2>();
        tiles_.template dot_int8<2, 7, 5>();
        tiles_.template store<2>(sums, kLine);
    }
    void many_values(int column, const code8* limbs, std::int32_t* sums) {
        if (limbs != nullptr) {
            tiles_.template load<0>(limbs, kLine);
            tiles_.template load<1>(limbs + kSideBytes, kLine);
        }
        tiles_.template load<5>(values_ + column * kSideBytes, kLine);
        tiles_.template zero<2>();
        tiles_.template zero<3>();
        tiles_.template dot_int8<2, 0, 5>();
        tiles_.template dot_int8<3, 1, 5>();
        tiles_.template store<2>(sums, kLine);
        tiles_.template store<3>(sums + kSums, kLine);
    }

    // o += the sums of a tile of columns of a group.
    void add_rows(const std::int32_t* sums, int group, int rows, float* o, std::int64_t stride) const {
        const int lower = rows > kRowsTogether ? kSums : rows * kSide;
        const float* steps = steps_ + group * kSide;
        for (int r = 0; r < rows; ++r, sums += kSide, o += stride) {
            S::store(o, S::fma(joined(S::from_numbers(sums), S::from_numbers(sums + lower)), S::broadcast(steps[r]), S::load(o)));
        }
    }

    const PagedView& view_;
    const int k_width_, v_width_;
    const int k_padded_;
    const int k_steps_;  // products of a key
    const int v_tiles_;  // of sixteen columns
    const int rows_;
    const int block_bytes_;  // of sixteen packed query rows
    code8* keys_;      // [64 tokens][k_padded_], where they are not taken in place
    code8* values_;    // [16 columns][16 fours of tokens][16 columns][4]
    float* k_scales_;  // [group][64 tokens]
    float* v_scales_;  // the same, of values
    bf16* words_;      // [group][64 tokens]: those as parts of the largest, in the order of to_words
    float units_[kGroupedValues ? kMostGroups : 1];  // [group]: what one of these is worth; NaN where a scale is not finite
    std::int32_t* sums_;  // [16][16] for each limb of the products under way
    float* weights_;         // [row][64 tokens]
    code8* limbs_;   // of weights: [group][limb][row][64 tokens]
    float steps_[kSide * (kGroupedValues ? kMostGroups : 1)];  // [group][row]: what a number of them is worth
    code8* turned_;          // [row][limb][k_padded_] of a block of queries
    int configured_rows_;
    int columns_;  // of a tile of scores: rows, up to the next power of two
    TileSet tiles_;
    const code8* key_base_[kTileTokens / kSide];
    std::int64_t key_stride_[kTileTokens / kSide];
    int first_ = 0, last_ = 0;
    LinesAhead<S>* ahead_ = nullptr;
};

}  // namespace
}  // namespace quire
