// SPDX-License-Identifier: Apache-2.0
//
// A safetensors file that a pull writes straight into.
#ifndef EMA_CLIENT_CLI_PULLED_FILE_H_
#define EMA_CLIENT_CLI_PULLED_FILE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/client.h"

namespace ema::cli {

// A name beside `path` that nothing has: what a process left behind that was killed does not stand
// in the way of the next one, which in a container has the same number.
std::string TemporaryPath(const std::string& path);

// What the system said when it could not do `what` to `path`. RESOURCE_EXHAUSTED, DISK_FULL, or
// UNKNOWN.
absl::Status SystemError(int error, const std::string& what, const std::string& path);

// Grows as TemporaryPath() beside its target, and takes its place when it is complete: a reader
// sees the old file, or the new one. The pulled bytes land in the mapped file, so a model of any
// size fits. Not thread-safe.
class PulledFile {
 public:
  explicit PulledFile(std::string path) : path_(std::move(path)) {}
  ~PulledFile();  // Removes the temporary file.
  PulledFile(const PulledFile&) = delete;
  PulledFile& operator=(const PulledFile&) = delete;

  const std::string& path() const { return path_; }

  // Makes the file, with room for all, and returns the memory for the pulled bytes. Called again,
  // as by a pull that starts over, it makes another file, and takes the memory back. Errors as
  // SystemError().
  absl::StatusOr<std::span<std::byte>> Reserve(const PullInfo& info,
                                               const std::map<std::string, std::string>& metadata);

  // Returns when the file is on the disk under its name. REQUIRES: the memory is filled.
  absl::Status Commit();

 private:
  // Removes the temporary file.
  void Discard();
  // Closes the gaps between tensors that a pull has and the format has not.
  void CloseGaps();
  absl::Status Failed(const std::string& what) const;  // As errno says.

  const std::string path_;
  std::string temporary_path_;
  int fd_ = -1;
  std::span<std::byte> mapping_;
  int64_t header_bytes_ = 0;
  int64_t file_bytes_ = 0;  // Of the complete file, without gaps.
  std::vector<PulledTensor> tensors_;
};

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_PULLED_FILE_H_
