// SPDX-License-Identifier: Apache-2.0
//
// A group of real servers in one process, on loopback, with a registry in memory; and a trainer
// that calls them by plain gRPC.
#ifndef EMA_TESTS_GROUP_GROUP_FIXTURE_H_
#define EMA_TESTS_GROUP_GROUP_FIXTURE_H_

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/manifest.h"
#include "ema/v1/ema_service.grpc.pb.h"
#include "ema/v1/error.pb.h"
#include "server/base/crc32c.h"
#include "server/base/observer.h"
#include "server/base/random_hex.h"
#include "server/checkpoint/checkpoint_manager.h"
#include "server/core/checkpoints.h"
#include "server/format/file_system.h"
#include "server/group/copy_directory.h"
#include "server/group/group_models.h"
#include "server/group/group_saves.h"
#include "server/group/member.h"
#include "server/group/peers.h"
#include "server/rpc/rpc_server.h"
#include "server/wire/convert_types.h"
#include "tests/testutil/memory_registry.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/test_device.h"

namespace ema::group {

// One member of a group.
class GroupServer {
 public:
  struct Options {
    Registry* registry = nullptr;
    std::string name;
    int64_t memory_bytes = int64_t{1} << 28;
    // The memory budget that its record reports; 0: `memory_bytes`.
    int64_t reported_memory_bytes = 0;
    std::string listen_address = "127.0.0.1:0";
    std::string data_dir;  // Empty: no checkpoints.
    // Without a data directory: what calls about checkpoints use. Outlives the server.
    Checkpoints* checkpoints = nullptr;
    SavePolicy policy;
    // Makes the address that other processes connect to; null: the server's own.
    std::function<std::string(int port)> advertise;
    ServerObserver* observer = &ServerObserver::None();  // Outlives the server.
    absl::Duration replace_after;                        // Zero: never.
    std::string copy_dir;                                // Empty: no copies.
    absl::Duration copy_interval = absl::Minutes(1);
    LogSink log;
  };

  explicit GroupServer(const Options& options) : name_(options.name) {
    peers_ = *Peers::Start({});
    if (!options.data_dir.empty()) OpenCheckpoints(options);
    if (!options.copy_dir.empty()) {
      copies_ = *CopyDirectory::Open(PosixFileSystem(), options.copy_dir, "g", options.name);
    }
    ModelStore::Options store;
    store.memory_bytes = options.memory_bytes;
    store.model.has_data_dir = checkpoints_ != nullptr;
    store.model.on_commit = [this](const std::shared_ptr<Model>& model, const Snapshot& version) {
      if (checkpoints_ != nullptr && model->is_home()) checkpoints_->OnCommit(model, version);
    };
    store_ = std::make_shared<ModelStore>(NewTestDevice(int64_t{16} << 20), store);
    CheckpointStore* const stored = checkpoints_ != nullptr ? &checkpoints_->store() : nullptr;
    models_ =
        std::make_unique<GroupModels>(store_.get(), peers_.get(),
                                      GroupModels::Options{.replace_after = options.replace_after,
                                                           .checkpoints = stored,
                                                           .copies = copies_.get(),
                                                           .copy_interval = options.copy_interval,
                                                           .log = options.log});
    RpcServer::Options rpc;
    rpc.listen_addresses = {options.listen_address};
    rpc.group = models_.get();
    rpc.observer = options.observer;
    Checkpoints* served = options.checkpoints != nullptr ? options.checkpoints : &no_checkpoints_;
    if (checkpoints_ != nullptr) served = checkpoints_.get();
    rpc_ = *RpcServer::Start(store_, served, rpc);
    address_ = absl::StrCat("127.0.0.1:", rpc_->port());
    const int64_t memory_bytes =
        options.reported_memory_bytes > 0 ? options.reported_memory_bytes : options.memory_bytes;
    const std::string advertised = options.advertise ? options.advertise(rpc_->port()) : address_;
    member_ = *Member::Join({.group = "g",
                             .name = options.name,
                             .record = {.boot = RandomHex(4),
                                        .address = advertised,
                                        .device = "cpu",
                                        .memory_budget_bytes = memory_bytes,
                                        .program_version = "test",
                                        .protocol = 1},
                             .registry = options.registry});
    if (stored != nullptr) saves_.Start(models_.get(), stored);
    models_->Start(member_.get());
  }
  ~GroupServer() { Stop(); }

