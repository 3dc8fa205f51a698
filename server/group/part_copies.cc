// SPDX-License-Identifier: Apache-2.0
#include "server/group/part_copies.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/manifest.h"
#include "server/checkpoint/checkpoint_load.h"
#include "server/checkpoint/checkpoint_reader.h"
#include "server/checkpoint/pacer.h"
#include "server/core/model_store.h"
#include "server/format/checkpoint_files.h"
#include "server/group/group_errors.h"
#include "server/group/pin_published.h"

namespace ema::group {
namespace {

// The bytes of one ReadCopy, and how many are sent before the first one is answered.
constexpr int64_t kCopyPieceBytes = int64_t{4} << 20;
constexpr size_t kReadsAtOnce = 4;
// Of one ReadCopy. A lost connection ends it sooner.
constexpr absl::Duration kReadCopyTimeout = absl::Seconds(10);

struct PendingRead {
  absl::Notification has_ended;
  absl::StatusOr<v1::ReadCopyResponse> response;  // Written before `has_ended`.
};

v1::ReadCopyRequest RequestOf(const CopyFile& file) {
  v1::ReadCopyRequest request;
  request.set_model(file.copy.model);
  request.mutable_version()->set_version(file.copy.version.version);
  request.mutable_version()->set_incarnation(file.copy.version.incarnation);
  request.set_step(file.copy.version.step);
  if (file.partition.has_value()) request.set_partition(*file.partition);
  request.set_track(file.track);
  request.set_file(file.name);
  return request;
}

template <typename Request>
CopyId CopyOf(const Request& request, int64_t step) {
  return {.model = request.model(),
          .version = {.incarnation = request.version().incarnation(),
                      .version = request.version().version(),
                      .step = step}};
}

CopyId CopyOf(const std::string& model, const GroupCopy& copy) {
  return {.model = model,
          .version = {
              .incarnation = copy.id.incarnation, .version = copy.id.version, .step = copy.step}};
}

// Whether a copy may still be needed: it is the one of the record, or a newer one that is being
// made. `record` may be behind the registry, also by an incarnation.
bool MayBeNeeded(const ModelRecord& record, const VersionId& id) {
  if (record.state != ModelRecord::State::kActive) return false;
  if (record.copy.has_value() && id <= record.copy->id) return id == record.copy->id;
  return id.incarnation >= record.incarnation;
}

absl::Status LostCopyError(const absl::Status& why) {
  return CorruptCheckpoint(absl::StrCat("the copy is lost: ", why.message()));
}

}  // namespace

absl::StatusOr<CopyDirectory*> PartCopies::GetDirectory() const {
  if (directory_ != nullptr) return directory_;
  return absl::FailedPreconditionError("the server was started without --copy-dir");
}

absl::Status PartCopies::CheckMayContinue(const PauseHook& pause) const {
  if (is_stopping_.load(std::memory_order_relaxed)) return DrainingError();
  return pause();
}

// --- Making a copy ---

absl::StatusOr<v1::WriteCopyResponse> PartCopies::Write(Model& model, int64_t partition,
                                                        const v1::WriteCopyRequest& request) {
  EMA_ASSIGN_OR_RETURN(
      const SnapshotRef snapshot,
      // Pinned as by a reader, so that a save can still pin its version.
      PinPublished(model, {request.version().version(), request.version().incarnation()},
                   &VersionHistory::Pin));
  EMA_ASSIGN_OR_RETURN(const CheckpointManifest part,
                       WriteSnapshot(model, partition, *snapshot, request));
  v1::WriteCopyResponse response;
  response.set_manifest(EncodeCheckpointManifest(part));
  return response;
}

absl::StatusOr<CheckpointManifest> PartCopies::WriteSnapshot(Model& model, int64_t partition,
                                                             const Snapshot& snapshot,
                                                             const v1::WriteCopyRequest& request) {
  EMA_ASSIGN_OR_RETURN(CopyDirectory* const directory, GetDirectory());
  const VersionId newest = {request.newest_copy().version(), request.newest_copy().incarnation()};
  EMA_RETURN_IF_ERROR(directory->RemoveUnneededOf(
      request.model(), [&](const CopyId& copy) { return copy.version.version_id() == newest; }));
  return directory->WritePart(CopyOf(request, snapshot.record.step), partition, model, snapshot,
                              {.tracks_revision = request.tracks_revision()});
}

absl::Status PartCopies::WriteManifest(const CopyId& copy, CheckpointManifest whole) {
  EMA_ASSIGN_OR_RETURN(CopyDirectory* const directory, GetDirectory());
  return directory->WriteManifest(copy, std::move(whole));
}

absl::Status PartCopies::Fetch(Model& model, const HostedPartition& partition,
                               const v1::FetchCopyRequest& request) {
  EMA_ASSIGN_OR_RETURN(CopyDirectory* const directory, GetDirectory());
  const std::vector<Partition>& all = partition.partitions();
  const auto count = static_cast<int64_t>(all.size());
  const int64_t before = (partition.id().partition + count - 1) % count;
  const CopyId copy = CopyOf(request, request.step());
  const PauseHook pause = Pacer::Hook(model);
  if (!partition.is_home()) {
    EMA_RETURN_IF_ERROR(FetchManifest(hosted_.AddressOf(all[0]), copy, pause));
  }
  EMA_RETURN_IF_ERROR(
      FetchPart(hosted_.AddressOf(all[static_cast<size_t>(before)]), copy, before, pause));
  EMA_ASSIGN_OR_RETURN(const CheckpointManifest part, directory->ReadPart(copy, before));
  return VerifyPart(directory->file_system(), directory->PartPath(copy, before), part, pause);
}

absl::StatusOr<v1::ReadCopyResponse> PartCopies::Read(const v1::ReadCopyRequest& request) const {
  // As if it had lost the copy: it may have had one before it was restarted.
  if (directory_ == nullptr) return absl::NotFoundError("the server has no --copy-dir");
  CopyFile file{
      .copy = CopyOf(request, request.step()), .track = request.track(), .name = request.file()};
  if (request.has_partition()) file.partition = request.partition();
  EMA_ASSIGN_OR_RETURN(const std::string path, directory_->PathOf(file));
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<RandomAccessFile> opened,
                       directory_->file_system().OpenFile(path));
  v1::ReadCopyResponse response;
  response.set_total_bytes(opened->size_bytes());
  if (request.offset() < 0 || request.offset() >= opened->size_bytes()) return response;
  std::string& data = *response.mutable_data();
  data.resize(std::min(kCopyPieceBytes, opened->size_bytes() - request.offset()));
  EMA_RETURN_IF_ERROR(
      opened->Read(request.offset(), std::as_writable_bytes(std::span(data.data(), data.size()))));
  return response;
}

