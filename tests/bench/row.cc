// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/row.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "tests/bench/bench_util.h"
#include "tests/bench/child_process.h"

namespace ema::bench {
namespace {

double Quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  const auto i = static_cast<size_t>(share * static_cast<double>(values.size()));
  return values[std::min(i, values.size() - 1)];
}

double Median(std::vector<double> values) {
  const size_t size = values.size();
  std::sort(values.begin(), values.end());
  return (values[size / 2] + values[(size - 1) / 2]) / 2;
}

double Apply(Statistic statistic, const std::vector<double>& values) {
  return statistic == Statistic::kP99 ? Quantile(values, 0.99) : Median(values);
}

// Half of the 95 % confidence interval of the median, relative to it: by order statistics, which
// assume nothing of the distribution. Too few values have none.
double RelativeError(std::vector<double> values) {
  const auto size = static_cast<double>(values.size());
  const double rank = std::floor(size / 2 - 0.98 * std::sqrt(size));
  if (rank < 0) return std::numeric_limits<double>::infinity();
  std::sort(values.begin(), values.end());
  const auto i = static_cast<size_t>(rank);
  return (values[values.size() - 1 - i] - values[i]) / 2 / Median(values);
}

// What has been measured of one side.
class Series {
 public:
  Series(const Side& side, Statistic statistic) : side_(side), statistic_(statistic) {}

  bool exists() const { return side_.run != nullptr; }

  void RunRound() {
    const double client = ClientCpu();
    const double server = ServerCpu();
    const std::vector<double> figures = side_.run();
    client_cpu_ += ClientCpu() - client;
    server_cpu_ += ServerCpu() - server;
    gigabytes_ += side_.gigabytes;
    rounds_.push_back(Apply(statistic_, figures));
    all_.insert(all_.end(), figures.begin(), figures.end());
  }

  const std::vector<double>& rounds() const { return rounds_; }
  double figure() const { return Apply(statistic_, all_); }

  // To the row's result, as `ours`, `ours_min` and so on. The names of CPU time are without
  // a prefix for ours.
  void Report(const std::string& prefix, nlohmann::json& result) const {
    const bool is_ours = prefix == "ours";
    if (!is_ours) result["peer_name"] = side_.name;
    result[prefix] = nullptr;
    if (rounds_.empty()) return;
    result[prefix] = figure();
    result[prefix + "_min"] = *std::min_element(rounds_.begin(), rounds_.end());
    result[prefix + "_max"] = *std::max_element(rounds_.begin(), rounds_.end());
    if (gigabytes_ == 0) return;
    const std::string cpu = is_ours ? "cpu_" : "peer_cpu_";
    if (side_.client_pid != 0) result[cpu + "client_s_per_gb"] = client_cpu_ / gigabytes_;
    if (!side_.server_pids.empty()) result[cpu + "server_s_per_gb"] = server_cpu_ / gigabytes_;
  }

 private:
  double ClientCpu() const { return side_.client_pid == 0 ? 0 : CpuSeconds(side_.client_pid); }
  double ServerCpu() const {
    double seconds = 0;
    for (const pid_t pid : side_.server_pids) seconds += CpuSeconds(pid);
    return seconds;
  }

