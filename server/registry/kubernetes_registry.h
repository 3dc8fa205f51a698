// SPDX-License-Identifier: Apache-2.0
//
// The registry in the Kubernetes API, which needs no other service in a cluster.
#ifndef EMA_SERVER_REGISTRY_KUBERNETES_REGISTRY_H_
#define EMA_SERVER_REGISTRY_KUBERNETES_REGISTRY_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "server/base/log_event.h"
#include "server/registry/registry.h"

namespace ema {

class KubernetesClient;

struct KubernetesOptions {
  // Such as "https://10.0.0.1:6443". Empty: the API server of the cluster that this pod runs in,
  // and the pod's service account has what is empty below.
  std::string api_url;
  std::string name_space;
  // With a bearer token. It is read again for each request, because it is replaced regularly. Empty
  // with a URL: none.
  std::string token_file;
  std::string ca_file;  // PEM, for https only. Empty with a URL: the system's CAs.
  // The longest time of a call.
  absl::Duration call_timeout = absl::Seconds(4);
  LogSink log;  // Lost and regained contact, and a token that is sent without TLS.
  std::string account_folder = "/var/run/secrets/kubernetes.io/serviceaccount";
};

// Each key is a ConfigMap, and each key of a member a Lease, in one namespace. Kubernetes limits
// the value of a ConfigMap to 1 MiB, and that of a member to about 256 KB. Keys and values must be
// UTF-8. A key must not be used for both kinds.
//
// Kubernetes deletes no expired lease. The first registry that has seen a lease unchanged for its
// duration deletes it; so a lease is deleted only while a watch of some registry includes its key.
// The revision of a member's key also grows with renewals, which watches do not report.
class KubernetesRegistry final : public Registry {
 public:
  // Does not contact the API server. INVALID_ARGUMENT: the URL or a file; no URL, and not in a pod.
  static absl::StatusOr<std::unique_ptr<KubernetesRegistry>> Create(KubernetesOptions options);

  absl::StatusOr<RegistryEntry> Read(std::string_view key) override;
  absl::StatusOr<std::vector<RegistryEntry>> ReadPrefix(std::string_view prefix) override;
  absl::StatusOr<int64_t> CompareAndPut(std::string_view key, int64_t revision,
                                        std::string_view value) override;
  absl::Status CompareAndDelete(std::string_view key, int64_t revision) override;
  absl::StatusOr<std::unique_ptr<Membership>> Join(std::string_view key, std::string_view value,
                                                   absl::Duration ttl) override;
  std::unique_ptr<RegistryWatch> Watch(
      std::string_view prefix, std::function<void(const RegistryUpdate&)> on_update) override;
  SteadyTime last_contact() const override;
  RegistryHealth health() const override;

 private:
  explicit KubernetesRegistry(std::shared_ptr<KubernetesClient> client)
      : client_(std::move(client)) {}

  const std::shared_ptr<KubernetesClient> client_;  // Shared with memberships and watches.
};

}  // namespace ema

#endif  // EMA_SERVER_REGISTRY_KUBERNETES_REGISTRY_H_
