// SPDX-License-Identifier: Apache-2.0
//
// What the fake CUDA runtime does for a launch.
#ifndef EMA_TESTS_TESTUTIL_FAKE_CUDART_KERNELS_H_
#define EMA_TESTS_TESTUTIL_FAKE_CUDART_KERNELS_H_

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <string_view>

struct FakeLaunch {
  std::string kernel;  // Its name, as the compiler writes it.
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  void** arguments = nullptr;  // Read by FakeKernelWork() and not later.
};

// Where the CPU finds these bytes, which a kernel of the launch's GPU may use: its own, or with
// `may_be_pinned` pinned memory. Of other memory it ends the process, and says `what`.
using FindKernelMemory = std::function<std::byte*(const void* address, int64_t size_bytes,
                                                  bool may_be_pinned, std::string_view what)>;

// Walks the kernel's grid, in any order, and looks for all memory that its arguments name when a
// thread needs it. Empty: the launch is none that a GPU takes, or of none of our kernels.
std::function<void(std::minstd_rand&)> FakeKernelWork(const FakeLaunch& launch,
                                                      const FindKernelMemory& find);

#endif  // EMA_TESTS_TESTUTIL_FAKE_CUDART_KERNELS_H_
