// Memory of packed weights, in huge pages: a pass through the weights of a model waits for few address translations then.
//
// Weights of up to some MiB lie one behind the other in regions, so that small ones share pages; a region is given back when its last weight
// is. Of a freed weight the system has the pages before; its addresses are not taken again. Larger weights have memory of their own.
//
// Cost: a lock, and a mapping for each kRegionBytes. Of a region only what is written is resident, in whole pages where the system gives them.
#pragma once

#include <cstddef>

namespace quire {

// At a multiple of 64 bytes, contents undefined. Throws std::bad_alloc.
unsigned char* take_weight_memory(std::size_t num_bytes);

// What `take_weight_memory(num_bytes)` gave; null does nothing.
void give_weight_memory_back(unsigned char* data, std::size_t num_bytes) noexcept;

}  // namespace quire
