// Memory of packed weights, in huge pages: so a pass through the weights of a model waits for few address translations.
//
// Weights of up to some MiB lie one behind the other in regions, so that small ones share pages; a region is given back
// with its last weight. A freed weight's pages go back to the system at once; its addresses are not reused. Larger
// weights have memory of their own.
//
// Cost: a lock, and a mapping for each kRegionBytes. Only written parts of a region are resident, in huge pages if the
// system has them.
#pragma once

#include <cstddef>

namespace quire {

// At a multiple of 64 bytes, contents undefined. Throws std::bad_alloc.
unsigned char* take_weight_memory(std::size_t num_bytes);

// What `take_weight_memory(num_bytes)` gave; null does nothing.
void give_weight_memory_back(unsigned char* data, std::size_t num_bytes) noexcept;

}  // namespace quire
