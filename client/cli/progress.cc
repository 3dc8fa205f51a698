// SPDX-License-Identifier: Apache-2.0
#include "client/cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ema::cli {
namespace {

constexpr int kBarWidth = 30;
constexpr absl::Duration kDrawInterval = absl::Milliseconds(100);

}  // namespace

std::string FormatBytes(int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 6; ++unit) value /= 1024;
  return unit == 0 ? absl::StrCat(bytes, " B") : absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string FormatProgress(int64_t done_bytes, int64_t total_bytes, absl::Duration elapsed) {
  const double share =
      total_bytes > 0 ? static_cast<double>(done_bytes) / static_cast<double>(total_bytes) : 1;
  const int filled = std::clamp(static_cast<int>(share * kBarWidth), 0, kBarWidth);
  const double seconds = std::max(absl::ToDoubleSeconds(elapsed), 1e-3);
  const int64_t bytes_per_second = static_cast<int64_t>(static_cast<double>(done_bytes) / seconds);
  return absl::StrFormat("[%s%s] %3d %%  %s  %s/s", std::string(filled, '#'),
                         std::string(kBarWidth - filled, '.'), static_cast<int>(share * 100),
                         FormatBytes(done_bytes), FormatBytes(bytes_per_second));
}

ProgressBar::ProgressBar(bool enabled)
    : enabled_(enabled && isatty(STDERR_FILENO) == 1), start_(SteadyNow()) {}

ProgressBar::~ProgressBar() {
  if (last_drawn_.has_value()) std::fputc('\n', stderr);
}

void ProgressBar::Show(int64_t done_bytes, int64_t total_bytes) {
  if (!enabled_) return;
  const bool is_early = last_drawn_.has_value() && Since(*last_drawn_) < kDrawInterval;
  if (done_bytes < total_bytes && is_early) return;
  last_drawn_ = SteadyNow();
  // The spaces overwrite the rest of a longer line.
  std::fprintf(stderr, "\r%s    ", FormatProgress(done_bytes, total_bytes, Since(start_)).c_str());
  std::fflush(stderr);
}

}  // namespace ema::cli
