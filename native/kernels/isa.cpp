#include "kernels/isa.hpp"

#include <array>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <utility>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {

namespace {

constexpr std::array<std::pair<Isa, std::string_view>, 8> kNames{{
    {Isa::amx_bf16, "amx_bf16"},
    {Isa::avx512_bf16, "avx512_bf16"},
    {Isa::avx512, "avx512"},
    {Isa::avx2, "avx2"},
    {Isa::portable, "portable"},
    {Isa::emulated_amx_bf16, "emulated_amx_bf16"},
    {Isa::emulated_avx512_bf16, "emulated_avx512_bf16"},
    {Isa::emulated_avx512, "emulated_avx512"},
}};

#if defined(__x86_64__)

struct Features {
    bool avx2 = false;
    bool avx512 = false;
    bool avx512_bf16 = false;
    bool amx_bf16 = false;
    bool intel = false;
    bool zen5 = false;  // or later
};

// What the operating system saves and restores on a context switch (XCR0).
std::uint64_t enabled_state() {
    std::uint32_t low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (static_cast<std::uint64_t>(high) << 32) | low;
}

// Linux hands out the tile registers per process, on request (arch_prctl(2), ARCH_REQ_XCOMP_PERM).
bool request_tile_permission() {
    constexpr long kRequestPermission = 0x1023;
    constexpr long kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

Features detect() {
    Features found;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(0, &a, &b, &c, &d)) return found;
    found.intel = b == signature_INTEL_ebx && c == signature_INTEL_ecx && d == signature_INTEL_edx;
    const bool amd = b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
    const unsigned family = (a >> 8 & 0xf) + (a >> 20 & 0xff);
    found.zen5 = amd && family >= 0x1a;
    const bool osxsave = (c >> 27) & 1, avx = (c >> 28) & 1, fma = (c >> 12) & 1, f16c = (c >> 29) & 1;
    if (!osxsave || !avx) return found;
    const std::uint64_t state = enabled_state();
    const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6, tiles = (state & 0x60000) == 0x60000;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    const unsigned b7 = b, c7 = c, d7 = d;
    found.avx2 = ymm && fma && f16c && ((b7 >> 5) & 1);
    const bool f = (b7 >> 16) & 1, dq = (b7 >> 17) & 1, bw = (b7 >> 30) & 1, vl = (b7 >> 31) & 1;
    found.avx512 = found.avx2 && zmm && f && dq && bw && vl;
    unsigned a71 = 0;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) a71 = a;
    found.avx512_bf16 = found.avx512 && ((a71 >> 5) & 1);
    const bool vbmi = (c7 >> 1) & 1, amx_tile = (d7 >> 24) & 1, amx_bf16 = (d7 >> 22) & 1, amx_int8 = (d7 >> 25) & 1;
    found.amx_bf16 = found.avx512_bf16 && vbmi && tiles && amx_tile && amx_bf16 && amx_int8 && request_tile_permission();
    return found;
}

const Features& features() {
    static const Features found = detect();
    return found;
}

#endif

}  // namespace

std::string_view isa_name(Isa isa) {
    for (const auto& [known, name] : kNames) {
        if (known == isa) return name;
    }
    return "unknown";
}

Isa isa_from_name(std::string_view name) {
    std::string known_names;
    for (const auto& [isa, known] : kNames) {
        if (known == name) return isa;
        known_names += known_names.empty() ? "" : ", ";
        known_names += known;
    }
    throw std::invalid_argument("expected QUIRE_ISA to be one of " + known_names + ", got '" + std::string(name) + "'");
}

bool isa_supported(Isa isa) {
    switch (isa) {
#if !defined(QUIRE_TEST_KERNELS)
        case Isa::emulated_avx512:
        case Isa::emulated_avx512_bf16:
        case Isa::emulated_amx_bf16: return false;
#endif
#if defined(__x86_64__)
        case Isa::avx2: return features().avx2;
        case Isa::avx512: return features().avx512;
        case Isa::avx512_bf16: return features().avx512_bf16;
        case Isa::amx_bf16: return features().amx_bf16;
#else
        case Isa::avx2:
        case Isa::avx512:
        case Isa::avx512_bf16:
        case Isa::amx_bf16: return false;
#endif
        default: return true;
    }
}

void require_isa(Isa isa) {
    if (isa_supported(isa)) return;
    const std::string name(isa_name(isa));
    const bool emulated = name.starts_with("emulated");
    throw std::invalid_argument("expected an instruction set (QUIRE_ISA, `isa`) that runs here, got '" + name + "', which needs " +
                                (emulated ? "kernels for tests that this build is without (scripts/build-native makes one with them)"
                                          : "instructions that this processor lacks") +
                                "; the fastest here is " + std::string(isa_name(preferred_isa())));
}

std::vector<Isa> supported_isas() {
    std::vector<Isa> found;
    for (const auto& [isa, name] : kNames) {
        if (isa_supported(isa)) found.push_back(isa);
    }
    return found;
}

Isa preferred_isa() {
    const Isa richest = supported_isas().front();
#if defined(__x86_64__)
    if (richest == Isa::avx512_bf16 && features().intel) return Isa::avx512;
#endif
    return richest;
}

bool first_cache_waits_for_many() {
#if defined(__x86_64__)
    return features().zen5;
#else
    return false;
#endif
}

Isa current_isa() {
    static const Isa chosen = [] {
        const char* forced = std::getenv("QUIRE_ISA");
        if (forced == nullptr || *forced == '\0') return preferred_isa();
        const Isa isa = isa_from_name(forced);
        require_isa(isa);
        return isa;
    }();
    return chosen;
}

}  // namespace quire
