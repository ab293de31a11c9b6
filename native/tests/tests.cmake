# The native tests: each native/tests/*_test.cpp is an executable of its own, built with sanitizers, without Python. The
# parts' source lists name the target `_native`; here that is a plain library, and what needs Python (native/bindings) is
# left out of it. The core is a library below it: a test that includes no kernels/ header links, and waits for, nothing else.
# -g1: files and lines for the reports; all of -g makes the compiler take half as long again.
if(QUIRE_SANITIZE STREQUAL "thread")
  set(sanitizers thread)
  set(QUIRE_TEST_KERNELS OFF)  # their threads are those of the real ones
else()
  set(sanitizers address,undefined)
  set(QUIRE_TEST_KERNELS ON)
endif()
add_compile_options(-O1 -g1 -fno-omit-frame-pointer -fsanitize=${sanitizers} -fno-sanitize-recover=all -Wall -Wextra)
add_link_options(-fsanitize=${sanitizers})

add_library(_native STATIC)
target_include_directories(_native PUBLIC native)
include(native/core/sources.cmake)
include(native/kernels/sources.cmake)
get_target_property(sources _native SOURCES)
list(FILTER sources EXCLUDE REGEX "native/bindings/")
set(core_sources ${sources})
list(FILTER core_sources INCLUDE REGEX "native/core/")
list(FILTER sources EXCLUDE REGEX "native/core/")
set_target_properties(_native PROPERTIES SOURCES "${sources}" PREFIX "lib")
add_library(quire_core STATIC ${core_sources})
target_include_directories(quire_core PUBLIC native)
target_link_libraries(_native PUBLIC quire_core)

enable_testing()
file(GLOB tests CONFIGURE_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/*_test.cpp")
foreach(test IN LISTS tests)
  get_filename_component(name "${test}" NAME_WE)
  add_executable(${name} "${test}")
  target_compile_options(${name} PRIVATE -ffp-contract=off)  # a twin's product and sum are two operations
  file(STRINGS "${test}" uses_kernels REGEX "#include \"kernels/")
  if(uses_kernels)
    target_link_libraries(${name} PRIVATE _native)
  else()
    target_link_libraries(${name} PRIVATE quire_core)
  endif()
  add_test(NAME ${name} COMMAND ${name})
  list(APPEND test_targets ${name})
endforeach()
add_custom_target(native_tests DEPENDS ${test_targets})
