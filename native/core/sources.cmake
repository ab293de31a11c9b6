# The block manager: no Python, no torch. Its bindings are native/bindings/cache*.cpp.
target_sources(_native PRIVATE
  native/bindings/cache.cpp
  native/bindings/cache_report.cpp
  native/core/block_manager.cpp
  native/core/block_manager_check.cpp
  native/core/block_manager_commit.cpp
  native/core/block_manager_hit.cpp
  native/core/block_manager_path.cpp
  native/core/block_manager_report.cpp
  native/core/block_manager_reserve.cpp
  native/core/block_manager_blocks.cpp
  native/core/eviction_order.cpp
  native/core/free_blocks.cpp
  native/core/pool.cpp
  native/core/prefix_tree.cpp
  native/core/prefix_tree_check.cpp
  native/core/sequence.cpp
  native/core/step_plan.cpp)
