// SPDX-License-Identifier: Apache-2.0
//
// The C++ client: trainers push, evaluators pull. Our only implementation of the protocol; the
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
#include "ema/group_info.h"
#include "ema/manifest.h"
#include "ema/model_info.h"
#include "ema/resume_point.h"
#include "ema/run.h"
#include "ema/schedule.h"
#include "ema/selection.h"
#include "ema/shard.h"
#include "ema/time.h"
#include "ema/track.h"
#include "ema/version_id.h"

namespace ema {

// One tensor of the pulled weights, which are one buffer with the tensors in manifest order.
struct PulledTensor {
  TensorSpec spec;     // With the dtype and shape of the pulled values.
  int64_t offset = 0;  // In the pulled bytes.
  int64_t length_bytes = 0;
  std::vector<int64_t> slice_offsets;  // For a slice: its first element in the tensor.
};
struct PullInfo {
  Version version;
  std::vector<PulledTensor> tensors;
  int64_t total_bytes = 0;     // Size of these tensors.
  int64_t received_bytes = 0;  // Fewer than total_bytes if unchanged bytes were not sent again
                               // (PullOptions::base).
  bool not_newer = false;      // Nothing was pulled: see PullOptions::if_newer_than.
  Lane lane = Lane::kGrpc;     // The lane that carried the last bytes.
};

class VersionWatch;

// A client of one server, or of a group of servers. Thread-safe. Connects on first use. Calls to
// one server share one connection; large pushes may use more (Options::max_connections). For a
// model on a group, runs, pushes and pulls use the servers that have its tensors; most other calls
// go to its home, the server with its first tensors.
//
// In a forked child a Client of the parent must not be used; destroying it there does nothing.
class Client {
 public:
  // PEM files for an address "emas://host:port". Read for each new connection.
  struct Tls {
    std::string ca_file;           // CAs that sign the server's certificate. Empty: the system's.
    std::string certificate_file;  // For a server that asks for a client certificate.
    std::string key_file;          // Key of certificate_file.
  };

  struct Options {
    // The timeout of calls whose `timeout` is zero.
    absl::Duration timeout = absl::Seconds(60);
    // Bytes of a chunk, at most 4 MiB. A chunk of 1 MiB stays in the receiver's cache while it is
    // verified and folded, and needs few messages. Less than 64 KiB suits only a few ranks: see
    // PushChunk in ema_service.proto.
    int64_t chunk_bytes = int64_t{1} << 20;
    // Push and pull through shared memory if the server runs on this host as this user, and offers
    // it. Checksums are then not verified, and chunks have at most 256 KiB. gRPC carries all other
    // calls, and takes over if the shared memory fails.
    bool same_host_lane = true;
    // The maximum number of connections, or of lanes in shared memory, of one push, up to 16. 0:
    // half of this machine's processors, at most 8. A run starts with one, tries more for some
    // large pushes, and keeps them if these are faster.
    int64_t max_connections = 0;
    Tls tls = {};
    // A bearer token for a server that requires one: the token itself, or a file that contains it
    // and is read for each call. Tokens are sent unencrypted unless TLS is used.
    std::string token = {};
    std::string token_file = {};
    // Polled at least every 100 ms by each thread that waits in a call of this client, its runs or
    // its pushes. If it returns true, the call returns CANCELLED (Wait() may be called again), and
    // WaitReleased() continues as if `max_wait` were over. It lets Ctrl-C end a call, for example.
    // Null: calls are not interrupted.
    std::function<bool()> is_interrupted = nullptr;
    // Called once in a call that has been retried for two seconds, on the thread that waits for it,
    // with the last error; retries continue until the call's timeout. May be null. Not called for
    // pushes, nor for a call that is made to several servers of a group at once.
    std::function<void(const absl::Status& error)> on_wait = nullptr;
  };

