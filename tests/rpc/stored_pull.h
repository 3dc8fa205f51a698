// SPDX-License-Identifier: Apache-2.0
//
// A server with a version that is only on the disk, which is a fake.
#ifndef EMA_TESTS_RPC_STORED_PULL_H_
#define EMA_TESTS_RPC_STORED_PULL_H_

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/synchronization/notification.h"
#include "ema/v1/lane.pb.h"
#include "server/core/checkpoints.h"
#include "server/wire/lane_pipe.h"
#include "tests/core/test_model.h"
#include "tests/rpc/rpc_fixture.h"
#include "tests/testutil/fake_stored_track.h"

namespace ema {

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
    }
  }
  // A track must not outlive its model.
  void Clear() { kept_.clear(); }
  // Before each opening, and each read of a chunk.
  std::function<absl::Status()> on_open;
  FakeStoredTrack::OnRead on_read;
  std::map<std::string, VersionId, std::less<>> labels;
  std::atomic<int64_t> open_count = 0;

  absl::StatusOr<VersionId> FindLabel(Model&, std::string_view label) override {
    const auto it = labels.find(label);
    if (it != labels.end()) return it->second;
    return MakeError(absl::StatusCode::kNotFound, ErrorReason::kLabelNotFound,
                     absl::StrCat("no label \"", std::string(label), "\"; there is best"));
  }
  absl::StatusOr<std::vector<KnownVersion>> OnDisk(Model&, bool with_partial) override {
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
      const SnapshotRef version = *model_->history().Pin(0);
      disk_.Keep(*version, model_->device());
      first_ = *ReadAll(*model_, "ema");
    }
    newest_ = *ReadAll(*model_, "ema");
    ASSERT_EQ(GetErrorReason(model_->history().Pin(1).status()), ErrorReason::kVersionNotKept);
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

}  // namespace ema

#endif  // EMA_TESTS_RPC_STORED_PULL_H_
