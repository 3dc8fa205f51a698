// SPDX-License-Identifier: Apache-2.0
//
// Pulls of labels and of versions that are only on the disk, by gRPC and by lane; and that nobody
// else waits for that disk.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <thread>

#include "absl/synchronization/notification.h"
#include "ema/v1/lane.pb.h"
#include "server/base/lane_pipe.h"
#include "server/device/cast.h"
#include "tests/core/test_model.h"
#include "tests/rpc/rpc_fixture.h"
#include "tests/testutil/fake_stored_track.h"

namespace ema {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

absl::Status NotAskedFor() { return absl::UnimplementedError("not asked for by pulls"); }

// Versions that were in memory when Keep() was called. Thread-safe once it serves.
class FakeCheckpoints final : public Checkpoints {
 public:
  // With `only`: a partial checkpoint, of that track.
  void Keep(const Snapshot& version, Device& device, std::string_view only = "") {
    Kept& kept = kept_[version.record.id()];
    kept.version = version;
    kept.is_partial = !only.empty();
    if (kept.is_partial) {
      std::erase_if(kept.version.tracks,
                    [only](const TrackSnapshot& track) { return track.track->name() != only; });
    }
    for (TrackSnapshot& track : kept.version.tracks) {
      kept.bytes[track.track->name()] = BytesOfBlocks(device, track);
      track.blocks.clear();
      track.low_blocks.clear();
    }
  }
  // A track must not outlive its model.
  void Clear() { kept_.clear(); }
  // Before each opening, and each read of a chunk.
  std::function<absl::Status()> on_open;
  FakeStoredTrack::OnRead on_read;
  std::map<std::string, VersionId, std::less<>> labels;
  std::atomic<int64_t> open_count = 0;

  absl::StatusOr<VersionId> FindLabel(const Model&, std::string_view label) override {
    const auto it = labels.find(label);
    if (it != labels.end()) return it->second;
    return MakeError(absl::StatusCode::kNotFound, ErrorReason::kLabelNotFound,
                     absl::StrCat("no label \"", std::string(label), "\"; there is best"));
  }
  absl::StatusOr<std::vector<KnownVersion>> OnDisk(const Model&, bool with_partial) override {
    std::vector<KnownVersion> on_disk;
    for (const auto& [id, kept] : kept_) {
      if (kept.is_partial && !with_partial) continue;
      on_disk.push_back({.id = id, .step = kept.version.record.step, .can_restore = true});
    }
    std::reverse(on_disk.begin(), on_disk.end());  // Newest first.
    return on_disk;
  }
  absl::StatusOr<SnapshotRef> OpenVersion(Model&, const VersionId& id,
                                          std::string_view track) override {
    ++open_count;
    if (on_open) EMA_RETURN_IF_ERROR(on_open());
    const auto it = std::find_if(kept_.begin(), kept_.end(), [&](const auto& entry) {
      return entry.first.version == id.version &&
             (id.incarnation == 0 || id.incarnation == entry.first.incarnation);
    });
    if (it == kept_.end()) {
      return MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
                       absl::StrCat("version ", id.version, " is not on the disk either"));
    }
    if (it->second.version.Find(track) == nullptr) {
      if (it->second.is_partial) {
        return MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
                         "only other tracks were saved");
      }
      return MakeError(absl::StatusCode::kNotFound, ErrorReason::kTrackNotFound, "not in it");
    }
    return AsStored(
        it->second.version, track,
        std::make_shared<FakeStoredTrack>(it->second.bytes.find(track)->second, on_read));
  }

  absl::Status health() const override { return NotAskedFor(); }
  absl::StatusOr<Saved> Save(Model&, const SaveRequest&) override { return NotAskedFor(); }
  absl::StatusOr<CheckpointInfo> Get(Model&, std::string_view) override { return NotAskedFor(); }
  absl::StatusOr<Listing> List(Model&) override { return NotAskedFor(); }
  absl::Status Delete(Model&, std::string_view) override { return NotAskedFor(); }
  absl::StatusOr<Version> Restore(Model&, const VersionId&, std::string_view) override {
    return NotAskedFor();
  }
  absl::StatusOr<std::optional<VersionId>> Resume(Model&, const Model::Launch&,
                                                  const ResumePoint&) override {
    return NotAskedFor();
  }
  absl::StatusOr<CheckpointLabel> SetLabel(Model&, const std::string&, const VersionId&) override {
    return NotAskedFor();
  }
  absl::Status RemoveLabel(Model&, const std::string&) override { return NotAskedFor(); }
  absl::StatusOr<MetricResult> ReportMetric(Model&, const CheckpointLabel&) override {
    return NotAskedFor();
  }
  absl::StatusOr<Synthesis> Synthesize(Model&, const SynthesisRequest&) override {
    return NotAskedFor();
  }
  absl::Status CheckMayForget() override { return absl::OkStatus(); }
  absl::Status Forget(std::string_view) override { return absl::OkStatus(); }
  absl::Status Purge(std::string_view) override { return absl::OkStatus(); }

 private:
  struct Kept {
    Snapshot version;  // Without blocks.
    bool is_partial = false;
    std::map<std::string, std::vector<std::byte>, std::less<>> bytes;  // By track.
  };
  std::map<VersionId, Kept> kept_;
};

