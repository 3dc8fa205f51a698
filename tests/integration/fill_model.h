// SPDX-License-Identifier: Apache-2.0
//
// Uniform fill: at step t every element of a model is c(t), so a right snapshot is constant, and
// equals the average of one number.
#ifndef EMA_TESTS_INTEGRATION_FILL_MODEL_H_
#define EMA_TESTS_INTEGRATION_FILL_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ema/client.h"

namespace ema {

inline constexpr char kFillModel[] = "filled";
inline constexpr int64_t kFillRanks = 8;
// Of each rank's bytes, as the rank that kills itself sends them.
inline constexpr int64_t kFillChunks = 8;

// c(t): a small whole number, which every dtype holds.
int FillValue(int64_t step);
// The step after this one; some are left out.
int64_t NextFillStep(int64_t step);

// Tensors of odd sizes and several dtypes, some 70 KiB times `scale`.
Manifest FillManifest(int64_t scale);
// An average whose half-life is one step, and a copy.
std::vector<TrackConfig> FillTracks();
// A rank's boxes. The same in every process.
std::vector<Shard> FillShards(const Manifest& manifest, int64_t rank);

// A rank's bytes with every element `value`.
class FillBytes {
 public:
  FillBytes(const Manifest& manifest, const RankLayout& layout);

  void Set(int value);
  std::span<const std::byte> bytes() const { return bytes_; }
  // As Run::StartPush() takes them.
  std::vector<std::span<const std::byte>> shards() const;

 private:
  const Manifest& manifest_;
  const RankLayout& layout_;
  std::vector<std::byte> bytes_;
};

// What a pull has shown.
struct FillSight {
  float average = 0;  // If the track averages.
  int copied = 0;     // Of tensors that are copied.
  std::string torn;   // Where two elements differ; empty: nowhere.
};
// Looks at each element. `is_copy`: of the track "raw".
FillSight Look(const PullInfo& info, std::span<const std::byte> bytes, bool is_copy);

}  // namespace ema

#endif  // EMA_TESTS_INTEGRATION_FILL_MODEL_H_
