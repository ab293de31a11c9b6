#include "kernels/read_now.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <system_error>

#include "kernels/xxh3.hpp"

namespace quire {

std::optional<std::uint64_t> read_now(const ValueRead& read) {
    std::vector<iovec> buffers{{read.front.data(), read.front.size()}};
    for (const std::span<unsigned char> part : read.parts) {
        buffers.push_back({part.data(), part.size()});
    }
    std::int64_t offset = read.offset;
    for (std::size_t first = 0; first < buffers.size(); first += IOV_MAX) {
        const std::size_t count = std::min<std::size_t>(IOV_MAX, buffers.size() - first);
        std::int64_t num_bytes = 0;
        for (std::size_t i = first; i < first + count; ++i) {
            num_bytes += static_cast<std::int64_t>(buffers[i].iov_len);
        }
        const ssize_t done = preadv2(read.descriptor, &buffers[first], static_cast<int>(count), offset, RWF_NOWAIT);
        if (done < 0 && errno != EAGAIN && errno != EOPNOTSUPP && errno != EINTR) {
            throw std::system_error(errno, std::generic_category());
        }
        if (done != num_bytes) {  // what is read in part is as good as nothing: the caller has another way
            return std::nullopt;
        }
        offset += num_bytes;
    }
    const std::vector<Bytes> parts(read.parts.begin(), read.parts.end());
    return xxh3_64(parts);
}

}  // namespace quire
