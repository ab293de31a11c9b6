# The packed linear layer: the work's division once, its kernels once per variant.
target_sources(_native PRIVATE native/kernels/linear.cpp native/kernels/linear_multiply.cpp native/bindings/linear.cpp)
foreach(variant IN LISTS QUIRE_VARIANTS)
  add_library(quire_linear_${variant} OBJECT native/kernels/linear_variant.cpp)
  target_include_directories(quire_linear_${variant} PRIVATE native)
  target_compile_definitions(quire_linear_${variant} PRIVATE QUIRE_VARIANT_${variant})
  # GCC 12 warns of its own intrinsics (bug 105593).
  target_compile_options(quire_linear_${variant} PRIVATE ${QUIRE_FLAGS_${variant}} -Wno-maybe-uninitialized)
  if(variant MATCHES "^emulated")
    target_compile_options(quire_linear_${variant} PRIVATE -O1)  # lane by lane: optimizing it takes half a minute
  endif()
  target_sources(_native PRIVATE $<TARGET_OBJECTS:quire_linear_${variant}>)
endforeach()
