// SPDX-License-Identifier: Apache-2.0
#include "server/ops/metrics.h"

#include <prometheus/histogram.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <sstream>

#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "server/ops/metric_families.h"

namespace ema {
namespace {

using prometheus::Histogram;

// Seconds: a small model on one host to a large one over a slow path.
const Histogram::BucketBoundaries kCallSeconds = {0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1,
                                                  2.5,   5,    10,    30,   60,  120,  300};
const Histogram::BucketBoundaries kPhaseSeconds = {0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1,
                                                   0.25,   0.5,   1,     2.5,  5,     10,   60};
const Histogram::BucketBoundaries kSaveSeconds = {0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 900};

constexpr std::array<const char*, 4> kPhases = {"receive", "fold", "wait", "commit"};

// True: what clients meet in the ordinary course.
bool IsOrdinary(const absl::Status& status) {
  if (absl::IsCancelled(status) || absl::IsDeadlineExceeded(status)) return true;
  if (GetErrorReason(status) == ErrorReason::kDraining) return true;
  // It has only come too early.
  return GetRetryDelay(status) > absl::ZeroDuration() && !absl::IsResourceExhausted(status);
}

// True: of a version that is gone, or not there yet. Who looks at each, and is slower than the
// trainers, meets that all the time.
bool IsOfNoVersion(const absl::Status& status) {
  const ErrorReason reason = GetErrorReason(status);
  return reason == ErrorReason::kVersionNotKept || reason == ErrorReason::kNoVersion;
}

}  // namespace

struct Metrics::ModelSeries {
  int64_t committed_steps = 0;
  int64_t dropped_steps = 0;
  int64_t skipped_tensors = 0;
  int64_t received_bytes = 0;
  int64_t ok_pulls = 0;
  int64_t missed_pulls = 0;
  int64_t failed_pulls = 0;
  int64_t sent_bytes = 0;
  int64_t ok_saves = 0;
  int64_t failed_saves = 0;
  std::optional<absl::Time> save_time;  // Of the last that was OK.
  absl::Time created_time = absl::Now();
  Histogram push_seconds{kCallSeconds};
  std::array<Histogram, kPhases.size()> phase_seconds{
      Histogram(kPhaseSeconds), Histogram(kPhaseSeconds), Histogram(kPhaseSeconds),
      Histogram(kPhaseSeconds)};
  Histogram pull_seconds{kCallSeconds};
  Histogram save_seconds{kSaveSeconds};
};

Metrics::Metrics() {
  refused_connections_ = {{Refusal::kLimit, 0}, {Refusal::kDescriptors, 0}, {Refusal::kLanes, 0}};
}
Metrics::~Metrics() = default;

Metrics::ModelSeries* Metrics::FindLocked(std::string_view model) {
  const auto found = models_.find(model);
  return found != models_.end() ? found->second.get() : nullptr;
}

void Metrics::NoteProblemLocked(std::string_view what, std::string_view text) {
  // The problem that ends a step or a save also ends its calls, with the same text: only the first
  // report counts.
  constexpr ptrdiff_t kCompared = 4;
  // Clients have a say in it.
  constexpr size_t kMaxTextBytes = 512;
  text = text.substr(0, kMaxTextBytes);
  const auto end = problems_.begin() + std::min<ptrdiff_t>(kCompared, std::ssize(problems_));
  Problem problem{absl::Now(), 1, std::string(what), std::string(text)};
  const auto same = std::find_if(problems_.begin(), end,
                                 [text](const Problem& other) { return other.text == text; });
  if (same != end) {
    const bool is_part = (same->what == "step" || same->what == "save") && same->what != what;
    problem.what = same->what;
    problem.count = same->count + (is_part ? 0 : 1);
    problems_.erase(same);
  }
  problems_.push_front(std::move(problem));
  if (problems_.size() > kMaxProblems) problems_.pop_back();
}

void Metrics::OnModelCreated(std::string_view model) {
  absl::MutexLock lock(&mu_);
  models_.insert_or_assign(std::string(model), std::make_unique<ModelSeries>());
}

void Metrics::OnModelDeleted(std::string_view model) {
  absl::MutexLock lock(&mu_);
  if (const auto found = models_.find(model); found != models_.end()) models_.erase(found);
}

void Metrics::CountLocked(std::string_view rpc, const absl::Status& status) {
  const ErrorReason reason = GetErrorReason(status);
  ++rpcs_[{std::string(rpc), absl::StatusCodeToString(status.code())}];
  if (reason != ErrorReason::kUnspecified) {
    ++rejects_[{std::string(rpc), std::string(ErrorReasonName(reason))}];
  }
}

void Metrics::OnRpcEnded(std::string_view rpc, const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  CountLocked(rpc, status);
  if (!status.ok() && !IsOrdinary(status)) {
    NoteProblemLocked(rpc, status.ToString(absl::StatusToStringMode::kWithNoExtraData));
  }
}

void Metrics::OnProbeEnded(std::string_view rpc, const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  CountLocked(rpc, status);
}

void Metrics::OnStepEnded(const StepEnd& end) {
  absl::MutexLock lock(&mu_);
  ModelSeries* const series = FindLocked(end.model);
  if (series == nullptr) return;
  if (end.status.ok()) {
    ++series->committed_steps;
    series->skipped_tensors += end.skipped_tensor_count;
    series->push_seconds.Observe(absl::ToDoubleSeconds(end.duration));
    return;
  }
  ++series->dropped_steps;
  if (!IsOrdinary(end.status)) {
    NoteProblemLocked("step", end.status.ToString(absl::StatusToStringMode::kWithNoExtraData));
  }
}

void Metrics::OnPushEnded(const PushEnd& end) {
  absl::MutexLock lock(&mu_);
  ModelSeries* const series = FindLocked(end.model);
  if (series == nullptr) return;
  series->received_bytes += end.received_bytes;
  if (!end.phases.has_value()) return;
  const std::array<absl::Duration, kPhases.size()> durations = {
      end.phases->receive, end.phases->fold, end.phases->wait, end.phases->commit};
  for (size_t i = 0; i < kPhases.size(); ++i) {
    series->phase_seconds[i].Observe(absl::ToDoubleSeconds(durations[i]));
  }
}

void Metrics::OnPullEnded(const PullEnd& end) {
  absl::MutexLock lock(&mu_);
  ModelSeries* const series = FindLocked(end.model);
  if (series == nullptr) return;
  ++(end.status.ok()             ? series->ok_pulls
     : IsOfNoVersion(end.status) ? series->missed_pulls
                                 : series->failed_pulls);
  series->sent_bytes += end.sent_bytes;
  if (end.status.ok()) series->pull_seconds.Observe(absl::ToDoubleSeconds(end.duration));
}

void Metrics::OnSaveEnded(const SaveEnd& end) {
  absl::MutexLock lock(&mu_);
  ModelSeries* const series = FindLocked(end.model);
  if (series == nullptr) return;
  ++(end.status.ok() ? series->ok_saves : series->failed_saves);
  if (end.is_newest) series->save_time = absl::Now();
  if (end.status.ok()) {
    series->save_seconds.Observe(absl::ToDoubleSeconds(end.duration));
  } else {
    NoteProblemLocked("save", end.status.ToString(absl::StatusToStringMode::kWithNoExtraData));
  }
}

void Metrics::OnConnectionRefused(Refusal reason) {
  absl::MutexLock lock(&mu_);
  ++refused_connections_[reason];
}

void Metrics::OnProblem(std::string_view text) {
  absl::MutexLock lock(&mu_);
  NoteProblemLocked("server", text);
}

std::vector<Metrics::Problem> Metrics::Problems() const {
  absl::MutexLock lock(&mu_);
  return {problems_.begin(), problems_.end()};
}

std::string Metrics::Text(const ServerState& state) const {
  MetricFamilies families;
  AddStateMetrics(state, families);
  MetricFamily& rpcs =
      families.Counter("ema_rpcs_total", "Calls that have ended, by name and status code.");
  MetricFamily& rejects = families.Counter(
      "ema_rejects_total", "Calls that failed with an error reason, by name and reason.");
  MetricFamily& pushes = families.Counter(
      "ema_pushes_total", "Pushed steps that have ended, by result: committed or dropped.");
  MetricFamily& received =
      families.Counter("ema_push_received_bytes_total",
                       "Bytes of weights that pushes have sent, counted when each stream ends.");
  MetricFamily& skipped = families.Counter(
      "ema_skipped_tensors_total",
      "Tensors that kept their average because the pushed values were not finite.");
  MetricFamily& pulls =
      families.Counter("ema_pulls_total",
                       "Pulls that have ended, by result; no_version: the requested "
                       "version was no longer kept, or not committed yet.");
  MetricFamily& sent =
      families.Counter("ema_pull_sent_bytes_total",
                       "Bytes of weights that pulls have received, counted when each pull ends.");
  MetricFamily& saves = families.Counter("ema_checkpoint_saves_total",
                                         "Saves of checkpoints that have ended, by result.");
  MetricFamily& refused = families.Counter(
      "ema_connections_refused_total", "Connections that the server closed on arrival, by reason.");
  MetricFamily& push_seconds = families.Histogram(
      "ema_push_duration_seconds", "Time from the first header of a step to its commit.");
  MetricFamily& phase_seconds = families.Histogram(
      "ema_push_phase_seconds",
      "Time that a push stream has spent in each phase: receive (waiting for bytes), "
      "fold, wait (for the device and other ranks), commit.");
  MetricFamily& pull_seconds =
      families.Histogram("ema_pull_duration_seconds", "Duration of successful pulls.");
  MetricFamily& save_seconds =
      families.Histogram("ema_checkpoint_save_duration_seconds", "Duration of successful saves.");
  MetricFamily& save_times = families.Gauge(
      "ema_checkpoint_last_success_timestamp_seconds",
      "Time of the last successful save of a version that a restart would load; before the first "
      "one, the commit time of the newest checkpoint on the disk.");
  MetricFamily& created_times =
      families.Gauge("ema_model_created_timestamp_seconds",
                     "Time at which this server created the model, or loaded it from the disk.");
  const auto seconds = [](absl::Time time) {
    return absl::ToDoubleSeconds(time - absl::UnixEpoch());
  };
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [key, count] : rpcs_) {
      rpcs.Add(count, {{"rpc", key.first}, {"code", key.second}});
    }
    for (const auto& [key, count] : rejects_) {
      rejects.Add(count, {{"rpc", key.first}, {"reason", key.second}});
    }
    for (const auto& [reason, count] : refused_connections_) {
      refused.Add(count, {{"reason", std::string(RefusalName(reason))}});
    }
    for (const auto& [name, series] : models_) {
      pushes.Add(series->committed_steps, {{"model", name}, {"result", "committed"}});
      pushes.Add(series->dropped_steps, {{"model", name}, {"result", "dropped"}});
      received.Add(series->received_bytes, {{"model", name}});
      skipped.Add(series->skipped_tensors, {{"model", name}});
      pulls.Add(series->ok_pulls, {{"model", name}, {"result", "ok"}});
      pulls.Add(series->missed_pulls, {{"model", name}, {"result", "no_version"}});
      pulls.Add(series->failed_pulls, {{"model", name}, {"result", "failed"}});
      sent.Add(series->sent_bytes, {{"model", name}});
      saves.Add(series->ok_saves, {{"model", name}, {"result", "ok"}});
      saves.Add(series->failed_saves, {{"model", name}, {"result", "failed"}});
      push_seconds.Add(series->push_seconds.Collect(), {{"model", name}});
      for (size_t i = 0; i < kPhases.size(); ++i) {
        phase_seconds.Add(series->phase_seconds[i].Collect(),
                          {{"model", name}, {"phase", kPhases[i]}});
      }
      pull_seconds.Add(series->pull_seconds.Collect(), {{"model", name}});
      save_seconds.Add(series->save_seconds.Collect(), {{"model", name}});
      created_times.Add(seconds(series->created_time), {{"model", name}});
    }
    for (const ServerState::Model& model : state.models) {
      const auto found = models_.find(model.name);
      std::optional<absl::Time> time = model.overview.durable_commit_time;
      if (found != models_.end() && found->second->save_time.has_value()) {
        time = found->second->save_time;
      }
      if (time.has_value()) save_times.Add(seconds(*time), {{"model", model.name}});
    }
  }
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, families.All());
  return out.str();
}

}  // namespace ema
