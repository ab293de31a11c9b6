// The names of element types in Python.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "kernels/element.hpp"

namespace quire {

// what: whose type it is, for the message, as in "expected a weight of float32, ...".
inline Element element_named(std::string_view name, std::string_view what) {
    if (name == "float32") return Element::f32;
    if (name == "bfloat16") return Element::bf16;
    if (name == "float16") return Element::f16;
    throw std::invalid_argument("expected " + std::string(what) + " of float32, bfloat16 or float16, got " + std::string(name));
}

}  // namespace quire
