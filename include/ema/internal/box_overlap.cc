// SPDX-License-Identifier: Apache-2.0
#include "include/ema/internal/box_overlap.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"

namespace ema {
namespace {

// The limit of a search: visits of boxes while they are separated, and comparisons of two boxes.
// Boxes that ranks cut a tensor into take a few steps each.
constexpr int64_t kStepsPerBox = 64;
constexpr int64_t kStepsAtLeast = 8'000'000;

// Sorts the boxes by their begin in a dimension: 0 is the tensor, d the tensor's dimension d - 1.
void SortAlong(size_t dimension, std::span<HeldBox> boxes) {
  for (HeldBox& box : boxes) {
    box.begin = dimension == 0 ? box.shard->tensor_index : box.shard->offsets[dimension - 1];
    box.end = box.begin + (dimension == 0 ? 1 : box.shard->extents[dimension - 1]);
  }
  // The longer first: it is the one that may share elements with many.
  std::sort(boxes.begin(), boxes.end(), [](const HeldBox& a, const HeldBox& b) {
    return std::tie(a.begin, b.end) < std::tie(b.begin, a.end);
  });
}

// Cuts the sorted boxes wherever no box crosses, and appends the parts of two or more. False: they
// cannot be cut, and nothing is appended.
bool Cut(std::span<HeldBox> boxes, std::vector<std::span<HeldBox>>& parts) {
  size_t first = 0;
  int64_t end = boxes[0].end;
  for (size_t i = 1; i < boxes.size(); ++i) {
    if (boxes[i].begin >= end) {
      if (i - first > 1) parts.push_back(boxes.subspan(first, i - first));
      first = i;
    }
    end = std::max(end, boxes[i].end);
  }
  if (first == 0) return false;
  if (boxes.size() - first > 1) parts.push_back(boxes.subspan(first));
  return true;
}

bool SharesElement(const Shard& a, const Shard& b) {
  for (size_t d = 0; d < a.offsets.size(); ++d) {
    const int64_t distance = a.offsets[d] - b.offsets[d];
    if (distance >= b.extents[d] || -distance >= a.extents[d]) return false;
  }
  return true;
}

// Two of the sorted boxes of one tensor that share an element; nulls: none do, or `steps` fell
// below zero before any were found.
std::pair<const HeldBox*, const HeldBox*> FindPair(std::span<const HeldBox> boxes, int64_t& steps) {
  for (size_t i = 0; i < boxes.size(); ++i) {
    for (size_t j = i + 1; j < boxes.size() && boxes[j].begin < boxes[i].end; ++j) {
      if (--steps < 0) return {};
      if (SharesElement(*boxes[i].shard, *boxes[j].shard)) return {&boxes[i], &boxes[j]};
    }
  }
  return {};
}

absl::Status Refuse(ErrorReason reason, const Manifest& manifest, const HeldBox& box,
                    const std::string& message) {
  return MakeError(
      absl::StatusCode::kInvalidArgument, reason,
      absl::StrCat("tensor \"", manifest.tensor(box.shard->tensor_index).name, "\": ", message));
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

absl::Status CheckDisjoint(const Manifest& manifest, std::span<HeldBox> boxes,
                           const std::string& holder_noun) {
  int64_t steps = kStepsPerBox * static_cast<int64_t>(boxes.size()) + kStepsAtLeast;
  std::vector<std::span<HeldBox>> open;
  if (boxes.size() > 1) open.push_back(boxes);
  while (!open.empty()) {
    const std::span<HeldBox> group = open.back();
    open.pop_back();
    const size_t dimensions = group[0].shard->offsets.size();
    bool is_done = false;
    for (size_t d = 0; d <= dimensions && !is_done; ++d) {
      steps -= static_cast<int64_t>(group.size());
      SortAlong(d, group);
      is_done = Cut(group, open);
    }
    // Boxes that cannot be cut are of one tensor. Which dimension keeps the most pairs apart is not
    // known: each is tried for a while.
    for (size_t d = std::min<size_t>(1, dimensions); d <= dimensions && !is_done; ++d) {
      SortAlong(d, group);
      const int64_t limit = steps / 8;
      int64_t left = limit;
      auto [a, b] = FindPair(group, left);
      if (a != nullptr) {
        if (b->holder < a->holder) std::swap(a, b);
        return Refuse(ErrorReason::kLayoutOverlap, manifest, *a,
                      absl::StrCat(BoxText(*a->shard), " of ", holder_noun, " ", a->holder, " and ",
                                   BoxText(*b->shard), " of ", holder_noun, " ", b->holder,
                                   " share elements; expected each element in one shard"));
      }
      is_done = left >= 0;
      steps -= limit - left;
    }
    if (!is_done || steps < 0) {
      return Refuse(ErrorReason::kBadLayout, manifest, group[0],
                    "its shards are cut too irregularly to find whether they share elements; "
                    "expected boxes that can be cut apart from each other");
    }
  }
  return absl::OkStatus();
}

}  // namespace ema
