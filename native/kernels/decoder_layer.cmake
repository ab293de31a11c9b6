# The fused decoder layer: its order of work once, its row operators once per instruction set.
target_sources(_native PRIVATE native/kernels/decoder_layer.cpp native/kernels/asked_rows.cpp native/bindings/decoder_layer.cpp)
foreach(variant IN LISTS QUIRE_VARIANTS)
  if(NOT variant MATCHES "amx")  # it has no row operators of its own
    quire_add_kernel(row_ops row_ops_variant.cpp ${variant} -ffp-contract=off)
  endif()
endforeach()
