// SPDX-License-Identifier: Apache-2.0
//
// Fake servers that keep one model together.
#ifndef EMA_TESTS_CLIENT_FAKE_GROUP_H_
#define EMA_TESTS_CLIENT_FAKE_GROUP_H_

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "ema/manifest.h"
#include "ema/v1/ema_service.pb.h"
#include "tests/client/fake_server.h"

namespace ema {

// One FakeServer for each partition; the first one is the home. A step is committed when it is
// complete on all of them. Thread-safe.
class FakeGroup {
 public:
  static constexpr int64_t kIncarnation = 77;

  // `sizes`: the number of tensors of each partition.
  FakeGroup(const Manifest& manifest, const std::vector<int64_t>& sizes);
  ~FakeGroup();

  FakeServer& server(size_t partition) { return *servers_[partition]; }
  size_t size() const { return servers_.size(); }
  std::string address() const { return servers_.front()->address(); }
  int64_t round() const ABSL_LOCKS_EXCLUDED(mu_);

  // Ends the round without a commit, as after the failure of another rank.
  void AbortRound() ABSL_LOCKS_EXCLUDED(mu_);
  // The home refuses to abandon steps: it says that they are committed.
  void set_commits_abandoned_steps(bool value) { commits_abandoned_steps_ = value; }
  // The partition publishes other records than the others.
  void set_diverging_partition(int64_t partition) { diverging_partition_ = partition; }
  // The number of pulls at each partition but the first that are answered with VERSION_NOT_YET.
  void set_not_yet_count(int64_t count) { not_yet_count_ = count; }

 private:
  void Describe(v1::Model& model) const;
  absl::Status CheckPush(const v1::PushHeader& header) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status CheckPull(size_t partition, const v1::PullRequest& request) ABSL_LOCKS_EXCLUDED(mu_);
  void OnComplete(size_t partition, int64_t step) ABSL_LOCKS_EXCLUDED(mu_);
  int64_t OnAbandon(int64_t step) ABSL_LOCKS_EXCLUDED(mu_);
  v1::VersionRecord Commit(int64_t step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Publish(const v1::VersionRecord& record, int64_t round);

  const Manifest manifest_;
  std::vector<Manifest> parts_;
  std::vector<int64_t> first_tensors_;
  // Set before the calls that they are for.
  bool commits_abandoned_steps_ = false;
  int64_t diverging_partition_ = -1;
  int64_t not_yet_count_ = 0;

  mutable absl::Mutex mu_;
  int64_t round_ ABSL_GUARDED_BY(mu_) = 1;
  int64_t version_ ABSL_GUARDED_BY(mu_) = 0;
  std::set<size_t> complete_ ABSL_GUARDED_BY(mu_);  // Partitions that have all of the step.
  std::vector<int64_t> pull_counts_ ABSL_GUARDED_BY(mu_);
  std::vector<std::unique_ptr<FakeServer>> servers_;
};

}  // namespace ema

#endif  // EMA_TESTS_CLIENT_FAKE_GROUP_H_
