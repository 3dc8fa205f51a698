// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/group/partition_map.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/transport/convert_replies.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/internal/tensor_pattern.h"
#include "ema/track.h"

namespace ema::client_internal {
namespace {

absl::Status IgnoredTensors(std::string_view field, std::string_view tensor,
                            std::string_view track) {
  return BadRequest(absl::StrCat(std::string(field), ": \"", absl::CHexEscape(std::string(tensor)),
                                 "\": track \"", std::string(track),
                                 "\" ignores every tensor of that name"));
}

}  // namespace

absl::StatusOr<PartitionMap> PartitionMap::Create(const v1::Model& model) {
  PartitionMap map;
  EMA_ASSIGN_OR_RETURN(map.model_, FromProto(model));
  map.incarnation_ = model.incarnation();
  const absl::Span<const TensorSpec> tensors = map.model_.manifest.tensors();
  int64_t next = 0;
  for (const v1::Partition& partition : model.partitions()) {
    const int64_t count = partition.tensor_count();
    if (partition.first_tensor() != next || count < 1 || count > std::ssize(tensors) - next) {
      return MalformedReply(absl::StrCat("partition ", map.partitions_.size(), " has ", count,
                                         " tensors from ", partition.first_tensor(), " on, of ",
                                         tensors.size(), "; expected it to begin at ", next));
    }
    const absl::Span<const TensorSpec> part = tensors.subspan(next, count);
    EMA_ASSIGN_OR_RETURN(Manifest manifest, Manifest::Create({part.begin(), part.end()}));
    map.partitions_.push_back({partition.member(), partition.address(), next, std::move(manifest)});
    next += count;
  }
  if (map.partitions_.empty() || next != std::ssize(tensors)) {
    return MalformedReply(
        absl::StrCat("the partitions have ", next, " tensors of ", tensors.size()));
  }
  return map;
}

size_t PartitionMap::Find(int64_t tensor_index) const {
  const auto after = std::upper_bound(
      partitions_.begin(), partitions_.end(), tensor_index,
      [](int64_t index, const Partition& partition) { return index < partition.first_tensor; });
  return std::distance(partitions_.begin(), after) - 1;
}

std::vector<PartitionMap::RankPart> PartitionMap::Split(const RankLayout& layout) const {
  std::vector<RankPart> parts(partitions_.size());
  const size_t frozen_begin = layout.shards().size() - layout.frozen_shards().size();
  for (size_t i = 0; i < layout.shards().size(); ++i) {
    Shard shard = layout.shards()[i];
    const size_t partition = Find(shard.tensor_index);
    shard.tensor_index -= partitions_[partition].first_tensor;
    RankPart& part = parts[partition];
    part.shards.push_back(std::move(shard));
    part.places.push_back(i);
    if (i >= frozen_begin) ++part.frozen_shard_count;
  }
  return parts;
}

std::vector<bool> PartitionMap::StoredTensors(std::string_view track) const {
  std::vector<bool> stored(model_.manifest.tensor_count(), true);
  const auto known =
      std::find_if(model_.tracks.begin(), model_.tracks.end(),
                   [track](const TrackConfig& config) { return config.name == track; });
  if (known == model_.tracks.end()) return stored;
  const std::vector<TensorAction> actions = ActionsOf(*known, model_.manifest);
  std::transform(actions.begin(), actions.end(), stored.begin(),
                 [](TensorAction action) { return action != TensorAction::kIgnore; });
  return stored;
}

absl::StatusOr<std::vector<std::optional<Selection>>> PartitionMap::Split(
    const Selection& selection, std::string_view track) const {
  const std::vector<bool> stored = StoredTensors(track);
  const auto is_stored = [&stored](int64_t tensor) { return stored[tensor]; };
  std::vector<std::optional<Selection>> parts(partitions_.size());
  const auto select = [&](size_t partition) -> Selection& {
    if (!parts[partition].has_value()) {
      parts[partition].emplace();
      parts[partition]->dtype = selection.dtype;
      parts[partition]->overflow = selection.overflow;
    }
    return *parts[partition];
  };
  if (selection.selects_all()) {
    for (int64_t i = 0; i < model_.manifest.tensor_count(); ++i) {
      if (is_stored(i)) select(Find(i));
    }
    // A track without tensors has versions, too.
    if (std::none_of(stored.begin(), stored.end(), [](bool one) { return one; })) select(0);
    return parts;
  }
  GlobBudget budget;
  for (const std::string& pattern : selection.tensors) {
    const absl::StatusOr<std::vector<int64_t>> matches =
        FindTensors(pattern, model_.manifest, budget);
    if (!matches.ok()) return BadRequest(absl::StrCat("tensors: ", matches.status().message()));
    if (std::none_of(matches->begin(), matches->end(), is_stored)) {
      return IgnoredTensors("tensors", pattern, track);
    }
    for (const int64_t tensor : *matches) {
      if (!is_stored(tensor)) continue;
      std::vector<std::string>& patterns = select(Find(tensor)).tensors;
      if (patterns.empty() || patterns.back() != pattern) patterns.push_back(pattern);
    }
  }
  for (const TensorSlice& slice : selection.slices) {
    const absl::StatusOr<std::vector<int64_t>> matches =
        FindTensors(slice.tensor, model_.manifest, budget);
    if (!matches.ok()) return BadRequest(absl::StrCat("slices: ", matches.status().message()));
    if (matches->size() > 1) {
      return BadRequest(absl::StrCat("slices: \"", absl::CHexEscape(slice.tensor), "\" matches ",
                                     matches->size(), " tensors, expected one"));
    }
    if (!is_stored(matches->front())) return IgnoredTensors("slices", slice.tensor, track);
    select(Find(matches->front())).slices.push_back(slice);
  }
  return parts;
}

}  // namespace ema::client_internal
