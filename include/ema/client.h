// SPDX-License-Identifier: Apache-2.0
//
// The C++ client: trainers push, evaluators pull. The only implementation of the protocol; the
// Python package is a thin layer over it.
#ifndef EMA_CLIENT_H_
#define EMA_CLIENT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ema/checkpoint_info.h"
#include "ema/error_reason.h"
#include "ema/manifest.h"
#include "ema/model_info.h"
#include "ema/run.h"
#include "ema/schedule.h"
#include "ema/selection.h"
#include "ema/shard.h"
#include "ema/time.h"
#include "ema/track.h"
#include "ema/version_id.h"

namespace ema {

// Pulled weights: one buffer, tensors in manifest order.
struct PulledTensor {
  TensorSpec spec;     // Its dtype and shape are those of what comes.
  int64_t offset = 0;  // In the pulled bytes.
  int64_t length_bytes = 0;
  std::vector<int64_t> slice_offsets;  // Of a slice: where it begins in the tensor.
};
struct PullInfo {
  Version version;
  std::vector<PulledTensor> tensors;
  int64_t total_bytes = 0;     // Of these tensors.
  int64_t received_bytes = 0;  // Fewer, if the rest was there already.
  bool not_newer = false;      // Nothing was pulled: see PullOptions::if_newer_than.
  Lane lane = Lane::kGrpc;     // That carried the last of them.
};

class VersionWatch;

// A connection to one server. Thread-safe. Connects on first use, by one connection that all calls
// share; large pushes may use more (Options::max_connections).
//
// A process that forks: the child must not use a Client that the parent made; destroying it there
// does nothing.
class Client {
 public:
  // PEM files for an address "emas://host:port". Read whenever a connection is made.
  struct Tls {
    std::string ca_file;           // Signs the server's certificate. Empty: the system's do.
    std::string certificate_file;  // The client's, where the server asks for one.
    std::string key_file;          // Of the client's certificate.
  };

  struct Options {
    // For every call that is not given its own.
    absl::Duration timeout = absl::Seconds(60);
    // Bytes of a chunk, at most 4 MiB. 1 MiB stays in the receiver's cache while it is checked and
    // folded, and costs few messages. Less than 64 KiB suits few ranks only: see PushChunk in
    // ema_service.proto.
    int64_t chunk_bytes = int64_t{1} << 20;
    // Where the server is on this host, of the same user, and offers it: push and pull through
    // memory that the two share, where nobody verifies checksums. gRPC carries everything else, and
    // stands in when that breaks. Chunks are then of at most 256 KiB.
    bool same_host_lane = true;
    // The most connections that one push may use, up to 16. With 0 it is half of this machine's
    // processors, 8 at most. A run begins with one, tries more for some large pushes, and keeps
    // them if these were faster.
    int64_t max_connections = 0;
    // Pushes ask the server where its time has gone: PendingPush::Stats::server_time.
    bool report_timing = false;
    Tls tls = {};
    // A bearer token for a server that asks for one: itself, or a file of it, which is read for
    // each call. It is sent as it is: over a network, use TLS.
    std::string token = {};
    std::string token_file = {};
    // Asked at least every 100 ms by a thread that waits in a call of this client, its runs and
    // pushes; true ends the wait: the call returns CANCELLED (Wait() may be called again), and
    // WaitReleased() goes on as if `max_wait` were over. Null: never. For a Ctrl-C.
    std::function<bool()> is_interrupted = nullptr;
    // Told of a call that has been tried again for two seconds, once in each outage, with its last
    // error, by the thread that waits in it; it goes on until its time-out. Null: nobody. Not of
    // pushes.
    std::function<void(const absl::Status& error)> on_wait = nullptr;
  };

