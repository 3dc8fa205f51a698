// SPDX-License-Identifier: Apache-2.0
//
// A progress bar on stderr.
#ifndef EMA_CLIENT_CLI_PROGRESS_H_
#define EMA_CLIENT_CLI_PROGRESS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "server/base/steady_wait.h"

namespace ema::cli {

// A text such as "1.5 GiB".
std::string FormatBytes(int64_t bytes);

// A text such as "[#####.....]  50 %  1.0 GiB  512.0 MiB/s".
std::string FormatProgress(int64_t done_bytes, int64_t total_bytes, absl::Duration elapsed);

// Draws at most ten times a second, and only if `enabled` and stderr is a terminal.
class ProgressBar {
 public:
  explicit ProgressBar(bool enabled);
  ~ProgressBar();  // Ends the line.
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void Show(int64_t done_bytes, int64_t total_bytes);

 private:
  const bool enabled_;
  const SteadyTime start_;
  std::optional<SteadyTime> last_drawn_;  // Absent: not drawn yet.
};

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_PROGRESS_H_
