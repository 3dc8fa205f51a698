// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_SERVER_REGISTRY_KUBERNETES_WATCH_H_
#define EMA_SERVER_REGISTRY_KUBERNETES_WATCH_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/base/steady_wait.h"
#include "server/registry/http_client.h"
#include "server/registry/kubernetes_client.h"
#include "server/registry/registry.h"

namespace ema {

// Lists all ConfigMaps and Leases with a prefix, then follows their changes in two streams. It
// lists them again when a stream has ended, and when a lease has been unchanged for its duration:
// only if it is still unchanged in the new list has it expired, because a stream may be late. The
// watch then deletes it. It pauses for up to 5 s if the API server ends the streams again and
// again.
class KubernetesWatch final : public RegistryWatch {
 public:
  // As Registry::Watch().
  KubernetesWatch(std::shared_ptr<KubernetesClient> client, std::string_view prefix,
                  std::function<void(const RegistryUpdate&)> on_update);
  ~KubernetesWatch() override;

 private:
  using Objects = std::map<std::string, KubernetesObject, std::less<>>;  // By key.

  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  // OK: everything must be listed again, because a lease may have expired, or since the API server
  // ended a stream after its time. Otherwise why the contact was lost.
  absl::Status Follow() ABSL_LOCKS_EXCLUDED(mu_);
  // Reports all objects, or how they differ from what was reported.
  void ReportAll(Objects objects);
  absl::Status ReportEvent(KubernetesKind kind, const std::string& line);
  void DeleteExpired(const KubernetesObject& lease);
  // When the next reported lease expires.
  SteadyTime NextExpiry() const;
  bool is_stopped() const ABSL_LOCKS_EXCLUDED(mu_);

  const std::shared_ptr<KubernetesClient> client_;
  const std::string prefix_;
  const std::function<void(const RegistryUpdate&)> on_update_;

  // Only on the thread.
  Objects reported_;
  bool must_report_all_ = true;    // At first, and after an interruption.
  bool is_interrupted_ = false;    // Logged as interrupted.
  bool has_lost_contact_ = false;  // A list has failed since the last LeaseObserver::Restart().

  mutable absl::Mutex mu_;
  SteadyWait stop_wait_;
  bool is_stopped_ ABSL_GUARDED_BY(mu_) = false;
  HttpStreams* streams_ ABSL_GUARDED_BY(mu_) = nullptr;  // The current ones; null: none.

  std::thread thread_;
};

}  // namespace ema

#endif  // EMA_SERVER_REGISTRY_KUBERNETES_WATCH_H_
