// SPDX-License-Identifier: Apache-2.0
//
// A gRPC server that speaks the contract for one model, simply, and misbehaves as it is told.
#ifndef EMA_TESTS_CLIENT_FAKE_SERVER_H_
#define EMA_TESTS_CLIENT_FAKE_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ema/manifest.h"
#include "ema/shard.h"
#include "ema/v1/ema_service.grpc.pb.h"

namespace ema {

// `status` as a gRPC status with the trailer that the contract promises.
grpc::Status WithDetail(grpc::ServerContext* context, const absl::Status& status);

// Thread-safe.
class FakeServer final : public v1::EmaService::Service {
 public:
  // What one Push call does instead of the right thing. Calls take these in the order in which they
  // come.
  struct PushScript {
    // After the header: ends with this, unless OK.
    absl::Status refuse;
    // After so many chunks: ends with `break_status`. Negative: never.
    int64_t break_after_chunks = -1;
    absl::Status break_status = absl::UnavailableError("the stream broke");
    // Of a chunk with this number: counts it as not arrived, and ends with CHUNK_CORRUPT.
    int64_t corrupt_chunk = -1;
    // After the commit has been applied: the reply is lost.
    bool lose_reply = false;
    // The commit message itself is lost.
    bool lose_commit = false;
    // Waits for Release() before it reads the first chunk, and before it answers.
    bool hold_chunks = false;
    bool hold_reply = false;
  };
  // The same for Pull.
  struct PullScript {
    absl::Status refuse;
    int64_t break_after_chunks = -1;
    int64_t corrupt_chunk = -1;
    bool wrong_digest = false;
    bool wrong_count = false;
    bool skip_chunk = false;
    bool no_trailer = false;
    int64_t commit_time_us = 0;
    bool other_field_order =
        false;  // Of the chunks: right protobuf, but not as chunk_codec.h writes it.
  };
  struct WatchScript {
    std::vector<v1::VersionRecord> versions;
    absl::Status end = absl::UnavailableError("the watch broke");
    bool hold = false;  // After the versions: until the client goes.
  };

  // Listens on a free port of 127.0.0.1.
  explicit FakeServer(Manifest manifest);
  ~FakeServer() override;

  std::string address() const;
  int port() const { return port_; }
  // Stops, forgetting runs and steps if told; Start() listens on the same port again.
  void Stop();
  void Start();
  void ForgetRuns() ABSL_LOCKS_EXCLUDED(mu_);

  // --- What it is to do. Set before the calls that it is for. ---
  std::vector<PushScript> push_scripts;
  std::vector<PullScript> pull_scripts;
  std::vector<WatchScript> watch_scripts;
  std::vector<absl::Status> unary_errors;         // One for each unary call, in order.
  int64_t not_ready_count = 0;                    // So many OpenRun calls say "not ready".
  int64_t world_size = 1;                         // Steps commit when so many ranks have committed.
  bool fenced = false;                            // OpenRun is refused.
  absl::Status open_run_error;                    // Unless OK: OpenRun ends with this.
  bool hold_join = false;                         // OpenRun's reply waits for Release().
  std::optional<uint32_t> committed_digest = {};  // What QueryPush says of it.
  std::function<void(v1::Model&)> edit_model;
  // A server of a group. The first three end a call with their result, unless OK. The step of a
  // push is committed by Publish() only.
  std::function<absl::Status(const v1::OpenRunRequest&)> check_open_run;
  std::function<absl::Status(const v1::PushHeader&)> check_push;
  std::function<absl::Status(const v1::PullRequest&)> check_pull;
  std::function<void(v1::OpenRunResponse&)> edit_open_run;
  std::function<void(v1::PullHeader&)> edit_pull_header;
  std::function<void(int64_t step)> on_complete;    // All ranks with shards have committed.
  std::function<int64_t(int64_t step)> on_abandon;  // Returns the next round.
  std::optional<v1::PushPlan> plan;  // Absent: the track "ema", as it stands at the newest version.
  // What calls about checkpoints answer with, whatever they ask for.
  v1::Checkpoint checkpoint;
  v1::Label label;
  std::string pulled_bytes;
  int64_t pull_chunk_bytes = 1000;
  void Release() ABSL_LOCKS_EXCLUDED(mu_);
  void SetLatest(const v1::VersionRecord& record) ABSL_LOCKS_EXCLUDED(mu_);
  // End a step of a server of a group.
  void Publish(const v1::VersionRecord& record, int64_t next_round) ABSL_LOCKS_EXCLUDED(mu_);
  void AbandonStep(int64_t step) ABSL_LOCKS_EXCLUDED(mu_);

  // --- What has happened. ---
  struct SeenPush {
    v1::PushHeader header;
    std::vector<std::pair<int64_t, int64_t>> chunks;  // Offset and length, as they came.
    bool has_commit = false;
    v1::PushCommit commit;
  };
  std::vector<SeenPush> pushes() const ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until `count` Push calls have sent their header.
  bool AwaitPushes(size_t count) const ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until no Push call runs.
  bool AwaitNoPush() const ABSL_LOCKS_EXCLUDED(mu_);
  // The unary calls that `unary_errors` are for.
  size_t unary_count() const ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<v1::QueryPushRequest> queries() const ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<v1::WatchRequest> watches() const ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<v1::PullRequest> pulls() const ABSL_LOCKS_EXCLUDED(mu_);
  std::vector<v1::OpenRunRequest> open_runs() const ABSL_LOCKS_EXCLUDED(mu_);
  int64_t open_run_count() const ABSL_LOCKS_EXCLUDED(mu_);
  // Calls about checkpoints: the name and the request as text.
  std::vector<std::string> checkpoint_calls() const ABSL_LOCKS_EXCLUDED(mu_);
  // The bytes of a step's rank that have arrived, by offset.
  std::string StepBytes(int64_t step, int64_t rank) const ABSL_LOCKS_EXCLUDED(mu_);
  bool IsCommitted(int64_t step) const ABSL_LOCKS_EXCLUDED(mu_);

