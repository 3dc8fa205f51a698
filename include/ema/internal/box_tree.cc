// SPDX-License-Identifier: Apache-2.0
#include "include/ema/internal/box_tree.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <span>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"

namespace ema {
namespace {

constexpr size_t kLeafEntries = 8;
// A plane is chosen by so many of the boxes.
constexpr size_t kSampleEntries = 64;
// What a tree may cost: steps for each box, of which as many as a layout may have, halved again and
// again, take 16; and how often each is in it.
constexpr int64_t kStepsPerEntry = 32;
constexpr size_t kCopiesPerEntry = 4;
constexpr int64_t kStepsAtLeast = 4096;

using Entry = BoxTree::Entry;

bool Overlap(const Shard& a, const Shard& b) {
  for (size_t d = 0; d < a.offsets.size(); ++d) {
    const int64_t distance = a.offsets[d] - b.offsets[d];
    if (distance >= b.extents[d] || -distance >= a.extents[d]) return false;
  }
  return true;
}

struct Plane {
  size_t dimension = 0;
  int64_t cut = 0;

  bool HasLow(const Shard& box) const { return box.offsets[dimension] < cut; }
  bool HasHigh(const Shard& box) const {
    return box.offsets[dimension] + box.extents[dimension] > cut;
  }
  // Of the side with more of them.
  size_t LargerSide(std::span<const Entry> entries) const {
    size_t low = 0;
    size_t high = 0;
    for (const Entry& entry : entries) {
      low += HasLow(*entry.box) ? 1 : 0;
      high += HasHigh(*entry.box) ? 1 : 0;
    }
    return std::max(low, high);
  }
};

// Before the middle one of the boxes, by where they begin in this dimension.
Plane MiddlePlane(size_t dimension, std::span<const Entry> entries) {
  std::vector<int64_t> offsets;
  for (const Entry& entry : entries) offsets.push_back(entry.box->offsets[dimension]);
  std::sort(offsets.begin(), offsets.end());
  const auto middle = offsets.begin() + static_cast<ptrdiff_t>(offsets.size() / 2);
  if (*middle != offsets.front()) return {dimension, *middle};
  const auto next = std::upper_bound(middle, offsets.end(), *middle);
  return {dimension, next == offsets.end() ? *middle : *next};
}

// Behind the first one that ends.
Plane FirstPlane(size_t dimension, std::span<const Entry> entries) {
  const auto end = [dimension](const Entry& entry) {
    return entry.box->offsets[dimension] + entry.box->extents[dimension];
  };
  const auto first =
      std::min_element(entries.begin(), entries.end(),
                       [&](const auto& a, const auto& b) { return end(a) < end(b); });
  return {dimension, end(*first)};
}

// The one that leaves the fewest on its larger side. Absent: none leaves fewer than there are.
template <typename MakePlane>
std::optional<Plane> BestPlane(std::span<const Entry> entries, MakePlane make_plane) {
  std::optional<Plane> best;
  size_t best_count = entries.size();
  for (size_t d = 0; d < entries[0].box->offsets.size(); ++d) {
    const Plane plane = make_plane(d, entries);
    const size_t count = plane.LargerSide(entries);
    if (count >= best_count) continue;
    best_count = count;
    best = plane;
  }
  return best;
}

std::optional<Plane> ChoosePlane(std::span<const Entry> entries) {
  std::vector<Entry> sample;
  const size_t stride = (entries.size() + kSampleEntries - 1) / kSampleEntries;
  for (size_t i = 0; i < entries.size(); i += stride) sample.push_back(entries[i]);
  const std::optional<Plane> plane = BestPlane(sample, MiddlePlane);
  if (plane.has_value() && plane->LargerSide(entries) < entries.size()) return plane;
  // Where two boxes share no element, one ends before the other begins in some dimension: there
  // this plane has at least one on each side alone.
  return BestPlane(entries, FirstPlane);
}

}  // namespace

std::string BoxText(const Shard& box) {
  std::string text;
  for (size_t d = 0; d < box.offsets.size(); ++d) {
    const int64_t end = box.offsets[d] + box.extents[d];
    absl::StrAppend(&text, d == 0 ? "" : ", ", box.offsets[d], ":", end);
  }
  return absl::StrCat("[", text, "]");
}

absl::Status BoxTree::TooIrregular(const TensorSpec& tensor) {
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason::kBadLayout,
                   absl::StrCat("tensor \"", tensor.name,
                                "\": its shards are cut too irregularly to find whether they share "
                                "elements; expected boxes that can be cut apart from each other"));
}

