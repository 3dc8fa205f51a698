// SPDX-License-Identifier: Apache-2.0
//
// Helpers to push into a Model and read from it without a network.
#ifndef EMA_TESTS_CORE_TEST_MODEL_H_
#define EMA_TESTS_CORE_TEST_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/base/crc32c.h"
#include "server/core/model.h"
#include "server/core/model_store.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/test_device.h"

namespace ema {

inline std::vector<std::byte> BytesOf(const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(float));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

inline std::vector<float> FloatsOf(const std::vector<std::byte>& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

inline Schedule MakeSchedule(const std::string& text) { return *Schedule::Parse(text); }

// With an interval: "at every `interval`".
inline Schedule MakeSchedule(const std::string& half_life, const std::string& interval) {
  return *Schedule::FromFields({{"half_life", half_life}, {"update_interval", interval}});
}

inline std::shared_ptr<const Manifest> MakeManifest(std::vector<TensorSpec> tensors) {
  return std::make_shared<const Manifest>(*Manifest::Create(std::move(tensors)));
}

// The end of a push, as its callback got it.
struct PushOutcome {
  int calls = 0;
  absl::StatusOr<PushResult> result = absl::UnknownError("not ended");
};

// One rank of a run that pushes flat bytes.
class TestRank {
 public:
  TestRank(std::shared_ptr<Model> model, std::string launch_id, int64_t rank = 0,
           int64_t world_size = 1, std::vector<Shard> shards = {}, bool whole = true)
      : model_(std::move(model)),
        launch_id_(std::move(launch_id)),
        rank_(rank),
        world_size_(world_size),
        shards_(std::move(shards)) {
    if (whole) {
      for (int64_t i = 0; i < model_->manifest().tensor_count(); ++i) {
        shards_.push_back(WholeTensor(model_->manifest(), i));
      }
    }
  }

  // The last `frozen_shard_count` shards are frozen.
  absl::Status Join(int64_t frozen_shard_count = 0) {
    EMA_ASSIGN_OR_RETURN(RankLayout layout,
                         RankLayout::Create(model_->manifest(), shards_, frozen_shard_count));
    EMA_ASSIGN_OR_RETURN(joined_, model_->JoinRun({launch_id_, joined_.run_epoch}, rank_,
                                                  world_size_, std::move(layout)));
    return absl::OkStatus();
  }
  // As the last Join() has got it.
  const PushPlan& plan() const { return joined_.plan; }
  // What the next pushes say of the time at their step.
  void SetTime(std::function<TrainingTime(int64_t step)> time) { time_ = std::move(time); }
  // Whether the next pushes omit the frozen shards.
  void SetOmitsFrozen(bool omits_frozen) { omits_frozen_ = omits_frozen; }
  // The streams that are opened next push side by side.
  void SetStreams(int64_t group, int64_t count) {
    stream_group_ = group;
    stream_count_ = count;
  }

  int64_t run_epoch() const { return joined_.run_epoch; }

  PushStart Start(int64_t step) const {
    return {.run_epoch = joined_.run_epoch,
            .rank = rank_,
            .layout_digest = joined_.layout_digest,
            .step = step,
            .time = time_(step),
            .omits_frozen = omits_frozen_,
            .stream_group = stream_group_,
            .stream_count = stream_count_};
  }

  absl::StatusOr<std::unique_ptr<RankPush>> Open(int64_t step,
                                                 std::shared_ptr<PushOutcome> outcome) {
    return model_->OpenPush(Start(step), [outcome](const absl::StatusOr<PushResult>& result) {
      ++outcome->calls;
      outcome->result = result;
    });
  }

  static absl::Status AddChunk(RankPush& push, const std::vector<std::byte>& bytes, int64_t offset,
                               int64_t length) {
    const std::span<const std::byte> piece(bytes.data() + offset, length);
    return push.AddChunk({offset, Crc32c(0, piece), length}, {piece});
  }

  static PushTotals EndOf(const std::vector<std::byte>& bytes, int64_t chunks) {
    return {chunks, static_cast<int64_t>(bytes.size()), Crc32c(0, bytes)};
  }

  // A whole push in chunks of `chunk_bytes`. For a run of one rank: gives the published version.
  absl::StatusOr<PushResult> Push(int64_t step, const std::vector<std::byte>& bytes,
                                  int64_t chunk_bytes = 1 << 20) {
    auto outcome = std::make_shared<PushOutcome>();
    EMA_ASSIGN_OR_RETURN(auto push, Open(step, outcome));
    int64_t chunks = 0;
    for (int64_t offset = 0; offset < static_cast<int64_t>(bytes.size()); offset += chunk_bytes) {
      const int64_t length =
          std::min<int64_t>(chunk_bytes, static_cast<int64_t>(bytes.size()) - offset);
      EMA_RETURN_IF_ERROR(AddChunk(*push, bytes, offset, length));
      ++chunks;
    }
    EMA_RETURN_IF_ERROR(push->Commit(EndOf(bytes, chunks)));
    return outcome->result;
  }

 private:
  const std::shared_ptr<Model> model_;
  const std::string launch_id_;
  const int64_t rank_;
  const int64_t world_size_;
  std::vector<Shard> shards_;
  std::function<TrainingTime(int64_t)> time_ = [](int64_t step) {
    return TrainingTime::AtBatch(step);
  };
  bool omits_frozen_ = false;
  int64_t stream_group_ = 0;
  int64_t stream_count_ = 0;
  Model::JoinResult joined_;
};

// All bytes of a track of a version.
inline absl::StatusOr<std::vector<std::byte>> ReadAll(Model& model, std::string_view track_name,
                                                      int64_t version = 0) {
  EMA_ASSIGN_OR_RETURN(const SnapshotRef snapshot, model.history().Pin(version));
  const TrackSnapshot* const found = snapshot->Find(track_name);
  if (found == nullptr) return absl::NotFoundError("the version has no such track");
  const Track& track = *found->track;
  EMA_ASSIGN_OR_RETURN(
      const std::vector<HostPiece> pieces,
      ReadBlocks(model.device(), track, found->blocks, 0, track.layout().total_bytes()));
  std::vector<std::byte> bytes;
  for (const HostPiece& piece : pieces) {
    bytes.insert(bytes.end(), piece.bytes.begin(), piece.bytes.end());
  }
  return bytes;
}

inline std::shared_ptr<Device> TestDevice() { return NewTestDevice(int64_t{256} << 20); }

inline ModelStore::Options SmallBlocks() {
  ModelStore::Options options;
  options.memory_bytes = int64_t{1} << 30;
  options.model.block_bytes = 4096;  // So that small models have several blocks.
  options.model.incarnation = 7;
  options.model.has_data_dir = true;
  return options;
}

// What a store of SmallBlocks() reserves for it.
inline int64_t MemoryBytesOf(const ModelConfig& config) {
  ModelStore store(TestDevice(), SmallBlocks());
  EXPECT_THAT(store.Create(config), IsOk());
  return store.budget().reserved_bytes();
}

// What the device has taken, for blocks and for what it keeps of them.
inline int64_t TakenBytes(const Device& device) {
  return device.memory_use().block_bytes + device.memory_use().kept_bytes;
}

}  // namespace ema

#endif  // EMA_TESTS_CORE_TEST_MODEL_H_
