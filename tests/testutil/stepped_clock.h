// SPDX-License-Identifier: Apache-2.0
//
// The system's clock, but set by a test. For one source file of a program that has no other tests,
// since that clock is the whole program's.
#ifndef EMA_TESTS_TESTUTIL_STEPPED_CLOCK_H_
#define EMA_TESTS_TESTUTIL_STEPPED_CLOCK_H_

#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <ctime>

namespace ema {

// How far it is ahead of the real one. Relaxed: a thread may see it late.
inline std::atomic<int64_t> step_seconds = 0;

}  // namespace ema

// In the place of the C library's. Abseil's waits with a timeout ask the second.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  if (clock == CLOCK_REALTIME) time->tv_sec += ema::step_seconds.load(std::memory_order_relaxed);
  return result;
}
extern "C" int gettimeofday(timeval* time, void*) noexcept {
  timespec now;
  const int result = clock_gettime(CLOCK_REALTIME, &now);
  *time = {now.tv_sec, now.tv_nsec / 1000};
  return result;
}

#endif  // EMA_TESTS_TESTUTIL_STEPPED_CLOCK_H_
