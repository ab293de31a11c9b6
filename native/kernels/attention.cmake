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
    foreach(format k8v8 k8v4 k4v4)
      string(SUBSTRING ${format} 1 1 bits)
      string(SUBSTRING ${format} 3 1 value_bits)
      quire_add_kernel(attention_${format} attention_codes.cpp ${variant} ${flags} -DQUIRE_BITS=${bits} -DQUIRE_VALUE_BITS=${value_bits})
    endforeach()
  endif()
  if(variant MATCHES "avx512_bf16$")
    foreach(rows RANGE 1 6)
      quire_add_kernel(attention_${rows} attention_pairs_few.cpp ${variant} ${flags} -DQUIRE_ROWS=${rows})
    endforeach()
  endif()
endforeach()
