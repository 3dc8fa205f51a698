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

// Lets the lock go. To be made with it held.
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

// Takes the lock, from any thread, whether it has it or not.
class GilHeld {
 public:
  GilHeld() : state_(OrForever(Take)) {}
  GilHeld(const GilHeld&) = delete;
  GilHeld& operator=(const GilHeld&) = delete;
  ~GilHeld() { PyGILState_Release(state_); }

 private:
  static PyGILState_STATE Take() {
    // What Python keeps of the thread has gone with the interpreter; it would make a new one, of
    // none. The thread that ends the interpreter has its own, and may come here from destructors.
    while (!Py_IsInitialized() && PyGILState_GetThisThreadState() == nullptr) pause();
    return PyGILState_Ensure();
  }

  const PyGILState_STATE state_;
};

}  // namespace ema::python

#endif  // EMA_CLIENT_PYTHON_SRC_GIL_H_
