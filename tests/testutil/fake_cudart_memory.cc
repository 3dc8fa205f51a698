// SPDX-License-Identifier: Apache-2.0
#include "tests/testutil/fake_cudart_memory.h"

#include <sys/mman.h>

#include <iterator>
#include <numeric>

namespace {

using Lock = std::unique_lock<std::mutex>;

// From an address to its bytes. More than LibTorch reserves at once, which is a GPU's memory and an
// eighth.
constexpr size_t kDistance = size_t{16} << 30;

}  // namespace

void FakePieces::Add(void* address, const FakePiece& piece) {
  const Lock lock(mu_);
  pieces_[static_cast<std::byte*>(address)] = piece;
}

std::optional<size_t> FakePieces::Remove(void* address) {
  const Lock lock(mu_);
  const auto removed = pieces_.extract(static_cast<std::byte*>(address));
  if (removed.empty()) return std::nullopt;
  return removed.mapped().size_bytes;
}

bool FakePieces::Have(const void* address, size_t size_bytes, int device) const {
  const Lock lock(mu_);
  auto* begin = static_cast<std::byte*>(const_cast<void*>(address));
  const std::byte* const end = begin + size_bytes;
  while (begin < end) {
    const auto after = pieces_.upper_bound(begin);
    if (after == pieces_.begin()) return false;
    const auto& [data, piece] = *std::prev(after);
    if (begin >= data + piece.size_bytes) return false;
    if (device != kAnyDevice && device != piece.device) return false;
    begin = data + piece.size_bytes;
  }
  return true;
}

int64_t FakePieces::total_bytes() const {
  const Lock lock(mu_);
  return std::accumulate(pieces_.begin(), pieces_.end(), int64_t{0},
                         [](int64_t total, const auto& of) {
                           return total + static_cast<int64_t>(of.second.size_bytes);
                         });
}

// What is between the addresses and their bytes is given back: there may be thousands of these.
std::byte* ReserveDeviceAddresses(size_t size_bytes) {
  if (size_bytes > kDistance) return nullptr;
  void* const reserved = mmap(nullptr, kDistance + size_bytes, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  auto* const address = static_cast<std::byte*>(reserved);
  if (size_bytes < kDistance) munmap(address + size_bytes, kDistance - size_bytes);
  return address;
}

void FreeDeviceAddresses(std::byte* address, size_t size_bytes) {
  munmap(address, size_bytes);
  munmap(DeviceBytesAt(address), size_bytes);
}

void PutDeviceMemory(std::byte* address, size_t size_bytes) {
  mprotect(DeviceBytesAt(address), size_bytes, PROT_READ | PROT_WRITE);
}

void TakeDeviceMemory(std::byte* address, size_t size_bytes) {
  madvise(DeviceBytesAt(address), size_bytes, MADV_DONTNEED);
  mprotect(DeviceBytesAt(address), size_bytes, PROT_NONE);
}

// Null, too, may be asked for.
std::byte* DeviceBytesAt(const void* address) {
  return reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(address) + kDistance);
}
