// SPDX-License-Identifier: Apache-2.0
#include "server/group/copy_maker.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/catch_exceptions.h"
#include "ema/internal/status_macros.h"
#include "server/format/manifest_parts.h"
#include "server/group/group_models.h"

namespace ema::group {
namespace {

// How long the partitions may take to write their copies, and then to fetch the others'. A lost
// connection ends the calls sooner.
constexpr absl::Duration kCopyTimeout = absl::Hours(1);

// Whether the newest version of `home` is not on the disk, nor copied.
bool HasVersionToCopy(const Model& home, const ModelRecord& record) {
  const std::optional<Version> latest = home.history().latest();
  if (!latest.has_value()) return false;
  const GroupCheckpoint* const durable = record.NewestCheckpoint();
  return (durable == nullptr || durable->id < latest->id()) &&
         (!record.copy.has_value() || record.copy->id < latest->id());
}

}  // namespace

void CopyMaker::Start() { thread_ = std::thread(&CopyMaker::Run, this); }

void CopyMaker::Stop() {
  if (!thread_.joinable()) return;
  {
    absl::MutexLock lock(&mu_);
    is_stopped_ = true;
    wait_.WakeAll();
  }
  thread_.join();
}

bool CopyMaker::MustStopBefore(SteadyTime time) {
  absl::MutexLock lock(&mu_);
  return wait_.AwaitUntil(mu_, time,
                          [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return is_stopped_; });
}

void CopyMaker::Run() {
  SteadyTime next = After(SteadyNow(), options_.interval);
  while (!MustStopBefore(next)) {
    // Copies that take longer than the interval follow each other without a pause.
    next = After(SteadyNow(), options_.interval);
    CopyAll();
  }
}

void CopyMaker::CopyAll() {
  for (const auto& [name, hosted] : hosted_.All()) {
    if (!hosted->partition->is_home() || hosted->partition->partitions().size() < 2) continue;
    const absl::Status status = CatchExceptions([&, &name = name] { return Copy(name); });
    if (MustStopBefore(SteadyNow())) return;  // It may have failed for that reason.
    ReportResult(name, status);
  }
}

absl::Status CopyMaker::Copy(const std::string& name) {
  const std::shared_ptr<const HostedModel> hosted = hosted_.Find(name);
  if (hosted == nullptr || !hosted->partition->is_active()) return absl::OkStatus();
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Model> home, store_.Get(name));
  EMA_ASSIGN_OR_RETURN(ModelRecord record, models_.RecordOf(name));
  // A save pins a version, too, and makes its version durable.
  if (!HasVersionToCopy(*home, record) || checkpoints_.is_saving()) return absl::OkStatus();
  // Not from the cache: the reply to the last change may have been lost, and all copies except the
  // one of the record are removed first.
  EMA_RETURN_IF_ERROR(models_.ChangeRecord(
      name, home->incarnation(), [&](const ModelRecord& stored) -> absl::StatusOr<ModelRecord> {
        record = stored;
        return stored;
      }));
  if (!HasVersionToCopy(*home, record)) return absl::OkStatus();
  const VersionId id = home->history().latest()->id();
  // Pinned as by a reader, so that a save can still pin its version.
  EMA_ASSIGN_OR_RETURN(const SnapshotRef snapshot, home->history().Pin(id.version, id.incarnation));
  return CopyVersion(*home, *hosted->partition, record, *snapshot);
}

