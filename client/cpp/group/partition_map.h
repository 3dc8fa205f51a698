// SPDX-License-Identifier: Apache-2.0
//
// Which server of a group has which tensors of a model.
#ifndef EMA_CLIENT_CPP_GROUP_PARTITION_MAP_H_
#define EMA_CLIENT_CPP_GROUP_PARTITION_MAP_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "ema/manifest.h"
#include "ema/model_info.h"
#include "ema/selection.h"
#include "ema/shard.h"
#include "ema/v1/types.pb.h"

namespace ema::client_internal {

// The partitions of one incarnation of a model. Partition 0 is on the model's home. Immutable.
class PartitionMap {
 public:
  struct Partition {
    std::string member;
    std::string address;  // HOST:PORT; empty: the server does not run now.
    int64_t first_tensor = 0;
    Manifest manifest;  // Has the partition's tensors only.
  };

  // `model` is a reply to GetModel with partitions. INTERNAL: the reply is malformed, for example
  // because a tensor is in no partition.
  static absl::StatusOr<PartitionMap> Create(const v1::Model& model);

  // Describes the whole model.
  const ModelInfo& model() const { return model_; }
  int64_t incarnation() const { return incarnation_; }
  const std::vector<Partition>& partitions() const { return partitions_; }
  // The partition that has a tensor of the whole manifest.
  size_t Find(int64_t tensor_index) const;

  // The shards of a rank that are in one partition, in the order of the rank's layout. Their
  // tensor_index counts from the partition's first tensor.
  struct RankPart {
    std::vector<Shard> shards;
    int64_t frozen_shard_count = 0;  // See RankLayout::Create().
    std::vector<size_t> places;      // The index of each shard in the rank's layout.
  };
  // One for each partition.
  std::vector<RankPart> Split(const RankLayout& layout) const;

  // What a pull of `selection` from `track` reads of each partition; absent: nothing. At least one
  // is present. INVALID_ARGUMENT, BAD_REQUEST, as Client::Pull(): the selection does not fit the
  // model or the track. A track that the model did not have at GetModel is not checked.
  absl::StatusOr<std::vector<std::optional<Selection>>> Split(const Selection& selection,
                                                              std::string_view track) const;

 private:
  PartitionMap() = default;

  // By tensor: whether `track` keeps it. All true for an unknown track.
  std::vector<bool> StoredTensors(std::string_view track) const;

  ModelInfo model_;
  int64_t incarnation_ = 0;
  std::vector<Partition> partitions_;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_GROUP_PARTITION_MAP_H_
