// SPDX-License-Identifier: Apache-2.0
//
// A safetensors file into which a pull writes directly.
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

// An unused name beside `path`. It is random, so that a file left by a killed process does not
// block the next one, which in a container has the same process id.
std::string TemporaryPath(const std::string& path);

// The error of a failed system call that tried to do `what` to `path`. RESOURCE_EXHAUSTED,
// DISK_FULL, or UNKNOWN.
absl::Status SystemError(int error, const std::string& what, const std::string& path);

// Is written as TemporaryPath() beside its target, and replaces it when complete: a reader sees the
// old file or the new one. The pulled bytes go into the mapped file, so the model need not fit into
// memory. Not thread-safe.
class PulledFile {
 public:
  explicit PulledFile(std::string path) : path_(std::move(path)) {}
  ~PulledFile();  // Removes the temporary file.
  PulledFile(const PulledFile&) = delete;
  PulledFile& operator=(const PulledFile&) = delete;

  const std::string& path() const { return path_; }

  // Creates the file at its full size, and returns the memory for the pulled bytes. If it is called
  // again, by a pull that starts over, it discards the file and the memory, and creates another
  // one. Errors as SystemError().
  absl::StatusOr<std::span<std::byte>> Reserve(const PullInfo& info,
                                               const std::map<std::string, std::string>& metadata);

  // Puts the file on the disk under its name. REQUIRES: the memory is filled.
  absl::Status Commit();

 private:
  // Removes the temporary file.
  void Discard();
  // Closes the gaps between tensors, which pulled bytes have and the file format does not.
  void CloseGaps();
  absl::Status Failed(const std::string& what) const;  // From errno.

  const std::string path_;
  std::string temporary_path_;
  int fd_ = -1;
  std::span<std::byte> mapping_;
  int64_t header_bytes_ = 0;
  int64_t file_bytes_ = 0;  // Size of the complete file, without gaps.
  std::vector<PulledTensor> tensors_;
};

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_PULLED_FILE_H_
