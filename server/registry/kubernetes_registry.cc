// SPDX-License-Identifier: Apache-2.0
#include "server/registry/kubernetes_registry.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"
#include "server/base/quoted.h"
#include "server/registry/kubernetes_client.h"
#include "server/registry/kubernetes_membership.h"
#include "server/registry/kubernetes_watch.h"
#include "server/registry/registry_errors.h"

namespace ema {
namespace {

KubernetesObject ConfigMapOf(std::string_view key, int64_t revision, std::string_view value) {
  return {.kind = KubernetesKind::kConfigMap,
          .entry = {.key = std::string(key), .value = std::string(value), .revision = revision}};
}

int64_t RevisionOf(const KubernetesClient::Change& change) {
  return change.object.has_value() ? change.object->entry.revision : 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<KubernetesRegistry>> KubernetesRegistry::Create(
    KubernetesOptions options) {
  EMA_ASSIGN_OR_RETURN(std::shared_ptr<KubernetesClient> client,
                       KubernetesClient::Create(std::move(options)));
  return std::unique_ptr<KubernetesRegistry>(new KubernetesRegistry(std::move(client)));
}

absl::StatusOr<RegistryEntry> KubernetesRegistry::Read(std::string_view key) {
  const SteadyTime deadline = client_->CallDeadline();
  for (const KubernetesKind kind : {KubernetesKind::kConfigMap, KubernetesKind::kLease}) {
    EMA_ASSIGN_OR_RETURN(std::optional<KubernetesObject> object, client_->Get(kind, key, deadline));
    if (!object.has_value()) continue;
    if (kind == KubernetesKind::kLease && client_->leases().IsExpired(*object)) continue;
    return std::move(object->entry);
  }
  return RegistryEntry{.key = std::string(key)};
}

absl::StatusOr<std::vector<RegistryEntry>> KubernetesRegistry::ReadPrefix(std::string_view prefix) {
  std::vector<RegistryEntry> entries;
  for (const KubernetesKind kind : {KubernetesKind::kConfigMap, KubernetesKind::kLease}) {
    EMA_ASSIGN_OR_RETURN(KubernetesList list, client_->List(kind, prefix));
    for (KubernetesObject& object : list.objects) {
      if (kind == KubernetesKind::kLease && client_->leases().IsExpired(object)) continue;
      entries.push_back(std::move(object.entry));
    }
  }
  std::sort(entries.begin(), entries.end(),
            [](const RegistryEntry& a, const RegistryEntry& b) { return a.key < b.key; });
  return entries;
}

absl::StatusOr<int64_t> KubernetesRegistry::CompareAndPut(std::string_view key, int64_t revision,
                                                          std::string_view value) {
  EMA_ASSIGN_OR_RETURN(const KubernetesClient::Change change,
                       client_->Put(ConfigMapOf(key, revision, value), client_->CallDeadline()));
  const int64_t found = RevisionOf(change);
  if (change.is_made) return found;
  if (change.may_be_ours && found > revision && change.object->entry.value == value) return found;
  if (found == revision) {
    return absl::UnavailableError(
        absl::StrCat("key ", Quoted(key), " was deleted while it was to be created"));
  }
  return ConflictError(key, revision, found);
}

absl::Status KubernetesRegistry::CompareAndDelete(std::string_view key, int64_t revision) {
  EMA_ASSIGN_OR_RETURN(const KubernetesClient::Change change,
                       client_->Delete(ConfigMapOf(key, revision, ""), client_->CallDeadline()));
  const int64_t found = RevisionOf(change);
  if (change.is_made || (change.may_be_ours && found == 0)) return absl::OkStatus();
  return ConflictError(key, revision, found);
}

absl::StatusOr<std::unique_ptr<Membership>> KubernetesRegistry::Join(std::string_view key,
                                                                     std::string_view value,
                                                                     absl::Duration ttl) {
  return KubernetesMembership::Join(client_, key, value, ttl);
}

std::unique_ptr<RegistryWatch> KubernetesRegistry::Watch(
    std::string_view prefix, std::function<void(const RegistryUpdate&)> on_update) {
  return std::make_unique<KubernetesWatch>(client_, prefix, std::move(on_update));
}

SteadyTime KubernetesRegistry::last_contact() const { return client_->last_contact(); }

RegistryHealth KubernetesRegistry::health() const { return client_->health(); }

}  // namespace ema
