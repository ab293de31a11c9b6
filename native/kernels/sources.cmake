# Kernels: one source for all instruction sets, compiled once per variant. Bindings: native/bindings/{attention,linear}.cpp.
target_sources(_native PRIVATE native/kernels/isa.cpp native/kernels/profile.cpp
               native/kernels/thread_pool.cpp native/kernels/copy_rows.cpp native/kernels/xxh3.cpp native/kernels/read_now.cpp
               native/bindings/runtime.cpp native/bindings/bytes.cpp)
find_package(Threads REQUIRED)
target_link_libraries(_native PRIVATE Threads::Threads)

# Compile flags of each variant; on other processors only the portable and emulated ones exist.
set(QUIRE_VARIANTS portable emulated_avx512 emulated_avx512_bf16 emulated_amx_bf16)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND QUIRE_VARIANTS avx2 avx512 avx512_bf16 amx_bf16)
endif()
set(QUIRE_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(QUIRE_FLAGS_avx512 ${QUIRE_FLAGS_avx2} -mavx512f -mavx512dq -mavx512bw -mavx512vl)
set(QUIRE_FLAGS_avx512_bf16 ${QUIRE_FLAGS_avx512} -mavx512bf16)
set(QUIRE_FLAGS_amx_bf16 ${QUIRE_FLAGS_avx512_bf16} -mamx-tile -mamx-bf16)

include(native/kernels/attention.cmake OPTIONAL)
include(native/kernels/linear.cmake OPTIONAL)
include(native/kernels/decoder_layer.cmake OPTIONAL)
