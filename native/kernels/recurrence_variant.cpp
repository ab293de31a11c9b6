// The recurrences for one width of vectors. Compiled once per variant, with its flags and -DQUIRE_VARIANT_<name>.
#include "kernels/recurrence.hpp"

#if defined(QUIRE_VARIANT_portable)
#include "kernels/simd_portable.hpp"
#define QUIRE_RECURRENCE recurrence_kernels_portable
#define QUIRE_SIMD Portable
#elif defined(QUIRE_VARIANT_avx2)
#include "kernels/simd_avx2.hpp"
#define QUIRE_RECURRENCE recurrence_kernels_avx2
#define QUIRE_SIMD Avx2
#elif defined(QUIRE_VARIANT_avx512)
#include "kernels/simd_avx512.hpp"
#define QUIRE_RECURRENCE recurrence_kernels_avx512
#define QUIRE_SIMD Avx512
#elif defined(QUIRE_VARIANT_emulated_avx512)
#include "kernels/simd_emulated.hpp"
#define QUIRE_RECURRENCE recurrence_kernels_emulated_avx512
#define QUIRE_SIMD Emulated512
#else
#error "recurrence.cmake names the variant"
#endif

namespace quire {
namespace {

using S = QUIRE_SIMD;
using Vec = S::Vec;
using Int = std::int64_t;

}  // namespace
}  // namespace quire

#include "kernels/recurrence_channels.hpp"
#include "kernels/recurrence_delta.hpp"
#include "kernels/recurrence_scan.hpp"

namespace quire {
namespace {

template <class T>
constexpr RecurrenceKernels kKernels = {scan<T>, delta<T>, lru<T>, convolve<T>};

}  // namespace

const RecurrenceKernels& QUIRE_RECURRENCE(Element element) {
    switch (element) {
        case Element::f32: return kKernels<float>;
        case Element::f16: return kKernels<f16>;
        case Element::bf16: return kKernels<bf16>;
    }
    return kKernels<float>;
}

}  // namespace quire