// --- Files of other members ---

absl::Status PartCopies::ReadFrom(const std::string& address, const CopyFile& file,
                                  absl::FunctionRef<absl::Status(std::string_view)> sink,
                                  const PauseHook& pause) {
  if (address.empty()) {
    return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kGroupDegraded,
                     "the member that has the copy is not in the registry", absl::Seconds(1));
  }
  v1::ReadCopyRequest request = RequestOf(file);
  std::deque<std::shared_ptr<PendingRead>> pending;
  int64_t next = 0;
  int64_t done = 0;
  int64_t total = 1;  // Until the first answer, which has the size.
  while (done < total) {
    for (; pending.size() < kReadsAtOnce && next < total; next += kCopyPieceBytes) {
      request.set_offset(next);
      const auto read = std::make_shared<PendingRead>();
      EMA_RETURN_IF_ERROR(hosted_.StartCalls([&](Peers& peers) {
        peers.ReadCopy(address, request, kReadCopyTimeout, [read](auto response) {
          read->response = std::move(response);
          read->has_ended.Notify();
        });
      }));
      pending.push_back(read);
    }
    pending.front()->has_ended.WaitForNotification();
    EMA_ASSIGN_OR_RETURN(const v1::ReadCopyResponse response, std::move(pending.front()->response));
    pending.pop_front();
    if (done == 0) total = response.total_bytes();
    const auto bytes = static_cast<int64_t>(response.data().size());
    if (response.total_bytes() != total || bytes != std::min(kCopyPieceBytes, total - done)) {
      return CorruptCheckpoint(absl::StrCat("a file of the copy has changed: ", bytes, " of ",
                                            response.total_bytes(), " bytes were read from byte ",
                                            done, " on, and it had ", total, " bytes"));
    }
    done += bytes;
    EMA_RETURN_IF_ERROR(sink(response.data()));
    EMA_RETURN_IF_ERROR(CheckMayContinue(pause));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> PartCopies::ReadTextFrom(const std::string& address,
                                                     const CopyFile& file, const PauseHook& pause) {
  std::string text;
  EMA_RETURN_IF_ERROR(ReadFrom(
      address, file,
      [&](std::string_view piece) {
        text.append(piece);
        return static_cast<int64_t>(text.size()) <= kMaxManifestFileBytes
                   ? absl::OkStatus()
                   : CorruptCheckpoint("manifest.json is too long");
      },
      pause));
  return text;
}

absl::Status PartCopies::FetchFile(const std::string& address, const CopyFile& file,
                                   int64_t file_bytes, const PauseHook& pause) {
  EMA_ASSIGN_OR_RETURN(const std::string path, directory_->PathOf(file));
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> written,
                       directory_->file_system().NewWritableFile(path));
  int64_t written_bytes = 0;
  EMA_RETURN_IF_ERROR(ReadFrom(
      address, file,
      [&](std::string_view piece) {
        written_bytes += static_cast<int64_t>(piece.size());
        if (written_bytes > file_bytes) return CorruptCheckpoint("a file of the copy is too long");
        return written->Append(std::as_bytes(std::span(piece)));
      },
      pause));
  return written->Close();
}

