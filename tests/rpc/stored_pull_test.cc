// SPDX-License-Identifier: Apache-2.0
//
// Pulls of labels and of versions that are only on the disk, by gRPC and by lane.
#include "tests/rpc/stored_pull.h"

#include <thread>

#include "server/kernel/cast.h"

namespace ema {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST_F(StoredPullTest, AVersionOnTheDiskIsPulledLikeOneInMemory) {
  Start();
  const Pulled pulled = Pull(Request(1));
  ASSERT_TRUE(pulled.result.status.ok()) << pulled.result.status.error_message();
  EXPECT_TRUE(pulled.complete);
  EXPECT_TRUE(IsData(pulled.data, first_));
  EXPECT_EQ(pulled.header.version().version(), 1);
  EXPECT_EQ(pulled.header.version().incarnation(), 7);
  EXPECT_EQ(pulled.header.version().step(), 1);
  EXPECT_EQ(pulled.header.total_bytes(), kBytes);
  EXPECT_EQ(pulled.header.tensors_size(), 2);

  const LanePulled by_lane = PullByLane(Request(1));
  EXPECT_TRUE(by_lane.complete);
  EXPECT_TRUE(IsData(by_lane.data, first_));
  EXPECT_EQ(by_lane.header.SerializeAsString(), pulled.header.SerializeAsString());
  EXPECT_EQ(disk_.open_count, 2);
}

TEST_F(StoredPullTest, AVersionOnTheDiskIsListedAsOneThatCanBePulled) {
  Start();
  v1::ListVersionsRequest request;
  request.set_model("big");
  v1::ListVersionsResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->ListVersions(&context, request, &response).ok());
  std::vector<int64_t> available;
  for (const auto& entry : response.versions()) {
    if (entry.available()) available.push_back(entry.version().version());
  }
  EXPECT_EQ(response.versions_size(), 5);
  EXPECT_THAT(available, ElementsAre(1, 3, 4, 5));
}

TEST_F(StoredPullTest, MemoryIsLookedAtFirst) {
  Start();
  EXPECT_TRUE(IsData(Pull(Request(5)).data, newest_));
  EXPECT_TRUE(IsData(Pull(ByLabel("newest")).data, newest_));
  EXPECT_TRUE(IsData(PullByLane(ByLabel("newest")).data, newest_));
  EXPECT_EQ(disk_.open_count, 0);
}

TEST_F(StoredPullTest, WhatTooManyReadersKeepFromMemoryComesFromTheDisk) {
  Start();
  const Snapshot newest = **model_->history().Pin(5);
  const SnapshotRef pins[] = {*model_->history().Pin(3), *model_->history().Pin(4)};
  EXPECT_EQ(ReasonOf(Request()), v1::ERROR_REASON_TOO_MANY_PINS);
  // It is not there, either.
  EXPECT_EQ(ReasonOf(ByLabel("newest")), v1::ERROR_REASON_TOO_MANY_PINS);
  EXPECT_EQ(PullByLane(Request(5)).error.detail().reason(), v1::ERROR_REASON_TOO_MANY_PINS);
  disk_.Keep(newest, model_->device());
  EXPECT_TRUE(IsData(Pull(ByLabel("newest")).data, newest_));
  EXPECT_TRUE(IsData(PullByLane(Request(5)).data, newest_));
}

TEST_F(StoredPullTest, WhatIsBeingReadIsNotOpenedAgain) {
  Start();
  BlockReadsFrom(2);
  Pulled slow;
  std::thread reader([&] { slow = Pull(ByLabel("best")); });
  is_blocked_.notification.WaitForNotification();
  const std::shared_ptr<Reading> reading = model_->readings().FindStored({1, 7}, "ema", {});
  EXPECT_NE(reading, nullptr);
  go_on_.Notify();
  reader.join();
  EXPECT_TRUE(IsData(slow.data, first_));
  EXPECT_TRUE(IsData(Pull(ByLabel("best")).data, first_));
  EXPECT_TRUE(IsData(PullByLane(ByLabel("best")).data, first_));
  EXPECT_EQ(disk_.open_count, 1);
}

