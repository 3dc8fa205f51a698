// SPDX-License-Identifier: Apache-2.0
//
// Copies one model of another server, so that this one serves its readers.
#ifndef EMA_SERVER_FOLLOW_FOLLOWER_H_
#define EMA_SERVER_FOLLOW_FOLLOWER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "ema/client.h"
#include "ema/model_info.h"
#include "ema/version_id.h"
#include "server/base/log_event.h"
#include "server/core/model.h"
#include "server/core/model_config.h"
#include "server/core/model_store.h"
#include "server/core/snapshot.h"

namespace ema {

// Keeps a copy of the newest version of a model: a thread watches the followed server, or group of
// servers, and pulls all tracks of a version into host memory. Then it publishes them together in
// the local model, with the record of the original. Versions that are committed during such a pull
// are skipped, except the newest. The local model's tracks change when the original's do. It is
// created again, empty, if that is not possible, if the original has other tensors, or if its
// version numbers have gone back. It is deleted when the original is.
//
// While the followed server does not answer, the copy stays, and the calls to it are retried.
//
// Thread-safe, except Start() and Stop(). Beside the memory of the local model, a follower needs
// host memory for one version.
class Follower {
 public:
  struct Options {
    std::string address;  // Of the followed server, as Client::Create() takes it.
    std::string model;
    // As Client::Options; empty: none.
    Client::Tls tls;
    std::string token_file;
    LogSink log;
  };

  // Does not connect. INVALID_ARGUMENT: as Client::Create().
  static absl::StatusOr<std::unique_ptr<Follower>> Create(Options options);
  ~Follower() { Stop(); }

  // Starts to copy into `store`. Call once.
  void Start(std::shared_ptr<ModelStore> store);
  // Ends the thread. The copied model stays. Idempotent.
  void Stop();

  // The URL of the followed model.
  const std::string& url() const { return url_; }
  // OK: reads of the local model give what the original has, even if that is no version or no
  // model. UNAVAILABLE, MODEL_BUSY: this is not known yet, or the local model is being created; the
  // message has the last error of the followed server, if there is one.
  absl::Status CheckReadable() const ABSL_LOCKS_EXCLUDED(mu_);
  // OK: a version has been copied since the start. UNAVAILABLE: not yet; the message says why.
  absl::Status CheckHasVersion() const ABSL_LOCKS_EXCLUDED(mu_);
  // When the followed server last answered; if it never has, the time of Create().
  absl::Time last_contact() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // The bytes of one track as the last pull has left them.
  struct Pulled {
    std::vector<std::byte> bytes;
    std::vector<PulledTensor> tensors;
    VersionId version;  // All zero: the pull has not finished.
    // The version whose bytes were here before the pull, which received only the differences. All
    // zero: the pull received all bytes.
    VersionId base;
    int64_t received_bytes = 0;
  };

  explicit Follower(Options options);

  void Run();
  // Brings the copy up to date, and waits for the next version.
  absl::Status Follow();
  // Makes the local model a copy of the original, which is described by `info`. OUT_OF_RANGE: the
  // version is no longer kept there.
  absl::Status Copy(const ModelInfo& info);
  // Gives the local model the tracks of `config`, and keeps its versions. False: more than the
  // tracks differ, or a track in a way that Model::UpdateTracks() rejects. REQUIRES: there is a
  // local model.
  bool ChangeTracks(const ModelConfig& config);
  absl::Status PullTracks(const Version& version, const ModelConfig& config);
  // Replaces the local model by an empty one.
  absl::Status CreateModel(const ModelConfig& config);
  // Makes a version of the local model from the pulled tracks.
  absl::StatusOr<SnapshotRef> BuildSnapshot(const Version& version);
  // `base`: the same track in the newest version of the local model; null: it has none.
  absl::StatusOr<TrackSnapshot> BuildTrack(const TrackRef& track, const Pulled& pulled,
                                           const TrackSnapshot* base);
  void DeleteModel();
  // Waits until the followed server has a version after `newest_`, or for a few seconds.
  absl::Status AwaitNext();

  // Records that the followed server has answered.
  void NoteContact() ABSL_LOCKS_EXCLUDED(mu_);
  void SetReadable(absl::Status readable) ABSL_LOCKS_EXCLUDED(mu_);
  // Logs the first error of an outage.
  void NoteError(const absl::Status& error) ABSL_LOCKS_EXCLUDED(mu_);
  // Logs the end of an outage.
  void NoteSuccess() ABSL_LOCKS_EXCLUDED(mu_);

  const Options options_;
  const std::string url_;
  absl::Notification stop_;
  std::unique_ptr<Client> client_;     // Constant after Create().
  std::shared_ptr<ModelStore> store_;  // Constant after Start().

  // Only on the thread.
  std::optional<ModelConfig> config_;     // Of the local model. Absent: there is none.
  std::shared_ptr<Model> model_;          // Null: there is none.
  VersionId newest_;                      // The local model's; all zero: none.
  std::map<std::string, Pulled> pulled_;  // By track.
  std::unique_ptr<VersionWatch> watch_;   // Null: to be opened, after `newest_`.

  mutable absl::Mutex mu_;
  absl::Status readable_ ABSL_GUARDED_BY(mu_);
  absl::Time last_contact_ ABSL_GUARDED_BY(mu_);
  absl::Status failure_ ABSL_GUARDED_BY(mu_);  // Of the current outage; OK: there is none.
  bool has_version_ ABSL_GUARDED_BY(mu_) = false;

  std::thread thread_;  // Last: it uses the others.
};

}  // namespace ema

#endif  // EMA_SERVER_FOLLOW_FOLLOWER_H_
