// SPDX-License-Identifier: Apache-2.0
//
// The calls about checkpoints, labels and resuming, over gRPC and a real folder.
#include <atomic>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/checkpoint/checkpoint_manager.h"
#include "tests/rpc/rpc_fixture.h"

namespace ema {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CheckpointCallsTest : public RpcFixture {
 protected:
  void SetUp() override {
    directory_ = testing::TempDir() + "/ema_calls_XXXXXX";
    ASSERT_NE(mkdtemp(directory_.data()), nullptr);
    CheckpointManager::Options options;
    options.store.data_dir = directory_;
    auto manager = CheckpointManager::Open(PosixFileSystem(), std::move(options));
    ASSERT_THAT(manager, IsOk());
    manager_ = *std::move(manager);
    checkpoints_ = manager_.get();
    StartServer();
    ASSERT_NO_FATAL_FAILURE(CreateAndOpen());
  }
  void TearDown() override {
    server_ = nullptr;
    manager_ = nullptr;
    PosixFileSystem().RemoveTree(directory_).IgnoreError();
  }

  template <typename Request, typename Response>
  CallResult Call(grpc::Status (v1::EmaService::Stub::*method)(grpc::ClientContext*, const Request&,
                                                               Response*),
                  const Request& request, Response* response) {
    grpc::ClientContext context;
    const grpc::Status status = (stub_.get()->*method)(&context, request, response);
    return Result(status, context);
  }
  static void ExpectError(const CallResult& result, grpc::StatusCode code, v1::ErrorReason reason,
                          const std::string& text) {
    EXPECT_EQ(result.status.error_code(), code) << result.status.error_message();
    EXPECT_EQ(result.detail.reason(), reason) << result.status.error_message();
    EXPECT_THAT(result.status.error_message(), HasSubstr(text));
  }

  void PushSteps(int64_t first, int64_t last) {
    v1::PushResponse pushed;
    for (int64_t step = first; step <= last; ++step) {
      ASSERT_TRUE(PushFilled(step, static_cast<float>(step), &pushed).status.ok());
    }
  }
  v1::CreateCheckpointResponse Save(bool async = false, const std::string& label = "") {
    v1::CreateCheckpointRequest request;
    request.set_model("m");
    request.set_async(async);
    request.set_label(label);
    v1::CreateCheckpointResponse response;
    const CallResult result = Call(&v1::EmaService::Stub::CreateCheckpoint, request, &response);
    EXPECT_TRUE(result.status.ok()) << result.status.error_message();
    return response;
  }
  v1::ListCheckpointsResponse List() {
    v1::ListCheckpointsRequest request;
    request.set_model("m");
    v1::ListCheckpointsResponse response;
    EXPECT_TRUE(Call(&v1::EmaService::Stub::ListCheckpoints, request, &response).status.ok());
    return response;
  }
  v1::OpenRunRequest OpenRequest(const std::string& launch_id, int64_t step) {
    v1::OpenRunRequest request;
    request.set_model("m");
    request.set_launch_id(launch_id);
    request.set_world_size(1);
    request.set_manifest_digest((*store_->Get("m"))->manifest().digest());
    v1::Shard* const shard = request.mutable_layout()->add_shards();
    shard->add_offsets(0);
    shard->add_extents(kElements);
    request.mutable_resume()->set_step(step);
    return request;
  }
  CallResult OpenRun(const std::string& launch_id, int64_t step, v1::OpenRunResponse* response) {
    return Call(&v1::EmaService::Stub::OpenRun, OpenRequest(launch_id, step), response);
  }