  // The other servers see a crash: the member's key expires after its TTL.
  void Stop() {
    if (member_ == nullptr) return;
    store_->Drain(SteadyNow());
    rpc_->Shutdown(SteadyNow());
    saves_.Stop();
    models_->Stop();
    member_ = nullptr;
    store_->Close();
    peers_->Stop();
    checkpoints_ = nullptr;
  }

  // Ends all calls, and accepts no others; the member remains in the registry.
  void StopListening() { rpc_->Shutdown(SteadyNow()); }

  const std::string& address() const { return address_; }
  ModelStore& store() { return *store_; }
  Member& member() { return *member_; }
  GroupModels& models() { return *models_; }
  CheckpointManager& checkpoints() { return *checkpoints_; }
  const std::string& name() const { return name_; }

 private:
  void OpenCheckpoints(const Options& options) {
    CheckpointManager::Options checkpoints;
    checkpoints.store.data_dir = options.data_dir;
    checkpoints.store.member = options.name;
    checkpoints.store.partitions = &saves_;
    checkpoints.policy = options.policy;
    checkpoints_ = *CheckpointManager::Open(PosixFileSystem(), checkpoints);
  }

  const std::string name_;
  std::unique_ptr<Peers> peers_;  // Outlives the models, whose gates use it.
  GroupSaves saves_;
  Checkpoints no_checkpoints_;
  std::unique_ptr<CheckpointManager> checkpoints_;  // Null without a data directory.
  std::unique_ptr<CopyDirectory> copies_;           // Null without copies.
  std::shared_ptr<ModelStore> store_;
  std::unique_ptr<GroupModels> models_;
  std::unique_ptr<RpcServer> rpc_;
  std::string address_;
  std::unique_ptr<Member> member_;
};

struct GroupCall {
  grpc::Status status;
  v1::ErrorDetail detail;