// A model "big" of 3 MB, which a pull reads in three chunks. Version 1 is on the disk only, and has
// the label "best"; the newest, 5, is in memory only, and has the label "newest".
class StoredPullTest : public RpcFixture {
 protected:
  static constexpr int64_t kCount = 750'001;
  static constexpr int64_t kBytes = kCount * 4;

  ~StoredPullTest() override { server_.reset(); }  // It uses the members.

  void Start(RpcServer::Options options = {}) {
    checkpoints_ = &disk_;
    StartServer(options);
    const auto created =
        store_->Create({.name = "big",
                        .manifest = MakeManifest(
                            {{"a", Dtype::kFloat32, {kCount - 1}}, {"b", Dtype::kFloat32, {1}}}),
                        .tracks = {{.name = "ema", .schedule = MakeSchedule("smoothing=0.5")},
                                   {.name = "raw", .schedule = MakeSchedule("copy")}}});
    ASSERT_THAT(created, IsOk());
    model_ = created->model;
    rank_ = std::make_unique<TestRank>(model_, "run");
    ASSERT_THAT(rank_->Join(), IsOk());
    for (int64_t step = 1; step <= 5; ++step) {
      ASSERT_THAT(rank_->Push(step, Weights(step)), IsOk());
      if (step > 1) continue;
      const SnapshotRef version = *model_->PinVersion(0);
      disk_.Keep(*version, model_->device());
      first_ = *ReadAll(*model_, "ema");
    }
    newest_ = *ReadAll(*model_, "ema");
    ASSERT_EQ(GetErrorReason(model_->PinVersion(1).status()), ErrorReason::kVersionNotKept);
    disk_.labels = {{"best", {1, 7}}, {"newest", {5, 7}}, {"gone", {2, 7}}};
  }

  static std::vector<std::byte> Weights(int64_t step) {
    std::vector<float> values(kCount);
    for (int64_t i = 0; i < kCount; ++i) {
      values[i] = static_cast<float>(step * 1000 + i % 1009);
    }
    return BytesOf(values);
  }

  static v1::PullRequest Request(int64_t version = 0) {
    v1::PullRequest request;
    request.set_model("big");
    request.set_track("ema");
    request.set_version(version);
    return request;
  }
  static v1::PullRequest ByLabel(const std::string& label) {
    v1::PullRequest request = Request();
    request.set_label(label);
    return request;
  }
  static v1::PullRequest ByStep(int64_t step) {
    v1::PullRequest request = Request();
    request.set_step(step);
    return request;
  }
  static bool IsData(const std::string& data, const std::vector<std::byte>& bytes,
                     int64_t offset = 0) {
    return data.size() + offset == bytes.size() &&
           std::memcmp(data.data(), bytes.data() + offset, data.size()) == 0;
  }
  v1::ErrorReason ReasonOf(const v1::PullRequest& request) {
    return Pull(request).result.detail.reason();
  }

