// SPDX-License-Identifier: Apache-2.0
#include "server/follow/follower.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ema/error_reason.h"
#include "ema/internal/catch_exceptions.h"
#include "ema/internal/status_macros.h"
#include "ema/track.h"

namespace ema {
namespace {

constexpr absl::Duration kAnswerTimeout = absl::Seconds(10);
// The followed server is asked for its tracks this often, and so shows that it can be reached.
constexpr absl::Duration kWatchTime = absl::Seconds(5);
constexpr absl::Duration kRetryDelay = absl::Seconds(1);
// The delay before readers retry while the model cannot be read.
constexpr absl::Duration kReaderRetryDelay = absl::Milliseconds(200);

ModelConfig ConfigOf(const ModelInfo& info) {
  ModelConfig config{.name = info.name,
                     .manifest = std::make_shared<const Manifest>(info.manifest),
                     .tracks = info.tracks,
                     .max_pinned_versions = info.max_pinned_versions,
                     .non_finite = info.non_finite};
  // It needs a data directory, which a follower does not have.
  for (TrackConfig& track : config.tracks) track.snapshot_interval.reset();
  return config;
}

// The changes that turn the first tracks into the second ones.
TrackChanges ChangesBetween(const std::vector<TrackConfig>& before,
                            const std::vector<TrackConfig>& after) {
  const auto find = [](const std::vector<TrackConfig>& tracks, const std::string& name) {
    return std::find_if(tracks.begin(), tracks.end(),
                        [&](const TrackConfig& track) { return track.name == name; });
  };
  TrackChanges changes;
  for (const TrackConfig& track : before) {
    if (find(after, track.name) == after.end()) changes.remove.push_back(track.name);
  }
  for (const TrackConfig& track : after) {
    const auto old = find(before, track.name);
    if (old == before.end() || *old != track) changes.put.push_back(track);
    // A track that is put keeps its pause.
    (track.paused ? changes.pause : changes.resume).push_back(track.name);
  }
  return changes;
}

bool HasTrack(const Version& version, const std::string& name) {
  return std::any_of(version.tracks.begin(), version.tracks.end(),
                     [&](const TrackVersion& track) { return track.track == name; });
}

absl::StatusOr<bool> HasBytes(Device& device, const TrackSnapshot& track, int64_t offset,
                              std::span<const std::byte> bytes) {
  EMA_ASSIGN_OR_RETURN(const std::vector<HostPiece> pieces,
                       ReadTrack(device, track, offset, static_cast<int64_t>(bytes.size())));
  for (const HostPiece& piece : pieces) {
    if (std::memcmp(piece.bytes.data(), bytes.data(), piece.bytes.size()) != 0) return false;
    bytes = bytes.subspan(piece.bytes.size());
  }
  return true;
}

// Bytes that are contiguous in a track and in the result of its pull.
struct ByteRun {
  int64_t offset = 0;  // In the track.
  int64_t pulled_offset = 0;
  int64_t length_bytes = 0;
};

// Finds pulled tensors, which are in the order of the manifest, in the track. A server places them
// as the track does; a pull from a group places the tensors of one server after those of another.
// FAILED_PRECONDITION, MODEL_DIFFERS: they are not the track's.
absl::StatusOr<std::vector<ByteRun>> FindInTrack(const std::vector<PulledTensor>& tensors,
                                                 const Manifest& manifest, const Track& track) {
  const absl::Span<const StorageLayout::Entry> entries = track.layout().entries();
  int64_t missing_count = std::count_if(entries.begin(), entries.end(),
                                        [](const auto& entry) { return entry.is_stored; });
  std::vector<ByteRun> runs;
  for (const PulledTensor& tensor : tensors) {
    const std::optional<int64_t> index = manifest.Find(tensor.spec.name);
    if (!index.has_value()) break;
    const StorageLayout::Entry& entry = entries[*index];
    if (entry.dtype != tensor.spec.dtype || entry.length_bytes != tensor.length_bytes) break;
    --missing_count;
    if (entry.length_bytes == 0) continue;
    if (!runs.empty() && entry.offset - runs.back().offset >= runs.back().length_bytes &&
        entry.offset - runs.back().offset == tensor.offset - runs.back().pulled_offset) {
      runs.back().length_bytes = entry.offset - runs.back().offset + entry.length_bytes;
    } else {
      runs.push_back({entry.offset, tensor.offset, entry.length_bytes});
    }
  }
  if (missing_count == 0) return runs;
  return MakeError(
      absl::StatusCode::kFailedPrecondition, ErrorReason::kModelDiffers,
      absl::StrCat("track \"", track.name(), "\" was replaced after the newest version, which has ",
                   "the track of that name before"));
}

}  // namespace

Follower::Follower(Options options)
    : options_(std::move(options)), url_(absl::StrCat(options_.address, "/", options_.model)) {
  readable_ = MakeError(absl::StatusCode::kUnavailable, ErrorReason::kModelBusy,
                        absl::StrCat(url_, " has not been copied yet"), kReaderRetryDelay);
  last_contact_ = absl::Now();
}

absl::StatusOr<std::unique_ptr<Follower>> Follower::Create(Options options) {
  std::unique_ptr<Follower> follower(new Follower(std::move(options)));
  Client::Options client;
  client.tls = follower->options_.tls;
  client.token_file = follower->options_.token_file;
  client.is_interrupted = [stop = &follower->stop_] { return stop->HasBeenNotified(); };
  client.on_wait = [self = follower.get()](const absl::Status& error) { self->NoteError(error); };
  EMA_ASSIGN_OR_RETURN(follower->client_, Client::Create(follower->options_.address, client));
  return follower;
}

void Follower::Start(std::shared_ptr<ModelStore> store) {
  store_ = std::move(store);
  LogTo(options_.log, LogLevel::kInfo, "following", {{"url", url_}});
  thread_ = std::thread([this] { Run(); });
}

void Follower::Stop() {
  if (!stop_.HasBeenNotified()) stop_.Notify();
  if (thread_.joinable()) thread_.join();
}

void Follower::Run() {
  while (!stop_.HasBeenNotified()) {
    const absl::Status status = CatchExceptions([this] { return Follow(); });
    if (stop_.HasBeenNotified()) return;
    if (status.ok()) continue;
    NoteError(status);
    stop_.WaitForNotificationWithTimeout(kRetryDelay);
  }
}

absl::Status Follower::Follow() {
  const absl::StatusOr<ModelInfo> info = client_->GetModel(options_.model, kAnswerTimeout);
  if (GetErrorReason(info.status()) == ErrorReason::kModelNotFound) {
    NoteContact();
    DeleteModel();
  }
  EMA_RETURN_IF_ERROR(info.status());
  NoteContact();
  const absl::Status copied = Copy(*info);
  const ErrorReason reason = GetErrorReason(copied);
  // The next try begins with the newest version.
  if (reason == ErrorReason::kVersionNotKept || reason == ErrorReason::kTrackNotFound) {
    stop_.WaitForNotificationWithTimeout(kReaderRetryDelay);
    return absl::OkStatus();
  }
  EMA_RETURN_IF_ERROR(copied);
  NoteSuccess();
  return AwaitNext();
}

absl::Status Follower::Copy(const ModelInfo& info) {
  const ModelConfig config = ConfigOf(info);
  const bool is_other = !config_.has_value() || !ChangeTracks(config);
  const std::optional<Version>& version = info.latest;
  const bool must_copy = version.has_value() && (is_other || version->id() != newest_);
  if (must_copy) EMA_RETURN_IF_ERROR(PullTracks(*version, config));
  // Numbers go back if a crash of the followed server has lost its newest versions, if a group has
  // returned to a checkpoint, or if the model was deleted and created again.
  if (is_other || (must_copy && version->number <= newest_.version)) {
    EMA_RETURN_IF_ERROR(CreateModel(config));
  }
  if (must_copy) {
    EMA_ASSIGN_OR_RETURN(const SnapshotRef copy, BuildSnapshot(*version));
    {
      // First, so that a reader of the first version never finds the server unhealthy.
      absl::MutexLock lock(&mu_);
      has_version_ = true;
    }
    model_->PublishCopy(copy);
    newest_ = version->id();
  }
  SetReadable(absl::OkStatus());
  return absl::OkStatus();
}

bool Follower::ChangeTracks(const ModelConfig& config) {
  if (config.DifferenceFrom(*config_).empty()) return true;
  ModelConfig changed = *config_;
  changed.tracks = config.tracks;
  if (!config.DifferenceFrom(changed).empty()) return false;
  if (!model_->UpdateTracks(ChangesBetween(config_->tracks, config.tracks)).ok()) return false;
  config_ = config;
  LogTo(options_.log, LogLevel::kInfo, "tracks changed",
        {{"model", options_.model},
         {"url", url_},
         {"tracks", static_cast<int64_t>(config.tracks.size())}});
  return true;
}

absl::Status Follower::PullTracks(const Version& version, const ModelConfig& config) {
  std::map<std::string, Pulled> before = std::exchange(pulled_, {});
  for (const TrackConfig& track : config.tracks) {
    if (!before.contains(track.name)) continue;
    pulled_.insert(before.extract(track.name));
  }
  // All of them before any is published: the followed server keeps the version at least for as long
  // as it is being pulled, and until some more versions have been committed.
  for (const TrackConfig& track : config.tracks) {
    if (!HasTrack(version, track.name)) continue;  // It has no value yet.
    Pulled& pulled = pulled_[track.name];
    pulled.base = std::exchange(pulled.version, {});
    Client::PullOptions options{.version = version.number, .incarnation = version.incarnation};
    // Another incarnation may have the tensors on other servers, and so other offsets in a pull.
    if (pulled.base.incarnation != version.incarnation) pulled.base = {};
    if (pulled.base != VersionId()) options.base = pulled.base;
    const auto target = [&pulled](const PullInfo& info) -> absl::StatusOr<std::span<std::byte>> {
      pulled.bytes.resize(info.total_bytes);
      return std::span<std::byte>(pulled.bytes);
    };
    EMA_ASSIGN_OR_RETURN(
        PullInfo info, client_->Pull(options_.model, track.name, options, target,
                                     absl::InfiniteDuration(), [this](int64_t) { NoteContact(); }));
    pulled.tensors = std::move(info.tensors);
    pulled.version = version.id();
    pulled.received_bytes = info.received_bytes;
  }
  return absl::OkStatus();
}

absl::Status Follower::CreateModel(const ModelConfig& config) {
  const absl::Status busy =
      MakeError(absl::StatusCode::kUnavailable, ErrorReason::kModelBusy,
                absl::StrCat("model \"", options_.model, "\" is being copied again from ", url_,
                             ": it has other tensors or tracks there, or an earlier version"),
                kReaderRetryDelay);
  SetReadable(busy);
  watch_ = nullptr;
  model_ = nullptr;
  config_.reset();
  newest_ = {};
  const bool is_replaced = store_->Drop(options_.model, busy);
  EMA_ASSIGN_OR_RETURN(ModelStore::CreateResult created,
                       store_->Create(config, GlobBudget::Unlimited()));
  model_ = std::move(created.model);
  config_ = config;
  LogTo(options_.log, LogLevel::kInfo, is_replaced ? "model replaced" : "model created",
        {{"model", options_.model},
         {"url", url_},
         {"tracks", static_cast<int64_t>(config.tracks.size())},
         {"reserved_bytes", model_->tracks().reserved_bytes()}});
  return absl::OkStatus();
}

absl::StatusOr<SnapshotRef> Follower::BuildSnapshot(const Version& version) {
  const auto copy = std::make_shared<Snapshot>();
  copy->record = version;
  // Not evicted meanwhile: only this thread publishes.
  const SnapshotRef base = model_->history().newest();
  for (const TrackRef& track : model_->Describe().tracks) {
    const auto found = pulled_.find(track->name());
    if (found == pulled_.end() || found->second.version != version.id()) continue;
    const Pulled& pulled = found->second;
    const TrackSnapshot* const before = base != nullptr ? base->FindId(track->id()) : nullptr;
    absl::StatusOr<TrackSnapshot> built = BuildTrack(track, pulled, before);
    // The track was replaced after that version, so it has no value yet.
    if (GetErrorReason(built.status()) == ErrorReason::kModelDiffers) continue;
    EMA_RETURN_IF_ERROR(built.status());
    copy->tracks.push_back(*std::move(built));
  }
  return copy;
}

absl::StatusOr<TrackSnapshot> Follower::BuildTrack(const TrackRef& track, const Pulled& pulled,
                                                   const TrackSnapshot* base) {
  // Only pushes need the state of the schedules.
  const size_t schedule_count = SchedulesOf(track->config()).size();
  TrackSnapshot copy{.track = track,
                     .state = TrackState(schedule_count),
                     .last_steps = std::vector<int64_t>(schedule_count)};
  if (base != nullptr && pulled.received_bytes == 0 && pulled.base == newest_) {
    copy.blocks = base->blocks;
    copy.block_versions = base->block_versions;
    return copy;
  }
  EMA_ASSIGN_OR_RETURN(const std::vector<ByteRun> runs,
                       FindInTrack(pulled.tensors, model_->manifest(), *track));
  // Calls `visit(block, offset, bytes)` for each part of a block. `offset`: in the track's bytes.
  const auto for_each_part = [&](auto visit) -> absl::Status {
    for (const ByteRun& run : runs) {
      for (int64_t done = 0, length_bytes = 0; done < run.length_bytes; done += length_bytes) {
        const int64_t offset = run.offset + done;
        const int64_t block = track->FindBlock(offset);
        length_bytes = std::min(run.length_bytes - done, track->block_start(block + 1) - offset);
        const auto bytes = std::span(pulled.bytes).subspan(run.pulled_offset + done, length_bytes);
        EMA_RETURN_IF_ERROR(visit(block, offset, bytes));
      }
    }
    return absl::OkStatus();
  };
  Device& device = model_->device();
  const bool may_share = base != nullptr && pulled.received_bytes < std::ssize(pulled.bytes);
  std::vector<bool> is_shared(track->block_count(), may_share);
  if (may_share) {
    EMA_RETURN_IF_ERROR(for_each_part([&](int64_t block, int64_t offset, auto bytes) {
      if (!is_shared[block]) return absl::OkStatus();
      const absl::StatusOr<bool> is_same = HasBytes(device, *base, offset, bytes);
      is_shared[block] = is_same.value_or(false);
      return is_same.status();
    }));
  }
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<BlocksWriter> writer,
                       BlocksWriter::Create(device, *track));
  EMA_RETURN_IF_ERROR(for_each_part([&](int64_t block, int64_t offset, auto bytes) {
    return is_shared[block] ? absl::OkStatus() : writer->Write(offset, bytes);
  }));
  EMA_ASSIGN_OR_RETURN(copy.blocks, writer->Finish());
  copy.block_versions.assign(track->block_count(), pulled.version.version);
  for (int64_t i = 0; i < track->block_count(); ++i) {
    if (!is_shared[i]) continue;
    copy.blocks[i] = base->blocks[i];
    copy.block_versions[i] = base->block_versions[i];
  }
  return copy;
}