absl::Status PartCopies::FetchManifest(const std::string& address, const CopyId& copy,
                                       const PauseHook& pause) {
  const CopyFile file{.copy = copy};
  EMA_ASSIGN_OR_RETURN(const std::string text, ReadTextFrom(address, file, pause));
  return directory_->WriteText(file, text);
}

absl::Status PartCopies::FetchPart(const std::string& address, const CopyId& copy,
                                   int64_t partition, const PauseHook& pause) {
  const CopyFile manifest{.copy = copy, .partition = partition};
  EMA_ASSIGN_OR_RETURN(const std::string text, ReadTextFrom(address, manifest, pause));
  EMA_ASSIGN_OR_RETURN(const CheckpointManifest part, ParsePartManifest(text));
  EMA_RETURN_IF_ERROR(directory_->MakePartFolders(copy, partition, part));
  for (const CheckpointTrack& track : part.tracks) {
    if (!track.weights.has_value()) continue;
    CopyFile file{.copy = copy, .partition = partition, .track = track.config.name};
    for (const TensorFiles* const files : track.all_files()) {
      for (const TensorFile& one : files->files) {
        file.name = one.name;
        EMA_RETURN_IF_ERROR(FetchFile(address, file, one.file_bytes, pause));
      }
    }
    for (const SmallFile& one : part.attached_files) {
      file.name = one.name;
      EMA_RETURN_IF_ERROR(FetchFile(address, file, one.file_bytes, pause));
    }
  }
  // Last: without it, a part that was fetched in part counts as missing.
  return directory_->WriteText(manifest, text);
}

// --- Loading ---

