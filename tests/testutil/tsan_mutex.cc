// SPDX-License-Identifier: Apache-2.0
//
// Tells ThreadSanitizer what Abseil's locks do: the distribution's Abseil is not built for it, and
// every access that a lock orders would count as a race. Part of each program of the tsan preset;
// the functions defined here stand before those of the shared library, and call them. Those of
// a lock that take a timeout call the ones that take a deadline.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <cstdlib>
#include <string>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

#define EMA_STRING(x) EMA_STRING_OF(x)
#define EMA_STRING_OF(x) #x

namespace {

void* FindReal(const std::string& prefix, const std::string& mangled) {
  const std::string version = EMA_STRING(ABSL_OPTION_INLINE_NAMESPACE_NAME);
  const std::string name = prefix + "4absl" + std::to_string(version.size()) + version + mangled;
  void* function = dlsym(RTLD_NEXT, name.c_str());
  if (function == nullptr) std::abort();
  return function;
}

// Calls the library's function; a member function takes its object first, a reference is a pointer.
template <typename Result, typename... Args>
Result Call(void* function, Args... args) {
  return reinterpret_cast<Result (*)(Args...)>(function)(args...);
}

#define EMA_REAL(mangled)                               \
  [] {                                                  \
    static void* const real = FindReal("_ZN", mangled); \
    return real;                                        \
  }()
#define EMA_REAL_CONST(mangled)                          \
  [] {                                                   \
    static void* const real = FindReal("_ZNK", mangled); \
    return real;                                         \
  }()

// What a wait does to a lock that is held for writing: gives it up, has it again at the end. What
// happens in between is not checked: others, who hold the lock then, evaluate the condition.
class Wait {
 public:
  explicit Wait(void* mu) : mu_(mu) {
    __tsan_mutex_pre_unlock(mu_, 0);
    __tsan_mutex_post_unlock(mu_, 0);
    __tsan_mutex_pre_lock(mu_, 0);
  }
  ~Wait() { __tsan_mutex_post_lock(mu_, 0, 0); }

 private:
  void* const mu_;
};

class Acquire {
 public:
  explicit Acquire(void* mu, unsigned flags = 0) : mu_(mu), flags_(flags) {
    __tsan_mutex_pre_lock(mu_, flags_);
  }
  ~Acquire() { __tsan_mutex_post_lock(mu_, flags_, 0); }

 private:
  void* const mu_;
  const unsigned flags_;
};

bool Try(void* mu, unsigned flags, void* real) {
  flags |= __tsan_mutex_try_lock;
  __tsan_mutex_pre_lock(mu, flags);
  const bool locked = Call<bool>(real, mu);
  __tsan_mutex_post_lock(mu, locked ? flags : flags | __tsan_mutex_try_lock_failed, 0);
  return locked;
}

void Release(void* mu, unsigned flags, void* real) {
  __tsan_mutex_pre_unlock(mu, flags);
  Call<void>(real, mu);
  __tsan_mutex_post_unlock(mu, flags);
}

// Where accesses around a Notification or a counter are ordered: behind its lock, the first member,
// which orders by itself and would forget what is not its own.
void* OrderOf(const void* object) {
  return const_cast<char*>(static_cast<const char*>(object)) + sizeof(absl::Mutex);
}

}  // namespace