void Follower::DeleteModel() {
  watch_ = nullptr;
  model_ = nullptr;
  config_.reset();
  newest_ = {};
  pulled_.clear();
  if (store_->Delete(options_.model)) {
    LogTo(options_.log, LogLevel::kInfo, "model deleted: the followed server has deleted it",
          {{"model", options_.model}, {"url", url_}});
  }
  SetReadable(absl::OkStatus());
}

absl::Status Follower::AwaitNext() {
  if (watch_ == nullptr) {
    EMA_ASSIGN_OR_RETURN(watch_, client_->Watch(options_.model, newest_, kWatchTime));
  }
  while (true) {
    const absl::StatusOr<VersionWatch::Item> item = watch_->Next();
    if (absl::IsDeadlineExceeded(item.status())) return absl::OkStatus();
    if (!item.ok()) {
      watch_ = nullptr;
      // It was deleted, and may have been created again.
      return GetErrorReason(item.status()) == ErrorReason::kModelNotFound ? absl::OkStatus()
                                                                          : item.status();
    }
    NoteContact();
    // After a slow pull, the watch first returns versions that are older than the copied one.
    if (item->version.id() > newest_) return absl::OkStatus();
  }
}

absl::Status Follower::CheckReadable() const {
  absl::MutexLock lock(&mu_);
  if (readable_.ok() || failure_.ok()) return readable_;
  return MakeError(
      readable_.code(), GetErrorReason(readable_),
      absl::StrCat(std::string(readable_.message()), ": ", std::string(failure_.message())),
      kReaderRetryDelay);
}

