// The instruction set of the kernels: chosen once at run time, or forced by QUIRE_ISA.
//
// A variant is one translation unit of the same source, compiled for one instruction set. "The same request gives the
// same bits" is a promise per variant: a process uses one for all its products. The emulated variants run the
// arithmetic of an instruction set in plain C++, so that its results can be tested where the processor lacks it.
// QUIRE_TEST_KERNELS (CMakeLists.txt), which scripts/build-native sets, adds them; released wheels have none.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace quire {

enum class Isa {
    portable,
    avx2,
    avx512,
    avx512_bf16,
    amx_bf16,
    emulated_avx512,
    emulated_avx512_bf16,
    emulated_amx_bf16,
};

// Name as QUIRE_ISA spells it.
std::string_view isa_name(Isa isa);

// Throws std::invalid_argument naming the known ones.
Isa isa_from_name(std::string_view name);

// std::invalid_argument that names `isa`, what it lacks and the fastest that runs, where isa_supported() is false.
void require_isa(Isa isa);

// True where this processor and operating system can run `isa`; of an emulated one, where this build has it. For AMX it asks
// the kernel for permission once.
bool isa_supported(Isa isa);

// Every variant that runs here, those emulated last, the richest instruction set first.
std::vector<Isa> supported_isas();

// The supported variant that is fastest on this processor: the richest, except that avx512_bf16 gives way to avx512 where
// Intel's processors run it without AMX. One core of an Emerald Rapids Xeon ran 5.8 G fused multiply-adds of 512 bits a
// second, and 1.4 G vdpbf16ps: four times slower for twice the products. Zen 4 runs both at one rate.
Isa preferred_isa();

// Whether a core waits for many lines of its first cache at once, so that they need not come by way of the second: AMD's
// processors from Zen 5 on.
bool first_cache_waits_for_many();

// The variant in use: QUIRE_ISA if set (std::invalid_argument where unknown or unsupported), else the preferred one.
// Read once; later changes of the environment have no effect.
Isa current_isa();

}  // namespace quire
