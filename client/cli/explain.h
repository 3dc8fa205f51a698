// SPDX-License-Identifier: Apache-2.0
//
// `emactl explain`: shows what a schedule will do. Needs no server.
#ifndef EMA_CLIENT_CLI_EXPLAIN_H_
#define EMA_CLIENT_CLI_EXPLAIN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cli/output.h"
#include "ema/schedule.h"

namespace ema::cli {

// A field of Schedule::Fields as an option: "half_life" is --half-life.
struct ScheduleOption {
  const char* field;
  const char* help;
  bool is_flag = false;  // Given without a value.
};
absl::Span<const ScheduleOption> ScheduleOptions();

// One update of a track that gets a push at each of its intervals. Times in the interval's unit.
struct ExplainedUpdate {
  int64_t number = 0;  // From 1: the first value of the average, at the start.
  double time = 0;
  double weight = 0;
  std::optional<double> window;  // interval / weight.
  // Time until half of the old weight is gone at this decay.
  std::optional<double> half_life;
  // Shares of the last 1, 10, 100 and 1000 updates in the average, as far as there have been that
  // many.
  std::vector<double> shares;
};

struct Explanation {
  Schedule schedule;
  std::vector<ExplainedUpdate> updates;  // 1, 2, 10, 100, ... up to the end, at most 10^6.
  std::vector<std::string> warnings;
};

// `total`: length of the whole training in the interval's unit, for fields in "dur". BAD_SCHEDULE:
// fields whose units cannot be compared, or nothing to explain; the message says what to give.
absl::StatusOr<Explanation> ExplainSchedule(const Schedule& schedule,
                                            const std::optional<TrainingDuration>& total);

std::string ExplanationText(const Explanation& explanation);
Json ToJson(const Explanation& explanation);

struct ExplainOptions {
  Schedule::Fields fields;
  std::string total;  // Empty: not given.
};
// Prints the explanation.
absl::Status Explain(const ExplainOptions& options, bool json);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_EXPLAIN_H_
