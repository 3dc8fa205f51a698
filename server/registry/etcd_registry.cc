// SPDX-License-Identifier: Apache-2.0
#include "server/registry/etcd_registry.h"

#include "ema/internal/status_macros.h"
#include "server/registry/etcd_client.h"
#include "server/registry/etcd_membership.h"
#include "server/registry/etcd_watch.h"
#include "server/registry/registry_errors.h"

namespace ema {
absl::StatusOr<std::unique_ptr<EtcdRegistry>> EtcdRegistry::Create(EtcdOptions options) {
  EMA_ASSIGN_OR_RETURN(std::shared_ptr<EtcdClient> client, EtcdClient::Create(std::move(options)));
  return std::unique_ptr<EtcdRegistry>(new EtcdRegistry(std::move(client)));
}

absl::StatusOr<RegistryEntry> EtcdRegistry::Read(std::string_view key) {
  EMA_ASSIGN_OR_RETURN(const etcdserverpb::RangeResponse range, client_->Range(key, ""));
  return range.kvs_size() > 0 ? ToEntry(range.kvs(0)) : RegistryEntry{.key = std::string(key)};
}

absl::StatusOr<std::vector<RegistryEntry>> EtcdRegistry::ReadPrefix(std::string_view prefix) {
  EMA_ASSIGN_OR_RETURN(const etcdserverpb::RangeResponse range,
                       client_->Range(prefix, PrefixEnd(prefix)));
  std::vector<RegistryEntry> entries;
  for (const etcdserverpb::KeyValue& pair : range.kvs()) entries.push_back(ToEntry(pair));
  return entries;
}

absl::StatusOr<int64_t> EtcdRegistry::CompareAndPut(std::string_view key, int64_t revision,
                                                    std::string_view value) {
  EMA_ASSIGN_OR_RETURN(
      const EtcdClient::Change change,
      client_->CompareAndSet(key, revision, value, /*lease=*/0, client_->CallDeadline()));
  if (change.is_made) return change.revision;
  const int64_t found = change.found.mod_revision();
  if (change.may_be_ours && found > revision && change.found.value() == value) return found;
  return ConflictError(key, revision, found);
}

absl::Status EtcdRegistry::CompareAndDelete(std::string_view key, int64_t revision) {
  EMA_ASSIGN_OR_RETURN(
      const EtcdClient::Change change,
      client_->CompareAndSet(key, revision, std::nullopt, /*lease=*/0, client_->CallDeadline()));
  const int64_t found = change.found.mod_revision();
  if (change.is_made || (change.may_be_ours && found == 0)) return absl::OkStatus();
  return ConflictError(key, revision, found);
}

absl::StatusOr<std::unique_ptr<Membership>> EtcdRegistry::Join(std::string_view key,
                                                               std::string_view value,
                                                               absl::Duration ttl) {
  return EtcdMembership::Join(client_, key, value, ttl);
}

std::unique_ptr<RegistryWatch> EtcdRegistry::Watch(
    std::string_view prefix, std::function<void(const RegistryUpdate&)> on_update) {
  return std::make_unique<EtcdWatch>(client_, prefix, std::move(on_update));
}

SteadyTime EtcdRegistry::last_contact() const { return client_->last_contact(); }

RegistryHealth EtcdRegistry::health() const { return client_->health(); }

}  // namespace ema
