# Kernels: one source for all instruction sets, compiled once per variant. Bindings: native/bindings/{attention,linear}.cpp.
include(native/kernels/attention.cmake OPTIONAL)
include(native/kernels/linear.cmake OPTIONAL)
