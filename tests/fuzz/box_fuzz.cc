// SPDX-License-Identifier: Apache-2.0
//
// Boxes of two small tensors. Whether two of them share an element is compared with a count of the
// boxes that each element is in.
#include <array>
#include <numeric>
#include <vector>

#include "ema/error_reason.h"
#include "include/ema/internal/box_overlap.h"
#include "tests/fuzz/fuzz.h"

namespace ema {
namespace {

constexpr int64_t kExtent = 8;
constexpr size_t kMaxBoxes = 64;

// A tensor, then offset and extent in each dimension.
Shard ReadBox(FuzzInput& input, size_t rank) {
  Shard box{.tensor_index = input.Byte() % 2};
  for (size_t d = 0; d < rank; ++d) {
    const uint8_t range = input.Byte();
    box.offsets.push_back(range % kExtent);
    box.extents.push_back(1 + range / kExtent % (kExtent - box.offsets.back()));
  }
  return box;
}

// Adds the box to the number of boxes of each element. True: an element is in another one, too.
bool Add(const Shard& box, std::vector<int>& counts) {
  bool is_shared = false;
  for (int64_t i = 0; i < box.element_count(); ++i) {
    int64_t element = box.tensor_index;
    int64_t rest = i;
    for (size_t d = 0; d < box.extents.size(); ++d) {
      element = element * kExtent + box.offsets[d] + rest % box.extents[d];
      rest /= box.extents[d];
    }
    is_shared = ++counts[element] > 1 || is_shared;
  }
  return is_shared;
}

}  // namespace
}  // namespace ema

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ema::FuzzInput input(data, size);
  const size_t rank = input.Byte() % 4;
  const std::vector<int64_t> shape(rank, ema::kExtent);
  const ema::Manifest manifest =
      *ema::Manifest::Create({{"a", ema::Dtype::kInt8, shape}, {"b", ema::Dtype::kInt8, shape}});
  std::vector<ema::Shard> shards;
  std::vector<int> counts(manifest.total_bytes());
  bool is_shared = false;
  while (!input.empty() && shards.size() < ema::kMaxBoxes) {
    shards.push_back(ema::ReadBox(input, rank));
    is_shared = ema::Add(shards.back(), counts) || is_shared;
  }
  std::vector<ema::HeldBox> boxes;
  for (const ema::Shard& shard : shards) {
    boxes.push_back({&shard, static_cast<int64_t>(boxes.size())});
  }
  const absl::Status status = ema::CheckDisjoint(manifest, boxes, "rank");
  EMA_FUZZ_CHECK(status.ok() == !is_shared);
  EMA_FUZZ_CHECK(status.ok() || ema::GetErrorReason(status) == ema::ErrorReason::kLayoutOverlap);
  return 0;
}