  std::string directory_;
  std::unique_ptr<CheckpointManager> manager_;
};

TEST_F(CheckpointCallsTest, CheckpointsAreMadeListedFoundAndDeleted) {
  PushSteps(1, 1);
  const v1::CreateCheckpointResponse first = Save();
  EXPECT_EQ(first.state(), v1::Checkpoint::STATE_COMPLETE);
  EXPECT_EQ(first.version().version(), 1);
  PushSteps(2, 2);
  const v1::CreateCheckpointResponse second = Save(/*async=*/true, "stable");
  EXPECT_EQ(second.version().version(), 2);
  manager_->AwaitIdle();
  v1::GetCheckpointRequest get;
  get.set_model("m");
  get.set_checkpoint(second.checkpoint());
  v1::Checkpoint got;
  ASSERT_TRUE(Call(&v1::EmaService::Stub::GetCheckpoint, get, &got).status.ok());
  EXPECT_EQ(got.state(), v1::Checkpoint::STATE_COMPLETE);
  EXPECT_EQ(got.step(), 2);
  EXPECT_EQ(got.commit_time_us(), second.version().commit_time_us());
  EXPECT_THAT(got.tracks(), ElementsAre("ema", "raw"));
  EXPECT_THAT(got.labels(), ElementsAre("stable"));
  get.set_checkpoint("none");
  ExpectError(Call(&v1::EmaService::Stub::GetCheckpoint, get, &got), grpc::StatusCode::NOT_FOUND,
              v1::ERROR_REASON_CHECKPOINT_NOT_FOUND, "\"none\"");
  const v1::ListCheckpointsResponse list = List();
  ASSERT_EQ(list.checkpoints_size(), 2);
  EXPECT_EQ(list.checkpoints(0).name(), second.checkpoint());
  EXPECT_EQ(list.checkpoints(1).name(), first.checkpoint());
  ASSERT_EQ(list.labels_size(), 1);
  EXPECT_EQ(list.labels(0).version(), 2);
  v1::DeleteCheckpointRequest remove;
  remove.set_model("m");
  remove.set_checkpoint(second.checkpoint());
  v1::Empty removed;
  ExpectError(Call(&v1::EmaService::Stub::DeleteCheckpoint, remove, &removed),
              grpc::StatusCode::FAILED_PRECONDITION, v1::ERROR_REASON_CHECKPOINT_IN_USE,
              "\"stable\"");
  remove.set_checkpoint(first.checkpoint());
  EXPECT_TRUE(Call(&v1::EmaService::Stub::DeleteCheckpoint, remove, &removed).status.ok());
  EXPECT_EQ(List().checkpoints_size(), 1);
}

TEST_F(CheckpointCallsTest, AModelIsNotDeletedWhereTheDiskCannotBeWritten) {
  PushSteps(1, 1);
  Save();
  v1::DeleteModelRequest request;
  request.set_model("m");
  request.set_confirm_model("m");
  v1::Empty response;
  // As where the volume is not mounted.
  ASSERT_THAT(PosixFileSystem().Rename(directory_ + "/models", directory_ + "/gone"), IsOk());
  ExpectError(Call(&v1::EmaService::Stub::DeleteModel, request, &response),
              grpc::StatusCode::UNAVAILABLE, v1::ERROR_REASON_STORE_READ_ONLY,
              "the data directory is missing");
  // It goes on as if nobody had asked.
  PushSteps(2, 2);
  ASSERT_THAT(PosixFileSystem().Rename(directory_ + "/gone", directory_ + "/models"), IsOk());
  Save();
  EXPECT_TRUE(Call(&v1::EmaService::Stub::DeleteModel, request, &response).status.ok());
  EXPECT_FALSE(store_->Get("m").ok());
}

struct ThrowingCheckpoints : Checkpoints {
  absl::StatusOr<CheckpointList> List(Model&) override { throw std::bad_alloc(); }
  absl::Status Delete(Model&, std::string_view) override { throw std::length_error("too long"); }
  absl::StatusOr<VersionId> FindLabel(Model&, std::string_view) override { throw std::bad_alloc(); }
};

class ThrowingCallTest : public RpcFixture {
 protected:
  void SetUp() override {
    checkpoints_ = &throwing_;
    StartServer();
    CreateAndOpen();
    v1::PushResponse response;
    ASSERT_TRUE(PushFilled(1, 1.0f, &response).status.ok());
  }
  // Only the call has ended that the exception happened in.
  void TearDown() override {
    v1::PushResponse response;
    EXPECT_TRUE(PushFilled(2, 1.0f, &response).status.ok());
  }