TEST_F(StoredPullTest, ALabelIsTheVersionThatHasIt) {
  Start();
  const Pulled pulled = Pull(ByLabel("best"));
  EXPECT_TRUE(pulled.complete);
  EXPECT_TRUE(IsData(pulled.data, first_));
  EXPECT_EQ(pulled.header.version().version(), 1);
  const LanePulled by_lane = PullByLane(ByLabel("best"));
  EXPECT_TRUE(by_lane.complete);
  EXPECT_TRUE(IsData(by_lane.data, first_));
}

TEST_F(StoredPullTest, AStepIsItsVersionInMemoryOrOnTheDisk) {
  Start();
  const Pulled newest = Pull(ByStep(5));
  EXPECT_TRUE(newest.complete);
  EXPECT_TRUE(IsData(newest.data, newest_));
  EXPECT_EQ(newest.header.version().version(), 5);
  EXPECT_TRUE(IsData(PullByLane(ByStep(5)).data, newest_));
  EXPECT_EQ(disk_.open_count, 0);

  const Pulled stored = Pull(ByStep(1));
  EXPECT_TRUE(stored.complete);
  EXPECT_TRUE(IsData(stored.data, first_));
  EXPECT_EQ(stored.header.version().version(), 1);
  EXPECT_TRUE(IsData(PullByLane(ByStep(1)).data, first_));
  v1::PullRequest rest = ByStep(1);
  rest.set_offset(kBytes - 4);
  EXPECT_TRUE(IsData(Pull(rest).data, first_, kBytes - 4));
}

TEST_F(StoredPullTest, AStepOfWhichOneTrackWasSavedIsThereForThatTrack) {
  Start();
  ASSERT_THAT(rank_->Push(6, Weights(6)), IsOk());
  disk_.Keep(**model_->history().Pin(0), model_->device(), "ema");
  const std::vector<std::byte> sixth = *ReadAll(*model_, "ema");
  for (int64_t step = 7; step <= 10; ++step) {
    ASSERT_THAT(rank_->Push(step, Weights(step)), IsOk());
  }
  ASSERT_EQ(GetErrorReason(model_->history().Pin(6).status()), ErrorReason::kVersionNotKept);
  const Pulled pulled = Pull(ByStep(6));
  EXPECT_TRUE(IsData(pulled.data, sixth));
  EXPECT_EQ(pulled.header.version().version(), 6);
  EXPECT_TRUE(IsData(PullByLane(ByStep(6)).data, sixth));
  v1::PullRequest raw = ByStep(6);
  raw.set_track("raw");
  EXPECT_EQ(ReasonOf(raw), v1::ERROR_REASON_VERSION_NOT_KEPT);
  // What is listed is there with all tracks.
  EXPECT_THAT(Pull(ByStep(2)).result.status.error_message(),
              HasSubstr("there are step 1 (version 1), step 8 (version 8)"));
}

