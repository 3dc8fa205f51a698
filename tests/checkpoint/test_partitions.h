// SPDX-License-Identifier: Apache-2.0
//
// A model in partitions, as the servers of a group have it, in one process.
#ifndef EMA_TESTS_CHECKPOINT_TEST_PARTITIONS_H_
#define EMA_TESTS_CHECKPOINT_TEST_PARTITIONS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/checkpoint/checkpoint_writer.h"
#include "tests/checkpoint/test_checkpoints.h"

namespace ema {

// The config of the partition that has `count` tensors from number `first` on.
inline ModelConfig PartitionConfig(ModelConfig config, int64_t first, int64_t count) {
  const auto tensors = config.manifest->tensors().subspan(first, count);
  config.manifest = MakeManifest({tensors.begin(), tensors.end()});
  return config;
}

// The bytes of a part of `weights`, which are those of a whole model.
inline std::vector<std::byte> PartOfWeights(const std::vector<std::byte>& weights,
                                            const Manifest& manifest, int64_t first,
                                            int64_t count) {
  const auto bytes_before = [&manifest](int64_t tensor) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < tensor; ++i) {
      bytes += manifest.tensor(i).element_count() * DtypeSize(manifest.tensor(i).dtype);
    }
    return bytes;
  };
  return {weights.begin() + bytes_before(first), weights.begin() + bytes_before(first + count)};
}

// The same model in one piece and in partitions, which have `tensor_counts` tensors, after the same
// pushes of random weights.
class TestPartitions {
 public:
  struct Partition {
    int64_t first_tensor = 0;
    int64_t tensor_count = 0;
    std::unique_ptr<ModelStore> models;
    std::shared_ptr<Model> model;
    std::unique_ptr<TestRank> rank;
    SnapshotRef snapshot;  // The newest version.
  };

  TestPartitions(const ModelConfig& config, const std::vector<int64_t>& tensor_counts)
      : manifest_(config.manifest), whole_(Create(config, 0, manifest_->tensor_count())) {
    int64_t first = 0;
    for (const int64_t count : tensor_counts) {
      partitions_.push_back(Create(config, first, count));
      first += count;
    }
    EXPECT_EQ(first, manifest_->tensor_count());
  }

  // All of them get a version, with equal records.
  void Push(int64_t step) {
    const std::vector<std::byte> weights = RandomWeights(*manifest_, static_cast<uint32_t>(step));
    PushTo(whole_, step, weights);
    for (Partition& partition : partitions_) PushTo(partition, step, weights);
    for (Partition& partition : partitions_) {
      auto snapshot = std::make_shared<Snapshot>(*partition.snapshot);
      snapshot->record = whole_.snapshot->record;
      partition.snapshot = std::move(snapshot);
    }
  }

  const Partition& whole() const { return whole_; }
  Partition& operator[](size_t i) { return partitions_[i]; }
  size_t count() const { return partitions_.size(); }

  // The numbers of the files of each partition.
  std::vector<std::map<std::string, WriteOptions::FileNumbers>> NumberFiles(
      int64_t max_file_bytes) const {
    std::map<std::string, size_t> all;
    std::vector<std::map<std::string, WriteOptions::FileNumbers>> numbers;
    for (const Partition& partition : partitions_) {
      auto& own = numbers.emplace_back();
      for (const auto& [track, count] : FileCounts(partition.model->config(), max_file_bytes)) {
        own[track].first = all[track];
        all[track] += count;
      }
    }
    for (auto& own : numbers) {
      for (auto& [track, of_track] : own) of_track.count = all[track];
    }
    return numbers;
  }

 private:
  static Partition Create(const ModelConfig& config, int64_t first, int64_t count) {
    Partition partition{.first_tensor = first, .tensor_count = count};
    partition.models = std::make_unique<ModelStore>(TestDevice(), SmallBlocks());
    const auto model = partition.models->CreatePartition(PartitionConfig(config, first, count),
                                                         kTestIncarnation, /*gate=*/nullptr);
    EXPECT_THAT(model, IsOk());
    partition.model = *model;
    partition.rank = std::make_unique<TestRank>(partition.model, "launch");
    EXPECT_THAT(partition.rank->Join(), IsOk());
    return partition;
  }

  void PushTo(Partition& partition, int64_t step, const std::vector<std::byte>& weights) {
    EXPECT_THAT(
        partition.rank->Push(step, PartOfWeights(weights, *manifest_, partition.first_tensor,
                                                 partition.tensor_count)),
        IsOk());
    partition.snapshot = *partition.model->history().Pin(0);
  }

  const std::shared_ptr<const Manifest> manifest_;
  Partition whole_;
  std::vector<Partition> partitions_;
};

// Expects that `read`, of a model of `tensor_count` tensors from number `first_tensor` on, has the
// values and states of `whole`.
inline void ExpectPartOf(Model& model, const Snapshot& read, const TestPartitions::Partition& whole,
                         int64_t first_tensor, int64_t tensor_count) {
  const Snapshot& expected = *whole.snapshot;
  EXPECT_EQ(read.record.id(), expected.record.id());
  EXPECT_EQ(read.record.step, expected.record.step);
  ASSERT_EQ(read.tracks.size(), expected.tracks.size());
  const auto is_equal = [&](const TrackSnapshot& part, const TrackSnapshot& all) {
    EXPECT_EQ(part.state, all.state);
    EXPECT_EQ(part.last_steps, all.last_steps);
    return part.track->config() == all.track->config();
  };
  for (size_t t = 0; t < expected.tracks.size(); ++t) {
    SCOPED_TRACE(expected.tracks[t].track->name());
    EXPECT_TRUE(is_equal(read.tracks[t], expected.tracks[t]));
    const auto all = TensorsOf(*whole.model, expected, static_cast<int64_t>(t));
    // Not EXPECT_EQ, which would print them.
    EXPECT_TRUE(TensorsOf(model, read, static_cast<int64_t>(t)) ==
                std::vector(all.begin() + first_tensor, all.begin() + first_tensor + tensor_count));
  }
}

}  // namespace ema

#endif  // EMA_TESTS_CHECKPOINT_TEST_PARTITIONS_H_
