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

ModelConfig ConfigOf(const ModelInfo& info) {
  ModelConfig config{.name = info.name,
                     .manifest = std::make_shared<const Manifest>(info.manifest),
                     .tracks = info.tracks,
                     .max_pinned_versions = info.max_pinned_versions,
                     .non_finite = info.non_finite};
  // The followed server keeps these versions on its disk. A follower has no disk.
  for (TrackConfig& track : config.tracks) track.snapshot_interval.reset();
  return config;
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

}  // namespace

Follower::Follower(Options options)
    : options_(std::move(options)), url_(absl::StrCat(options_.address, "/", options_.model)) {
  readable_ = MakeError(absl::StatusCode::kUnavailable, ErrorReason::kModelBusy,
                        absl::StrCat(url_, " has not been copied yet"), absl::Milliseconds(200));
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
    if (status.ok()) {
      NoteSuccess();
    } else {
      NoteError(status);
      stop_.WaitForNotificationWithTimeout(kRetryDelay);
    }
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
    return absl::OkStatus();
  }
  EMA_RETURN_IF_ERROR(copied);
  return AwaitNext();
}

absl::Status Follower::Copy(const ModelInfo& info) {
  const ModelConfig config = ConfigOf(info);
  const bool is_other = !config_.has_value() || !config.DifferenceFrom(*config_).empty();
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
    model_->PublishCopy(copy);
    newest_ = version->id();
    absl::MutexLock lock(&mu_);
    has_version_ = true;
  }
  SetReadable(absl::OkStatus());
  return absl::OkStatus();
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
    if (pulled.base != VersionId()) options.base = pulled.base;
    const auto target = [&pulled](const PullInfo& info) -> absl::StatusOr<std::span<std::byte>> {
      pulled.bytes.resize(info.total_bytes);
      return std::span<std::byte>(pulled.bytes);
    };
    EMA_ASSIGN_OR_RETURN(const PullInfo info, client_->Pull(options_.model, track.name, options,
                                                            target, absl::InfiniteDuration(),
                                                            [this](int64_t) { NoteContact(); }));
    pulled.version = version.id();
    pulled.received_bytes = info.received_bytes;
  }
  return absl::OkStatus();
}

absl::Status Follower::CreateModel(const ModelConfig& config) {
  const absl::Status busy =
      MakeError(absl::StatusCode::kUnavailable, ErrorReason::kModelBusy,
                absl::StrCat("model \"", options_.model, "\" is being copied again from ", url_,
                             ": it has ", "other tensors or tracks there, or an earlier version"),
                absl::Milliseconds(200));
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
    // A track that was removed, and added in another form: the version has the removed one.
    if (std::ssize(pulled.bytes) != track->layout().total_bytes()) continue;
    const TrackSnapshot* const before = base != nullptr ? base->FindId(track->id()) : nullptr;
    EMA_ASSIGN_OR_RETURN(TrackSnapshot built, BuildTrack(track, pulled, before));
    copy->tracks.push_back(std::move(built));
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
  Device& device = model_->device();
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<BlocksWriter> writer,
                       BlocksWriter::Create(device, *track));
  const bool may_share = base != nullptr && pulled.received_bytes < std::ssize(pulled.bytes);
  std::vector<int64_t> shared;  // Indices of blocks.
  copy.block_versions.assign(track->block_count(), pulled.version.version);
  for (int64_t i = 0; i < track->block_count(); ++i) {
    const int64_t offset = track->block_start(i);
    const auto bytes = std::span(pulled.bytes).subspan(offset, track->block_size(i));
    bool is_same = false;
    if (may_share) {
      EMA_ASSIGN_OR_RETURN(is_same, HasBytes(device, *base, offset, bytes));
    }
    if (is_same) {
      shared.push_back(i);
    } else {
      EMA_RETURN_IF_ERROR(writer->Write(offset, bytes));
    }
  }
  EMA_ASSIGN_OR_RETURN(copy.blocks, writer->Finish());
  for (const int64_t i : shared) {
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
    // A slow follower has pulled later versions than those that it has yet to be told about.
    if (item->version.id() > newest_) return absl::OkStatus();
  }
}

absl::Status Follower::CheckReadable() const {
  absl::MutexLock lock(&mu_);
  return readable_;
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