  struct LanePulled {
    v1::PullHeader header;
    std::string data;
    bool complete = false;
    v1::LaneError error;
  };
  LanePulled PullByLane(const v1::PullRequest& request) {
    v1::GetLaneResponse offer;
    grpc::ClientContext context;
    EXPECT_TRUE(stub_->GetLane(&context, v1::GetLaneRequest(), &offer).ok());
    const auto lane = LanePipe::Connect(offer.socket_name());
    EXPECT_THAT(lane, IsOk());
    v1::LaneRequest lane_request;
    *lane_request.mutable_pull() = request;
    EXPECT_THAT((*lane)->SendMessage(lane_request.SerializeAsString(), nullptr), IsOk());
    LanePulled pulled;
    while (true) {
      const absl::StatusOr<LanePipe::Frame> frame = (*lane)->Receive(nullptr);
      if (!frame.ok()) return pulled;
      if (frame->is_chunk) {
        EXPECT_EQ(frame->offset, request.offset() + static_cast<int64_t>(pulled.data.size()));
        pulled.data.append(reinterpret_cast<const char*>(frame->bytes.data()), frame->bytes.size());
        continue;
      }
      v1::LaneResponse response;
      EXPECT_TRUE(response.ParseFromString(frame->message));
      if (response.has_pull()) pulled.header = response.pull();
      if (response.has_error()) pulled.error = response.error();
      if (response.has_trailer()) {
        pulled.complete =
            response.trailer().total_bytes() == static_cast<int64_t>(pulled.data.size());
        return pulled;
      }
    }
  }

  // Lets a disk stand still, from its `n`-th read on.
  void BlockReadsFrom(int n) {
    disk_.on_read = [this, left = std::make_shared<std::atomic<int>>(n)](int64_t, int64_t) {
      if (--*left > 0) return absl::OkStatus();
      if (!is_blocked_.once.exchange(true)) is_blocked_.notification.Notify();
      go_on_.WaitForNotification();
      return absl::OkStatus();
    };
  }
  struct {
    std::atomic<bool> once = false;
    absl::Notification notification;
  } is_blocked_;
  absl::Notification go_on_;