absl::Status Follower::CheckHasVersion() const {
  absl::MutexLock lock(&mu_);
  if (has_version_) return absl::OkStatus();
  std::string message = absl::StrCat("no version of ", url_, " has been copied yet");
  if (!failure_.ok()) absl::StrAppend(&message, ": ", std::string(failure_.message()));
  return absl::UnavailableError(message);
}

absl::Time Follower::last_contact() const {
  absl::MutexLock lock(&mu_);
  return last_contact_;
}

void Follower::NoteContact() {
  absl::MutexLock lock(&mu_);
  last_contact_ = absl::Now();
}

void Follower::SetReadable(absl::Status readable) {
  absl::MutexLock lock(&mu_);
  readable_ = std::move(readable);
}

void Follower::NoteError(const absl::Status& error) {
  bool is_first = false;
  {
    absl::MutexLock lock(&mu_);
    is_first = failure_.ok();
    failure_ = error;
  }
  if (is_first) {
    LogTo(options_.log, LogLevel::kWarning,
          "cannot follow; readers keep the versions that have been copied",
          {{"url", url_}, {"error", error}});
  }
}

void Follower::NoteSuccess() {
  {
    absl::MutexLock lock(&mu_);
    if (failure_.ok()) return;
    failure_ = absl::OkStatus();
  }
  LogTo(options_.log, LogLevel::kInfo, "following again", {{"url", url_}});
}

}  // namespace ema