  // `address`: "host:port" or "[v6]:port", also as "ema://host:port", over TLS "emas://host:port"
  // or "tls:host:port", or "unix:/path". Without a port it is 50051. INVALID_ARGUMENT: none of
  // these, an option out of its range, or no token. Does not connect. The first client of a process
  // lets glibc's malloc keep up to 32 MB of freed memory, as any program does that frees an array
  // of 16 MB: receive buffers would else be faulted in again. A program that has set malloc's
  // bounds itself is left alone.
  static absl::StatusOr<std::unique_ptr<Client>> Create(std::string_view address);
  static absl::StatusOr<std::unique_ptr<Client>> Create(std::string_view address,
                                                        const Options& options);
  ~Client();  // Runs may outlive it: they keep its connection.
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // All calls block until their end, at most `timeout`; zero: the one of Options. Their errors are
  // the server's, with its ErrorReason (ema_service.proto says which), or DEADLINE_EXCEEDED, or
  // UNAVAILABLE when there is no server. Calls that change nothing twice (all but Push,
  // RestoreCheckpoint and Drain) are retried on UNAVAILABLE until the time-out, but for
  // STORE_READ_ONLY and DISK_FAILED.

  // What the server's health check says of a service, as a probe asks it: "" and
  // "ema.v1.EmaService" are the whole server, "checkpoints" also whether it can save. Tried once.
  // NOT_FOUND: no such service, or checkpoints without a data directory.
  absl::StatusOr<bool> IsServing(std::string_view service = "",
                                 absl::Duration timeout = absl::ZeroDuration());

  // ema.v1.GetServerInfoResponse says what each field means.
  struct ServerInfo {
    std::string version;
    std::string device;
    int64_t incarnation = 0;
    absl::Time start_time;
    std::string not_serving;
    int64_t memory_budget_bytes = 0;
    int64_t memory_reserved_bytes = 0;
    int64_t memory_used_bytes = 0;
    struct Limit {
      std::string name;
      std::optional<int64_t> in_use;
      int64_t limit = 0;
    };
    std::vector<Limit> limits;
  };
  absl::StatusOr<ServerInfo> GetServerInfo(absl::Duration timeout = absl::ZeroDuration());

  struct LogLevels {
    std::string before;  // After a retry it may be the new one.
    std::string now;
  };
  // Which events the server logs from here on: "debug", "info", "warn", "error"; empty: as they
  // are. INVALID_ARGUMENT, BAD_REQUEST.
  absl::StatusOr<LogLevels> SetLogLevel(std::string_view level,
                                        absl::Duration timeout = absl::ZeroDuration());

  struct DrainResult {
    absl::Duration delay;
    absl::Duration grace;
    bool began = false;  // False: it was draining already.
  };
  // The server drains and ends, as ema_service.proto tells. Never retried: after UNAVAILABLE or
  // DEADLINE_EXCEEDED it may have ended, and who serves there then is another.
  absl::StatusOr<DrainResult> Drain(absl::Duration timeout = absl::ZeroDuration());

  struct CreateModelResult {
    ModelInfo model;
    bool created = false;
  };
  struct ModelOptions {
    int64_t max_pinned_versions = 0;  // 0: the server's default.
    NonFinitePolicy non_finite = NonFinitePolicy::kReject;
  };
  // Makes a model and reserves its memory; the same call again is OK and changes nothing.
  // INVALID_ARGUMENT: a name, tensor or track is refused; but not a rule that ignores and matches
  // nothing, perhaps misspelled: CheckRulesMatch() finds those. ALREADY_EXISTS, MODEL_DIFFERS.
  // RESOURCE_EXHAUSTED: no memory for it. FAILED_PRECONDITION, ALL_CHECKPOINTS_CORRUPT: the model
  // is on the server's disk, and no checkpoint of it is good; DeleteModel() accepts the loss.
  absl::StatusOr<CreateModelResult> CreateModel(std::string_view model, const Manifest& manifest,
                                                absl::Span<const TrackConfig> tracks,
                                                const ModelOptions& options,
                                                absl::Duration timeout = absl::ZeroDuration());
  absl::StatusOr<CreateModelResult> CreateModel(std::string_view model, const Manifest& manifest,
                                                absl::Span<const TrackConfig> tracks) {
    return CreateModel(model, manifest, tracks, ModelOptions());
  }
  struct ModelChanges {
    std::vector<TrackConfig> put;     // New tracks, and those that get another schedule.
    std::vector<std::string> remove;  // Names.
    std::vector<std::string> pause;
    std::vector<std::string> resume;
  };
  // Changes the tracks while training runs, all or nothing: from the next commit on, or at once
  // before the first run, or while every track is paused. What was averaged stays.
  // INVALID_ARGUMENT. NOT_FOUND. RESOURCE_EXHAUSTED.
  absl::StatusOr<ModelInfo> UpdateModel(std::string_view model, const ModelChanges& changes,
                                        absl::Duration timeout = absl::ZeroDuration());
  // What the server has of a model. NOT_FOUND: MODEL_NOT_FOUND, or ALL_CHECKPOINTS_CORRUPT.
  absl::StatusOr<ModelInfo> GetModel(std::string_view model,
                                     absl::Duration timeout = absl::ZeroDuration());
  // All models, by name, without their tensors and tensor_rules.
  absl::StatusOr<std::vector<ModelInfo>> ListModels(absl::Duration timeout = absl::ZeroDuration());
  // Forgets a model; one that is not there is OK. Its pushes and watches end, running pulls finish.
  // Its checkpoints stay on the disk, for nobody to load; `purge` removes them.
  absl::Status DeleteModel(std::string_view model, bool purge = false,
                           absl::Duration timeout = absl::ZeroDuration());

