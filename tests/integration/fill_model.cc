// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/fill_model.h"

#include <cstring>
#include <optional>
#include <random>

#include "absl/strings/str_cat.h"
#include "tests/testutil/random_layout.h"

namespace ema {
namespace {

constexpr unsigned kSeed = 20240611;

template <typename T>
void Fill(std::byte* to, int64_t count, T value) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * sizeof(T), &value, sizeof(T));
}

// The high half of a float32: exact for small whole numbers.
uint16_t ToBFloat16(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}
float FromBFloat16(uint16_t high) {
  const uint32_t bits = uint32_t{high} << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The value that `count` elements have in common; sets `torn` if they have none.
template <typename T>
T Common(const std::byte* from, int64_t count, const std::string& name, std::string& torn) {
  T first{};
  std::memcpy(&first, from, sizeof(T));
  for (int64_t i = 1; i < count; ++i) {
    if (std::memcmp(from + i * sizeof(T), &first, sizeof(T)) == 0) continue;
    T other{};
    std::memcpy(&other, from + i * sizeof(T), sizeof(T));
    torn =
        absl::StrCat("tensor \"", name, "\": element 0 is ", first, ", element ", i, " is ", other);
    break;
  }
  return first;
}

float CommonAsFloat(Dtype dtype, const std::byte* from, int64_t count, const std::string& name,
                    std::string& torn) {
  switch (dtype) {
    case Dtype::kFloat32:
      return Common<float>(from, count, name, torn);
    case Dtype::kFloat64:
      return static_cast<float>(Common<double>(from, count, name, torn));
    case Dtype::kBFloat16:
      return FromBFloat16(Common<uint16_t>(from, count, name, torn));
    default:
      return static_cast<float>(Common<int32_t>(from, count, name, torn));
  }
}

}  // namespace

int FillValue(int64_t step) { return static_cast<int>((step * 37 + 11) % 97); }

int64_t NextFillStep(int64_t step) { return step + (step % 5 == 3 ? 3 : 1); }

Manifest FillManifest(int64_t scale) {
  return *Manifest::Create({{.name = "wide", .shape = {37 * scale, 101}},
                            {.name = "deep", .shape = {3, 5, 7, 11 * scale}},
                            {.name = "half", .dtype = Dtype::kBFloat16, .shape = {4099 * scale}},
                            {.name = "double", .dtype = Dtype::kFloat64, .shape = {53, 41 * scale}},
                            {.name = "count", .dtype = Dtype::kInt32, .shape = {19, 23 * scale}},
                            {.name = "scalar", .shape = {}}});
}

std::vector<TrackConfig> FillTracks() {
  return {{.name = "ema", .schedule = *Schedule::Parse("1ba")},
          {.name = "raw", .schedule = *Schedule::Parse("copy")}};
}

std::vector<Shard> FillShards(const Manifest& manifest, int64_t rank) {
  std::mt19937 random(kSeed);
  return CutForRanks(random, manifest, kFillRanks, 20)[rank];
}

FillBytes::FillBytes(const Manifest& manifest, const RankLayout& layout)
    : manifest_(manifest), layout_(layout), bytes_(layout.total_bytes()) {}

void FillBytes::Set(int value) {
  for (size_t i = 0; i < layout_.shards().size(); ++i) {
    const Shard& shard = layout_.shards()[i];
    std::byte* const to = bytes_.data() + layout_.shard_start(static_cast<int64_t>(i));
    const int64_t count = shard.element_count();
    switch (manifest_.tensor(shard.tensor_index).dtype) {
      case Dtype::kFloat32:
        Fill(to, count, static_cast<float>(value));
        break;
      case Dtype::kFloat64:
        Fill(to, count, static_cast<double>(value));
        break;
      case Dtype::kBFloat16:
        Fill(to, count, ToBFloat16(static_cast<float>(value)));
        break;
      default:
        Fill(to, count, static_cast<int32_t>(value));
    }
  }
}

std::vector<std::span<const std::byte>> FillBytes::shards() const {
  std::vector<std::span<const std::byte>> shards;
  for (size_t i = 0; i < layout_.shards().size(); ++i) {
    const int64_t start = layout_.shard_start(static_cast<int64_t>(i));
    const int64_t end = layout_.shard_start(static_cast<int64_t>(i) + 1);
    shards.push_back(std::span(bytes_).subspan(start, end - start));
  }
  return shards;
}

FillSight Look(const PullInfo& info, std::span<const std::byte> bytes, bool is_copy) {
  FillSight sight;
  std::optional<float> average;
  std::optional<float> copied;
  for (const PulledTensor& tensor : info.tensors) {
    const int64_t count = tensor.spec.element_count();
    const float value = CommonAsFloat(tensor.spec.dtype, bytes.data() + tensor.offset, count,
                                      tensor.spec.name, sight.torn);
    std::optional<float>& seen = !is_copy && IsFloat(tensor.spec.dtype) ? average : copied;
    if (seen.has_value() && *seen != value) {
      sight.torn = absl::StrCat("tensor \"", tensor.spec.name, "\" is ", value,
                                ", one before it is ", *seen);
    }
    seen = value;
  }
  sight.average = average.value_or(0);
  sight.copied = static_cast<int>(copied.value_or(-1));
  return sight;
}

}  // namespace ema
