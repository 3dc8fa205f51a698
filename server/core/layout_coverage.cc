// SPDX-License-Identifier: Apache-2.0
#include "server/core/layout_coverage.h"

#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

absl::Status Refuse(ErrorReason reason, std::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, message);
}

// What comparing a layout's shards with other ranks' may cost, in nodes of trees: for each shard,
// and in all. Those that ranks cut tensors into take some tens each.
constexpr int64_t kStepsPerShard = 256;
constexpr int64_t kStepsAtLeast = 1'000'000;

}  // namespace

LayoutCoverage::LayoutCoverage(const Manifest* manifest)
    : manifest_(manifest), tensors_(manifest->tensors().size()) {}

absl::Status LayoutCoverage::Add(int64_t rank, std::shared_ptr<const RankLayout> layout) {
  EMA_RETURN_IF_ERROR(CheckDisjoint(rank, *layout));
  EMA_RETURN_IF_ERROR(CheckFrozen(rank, *layout));
  absl::flat_hash_map<int64_t, std::vector<BoxTree::Entry>> added;  // By tensor.
  for (const Shard& shard : layout->shards()) {
    if (shard.element_count() > 0) added[shard.tensor_index].push_back({&shard, rank});
  }
  // Made before anything changes.
  std::vector<std::pair<int64_t, Tensor>> changed;
  for (auto& [index, entries] : added) {
    Tensor tensor = tensors_[index];
    tensor.is_frozen = entries.front().box >= layout->frozen_shards().data();
    for (const BoxTree::Entry& entry : entries)
      tensor.covered_elements += entry.box->element_count();
    while (!tensor.trees.empty() && tensor.trees.back()->size() <= 2 * entries.size()) {
      const std::vector<BoxTree::Entry> before = tensor.trees.back()->Entries();
      entries.insert(entries.end(), before.begin(), before.end());
      tensor.trees.pop_back();
    }
    std::optional<BoxTree> tree = BoxTree::Make(std::move(entries));
    if (!tree.has_value()) return BoxTree::TooIrregular(manifest_->tensor(index));
    tensor.trees.push_back(std::make_shared<const BoxTree>(*std::move(tree)));
    changed.emplace_back(index, std::move(tensor));
  }
  for (auto& [index, tensor] : changed) tensors_[index] = std::move(tensor);
  layouts_.push_back(std::move(layout));
  return absl::OkStatus();
}

absl::Status LayoutCoverage::CheckDisjoint(int64_t rank, const RankLayout& layout) const {
  int64_t steps = kStepsPerShard * static_cast<int64_t>(layout.shards().size()) + kStepsAtLeast;
  for (const Shard& shard : layout.shards()) {
    if (shard.element_count() == 0) continue;
    const TensorSpec& spec = manifest_->tensor(shard.tensor_index);
    for (const std::shared_ptr<const BoxTree>& tree : tensors_[shard.tensor_index].trees) {
      const BoxTree::Entry* const other = tree->Find(shard, steps);
      if (steps < 0) return BoxTree::TooIrregular(spec);
      if (other == nullptr) continue;
      return Refuse(ErrorReason::kLayoutOverlap,
                    absl::StrCat("tensor \"", spec.name, "\": ", BoxText(shard), " of rank ", rank,
                                 " and ", BoxText(*other->box), " of rank ", other->owner,
                                 " share elements; each must be held by one rank"));
    }
  }
  return absl::OkStatus();
}

absl::Status LayoutCoverage::CheckFrozen(int64_t rank, const RankLayout& layout) const {
  const Shard* const frozen_begin = layout.frozen_shards().data();
  for (const Shard& shard : layout.shards()) {
    if (shard.element_count() == 0) continue;
    const Tensor& tensor = tensors_[shard.tensor_index];
    const bool is_frozen = &shard >= frozen_begin;
    if (tensor.trees.empty() || tensor.is_frozen == is_frozen) continue;
    const int64_t other = tensor.trees.front()->owner();
    return Refuse(
        ErrorReason::kBadLayout,
        absl::StrCat("tensor \"", manifest_->tensor(shard.tensor_index).name, "\": frozen on rank ",
                     is_frozen ? rank : other, ", but not on rank ", is_frozen ? other : rank,
                     "; expected the same on all ranks"));
  }
  return absl::OkStatus();
}

std::vector<bool> LayoutCoverage::FrozenTensors() const {
  std::vector<bool> frozen;
  for (const Tensor& tensor : tensors_) frozen.push_back(tensor.is_frozen);
  return frozen;
}

absl::Status LayoutCoverage::CheckComplete() const {
  for (int64_t i = 0; i < manifest_->tensor_count(); ++i) {
    const TensorSpec& spec = manifest_->tensor(i);
    // Boxes share no element, so their sizes say it all.
    const int64_t missing_count = spec.element_count() - tensors_[i].covered_elements;
    if (missing_count == 0) continue;
    return Refuse(ErrorReason::kLayoutHole,
                  absl::StrCat("tensor \"", spec.name, "\": ", missing_count, " of its ",
                               spec.element_count(), " elements are in no shard"));
  }
  return absl::OkStatus();
}

}  // namespace ema