TEST_F(StoredPullTest, AStepThatIsNowhereIsRefusedWithThoseThatThereAre) {
  Start();
  const CallResult gone = Pull(ByStep(2)).result;
  EXPECT_EQ(gone.status.error_code(), grpc::StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(gone.detail.reason(), v1::ERROR_REASON_VERSION_NOT_KEPT);
  EXPECT_THAT(gone.status.error_message(),
              HasSubstr("no version of step 2 is in memory or on the disk; there are step 1 "
                        "(version 1), step 3 (version 3), step 4 (version 4), step 5 (version 5)"));
  EXPECT_EQ(PullByLane(ByStep(2)).error.detail().reason(), v1::ERROR_REASON_VERSION_NOT_KEPT);
  // Never made, which is not the same as none asked for.
  EXPECT_EQ(ReasonOf(ByStep(0)), v1::ERROR_REASON_VERSION_NOT_KEPT);
  const CallResult early = Pull(ByStep(9)).result;
  EXPECT_EQ(early.status.error_code(), grpc::StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(early.detail.reason(), v1::ERROR_REASON_VERSION_NOT_YET);
  EXPECT_THAT(early.status.error_message(),
              HasSubstr("step 9 is not committed yet; the newest is step 5 (version 5)"));
  v1::PullRequest request = ByStep(1);
  request.set_track("nope");
  EXPECT_EQ(ReasonOf(request), v1::ERROR_REASON_TRACK_NOT_FOUND);
}

TEST_F(StoredPullTest, AStepStandsAlone) {
  Start();
  const auto expect_refused = [&](const v1::PullRequest& request, const std::string& message) {
    const CallResult result = Pull(request).result;
    EXPECT_EQ(result.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(result.detail.reason(), v1::ERROR_REASON_BAD_REQUEST);
    EXPECT_EQ(result.status.error_message(), message);
  };
  v1::PullRequest request = ByStep(5);
  request.set_version(5);
  expect_refused(request, "version: 5 given with step: 5: expected one of these");
  request = ByStep(0);
  request.set_label("best");
  expect_refused(request, "label: \"best\" given with step: 0: expected one of these");
  request = ByStep(5);
  request.mutable_if_newer_than()->set_version(1);
  expect_refused(request,
                 "step: 5 given with if_newer_than, which is about the newest: expected one of "
                 "these");
  expect_refused(ByStep(-1), "step: -1 given, expected 0 or more");
}

TEST_F(StoredPullTest, AStepThatARollbackHasGivenUpIsNotTheSameStepOfToday) {
  Start();
  const SnapshotRef fifth = *model_->history().Pin(5);
  for (int64_t step : {6, 8}) {  // Versions 6 and 7.
    ASSERT_THAT(rank_->Push(step, Weights(step)), IsOk());
    disk_.Keep(**model_->history().Pin(0), model_->device());
  }
  EXPECT_EQ(Pull(ByStep(8)).header.version().version(), 7);
  ASSERT_THAT(model_->RollBack({5, 7}, [&] { return std::make_shared<Snapshot>(*fifth); }), IsOk());
  // Both are of that step, with the same values.
  EXPECT_EQ(Pull(ByStep(5)).header.version().version(), 8);
  EXPECT_TRUE(IsData(Pull(ByStep(5)).data, newest_));
  EXPECT_EQ(ReasonOf(ByStep(8)), v1::ERROR_REASON_VERSION_NOT_YET);

  TestRank next(model_, "next");
  ASSERT_THAT(next.Join(), IsOk());
  ASSERT_THAT(next.Push(8, Weights(80)), IsOk());
  const std::vector<std::byte> eighth = *ReadAll(*model_, "ema");
  const Pulled again = Pull(ByStep(8));
  EXPECT_EQ(again.header.version().version(), 9);
  EXPECT_TRUE(IsData(again.data, eighth));
  const CallResult given_up = Pull(ByStep(6)).result;
  EXPECT_EQ(given_up.detail.reason(), v1::ERROR_REASON_VERSION_NOT_KEPT);
  EXPECT_THAT(given_up.status.error_message(),
              HasSubstr("there are step 1 (version 1), step 5 (version 8), step 5 (version 5), "
                        "step 8 (version 9)"));
  // What is still pinned stands in for what came of going back to it, once that has gone.
  for (int64_t step : {10, 11}) ASSERT_THAT(next.Push(step, Weights(step)), IsOk());
  EXPECT_EQ(Pull(ByStep(5)).header.version().version(), 5);
  EXPECT_EQ(ReasonOf(ByStep(8)), v1::ERROR_REASON_VERSION_NOT_KEPT);
}

TEST_F(StoredPullTest, AStepThatTooManyReadersKeepFromMemoryComesFromTheDisk) {
  Start();
  const Snapshot newest = **model_->history().Pin(5);
  const SnapshotRef pins[] = {*model_->history().Pin(3), *model_->history().Pin(4)};
  EXPECT_EQ(ReasonOf(ByStep(5)), v1::ERROR_REASON_TOO_MANY_PINS);
  disk_.Keep(newest, model_->device());
  EXPECT_TRUE(IsData(Pull(ByStep(5)).data, newest_));
}

TEST_F(StoredPullTest, StepsWithoutADataDirectoryAreThoseInMemory) {
  StartServer();
  CreateAndOpen();
  v1::PullRequest request;
  request.set_model("m");
  request.set_track("ema");
  request.set_step(0);
  EXPECT_EQ(ReasonOf(request), v1::ERROR_REASON_NO_VERSION);
}

TEST_F(StoredPullTest, WhatIsNowhereIsRefusedWithItsReason) {
  Start();
  EXPECT_EQ(ReasonOf(Request(2)), v1::ERROR_REASON_VERSION_NOT_KEPT);
  EXPECT_EQ(ReasonOf(Request(9)), v1::ERROR_REASON_VERSION_NOT_YET);
  EXPECT_EQ(ReasonOf(ByLabel("gone")), v1::ERROR_REASON_VERSION_NOT_KEPT);
  v1::PullRequest request = Request(1);
  request.set_incarnation(6);
  EXPECT_EQ(ReasonOf(request), v1::ERROR_REASON_VERSION_NOT_KEPT);
  request = Request(1);
  request.set_track("nope");
  EXPECT_EQ(ReasonOf(request), v1::ERROR_REASON_TRACK_NOT_FOUND);
  request.set_version(0);
  EXPECT_EQ(ReasonOf(request), v1::ERROR_REASON_TRACK_NOT_FOUND);
  const CallResult unknown = Pull(ByLabel("nope")).result;
  EXPECT_EQ(unknown.detail.reason(), v1::ERROR_REASON_LABEL_NOT_FOUND);
  EXPECT_THAT(unknown.status.error_message(), HasSubstr("there is best"));
  EXPECT_EQ(PullByLane(ByLabel("nope")).error.detail().reason(), v1::ERROR_REASON_LABEL_NOT_FOUND);
  EXPECT_EQ(PullByLane(Request(2)).error.detail().reason(), v1::ERROR_REASON_VERSION_NOT_KEPT);

  request = ByLabel("best");
  request.set_version(1);
  EXPECT_EQ(ReasonOf(request), v1::ERROR_REASON_BAD_REQUEST);
  request = ByLabel("best");
  request.mutable_if_newer_than()->set_version(1);
  EXPECT_EQ(ReasonOf(request), v1::ERROR_REASON_BAD_REQUEST);
  request = Request(1);
  request.set_offset(kBytes + 1);
  const CallResult beyond = Pull(request).result;
  EXPECT_EQ(beyond.status.error_code(), grpc::StatusCode::OUT_OF_RANGE);
  EXPECT_EQ(beyond.detail.reason(), v1::ERROR_REASON_BAD_REQUEST);
  request = Request(1);
  request.mutable_selection()->add_tensors("nope");
  EXPECT_EQ(ReasonOf(request), v1::ERROR_REASON_BAD_REQUEST);
}

TEST_F(StoredPullTest, ATrackThatTheModelHasNoLongerIsStillInItsVersions) {
  Start();
  ASSERT_THAT(model_->UpdateTracks({.remove = {"ema"}}), IsOk());
  ASSERT_THAT(rank_->Push(6, Weights(6)), IsOk());  // The last that has it.
  ASSERT_THAT(rank_->Push(7, Weights(7)), IsOk());
  ASSERT_EQ(ReasonOf(Request()), v1::ERROR_REASON_TRACK_NOT_FOUND);
  EXPECT_TRUE(IsData(Pull(Request(1)).data, first_));
}

TEST_F(StoredPullTest, ASelectionIsCutAndCastOnTheWay) {
  Start();
  v1::PullRequest request = Request(1);
  request.mutable_selection()->set_dtype(v1::DTYPE_BFLOAT16);
  v1::TensorSlice* const slice = request.mutable_selection()->add_slices();
  slice->set_tensor("a");
  slice->add_offsets(7);
  slice->add_extents(700'000);
  const Pulled pulled = Pull(request);
  EXPECT_TRUE(pulled.complete);
  ASSERT_EQ(pulled.data.size(), 1'400'000);
  EXPECT_EQ(pulled.header.tensors(0).spec().dtype(), v1::DTYPE_BFLOAT16);
  const std::vector<float> values = FloatsOf(first_);
  for (int64_t i = 0; i < 700'000; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, pulled.data.data() + 2 * i, 2);
    ASSERT_EQ(bits, BFloat16Bits(values[7 + i])) << i;
  }
  EXPECT_EQ(PullByLane(request).data, pulled.data);
}

TEST_F(StoredPullTest, ASelectionThatNoModelHasDoesNotWaitForTheDisk) {
  Start();
  v1::PullRequest names = Request(1);
  for (int64_t i = 0; i <= kMaxTensorCount; ++i) names.mutable_selection()->add_tensors("a");
  EXPECT_EQ(ReasonOf(names), v1::ERROR_REASON_BAD_REQUEST);
  v1::PullRequest box = Request(1);
  v1::TensorSlice* const slice = box.mutable_selection()->add_slices();
  slice->set_tensor("a");
  for (int d = 0; d <= kMaxDimensions; ++d) slice->add_offsets(0);
  EXPECT_EQ(ReasonOf(box), v1::ERROR_REASON_BAD_REQUEST);
  EXPECT_EQ(disk_.open_count, 0);
}

TEST_F(StoredPullTest, AReaderGoesOnWhereItStopped) {
  Start();
  for (const int64_t offset : {int64_t{1}, int64_t{1} << 20, int64_t{2'000'003}, kBytes}) {
    v1::PullRequest request = ByLabel("best");
    request.set_offset(offset);
    const Pulled pulled = Pull(request);
    EXPECT_TRUE(pulled.complete) << offset;
    EXPECT_TRUE(IsData(pulled.data, first_, offset)) << offset;
    EXPECT_TRUE(IsData(PullByLane(request).data, first_, offset)) << offset;
  }
}

TEST_F(StoredPullTest, ASynthesizedAverageAlwaysComes) {
  Start();
  EMA_ASSERT_OK_AND_ASSIGN(
      const TrackRef track,
      model_->tracks().MakeSynthesizedTrack({.name = "built", .schedule = MakeSchedule("1ba")}));
  const SnapshotRef newest = *model_->history().Pin(0);
  auto built = std::make_shared<Snapshot>();
  built->record = newest->record;
  built->tracks = {*newest->Find("ema")};
  built->tracks[0].track = track;
  ASSERT_THAT(model_->tracks().AddSynthesized(std::move(built)), IsOk());
  v1::PullRequest request = Request();
  request.set_track("built");
  request.mutable_if_newer_than()->set_version(5);
  request.mutable_if_newer_than()->set_incarnation(7);
  const Pulled pulled = Pull(request);
  EXPECT_FALSE(pulled.header.not_newer());
  EXPECT_TRUE(pulled.complete);
  EXPECT_TRUE(IsData(pulled.data, newest_));
  request.set_track("bulit");
  EXPECT_THAT(Pull(request).result.status.error_message(),
              HasSubstr("no track \"bulit\"; it has ema, raw; synthesized for pulls: built"));
}

TEST_F(StoredPullTest, WithABaseEverythingIsSent) {
  Start();
  v1::PullRequest request = Request(1);
  request.mutable_base()->set_version(5);
  request.mutable_base()->set_incarnation(7);
  const Pulled pulled = Pull(request);
  EXPECT_TRUE(pulled.complete);
  EXPECT_FALSE(pulled.header.omits_unchanged());
  EXPECT_TRUE(IsData(pulled.data, first_));
}

TEST_F(StoredPullTest, ABadByteEndsThePullWithoutATrailer) {
  Start();
  disk_.on_read = [](int64_t offset, int64_t) {
    if (offset < (int64_t{1} << 20)) return absl::OkStatus();
    return MakeError(absl::StatusCode::kDataLoss, ErrorReason::kCheckpointCorrupt,
                     "track \"ema\", tensor \"a\": a byte is wrong");
  };
  const Pulled pulled = Pull(Request(1));
  EXPECT_EQ(pulled.result.status.error_code(), grpc::StatusCode::DATA_LOSS);
  EXPECT_EQ(pulled.result.detail.reason(), v1::ERROR_REASON_CHECKPOINT_CORRUPT);
  EXPECT_THAT(pulled.result.status.error_message(), HasSubstr("tensor \"a\""));
  EXPECT_FALSE(pulled.complete);
  EXPECT_EQ(pulled.data.size(), 1 << 20);
  const LanePulled by_lane = PullByLane(Request(1));
  EXPECT_FALSE(by_lane.complete);
  EXPECT_EQ(by_lane.error.code(), static_cast<int64_t>(absl::StatusCode::kDataLoss));
  EXPECT_EQ(by_lane.data.size(), 1 << 20);
  // What is in memory has not suffered.
  EXPECT_TRUE(Pull(Request()).complete);
}

TEST_F(StoredPullTest, WithoutADataDirectoryThereAreNoLabels) {
  StartServer();
  CreateAndOpen();
  v1::PullRequest request;
  request.set_model("m");
  request.set_track("ema");
  request.set_label("best");
  const CallResult result = Pull(request).result;
  EXPECT_EQ(result.status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(result.detail.reason(), v1::ERROR_REASON_NO_DATA_DIR);
  EXPECT_THAT(result.status.error_message(), HasSubstr("--data-dir"));
}

}  // namespace
}  // namespace ema