  const Side& side_;
  const Statistic statistic_;
  std::vector<double> rounds_;
  std::vector<double> all_;
  double client_cpu_ = 0;
  double server_cpu_ = 0;
  double gigabytes_ = 0;
};

// What tells how well the row is known.
std::vector<double> Pairs(const Series& ours, const Series& peer) {
  if (!ours.exists()) return peer.rounds();
  if (!peer.exists()) return ours.rounds();
  std::vector<double> ratios;
  for (size_t i = 0; i < ours.rounds().size(); ++i) {
    ratios.push_back(ours.rounds()[i] / peer.rounds()[i]);
  }
  return ratios;
}

void RunRounds(const Row& row, const MeasureOptions& options, Series& ours, Series& peer) {
  const absl::Time begin = absl::Now();
  const int max_rounds = std::min(row.max_rounds, options.max_rounds);
  for (int round = 0; round < max_rounds; ++round) {
    for (Series* const series : {round % 2 == 0 ? &ours : &peer, round % 2 == 0 ? &peer : &ours}) {
      if (series->exists()) series->RunRound();
    }
    if (round + 1 < row.min_rounds) continue;
    if (absl::ToDoubleSeconds(absl::Now() - begin) > options.seconds) return;
    if (row.statistic == Statistic::kMedian && RelativeError(Pairs(ours, peer)) < options.error) {
      return;
    }
  }
}

void ReportGoal(const Goal& goal, nlohmann::json& result) {
  result["goal"] = nullptr;
  result["goal_kind"] = nullptr;
  result["met"] = nullptr;
  if (goal.kind == Goal::Kind::kNone) return;
  const bool is_at_least = goal.kind == Goal::Kind::kAtLeast;
  result["goal"] = goal.ratio;
  result["goal_kind"] = is_at_least ? "at least" : "at most";
  if (result["ratio"].is_null()) return;
  const double ratio = result["ratio"];
  result["met"] = is_at_least ? ratio >= goal.ratio : ratio <= goal.ratio;
}

}  // namespace

nlohmann::json Measure(const Row& row, const MeasureOptions& options) {
  Series ours(row.ours, row.statistic);
  Series peer(row.peer, row.statistic);
  for (int i = 0; i < row.warm_up_rounds; ++i) {
    if (row.ours.run != nullptr) row.ours.run();
    if (row.peer.run != nullptr) row.peer.run();
  }
  if (ours.exists() || peer.exists()) RunRounds(row, options, ours, peer);

  nlohmann::json result = {{"key", row.key}, {"name", row.name}, {"unit", row.unit}};
  ours.Report("ours", result);
  peer.Report("peer", result);
  result["statistic"] = row.statistic == Statistic::kP99 ? "p99" : "median";
  result["missing"] = row.missing;
  const std::vector<double> pairs = Pairs(ours, peer);
  result["rounds"] = pairs.size();
  result["ratio"] = nullptr;
  if (ours.exists() && peer.exists()) {
    result["ratio"] =
        row.statistic == Statistic::kP99 ? ours.figure() / peer.figure() : Median(pairs);
    result["ratio_min"] = *std::min_element(pairs.begin(), pairs.end());
    result["ratio_max"] = *std::max_element(pairs.begin(), pairs.end());
  }
  if (const double error = pairs.empty() ? INFINITY : RelativeError(pairs); std::isfinite(error)) {
    result["error"] = error;
  }
  ReportGoal(row.goal, result);
  return result;
}

std::string Summary(const nlohmann::json& result) {
  const auto figure = [&](const char* key) {
    return result[key].is_null() ? std::string("-")
                                 : absl::StrFormat("%.3g", result[key].get<double>());
  };
  std::string text =
      absl::StrCat(result["key"].get<std::string>(), ": ", figure("ours"), " / ", figure("peer"),
                   " ", result["unit"].get<std::string>(), ", ratio ", figure("ratio"));
  if (!result["goal"].is_null()) {
    absl::StrAppend(&text, ", goal ", result["goal_kind"].get<std::string>(), " ", figure("goal"));
  }
  return absl::StrCat(text, ", ", result["rounds"].get<size_t>(), " rounds ",
                      result["missing"].get<std::string>());
}

Side SpeedOf(Side side, std::function<void()> work) {
  side.run = [gigabytes = side.gigabytes, work = std::move(work)] {
    return std::vector<double>{gigabytes / SecondsOf(work)};
  };
  return side;
}

Side TimeOf(Side side, std::function<void()> work) {
  side.run = [work = std::move(work)] { return std::vector<double>{SecondsOf(work)}; };
  return side;
}

Side Limit(double value) {
  return {.name = "the limit", .run = [value] { return std::vector<double>{value}; }};
}

}  // namespace ema::bench
