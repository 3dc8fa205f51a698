// SPDX-License-Identifier: Apache-2.0
//
// Metrics in Prometheus' text format, and the latest problems.
#ifndef EMA_SERVER_OPS_METRICS_H_
#define EMA_SERVER_OPS_METRICS_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/observer.h"
#include "server/ops/server_state.h"

namespace ema {

// Counts the server's events. Labels are names of existing models and of our methods, codes and
// reasons. Events of unknown or deleted models are not counted, so that clients cannot create
// series at will. Thread-safe; no function blocks for longer than copying the counts takes.
class Metrics final : public ServerObserver {
 public:
  Metrics();
  ~Metrics() override;

  void OnModelCreated(std::string_view model) override ABSL_LOCKS_EXCLUDED(mu_);
  void OnModelDeleted(std::string_view model) override ABSL_LOCKS_EXCLUDED(mu_);
  void OnRpcEnded(std::string_view rpc, const absl::Status& status) override
      ABSL_LOCKS_EXCLUDED(mu_);
  void OnProbeEnded(std::string_view rpc, const absl::Status& status) override
      ABSL_LOCKS_EXCLUDED(mu_);
  void OnStepEnded(const StepEnd& end) override ABSL_LOCKS_EXCLUDED(mu_);
  void OnPushEnded(const PushEnd& end) override ABSL_LOCKS_EXCLUDED(mu_);
  void OnPullEnded(const PullEnd& end) override ABSL_LOCKS_EXCLUDED(mu_);
  void OnSaveEnded(const SaveEnd& end) override ABSL_LOCKS_EXCLUDED(mu_);
  void OnConnectionRefused(Refusal reason) override ABSL_LOCKS_EXCLUDED(mu_);
  // Records an error of the log as a problem.
  void OnProblem(std::string_view text) ABSL_LOCKS_EXCLUDED(mu_);

  // All metrics, those of `state` among them, in Prometheus' text format, version 0.0.4.
  std::string Text(const ServerState& state) const ABSL_LOCKS_EXCLUDED(mu_);

  // A problem; repetitions of the same text are counted.
  struct Problem {
    absl::Time time;  // Of the last one.
    int64_t count = 1;
    std::string what;  // An RPC such as "Push", or "step", "save" or "server".
    std::string text;
  };
  // Newest first, at most kMaxProblems. Excludes errors that clients meet in normal operation (such
  // as cancelled calls, retries, draining), and calls that need no token.
  std::vector<Problem> Problems() const ABSL_LOCKS_EXCLUDED(mu_);
  static constexpr size_t kMaxProblems = 32;

 private:
  struct ModelSeries;

  void CountLocked(std::string_view rpc, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Null: there is no such model.
  ModelSeries* FindLocked(std::string_view model) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void NoteProblemLocked(std::string_view what, std::string_view text)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable absl::Mutex mu_;
  std::map<std::string, std::unique_ptr<ModelSeries>, std::less<>> models_ ABSL_GUARDED_BY(mu_);
  // By method, and code or reason.
  std::map<std::pair<std::string, std::string>, int64_t> rpcs_ ABSL_GUARDED_BY(mu_);
  std::map<std::pair<std::string, std::string>, int64_t> rejects_ ABSL_GUARDED_BY(mu_);
  std::map<Refusal, int64_t> refused_connections_ ABSL_GUARDED_BY(mu_);
  std::deque<Problem> problems_ ABSL_GUARDED_BY(mu_);  // Newest first.
};

}  // namespace ema

#endif  // EMA_SERVER_OPS_METRICS_H_
