// Python's lock given up for the time of a kernel; nb::gil_scoped_release, for a process that may end meanwhile.
//
// A thread that comes back once the interpreter is ending does not get the lock any more: CPython before 3.14 ends it there, by
// unwinding its stack, which nanobind's frames do not allow (std::terminate, SIGABRT). Here it waits for the end of the process
// instead, as it does from 3.14 on.
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
            for (;;) pause();  // to leave this handler is to abort
        }
    }
    Released(const Released&) = delete;
    Released& operator=(const Released&) = delete;

  private:
    PyThreadState* state_;
};

}  // namespace quire
