// Common parts of the bindings of the halves of a layer: products, norms and residuals with the objects they keep
// alive.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bindings/linear.hpp"
#include "kernels/decoder_layer.hpp"

namespace quire {

using Kept = std::vector<nanobind::object>;
using Inputs = std::vector<std::pair<const BoundWeight*, nanobind::object>>;  // weight, bias or None

struct BoundSurroundings : Surroundings {
    std::int64_t before_width, after_width;  // 0: no norm
    Kept kept;
};

// The native object as Python has it.
template <typename T>
void keep(Kept& kept, const T* native) {
    if (native != nullptr) kept.push_back(nanobind::borrow(nanobind::find(native)));
}

// Throws std::invalid_argument unless it fits. what: was given instead.
void fit(bool fits, const std::string& what);

Product product_of(const BoundWeight* weight, nanobind::handle bias, Kept& kept);
std::vector<Product> products_of(const Inputs& inputs, Kept& kept);
void check_norms(const BoundSurroundings& around, std::int64_t num_inputs, std::int64_t num_outputs);

}  // namespace quire
