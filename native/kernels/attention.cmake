# Attention: one source, compiled for each variant.
target_sources(_native PRIVATE native/kernels/attention.cpp native/kernels/attention_schedule.cpp
               native/kernels/attention_sharing.cpp native/bindings/attention.cpp)
foreach(variant IN LISTS QUIRE_VARIANTS)
  target_sources(_native PRIVATE native/kernels/attention_${variant}.cpp)
  # No contraction: a product and a sum are one operation only where the source says so.
  set_source_files_properties(native/kernels/attention_${variant}.cpp PROPERTIES
                              COMPILE_OPTIONS "${QUIRE_FLAGS_${variant}};-ffp-contract=off")
endforeach()