  // `address`: "host:port" or "[v6]:port", also as "ema://host:port"; over TLS "emas://host:port"
  // or "tls:host:port"; or "unix:/path". The default port is 50051. "ema://host:port,host:port"
  // lists servers of one group: the first one that can be reached is used. Does not connect.
  // INVALID_ARGUMENT: the address has another form; `chunk_bytes` or `max_connections` is out of
  // range; only one of `tls.certificate_file` and `tls.key_file` is given; or the token or its file
  // is not valid, or both are given. The files of `tls` are read when a call connects, so a call
  // reports their errors, and also that there is no server at the address.
  static absl::StatusOr<std::unique_ptr<Client>> Create(std::string_view address);
  static absl::StatusOr<std::unique_ptr<Client>> Create(std::string_view address,
                                                        const Options& options);
  ~Client();  // Runs may outlive it: they keep its connection.
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // All calls block until they end, at most for `timeout`; zero: Options::timeout. Their errors are
  // the server's, with its ErrorReason (ema_service.proto lists them), DEADLINE_EXCEEDED, or
  // UNAVAILABLE if the server cannot be reached.
  //
  // All calls except IsServing(), RebalanceModel(), RestoreCheckpoint() and Drain() are retried
  // until the timeout, after UNAVAILABLE (but not with STORE_READ_ONLY or DISK_FAILED),
  // TOO_MANY_STREAMS, TOO_MANY_PINS, TOO_MANY_CALLS and TOO_MANY_SESSIONS.

  // Returns the result of the server's health check: "" and "ema.v1.EmaService" stand for the whole
  // server, "checkpoints" also for its ability to save. Not retried. NOT_FOUND: no such service, or
  // "checkpoints" on a server without a data directory.
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
  // Describes the group of the server. FAILED_PRECONDITION, BAD_REQUEST: it is in none.
  absl::StatusOr<GroupInfo> GetGroup(absl::Duration timeout = absl::ZeroDuration());

  struct LogLevels {
    std::string before;  // After a retry this may be the new level.
    std::string now;
  };
  // Sets which events the server logs: "debug", "info", "warn" or "error"; empty: no change.
  // INVALID_ARGUMENT, BAD_REQUEST: there is no such level.
  absl::StatusOr<LogLevels> SetLogLevel(std::string_view level,
                                        absl::Duration timeout = absl::ZeroDuration());

  struct DrainResult {
    absl::Duration delay;
    absl::Duration grace;
    bool began = false;  // False: the server was draining already.
  };
  // Drains and stops the server, as ema_service.proto describes. Never retried: after UNAVAILABLE
  // or DEADLINE_EXCEEDED the server may have stopped, and a retry could drain its successor.
  absl::StatusOr<DrainResult> Drain(absl::Duration timeout = absl::ZeroDuration());