  // Puts a small file, such as config.json, beside the model's weights: checkpoints have it from
  // the next one on, in each track's folder. It takes the place of one of its name. At most 64 MiB,
  // and 64 files. INVALID_ARGUMENT: a name like those of weights' files (BAD_NAME), or too large;
  // or somebody else was sending a file of that name. NOT_FOUND, MODEL_NOT_FOUND.
  // RESOURCE_EXHAUSTED.
  absl::Status AttachFile(std::string_view model, std::string_view name, std::string_view bytes,
                          absl::Duration timeout = absl::ZeroDuration());
  // What has been put there; ModelInfo lists it. NOT_FOUND: MODEL_NOT_FOUND, FILE_NOT_FOUND.
  // ABORTED: somebody keeps putting other bytes there meanwhile.
  absl::StatusOr<std::string> GetAttachedFile(std::string_view model, std::string_view name,
                                              absl::Duration timeout = absl::ZeroDuration());
  // Takes it away; one that is not there is OK.
  absl::Status RemoveFile(std::string_view model, std::string_view name,
                          absl::Duration timeout = absl::ZeroDuration());

  struct ListedVersion {
    Version version;
    bool available = false;
  };
  // The records that the server still has of commits after `after_version`, oldest first.
  // NOT_FOUND, MODEL_NOT_FOUND.
  absl::StatusOr<std::vector<ListedVersion>> ListVersions(
      std::string_view model, int64_t after_version = 0,
      absl::Duration timeout = absl::ZeroDuration());

  struct StatisticsOptions {
    VersionId id;                     // All zero: the newest. Incarnation 0: whichever is kept.
    std::vector<std::string> tracks;  // Empty: all that average a tensor.
  };
  // The record of a version with the statistics that are asked for, in that order. Computed by the
  // first call for a track, which may take as long as reading it in the server's memory twice, then
  // kept with the record. NOT_FOUND: MODEL_NOT_FOUND, TRACK_NOT_FOUND. INVALID_ARGUMENT: a track
  // averages no tensor. FAILED_PRECONDITION, NO_VERSION. OUT_OF_RANGE: VERSION_NOT_KEPT, also of
  // one that is only on the disk; VERSION_NOT_YET. RESOURCE_EXHAUSTED, TOO_MANY_PINS.
  absl::StatusOr<Version> GetStatistics(std::string_view model, const StatisticsOptions& options,
                                        absl::Duration timeout = absl::Minutes(10));
  // Of the newest version, all tracks.
  absl::StatusOr<Version> GetStatistics(std::string_view model,
                                        absl::Duration timeout = absl::Minutes(10)) {
    return GetStatistics(model, StatisticsOptions(), timeout);
  }

  // --- Versions on the server's disk. All calls: FAILED_PRECONDITION, NO_DATA_DIR, where the
  // server has none, and NOT_FOUND, MODEL_NOT_FOUND. Those that may write or read a model's bytes
  // have a time-out of their own. ---

  using CheckpointInfo = ema::CheckpointInfo;
  using Label = CheckpointLabel;

