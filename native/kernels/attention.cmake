# Attention: one source, compiled for each variant.
target_sources(_native PRIVATE native/kernels/attention.cpp native/kernels/attention_schedule.cpp
               native/kernels/attention_sharing.cpp native/bindings/attention.cpp)
foreach(variant IN LISTS QUIRE_VARIANTS)
  target_sources(_native PRIVATE native/kernels/attention_${variant}.cpp)
  # No contraction: a product and a sum are one operation only where the source says so.
  set_source_files_properties(native/kernels/attention_${variant}.cpp PROPERTIES
                              COMPILE_OPTIONS "${QUIRE_FLAGS_${variant}};-ffp-contract=off")
endforeach()
# Its kernels are vectors already; what the compiler makes vectors of besides (two addresses stored at once, say) is read back one by
# one, which waits for the store: decode of few rows was a tenth slower.
if("avx512_bf16" IN_LIST QUIRE_VARIANTS)
  set_property(SOURCE native/kernels/attention_avx512_bf16.cpp APPEND PROPERTY COMPILE_OPTIONS -fno-tree-vectorize -fno-tree-slp-vectorize)
endif()
