# The native tests: each native/tests/*_test.cpp is an executable of its own, linked with the core and the kernels, built
# with sanitizers, without Python. The parts' source lists name the target `_native`; here that is a plain library, and
# what needs Python (native/bindings) is left out of it.
add_compile_options(-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
                    -Wall -Wextra -Wshadow)
add_link_options(-fsanitize=address,undefined)

add_library(_native STATIC)
target_include_directories(_native PUBLIC native)
include(native/core/sources.cmake)
include(native/kernels/sources.cmake)
get_target_property(sources _native SOURCES)
list(FILTER sources EXCLUDE REGEX "native/bindings/")
set_target_properties(_native PROPERTIES SOURCES "${sources}" PREFIX "lib")

enable_testing()
file(GLOB tests CONFIGURE_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/*_test.cpp")
foreach(test IN LISTS tests)
  get_filename_component(name "${test}" NAME_WE)
  add_executable(${name} "${test}")
  target_link_libraries(${name} PRIVATE _native)
  add_test(NAME ${name} COMMAND ${name})
endforeach()