  struct CreateModelResult {
    ModelInfo model;
    bool created = false;
  };
  struct ModelOptions {
    // How many different versions readers may hold in the server's memory at once, the newest among
    // them. 0: the server's default.
    int64_t max_pinned_versions = 0;
    NonFinitePolicy non_finite = NonFinitePolicy::kReject;
  };
  // Creates a model and reserves its memory. Repeating the call is OK and changes nothing.
  // INVALID_ARGUMENT: a bad name, tensor or track. A rule that ignores tensors is accepted even if
  // it matches none; CheckRulesMatch() finds misspelled ones. ALREADY_EXISTS, MODEL_DIFFERS.
  // RESOURCE_EXHAUSTED: no memory for the model. FAILED_PRECONDITION, ALL_CHECKPOINTS_CORRUPT: the
  // model is on the server's disk, but all its checkpoints are corrupt; DeleteModel() accepts the
  // loss.
  absl::StatusOr<CreateModelResult> CreateModel(std::string_view model, const Manifest& manifest,
                                                absl::Span<const TrackConfig> tracks,
                                                const ModelOptions& options,
                                                absl::Duration timeout = absl::ZeroDuration());
  absl::StatusOr<CreateModelResult> CreateModel(std::string_view model, const Manifest& manifest,
                                                absl::Span<const TrackConfig> tracks) {
    return CreateModel(model, manifest, tracks, ModelOptions());
  }
  struct ModelChanges {
    std::vector<TrackConfig> put;     // New tracks, and existing ones with a new schedule.
    std::vector<std::string> remove;  // Names of tracks, as are the next two.
    std::vector<std::string> pause;
    std::vector<std::string> resume;
  };
  // Changes the tracks while training runs: all changes or none. They take effect at the next
  // commit or when the next run opens, or at once if no run is open or every track is paused.
  // Averages are kept. INVALID_ARGUMENT: a bad track, a change of which tensors a track has or how
  // it stores them, or, BAD_TIME, a unit of time that the trainer does not count. NOT_FOUND: the
  // model or a track. RESOURCE_EXHAUSTED: no memory for a new track.
  absl::StatusOr<ModelInfo> UpdateModel(std::string_view model, const ModelChanges& changes,
                                        absl::Duration timeout = absl::ZeroDuration());
  // Describes one model. NOT_FOUND: MODEL_NOT_FOUND, or ALL_CHECKPOINTS_CORRUPT.
  absl::StatusOr<ModelInfo> GetModel(std::string_view model,
                                     absl::Duration timeout = absl::ZeroDuration());
  // All models that the token may read, by name, without their tensors and tensor_rules.
  absl::StatusOr<std::vector<ModelInfo>> ListModels(absl::Duration timeout = absl::ZeroDuration());
  // Deletes a model; a model that does not exist is OK. Its pushes and watches end; running pulls
  // finish. Its checkpoints stay on the disk but are not loaded again; `purge` removes them.
  absl::Status DeleteModel(std::string_view model, bool purge = false,
                           absl::Duration timeout = absl::ZeroDuration());

  struct RecoveredModel {
    VersionId base;  // The checkpoint from which the model continues.
    int64_t step = 0;
    int64_t incarnation = 0;  // The new incarnation of the model.
    int64_t checkpoint_count = 0;
    std::vector<std::string> members;  // The servers that have a part of it; the first is its home.
  };
  // For a group of servers whose registry was lost, or was restored from an old backup: rebuilds
  // its record of the model from the checkpoints in its folder. NOT_FOUND, CHECKPOINT_NOT_FOUND.
  // FAILED_PRECONDITION: the registry has the model, and is not older than the folder.
  absl::StatusOr<RecoveredModel> RecoverModel(std::string_view model,
                                              absl::Duration timeout = absl::ZeroDuration());

  struct RebalancedModel {
    bool has_changed = false;          // False: the tensors were there already.
    int64_t incarnation = 0;           // The current incarnation of the model.
    VersionId base;                    // The checkpoint from which the model continues.
    int64_t step = 0;                  // The step of `base`.
    std::vector<std::string> members;  // The servers that have a part of it; the first is its home.
  };
  // For a group of servers: spreads the tensors of a model evenly over the servers that run now,
  // but those in `without`. The newest version is saved first, and trainers skip some steps. If a
  // server in `without` has a part of the model and does not run, the model returns to its newest
  // checkpoint instead. FAILED_PRECONDITION: another server that has a part does not run.
  // RESOURCE_EXHAUSTED, MEMORY_BUDGET: the model does not fit. Never retried: after
  // DEADLINE_EXCEEDED, CANCELLED, REGISTRY_UNAVAILABLE or a broken connection the tensors may have
  // moved, or may still move; GetModel() shows where they are. After other errors nothing has
  // moved.
  absl::StatusOr<RebalancedModel> RebalanceModel(std::string_view model,
                                                 const std::vector<std::string>& without = {},
                                                 absl::Duration timeout = absl::Minutes(10));

