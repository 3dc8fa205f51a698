// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_SERVER_REGISTRY_ETCD_WATCH_H_
#define EMA_SERVER_REGISTRY_ETCD_WATCH_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/base/steady_wait.h"
#include "server/registry/etcd_client.h"
#include "server/registry/registry.h"

namespace ema {

// Reads all keys with a prefix, then follows their changes in a stream. When the stream has ended
// (a probe was missed, etcd has restarted or has no leader, or the changes have been compacted), it
// reads all keys again. It pauses for up to 5 s if etcd refuses the stream again and again.
class EtcdWatch final : public RegistryWatch {
 public:
  // As Registry::Watch().
  EtcdWatch(std::shared_ptr<EtcdClient> client, std::string_view prefix,
            std::function<void(const RegistryUpdate&)> on_update);
  ~EtcdWatch() override;

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  // Reads and reports all keys, and returns the revision that they had together.
  absl::StatusOr<int64_t> ReportAll() ABSL_LOCKS_EXCLUDED(mu_);
  // Returns why the stream has ended.
  absl::Status FollowChanges(int64_t start_revision) ABSL_LOCKS_EXCLUDED(mu_);

  const std::shared_ptr<EtcdClient> client_;
  const std::string prefix_;
  const std::function<void(const RegistryUpdate&)> on_update_;

  bool is_interrupted_ = false;  // Only on the thread: reported as interrupted.

  absl::Mutex mu_;
  SteadyWait stop_wait_;
  bool is_stopped_ ABSL_GUARDED_BY(mu_) = false;
  std::shared_ptr<grpc::ClientContext> context_ ABSL_GUARDED_BY(mu_);  // The stream's.

  std::thread thread_;
};

}  // namespace ema

#endif  // EMA_SERVER_REGISTRY_ETCD_WATCH_H_
