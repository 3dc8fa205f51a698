// SPDX-License-Identifier: Apache-2.0
//
// One call to each partition of a model, all at the same time.
#ifndef EMA_SERVER_GROUP_FAN_OUT_H_
#define EMA_SERVER_GROUP_FAN_OUT_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ema/error_reason.h"
#include "server/base/steady_wait.h"
#include "server/group/model_record.h"

namespace ema::group {

// Collects the results of calls to partitions. It may be destroyed before the last call has ended.
template <typename Response>
class FanOut {
 public:
  // `partitions` outlives this object, but need not outlive the calls.
  explicit FanOut(const std::vector<Partition>& partitions)
      : partitions_(partitions), shared_(std::make_shared<Shared>(partitions.size())) {}

  // Returns a function to be called once, from any thread, with the result of the partition's call.
  std::function<void(absl::StatusOr<Response>)> EndOf(size_t partition) {
    return [shared = shared_, partition](absl::StatusOr<Response> result) {
      absl::MutexLock lock(&shared->mu);
      shared->results[partition] = std::move(result);
      --shared->missing_count;
      shared->wait.WakeAll();
    };
  }
  // Waits for all calls, but at most until `deadline`. False: a call has not ended by then.
  bool AwaitEnd(SteadyTime deadline) {
    Shared& shared = *shared_;
    absl::MutexLock lock(&shared.mu);
    return shared.wait.AwaitUntil(shared.mu, deadline, [&]() ABSL_SHARED_LOCKS_REQUIRED(shared.mu) {
      return shared.missing_count == 0;
    });
  }
  // Waits for all calls, but at most until `deadline`. Returns their responses by partition, or the
  // first error, which then names the member. UNAVAILABLE, GROUP_DEGRADED: a call has not ended by
  // then, and its result is ignored. Call once.
  absl::StatusOr<std::vector<Response>> Wait(SteadyTime deadline = SteadyTime::max()) {
    AwaitEnd(deadline);
    Shared& shared = *shared_;
    absl::MutexLock lock(&shared.mu);
    std::vector<Response> responses;
    for (size_t i = 0; i < partitions_.size(); ++i) {
      std::optional<absl::StatusOr<Response>>& result = shared.results[i];
      if (!result.has_value()) result = NoAnswerError();
      if (!result->ok()) {
        return WithPrefix(result->status(),
                          absl::StrCat("member \"", partitions_[i].member, "\": "));
      }
      responses.push_back(**std::move(result));
    }
    return responses;
  }

 private:
  struct Shared {
    explicit Shared(size_t count) : missing_count(count), results(count) {}
    absl::Mutex mu;
    SteadyWait wait;  // Woken when `missing_count` changes.
    size_t missing_count ABSL_GUARDED_BY(mu);
    // By partition; absent: the call has not ended.
    std::vector<std::optional<absl::StatusOr<Response>>> results ABSL_GUARDED_BY(mu);
  };

  static absl::Status NoAnswerError() {
    return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kGroupDegraded,
                     "it has not answered in time", absl::Seconds(1));
  }

  const std::vector<Partition>& partitions_;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_FAN_OUT_H_
