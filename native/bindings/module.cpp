// quire._native: the one Python module of the native code. Each part binds itself in its own file.
#include "bindings/bindings.hpp"

NB_MODULE(_native, m) {
    nanobind::set_leak_warnings(false);  // a process may end while a step runs, and then all is left as it is
    m.doc() = "Quire's native back end: block manager, attention, linear, recurrences.";
    quire::bind_cache(m);
    quire::bind_runtime(m);
    quire::bind_bytes(m);
    quire::bind_linear(m);
    quire::bind_attention(m);
    quire::bind_decoder_layer(m);
    quire::bind_recurrence(m);
    quire::bind_state_mixer(m);
}
