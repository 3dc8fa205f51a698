// SPDX-License-Identifier: Apache-2.0
#include "client/cli/pulled_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/random_hex.h"
#include "server/format/file_system.h"
#include "server/format/safetensors.h"

namespace ema::cli {

std::string TemporaryPath(const std::string& path) { return path + ".tmp-" + RandomHex(2); }

absl::Status SystemError(int error, const std::string& what, const std::string& path) {
  const std::string message = absl::StrCat("cannot ", what, " ", path, ": ", std::strerror(error));
  if (error != ENOSPC && error != EDQUOT) return absl::UnknownError(message);
  return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kDiskFull, message);
}

PulledFile::~PulledFile() { Discard(); }

void PulledFile::Discard() {
  if (mapping_.data() != nullptr) munmap(mapping_.data(), mapping_.size());
  mapping_ = {};
  if (fd_ >= 0) close(std::exchange(fd_, -1));
  if (!temporary_path_.empty()) unlink(temporary_path_.c_str());
  temporary_path_.clear();
}

absl::Status PulledFile::Failed(const std::string& what) const {
  return SystemError(errno, what, path_);
}

absl::StatusOr<std::span<std::byte>> PulledFile::Reserve(
    const PullInfo& info, const std::map<std::string, std::string>& metadata) {
  Discard();
  std::vector<TensorSpec> specs;
  specs.reserve(info.tensors.size());
  int64_t data_bytes = 0;
  for (const PulledTensor& tensor : info.tensors) {
    specs.push_back(tensor.spec);
    data_bytes += tensor.length_bytes;
  }
  const std::string header = EncodeSafetensorsHeader(specs, metadata);
  header_bytes_ = static_cast<int64_t>(header.size());
  file_bytes_ = header_bytes_ + data_bytes;
  tensors_ = info.tensors;

  const std::string temporary_path = TemporaryPath(path_);
  fd_ = open(temporary_path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd_ < 0) return Failed(absl::StrCat("create ", temporary_path, " for"));
  temporary_path_ = temporary_path;
  const int64_t reserved_bytes = header_bytes_ + info.total_bytes;
  // Blocks, not a hole: a full disk shows here and not as a SIGBUS later.
  errno = posix_fallocate(fd_, 0, reserved_bytes);
  if (errno != 0) return Failed("reserve space for");
  void* const mapping = mmap(nullptr, reserved_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (mapping == MAP_FAILED) return Failed("map");
  mapping_ = {static_cast<std::byte*>(mapping), static_cast<size_t>(reserved_bytes)};
  std::memcpy(mapping_.data(), header.data(), header.size());
  return mapping_.subspan(header_bytes_);
}

void PulledFile::CloseGaps() {
  std::byte* const data = mapping_.data() + header_bytes_;
  int64_t end = 0;
  for (const PulledTensor& tensor : tensors_) {
    // Tensors are in order, so each moves towards the start, over bytes that have been moved
    // already.
    if (tensor.offset != end) {
      std::memmove(data + end, data + tensor.offset, tensor.length_bytes);
    }
    end += tensor.length_bytes;
  }
}

absl::Status PulledFile::Commit() {
  CloseGaps();
  munmap(mapping_.data(), mapping_.size());
  mapping_ = {};
  if (ftruncate(fd_, file_bytes_) != 0) return Failed("set the size of");
  if (fsync(fd_) != 0) return Failed("write");
  if (close(std::exchange(fd_, -1)) != 0) return Failed("close");
  if (std::rename(temporary_path_.c_str(), path_.c_str()) != 0) return Failed("replace");
  temporary_path_.clear();
  const int parent = open(ParentPath(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (parent < 0) return Failed("open the folder of");
  const int synced = fsync(parent);
  close(parent);
  return synced == 0 ? absl::OkStatus() : Failed("sync the folder of");
}

}  // namespace ema::cli
