// SPDX-License-Identifier: Apache-2.0
//
// Scopes that release or acquire Python's global lock. They replace nanobind's, which end the
// process in a daemon thread whose call outlives the interpreter.
#ifndef EMA_CLIENT_PYTHON_SRC_GIL_H_
#define EMA_CLIENT_PYTHON_SRC_GIL_H_

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace ema::python {

// Calls `call`, which runs Python or waits for its lock. Does not return where the interpreter has
// ended meanwhile: Python then unwinds the thread's stack, which ends the process at the first
// destructor or noexcept function on the stack, and also where the exception is caught and not
// thrown again.
template <class Call>
auto OrForever(Call&& call) {
  try {
    return call();
  } catch (const abi::__forced_unwind&) {
    while (true) pause();
  }
}

// Releases the lock (the GIL) while this object exists. REQUIRES: this thread holds it.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;
  ~GilReleased() {
    OrForever([this] { PyEval_RestoreThread(state_); });
  }

 private:
  PyThreadState* const state_;
};

// Acquires the lock, which the thread may hold already.
class GilHeld {
 public:
  GilHeld() : state_(OrForever(Take)) {}
  GilHeld(const GilHeld&) = delete;
  GilHeld& operator=(const GilHeld&) = delete;
  ~GilHeld() { PyGILState_Release(state_); }

 private:
  static PyGILState_STATE Take() {
    // If the interpreter has ended, Ensure() would make a thread state without an interpreter. Only
    // the thread that ends the interpreter still has its state: it may come here from destructors.
    while (!Py_IsInitialized() && PyGILState_GetThisThreadState() == nullptr) pause();
    return PyGILState_Ensure();
  }

  const PyGILState_STATE state_;
};

}  // namespace ema::python

#endif  // EMA_CLIENT_PYTHON_SRC_GIL_H_