  ThrowingCheckpoints throwing_;
};

TEST_F(ThrowingCallTest, MemoryThatCannotBeAllocatedEndsTheCall) {
  grpc::ClientContext context;
  v1::ListCheckpointsRequest request;
  request.set_model("m");
  v1::ListCheckpointsResponse response;
  const CallResult result = Result(stub_->ListCheckpoints(&context, request, &response), context);
  EXPECT_EQ(result.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(result.detail.reason(), v1::ERROR_REASON_MEMORY_BUDGET);
}

TEST_F(ThrowingCallTest, AnotherExceptionEndsTheCallAsAnInternalError) {
  grpc::ClientContext context;
  v1::DeleteCheckpointRequest request;
  request.set_model("m");
  request.set_checkpoint("c");
  v1::Empty response;
  const grpc::Status status = stub_->DeleteCheckpoint(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_THAT(status.error_message(), HasSubstr("unexpected exception"));
}

TEST_F(ThrowingCallTest, AStreamEndsLikewise) {
  grpc::ClientContext context;
  v1::PullRequest request;
  request.set_model("m");
  request.set_track("ema");
  request.set_label("best");
  const auto reader = stub_->Pull(&context, request);
  v1::PullResponse response;
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(CheckpointCallsTest, LabelsAreSetByHandAndByScores) {
  PushSteps(1, 2);
  v1::SetLabelRequest set;
  set.set_model("m");
  set.set_label("good");
  set.set_version(1);
  v1::Label label;
  ASSERT_TRUE(Call(&v1::EmaService::Stub::SetLabel, set, &label).status.ok());
  EXPECT_EQ(label.step(), 1);
  EXPECT_FALSE(label.has_metric());
  set.set_remove(true);
  ASSERT_TRUE(Call(&v1::EmaService::Stub::SetLabel, set, &label).status.ok());
  EXPECT_EQ(label.name(), "");
  ExpectError(Call(&v1::EmaService::Stub::SetLabel, set, &label), grpc::StatusCode::NOT_FOUND,
              v1::ERROR_REASON_LABEL_NOT_FOUND, "\"good\"");

  v1::ReportMetricRequest report;
  report.set_model("m");
  report.set_version(2);
  report.set_value(0.25);
  v1::ReportMetricResponse reported;
  ASSERT_TRUE(Call(&v1::EmaService::Stub::ReportMetric, report, &reported).status.ok());
  EXPECT_TRUE(reported.moved());
  EXPECT_EQ(reported.label().name(), "best");
  EXPECT_EQ(reported.label().metric(), 0.25);
  ASSERT_TRUE(Call(&v1::EmaService::Stub::ReportMetric, report, &reported).status.ok());
  EXPECT_FALSE(reported.moved());
  report.set_value(std::numeric_limits<double>::quiet_NaN());
  ExpectError(Call(&v1::EmaService::Stub::ReportMetric, report, &reported),
              grpc::StatusCode::INVALID_ARGUMENT, v1::ERROR_REASON_BAD_REQUEST, "value: nan");
  report.set_value(1);
  report.set_version(0);
  ExpectError(Call(&v1::EmaService::Stub::ReportMetric, report, &reported),
              grpc::StatusCode::INVALID_ARGUMENT, v1::ERROR_REASON_BAD_REQUEST, "version: 0");
  report.set_version(2);
  report.set_lower_is_better(true);
  ExpectError(Call(&v1::EmaService::Stub::ReportMetric, report, &reported),
              grpc::StatusCode::INVALID_ARGUMENT, v1::ERROR_REASON_BAD_REQUEST, "higher");
}

TEST_F(CheckpointCallsTest, ARollbackFencesWhoeverPushed) {
  PushSteps(1, 1);
  Save(/*async=*/false, "before");
  PushSteps(2, 3);
  v1::RestoreCheckpointRequest request;
  request.set_model("m");
  v1::VersionRecord response;
  ExpectError(Call(&v1::EmaService::Stub::RestoreCheckpoint, request, &response),
              grpc::StatusCode::INVALID_ARGUMENT, v1::ERROR_REASON_BAD_REQUEST, "one of the two");
  request.set_label("before");
  ASSERT_TRUE(Call(&v1::EmaService::Stub::RestoreCheckpoint, request, &response).status.ok());
  EXPECT_EQ(response.version(), 4);
  EXPECT_EQ(response.step(), 1);
  EXPECT_EQ(response.restored_from().version(), 1);
  v1::PushResponse pushed;
  ExpectError(PushFilled(4, 4, &pushed), grpc::StatusCode::ABORTED, v1::ERROR_REASON_FENCED,
              "is not open");
  EXPECT_EQ(Pull("raw").data, Filled(1));
}

TEST_F(CheckpointCallsTest, ARunThatResumesStandsWhereTheTrainerStands) {
  PushSteps(1, 2);
  ExpectError(OpenRun("second", 0, &run_), grpc::StatusCode::FAILED_PRECONDITION,
              v1::ERROR_REASON_RESUME_MISMATCH, "step 1 (version 1), step 2 (version 2)");
  ASSERT_TRUE(OpenRun("second", 1, &run_).status.ok());
  EXPECT_EQ(run_.latest().version(), 3);
  EXPECT_EQ(run_.latest().step(), 1);
  PushSteps(2, 3);
  // Another rank of that run, late: it changes nothing.
  ASSERT_TRUE(OpenRun("second", 1, &run_).status.ok());
  EXPECT_EQ(run_.latest().step(), 3);
  ExpectError(OpenRun("launch", 1, &run_), grpc::StatusCode::ABORTED, v1::ERROR_REASON_FENCED,
              "launch");
}

TEST_F(CheckpointCallsTest, ACallThatIsWrongItselfFencesNobody) {
  PushSteps(1, 2);
  v1::OpenRunRequest request = OpenRequest("second", 1);
  v1::OpenRunResponse response;
  const auto expect_bad = [&](const v1::OpenRunRequest& bad, v1::ErrorReason reason,
                              const std::string& text) {
    ExpectError(Call(&v1::EmaService::Stub::OpenRun, bad, &response),
                grpc::StatusCode::INVALID_ARGUMENT, reason, text);
  };
  v1::OpenRunRequest bad = request;
  bad.set_rank(1);
  expect_bad(bad, v1::ERROR_REASON_BAD_REQUEST, "rank: 1");
  bad = request;
  bad.set_world_size(0);
  expect_bad(bad, v1::ERROR_REASON_BAD_REQUEST, "world_size: 0");
  bad = request;
  bad.set_launch_id(std::string(129, 'x'));
  expect_bad(bad, v1::ERROR_REASON_BAD_REQUEST, "launch_id: 129");
  bad = request;
  bad.mutable_layout()->mutable_shards(0)->set_extents(0, kElements - 1);
  expect_bad(bad, v1::ERROR_REASON_LAYOUT_HOLE, "");
  // Nothing has been rolled back.
  PushSteps(3, 3);
  EXPECT_EQ((*store_->Get("m"))->history().latest()->number, 3);
}

// A disk whose saves do not end before they may.
class SlowSaves final : public Checkpoints {
 public:
  absl::StatusOr<Saved> Save(Model&, const SaveRequest& request) override {
    if (request.async) return Saved{.name = "async"};
    is_saving.Notify();
    may_end.WaitForNotification();
    return Saved{.name = "sync"};
  }
  absl::StatusOr<MetricResult> ReportMetric(Model& model, const CheckpointLabel& score) override {
    EMA_RETURN_IF_ERROR(model.history().Pin(score.id.version, score.id.incarnation).status());
    return MetricResult{.label = score, .moved = true};
  }
  absl::StatusOr<CheckpointInfo> Get(Model&, std::string_view name) override {
    return CheckpointInfo{.name = std::string(name)};
  }
  absl::StatusOr<CheckpointList> List(Model&) override { return CheckpointList(); }

  absl::Notification is_saving;
  absl::Notification may_end;
};

class SlowSavesTest : public RpcFixture {
 protected:
  // One save is running, of the only version.
  void SetUp() override {
    checkpoints_ = &disk_;
    StartServer();
    ASSERT_NO_FATAL_FAILURE(CreateAndOpen());
    v1::PushResponse pushed;
    ASSERT_TRUE(PushFilled(1, 1.0f, &pushed).status.ok());
    saver_ = std::thread([this] { EXPECT_EQ(Create(/*async=*/false), "sync"); });
    disk_.is_saving.WaitForNotification();
  }
  void TearDown() override {
    EndSaves();
    server_ = nullptr;  // It uses the disk.
  }
  void EndSaves() {
    if (!disk_.may_end.HasBeenNotified()) disk_.may_end.Notify();
    if (saver_.joinable()) saver_.join();
  }

  // Nothing waits longer than this.
  static void SetDeadline(grpc::ClientContext& context) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  }
  // The checkpoint's name.
  std::string Create(bool async, int64_t version = 0, const std::string& label = "") {
    v1::CreateCheckpointRequest request;
    request.set_model("m");
    request.set_version(version);
    request.set_async(async);
    request.set_label(label);
    v1::CreateCheckpointResponse response;
    grpc::ClientContext context;
    SetDeadline(context);
    const grpc::Status status = stub_->CreateCheckpoint(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.checkpoint();
  }

  SlowSaves disk_;
  std::thread saver_;
};

TEST_F(SlowSavesTest, WhoOnlyAsksDoesNotWaitForThem) {
  EXPECT_EQ(Create(/*async=*/true), "async");
  EXPECT_EQ(Create(/*async=*/true, /*version=*/0, "label"), "async");
  EXPECT_EQ(Create(/*async=*/true, /*version=*/1, "label"), "async");
  v1::GetCheckpointRequest get;
  get.set_model("m");
  get.set_checkpoint("c");
  v1::Checkpoint got;
  grpc::ClientContext get_context;
  SetDeadline(get_context);
  EXPECT_TRUE(stub_->GetCheckpoint(&get_context, get, &got).ok());
  v1::ListCheckpointsRequest list;
  list.set_model("m");
  v1::ListCheckpointsResponse listed;
  grpc::ClientContext list_context;
  SetDeadline(list_context);
  EXPECT_TRUE(stub_->ListCheckpoints(&list_context, list, &listed).ok());
}

TEST_F(SlowSavesTest, WhatWaitsForThemKeepsItsVersion) {
  const std::shared_ptr<Model> model = *store_->Get("m");
  SnapshotRef first = model->history().newest();  // Not a pin.
  const int64_t unpinned_count = first.use_count();
  std::thread evaluator([this] {
    v1::ReportMetricRequest report;
    report.set_model("m");
    report.set_version(1);
    report.set_value(0.5);
    v1::ReportMetricResponse reported;
    grpc::ClientContext context;
    const grpc::Status status = stub_->ReportMetric(&context, report, &reported);
    EXPECT_TRUE(status.ok()) << status.error_message();
  });
  // Until the call has come.
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (first.use_count() == unpinned_count && absl::Now() < deadline) std::this_thread::yield();
  first = nullptr;
  v1::PushResponse pushed;
  for (int64_t step = 2; step <= 6; ++step) {
    EXPECT_TRUE(PushFilled(step, 1.0f, &pushed).status.ok());
  }
  EndSaves();
  evaluator.join();
}

// What comes between a resume and its run.
class RacingResume final : public Checkpoints {
 public:
  absl::StatusOr<std::optional<VersionId>> Resume(Model& model, const Launch&,
                                                  const ResumePoint&) override {
    const VersionId newest = model.history().latest()->id();
    if (auto race = std::exchange(before_it_opens, nullptr)) race();
    return newest;
  }
  std::function<void()> before_it_opens;
};

class RacingResumeTest : public RpcFixture {
 protected:
  ~RacingResumeTest() override { server_ = nullptr; }
  RacingResume resume_;
};

TEST_F(RacingResumeTest, ARunThatWouldFindALaterVersionIsNotOpened) {
  checkpoints_ = &resume_;
  StartServer();
  ASSERT_NO_FATAL_FAILURE(CreateAndOpen());
  v1::PushResponse pushed;
  ASSERT_TRUE(PushFilled(1, 1.0f, &pushed).status.ok());
  resume_.before_it_opens = [&] { EXPECT_TRUE(PushFilled(2, 1.0f, &pushed).status.ok()); };
  v1::OpenRunRequest request;
  request.set_model("m");
  request.set_launch_id("second");
  request.set_world_size(1);
  request.set_manifest_digest((*store_->Get("m"))->manifest().digest());
  v1::Shard* const shard = request.mutable_layout()->add_shards();
  shard->add_offsets(0);
  shard->add_extents(kElements);
  request.mutable_resume()->set_step(1);
  const auto open = [&] {
    v1::OpenRunResponse response;
    grpc::ClientContext context;
    const grpc::Status status = stub_->OpenRun(&context, request, &response);
    return Result(status, context);
  };
  const CallResult refused = open();
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(refused.detail.reason(), v1::ERROR_REASON_MODEL_BUSY);
  EXPECT_TRUE(PushFilled(3, 1.0f, &pushed).status.ok());
  EXPECT_TRUE(open().status.ok());
  EXPECT_FALSE(PushFilled(4, 1.0f, &pushed).status.ok());
}

using NoDataDirTest = RpcFixture;

// The disk fails between the question and the deed.
class LateDiskErrorTest : public RpcFixture {
 protected:
  class LateError final : public Checkpoints {
   public:
    absl::Status SetAsideAll(std::string_view) override {
      return fails_purge_only ? absl::OkStatus() : Error();
    }
    absl::Status Purge(std::string_view) override { return Error(); }

    bool fails_purge_only = false;

   private:
    static absl::Status Error() {
      return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kDiskFailed, "I/O error");
    }
  };

  ~LateDiskErrorTest() override { server_ = nullptr; }

  void Start() {
    RpcServer::Options options;
    options.log = [this](const LogEvent& event) {
      absl::MutexLock lock(&mu_);
      if (event.level == LogLevel::kError) errors_.push_back(ToText(event));
    };
    checkpoints_ = &late_error_;
    StartServer(options);
    ASSERT_NO_FATAL_FAILURE(CreateAndOpen());
  }
  // Purges it; the error's message.
  std::string Delete(const std::string& model) {
    v1::DeleteModelRequest request;
    request.set_model(model);
    request.set_confirm_model(model);
    request.set_purge(true);
    v1::Empty response;
    grpc::ClientContext context;
    const grpc::Status status = stub_->DeleteModel(&context, request, &response);
    EXPECT_EQ(Result(status, context).detail.reason(), v1::ERROR_REASON_DISK_FAILED);
    return status.error_message();
  }
  std::vector<std::string> errors() {
    absl::MutexLock lock(&mu_);
    return errors_;
  }

  LateError late_error_;

 private:
  absl::Mutex mu_;
  std::vector<std::string> errors_ ABSL_GUARDED_BY(mu_);
};

TEST_F(LateDiskErrorTest, AModelThatIsForgottenInMemoryOnlyIsSaidToBe) {
  ASSERT_NO_FATAL_FAILURE(Start());
  EXPECT_THAT(
      Delete("m"),
      HasSubstr("is deleted in memory, but its checkpoints are still on the disk: I/O error"));
  EXPECT_FALSE(store_->Get("m").ok());
  EXPECT_THAT(errors(), ElementsAre(HasSubstr("model deleted in memory only model=m")));
}

TEST_F(LateDiskErrorTest, SoIsOneOfWhichNotAllIsRemoved) {
  late_error_.fails_purge_only = true;
  ASSERT_NO_FATAL_FAILURE(Start());
  EXPECT_THAT(Delete("m"), HasSubstr("is deleted and its checkpoints are set aside, but not all of "
                                     "them could be removed: I/O error"));
  EXPECT_THAT(errors(), ElementsAre(HasSubstr("model deleted, but not purged model=m")));
}

TEST_F(LateDiskErrorTest, OfAModelThatWasNeverThereTheLogSaysNothing) {
  ASSERT_NO_FATAL_FAILURE(Start());
  EXPECT_THAT(Delete("nobody"), HasSubstr("I/O error"));
  EXPECT_THAT(errors(), testing::IsEmpty());
}

// Found every checkpoint of the model "m" corrupt at its start.
class AllCorruptTest : public RpcFixture {
 protected:
  class OnlyCorrupt final : public Checkpoints {
   public:
    absl::Status CheckMayCreate(std::string_view model_name) override {
      if (is_forgotten_ || model_name != "m") return absl::OkStatus();
      return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kAllCheckpointsCorrupt,
                       "every checkpoint is corrupt");
    }
    absl::Status SetAsideAll(std::string_view) override {
      is_forgotten_ = true;
      return absl::OkStatus();
    }

   private:
    std::atomic<bool> is_forgotten_ = false;
  };

  ~AllCorruptTest() override { server_ = nullptr; }

  OnlyCorrupt only_corrupt_;
};

TEST_F(AllCorruptTest, ModelIsCreatedOnlyAfterItsDeletion) {
  absl::Mutex mu;
  std::vector<std::string> deletions;
  RpcServer::Options options;
  options.log = [&](const LogEvent& event) {
    absl::MutexLock lock(&mu);
    if (event.name == "model deleted") deletions.push_back(ToText(event));
  };
  checkpoints_ = &only_corrupt_;
  StartServer(options);
  v1::CreateModelResponse created;
  grpc::ClientContext create_context;
  const grpc::Status create = stub_->CreateModel(&create_context, CreateRequest(), &created);
  EXPECT_EQ(create.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(create.error_message(), "every checkpoint is corrupt");
  EXPECT_EQ(Result(create, create_context).detail.reason(),
            v1::ERROR_REASON_ALL_CHECKPOINTS_CORRUPT);
  EXPECT_FALSE(store_->Get("m").ok());

  v1::GetModelRequest get_request;
  get_request.set_model("m");
  v1::Model found;
  grpc::ClientContext get_context;
  const grpc::Status get = stub_->GetModel(&get_context, get_request, &found);
  EXPECT_EQ(get.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Result(get, get_context).detail.reason(), v1::ERROR_REASON_ALL_CHECKPOINTS_CORRUPT);

  v1::DeleteModelRequest delete_request;
  delete_request.set_model("m");
  delete_request.set_confirm_model("m");
  v1::Empty deleted;
  grpc::ClientContext delete_context;
  EXPECT_TRUE(stub_->DeleteModel(&delete_context, delete_request, &deleted).ok());
  CreateAndOpen();
  absl::MutexLock lock(&mu);
  EXPECT_THAT(deletions, ElementsAre(HasSubstr("model deleted model=m")));
}

TEST_F(NoDataDirTest, EveryCallSaysThatThereAreNoCheckpoints) {
  StartServer();
  ASSERT_NO_FATAL_FAILURE(CreateAndOpen());
  const auto expect = [&](auto method, auto request, auto response) {
    request.set_model("m");
    grpc::ClientContext context;
    const grpc::Status status = (stub_.get()->*method)(&context, request, &response);
    EXPECT_EQ(Result(status, context).detail.reason(), v1::ERROR_REASON_NO_DATA_DIR)
        << status.error_message();
  };
  using Stub = v1::EmaService::Stub;
  expect(&Stub::CreateCheckpoint, v1::CreateCheckpointRequest(), v1::CreateCheckpointResponse());
  expect(&Stub::GetCheckpoint, v1::GetCheckpointRequest(), v1::Checkpoint());
  expect(&Stub::ListCheckpoints, v1::ListCheckpointsRequest(), v1::ListCheckpointsResponse());
  expect(&Stub::DeleteCheckpoint, v1::DeleteCheckpointRequest(), v1::Empty());
  v1::RestoreCheckpointRequest restore;
  restore.set_version(1);
  expect(&Stub::RestoreCheckpoint, restore, v1::VersionRecord());
  expect(&Stub::SetLabel, v1::SetLabelRequest(), v1::Label());
  v1::ReportMetricRequest report;
  report.set_version(1);
  expect(&Stub::ReportMetric, report, v1::ReportMetricResponse());
}

}  // namespace
}  // namespace ema