  struct CheckpointOptions {
    int64_t version = 0;              // 0: the newest.
    int64_t incarnation = 0;          // In which `version` was counted; 0: whichever is kept.
    std::vector<std::string> tracks;  // Only these; empty: all. No server starts from a part.
    bool async = false;  // Return as soon as the version is pinned: see GetCheckpoint().
    std::string label;   // That it gets. Not with `tracks`.
  };
  struct CheckpointResult {
    Version version;
    std::string checkpoint;  // The name that the other calls take.
    int64_t total_bytes = 0;
    CheckpointInfo::State state = CheckpointInfo::State::kComplete;  // Or kSaving, if `async`.
  };
  // Saves a version; when it returns, that is on the server's disk, unless `async`. One that is
  // there already is OK; the newest is saved again if tracks or attached files have changed since.
  // NOT_FOUND, TRACK_NOT_FOUND. FAILED_PRECONDITION, NO_VERSION. OUT_OF_RANGE: VERSION_NOT_KEPT,
  // VERSION_NOT_YET. RESOURCE_EXHAUSTED: DISK_FULL, TOO_MANY_PINS. UNAVAILABLE: STORE_READ_ONLY,
  // DISK_FAILED, or CHECKPOINT_IN_USE (the newest, and it is being read). UNIMPLEMENTED: the
  // server's file system cannot put the newest, saved again, in its place. DATA_LOSS,
  // CHECKPOINT_CORRUPT: what was read back is not what was written.
  absl::StatusOr<CheckpointResult> CreateCheckpoint(std::string_view model,
                                                    const CheckpointOptions& options,
                                                    absl::Duration timeout = absl::Minutes(10));
  // The newest version, all tracks.
  absl::StatusOr<CheckpointResult> CreateCheckpoint(std::string_view model,
                                                    absl::Duration timeout = absl::Minutes(10)) {
    return CreateCheckpoint(model, CheckpointOptions(), timeout);
  }
  // Also one that is being written, or could not be. NOT_FOUND, CHECKPOINT_NOT_FOUND.
  absl::StatusOr<CheckpointInfo> GetCheckpoint(std::string_view model, std::string_view checkpoint,
                                               absl::Duration timeout = absl::ZeroDuration());
  struct CheckpointList {
    std::vector<CheckpointInfo> checkpoints;  // Newest first.
    std::vector<Label> labels;                // By name.
  };
  absl::StatusOr<CheckpointList> ListCheckpoints(std::string_view model,
                                                 absl::Duration timeout = absl::ZeroDuration());
  // One that is not there is OK. FAILED_PRECONDITION, CHECKPOINT_IN_USE: it has labels, or is the
  // newest. UNAVAILABLE, STORE_READ_ONLY or DISK_FAILED.
  absl::Status DeleteCheckpoint(std::string_view model, std::string_view checkpoint,
                                absl::Duration timeout = absl::ZeroDuration());

  // Rolls a model back: the new version that it returns is what the given one was (incarnation 0:
  // the newest of that number). Ends the run, whose pushes are ABORTED, FENCED from then on.
  // NOT_FOUND, LABEL_NOT_FOUND. OUT_OF_RANGE, VERSION_NOT_KEPT: the message lists what there is.
  // FAILED_PRECONDITION, PARTIAL_CHECKPOINT. DATA_LOSS, CHECKPOINT_CORRUPT. Never retried: after
  // UNAVAILABLE or DEADLINE_EXCEEDED it may have been done, and a second one makes one more
  // version.
  absl::StatusOr<Version> RestoreCheckpoint(std::string_view model, const VersionId& id,
                                            absl::Duration timeout = absl::Minutes(10));
  absl::StatusOr<Version> RestoreCheckpoint(std::string_view model, std::string_view label,
                                            absl::Duration timeout = absl::Minutes(10));

  // Gives a version (all zero: the newest) a name, which it takes from any other, and saves it if
  // it is not on the disk. Retention keeps what has a label. Errors as CreateCheckpoint.
  absl::StatusOr<Label> SetLabel(std::string_view model, std::string_view label,
                                 const VersionId& id = {},
                                 absl::Duration timeout = absl::Minutes(10));
  // A label that is not there is OK.
  absl::Status RemoveLabel(std::string_view model, std::string_view label,
                           absl::Duration timeout = absl::ZeroDuration());