  std::shared_ptr<Model> model_;
  FakeCheckpoints disk_;
  std::unique_ptr<TestRank> rank_;
  std::vector<std::byte> first_;   // Version 1.
  std::vector<std::byte> newest_;  // Version 5.
};

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
  const Snapshot newest = **model_->PinVersion(5);
  const SnapshotRef pins[] = {*model_->PinVersion(3), *model_->PinVersion(4)};
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
  const std::shared_ptr<Reading> reading = model_->FindStoredReading({1, 7}, "ema", {});
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
  disk_.Keep(**model_->PinVersion(0), model_->device(), "ema");
  const std::vector<std::byte> sixth = *ReadAll(*model_, "ema");
  for (int64_t step = 7; step <= 10; ++step) {
    ASSERT_THAT(rank_->Push(step, Weights(step)), IsOk());
  }
  ASSERT_EQ(GetErrorReason(model_->PinVersion(6).status()), ErrorReason::kVersionNotKept);
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
              HasSubstr("of step 2 no version is in memory or on the disk; there are step 1 "
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
  const SnapshotRef fifth = *model_->PinVersion(5);
  for (int64_t step : {6, 8}) {  // Versions 6 and 7.
    ASSERT_THAT(rank_->Push(step, Weights(step)), IsOk());
    disk_.Keep(**model_->PinVersion(0), model_->device());
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
  const Snapshot newest = **model_->PinVersion(5);
  const SnapshotRef pins[] = {*model_->PinVersion(3), *model_->PinVersion(4)};
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
  for (int d = 0; d <= kMaxRank; ++d) slice->add_offsets(0);
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
      model_->MakeSynthesizedTrack({.name = "built", .schedule = MakeSchedule("1ba")}));
  const SnapshotRef newest = *model_->PinVersion(0);
  auto built = std::make_shared<Snapshot>();
  built->record = newest->record;
  built->tracks = {*newest->Find("ema")};
  built->tracks[0].track = track;
  ASSERT_THAT(model_->AddSynthesized(std::move(built)), IsOk());
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

TEST_F(StoredPullTest, ManyAtOnceCostOneReadOfTheDisk) {
  Start();
  constexpr int kReaders = 32;
  std::atomic<int64_t> read_bytes = 0;
  disk_.on_read = [&](int64_t, int64_t length_bytes) {
    read_bytes += length_bytes;
    return absl::OkStatus();
  };
  // Held so that the last of the readers, too, comes while somebody reads.
  const auto held =
      model_->ReadStored(*disk_.OpenVersion(*model_, {1, 7}, "ema"), /*selection=*/{});
  ASSERT_THAT(held, IsOk());
  std::vector<std::thread> readers;
  std::atomic<int> good = 0;
  for (int i = 0; i < kReaders; ++i) {
    readers.emplace_back([&, i] {
      const bool by_lane = i % 4 == 3;
      const v1::PullRequest request = i % 2 == 0 ? Request(1) : ByLabel("best");
      good += IsData(by_lane ? PullByLane(request).data : Pull(request).data, first_) ? 1 : 0;
    });
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(good, kReaders);
  EXPECT_EQ(read_bytes, kBytes);
}

TEST_F(StoredPullTest, NobodyElseWaitsForASlowDisk) {
  Start();
  BlockReadsFrom(2);
  Pulled slow;
  std::thread reader([&] { slow = Pull(Request(1)); });
  is_blocked_.notification.WaitForNotification();
  // While the disk stands still: pulls from memory by both ways, pushes, and calls.
  EXPECT_TRUE(IsData(Pull(Request()).data, newest_));
  EXPECT_TRUE(IsData(PullByLane(Request()).data, newest_));
  CreateAndOpen();
  v1::PushResponse response;
  EXPECT_TRUE(PushFilled(1, 2.0f, &response).status.ok());
  EXPECT_EQ(Pull("ema").data, Filled(2.0f));
  go_on_.Notify();
  reader.join();
  EXPECT_TRUE(slow.complete);
  EXPECT_TRUE(IsData(slow.data, first_));
}

TEST_F(StoredPullTest, NorForOneThatIsSlowToOpen) {
  Start();
  disk_.on_open = [this] {
    is_blocked_.notification.Notify();
    go_on_.WaitForNotification();
    return absl::OkStatus();
  };
  Pulled slow;
  std::thread reader([&] { slow = Pull(ByLabel("best")); });
  is_blocked_.notification.WaitForNotification();
  EXPECT_TRUE(IsData(Pull(ByLabel("newest")).data, newest_));
  go_on_.Notify();
  reader.join();
  EXPECT_TRUE(IsData(slow.data, first_));
}

TEST_F(StoredPullTest, LongListsThatWaitForTheDiskHaveOneBudget) {
  Start();
  disk_.on_open = [this] {
    go_on_.WaitForNotification();
    return absl::OkStatus();
  };
  v1::PullRequest request = Request(1);
  for (int i = 0; i < 150'000; ++i) {
    request.mutable_selection()->add_tensors(std::string(40, 'a'));
  }
  // Of 72 bytes a name: six fit into 64 MiB.
  std::atomic<int> refused = 0;
  std::atomic<int> opened = 0;
  {
    std::vector<std::jthread> readers;
    for (int i = 0; i < 8; ++i) {
      readers.emplace_back([&] {
        const v1::ErrorReason reason = ReasonOf(request);
        (reason == v1::ERROR_REASON_MEMORY_BUDGET ? refused : opened) += 1;
      });
    }
    while (refused < 2) std::this_thread::yield();
    go_on_.Notify();
  }
  EXPECT_EQ(refused, 2);
  EXPECT_EQ(opened, 6);
  EXPECT_EQ(ReasonOf(request), v1::ERROR_REASON_BAD_REQUEST);  // There is no such tensor.
}

TEST_F(StoredPullTest, AReaderThatWaitsForTheDiskHasNotStalled) {
  RpcServer::Options options;
  options.limits.max_pull_streams = 1;
  options.limits.stream_timeout = absl::Milliseconds(20);
  Start(options);
  BlockReadsFrom(2);
  Pulled slow;
  std::thread reader([&] { slow = Pull(Request(1)); });
  is_blocked_.notification.WaitForNotification();
  // It would lose its place to one of these if it counted as stalled.
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(ReasonOf(Request()), v1::ERROR_REASON_TOO_MANY_STREAMS);
  }
  go_on_.Notify();
  reader.join();
  EXPECT_TRUE(slow.complete);
}

TEST_F(StoredPullTest, AReaderThatLeavesMeanwhileIsLetGo) {
  Start();
  BlockReadsFrom(2);
  std::weak_ptr<Model> model = model_;
  {
    grpc::ClientContext context;
    const auto stream = stub_->Pull(&context, Request(1));
    v1::PullResponse response;
    ASSERT_TRUE(stream->Read(&response));
    is_blocked_.notification.WaitForNotification();
    context.TryCancel();
    while (stream->Read(&response)) {
    }
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  go_on_.Notify();
  // The place is free again, and nothing is held.
  EXPECT_TRUE(IsData(Pull(Request(1)).data, first_));
  server_->Shutdown(After(SteadyNow(), absl::Seconds(10)));
  server_.reset();
  disk_.Clear();
  rank_.reset();
  model_.reset();
  store_.reset();
  EXPECT_TRUE(model.expired());
}

TEST_F(StoredPullTest, APullThatIsRunningFinishesWhileTheServerStops) {
  Start();
  BlockReadsFrom(2);
  Pulled slow;
  std::thread reader([&] { slow = Pull(Request(1)); });
  is_blocked_.notification.WaitForNotification();
  std::thread stopper([&] { server_->Shutdown(After(SteadyNow(), absl::Seconds(30))); });
  while (NewChannel()->WaitForConnected(std::chrono::system_clock::now() +
                                        std::chrono::milliseconds(100))) {
  }  // Until nobody gets in any more.
  go_on_.Notify();
  stopper.join();
  reader.join();
  EXPECT_TRUE(slow.complete) << slow.result.status.error_message();
  EXPECT_TRUE(IsData(slow.data, first_));
}

TEST_F(StoredPullTest, AServerThatMustStopAtOnceEndsIt) {
  Start();
  BlockReadsFrom(2);
  Pulled slow;
  std::thread reader([&] { slow = Pull(Request(1)); });
  is_blocked_.notification.WaitForNotification();
  std::thread stopper([&] { server_->Shutdown(SteadyNow()); });
  reader.join();  // Told at once; the disk's read ends later.
  EXPECT_FALSE(slow.result.status.ok());
  EXPECT_FALSE(slow.complete);
  go_on_.Notify();
  stopper.join();
}

TEST_F(StoredPullTest, ADeletedModelsPullFinishes) {
  Start();
  BlockReadsFrom(2);
  Pulled slow;
  std::thread reader([&] { slow = Pull(Request(1)); });
  is_blocked_.notification.WaitForNotification();
  EXPECT_TRUE(store_->Delete("big"));
  go_on_.Notify();
  reader.join();
  EXPECT_TRUE(slow.complete);
  EXPECT_EQ(ReasonOf(Request(1)), v1::ERROR_REASON_MODEL_NOT_FOUND);
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
  EXPECT_THAT(result.status.error_message(), HasSubstr("\"best\""));
}

}  // namespace
}  // namespace ema