  bool ok() const { return status.ok(); }
};

inline GroupCall ResultOf(const grpc::Status& status, const grpc::ClientContext& context) {
  GroupCall result{status, {}};
  const auto& trailers = context.GetServerTrailingMetadata();
  if (const auto it = trailers.find(kErrorDetailKey); it != trailers.end()) {
    result.detail.ParseFromArray(it->second.data(), static_cast<int>(it->second.size()));
  }
  return result;
}

// Repeats `call`, which returns a GroupCall, while it fails because something is not ready yet, or
// because its connection has been cut.
template <typename Call>
GroupCall RetryBusy(Call call) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (true) {
    GroupCall result = call();
    const bool is_cut = result.status.error_code() == grpc::StatusCode::UNAVAILABLE &&
                        result.detail.reason() == v1::ERROR_REASON_UNSPECIFIED;
    const bool is_busy = is_cut || result.detail.reason() == v1::ERROR_REASON_MODEL_BUSY ||
                         result.detail.reason() == v1::ERROR_REASON_RUN_INCOMPLETE;
    if (result.ok() || !is_busy || std::chrono::steady_clock::now() > deadline) return result;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

// The only rank of a launch of a model, which has all of its tensors.
class GroupTrainer {
 public:
  GroupTrainer(std::string model, std::string launch_id)
      : model_(std::move(model)), launch_id_(std::move(launch_id)) {}

  static std::unique_ptr<v1::EmaService::Stub> StubOf(const std::string& address) {
    return v1::EmaService::NewStub(
        grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  }

  // A model with tensors "t0", "t1", ... of (i + 1) * 100 elements, an average and a copy.
  static v1::CreateModelRequest CreateRequest(const std::string& model, int tensor_count = 6) {
    v1::CreateModelRequest request;
    request.set_model(model);
    for (int i = 0; i < tensor_count; ++i) {
      v1::TensorSpec& tensor = *request.mutable_manifest()->add_tensors();
      tensor.set_name(absl::StrCat("t", i));
      tensor.set_dtype(v1::DTYPE_FLOAT32);
      tensor.add_shape((i + 1) * 100);
    }
    v1::Track* track = request.add_tracks();
    track->set_name("ema");
    (*track->mutable_schedule())["half_life"] = "2ba";
    // It matches nothing in most partitions.
    v1::TensorRule& rule = *track->add_tensor_rules();
    rule.set_pattern("t0");
    rule.set_action(v1::TENSOR_ACTION_COPY);
    track = request.add_tracks();
    track->set_name("raw");
    (*track->mutable_schedule())["copy"] = "true";
    return request;
  }
  static GroupCall Create(const std::string& address, const v1::CreateModelRequest& request,
                          v1::CreateModelResponse* response) {
    grpc::ClientContext context;
    const grpc::Status status = StubOf(address)->CreateModel(&context, request, response);
    return ResultOf(status, context);
  }
  static GroupCall Get(const std::string& address, const std::string& model, v1::Model* response) {
    v1::GetModelRequest request;
    request.set_model(model);
    grpc::ClientContext context;
    const grpc::Status status = StubOf(address)->GetModel(&context, request, response);
    return ResultOf(status, context);
  }

  // Opens the run at all partitions of `model`.
  void OpenRun(const v1::Model& model) {
    described_ = model;
    parts_.clear();
    std::vector<v1::Partition> partitions(model.partitions().begin(), model.partitions().end());
    if (partitions.empty()) FAIL() << "the model has no partitions";
    for (const v1::Partition& partition : partitions) {
      Part part;
      part.stub = StubOf(partition.address());
      std::vector<TensorSpec> tensors;
      for (int64_t i = 0; i < partition.tensor_count(); ++i) {
        tensors.push_back(*ema::FromProto(
            model.manifest().tensors(static_cast<int>(partition.first_tensor() + i))));
      }
      part.manifest = *Manifest::Create(std::move(tensors));
      parts_.push_back(std::move(part));
    }
    for (size_t i = 0; i < parts_.size(); ++i) {
      v1::OpenRunResponse response;
      const GroupCall result = OpenRunAt(i, &response);
      ASSERT_TRUE(result.ok()) << result.status.error_message();
      if (i == 0) {
        run_epoch_ = response.run_epoch();
        round_ = response.round();
      }
      parts_[i].layout_digest = response.layout_digest();
      EXPECT_EQ(response.run_epoch(), run_epoch_);
    }
    // Round 0 lasts until all partitions have joined.
    while (round_ == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      v1::OpenRunResponse response;
      ASSERT_TRUE(OpenRunAt(0, &response).ok());
      round_ = response.round();
    }
  }
  GroupCall OpenRunAt(size_t partition, v1::OpenRunResponse* response) const {
    const Part& part = parts_[partition];
    v1::OpenRunRequest request;
    request.set_model(model_);
    request.set_launch_id(launch_id_);
    request.set_world_size(1);
    request.set_manifest_digest(part.manifest.digest());
    for (int64_t i = 0; i < part.manifest.tensor_count(); ++i) {
      v1::Shard& shard = *request.mutable_layout()->add_shards();
      shard.set_tensor_index(i);
      shard.add_offsets(0);
      shard.add_extents(part.manifest.tensor(i).shape[0]);
    }
    if (partition > 0) {
      request.set_run_epoch(run_epoch_);
      request.set_incarnation(described_.incarnation());
    }
    return RetryBusy([&] {
      grpc::ClientContext context;
      const grpc::Status status = part.stub->OpenRun(&context, request, response);
      return ResultOf(status, context);
    });
  }

  struct Pushed {
    GroupCall result;
    v1::PushResponse response;
  };
  // Pushes to one partition: every element has that value.
  std::future<Pushed> Push(size_t partition, int64_t step, float value) const {
    return std::async(std::launch::async, [this, partition, step, value, round = round_] {
      Pushed pushed;
      pushed.result =
          RetryBusy([&] { return PushOnce(partition, step, value, round, &pushed.response); });
      return pushed;
    });
  }
  std::vector<Pushed> PushAll(int64_t step, float value) {
    std::vector<std::future<Pushed>> running;
    for (size_t i = 0; i < parts_.size(); ++i) running.push_back(Push(i, step, value));
    std::vector<Pushed> pushed;
    for (auto& of : running) pushed.push_back(of.get());
    if (pushed[0].result.ok()) round_ = pushed[0].response.round();
    return pushed;
  }

  GroupCall Query(size_t partition, int64_t step, bool abandon, int64_t round,
                  v1::QueryPushResponse* response) const {
    v1::QueryPushRequest request;
    request.set_model(model_);
    request.set_run_epoch(run_epoch_);
    request.set_step(step);
    request.set_abandon_if_unfinished(abandon);
    request.set_round(round);
    grpc::ClientContext context;
    const grpc::Status status = parts_[partition].stub->QueryPush(&context, request, response);
    return ResultOf(status, context);
  }

  struct Pulled {
    GroupCall result;
    v1::VersionRecord record;
    std::string data;
  };
  // Version 0: the newest.
  Pulled Pull(size_t partition, const std::string& track, int64_t version = 0) const {
    v1::PullRequest request;
    request.set_model(model_);
    request.set_track(track);
    request.set_version(version);
    request.set_partition_only(true);
    request.set_incarnation(described_.incarnation());
    grpc::ClientContext context;
    const auto reader = parts_[partition].stub->Pull(&context, request);
    Pulled pulled;
    v1::PullResponse response;
    while (reader->Read(&response)) {
      if (response.has_header()) pulled.record = response.header().version();
      if (response.has_chunk()) pulled.data += response.chunk().data();
    }
    const grpc::Status status = reader->Finish();
    pulled.result = ResultOf(status, context);
    return pulled;
  }

  size_t partition_count() const { return parts_.size(); }
  int64_t round() const { return round_; }
  void set_round(int64_t round) { round_ = round; }
  int64_t run_epoch() const { return run_epoch_; }
  const v1::Model& described() const { return described_; }

 private:
  struct Part {
    std::unique_ptr<v1::EmaService::Stub> stub;
    Manifest manifest;
    int64_t layout_digest = 0;
  };

  GroupCall PushOnce(size_t partition, int64_t step, float value, int64_t round,
                     v1::PushResponse* response) const {
    const Part& part = parts_[partition];
    std::string data(static_cast<size_t>(part.manifest.total_bytes()), '\0');
    for (size_t i = 0; i < data.size(); i += sizeof(value)) {
      std::memcpy(data.data() + i, &value, sizeof(value));
    }
    const uint32_t crc = Crc32c(0, std::as_bytes(std::span(data.data(), data.size())));
    v1::PushRequest header;
    header.mutable_header()->set_model(model_);
    header.mutable_header()->set_run_epoch(run_epoch_);
    header.mutable_header()->set_layout_digest(part.layout_digest);
    header.mutable_header()->set_step(step);
    header.mutable_header()->mutable_time()->set_batch(step);
    header.mutable_header()->set_incarnation(described_.incarnation());
    header.mutable_header()->set_round(round);
    v1::PushRequest chunk;
    chunk.mutable_chunk()->set_crc32c(crc);
    chunk.mutable_chunk()->set_data(data);
    v1::PushRequest commit;
    commit.mutable_commit()->set_chunk_count(1);
    commit.mutable_commit()->set_total_bytes(static_cast<int64_t>(data.size()));
    commit.mutable_commit()->set_digest(crc);
    grpc::ClientContext context;
    const auto writer = part.stub->Push(&context, response);
    if (writer->Write(header) && writer->Write(chunk) && writer->Write(commit)) {
      writer->WritesDone();
    }
    const grpc::Status status = writer->Finish();
    return ResultOf(status, context);
  }

  const std::string model_;
  const std::string launch_id_;
  v1::Model described_;
  std::vector<Part> parts_;
  int64_t run_epoch_ = 0;
  int64_t round_ = 0;
};

// Expects that all partitions have committed the same version.
inline void ExpectCommitted(const std::vector<GroupTrainer::Pushed>& pushed, int64_t step,
                            int64_t version) {
  for (const GroupTrainer::Pushed& of : pushed) {
    ASSERT_TRUE(of.result.ok()) << of.result.status.error_message();
    const v1::VersionRecord& record = of.response.version();
    EXPECT_EQ(record.step(), step);
    EXPECT_EQ(record.version(), version);
    EXPECT_EQ(record.incarnation(), pushed[0].response.version().incarnation());
    EXPECT_EQ(record.commit_time_us(), pushed[0].response.version().commit_time_us());
  }
}

class GroupFixture : public testing::Test {
 protected:
  void StartServers(int count) {
    for (int i = 0; i < count; ++i) {
      StartServer({.name = absl::StrCat("ema-", i),
                   .reported_memory_bytes = reported_memory_bytes_,
                   .data_dir = data_dir_,
                   .policy = policy_,
                   .replace_after = replace_after_,
                   .copy_dir = copy_dir_,
                   .copy_interval = copy_interval_,
                   .log = log_});
    }
    AwaitMembers();
  }
  // Starts a server again, which has been stopped, at the same address.
  void Restart(GroupServer& stopped) {
    for (std::unique_ptr<GroupServer>& server : servers_) {
      if (server.get() != &stopped) continue;
      const GroupServer::Options options{.registry = &registry_,
                                         .name = stopped.name(),
                                         .listen_address = stopped.address(),
                                         .data_dir = data_dir_,
                                         .policy = policy_,
                                         .copy_dir = copy_dir_,
                                         .copy_interval = copy_interval_,
                                         .log = log_};
      server = nullptr;
      server = std::make_unique<GroupServer>(options);
      return;
    }
  }
  void StartServer(GroupServer::Options options) {
    options.registry = &registry_;
    servers_.push_back(std::make_unique<GroupServer>(options));
  }
  // Each server sees all others.
  void AwaitMembers() {
    for (const auto& server : servers_) {
      Await([&] { return server->member().members().size() == servers_.size(); });
    }
  }
  static void Await(const std::function<bool()>& is_true) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    bool was_true = is_true();
    while (!was_true && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      was_true = is_true();
    }
    EXPECT_TRUE(was_true);
  }
  // Waits until a partition has received the whole step.
  static void AwaitReceived(const GroupTrainer& trainer, size_t partition, int64_t step) {
    Await([&] {
      v1::QueryPushResponse response;
      return trainer.Query(partition, step, /*abandon=*/false, 0, &response).ok() &&
             response.rank_committed();
    });
  }
  // Creates the model at a server, and returns its home's description.
  v1::Model Create(const std::string& name = "m", size_t server = 0, int tensor_count = 6) {
    const v1::CreateModelRequest request = GroupTrainer::CreateRequest(name, tensor_count);
    v1::CreateModelResponse response;
    const GroupCall result = RetryBusy(
        [&] { return GroupTrainer::Create(servers_[server]->address(), request, &response); });
    EXPECT_TRUE(result.ok() || result.detail.reason() == v1::ERROR_REASON_NOT_HOME)
        << result.status.error_message();
    return Describe(name);
  }
  // Waits until all partitions have been loaded.
  v1::Model Describe(const std::string& name) {
    v1::Model model;
    Await([&] {
      return std::any_of(servers_.begin(), servers_.end(), [&](const auto& server) {
        return RetryBusy([&] { return GroupTrainer::Get(server->address(), name, &model); }).ok();
      });
    });
    return model;
  }
  GroupServer& ServerAt(const std::string& address) {
    for (const auto& server : servers_) {
      if (server->address() == address) return *server;
    }
    ADD_FAILURE() << "no server has the address " << address;
    return *servers_[0];
  }

  // Of servers that are started later; empty: none.
  std::string data_dir_;
  SavePolicy policy_;
  int64_t reported_memory_bytes_ = 0;
  absl::Duration replace_after_;
  std::string copy_dir_;
  absl::Duration copy_interval_ = absl::Minutes(1);
  LogSink log_;
  MemoryRegistry registry_;  // Outlives the servers.
  std::vector<std::unique_ptr<GroupServer>> servers_;
};

}  // namespace ema::group

#endif  // EMA_TESTS_GROUP_GROUP_FIXTURE_H_
