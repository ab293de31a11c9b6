# The packed linear layer: the work's division once, its kernels once per variant.
target_sources(_native PRIVATE native/kernels/linear.cpp native/kernels/linear_multiply.cpp native/kernels/quantized.cpp native/kernels/weight_memory.cpp native/bindings/linear.cpp)
foreach(variant IN LISTS QUIRE_VARIANTS)
  quire_add_kernel(linear linear_variant.cpp ${variant})
  quire_add_kernel(quantized quantized_variant.cpp ${variant} -ffp-contract=off)
endforeach()
set_source_files_properties(native/kernels/quantized.cpp PROPERTIES COMPILE_OPTIONS -ffp-contract=off)