  struct Metric {
    VersionId id;  // What was evaluated: PullInfo::version.
    double value = 0;
    bool lower_is_better = false;
    std::string label;  // Empty: "best".
  };
  struct MetricResult {
    Label label;         // Where it stands now.
    bool moved = false;  // By this call; after a retry it may be false although it was.
  };
  // An evaluator's score: the first and each better one moves the label to its version.
  // INVALID_ARGUMENT: a score that is no number, another direction than the label's scores before,
  // or a label that SetLabel() has set, which stays until it is removed. RESOURCE_EXHAUSTED: the
  // model has 16 labels that scores move. Other errors as SetLabel.
  absl::StatusOr<MetricResult> ReportMetric(std::string_view model, const Metric& metric,
                                            absl::Duration timeout = absl::Minutes(10));

  struct SynthesizeOptions {
    std::string name;  // What Pull() takes as the track.
    // Of these one must be given. half_life: in the unit of the tracks' update_interval.
    std::optional<double> sigma_rel;
    std::string half_life;
    int64_t step = 0;                 // 0: the newest that is stored.
    std::vector<std::string> tracks;  // To build from; empty: all that fit together.
  };
  struct SynthesizeResult {
    struct Source {
      std::string track;
      int64_t step = 0;
      double weight = 0;
    };
    Version version;
    double residual = 0;
    std::vector<Source> sources;
  };
  // Builds the average of another length, at any past step, from what the server has kept of tracks
  // with a snapshot_interval; ema_service.proto says how near it comes, how long the result lives,
  // and each error.
  absl::StatusOr<SynthesizeResult> Synthesize(std::string_view model,
                                              const SynthesizeOptions& options,
                                              absl::Duration timeout = absl::Minutes(10));

  using ResumePoint = ema::ResumePoint;
  struct RunOptions {
    // New for each life of the trainer, the same on all ranks. Empty: a random one (right for one
    // rank only).
    std::string launch_id;
    int64_t rank = 0;
    int64_t world_size = 1;
    // What this rank pushes. Absent: the whole of every tensor.
    std::optional<std::vector<Shard>> shards;
    // The last so many of these are of frozen tensors, which do not change while the run lasts:
    // they are pushed until the server has their values in every track. A tensor is frozen on all
    // ranks or on none.
    int64_t frozen_shard_count = 0;
    // bfloat16: float32 weights are rounded to it before they are sent, half the bytes; the
    // averages are of what is sent. The same on all ranks.
    WireDtype wire_dtype = WireDtype::kAsPushed;
    // Of a push that the server fences. True: it joins again, once, in case the server was
    // restarted and has forgotten the run, and waits until the other ranks have too. False: it
    // ends, ABORTED, FENCED: for trainers, who must not wait for other ranks.
    bool rejoins = true;
    // The same on all ranks: brings the model back to where the trainer stands, before the run
    // opens. When the run joins again, the model stays as it is. That may take as long as reading
    // the model from the disk; with DEADLINE_EXCEEDED the server goes on with it, and the same call
    // again joins.
    std::optional<ResumePoint> resume;
    // Of a launch that opens its run again: the Run::run_epoch() that it had. By it a server that
    // was restarted, and has forgotten the launches, knows whether a newer one has fenced it.
    int64_t last_run_epoch = 0;
    // What this run pushes first, to a model without a version, is an average of so many updates
    // that was made elsewhere: all tracks go on from it. The same on all ranks. 0: weights.
    int64_t imported_updates = 0;
    // The most pinned host memory, in bytes, that weights on GPUs pass through; at least 64 MiB.
    // Taken at the first push that has some, as much as the shards that are not frozen need at
    // most, and kept until the run ends. If the host has less, half of that is tried, and so on
    // down to 64 MiB. Where all that is pushed fits in, the weights may change as soon as they have
    // been copied, and what a broken connection has lost is sent again from there; else a trainer
    // waits for the network, too. Each rank may have another.
    int64_t max_staging_bytes = int64_t{64} << 20;
  };
  // Joins a run. Does not wait for the other ranks: the first push and Run::WaitReady() do.
  // NOT_FOUND, MODEL_NOT_FOUND. ABORTED, FENCED: a newer launch has taken over. INVALID_ARGUMENT:
  // shards that do not fit the model or the other ranks'; `max_staging_bytes` is too small. With
  // `resume`: FAILED_PRECONDITION, RESUME_MISMATCH: no version stands where the trainer stands, the
  // message lists what there is; and errors as RestoreCheckpoint. The model is then as it was, and
  // no run has been opened.
  absl::StatusOr<std::unique_ptr<Run>> OpenRun(std::string_view model, const RunOptions& options,
                                               absl::Duration timeout = absl::ZeroDuration());

