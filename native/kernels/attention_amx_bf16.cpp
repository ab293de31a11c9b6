#include "kernels/attention_kernel.hpp"
namespace quire { void attention_item_amx_bf16(const AttentionJob&, std::int64_t) { __builtin_trap(); } }
