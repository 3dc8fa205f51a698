// SPDX-License-Identifier: Apache-2.0
#include "server/server_group.h"

#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/random_hex.h"
#include "server/base/small_file.h"
#include "server/checkpoint/data_directory.h"
#include "server/format/file_system.h"
#include "server/registry/etcd_registry.h"
#include "server/registry/kubernetes_registry.h"
#include "server/wire/convert_group.h"

namespace ema {
namespace {

// Members with another version of their messages cannot work together.
constexpr int64_t kProtocol = 1;

// What the registry has in place of the directory's id if the group has no data directory.
constexpr std::string_view kNoDirectory = "none";

absl::StatusOr<std::string> ReadPassword(const std::string& path) {
  constexpr int64_t kMaxBytes = 4096;
  if (path.empty()) return "";
  absl::StatusOr<std::string> text = ReadSmallFile(path, kMaxBytes);
  const std::string place = absl::StrCat("--etcd-password-file: ", path);
  if (!text.ok()) return WithPrefix(text.status(), absl::StrCat(place, ": "));
  std::string password(absl::StripTrailingAsciiWhitespace(*text));
  if (password.empty()) return absl::InvalidArgumentError(absl::StrCat(place, " is empty"));
  return password;
}

// These do not contact the registry. The message of an error begins with the option.
absl::StatusOr<std::unique_ptr<Registry>> OpenKubernetes(const ServerOptions& options,
                                                         LogSink log) {
  absl::StatusOr<std::unique_ptr<KubernetesRegistry>> registry =
      KubernetesRegistry::Create({.api_url = options.kubernetes_api,
                                  .name_space = options.kubernetes_namespace,
                                  .token_file = options.kubernetes_token_file,
                                  .ca_file = options.kubernetes_ca,
                                  .log = std::move(log)});
  if (!registry.ok()) return WithPrefix(registry.status(), "--kubernetes: ");
  return *std::move(registry);
}

absl::StatusOr<std::unique_ptr<Registry>> OpenEtcd(const ServerOptions& options, LogSink log) {
  EMA_ASSIGN_OR_RETURN(std::string password, ReadPassword(options.etcd_password_file));
  absl::StatusOr<std::unique_ptr<EtcdRegistry>> registry =
      EtcdRegistry::Create({.endpoints = absl::StrJoin(options.etcd, ","),
                            .ca_file = options.etcd_ca,
                            .certificate_file = options.etcd_cert,
                            .key_file = options.etcd_key,
                            .user = options.etcd_user,
                            .password = std::move(password),
                            .log = std::move(log)});
  if (!registry.ok()) return WithPrefix(registry.status(), "--etcd: ");
  return *std::move(registry);
}

absl::StatusOr<std::unique_ptr<Registry>> OpenRegistry(const ServerOptions& options, LogSink log) {
  return options.kubernetes ? OpenKubernetes(options, std::move(log))
                            : OpenEtcd(options, std::move(log));
}

// The servers of a group present their own certificates to each other, so a CA of clients must also
// be the CA of the servers.
group::Peers::Options PeersOptions(const ServerOptions& options) {
  return {.ca_file = options.group_ca.empty() ? options.tls_client_ca : options.group_ca,
          .certificate_file = options.tls_cert,
          .key_file = options.tls_key,
          .token_file = options.group_token_file};
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServerGroup>> ServerGroup::Create(const ServerOptions& options,
                                                                 LogSink log) {
  std::unique_ptr<ServerGroup> group(new ServerGroup(options, std::move(log)));
  EMA_ASSIGN_OR_RETURN(group->registry_, OpenRegistry(options, group->log_));
  EMA_ASSIGN_OR_RETURN(group->peers_, group::Peers::Start(PeersOptions(options)));
  if (!options.copy_dir.empty()) {
    absl::StatusOr<std::unique_ptr<group::CopyDirectory>> copies = group::CopyDirectory::Open(
        PosixFileSystem(), options.copy_dir, options.group, options.member);
    if (!copies.ok()) {
      return WithPrefix(copies.status(), absl::StrCat("--copy-dir ", options.copy_dir, ": "));
    }
    group->copies_ = *std::move(copies);
  }
  return group;
}

void ServerGroup::Attach(std::shared_ptr<ModelStore> store, CheckpointStore* checkpoints) {
  store_ = std::move(store);
  checkpoints_ = checkpoints;
  models_ = std::make_unique<group::GroupModels>(
      store_.get(), peers_.get(),
      group::GroupModels::Options{.session_timeout = options_.limits.session_timeout,
                                  .max_registry_outage = options_.max_registry_outage,
                                  .replace_after = options_.replace_after,
                                  .checkpoints = checkpoints,
                                  .copies = copies_.get(),
                                  .copy_interval = options_.copy_every,
                                  .log = log_});
}

std::string ServerGroup::DirectoryKey() const {
  return absl::StrCat("/ema/", options_.group, "/directory");
}

absl::Status ServerGroup::CheckDirectory() {
  absl::StatusOr<std::string> id = std::string(kNoDirectory);
  if (!options_.data_dir.empty()) {
    id = DataDirectory::FindGroupId(PosixFileSystem(), options_.data_dir, options_.group);
    if (absl::IsNotFound(id.status())) id = "";
  }
  if (!id.ok()) return WithPrefix(id.status(), "--data-dir: ");
  EMA_ASSIGN_OR_RETURN(const RegistryEntry entry, registry_->Read(DirectoryKey()));
  return entry.revision == 0 ? absl::OkStatus() : CheckSameDirectory(*id, entry.value);
}

absl::Status ServerGroup::AgreeOnDirectory() {
  absl::StatusOr<std::string> id = std::string(kNoDirectory);
  if (checkpoints_ != nullptr) id = checkpoints_->data().GroupId(options_.group);
  if (!id.ok()) return WithPrefix(id.status(), "--data-dir: ");
  EMA_ASSIGN_OR_RETURN(RegistryEntry entry, registry_->Read(DirectoryKey()));
  if (entry.revision == 0) {
    absl::Status put = registry_->CompareAndPut(DirectoryKey(), /*revision=*/0, *id).status();
    if (!absl::IsAborted(put)) return put;
    EMA_ASSIGN_OR_RETURN(entry, registry_->Read(DirectoryKey()));
  }
  return CheckSameDirectory(*id, entry.value);
}

absl::Status ServerGroup::CheckSameDirectory(const std::string& id,
                                             const std::string& id_of_others) const {
  if (id == id_of_others) return absl::OkStatus();
  if (id == kNoDirectory) {
    return absl::FailedPreconditionError(
        absl::StrCat("group \"", options_.group,
                     "\": the other members share a data directory; give this one the same with "
                     "--data-dir, or remove the key ",
                     DirectoryKey(), " from the registry if the group no longer has one"));
  }
  if (id_of_others == kNoDirectory) {
    return absl::FailedPreconditionError(
        absl::StrCat("--data-dir ", options_.data_dir, ": the other members of group \"",
                     options_.group, "\" have no data directory. If all of them get this one, ",
                     "remove the key ", DirectoryKey(), " from the registry"));
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "--data-dir ", options_.data_dir, ": this directory has ",
      id.empty() ? "no id" : absl::StrCat("the id ", id),
      ", but that of the other members of group \"", options_.group, "\" has ", id_of_others,
      ": all members must share one directory. If the group has moved to this one, remove the key ",
      DirectoryKey(), " from the registry"));
}

absl::Status ServerGroup::Join(int port) {
  EMA_RETURN_IF_ERROR(AgreeOnDirectory());
  std::string address = options_.advertise;
  if (absl::EndsWith(address, ":0")) {
    address = absl::StrCat(address.substr(0, address.size() - 1), port);
  }
  group::Member::Options member;
  member.group = options_.group;
  member.name = options_.member;
  member.record.boot = RandomHex(4);
  member.record.address = address;
  member.record.device = std::string(store_->device().name());
  member.record.memory_budget_bytes = store_->budget().total_bytes();
  member.record.program_version = std::string(ServerVersion());
  member.record.protocol = kProtocol;
  member.registry = registry_.get();
  member.log = log_;
  LogTo(log_, LogLevel::kInfo, "joining group",
        {{"group", options_.group}, {"member", options_.member}, {"address", address}});
  EMA_ASSIGN_OR_RETURN(member_, group::Member::Join(std::move(member)));
  if (checkpoints_ != nullptr) saves_.Start(models_.get(), checkpoints_);
  models_->Start(member_.get());
  LogTo(log_, LogLevel::kInfo, "joined group",
        {{"group", options_.group}, {"member", options_.member}, {"address", address}});
  return absl::OkStatus();
}

std::optional<GroupInfo> ServerGroup::Describe() const {
  absl::MutexLock lock(&mu_);
  const absl::StatusOr<v1::GetGroupResponse> response = models_->overview().DescribeHere();
  return response.ok() ? std::optional(FromProto(*response)) : std::nullopt;
}

void ServerGroup::SaveAtHomes() {
  constexpr absl::Duration kTimeout = absl::Minutes(10);
  if (checkpoints_ != nullptr && member_ != nullptr) models_->SaveAtHomes(kTimeout);
}

void ServerGroup::Leave() {
  if (member_ == nullptr) return;
  saves_.Stop();
  models_->Stop();
  const absl::Status left = member_->Leave();
  if (!left.ok()) {
    LogTo(log_, LogLevel::kWarning, "group not left; the member's key expires", {{"error", left}});
  }
  absl::MutexLock lock(&mu_);
  member_ = nullptr;
}

void ServerGroup::Stop() {
  saves_.Stop();
  if (models_ != nullptr) models_->Stop();
  member_ = nullptr;
  if (peers_ != nullptr) peers_->Stop();
}

}  // namespace ema
