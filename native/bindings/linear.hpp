// Common part of the bindings of linear layers and of the fused layer: a packed weight that keeps its memory alive.
#pragma once

#include <nanobind/nanobind.h>

#include "kernels/linear.hpp"

namespace quire {

struct BoundWeight : PackedWeight {
    nanobind::object owner;  // of the packed bytes, where they are the caller's
};

}  // namespace quire