absl::Status PartCopies::LoadOrFetch(const std::string& model, const ModelRecord& record,
                                     size_t partition, absl::FunctionRef<absl::Status()> load,
                                     absl::FunctionRef<absl::Status(const std::string&)> fetch,
                                     const PauseHook& pause) {
  // Without a checkpoint to return to, the model waits until a person has mended this server.
  const bool has_checkpoint = record.NewestCheckpoint() != nullptr;
  if (directory_ == nullptr) {
    const absl::Status none = GetDirectory().status();
    return has_checkpoint ? LostCopyError(none) : none;
  }
  absl::Status own = load();
  if (own.ok()) return own;
  EMA_RETURN_IF_ERROR(CheckMayContinue(pause));
  const Partition& next = record.partitions[(partition + 1) % record.partitions.size()];
  const absl::Status fetched = fetch(hosted_.AddressOf(next));
  if (!fetched.ok()) {
    EMA_RETURN_IF_ERROR(CheckMayContinue(pause));
    const std::string why = absl::StrCat("here: ", own.message(), "; at member \"", next.member,
                                         "\": ", fetched.message());
    const bool is_lost =
        absl::IsDataLoss(own) && (absl::IsNotFound(fetched) || absl::IsDataLoss(fetched));
    // A member that has not answered may still have the part.
    const bool has_answered = GetErrorReason(fetched) != ErrorReason::kGroupDegraded;
    if (is_lost || (has_checkpoint && has_answered)) {
      return LostCopyError(absl::DataLossError(why));
    }
    return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kGroupDegraded, why,
                     absl::Seconds(1));
  }
  LogTo(log_, LogLevel::kWarning, "copy fetched from another member",
        {{"model", model},
         {"partition", partition},
         {"version", record.copy->id.version},
         {"member", next.member},
         {"reason", own}});
  return load();
}

absl::StatusOr<CheckpointManifest> PartCopies::LoadManifest(const std::string& model,
                                                            const ModelRecord& record,
                                                            size_t partition,
                                                            const PauseHook& pause) {
  const CopyId copy = CopyOf(model, *record.copy);
  absl::StatusOr<CheckpointManifest> whole;
  EMA_RETURN_IF_ERROR(LoadOrFetch(
      model, record, partition,
      [&] {
        whole = directory_->ReadManifest(copy);
        return whole.status();
      },
      [&](const std::string& address) { return FetchManifest(address, copy, pause); }, pause));
  return whole;
}

absl::Status PartCopies::LoadPart(const ModelRecord& record, size_t partition, Model& model,
                                  const PauseHook& pause) {
  const std::string& name = model.config().name;
  const CopyId copy = CopyOf(name, *record.copy);
  const auto index = static_cast<int64_t>(partition);
  std::shared_ptr<Snapshot> snapshot;
  const auto load = [&]() -> absl::Status {
    FileSystem& file_system = directory_->file_system();
    const std::string path = directory_->PartPath(copy, index);
    EMA_ASSIGN_OR_RETURN(const CheckpointManifest part, directory_->ReadPart(copy, index));
    EMA_ASSIGN_OR_RETURN(snapshot, ReadCheckpoint(file_system, path, part, model, pause));
    return model.is_home() ? LoadAttachedFiles(file_system, path, part, model) : absl::OkStatus();
  };
  const auto fetch = [&](const std::string& address) {
    snapshot = nullptr;  // Its memory is needed.
    return FetchPart(address, copy, index, pause);
  };
  EMA_RETURN_IF_ERROR(LoadOrFetch(name, record, partition, load, fetch, pause));
  model.Restore(std::move(snapshot), record.fenced_run_epoch);
  // The copy is not on the disk.
  if (const GroupCheckpoint* const durable = record.NewestCheckpoint(); durable != nullptr) {
    model.durable().SetVersion(durable->id, durable->step, /*settings_revision=*/std::nullopt);
  }
  return absl::OkStatus();
}

absl::Status PartCopies::RemoveUnneeded(const std::map<std::string, ModelRecord>& models) {
  if (directory_ == nullptr) return absl::OkStatus();
  return directory_->RemoveUnneeded([&](const CopyId& copy) {
    const auto record = models.find(copy.model);
    return record != models.end() && MayBeNeeded(record->second, copy.version.version_id());
  });
}

}  // namespace ema::group