  grpc::Status CreateModel(grpc::ServerContext* context, const v1::CreateModelRequest* request,
                           v1::CreateModelResponse* response) override;
  grpc::Status GetModel(grpc::ServerContext* context, const v1::GetModelRequest* request,
                        v1::Model* response) override;
  grpc::Status ListModels(grpc::ServerContext* context, const v1::ListModelsRequest* request,
                          v1::ListModelsResponse* response) override;
  grpc::Status ListVersions(grpc::ServerContext* context, const v1::ListVersionsRequest* request,
                            v1::ListVersionsResponse* response) override;
  grpc::Status OpenRun(grpc::ServerContext* context, const v1::OpenRunRequest* request,
                       v1::OpenRunResponse* response) override;
  grpc::Status Push(grpc::ServerContext* context, grpc::ServerReader<v1::PushRequest>* reader,
                    v1::PushResponse* response) override;
  grpc::Status QueryPush(grpc::ServerContext* context, const v1::QueryPushRequest* request,
                         v1::QueryPushResponse* response) override;
  grpc::Status Pull(grpc::ServerContext* context, const v1::PullRequest* request,
                    grpc::ServerWriter<v1::PullResponse>* writer) override;
  grpc::Status Watch(grpc::ServerContext* context, const v1::WatchRequest* request,
                     grpc::ServerWriter<v1::WatchResponse>* writer) override;
  grpc::Status CreateCheckpoint(grpc::ServerContext* context,
                                const v1::CreateCheckpointRequest* request,
                                v1::CreateCheckpointResponse* response) override;
  grpc::Status GetCheckpoint(grpc::ServerContext* context, const v1::GetCheckpointRequest* request,
                             v1::Checkpoint* response) override;
  grpc::Status ListCheckpoints(grpc::ServerContext* context,
                               const v1::ListCheckpointsRequest* request,
                               v1::ListCheckpointsResponse* response) override;
  grpc::Status DeleteCheckpoint(grpc::ServerContext* context,
                                const v1::DeleteCheckpointRequest* request,
                                v1::Empty* response) override;
  grpc::Status RestoreCheckpoint(grpc::ServerContext* context,
                                 const v1::RestoreCheckpointRequest* request,
                                 v1::VersionRecord* response) override;
  grpc::Status SetLabel(grpc::ServerContext* context, const v1::SetLabelRequest* request,
                        v1::Label* response) override;
  grpc::Status ReportMetric(grpc::ServerContext* context, const v1::ReportMetricRequest* request,
                            v1::ReportMetricResponse* response) override;

 private:
  struct RankBytes {
    std::map<int64_t, std::string> chunks;  // By offset.
    bool committed = false;
  };
  struct Step {
    std::map<int64_t, RankBytes> ranks;
    int64_t committed_count = 0;
    bool abandoned = false;
    v1::VersionRecord record;
  };

  absl::Status TakeUnaryError() ABSL_LOCKS_EXCLUDED(mu_);
  // How many ranks have to commit a step.
  int64_t PushingRanksLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status NoteCheckpointCall(std::string_view name, const google::protobuf::Message& request)
      ABSL_LOCKS_EXCLUDED(mu_);
  v1::PushPlan MakePlan(const v1::VersionRecord& latest) const;
  v1::Model MakeModel() ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status AddChunk(const v1::PushHeader& header, const v1::PushChunk& chunk)
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Commit(const v1::PushHeader& header, const v1::PushCommit& commit,
                      int64_t chunk_count) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status CommitLocked(const v1::PushHeader& header, const v1::PushCommit& commit,
                            int64_t chunk_count, bool* is_complete)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Waits for the step's commit, and answers.
  absl::Status Answer(grpc::ServerContext* context, const v1::PushHeader& header,
                      v1::PushResponse* response) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits for Release(), or the call's end.
  void Hold(grpc::ServerContext* context) ABSL_LOCKS_EXCLUDED(mu_);
  RankLayout Layout(int64_t rank) const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  const Manifest manifest_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;

  mutable absl::Mutex mu_;
  bool is_stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool released_ ABSL_GUARDED_BY(mu_) = false;
  int64_t run_epoch_ ABSL_GUARDED_BY(mu_) = 0;
  std::string launch_id_ ABSL_GUARDED_BY(mu_);
  std::map<int64_t, RankLayout> layouts_ ABSL_GUARDED_BY(mu_);
  std::map<int64_t, Step> steps_ ABSL_GUARDED_BY(mu_);
  v1::VersionRecord latest_ ABSL_GUARDED_BY(mu_);
  int64_t next_round_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<SeenPush> pushes_ ABSL_GUARDED_BY(mu_);
  std::vector<v1::QueryPushRequest> queries_ ABSL_GUARDED_BY(mu_);
  std::vector<v1::WatchRequest> watches_ ABSL_GUARDED_BY(mu_);
  std::vector<v1::PullRequest> pulls_ ABSL_GUARDED_BY(mu_);
  std::vector<v1::OpenRunRequest> open_runs_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> checkpoint_calls_ ABSL_GUARDED_BY(mu_);
  size_t unary_count_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t open_push_count_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace ema

#endif  // EMA_TESTS_CLIENT_FAKE_SERVER_H_