  struct PullOptions {
    int64_t version = 0;      // 0: the newest.
    int64_t incarnation = 0;  // In which `version` was counted; 0: whichever the server keeps.
    std::string label;        // Instead: the version that has it. NOT_FOUND, LABEL_NOT_FOUND.
    // Instead: the version of this step of the trainer, as ema_service.proto tells. OUT_OF_RANGE:
    // VERSION_NOT_YET, VERSION_NOT_KEPT.
    std::optional<int64_t> step;
    Selection selection;  // By default all of the track, as the server keeps it.
    // Only if the newest version is after this one; else PullInfo::not_newer, and no target is
    // asked for. A synthesized average always comes: it may have been built anew.
    std::optional<VersionId> if_newer_than;
    // The target's memory has what a pull of this selection gave of that version: only what differs
    // is sent. If the server does not know it any more, all is.
    std::optional<VersionId> base;
  };
  // Where pulled bytes go: called with what is coming; returns `total_bytes` of memory that
  // stays valid until Pull() returns. An error from it ends the pull. Called again if the newest
  // version, or a label's or step's, was asked for, the connection broke, and that is another one
  // by now.
  using PullTarget = std::function<absl::StatusOr<std::span<std::byte>>(const PullInfo&)>;
  // Reads one track of one version, or a part of it. A pull whose connection breaks goes on where
  // it was. Every chunk's checksum and the digest of each stream are verified; on error the memory
  // holds anything. INVALID_ARGUMENT: a selection that does not fit the track. DATA_LOSS: the bytes
  // were damaged on the way. `on_progress` (may be null) is told the bytes so far.
  absl::StatusOr<PullInfo> Pull(std::string_view model, std::string_view track,
                                const PullOptions& options, const PullTarget& target,
                                absl::Duration timeout,
                                const std::function<void(int64_t)>& on_progress = nullptr);

  // Gives each commit after version `after` (absent: from now on; incarnation 0: that number, in
  // whichever server life) to who asks for it; each VersionWatch::Next() waits for `timeout` at
  // most. Only with `after` absent does it ask the server: errors as GetModel().
  absl::StatusOr<std::unique_ptr<VersionWatch>> Watch(
      std::string_view model, std::optional<VersionId> after,
      absl::Duration timeout = absl::InfiniteDuration());

  class Impl;

 private:
  friend class Run;
  explicit Client(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

// The commits of a model, one at a time. For one thread at a time. Holds its client's connection,
// not the client. A reader that is slow gets them later, as far as the server keeps their records;
// one that asks for none for a minute or so may lose the connection, and no commit by that.
class VersionWatch {
 public:
  ~VersionWatch();  // Ends it; in a forked child it does nothing.
  VersionWatch(const VersionWatch&) = delete;
  VersionWatch& operator=(const VersionWatch&) = delete;

  struct Item {
    Version version;
    int64_t skipped = 0;  // Versions before it whose records were gone.
  };
  // Waits for the next commit. Reconnects by itself and goes on where it was. DEADLINE_EXCEEDED:
  // there was none in time; ask again. Other errors end the watch: NOT_FOUND, the model was
  // deleted; CANCELLED, Options::is_interrupted.
  absl::StatusOr<Item> Next();

  class Impl;

 private:
  friend class Client;
  explicit VersionWatch(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

// "saving", "complete", "failed", "corrupt".
std::string_view CheckpointStateName(Client::CheckpointInfo::State state);

}  // namespace ema

#endif  // EMA_CLIENT_H_
