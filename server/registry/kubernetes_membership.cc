// SPDX-License-Identifier: Apache-2.0
#include "server/registry/kubernetes_membership.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"
#include "server/base/quoted.h"
#include "server/base/random_hex.h"
#include "server/registry/registry_errors.h"

namespace ema {
namespace {

// Of one call that meets changes of others: its lost answers, a deletion, an expired holder.
constexpr int kMaxAttempts = 4;

absl::Status ChangedError(std::string_view key) {
  return absl::UnavailableError(
      absl::StrCat("the lease of ", Quoted(key), " is being changed by others"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Membership>> KubernetesMembership::Join(
    std::shared_ptr<KubernetesClient> client, std::string_view key, std::string_view value,
    absl::Duration ttl) {
  KubernetesObject lease{
      .kind = KubernetesKind::kLease,
      .entry = {.key = std::string(key), .value = std::string(value)},
      .holder = absl::StrCat(std::string(key.substr(key.rfind('/') + 1)), "_", RandomHex(4)),
      .ttl = absl::Ceil(ttl, absl::Seconds(1))};
  std::unique_ptr<KubernetesMembership> member(
      new KubernetesMembership(std::move(client), std::move(lease)));
  EMA_RETURN_IF_ERROR(member->Renew().status());
  member->thread_ =
      std::make_unique<RenewalThread>(std::string(key), member->lease_.ttl, member->client_->log(),
                                      [self = member.get()] { return self->Renew(); });
  return member;
}

absl::StatusOr<RenewalThread::Renewal> KubernetesMembership::Renew() {
  const SteadyTime deadline = client_->CallDeadline();
  bool is_new_lease = lease_.entry.revision == 0;
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    EMA_ASSIGN_OR_RETURN(const KubernetesClient::Change change, client_->Put(lease_, deadline));
    const auto& found = change.object;
    if (change.is_made) {
      lease_.entry.revision = found->entry.revision;
      return RenewalThread::Renewal{.ttl = lease_.ttl, .is_new_lease = is_new_lease};
    }
    lease_.entry.revision = 0;
    is_new_lease = !found.has_value() || found->holder != lease_.holder;
    if (!found.has_value()) continue;
    // The lease may be this one's own with another revision: the answer of a renewal was lost.
    if (is_new_lease && !client_->leases().IsExpired(*found)) {
      return OccupiedError(lease_.entry.key, found->entry.value);
    }
    lease_.entry.revision = found->entry.revision;
  }
  return ChangedError(lease_.entry.key);
}

absl::Status KubernetesMembership::Leave() {
  // A renewal that runs uses a part of the time.
  const SteadyTime deadline = client_->CallDeadline();
  thread_->Stop();
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    if (lease_.entry.revision == 0) return absl::OkStatus();
    EMA_ASSIGN_OR_RETURN(const KubernetesClient::Change change, client_->Delete(lease_, deadline));
    const auto& found = change.object;
    const bool is_own = !change.is_made && found.has_value() && found->holder == lease_.holder;
    lease_.entry.revision = is_own ? found->entry.revision : 0;
  }
  return ChangedError(lease_.entry.key);
}

}  // namespace ema
