#include "kernels/xxh3.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace quire {
namespace {

constexpr std::size_t kStripe = 64, kStripesOfABlock = 16, kBlock = kStripe * kStripesOfABlock;
constexpr std::uint64_t kPrime32_1 = 0x9E3779B1U, kPrime32_2 = 0x85EBCA77U, kPrime32_3 = 0xC2B2AE3DU;
constexpr std::uint64_t kPrime64_1 = 0x9E3779B185EBCA87U, kPrime64_2 = 0xC2B2AE3D27D4EB4FU, kPrime64_3 = 0x165667B19E3779F9U;
constexpr std::uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63U, kPrime64_5 = 0x27D4EB2F165667C5U;

alignas(16) constexpr std::array<unsigned char, 192> kSecret = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

std::uint64_t read_64(const unsigned char* from) {
    std::uint64_t value = 0;
    std::memcpy(&value, from, sizeof value);  // little endian, as all that Quire runs on
    return value;
}

// The eight sums of 64 bits, and the stripes added to them.
class Sums {
public:
    // `num_stripes` adjacent ones, wherever in its block the first of them is.
    void add(const unsigned char* from, std::size_t num_stripes) {
#if defined(__x86_64__)
        // In registers from one block to the next: what is stored in halves and loaded whole waits for it.
        auto* sums = reinterpret_cast<__m128i*>(sums_.data());  // NOLINT: two sums each
        __m128i a = _mm_load_si128(sums), b = _mm_load_si128(sums + 1), c = _mm_load_si128(sums + 2), d = _mm_load_si128(sums + 3);
        while (num_stripes != 0) {
            const std::size_t count = std::min(num_stripes, kStripesOfABlock - stripe_);
            const unsigned char* secret = kSecret.data() + 8 * stripe_;
            for (const unsigned char* end = from + count * kStripe; from != end; from += kStripe, secret += 8) {
                const auto* data = reinterpret_cast<const __m128i*>(from);    // NOLINT: any bytes
                const auto* keys = reinterpret_cast<const __m128i*>(secret);  // NOLINT
                a = _mm_add_epi64(a, added(data, keys));
                b = _mm_add_epi64(b, added(data + 1, keys + 1));
                c = _mm_add_epi64(c, added(data + 2, keys + 2));
                d = _mm_add_epi64(d, added(data + 3, keys + 3));
            }
            num_stripes -= count;
            stripe_ += count;
            if (stripe_ == kStripesOfABlock) {
                const auto* keys = reinterpret_cast<const __m128i*>(kSecret.data() + kSecret.size() - kStripe);  // NOLINT
                a = scrambled(a, keys);
                b = scrambled(b, keys + 1);
                c = scrambled(c, keys + 2);
                d = scrambled(d, keys + 3);
                stripe_ = 0;
            }
        }
        _mm_store_si128(sums, a);
        _mm_store_si128(sums + 1, b);
        _mm_store_si128(sums + 2, c);
        _mm_store_si128(sums + 3, d);
#else
        for (; num_stripes != 0; --num_stripes, from += kStripe) {
            add_stripe(from, kSecret.data() + 8 * stripe_);
            if (++stripe_ == kStripesOfABlock) {
                scramble();
                stripe_ = 0;
            }
        }
#endif
    }

    // The last 64 bytes, which overlap the stripes before; then the digest.
    std::uint64_t end(const unsigned char* last, std::size_t num_bytes) {
        add_stripe(last, kSecret.data() + kSecret.size() - kStripe - 7);
        std::uint64_t digest = num_bytes * kPrime64_1;
        for (std::size_t i = 0; i < 4; ++i) {
            const unsigned char* secret = kSecret.data() + 11 + 16 * i;
            const auto product = static_cast<unsigned __int128>(sums_[2 * i] ^ read_64(secret)) * (sums_[2 * i + 1] ^ read_64(secret + 8));
            digest += static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64U);
        }
        digest = (digest ^ (digest >> 37U)) * 0x165667919E3779F9U;
        return digest ^ (digest >> 32U);
    }

private:
#if defined(__x86_64__)
    // What 16 bytes of a stripe add to two sums.
    static __m128i added(const __m128i* from, const __m128i* secret) {
        const __m128i data = _mm_loadu_si128(from), key = _mm_xor_si128(data, _mm_loadu_si128(secret));
        return _mm_add_epi64(_mm_mul_epu32(key, _mm_srli_epi64(key, 32)), _mm_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2)));
    }

    // Two sums at the end of a block.
    static __m128i scrambled(__m128i sums, const __m128i* secret) {
        const __m128i prime = _mm_set1_epi64x(kPrime32_1);
        const __m128i key = _mm_xor_si128(_mm_xor_si128(sums, _mm_srli_epi64(sums, 47)), _mm_loadu_si128(secret));
        return _mm_add_epi64(_mm_mul_epu32(key, prime), _mm_slli_epi64(_mm_mul_epu32(_mm_srli_epi64(key, 32), prime), 32));
    }
#else
    void scramble() {
        const unsigned char* secret = kSecret.data() + kSecret.size() - kStripe;
        for (std::size_t i = 0; i < 8; ++i) {
            sums_[i] = ((sums_[i] ^ (sums_[i] >> 47U)) ^ read_64(secret + 8 * i)) * kPrime32_1;
        }
    }
#endif

    void add_stripe(const unsigned char* from, const unsigned char* secret) {
        for (std::size_t i = 0; i < 8; ++i) {
            const std::uint64_t data = read_64(from + 8 * i), key = data ^ read_64(secret + 8 * i);
            sums_[i ^ 1U] += data;
            sums_[i] += (key & 0xFFFFFFFFU) * (key >> 32U);
        }
    }

    alignas(16) std::array<std::uint64_t, 8> sums_ = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                                      kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
    std::size_t stripe_ = 0;  // the next one's number in its block
};

}  // namespace

std::uint64_t xxh3_64(std::span<const Bytes> parts) {
    std::size_t num_bytes = 0;
    for (const Bytes part : parts) {
        num_bytes += part.size();
    }
    Sums sums;
    std::array<unsigned char, kStripe> straddling{};  // a stripe that does not lie in one part
    std::array<unsigned char, kStripe> last{};        // the last bytes seen
    std::size_t held = 0;                             // of `straddling`
    std::size_t left = (num_bytes - 1) / kStripe;     // stripes; what is behind them is in `last` alone
    for (Bytes part : parts) {
        if (part.size() >= kStripe) {
            std::memcpy(last.data(), part.data() + part.size() - kStripe, kStripe);
        } else if (!part.empty()) {
            std::memmove(last.data(), last.data() + part.size(), kStripe - part.size());
            std::memcpy(last.data() + kStripe - part.size(), part.data(), part.size());
        }
        while (left != 0 && !part.empty()) {
            if (held == 0 && part.size() >= kStripe) {
                const std::size_t count = std::min(part.size() / kStripe, left);
                sums.add(part.data(), count);
                left -= count;
                part = part.subspan(count * kStripe);
            } else {
                const std::size_t count = std::min(kStripe - held, part.size());
                std::memcpy(straddling.data() + held, part.data(), count);
                held += count;
                part = part.subspan(count);
                if (held == kStripe) {
                    sums.add(straddling.data(), 1);
                    --left;
                    held = 0;
                }
            }
        }
    }
    return sums.end(last.data(), num_bytes);
}

}  // namespace quire