  // Attaches a small file, such as config.json, to the model: from the next checkpoint on, each
  // track's folder has a copy. Replaces a file of the same name. At most 64 MiB per file, and 64
  // files. INVALID_ARGUMENT: BAD_NAME, a name like those of weight files; too large; or another
  // client was uploading a file of that name. NOT_FOUND, MODEL_NOT_FOUND. RESOURCE_EXHAUSTED.
  absl::Status AttachFile(std::string_view model, std::string_view name, std::string_view bytes,
                          absl::Duration timeout = absl::ZeroDuration());
  // Reads an attached file; ModelInfo lists them. NOT_FOUND: MODEL_NOT_FOUND, FILE_NOT_FOUND.
  // ABORTED: other clients keep replacing the file during the call.
  absl::StatusOr<std::string> GetAttachedFile(std::string_view model, std::string_view name,
                                              absl::Duration timeout = absl::ZeroDuration());
  // Removes an attached file; a file that does not exist is OK.
  absl::Status RemoveAttachedFile(std::string_view model, std::string_view name,
                                  absl::Duration timeout = absl::ZeroDuration());

  struct ListedVersion {
    Version version;
    bool available = false;  // Its weights can be pulled.
  };
  // The commit records after `after_version` that the server still has, oldest first. NOT_FOUND,
  // MODEL_NOT_FOUND.
  absl::StatusOr<std::vector<ListedVersion>> ListVersions(
      std::string_view model, int64_t after_version = 0,
      absl::Duration timeout = absl::ZeroDuration());

  struct StatisticsOptions {
    VersionId id;                     // All zero: the newest. Incarnation 0: any with that number.
    std::vector<std::string> tracks;  // Empty: all tracks that average a tensor.
  };
  // Returns the record of a version with the statistics of the requested tracks, in their order.
  // The first call for a track computes them, which may take as long as reading the track twice in
  // the server's memory; then they are kept with the record. NOT_FOUND: MODEL_NOT_FOUND,
  // TRACK_NOT_FOUND. INVALID_ARGUMENT: a track averages no tensor. FAILED_PRECONDITION, NO_VERSION.
  // OUT_OF_RANGE: VERSION_NOT_KEPT, even if the version is on the disk; VERSION_NOT_YET.
  // RESOURCE_EXHAUSTED, TOO_MANY_PINS.
  absl::StatusOr<Version> GetStatistics(std::string_view model, const StatisticsOptions& options,
                                        absl::Duration timeout = absl::Minutes(10));
  // For the newest version and all tracks.
  absl::StatusOr<Version> GetStatistics(std::string_view model,
                                        absl::Duration timeout = absl::Minutes(10)) {
    return GetStatistics(model, StatisticsOptions(), timeout);
  }

  // --- Versions on the server's disk. All these calls fail with FAILED_PRECONDITION, NO_DATA_DIR,
  // if the server has no data directory, and with NOT_FOUND, MODEL_NOT_FOUND. Calls that may write
  // or read the bytes of a model have their own default timeout. ---

