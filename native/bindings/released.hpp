// Releases the GIL during a kernel, like nb::gil_scoped_release, but safe in a process that ends meanwhile.
//
// A thread that returns while the interpreter is ending cannot take the GIL: CPython before 3.14 ends the thread by
// unwinding its stack, which nanobind's frames do not allow (std::terminate, SIGABRT). Here it waits for the end of the
// process instead, as CPython 3.14 does.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace quire {

class Released {
  public:
    Released() : state_(PyEval_SaveThread()) {}
    ~Released() {
        try {
            PyEval_RestoreThread(state_);
        } catch (abi::__forced_unwind&) {
            for (;;) pause();  // leaving this handler would abort
        }
    }
    Released(const Released&) = delete;
    Released& operator=(const Released&) = delete;

  private:
    PyThreadState* state_;
};

}  // namespace quire
