// The functions that add each part to the module quire._native; one function and one file per part.
#pragma once

#include <nanobind/nanobind.h>

namespace quire {

void bind_cache(nanobind::module_& module);
void bind_runtime(nanobind::module_& module);
void bind_bytes(nanobind::module_& module);
void bind_attention(nanobind::module_& module);
void bind_linear(nanobind::module_& module);
void bind_decoder_layer(nanobind::module_& module);
void bind_recurrence(nanobind::module_& module);
void bind_state_mixer(nanobind::module_& module);

}  // namespace quire
