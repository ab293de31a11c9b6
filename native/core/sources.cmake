# The block manager: no Python, no torch. Its binding is native/bindings/cache.cpp.
target_sources(_native PRIVATE
  native/core/pool.cpp
  native/core/prefix_tree.cpp
  native/core/prefix_tree_check.cpp)
