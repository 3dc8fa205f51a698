// SPDX-License-Identifier: Apache-2.0
//
// A row of the report: ours and its peer, what is reported of them, and the goal. The one place
// where they take turns and become statistics is Measure().
#ifndef EMA_TESTS_BENCH_ROW_H_
#define EMA_TESTS_BENCH_ROW_H_

#include <sys/types.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "nlohmann/json.hpp"

namespace ema::bench {

// One side of a row.
struct Side {
  std::string name;
  // One round: one or more figures in the row's unit. Null: this side is not there.
  std::function<std::vector<double>()> run = nullptr;
  // What a round moves; 0: CPU time is not reported.
  double gigabytes = 0;
  // Whose CPU time is reported; 0 and empty: there is no such process.
  pid_t client_pid = 0;
  std::vector<pid_t> server_pids = {};
};

// Of the ratio of ours to the peer's.
struct Goal {
  enum class Kind { kNone, kAtLeast, kAtMost } kind = Kind::kNone;
  double ratio = 0;
};
inline Goal AtLeast(double ratio) { return {Goal::Kind::kAtLeast, ratio}; }
inline Goal AtMost(double ratio) { return {Goal::Kind::kAtMost, ratio}; }

// What of many figures counts. The median: of the ratios of paired rounds. p99: of all figures of
// each side; their ratio.
enum class Statistic { kMedian, kP99 };

struct Row {
  std::string key;  // Short, and the same in every report.
  std::string name;
  std::string unit;
  Side ours;
  Side peer;
  Goal goal;
  Statistic statistic = Statistic::kMedian;
  int min_rounds = 5;
  int max_rounds = 1000;
  int warm_up_rounds = 1;
  std::string missing;  // Why a side is not there.
};

struct MeasureOptions {
  // A row ends when its ratio is known to `error` (half of the 95 % confidence interval, relative),
  // or after so many seconds or rounds.
  double error = 0.05;
  double seconds = 5;
  int max_rounds = 1000;
};

// Runs both sides in turns: who goes first changes, so that neither always finds the other's
// caches.
nlohmann::json Measure(const Row& row, const MeasureOptions& options);

// A short line about it, for who waits.
std::string Summary(const nlohmann::json& result);

// Sides that time `work`: as a speed in GB/s, as a time in seconds.
Side SpeedOf(Side side, std::function<void()> work);
Side TimeOf(Side side, std::function<void()> work);
// A peer that is a fixed number.
Side Limit(double value);

}  // namespace ema::bench

#endif  // EMA_TESTS_BENCH_ROW_H_
