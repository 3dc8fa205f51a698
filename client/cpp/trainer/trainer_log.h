// SPDX-License-Identifier: Apache-2.0
//
// The log lines of a trainer about its pushes.
#ifndef EMA_CLIENT_CPP_TRAINER_TRAINER_LOG_H_
#define EMA_CLIENT_CPP_TRAINER_TRAINER_LOG_H_

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "ema/error_reason.h"
#include "ema/run.h"
#include "ema/version.h"
#include "server/base/log_event.h"

namespace ema::client_internal {

// Null: nothing is logged.
using LogFunction = std::function<void(LogLevel level, const std::string& text)>;

// The message, followed by the reason in brackets if there is one.
std::string ErrorText(const absl::Status& error);

// A text that says how the average continues after a step that was skipped for this reason.
const char* ConsequenceText(const absl::Status& error);

// Writes lines that begin with the model's name, and decides which of many skipped steps are worth
// a warning. For one thread; Write() is for any.
class TrainerLog {
 public:
  // With `warns_of_all`, every step that is skipped because of the server or another rank is a
  // warning.
  TrainerLog(std::string_view model, bool warns_of_all, LogFunction function);

  void Write(LogLevel level, std::string_view text) const;
  // Logs a message that names the model itself.
  void WriteWithoutPrefix(LogLevel level, const std::string& text) const;

  // Logs a skipped step. Of several with the same cause the 1st, 2nd, 4th, 8th, ... is a warning,
  // the others are debug lines. An outage is always a warning, since nothing is pushed while it
  // lasts. FENCED is a debug line: the Rejoiner logs who has taken over, or rejoins the run, and
  // then the next push reports how many steps were lost.
  void SkippedStep(int64_t step, const absl::Status& error);
  // To be called when a push has succeeded: restarts the counts of causes that are over.
  void PushSucceeded();
  // Logs which transport a push has used, and why no faster one, if that differs from the push
  // before.
  void LaneUsed(const PendingPush::Stats& stats);
  // Warns once of each schedule whose updates are too small for the track's dtype.
  void WarnOfStalledTracks(const Version& version);

 private:
  using Cause = std::pair<absl::StatusCode, ErrorReason>;

  const std::string prefix_;
  const bool warns_of_all_;
  const LogFunction function_;
  std::map<Cause, int64_t> skip_counts_;
  // Causes that persist after a successful push, such as weights that are not finite.
  std::set<Cause> lasting_causes_;
  std::string transport_;  // The last text of LaneUsed().
  // Schedules already warned about: track, pattern of the rule, schedule.
  std::set<std::tuple<std::string, std::string, std::string>> stalled_;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRAINER_TRAINER_LOG_H_