  struct CheckpointOptions {
    int64_t version = 0;              // 0: the newest.
    int64_t incarnation = 0;          // The incarnation of `version`; 0: any.
    std::vector<std::string> tracks;  // Empty: all. No server starts from a partial checkpoint.
    bool async = false;  // Return as soon as the version is pinned: see GetCheckpoint().
    std::string label;   // A label for the version. Not with `tracks`.
  };
  struct CheckpointResult {
    Version version;
    std::string checkpoint;  // The name to use in the other calls.
    int64_t total_bytes = 0;
    CheckpointInfo::State state = CheckpointInfo::State::kComplete;  // Or kSaving, if `async`.
  };
  // Saves a version; unless `async`, it is on the server's disk when the call returns. OK if it was
  // saved before, but the newest version is saved again if tracks or attached files have changed
  // since.
  // NOT_FOUND, TRACK_NOT_FOUND. FAILED_PRECONDITION, NO_VERSION. OUT_OF_RANGE: VERSION_NOT_KEPT,
  // VERSION_NOT_YET. RESOURCE_EXHAUSTED: DISK_FULL, TOO_MANY_PINS. UNAVAILABLE: STORE_READ_ONLY;
  // DISK_FAILED; CHECKPOINT_IN_USE, the newest checkpoint must be replaced but is being read.
  // UNIMPLEMENTED: the server's file system cannot replace the newest checkpoint. DATA_LOSS,
  // CHECKPOINT_CORRUPT: the data read back differ from the data written.
  absl::StatusOr<CheckpointResult> CreateCheckpoint(std::string_view model,
                                                    const CheckpointOptions& options,
                                                    absl::Duration timeout = absl::Minutes(10));
  // Saves the newest version with all tracks.
  absl::StatusOr<CheckpointResult> CreateCheckpoint(std::string_view model,
                                                    absl::Duration timeout = absl::Minutes(10)) {
    return CreateCheckpoint(model, CheckpointOptions(), timeout);
  }
  // Describes a checkpoint, also if it is being written or could not be written. NOT_FOUND,
  // CHECKPOINT_NOT_FOUND.
  absl::StatusOr<CheckpointInfo> GetCheckpoint(std::string_view model, std::string_view checkpoint,
                                               absl::Duration timeout = absl::ZeroDuration());
  absl::StatusOr<CheckpointList> ListCheckpoints(std::string_view model,
                                                 absl::Duration timeout = absl::ZeroDuration());
  // Deletes a checkpoint; one that does not exist is OK. FAILED_PRECONDITION, CHECKPOINT_IN_USE: it
  // has labels, is the newest, or is being used. UNAVAILABLE, STORE_READ_ONLY or DISK_FAILED.
  absl::Status DeleteCheckpoint(std::string_view model, std::string_view checkpoint,
                                absl::Duration timeout = absl::ZeroDuration());

  // Rolls a model back to the given version (incarnation 0: the newest of that number). One server
  // creates and returns a new version with its content. In a group of servers the given version
  // itself becomes the newest again, and is returned, without `restored_from`. Ends the run; its
  // pushes fail with ABORTED, FENCED, from then on. NOT_FOUND, LABEL_NOT_FOUND. OUT_OF_RANGE,
  // VERSION_NOT_KEPT: the message lists the versions. FAILED_PRECONDITION, PARTIAL_CHECKPOINT.
  // DATA_LOSS, CHECKPOINT_CORRUPT. Never retried: after UNAVAILABLE or DEADLINE_EXCEEDED the model
  // may have been rolled back, and a retry would create one more version.
  absl::StatusOr<Version> RestoreCheckpoint(std::string_view model, const VersionId& id,
                                            absl::Duration timeout = absl::Minutes(10));
  absl::StatusOr<Version> RestoreCheckpoint(std::string_view model, std::string_view label,
                                            absl::Duration timeout = absl::Minutes(10));

  // Puts a label on a version (all zero: the newest), removes it from any other version, and saves
  // the version if it is not on the disk. Retention keeps labelled checkpoints. Errors as
  // CreateCheckpoint().
  absl::StatusOr<CheckpointLabel> SetLabel(std::string_view model, std::string_view label,
                                           const VersionId& id = {},
                                           absl::Duration timeout = absl::Minutes(10));
  // Removes a label; one that does not exist is OK.
  absl::Status RemoveLabel(std::string_view model, std::string_view label,
                           absl::Duration timeout = absl::ZeroDuration());

  struct Metric {
    VersionId id;  // The evaluated version: PullInfo::version.
    double value = 0;
    bool lower_is_better = false;
    std::string label;  // Empty: "best".
  };
  // Reports an evaluator's score: the first score and each better one move the label to their
  // version. INVALID_ARGUMENT: the score is not a number, has another direction than the label's
  // earlier scores, or the label was set by SetLabel(), which keeps it in place until it is
  // removed. RESOURCE_EXHAUSTED: the model has 16 labels that scores move. Other errors as
  // SetLabel().
  absl::StatusOr<MetricResult> ReportMetric(std::string_view model, const Metric& metric,
                                            absl::Duration timeout = absl::Minutes(10));

