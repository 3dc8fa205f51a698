// SPDX-License-Identifier: Apache-2.0
//
// Memory of the fake CUDA runtime: what it has handed out, and the bytes of its GPUs.
#ifndef EMA_TESTS_TESTUTIL_FAKE_CUDART_MEMORY_H_
#define EMA_TESTS_TESTUTIL_FAKE_CUDART_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

constexpr int kAnyDevice = -1;  // Pinned memory is any GPU's.
struct FakePiece {
  size_t size_bytes = 0;
  int device = kAnyDevice;
};

// What has been handed out, by address. Thread-safe.
class FakePieces {
 public:
  void Add(void* address, const FakePiece& piece);
  // The size of what began there, which is none of these any more; none: nothing did.
  std::optional<size_t> Remove(void* address);
  // All of it is in these, of that GPU or of any. Neighbouring pieces are as one.
  bool Have(const void* address, size_t size_bytes, int device) const;
  int64_t total_bytes() const;

 private:
  mutable std::mutex mu_;
  std::map<std::byte*, FakePiece> pieces_;
};

// Addresses that a GPU can have memory at. The program can neither read nor write there, which ends
// it as it does where there is a GPU: the bytes are at other addresses, which only the runtime
// knows. Null: there are none left.
std::byte* ReserveDeviceAddresses(size_t size_bytes);
void FreeDeviceAddresses(std::byte* address, size_t size_bytes);
// From then on there is memory there, of zeros; or none any more. Whole pages.
void PutDeviceMemory(std::byte* address, size_t size_bytes);
void TakeDeviceMemory(std::byte* address, size_t size_bytes);
// The bytes of what the program knows by this address.
std::byte* DeviceBytesAt(const void* address);

#endif  // EMA_TESTS_TESTUTIL_FAKE_CUDART_MEMORY_H_
