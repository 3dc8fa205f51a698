// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_SERVER_REGISTRY_ETCD_MEMBERSHIP_H_
#define EMA_SERVER_REGISTRY_ETCD_MEMBERSHIP_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "server/base/steady_wait.h"
#include "server/registry/etcd_client.h"
#include "server/registry/registry.h"
#include "server/registry/renewal_thread.h"

namespace ema {

// A key under a lease of etcd, which a thread renews three times in its TTL. When etcd has ended
// the lease, or the key was deleted, the thread puts the key again.
class EtcdMembership final : public Membership {
 public:
  // As Registry::Join().
  static absl::StatusOr<std::unique_ptr<Membership>> Join(std::shared_ptr<EtcdClient> client,
                                                          std::string_view key,
                                                          std::string_view value,
                                                          absl::Duration ttl);

  absl::Status status() const override { return thread_->status(); }
  absl::Status Leave() override;

 private:
  EtcdMembership(std::shared_ptr<EtcdClient> client, std::string_view key, std::string_view value,
                 absl::Duration ttl)
      : client_(std::move(client)), key_(key), value_(value), requested_ttl_(ttl) {}

  // Renews the lease, and puts the key if it is not there.
  absl::Status Renew(SteadyTime deadline);
  absl::Status GrantLease(SteadyTime deadline);
  absl::Status KeepLease(SteadyTime deadline);
  absl::Status RevokeLease(SteadyTime deadline);
  // Whether the key is there, under the lease.
  absl::StatusOr<bool> IsKeyThere();
  absl::Status PutKey(SteadyTime deadline);

  const std::shared_ptr<EtcdClient> client_;
  const std::string key_;
  const std::string value_;
  const absl::Duration requested_ttl_;

  // Used only by the thread while it runs.
  int64_t lease_ = 0;  // 0: none.
  absl::Duration ttl_;
  bool has_key_ = false;  // Under `lease_`.

  std::unique_ptr<RenewalThread> thread_;  // Null before Join() has put the key.
};

}  // namespace ema

#endif  // EMA_SERVER_REGISTRY_ETCD_MEMBERSHIP_H_
