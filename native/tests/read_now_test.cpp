// Reading values from a file to where they are wanted: buffers of exactly the size they are said to have, of every size and
// number, against the file's bytes; and the digest of scattered parts against that of the same bytes in one piece.
#include "kernels/read_now.hpp"

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <system_error>
#include <vector>

#include "kernels/xxh3.hpp"
#include "tests/testing.hpp"

using namespace quire;
using quire::testing::Random;

namespace {

// Memory that ends where the buffer does.
struct Room {
    explicit Room(std::size_t size) : memory(new unsigned char[size]), bytes(memory.get(), size) {}
    std::unique_ptr<unsigned char[]> memory;
    std::span<unsigned char> bytes;
};

void test_values(int descriptor, const std::vector<unsigned char>& content, Random& random) {
    constexpr std::size_t sizes[] = {0, 1, 7, 63, 64, 65, 129, 1024, 1025};
    for (int round = 0; round < 400; ++round) {
        std::vector<Room> rooms;
        const Room front(static_cast<std::size_t>(random.below(200)));
        ValueRead read{descriptor, random.below(1000), front.bytes, {}};
        const std::int64_t num_parts = round == 0 ? 1500 : 1 + random.below(20);
        std::size_t num_bytes = 0;
        while (static_cast<std::int64_t>(rooms.size()) < num_parts || num_bytes < kShortestXxh3) {
            rooms.emplace_back(sizes[random.below(9)]);
            read.parts.push_back(rooms.back().bytes);
            num_bytes += rooms.back().bytes.size();
        }
        const auto digest = read_now(read);
        EXPECT(digest.has_value());
        const unsigned char* from = content.data() + read.offset;
        EXPECT(front.bytes.empty() || std::memcmp(front.bytes.data(), from, front.bytes.size()) == 0);
        const Bytes whole(from + front.bytes.size(), num_bytes);
        std::size_t at = 0;
        for (const Room& room : rooms) {
            EXPECT(room.bytes.empty() || std::memcmp(room.bytes.data(), whole.data() + at, room.bytes.size()) == 0);
            at += room.bytes.size();
        }
        EXPECT(*digest == xxh3_64({&whole, 1}));
    }
}

// As the library says (xxhash 0.8); tests/tiers compare many more with it.
void test_known_digests() {
    std::vector<unsigned char> bytes(4096);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i * 31 + i / 256);
    const Bytes short_one(bytes.data(), 241), block(bytes.data(), 1024), behind(bytes.data(), 1025), all(bytes);
    EXPECT(xxh3_64({&short_one, 1}) == 0x18773c512b008a63U);
    EXPECT(xxh3_64({&block, 1}) == 0x5a1893edffa2577cU);
    EXPECT(xxh3_64({&behind, 1}) == 0x550abe5d45dd663bU);
    EXPECT(xxh3_64({&all, 1}) == 0xbe855965eae8486bU);
}

void test_what_cannot_be_read(int descriptor, const std::vector<unsigned char>& content) {
    const Room front(10), part(500);
    const auto end = static_cast<std::int64_t>(content.size());
    const ValueRead across{descriptor, end - 100, front.bytes, {part.bytes}}, behind{descriptor, end + 100, front.bytes, {part.bytes}};
    EXPECT(!read_now(across).has_value());
    EXPECT(!read_now(behind).has_value());
    bool thrown = false;
    try {
        read_now({-1, 0, front.bytes, {part.bytes}});
    } catch (const std::system_error&) {
        thrown = true;
    }
    EXPECT(thrown);
}

}  // namespace

int main() {
    Random random(7);
    std::vector<unsigned char> content(2 << 20);
    for (unsigned char& byte : content) byte = static_cast<unsigned char>(random.below(256));
    std::FILE* file = std::tmpfile();
    EXPECT(file != nullptr);
    EXPECT(std::fwrite(content.data(), 1, content.size(), file) == content.size());
    EXPECT(std::fflush(file) == 0);
    test_known_digests();
    test_values(fileno(file), content, random);
    test_what_cannot_be_read(fileno(file), content);
    std::fclose(file);
    return 0;
}
