// SPDX-License-Identifier: Apache-2.0
//
// The published contract, spoken by a plain gRPC client.
#include <cmath>
#include <thread>

#include "absl/time/clock.h"
#include "tests/rpc/rpc_fixture.h"

namespace ema {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RpcTest : public RpcFixture {
 protected:
  void SetUp() override { StartServer(); }
};

TEST_F(RpcTest, PushedWeightsArePulledBackAsAverages) {
  CreateAndOpen();
  v1::PushResponse response;
  ASSERT_TRUE(PushFilled(1, 8.0f, &response).status.ok());
  EXPECT_EQ(response.version().version(), 1);
  EXPECT_EQ(response.applied_step(), 1);
  EXPECT_EQ(response.durable_step(), 0);
  ASSERT_TRUE(PushFilled(2, 4.0f, &response).status.ok());
  EXPECT_EQ(response.version().tracks(0).update_weight(), 0.5f);

  const Pulled ema = Pull("ema");
  ASSERT_TRUE(ema.result.status.ok()) << ema.result.status.error_message();
  EXPECT_TRUE(ema.complete);
  EXPECT_EQ(ema.header.version().step(), 2);
  EXPECT_EQ(ema.header.tensors(0).spec().name(), "w");
  EXPECT_EQ(ema.data, Filled(6.0f));
  EXPECT_EQ(Pull("raw").data, Filled(4.0f));
  EXPECT_EQ(Pull("ema", 1).data, Filled(8.0f));
}

TEST_F(RpcTest, APullGoesOnAtAnOffset) {
  CreateAndOpen();
  v1::PushResponse response;
  ASSERT_TRUE(PushFilled(1, 8.0f, &response).status.ok());
  v1::PullRequest request;
  request.set_model("m");
  request.set_track("ema");
  request.set_offset(1001);
  Pulled pulled = Pull(request);
  EXPECT_TRUE(pulled.complete);
  EXPECT_EQ(pulled.header.total_bytes(), 4000);
  EXPECT_EQ(pulled.data, Filled(8.0f).substr(1001));
  request.set_offset(4000);
  pulled = Pull(request);
  EXPECT_TRUE(pulled.complete);
  EXPECT_EQ(pulled.data, "");
  for (const int64_t offset : {-1, 4001}) {
    request.set_offset(offset);
    const CallResult result = Pull(request).result;
    EXPECT_EQ(result.status.error_code(), grpc::StatusCode::OUT_OF_RANGE);
    EXPECT_EQ(result.detail.reason(), v1::ERROR_REASON_BAD_REQUEST);
  }
}

TEST_F(RpcTest, APullOfABoxInAnotherDtypeSaysWhatItIs) {
  CreateAndOpen();
  v1::PushResponse response;
  ASSERT_TRUE(PushFilled(1, 1.0f, &response).status.ok());
  v1::PullRequest request;
  request.set_model("m");
  request.set_track("ema");
  v1::TensorSlice* const slice = request.mutable_selection()->add_slices();
  slice->set_tensor("w");
  slice->add_offsets(10);
  slice->add_extents(3);
  request.mutable_selection()->set_dtype(v1::DTYPE_BFLOAT16);
  const Pulled pulled = Pull(request);
  EXPECT_TRUE(pulled.complete);
  ASSERT_EQ(pulled.header.tensors_size(), 1);
  EXPECT_THAT(pulled.header.tensors(0).spec().shape(), ElementsAre(3));
  EXPECT_EQ(pulled.header.tensors(0).spec().dtype(), v1::DTYPE_BFLOAT16);
  EXPECT_THAT(pulled.header.tensors(0).slice_offsets(), ElementsAre(10));
  EXPECT_EQ(pulled.data, (std::string{'\x80', '\x3f', '\x80', '\x3f', '\x80', '\x3f'}));
  request.mutable_selection()->set_dtype(static_cast<v1::Dtype>(77));
  EXPECT_EQ(Pull(request).result.detail.reason(), v1::ERROR_REASON_BAD_REQUEST);
}

TEST_F(RpcTest, OnlyWhatIsNewerOrHasChangedIsSent) {
  CreateAndOpen();
  v1::PullRequest request;
  request.set_model("m");
  request.set_track("ema");
  const auto id = [](v1::VersionId* to, int64_t version, int64_t incarnation) {
    to->set_version(version);
    to->set_incarnation(incarnation);
  };
  id(request.mutable_if_newer_than(), 0, 0);
  EXPECT_EQ(Pull(request).result.detail.reason(), v1::ERROR_REASON_NO_VERSION);
  v1::PushResponse response;
  ASSERT_TRUE(PushFilled(1, 1.0f, &response).status.ok());
  const int64_t incarnation = response.version().incarnation();
  EXPECT_EQ(Pull(request).data, Filled(1.0f));
  id(request.mutable_if_newer_than(), 1, incarnation);
  Pulled pulled = Pull(request);
  EXPECT_TRUE(pulled.complete);
  EXPECT_TRUE(pulled.header.not_newer());
  EXPECT_EQ(pulled.header.version().version(), 1);
  EXPECT_EQ(pulled.header.tensors_size(), 0);
  EXPECT_EQ(pulled.data, "");
  request.set_track("nope");
  EXPECT_EQ(Pull(request).result.detail.reason(), v1::ERROR_REASON_TRACK_NOT_FOUND);
  request.set_track("ema");
  request.set_version(1);
  EXPECT_EQ(Pull(request).result.detail.reason(), v1::ERROR_REASON_BAD_REQUEST);

  request.Clear();
  request.set_model("m");
  request.set_track("ema");
  id(request.mutable_base(), 1, incarnation);
  pulled = Pull(request);
  EXPECT_TRUE(pulled.complete);
  EXPECT_TRUE(pulled.header.omits_unchanged());
  EXPECT_EQ(pulled.header.total_bytes(), 4000);
  EXPECT_EQ(pulled.data, "");
  ASSERT_TRUE(PushFilled(2, 3.0f, &response).status.ok());
  EXPECT_EQ(Pull(request).data, Filled(2.0f));
  // Of what was before the base nothing can be left out.
  request.set_version(1);
  id(request.mutable_base(), 2, incarnation);
  pulled = Pull(request);
  EXPECT_FALSE(pulled.header.omits_unchanged());
  EXPECT_EQ(pulled.data, Filled(1.0f));
  request.set_version(0);
  // What another life of the server has counted is not known.
  id(request.mutable_base(), 2, incarnation - 1);
  pulled = Pull(request);
  EXPECT_FALSE(pulled.header.omits_unchanged());
  EXPECT_EQ(pulled.data, Filled(2.0f));
}

TEST_F(RpcTest, ErrorsCarryCodeReasonAndAMessageThatNamesTheThing) {
  CreateAndOpen();
  EXPECT_EQ(Pull("ema").result.detail.reason(), v1::ERROR_REASON_NO_VERSION);
  v1::PushResponse response;
  ASSERT_TRUE(PushFilled(1, 1.0f, &response).status.ok());

  CallResult result = Pull("nope").result;
  EXPECT_EQ(result.status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(result.detail.reason(), v1::ERROR_REASON_TRACK_NOT_FOUND);
  EXPECT_THAT(result.status.error_message(), HasSubstr("\"nope\"; it has ema, raw"));
  EXPECT_EQ(Pull("ema", 0, "nope").result.detail.reason(), v1::ERROR_REASON_MODEL_NOT_FOUND);
  EXPECT_EQ(Pull("ema", 9).result.detail.reason(), v1::ERROR_REASON_VERSION_NOT_YET);
  EXPECT_EQ(Pull("ema", -1).result.detail.reason(), v1::ERROR_REASON_BAD_REQUEST);

  result = PushFilled(1, 2.0f, &response);
  EXPECT_EQ(result.status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(result.detail.reason(), v1::ERROR_REASON_STALE_STEP);
  EXPECT_EQ(Pull("raw").data, Filled(1.0f));
}

TEST_F(RpcTest, StatisticsAreComputedWhenAskedForAndThenInTheRecord) {
  CreateAndOpen();
  v1::PushResponse pushed;
  ASSERT_TRUE(PushFilled(1, 8.0f, &pushed).status.ok());
  ASSERT_TRUE(PushFilled(2, 4.0f, &pushed).status.ok());
  const auto ask = [&](int64_t version, const std::string& track, v1::VersionRecord* record) {
    v1::GetStatisticsRequest request;
    request.set_model("m");
    request.set_version(version);
    if (!track.empty()) request.add_tracks(track);
    grpc::ClientContext context;
    return Result(stub_->GetStatistics(&context, request, record), context);
  };
  const auto latest = [&] {
    v1::GetModelRequest request;
    request.set_model("m");
    v1::Model response;
    grpc::ClientContext context;
    EXPECT_TRUE(stub_->GetModel(&context, request, &response).ok());
    return response.latest();
  };
  EXPECT_EQ(latest().statistics_size(), 0);
  v1::VersionRecord record;
  ASSERT_TRUE(ask(0, "", &record).status.ok());
  EXPECT_EQ(record.version(), 2);
  ASSERT_EQ(record.statistics_size(), 1);
  EXPECT_EQ(record.statistics(0).track(), "ema");
  // 1000 sixes, where the weights are fours.
  EXPECT_DOUBLE_EQ(record.statistics(0).norm(), std::sqrt(36'000.0));
  EXPECT_DOUBLE_EQ(record.statistics(0).distance(), std::sqrt(4'000.0));
  EXPECT_EQ(latest().SerializeAsString(), record.SerializeAsString());
  ASSERT_TRUE(ask(1, "ema", &record).status.ok());
  EXPECT_EQ(record.statistics(0).distance(), 0);

  v1::ListVersionsRequest list;
  list.set_model("m");
  v1::ListVersionsResponse listed;
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->ListVersions(&context, list, &listed).ok());
  ASSERT_EQ(listed.versions_size(), 2);
  EXPECT_EQ(listed.versions(0).version().SerializeAsString(), record.SerializeAsString());

  EXPECT_EQ(ask(0, "raw", &record).detail.reason(), v1::ERROR_REASON_BAD_REQUEST);
  EXPECT_EQ(ask(0, "nope", &record).detail.reason(), v1::ERROR_REASON_TRACK_NOT_FOUND);
  EXPECT_EQ(ask(9, "", &record).detail.reason(), v1::ERROR_REASON_VERSION_NOT_YET);
  EXPECT_EQ(ask(-1, "", &record).detail.reason(), v1::ERROR_REASON_VERSION_NOT_KEPT);
}

TEST_F(RpcTest, BadSchedulesAreRefusedAtCreateModelWithTheFieldAndARightExample) {
  for (const std::string half_life : {"0ba", "inf", "-1ba", "1000", "", "nanba", "10 parsecs"}) {
    v1::CreateModelRequest request = CreateRequest();
    (*request.mutable_tracks(0)->mutable_schedule())["half_life"] = half_life;
    grpc::ClientContext context;
    v1::CreateModelResponse response;
    const CallResult result = Result(stub_->CreateModel(&context, request, &response), context);
    EXPECT_EQ(result.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << half_life;
    EXPECT_EQ(result.detail.reason(), v1::ERROR_REASON_BAD_SCHEDULE) << half_life;
    EXPECT_THAT(result.status.error_message(), HasSubstr("half_life")) << half_life;
    EXPECT_THAT(result.status.error_message(), HasSubstr("00ba")) << half_life;
  }
  EXPECT_TRUE(store_->List().empty());
}

TEST_F(RpcTest, ModelsAreListedDescribedAndDeleted) {
  CreateAndOpen();
  grpc::ClientContext list_context;
  v1::ListModelsResponse list;
  ASSERT_TRUE(stub_->ListModels(&list_context, {}, &list).ok());
  ASSERT_EQ(list.models_size(), 1);
  EXPECT_EQ(list.models(0).manifest().tensors_size(), 0);
  EXPECT_FALSE(list.models(0).has_latest());
  v1::GetModelRequest get;
  get.set_model("m");
  grpc::ClientContext get_context;
  v1::Model model;
  ASSERT_TRUE(stub_->GetModel(&get_context, get, &model).ok());
  EXPECT_EQ(model.manifest().tensors(0).shape(0), kElements);
  EXPECT_EQ(model.tracks(0).schedule().at("half_life"), "1ba");
  EXPECT_EQ(model.reserved_bytes(), 4 * 2 * 4 * kElements);
  for (int i = 0; i < 2; ++i) {
    v1::DeleteModelRequest request;
    request.set_model("m");
    request.set_confirm_model("m");
    grpc::ClientContext context;
    v1::Empty response;
    EXPECT_TRUE(stub_->DeleteModel(&context, request, &response).ok());
  }
  EXPECT_EQ(Pull("ema").result.detail.reason(), v1::ERROR_REASON_MODEL_NOT_FOUND);
}

TEST_F(RpcTest, ADeletionThatFailedOnTheDiskIsTriedAgainByTheNext) {
  CreateAndOpen();
  const auto delete_model = [&] {
    v1::DeleteModelRequest request;
    request.set_model("m");
    request.set_confirm_model("m");
    v1::Empty response;
    grpc::ClientContext context;
    return stub_->DeleteModel(&context, request, &response).error_code();
  };
  no_disk_.forget_status = absl::UnavailableError("I/O error");
  EXPECT_EQ(delete_model(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Pull("ema").result.detail.reason(), v1::ERROR_REASON_MODEL_NOT_FOUND);
  // The model is gone from memory, but only now from the disk.
  no_disk_.forget_status = absl::UnavailableError("I/O error");
  EXPECT_EQ(delete_model(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(delete_model(), grpc::StatusCode::OK);
}

TEST_F(RpcTest, WatchersGetEveryCommitInOrderAndTheEndOfTheModel) {
  CreateAndOpen();
  v1::WatchRequest request;
  request.set_model("m");
  grpc::ClientContext context;
  auto reader = stub_->Watch(&context, request);
  reader->WaitForInitialMetadata();  // From here on nothing is missed.
  for (int64_t step = 1; step <= 5; ++step) {
    v1::PushResponse response;
    ASSERT_TRUE(PushFilled(step, 1.0f, &response).status.ok());
  }
  std::vector<int64_t> versions;
  v1::WatchResponse response;
  while (versions.size() < 5 && reader->Read(&response)) {
    versions.push_back(response.version().version());
    EXPECT_EQ(response.skipped_count(), 0);
  }
  EXPECT_THAT(versions, ElementsAre(1, 2, 3, 4, 5));
  store_->Delete("m");
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::NOT_FOUND);

  grpc::ClientContext unknown_context;
  request.set_model("nope");
  auto unknown = stub_->Watch(&unknown_context, request);
  EXPECT_FALSE(unknown->Read(&response));
  EXPECT_EQ(unknown->Finish().error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(RpcTest, AWatchBeginsWhereItIsTold) {
  CreateAndOpen();
  v1::PushResponse response;
  for (int64_t step = 1; step <= 3; ++step) {
    ASSERT_TRUE(PushFilled(step, 1.0f, &response).status.ok());
  }
  const int64_t incarnation = response.version().incarnation();
  const auto first_version = [&](std::optional<int64_t> after, int64_t of_incarnation) {
    v1::WatchRequest request;
    request.set_model("m");
    if (after.has_value()) request.set_after_version(*after);
    request.set_incarnation(of_incarnation);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    auto reader = stub_->Watch(&context, request);
    reader->WaitForInitialMetadata();
    if (!after.has_value()) {
      EXPECT_TRUE(PushFilled(4, 1.0f, &response).status.ok());
    }
    v1::WatchResponse first;
    EXPECT_TRUE(reader->Read(&first));
    EXPECT_EQ(first.skipped_count(), 0);
    context.TryCancel();
    return first.version().version();
  };
  EXPECT_EQ(first_version(0, 0), 1);
  EXPECT_EQ(first_version(2, 0), 3);
  EXPECT_EQ(first_version(2, incarnation), 3);
  EXPECT_EQ(first_version(2, incarnation - 1), 1);
  EXPECT_EQ(first_version(std::nullopt, 0), 4);
}

TEST_F(RpcTest, AWatcherThatLeavesIsForgotten) {
  CreateAndOpen();
  {
    v1::WatchRequest request;
    request.set_model("m");
    grpc::ClientContext context;
    auto reader = stub_->Watch(&context, request);
    reader->WaitForInitialMetadata();
    context.TryCancel();
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  v1::PushResponse response;
  EXPECT_TRUE(PushFilled(1, 1.0f, &response).status.ok());
}

TEST_F(RpcTest, QueryPushTellsWhatIsMissingAndAbandons) {
  CreateAndOpen();
  const std::string data = Filled(3.0f);
  v1::PushResponse response;
  EXPECT_EQ(Push({Header(1), Chunk(400, data.substr(400, 800))}, &response).detail.reason(),
            v1::ERROR_REASON_NO_COMMIT);
  v1::QueryPushRequest request;
  request.set_model("m");
  request.set_run_epoch(run_.run_epoch());
  request.set_step(1);
  v1::QueryPushResponse progress;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(stub_->QueryPush(&context, request, &progress).ok());
  }
  EXPECT_EQ(progress.state(), v1::QueryPushResponse::STATE_OPEN);
  ASSERT_EQ(progress.missing_size(), 2);
  EXPECT_EQ(progress.missing(0).length_bytes(), 400);
  EXPECT_EQ(progress.missing(1).offset(), 1200);
  EXPECT_EQ(progress.missing(1).tensor(), "w");
  // Only what is missing is sent again.
  v1::PushRequest commit = Commit(2, data);
  commit.mutable_commit()->set_total_bytes(static_cast<int64_t>(data.size()) - 800);
  ASSERT_TRUE(
      Push({Header(1), Chunk(0, data.substr(0, 400)), Chunk(1200, data.substr(1200)), commit},
           &response)
          .status.ok());
  EXPECT_EQ(Pull("raw").data, data);
  request.set_abandon_if_unfinished(true);
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->QueryPush(&context, request, &progress).ok());
  EXPECT_EQ(progress.state(), v1::QueryPushResponse::STATE_COMMITTED);
}

TEST_F(RpcTest, APortInUseIsSaidClearly) {
  RpcServer::Options options;
  options.listen_addresses = {address_};
  const auto second = RpcServer::Start(store_, checkpoints_, options);
  EXPECT_THAT(second, StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("--listen")));
  options.listen_addresses = {"no-port"};
  EXPECT_THAT(RpcServer::Start(store_, checkpoints_, options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("host:port")));
}

TEST_F(RpcTest, StoppingEndsWatchersAndPushesWithoutACrash) {
  CreateAndOpen();
  v1::WatchRequest request;
  request.set_model("m");
  grpc::ClientContext watch_context;
  auto watch = stub_->Watch(&watch_context, request);
  watch->WaitForInitialMetadata();
  grpc::ClientContext push_context;
  v1::PushResponse response;
  auto push = stub_->Push(&push_context, &response);
  ASSERT_TRUE(push->Write(Header(1)));
  // What has not reached the server when it shuts down has no answer of its.
  v1::QueryPushRequest query;
  query.set_model("m");
  query.set_run_epoch(run_.run_epoch());
  query.set_step(1);
  v1::QueryPushResponse progress;
  while (progress.state() != v1::QueryPushResponse::STATE_OPEN) {
    grpc::ClientContext context;
    ASSERT_TRUE(stub_->QueryPush(&context, query, &progress).ok());
  }
  store_->Drain(SteadyNow());
  store_->Close();
  server_->Shutdown(After(SteadyNow(), absl::Seconds(5)));
  EXPECT_EQ(push->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(watch->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace ema