  struct SynthesizeOptions {
    std::string name;  // The result's name, for Pull().
    // Exactly one of these two is set. half_life is in the unit of the tracks' update_interval.
    std::optional<double> sigma_rel;
    std::string half_life;
    int64_t step = 0;                 // 0: the newest stored step.
    std::vector<std::string> tracks;  // Tracks to use; empty: all that fit together.
  };
  // Builds an average of another length, at any past step, from stored versions of tracks with a
  // snapshot_interval. ema_service.proto describes its accuracy, its lifetime and the errors.
  absl::StatusOr<Synthesis> Synthesize(std::string_view model, const SynthesizeOptions& options,
                                       absl::Duration timeout = absl::Minutes(10));

  struct RunOptions {
    // New for each start of the trainer, the same on all ranks. Empty: a random one, if
    // `world_size` is 1; with more ranks, INVALID_ARGUMENT.
    std::string launch_id;
    int64_t rank = 0;
    int64_t world_size = 1;
    // The shards that this rank pushes. Absent: every tensor as a whole.
    std::optional<std::vector<Shard>> shards;
    // The number of shards of frozen tensors, which come last in `shards`. These tensors change
    // seldom or never during the run: they are pushed until every track on the server has their
    // values. A tensor is frozen on all ranks or on none.
    int64_t frozen_shard_count = 0;
    // kBFloat16: float32 weights are rounded to bfloat16 before they are sent, which halves the
    // bytes; the average is of the rounded values. The same on all ranks.
    WireDtype wire_dtype = WireDtype::kAsPushed;
    // True: a push that the server rejects with FENCED rejoins the run, once, because the server
    // may have restarted and forgotten the run; then it waits until the other ranks have rejoined,
    // too. False: the push fails with ABORTED, FENCED. StepPusher and attach() set false, because a
    // training step must not wait for other ranks.
    //
    // With true and a group of servers, the push sends the whole step again. If WaitReleased() was
    // called before, it cannot: it fails with ABORTED, STEP_ABANDONED, and the next push uses the
    // rejoined run.
    bool rejoins = true;
    // Rolls the model back to the trainer's position before the run opens. The same on all ranks.
    // Ignored when the run rejoins. May take as long as reading the model from the disk; after
    // DEADLINE_EXCEEDED the server continues, and repeating the call joins.
    std::optional<ResumePoint> resume;
    // The Run::run_epoch() of the last run that this launch has opened; 0: none. A restarted server
    // does not know the launches: this shows it whether a newer launch has fenced this one.
    int64_t last_run_epoch = 0;
    // Not 0: the first push of this run, to a model without a version, carries an average that was
    // made elsewhere with this many updates; all tracks continue from it. 0: it carries weights.
    // The same on all ranks.
    int64_t imported_updates = 0;
    // Limit of pinned host memory, in bytes, for weights on GPUs; at least 64 MiB. Allocated at the
    // first push from a GPU, at most as much as the shards that are not frozen need, and kept until
    // the run ends. If the host has less, half as much is tried, and so on down to 64 MiB. If the
    // whole push fits, the weights may change as soon as they have been copied, and bytes lost with
    // a connection are sent again from this memory; otherwise the trainer also waits for the
    // network. May differ between ranks. For a model on a group of servers it is divided among the
    // servers in proportion to their bytes, but each gets at least eight chunks.
    int64_t max_staging_bytes = int64_t{64} << 20;
  };
  // Joins a run. Does not wait for the other ranks: the first push and Run::WaitReady() do.
  // NOT_FOUND, MODEL_NOT_FOUND. ABORTED, FENCED: a newer launch has taken over. INVALID_ARGUMENT:
  // shards do not fit the model or those of other ranks, or `max_staging_bytes` is too small. With
  // `resume`, errors as RestoreCheckpoint(), and FAILED_PRECONDITION, RESUME_MISMATCH: no version
  // matches the trainer's position; the message lists the versions. The model is then unchanged,
  // and no run has been opened.
  absl::StatusOr<std::unique_ptr<Run>> OpenRun(std::string_view model, const RunOptions& options,
                                               absl::Duration timeout = absl::ZeroDuration());

