# Attention: one source, compiled for each variant.
target_sources(_native PRIVATE native/kernels/attention.cpp native/kernels/attention_schedule.cpp
               native/kernels/attention_sharing.cpp native/bindings/attention.cpp)
foreach(variant IN LISTS QUIRE_VARIANTS)
  # No contraction: a product and a sum are one operation only where the source says so.
  set(flags -ffp-contract=off)
  if(variant STREQUAL "avx512_bf16")
    # Its kernels are vectors already; what the compiler makes vectors of besides (two addresses stored at once, say) is read back one
    # by one, which waits for the store: decode of few rows was a tenth slower.
    list(APPEND flags -fno-tree-vectorize -fno-tree-slp-vectorize)
  endif()
  quire_add_kernel(attention attention_${variant}.cpp ${variant} ${flags})
  if(NOT variant MATCHES "avx512_bf16$")
    quire_add_kernel(attention_codes attention_codes.cpp ${variant} ${flags})
  endif()
  if(variant MATCHES "avx512_bf16$")
    foreach(rows RANGE 1 6)
      quire_add_kernel(attention_${rows} attention_pairs_few.cpp ${variant} ${flags} -DQUIRE_ROWS=${rows})
    endforeach()
  endif()
endforeach()
