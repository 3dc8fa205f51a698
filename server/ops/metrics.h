// SPDX-License-Identifier: Apache-2.0
//
// Metrics in the form that Prometheus reads, and the last things that went wrong.
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

// Counts the server's events. Labels are names of models that there are, of our methods, codes and
// reasons; what is told of a model that there is not, or not any more, is not counted, so that
// nobody makes series by asking. Thread-safe; no function blocks for longer than a copy of the
// counts takes.
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
  // Something that the log shows as an error.
  void OnProblem(std::string_view text) ABSL_LOCKS_EXCLUDED(mu_);

  // All metrics, those of `state` among them, in Prometheus' text format, version 0.0.4.
  std::string Text(const ServerState& state) const ABSL_LOCKS_EXCLUDED(mu_);

  // Something that went wrong; several times, if the same did.
  struct Problem {
    absl::Time time;  // The last one.
    int64_t count = 1;
    std::string what;  // "Push", "step", "save", "server".
    std::string text;
  };
  // Newest first, at most kMaxProblems. What clients meet in the ordinary course (they are told to
  // come back, or leave) is not among them, nor what those do who need no token.
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