std::vector<Entry> BoxTree::Entries() const {
  std::vector<Entry> entries = entries_;
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return std::less<const Shard*>()(a.box, b.box); });
  const auto end = std::unique(entries.begin(), entries.end(),
                               [](const Entry& a, const Entry& b) { return a.box == b.box; });
  entries.erase(end, entries.end());
  return entries;
}

std::optional<BoxTree> BoxTree::Make(std::vector<Entry> entries) {
  BoxTree tree(entries.size());
  int64_t steps = kStepsPerEntry * static_cast<int64_t>(entries.size()) + kStepsAtLeast;
  if (!tree.Append(std::move(entries), steps)) return std::nullopt;
  return tree;
}

bool BoxTree::Append(std::vector<Entry> entries, int64_t& steps) {
  steps -= static_cast<int64_t>(entries.size());
  if (steps < 0 || entries_.size() > kCopiesPerEntry * size_ + kStepsAtLeast) return false;
  const size_t node = nodes_.size();
  nodes_.emplace_back();
  std::optional<Plane> plane;
  if (entries.size() > kLeafEntries) plane = ChoosePlane(entries);
  if (!plane.has_value()) {
    nodes_[node].low = static_cast<int32_t>(entries_.size());
    entries_.insert(entries_.end(), entries.begin(), entries.end());
    nodes_[node].high = static_cast<int32_t>(entries_.size());
    return true;
  }
  std::vector<Entry> high;
  std::copy_if(entries.begin(), entries.end(), std::back_inserter(high),
               [&](const Entry& entry) { return plane->HasHigh(*entry.box); });
  std::erase_if(entries, [&](const Entry& entry) { return !plane->HasLow(*entry.box); });
  nodes_[node].dimension = static_cast<int>(plane->dimension);
  nodes_[node].cut = plane->cut;
  nodes_[node].low = static_cast<int32_t>(nodes_.size());
  if (!Append(std::move(entries), steps)) return false;
  nodes_[node].high = static_cast<int32_t>(nodes_.size());
  return Append(std::move(high), steps);
}

std::optional<std::pair<Entry, Entry>> BoxTree::FindPair() const {
  // Two that share an element are both in the leaf of that.
  for (const Node& node : nodes_) {
    if (node.dimension >= 0) continue;
    for (int32_t i = node.low; i < node.high; ++i) {
      for (int32_t j = i + 1; j < node.high; ++j) {
        if (Overlap(*entries_[i].box, *entries_[j].box)) return std::pair(entries_[i], entries_[j]);
      }
    }
  }
  return std::nullopt;
}

const Entry* BoxTree::Find(const Shard& box, int64_t& steps) const {
  std::vector<int32_t> open = {0};
  while (!open.empty() && steps-- > 0) {
    const Node& node = nodes_[open.back()];
    open.pop_back();
    if (node.dimension < 0) {
      for (int32_t i = node.low; i < node.high; ++i) {
        if (Overlap(*entries_[i].box, box)) return &entries_[i];
      }
      continue;
    }
    const Plane plane{static_cast<size_t>(node.dimension), node.cut};
    if (plane.HasHigh(box)) open.push_back(node.high);
    if (plane.HasLow(box)) open.push_back(node.low);
  }
  return nullptr;
}

}  // namespace ema
