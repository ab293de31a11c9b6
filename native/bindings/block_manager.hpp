// Common parts of the bindings of the block manager: arrays in and out, and the manager with one calling thread at a
// time.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/released.hpp"
#include "core/block_manager.hpp"

namespace quire {

namespace nb = nanobind;

template <class T>
using Input = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Vector = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
using Matrix = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<2>>;

// Below this many tokens a call is over sooner than another thread has taken the GIL.
constexpr std::size_t kTokensToReleaseFor = 16384;

constexpr std::int64_t kMostBlocks = (std::int64_t{1} << 31) - 1;  // ids are int32
constexpr std::int64_t kMostOwner = (1 << 16) - 1;  // as a block's mark counts

template <class T>
std::span<const T> span_of(const Input<T>& array) {
    return {array.data(), array.shape(0)};
}

// A numpy array that owns a copy of `values`.
template <class T>
Vector<T> copy_of(std::span<const T> values) {
    auto memory = std::make_unique<T[]>(values.size());
    std::copy(values.begin(), values.end(), memory.get());
    nb::capsule owner(memory.get(), [](void* pointer) noexcept { delete[] static_cast<T*>(pointer); });
    return Vector<T>(memory.release(), {values.size()}, owner);
}

// Calls that only read numbers (`counts`, `stats`) may come meanwhile; what walks the structures may not.
class PythonBlockManager : public BlockManager {
public:
    using BlockManager::BlockManager;

    // Runs `call` as the only one; without the GIL if there is much to do.
    template <class Call>
    auto use(std::size_t num_tokens, Call&& call) {
        if (in_use_)
            throw std::runtime_error("expected one owner at a time, got a call while another thread's is running");
        const Use used(in_use_);
        std::optional<Released> released;
        if (num_tokens >= kTokensToReleaseFor) released.emplace();
        return call();
    }

private:
    // Read and written with the GIL only.
    struct Use {
        explicit Use(bool& flag) : in_use(flag) { in_use = true; }
        ~Use() { in_use = false; }
        bool& in_use;
    };

    bool in_use_ = false;
};

template <class First, class Second>
void check_same_length(const Input<First>& first, const Input<Second>& second, const char* what) {
    if (first.shape(0) != second.shape(0))
        throw BadArgument("expected " + std::string(what) + " of one length, got " + std::to_string(first.shape(0)) + " and " +
                          std::to_string(second.shape(0)));
}

inline std::vector<ExtraKey> keys_of(const Input<std::int64_t>& positions, const std::vector<nb::bytes>& keys, std::size_t num_tokens) {
    if (positions.shape(0) != keys.size())
        throw BadArgument("expected as many key positions as keys, got " + std::to_string(positions.shape(0)) + " and " +
                          std::to_string(keys.size()));
    for (std::size_t at = 0; at < keys.size(); ++at)
        if (positions(at) < 0 || positions(at) >= static_cast<std::int64_t>(num_tokens) || (at > 0 && positions(at) <= positions(at - 1)))
            throw BadArgument("expected key positions that rise, below the number of tokens, " + std::to_string(num_tokens) + ", got " +
                              std::to_string(positions(at)) + " at place " + std::to_string(at));
    std::vector<ExtraKey> extra_keys;
    extra_keys.reserve(keys.size());
    for (std::size_t at = 0; at < keys.size(); ++at)
        extra_keys.push_back({positions(at), std::string(keys[at].c_str(), keys[at].size())});
    return extra_keys;
}

// `find` is match, explain, open or drop.
template <class Find>
auto with_prompt(PythonBlockManager& self, const Input<std::int32_t>& tokens, const nb::bytes& name,
                         const Input<std::int64_t>& key_positions, const std::vector<nb::bytes>& keys, Find&& find) {
    const std::vector<ExtraKey> extra_keys = keys_of(key_positions, keys, tokens.shape(0));
    const Prompt prompt{span_of(tokens), extra_keys, {name.c_str(), name.size()}};
    return self.use(prompt.tokens.size(), [&] { return find(prompt); });
}

// Owners, events, explain, drop, tree: cache_report.cpp.
void bind_cache_report(nb::class_<PythonBlockManager>& manager);

}  // namespace quire
