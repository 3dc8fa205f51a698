// SPDX-License-Identifier: Apache-2.0
//
// What happened to a uniformly filled model while everything failed around it, and whether that was
// right.
#ifndef EMA_TESTS_INTEGRATION_HISTORY_H_
#define EMA_TESTS_INTEGRATION_HISTORY_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "tests/integration/fill_model.h"

namespace ema {

// Recorded by ranks, pullers and a watcher, checked at the end. Thread-safe.
class History {
 public:
  struct Pull {
    int puller = 0;
    bool is_copy = false;      // Of the track "raw".
    int64_t asked = 0;         // Version; 0: the newest.
    int64_t acked_before = 0;  // acked_version() before it began.
    int64_t begun_after = 0;   // begun_step() after it had ended.
    int64_t version = 0;
    int64_t step = 0;
    FillSight sight;
  };

  // The newest version that a rank has been told of, and the newest step that a rank has begun.
  int64_t acked_version() const { return acked_version_; }
  int64_t begun_step() const { return begun_step_; }
  int64_t pull_count() const { return pull_count_; }
  int64_t version_count() const ABSL_LOCKS_EXCLUDED(mu_);

  // --- What happens ---

  void OnBegin(int64_t step);
  // A rank's push of `step` was OK.
  void OnAck(int64_t step, const Version& version) ABSL_LOCKS_EXCLUDED(mu_);
  void OnPull(Pull pull) ABSL_LOCKS_EXCLUDED(mu_);
  // As Client::Watch() tells it.
  void OnVersion(const Version& version, int64_t skipped) ABSL_LOCKS_EXCLUDED(mu_);
  // Something is injected, or lifted: what is pulled before and after counts.
  void OnFault(const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);
  // Whatever else must not be.
  void OnViolation(const std::string& text) ABSL_LOCKS_EXCLUDED(mu_);

  // Waits for `pulls` more pulls and `versions` more versions. False: they did not come in time.
  bool AwaitTraffic(int64_t pulls, int64_t versions, absl::Duration timeout)
      ABSL_LOCKS_EXCLUDED(mu_);

  // --- The verdict ---

  // Everything that was not right; at most so many lines as a person reads. `least_pulls`: before
  // the first fault and after each.
  std::vector<std::string> Check(int64_t least_pulls) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Committed {
    int64_t step = 0;
    double weight = 0;  // Of the average.
    float average = 0;
  };
  struct Ack {
    int64_t step = 0;
    int64_t version = 0;
    double weight = 0;
  };
  struct Fault {
    std::string name;
    int64_t pulls_before = 0;
  };
  class Report;

  // The average at each version, by the definition: float32, one fused multiply-add a step.
  std::map<int64_t, Committed> Replay(Report& report) const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  std::atomic<int64_t> acked_version_ = 0;
  std::atomic<int64_t> begun_step_ = 0;
  std::atomic<int64_t> pull_count_ = 0;

  mutable absl::Mutex mu_;
  std::vector<Pull> pulls_ ABSL_GUARDED_BY(mu_);
  std::vector<Ack> acks_ ABSL_GUARDED_BY(mu_);
  std::vector<std::pair<int64_t, Committed>> versions_ ABSL_GUARDED_BY(mu_);  // As they came.
  std::vector<Fault> faults_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> violations_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema

#endif  // EMA_TESTS_INTEGRATION_HISTORY_H_
