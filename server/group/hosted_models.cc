// SPDX-License-Identifier: Apache-2.0
#include "server/group/hosted_models.h"

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/group/group_errors.h"
#include "server/group/partition_config.h"

namespace ema::group {

void HostedModels::Start(Member* member) {
  absl::MutexLock lock(&mu_);
  member_ = member;
}

void HostedModels::Stop() {
  absl::MutexLock change_lock(&change_mu_);
  absl::MutexLock lock(&mu_);
  member_ = nullptr;
  for (const auto& [name, hosted] : models_) hosted->partition->Stop();
}

absl::StatusOr<Member*> HostedModels::GetMember() const {
  absl::MutexLock lock(&mu_);
  if (member_ != nullptr) return member_;
  return NotMemberError();
}

std::string HostedModels::AddressOf(const Partition& partition) const {
  absl::MutexLock lock(&mu_);
  if (member_ == nullptr) return "";
  return member_->AddressOf(partition.member, partition.boot).value_or("");
}

std::shared_ptr<const HostedModel> HostedModels::Find(std::string_view model) const {
  absl::MutexLock lock(&mu_);
  const auto found = models_.find(model);
  return found != models_.end() ? found->second : nullptr;
}

std::map<std::string, std::shared_ptr<const HostedModel>> HostedModels::All() const {
  absl::MutexLock lock(&mu_);
  return {models_.begin(), models_.end()};
}

absl::Status HostedModels::StartCalls(absl::FunctionRef<void(Peers&)> call) const {
  absl::MutexLock lock(&mu_);
  if (member_ == nullptr) return NotMemberError();
  call(peers_);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<HostedPartition>> HostedModels::Add(const Member& member,
                                                                   const ModelRecord& record,
                                                                   int64_t index,
                                                                   ModelConfig config) {
  const std::string name = config.name;
  const Partition& place = record.partitions[static_cast<size_t>(index)];
  EMA_ASSIGN_OR_RETURN(ModelConfig part, PartitionConfig(config, place));
  auto partition = std::make_shared<HostedPartition>(HostedPartition::Options{
      .model = name,
      .id = {.incarnation = record.incarnation, .partition = index, .boot = member.boot()},
      .partitions = record.partitions,
      .base = record.base,
      .peers = &peers_,
      .member = &member,
      .session_timeout = options_.session_timeout,
      .max_registry_outage = options_.max_registry_outage,
      .log = options_.log});
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> model,
                       store_.CreatePartition(std::move(part), record.incarnation, partition));
  // An earlier model of that name may have had other checkpoints.
  if (options_.checkpoints != nullptr) options_.checkpoints->FolderOf(name).Refresh();
  const auto hosted =
      std::make_shared<const HostedModel>(HostedModel{partition, std::move(config)});
  {
    absl::MutexLock lock(&mu_);
    models_[name] = hosted;
  }
  partition->Start(model);
  LogTo(options_.log, LogLevel::kInfo, "partition reserved",
        {{"model", name},
         {"incarnation", record.incarnation},
         {"partition", index},
         {"tensors", place.tensor_count},
         {"reserved_bytes", model->tracks().reserved_bytes()}});
  return partition;
}

void HostedModels::Drop(const std::string& model, int64_t incarnation,
                        const std::string& why_deleted) {
  std::shared_ptr<HostedPartition> partition;
  {
    absl::MutexLock lock(&mu_);
    const auto found = models_.find(model);
    if (found == models_.end() || found->second->partition->id().incarnation != incarnation) return;
    partition = found->second->partition;
    models_.erase(found);
  }
  partition->Stop();
  if (why_deleted.empty()) {
    store_.Drop(model,
                MakeError(absl::StatusCode::kUnavailable, ErrorReason::kGroupDegraded,
                          absl::StrCat("model \"", model, "\": incarnation ", incarnation,
                                       " has ended: the model returns to a checkpoint or copy"),
                          absl::Seconds(1)));
  } else {
    store_.Delete(model);
  }
  LogTo(options_.log, LogLevel::kInfo, "partition dropped",
        {{"model", model},
         {"incarnation", incarnation},
         {"partition", partition->id().partition},
         {"reason", absl::StrCat("the model ",
                                 why_deleted.empty() ? "has a newer incarnation" : why_deleted)}});
}

}  // namespace ema::group
