// Copying between a payload and a storage, both in memory of exactly the size it was promised, so that a read or write
// beyond it stops the test; against a loop over bytes, at every alignment and length, towards the storage and back.
#include "kernels/copy_rows.hpp"

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/testing.hpp"

using namespace quire;
using quire::testing::Random;

namespace {

// `size` bytes that begin `shift` bytes behind the beginning of a cache line, and end where the allocation does.
class Bytes {
public:
    Bytes(std::int64_t size, std::int64_t shift, Random& random)
        : size_(size), memory_(new (std::align_val_t{64}) unsigned char[static_cast<std::size_t>(shift + size)]), first_(memory_ + shift) {
        for (std::int64_t i = 0; i < size; ++i) first_[i] = static_cast<unsigned char>(random.below(256));
    }
    Bytes(const Bytes&) = delete;
    ~Bytes() { operator delete[](memory_, std::align_val_t{64}); }

    unsigned char& operator[](std::int64_t i) { return first_[i]; }
    std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(first_); }
    std::vector<unsigned char> copy() const { return {first_, first_ + size_}; }
    bool holds(const std::vector<unsigned char>& other) const {
        return other.size() == static_cast<std::size_t>(size_) && (size_ == 0 || std::memcmp(first_, other.data(), other.size()) == 0);
    }

private:
    std::int64_t size_;
    unsigned char* memory_;
    unsigned char* first_;
};

struct Case {
    std::int64_t num_rows, row_bytes, gap;  // gap: from the end of a row in the storage to the next one
    std::int64_t payload_shift, storage_shift;
};

// What `copy_rows` is to do, byte by byte.
void copy_obviously(unsigned char* payload, unsigned char* storage, const Case& one, bool to_storage) {
    for (std::int64_t row = 0; row < one.num_rows; ++row) {
        for (std::int64_t i = 0; i < one.row_bytes; ++i) {
            unsigned char& ours = payload[row * one.row_bytes + i];
            unsigned char& theirs = storage[row * (one.row_bytes + one.gap) + i];
            (to_storage ? theirs : ours) = to_storage ? ours : theirs;
        }
    }
}

void test_one_piece(const Case& one, Random& random) {
    const std::int64_t stride = one.row_bytes + one.gap;
    const std::int64_t span = (one.num_rows - 1) * stride + one.row_bytes;  // no byte behind the last row
    for (const bool to_storage : {true, false}) {
        Bytes payload(one.num_rows * one.row_bytes, one.payload_shift, random);
        Bytes storage(span, one.storage_shift, random);
        std::vector<unsigned char> ours = payload.copy(), theirs = storage.copy();
        copy_obviously(ours.data(), theirs.data(), one, to_storage);
        const RowPiece piece{0, static_cast<std::int64_t>(storage.address()), one.num_rows, one.row_bytes, stride};
        copy_rows(payload.address(), &piece, 1, to_storage);
        EXPECT(payload.holds(ours));
        EXPECT(storage.holds(theirs));
    }
}

// Lengths around the ends of cache lines at every alignment of the storage, which decides how a copy begins.
void test_alignments(Random& random) {
    for (std::int64_t storage_shift = 0; storage_shift < 64; ++storage_shift) {
        for (const std::int64_t row_bytes : {1, 15, 16, 63, 64, 65, 127, 128, 129, 191, 192, 193, 321}) {
            test_one_piece({1, row_bytes, 0, random.below(64), storage_shift}, random);
        }
    }
}

void test_random_rows(Random& random) {
    for (int turn = 0; turn < 2000; ++turn) {
        test_one_piece({1 + random.below(9), 1 + random.below(700), random.below(3) * random.below(130), random.below(64), random.below(64)},
                       random);
    }
}

// Many pieces in one call, some of none or of empty rows: places in the storage do not overlap, and what lies between stays.
void test_many_pieces(Random& random) {
    for (int turn = 0; turn < 200; ++turn) {
        const std::int64_t num_pieces = random.below(40);
        std::vector<Case> cases;
        std::int64_t payload_bytes = 0, storage_bytes = 0;
        for (std::int64_t i = 0; i < num_pieces; ++i) {
            cases.push_back({random.below(4), random.below(300), random.below(2) * random.below(90), random.below(30), random.below(30)});
        }
        std::vector<std::int64_t> in_payload, in_storage;
        for (const Case& one : cases) {
            in_payload.push_back(payload_bytes += one.payload_shift);
            in_storage.push_back(storage_bytes += one.storage_shift);
            payload_bytes += one.num_rows * one.row_bytes;
            storage_bytes += one.num_rows * (one.row_bytes + one.gap);
        }
        for (const bool to_storage : {true, false}) {
            Bytes payload(payload_bytes, random.below(64), random), storage(storage_bytes, random.below(64), random);
            std::vector<unsigned char> ours = payload.copy(), theirs = storage.copy();
            std::vector<RowPiece> pieces;
            for (std::size_t i = 0; i < cases.size(); ++i) {
                const Case& one = cases[i];
                copy_obviously(ours.data() + in_payload[i], theirs.data() + in_storage[i], one, to_storage);
                pieces.push_back({in_payload[i], static_cast<std::int64_t>(storage.address()) + in_storage[i], one.num_rows,
                                  one.row_bytes, one.row_bytes + one.gap});
            }
            copy_rows(payload.address(), pieces.data(), num_pieces, to_storage);
            EXPECT(payload.holds(ours));
            EXPECT(storage.holds(theirs));
        }
    }
}

}  // namespace

int main() {
    Random random(7);
    test_alignments(random);
    test_random_rows(random);
    test_many_pieces(random);
    return 0;
}
