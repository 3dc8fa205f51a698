// SPDX-License-Identifier: Apache-2.0
//
// One call to each partition of a model, all at the same time.
#ifndef EMA_SERVER_GROUP_FAN_OUT_H_
#define EMA_SERVER_GROUP_FAN_OUT_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "ema/error_reason.h"
#include "server/group/model_record.h"

namespace ema::group {

// Collects the results of the calls. The object may be destroyed before the last call has ended.
template <typename Response>
class FanOut {
 public:
  explicit FanOut(const std::vector<Partition>& partitions)
      : partitions_(partitions), shared_(std::make_shared<Shared>(partitions.size())) {}

  // Returns a function to be called once, from any thread, with the result of the partition's call.
  std::function<void(absl::StatusOr<Response>)> EndOf(size_t partition) {
    return [shared = shared_, partition](absl::StatusOr<Response> result) {
      shared->results[partition] = std::move(result);
      shared->missing.DecrementCount();
    };
  }
  // Waits for all calls. Returns their responses by partition, or the first error, which then names
  // the member. Call once.
  absl::StatusOr<std::vector<Response>> Wait() {
    shared_->missing.Wait();
    std::vector<Response> responses;
    for (size_t i = 0; i < partitions_.size(); ++i) {
      absl::StatusOr<Response>& result = shared_->results[i];
      if (!result.ok()) {
        return WithPrefix(result.status(),
                          absl::StrCat("member \"", partitions_[i].member, "\": "));
      }
      responses.push_back(*std::move(result));
    }
    return responses;
  }

 private:
  struct Shared {
    explicit Shared(size_t count) : results(count), missing(static_cast<int>(count)) {}
    std::vector<absl::StatusOr<Response>> results;  // Each is written once, by one thread.
    absl::BlockingCounter missing;
  };

  const std::vector<Partition>& partitions_;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_FAN_OUT_H_