namespace absl {
ABSL_NAMESPACE_BEGIN

Mutex::~Mutex() {
  __tsan_mutex_destroy(this, 0);
  Call<void>(EMA_REAL("5MutexD1Ev"), this);
}

void Mutex::Lock() {
  Acquire acquire(this);
  Call<void>(EMA_REAL("5Mutex4LockEv"), this);
}
void Mutex::Unlock() { Release(this, 0, EMA_REAL("5Mutex6UnlockEv")); }
bool Mutex::TryLock() { return Try(this, 0, EMA_REAL("5Mutex7TryLockEv")); }

void Mutex::ReaderLock() {
  Acquire acquire(this, __tsan_mutex_read_lock);
  Call<void>(EMA_REAL("5Mutex10ReaderLockEv"), this);
}
void Mutex::ReaderUnlock() {
  Release(this, __tsan_mutex_read_lock, EMA_REAL("5Mutex12ReaderUnlockEv"));
}
bool Mutex::ReaderTryLock() {
  return Try(this, __tsan_mutex_read_lock, EMA_REAL("5Mutex13ReaderTryLockEv"));
}

void Mutex::LockWhen(const Condition& condition) {
  Acquire acquire(this);
  Call<void>(EMA_REAL("5Mutex8LockWhenERKNS0_9ConditionE"), this, &condition);
}
bool Mutex::LockWhenWithDeadline(const Condition& condition, Time deadline) {
  Acquire acquire(this);
  return Call<bool>(EMA_REAL("5Mutex20LockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE"), this,
                    &condition, deadline);
}

void Mutex::ReaderLockWhen(const Condition& condition) {
  Acquire acquire(this, __tsan_mutex_read_lock);
  Call<void>(EMA_REAL("5Mutex14ReaderLockWhenERKNS0_9ConditionE"), this, &condition);
}
bool Mutex::ReaderLockWhenWithDeadline(const Condition& condition, Time deadline) {
  Acquire acquire(this, __tsan_mutex_read_lock);
  return Call<bool>(EMA_REAL("5Mutex26ReaderLockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE"),
                    this, &condition, deadline);
}

void Mutex::Await(const Condition& condition) {
  Wait wait(this);
  Call<void>(EMA_REAL("5Mutex5AwaitERKNS0_9ConditionE"), this, &condition);
}
bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  Wait wait(this);
  return Call<bool>(EMA_REAL("5Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE"), this,
                    &condition, deadline);
}

void CondVar::Wait(Mutex* mu) {
  ::Wait wait(mu);
  Call<void>(EMA_REAL("7CondVar4WaitEPNS0_5MutexE"), this, mu);
}
bool CondVar::WaitWithDeadline(Mutex* mu, Time deadline) {
  ::Wait wait(mu);
  return Call<bool>(EMA_REAL("7CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE"), this, mu,
                    deadline);
}

// These two order accesses by an atomic as well, before they come to their lock.
void Notification::Notify() {
  __tsan_release(OrderOf(this));
  Call<void>(EMA_REAL("12Notification6NotifyEv"), this);
}
void Notification::WaitForNotification() const {
  Call<void>(EMA_REAL_CONST("12Notification19WaitForNotificationEv"), this);
  __tsan_acquire(OrderOf(this));
}
bool Notification::WaitForNotificationWithTimeout(Duration timeout) const {
  const bool notified =
      Call<bool>(EMA_REAL_CONST("12Notification30WaitForNotificationWithTimeoutENS0_8DurationE"),
                 this, timeout);
  if (notified) __tsan_acquire(OrderOf(this));
  return notified;
}
bool Notification::WaitForNotificationWithDeadline(Time deadline) const {
  const bool notified = Call<bool>(
      EMA_REAL_CONST("12Notification31WaitForNotificationWithDeadlineENS0_4TimeE"), this, deadline);
  if (notified) __tsan_acquire(OrderOf(this));
  return notified;
}
bool BlockingCounter::DecrementCount() {
  __tsan_release(OrderOf(this));
  return Call<bool>(EMA_REAL("15BlockingCounter14DecrementCountEv"), this);
}
void BlockingCounter::Wait() {
  Call<void>(EMA_REAL("15BlockingCounter4WaitEv"), this);
  __tsan_acquire(OrderOf(this));
}

ABSL_NAMESPACE_END
}  // namespace absl

// gRPC destroys mutexes under reference counts, which are not instrumented: what passes through it
// looks like a race of the mutex with its last lock.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() { return "race:libgrpc.so\n"; }