  // At most one of `version`, `label`, `step` and `if_newer_than` may be set.
  struct PullOptions {
    int64_t version = 0;      // 0: the newest.
    int64_t incarnation = 0;  // The incarnation of `version`; 0: any that is kept.
    std::string label;        // Pull the version with this label. NOT_FOUND, LABEL_NOT_FOUND.
    // Pull the version of this trainer step, as PullRequest in ema_service.proto describes.
    // OUT_OF_RANGE: VERSION_NOT_YET, VERSION_NOT_KEPT.
    std::optional<int64_t> step;
    Selection selection;  // Default: the whole track, as the server keeps it.
    // Pull only if the newest version is after this one; otherwise PullInfo::not_newer is set, and
    // the target is not called. A synthesized average is always pulled: it may have been built
    // again.
    std::optional<VersionId> if_newer_than;
    // The target's memory has the result of a pull of the same selection at this version: only the
    // differences are sent, or everything if the server no longer remembers that version.
    std::optional<VersionId> base;
  };
  // Provides the memory for pulled bytes: called with their description, it returns `total_bytes`
  // of memory that stays valid until Pull() returns. Its error ends the pull. Called again if the
  // connection broke and the pull starts over with another version, which can happen when the
  // newest version, a label or a step was requested.
  using PullTarget = std::function<absl::StatusOr<std::span<std::byte>>(const PullInfo&)>;
  // Reads one track of one version, or a part of it. If the connection breaks, the pull continues
  // where it stopped. Checksums of chunks and streams are verified (not through shared memory).
  // After an error the contents of the memory are undefined. Both functions run on the
  // calling thread. `on_progress` may be null; it receives the number of bytes pulled so far, which
  // begins again at 0 if the pull starts over. Errors as of Pull in ema_service.proto; also
  // INVALID_ARGUMENT: the target does not return `total_bytes` of memory; DATA_LOSS: bytes were
  // damaged in transit.
  absl::StatusOr<PullInfo> Pull(std::string_view model, std::string_view track,
                                const PullOptions& options, const PullTarget& target,
                                absl::Duration timeout,
                                const std::function<void(int64_t)>& on_progress = nullptr);

  // Watches the commits after version `after` (absent: from now on; incarnation 0: that number in
  // any incarnation). Each VersionWatch::Next() waits at most for `timeout`. Calls the server only
  // if `after` is absent; errors as GetModel().
  absl::StatusOr<std::unique_ptr<VersionWatch>> Watch(
      std::string_view model, std::optional<VersionId> after,
      absl::Duration timeout = absl::InfiniteDuration());

  class Impl;

 private:
  friend class Run;
  explicit Client(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

// Returns the commits of a model, one at a time. For one thread at a time. May outlive its Client;
// until it is destroyed, it may call the functions in Client::Options. A slow reader gets them
// later, as long as the server keeps their records. If Next() is not called for about a minute, the
// connection may break; the next call reconnects and continues after the last returned commit.
class VersionWatch {
 public:
  ~VersionWatch();  // Ends the watch; does nothing in a forked child.
  VersionWatch(const VersionWatch&) = delete;
  VersionWatch& operator=(const VersionWatch&) = delete;

  struct Item {
    Version version;
    int64_t skipped = 0;  // Number of versions before it whose records were gone.
  };
  // Waits for the next commit. Reconnects by itself and continues after the last item.
  // DEADLINE_EXCEEDED: no commit in time; call again. Other errors end the watch: NOT_FOUND, the
  // model was deleted; CANCELLED, Options::is_interrupted.
  absl::StatusOr<Item> Next();

  class Impl;

 private:
  friend class Client;
  explicit VersionWatch(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

// "saving", "complete", "failed", "corrupt".
std::string_view CheckpointStateName(CheckpointInfo::State state);

}  // namespace ema

#endif  // EMA_CLIENT_H_
