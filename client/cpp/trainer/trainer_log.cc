// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/trainer/trainer_log.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cpp/trainer/outage_timer.h"

namespace ema::client_internal {
namespace {

// From this TrackVersion::stall_gap on, a track is named, as in the server's log: that of decays of
// 0.9999 and more.
constexpr double kStallGap = 5e-4;

}  // namespace

std::string ErrorText(const absl::Status& error) {
  const ErrorReason reason = GetErrorReason(error);
  if (reason == ErrorReason::kUnspecified) return std::string(error.message());
  return absl::StrCat(error.message(), " [", std::string(ErrorReasonName(reason)), "]");
}

const char* ConsequenceText(const absl::Status& error) {
  switch (GetErrorReason(error)) {
    case ErrorReason::kBadLayout:
      return "and no step can be pushed until the model is as it was at the start (to continue "
             "with the changed one, start an average of another name)";
    case ErrorReason::kPlanMismatch:
      return "the average continues when all ranks give the same training time (in Python "
             "attach(time=)), and frozen tensors change on all ranks at the same step";
    default:
      return "the average continues with the next";
  }
}

TrainerLog::TrainerLog(std::string_view model, bool warns_of_all, LogFunction function)
    : prefix_(absl::StrCat("model \"", std::string(model), "\": ")),
      warns_of_all_(warns_of_all),
      function_(std::move(function)) {}

void TrainerLog::Write(LogLevel level, std::string_view text) const {
  if (function_) function_(level, absl::StrCat(prefix_, std::string(text)));
}

void TrainerLog::WriteWithoutPrefix(LogLevel level, const std::string& text) const {
  if (function_) function_(level, text);
}

void TrainerLog::SkippedStep(int64_t step, const absl::Status& error) {
  int64_t count = 1;
  if (!IsOutage(error) && (!warns_of_all_ || MustReportToOtherRanks(error))) {
    const Cause cause(error.code(), GetErrorReason(error));
    if (MustReportToOtherRanks(error)) lasting_causes_.insert(cause);
    count = ++skip_counts_[cause];
  }
  const bool is_power_of_two = (count & (count - 1)) == 0;
  std::string text = absl::StrCat("push of step ", step, " skipped, ", ConsequenceText(error), ": ",
                                  ErrorText(error));
  if (is_power_of_two && count > 1) {
    absl::StrAppend(&text, " (", count, " steps by now; the next warning is at ", 2 * count, ")");
  }
  const bool is_warning = is_power_of_two && GetErrorReason(error) != ErrorReason::kFenced;
  Write(is_warning ? LogLevel::kWarning : LogLevel::kDebug, text);
}

void TrainerLog::PushSucceeded() {
  std::erase_if(skip_counts_,
                [this](const auto& entry) { return lasting_causes_.count(entry.first) == 0; });
}

void TrainerLog::LaneUsed(const PendingPush::Stats& stats) {
  if (stats.stream_count == 0) return;  // Nothing was sent.
  std::string text = absl::StrCat("transport of pushes: ", std::string(LaneName(stats.lane)));
  if (!stats.lane_reason.empty()) absl::StrAppend(&text, " (", stats.lane_reason, ")");
  if (text == transport_) return;
  transport_ = text;
  Write(LogLevel::kInfo, text);
}

void TrainerLog::WarnOfStalledTracks(const Version& version) {
  const auto check = [this](const std::string& track, const std::string& pattern,
                            const TrackVersion& record) {
    if (record.stall_gap < kStallGap) return;
    if (!stalled_.emplace(track, pattern, record.config).second) return;
    Write(LogLevel::kWarning,
          absl::StrFormat(
              "track \"%s\"%s: an update has the weight %.3g, below what the track's "
              "dtype can resolve: values stall within %.2g of their size short of the "
              "average. dtype=\"float64\" resolves far more, at twice the server's memory",
              track, pattern.empty() ? "" : absl::StrCat(", \"", pattern, "\""),
              record.update_weight, record.stall_gap));
  };
  for (const TrackVersion& track : version.tracks) {
    check(track.track, "", track);
    for (const TrackVersion& rule : track.rules) check(track.track, rule.track, rule);
  }
}

}  // namespace ema::client_internal
