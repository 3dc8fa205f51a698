// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_SERVER_REGISTRY_KUBERNETES_MEMBERSHIP_H_
#define EMA_SERVER_REGISTRY_KUBERNETES_MEMBERSHIP_H_

#include <memory>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/steady_wait.h"
#include "server/registry/kubernetes_client.h"
#include "server/registry/registry.h"
#include "server/registry/renewal_thread.h"

namespace ema {

// A Lease of Kubernetes, which a thread renews. If it was deleted because it had expired, the
// thread creates it again.
class KubernetesMembership final : public Membership {
 public:
  // As Registry::Join().
  static absl::StatusOr<std::unique_ptr<Membership>> Join(std::shared_ptr<KubernetesClient> client,
                                                          std::string_view key,
                                                          std::string_view value,
                                                          absl::Duration ttl);

  absl::Status status() const override { return thread_->status(); }
  absl::Status Leave() override;

 private:
  KubernetesMembership(std::shared_ptr<KubernetesClient> client, KubernetesObject lease)
      : client_(std::move(client)), lease_(std::move(lease)) {}

  // Puts the lease, whether or not it is there. ALREADY_EXISTS: another holder has it.
  absl::StatusOr<RenewalThread::Renewal> Renew();

  const std::shared_ptr<KubernetesClient> client_;

  // Used only by the thread while it runs. The revision is 0 if the lease is not there or has
  // another holder, as far as it is known.
  KubernetesObject lease_;

  std::unique_ptr<RenewalThread> thread_;  // Null before Join() has put the key.
};

}  // namespace ema

#endif  // EMA_SERVER_REGISTRY_KUBERNETES_MEMBERSHIP_H_
