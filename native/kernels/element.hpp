// Types of the elements in memory.
#pragma once

#include <cstdint>

namespace quire {

enum class Element { f32, bf16, f16 };

constexpr std::int64_t element_bytes(Element element) { return element == Element::f32 ? 4 : 2; }

}  // namespace quire
