# Kernels: one source for all instruction sets, compiled once per variant. Bindings: native/bindings/{attention,linear}.cpp.
target_sources(_native PRIVATE native/kernels/isa.cpp native/kernels/profile.cpp
               native/kernels/thread_pool.cpp native/kernels/copy_rows.cpp native/kernels/xxh3.cpp native/kernels/read_now.cpp
               native/bindings/runtime.cpp native/bindings/bytes.cpp native/bindings/array.cpp)
find_package(Threads REQUIRED)
target_link_libraries(_native PRIVATE Threads::Threads)

# The variants of this build (isa.hpp) and the compile flags of each.
set(QUIRE_VARIANTS portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND QUIRE_VARIANTS avx2 avx512 avx512_bf16 amx_bf16)
endif()
if(QUIRE_TEST_KERNELS)
  list(APPEND QUIRE_VARIANTS emulated_avx512 emulated_avx512_bf16 emulated_amx_bf16)
  target_compile_definitions(_native PRIVATE QUIRE_TEST_KERNELS)
endif()
set(QUIRE_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(QUIRE_FLAGS_avx512 ${QUIRE_FLAGS_avx2} -mavx512f -mavx512dq -mavx512bw -mavx512vl)
set(QUIRE_FLAGS_avx512_bf16 ${QUIRE_FLAGS_avx512} -mavx512bf16)
set(QUIRE_FLAGS_amx_bf16 ${QUIRE_FLAGS_avx512_bf16} -mavx512vbmi -mamx-tile -mamx-bf16 -mamx-int8)

# Compiles `source` for `variant`, which it knows as QUIRE_VARIANT_<variant>; further arguments are flags.
function(quire_add_kernel name source variant)
  add_library(quire_${name}_${variant} OBJECT native/kernels/${source})
  target_include_directories(quire_${name}_${variant} PRIVATE native)
  target_compile_definitions(quire_${name}_${variant} PRIVATE QUIRE_VARIANT_${variant})
  # GCC 12 warns of its own intrinsics (bug 105593). Ubuntu guards the stack of every function with an array unless told not to.
  target_compile_options(quire_${name}_${variant} PRIVATE ${QUIRE_FLAGS_${variant}} -Wno-maybe-uninitialized -fno-stack-protector ${ARGN})
  if(variant MATCHES "^emulated")
    target_compile_options(quire_${name}_${variant} PRIVATE -O1)  # lane by lane: optimizing it takes up to a minute
  endif()
  target_sources(_native PRIVATE $<TARGET_OBJECTS:quire_${name}_${variant}>)
endfunction()

include(native/kernels/attention.cmake OPTIONAL)
include(native/kernels/linear.cmake OPTIONAL)
include(native/kernels/decoder_layer.cmake OPTIONAL)
include(native/kernels/recurrence.cmake OPTIONAL)
