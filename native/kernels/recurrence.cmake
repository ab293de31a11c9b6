# The recurrences of state layers: the cut of the work once, the kernels once per width of vectors.
target_sources(_native PRIVATE native/kernels/recurrence.cpp native/kernels/state_mixer.cpp native/bindings/recurrence.cpp native/bindings/state_mixer.cpp)
foreach(variant IN LISTS QUIRE_VARIANTS)
  if(NOT variant MATCHES "bf16")  # they use those of avx512: nothing here is a product of pairs
    quire_add_kernel(recurrence recurrence_variant.cpp ${variant} -ffp-contract=off -fno-math-errno)
  endif()
endforeach()