absl::Status CopyMaker::CopyVersion(Model& home, const HostedPartition& partition,
                                    const ModelRecord& record, const Snapshot& snapshot) {
  const std::string& name = home.config().name;
  const Version& version = snapshot.record;
  const SteadyTime begin = SteadyNow();
  EMA_ASSIGN_OR_RETURN(const GroupModels::Placement placement,
                       models_.PlacementOf(name, home.incarnation()));

  v1::WriteCopyRequest write;
  write.set_model(name);
  write.set_incarnation(home.incarnation());
  write.mutable_version()->set_version(version.number);
  write.mutable_version()->set_incarnation(version.incarnation);
  write.set_tracks_revision(home.tracks().state().accepted_change);
  if (record.copy.has_value()) {
    write.mutable_newest_copy()->set_version(record.copy->id.version);
    write.mutable_newest_copy()->set_incarnation(record.copy->id.incarnation);
  }
  FanOut<v1::WriteCopyResponse> writes(placement.partitions);
  EMA_RETURN_IF_ERROR(
      models_.StartAtOthers(placement, [&](Peers& peers, size_t other, const std::string& address) {
        write.set_boot(placement.partitions[other].boot);
        peers.WriteCopy(address, write, kCopyTimeout, writes.EndOf(other));
      }));
  absl::StatusOr<CheckpointManifest> own =
      copies_.WriteSnapshot(home, /*partition=*/0, snapshot, write);
  writes.EndOf(0)(own.ok() ? absl::StatusOr<v1::WriteCopyResponse>(v1::WriteCopyResponse())
                           : own.status());
  EMA_ASSIGN_OR_RETURN(const std::vector<v1::WriteCopyResponse> others, Await(writes));
  std::vector<CheckpointManifest> parts = {*std::move(own)};
  for (size_t i = 1; i < others.size(); ++i) {
    EMA_ASSIGN_OR_RETURN(parts.emplace_back(),
                         ParseCheckpointManifest(others[i].manifest(), ManifestScope::kPart));
  }
  EMA_ASSIGN_OR_RETURN(CheckpointManifest whole, MergeManifests(std::move(parts)));
  const CopyId copy{.model = name, .version = IdOf(version)};
  EMA_RETURN_IF_ERROR(copies_.WriteManifest(copy, std::move(whole)));

  v1::FetchCopyRequest fetch;
  fetch.set_model(name);
  fetch.set_incarnation(home.incarnation());
  *fetch.mutable_version() = write.version();
  fetch.set_step(version.step);
  FanOut<v1::FetchCopyResponse> fetches(placement.partitions);
  EMA_RETURN_IF_ERROR(
      models_.StartAtOthers(placement, [&](Peers& peers, size_t other, const std::string& address) {
        fetch.set_boot(placement.partitions[other].boot);
        peers.FetchCopy(address, fetch, kCopyTimeout, fetches.EndOf(other));
      }));
  const absl::Status fetched = copies_.Fetch(home, partition, fetch);
  fetches.EndOf(0)(fetched.ok() ? absl::StatusOr<v1::FetchCopyResponse>(v1::FetchCopyResponse())
                                : fetched);
  EMA_RETURN_IF_ERROR(Await(fetches).status());
  EMA_RETURN_IF_ERROR(
      models_.ChangeRecord(name, home.incarnation(), [&](const ModelRecord& before) {
        return SetCopy(before, {.id = version.id(), .step = version.step});
      }));
  LogTo(options_.log, LogLevel::kDebug, "version copied",
        {{"model", name},
         {"version", version.number},
         {"step", version.step},
         {"seconds", absl::ToDoubleSeconds(Since(begin))}});
  return absl::OkStatus();
}

template <typename Response>
absl::StatusOr<std::vector<Response>> CopyMaker::Await(FanOut<Response>& calls) {
  constexpr absl::Duration kPoll = absl::Milliseconds(100);  // For Stop().
  const SteadyTime deadline = After(SteadyNow(), kCopyTimeout);
  while (!calls.AwaitEnd(After(SteadyNow(), kPoll)) && SteadyNow() < deadline) {
    if (MustStopBefore(SteadyNow())) return absl::CancelledError("this server stops");
  }
  return calls.Wait(SteadyNow());
}

void CopyMaker::ReportResult(const std::string& name, const absl::Status& status) {
  if (status.ok()) {
    errors_.erase(name);
    return;
  }
  // The model has ended or begins another incarnation, or a server stops.
  if (absl::IsNotFound(status) || absl::IsAborted(status) ||
      GetErrorReason(status) == ErrorReason::kDraining) {
    return;
  }
  absl::Status& last = errors_[name];
  const bool is_known =
      last.code() == status.code() && GetErrorReason(last) == GetErrorReason(status);
  last = status;
  if (is_known) return;
  LogTo(options_.log, LogLevel::kWarning, "version not copied",
        {{"model", name},
         {"error", status},
         {"hint",
          "the last copy remains; after a crash the model returns to it, or to its newest "
          "checkpoint"}});
}

}  // namespace ema::group
