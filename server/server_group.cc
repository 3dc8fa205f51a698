// SPDX-License-Identifier: Apache-2.0
#include "server/server_group.h"

#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/random_hex.h"
#include "server/registry/etcd_registry.h"

namespace ema {
namespace {

// Members with another version of their messages cannot work together.
constexpr int64_t kProtocol = 1;

// Does not contact etcd. The message of an error begins with the option.
absl::StatusOr<std::unique_ptr<Registry>> OpenRegistry(const ServerOptions& options, LogSink log) {
  absl::StatusOr<std::unique_ptr<EtcdRegistry>> registry =
      EtcdRegistry::Create({.endpoints = absl::StrJoin(options.etcd, ","),
                            .ca_file = options.etcd_ca,
                            .certificate_file = options.etcd_cert,
                            .key_file = options.etcd_key,
                            .log = std::move(log)});
  if (!registry.ok()) return WithPlace(registry.status(), "--etcd: ");
  return *std::move(registry);
}

// The servers of a group present their own certificates to each other, so a CA of clients is also
// the CA of the servers.
group::Peers::Options PeersOptions(const ServerOptions& options) {
  return {.ca_file = options.tls_client_ca,
          .certificate_file = options.tls_cert,
          .key_file = options.tls_key,
          .token_file = options.group_token_file};
}

}  // namespace

ServerGroup::ServerGroup(const ServerOptions& options, std::shared_ptr<ModelStore> store,
                         LogSink log)
    : options_(options), store_(std::move(store)), log_(std::move(log)) {}

absl::StatusOr<std::unique_ptr<ServerGroup>> ServerGroup::Create(const ServerOptions& options,
                                                                 std::shared_ptr<ModelStore> store,
                                                                 LogSink log) {
  if (!options.data_dir.empty()) {
    return absl::InvalidArgumentError(
        "--data-dir with --group: checkpoints of models on a group are not supported yet");
  }
  std::unique_ptr<ServerGroup> group(new ServerGroup(options, std::move(store), std::move(log)));
  EMA_ASSIGN_OR_RETURN(group->registry_, OpenRegistry(options, group->log_));
  EMA_ASSIGN_OR_RETURN(group->peers_, group::Peers::Start(PeersOptions(options)));
  group->models_ = std::make_unique<group::GroupModels>(
      group->store_.get(), group->peers_.get(),
      group::GroupModels::Options{.session_timeout = options.limits.session_timeout,
                                  .registry_patience = options.etcd_patience,
                                  .log = group->log_});
  return group;
}

ServerGroup::~ServerGroup() { Stop(); }

absl::Status ServerGroup::Join(int port) {
  std::string address = options_.advertise;
  if (absl::EndsWith(address, ":0")) {
    address = absl::StrCat(address.substr(0, address.size() - 1), port);
  }
  const MemoryBudget& budget = store_->budget();
  group::Member::Options member;
  member.group = options_.group;
  member.name = options_.member;
  member.record.boot = RandomHex(4);
  member.record.address = address;
  member.record.device = std::string(store_->device().name());
  member.record.memory_budget_bytes = budget.total_bytes();
  member.record.free_memory_bytes = budget.total_bytes() - budget.reserved_bytes();
  member.record.program_version = std::string(ServerVersion());
  member.record.protocol = kProtocol;
  member.registry = registry_.get();
  member.log = log_;
  EMA_ASSIGN_OR_RETURN(member_, group::Member::Join(std::move(member)));
  models_->Start(member_.get());
  LogTo(log_, LogLevel::kInfo, "joined group",
        {{"group", options_.group}, {"member", options_.member}, {"address", address}});
  return absl::OkStatus();
}

void ServerGroup::Leave() {
  if (member_ == nullptr) return;
  models_->Stop();
  const absl::Status left = member_->Leave();
  if (!left.ok()) {
    LogTo(log_, LogLevel::kWarning, "group not left; the member's key expires", {{"error", left}});
  }
  member_ = nullptr;
}

void ServerGroup::Stop() {
  if (models_ != nullptr) models_->Stop();
  member_ = nullptr;
  if (peers_ != nullptr) peers_->Stop();
}

}  // namespace ema
