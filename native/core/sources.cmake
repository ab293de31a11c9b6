# The block manager: no Python, no torch. Its binding is native/bindings/cache.cpp.
