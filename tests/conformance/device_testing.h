// SPDX-License-Identifier: Apache-2.0
//
// For the tests that every device must pass: the devices, the scalar definition written once more,
// elements of all kinds, and folds between guards.
#ifndef EMA_TESTS_CONFORMANCE_DEVICE_TESTING_H_
#define EMA_TESTS_CONFORMANCE_DEVICE_TESTING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "hwy/highway.h"
#include "server/device/accelerator_device.h"
#include "server/device/cuda_accelerator.h"
#include "server/device/device.h"
#include "tests/testutil/device_bytes.h"
#include "tests/testutil/fake_accelerator.h"
#include "tests/testutil/status_matchers.h"

namespace ema {

using Kind = FoldTarget::Kind;
using Bytes = std::vector<std::byte>;

inline constexpr Kind kAllKinds[] = {Kind::kAverage, Kind::kAssign, Kind::kCopy,
                                     Kind::kAverageFloat64, Kind::kAssignFloat64};

inline constexpr int64_t kMiB = int64_t{1} << 20;
inline constexpr Dtype kFloatDtypes[] = {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16,
                                         Dtype::kFloat64};

// ---- The devices -----------------------------------------------------------------------------

struct DeviceCase {
  std::string name;
  std::function<std::unique_ptr<Device>(int64_t kept_free_bytes)> make;
  int64_t highway_target = 0;  // 0: as in production.
  std::string missing;         // Why it is not there; `make` then gives another.

  friend void PrintTo(const DeviceCase& device, std::ostream* out) { *out << device.name; }
};

// "cuda:0", or empty if this build can use no GPU.
inline std::string FirstGpu() {
  const absl::StatusOr<GpuList> list = ListCudaDevices();
  for (size_t i = 0; list.ok() && i < list->gpus.size(); ++i) {
    if (CheckGpu(*list, static_cast<int>(i)).ok()) return absl::StrCat("cuda:", i);
  }
  return "";
}

inline std::vector<DeviceCase> AllDevices() {
  std::vector<DeviceCase> cases = {{"Cpu", MakeCpuDevice}};
  // Small slabs: everything goes round the ring.
  cases.push_back(
      {"Accelerator", [](int64_t kept_free_bytes) {
         return MakeAcceleratorDevice(
             std::make_shared<FakeAccelerator>(FakeAccelerator::Options{.max_delay_us = 20}),
             {.kept_free_bytes = kept_free_bytes, .slab_bytes = 64 << 10});
       }});
  if (const std::string gpu = FirstGpu(); !gpu.empty()) {
    cases.push_back(
        {"Cuda", [gpu](int64_t kept_free_bytes) { return *MakeDevice(gpu, kept_free_bytes); }});
  } else {
    cases.push_back({"Cuda", MakeCpuDevice, 0, DescribeGpus()});
  }
  // The first is the one that production runs. SSE4 and SSSE3 have no code of their own in the
  // kernel and run its fallback.
  const std::vector<int64_t> targets = hwy::SupportedAndGeneratedTargets();
  for (const int64_t target : targets) {
    if (target == targets.front() || target == HWY_SSE4 || target == HWY_SSSE3) continue;
    cases.push_back({absl::StrCat("Cpu", hwy::TargetName(target)), MakeCpuDevice, target});
  }
  return cases;
}

// Makes kernels run on `target` from now on; 0: as in production.
inline void UseHighwayTarget(int64_t target) {
  if (target == 0) {
    hwy::GetChosenTarget().DeInit();
  } else {
    hwy::GetChosenTarget().Update(target);
  }
}

// A test of each device. That of a GPU which is not there is skipped, and says why; where
// EMA_TEST_DEVICE asks for one, it fails.
class DeviceTest : public testing::TestWithParam<DeviceCase> {
 protected:
  DeviceTest() { UseHighwayTarget(GetParam().highway_target); }
  ~DeviceTest() override { UseHighwayTarget(0); }
  void SetUp() override {
    if (GetParam().missing.empty()) return;
    const char* const asked_for = std::getenv("EMA_TEST_DEVICE");
    if (asked_for != nullptr && std::string(asked_for).starts_with("cuda")) {
      FAIL() << GetParam().missing;
    }
    GTEST_SKIP() << GetParam().missing;
  }

  const std::unique_ptr<Device> device_ = GetParam().make(64 * kMiB);
};

// ---- The definition, written once more ------------------------------------------------------

template <typename T>
T Get(const std::byte* address) {
  T value;
  std::memcpy(&value, address, sizeof(value));
  return value;
}

inline double Float16Value(uint16_t bits) {
  const int exponent = bits >> 10 & 0x1f;
  const int fraction = bits & 0x3ff;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == 0x1f) return fraction == 0 ? sign * HUGE_VAL : std::nan("");
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

// The float32 value of a source element.
inline float ValueOf(Dtype dtype, const std::byte* element) {
  switch (dtype) {
    case Dtype::kFloat16:
      return static_cast<float>(Float16Value(Get<uint16_t>(element)));
    case Dtype::kBFloat16:
      return std::bit_cast<float>(uint32_t{Get<uint16_t>(element)} << 16);
    case Dtype::kFloat64:
      return static_cast<float>(Get<double>(element));
    default:
      return Get<float>(element);
  }
}

// The same, not rounded.
inline double DoubleOf(Dtype dtype, const std::byte* element) {
  return dtype == Dtype::kFloat64 ? Get<double>(element) : double{ValueOf(dtype, element)};
}

// What a target holds of an element. Not for kCopy.
inline double Expected(Kind kind, Dtype dtype, const std::byte* element, double current,
                       double update_weight) {
  if (IsFloat64(kind)) {
    const double param = DoubleOf(dtype, element);
    return IsAverage(kind) ? std::fma(update_weight, param - current, current) : param;
  }
  const float param = ValueOf(dtype, element);
  const auto before = static_cast<float>(current);
  return IsAverage(kind) ? std::fma(static_cast<float>(update_weight), param - before, before)
                         : param;
}

inline int64_t StoredSize(Kind kind, Dtype dtype) {
  if (kind == Kind::kCopy) return DtypeSize(dtype);
  return IsFloat64(kind) ? int64_t{sizeof(double)} : int64_t{sizeof(float)};
}

// The value of a stored average.
inline double AverageAt(Kind kind, const std::byte* address) {
  return IsFloat64(kind) ? Get<double>(address) : Get<float>(address);
}

// ---- Elements --------------------------------------------------------------------------------

// Finite float32 of all sizes: random bits, ordinary weights, subnormals, zeros of both signs, the
// largest.
inline float RandomFloat(std::mt19937_64& random) {
  const uint64_t bits = random();
  const uint32_t sign = static_cast<uint32_t>(bits) & 0x80000000u;
  const uint32_t fraction = static_cast<uint32_t>(bits) & 0x7fffffu;
  const uint32_t any_byte = bits >> 40 & 0xff;
  switch (bits >> 32 & 7) {
    case 0:
      return std::bit_cast<float>(sign | fraction);  // Subnormal.
    case 1:
      return std::bit_cast<float>(any_byte % 2 == 0 ? sign : sign | 0x7f7fffffu);
    case 2:
    case 3:
      return std::bit_cast<float>(sign | any_byte % 0xff << 23 | fraction);
    default:
      return std::bit_cast<float>(sign | (118 + any_byte % 10) << 23 | fraction);
  }
}

// A finite element whose float32 value is finite, too.
inline void PutRandomElement(Dtype dtype, std::mt19937_64& random, std::byte* element) {
  const uint64_t bits = random();
  while (true) {
    if (dtype == Dtype::kFloat64) {
      // Near a float32 value or half-way between two; sometimes of any size.
      double value = RandomFloat(random);
      const uint64_t low = (bits & 3) == 0   ? 0x10000000
                           : (bits & 3) == 1 ? 0
                                             : bits >> 4 & 0x1fffffff;
      value = std::bit_cast<double>(std::bit_cast<uint64_t>(value) ^ low);
      if ((bits & 0xf) == 0xf) value = std::ldexp(value, static_cast<int>(bits >> 40 & 0xff) - 255);
      std::memcpy(element, &value, sizeof(value));
    } else if (dtype == Dtype::kFloat32) {
      const float value = RandomFloat(random);
      std::memcpy(element, &value, sizeof(value));
    } else {
      const uint64_t any = random();
      std::memcpy(element, &any, DtypeSize(dtype));
    }
    if (!IsFloat(dtype) || std::isfinite(ValueOf(dtype, element))) return;
  }
}

inline Bytes RandomElements(Dtype dtype, int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes elements(count * DtypeSize(dtype));
  for (int64_t i = 0; i < count; ++i) {
    PutRandomElement(dtype, random, elements.data() + i * DtypeSize(dtype));
  }
  return elements;
}

// The first averages of a target, from float32 ones: float64 ones are near these, sometimes
// anything. Always the same for the same.
inline Bytes FirstAverages(Kind kind, const Bytes& current, int64_t count) {
  if (!IsFloat64(kind)) return current;
  Bytes averages(count * sizeof(double));
  for (int64_t i = 0; i < count; ++i) {
    const double value = Get<float>(current.data() + i * sizeof(float));
    const uint64_t hash =
        (std::bit_cast<uint64_t>(value) + i + 1) * uint64_t{0x9e37'79b9'7f4a'7c15};
    uint64_t bits = std::bit_cast<uint64_t>(value) ^ (hash >> 40 & 0x1fffffff);
    if ((hash & 0xf00) == 0) bits = std::bit_cast<uint64_t>(value);
    if ((hash & 0xf00) == 0x100) bits = hash;
    std::memcpy(averages.data() + i * sizeof(double), &bits, sizeof(bits));
  }
  return averages;
}

// ---- Folding ---------------------------------------------------------------------------------

struct Target {
  Kind kind = Kind::kAverage;
  double update_weight = 0.1;
  int64_t offset = 0;  // Elements between the start of the blocks and the first current, next.
};

// What the fold said, and what was in each target's next block: all of it.
struct Folded {
  std::optional<int64_t> non_finite;
  std::vector<Bytes> next;
};

inline constexpr int64_t kGuardElements = 64;
inline constexpr std::byte kGuard{0xa5};

// Folds on a device, in blocks of their own that are kept between calls.
class Folder {
 public:
  explicit Folder(Device& device) : device_(device), stream_(device.NewStream().value()) {}

  // `current`: float32 elements from which FirstAverages() makes those of each target.
  // `misalignment`: of the source, in bytes. `cuts`: where the range is cut into several ops.
  // `in_place`: averages go to where they were.
  Folded Fold(Dtype dtype, const Bytes& source, int64_t count, const Bytes& current,
              const std::vector<Target>& targets, int64_t misalignment = 0,
              std::vector<int64_t> cuts = {}, bool in_place = false) {
    std::vector<FoldTarget> fold_targets;
    for (size_t i = 0; i < targets.size(); ++i) {
      const Target& target = targets[i];
      const int64_t size = StoredSize(target.kind, dtype);
      FoldTarget fold = {target.kind, target.update_weight};
      fold.next = Guarded(2 * i, target.offset * size, count * size);
      if (IsAverage(target.kind)) {
        fold.current = Holding(in_place ? 2 * i : 2 * i + 1, target.offset * size,
                               FirstAverages(target.kind, current, count), count * size);
      }
      fold_targets.push_back(fold);
    }
    EXPECT_THAT(stream_->Synchronize(), IsOk());

    // No more than the elements: a sanitizer sees what is read behind them.
    const std::unique_ptr<std::byte[]> host(new std::byte[misalignment + count * DtypeSize(dtype)]);
    if (count > 0) std::memcpy(host.get() + misalignment, source.data(), count * DtypeSize(dtype));
    Folded folded;
    cuts.push_back(count);
    for (int64_t begin = 0; const int64_t end : cuts) {
      std::vector<FoldTarget> shifted = fold_targets;
      for (size_t i = 0; i < targets.size(); ++i) {
        const int64_t offset = begin * StoredSize(targets[i].kind, dtype);
        shifted[i].next += offset;
        if (shifted[i].current != nullptr) shifted[i].current += offset;
      }
      const absl::StatusOr<std::optional<int64_t>> non_finite = stream_->Fold(
          {dtype, host.get() + misalignment + begin * DtypeSize(dtype), end - begin, shifted,
           /*source_id=*/3, begin});
      EXPECT_THAT(non_finite, IsOk());
      if (non_finite.ok() && non_finite->has_value() && !folded.non_finite.has_value()) {
        folded.non_finite = begin + **non_finite;
      }
      begin = end;
    }
    const absl::StatusOr<std::vector<NonFiniteElement>> told_later = stream_->Synchronize();
    EXPECT_THAT(told_later, IsOk());
    if (told_later.ok() && !told_later->empty()) {
      EXPECT_EQ(told_later->size(), 1u);
      EXPECT_EQ(told_later->front().source_id, 3);
      EXPECT_FALSE(folded.non_finite.has_value()) << "told twice";
      folded.non_finite = told_later->front().element;
    }

    for (size_t i = 0; i < targets.size(); ++i) {
      const int64_t size_bytes =
          (targets[i].offset + count + kGuardElements) * StoredSize(targets[i].kind, dtype);
      folded.next.push_back(Read(2 * i, size_bytes));
    }
    return folded;
  }

  // One target: the mean of `source` and of `earlier` weights, which are stored as `kind` says.
  Folded FoldMean(Kind kind, Dtype dtype, const Bytes& source, int64_t count,
                  const std::vector<Bytes>& earlier, int64_t offset) {
    const int64_t size = StoredSize(kind, dtype);
    std::vector<FoldTarget> targets;
    for (size_t i = 0; i < earlier.size(); ++i) {
      targets.push_back({.kind = kind});
      targets.back().current = Holding(i + 1, offset * size, earlier[i], count * size);
    }
    targets[0].next = Guarded(0, offset * size, count * size);
    EXPECT_THAT(stream_->Synchronize(), IsOk());
    const auto found = stream_->Fold({dtype, source.data(), count, targets});
    const auto found_later = stream_->Synchronize();
    EXPECT_THAT(found, IsOk());
    EXPECT_THAT(found_later, IsOk());
    Folded folded;
    if (found.ok()) folded.non_finite = *found;
    if (found_later.ok() && !found_later->empty()) {
      folded.non_finite = found_later->front().element;
    }
    folded.next.push_back(Read(0, (offset + count + kGuardElements) * size));
    return folded;
  }

 private:
  std::byte* Memory(size_t index, int64_t size_bytes) {
    if (blocks_.size() <= index) blocks_.resize(index + 1);
    if (blocks_[index] == nullptr || blocks_[index]->size_bytes() < size_bytes) {
      blocks_[index] = device_.Allocate(std::max(size_bytes, kMiB)).value();
    }
    return blocks_[index]->data();
  }

  // The byte at `offset_bytes` of a block full of guards; behind it are `size_bytes` and guards.
  std::byte* Guarded(size_t index, int64_t offset_bytes, int64_t size_bytes) {
    const Bytes guards(offset_bytes + size_bytes + kGuardElements * int64_t{sizeof(double)},
                       kGuard);
    std::byte* data = Memory(index, guards.size());
    EXPECT_THAT(stream_->CopyFromHost(data, guards.data(), guards.size()), IsOk());
    EXPECT_THAT(stream_->Synchronize(), IsOk());
    return data + offset_bytes;
  }

  // The byte at `offset_bytes` of a block, from where on it holds `bytes`.
  const std::byte* Holding(size_t index, int64_t offset_bytes, const Bytes& bytes,
                           int64_t size_bytes) {
    std::byte* data = Memory(index, offset_bytes + size_bytes) + offset_bytes;
    EXPECT_THAT(stream_->CopyFromHost(data, bytes.data(), size_bytes), IsOk());
    EXPECT_THAT(stream_->Synchronize(), IsOk());
    return data;
  }

  Bytes Read(size_t index, int64_t size_bytes) {
    const auto bytes = DeviceBytes(device_, *stream_, Memory(index, 0), size_bytes);
    EXPECT_THAT(bytes, IsOk());
    return bytes.ok() ? Bytes(bytes->get(), bytes->get() + size_bytes) : Bytes(size_bytes);
  }

  Device& device_;
  const std::unique_ptr<DeviceStream> stream_;
  std::vector<std::shared_ptr<Block>> blocks_;
};

// Bit for bit, but for the bits of NaNs.
inline bool IsSame(double a, double b) {
  return std::isnan(a) ? std::isnan(b) : std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}

// What has changed of the guards around the bytes [begin, end); empty if nothing has.
inline std::string GuardMisses(const Bytes& memory, int64_t begin, int64_t end) {
  const auto is_guard = [](std::byte byte) { return byte == kGuard; };
  std::string misses;
  if (!std::all_of(memory.begin(), memory.begin() + begin, is_guard)) {
    absl::StrAppend(&misses, "memory before it has changed\n");
  }
  if (!std::all_of(memory.begin() + end, memory.end(), is_guard)) {
    absl::StrAppend(&misses, "memory behind it has changed\n");
  }
  return misses;
}

// Empty if `folded` holds, for each target, what the definition says and nothing around it has
// changed; else the first misses.
inline std::string Misses(const Folded& folded, Dtype dtype, const Bytes& source, int64_t count,
                          const Bytes& current, const std::vector<Target>& targets) {
  std::string misses;
  int miss_count = 0;
  for (size_t t = 0; t < targets.size(); ++t) {
    const auto& [kind, update_weight, offset] = targets[t];
    const int64_t size = StoredSize(kind, dtype);
    const int64_t begin = offset * size;
    const std::string around = GuardMisses(folded.next[t], begin, begin + count * size);
    const Bytes averages = IsAverage(kind) ? FirstAverages(kind, current, count) : Bytes();
    if (!around.empty()) absl::StrAppend(&misses, "target ", t, ": ", around);
    for (int64_t i = 0; i < count && miss_count < 5; ++i) {
      const std::byte* element = source.data() + i * DtypeSize(dtype);
      const std::byte* next = folded.next[t].data() + begin + i * size;
      if (kind == Kind::kCopy) {
        if (std::memcmp(next, element, size) == 0) continue;
        absl::StrAppend(&misses, "target ", t, ", element ", i, ": not copied\n");
        ++miss_count;
        continue;
      }
      const double before = IsAverage(kind) ? AverageAt(kind, averages.data() + i * size) : 0;
      const double expected = Expected(kind, dtype, element, before, update_weight);
      const double got = AverageAt(kind, next);
      if (IsSame(expected, got)) continue;
      absl::StrAppend(&misses, "target ", t, ", element ", i, " of ", count, ": e ", before, ", p ",
                      DoubleOf(dtype, element), ", w ", update_weight, ": expected ", expected,
                      " (", absl::Hex(std::bit_cast<uint64_t>(expected)), "), got ", got, " (",
                      absl::Hex(std::bit_cast<uint64_t>(got)), ")\n");
      ++miss_count;
    }
  }
  return misses;
}

template <typename T>
Bytes BytesOf(T value) {
  Bytes bytes(sizeof(value));
  std::memcpy(bytes.data(), &value, sizeof(value));
  return bytes;
}

inline std::vector<Bytes> NonFiniteElements(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16:  // Infinities, quiet and signalling NaNs with little and much in them.
      return {BytesOf<uint16_t>(0x7c00), BytesOf<uint16_t>(0xfc00), BytesOf<uint16_t>(0x7e00),
              BytesOf<uint16_t>(0x7c01), BytesOf<uint16_t>(0xffff)};
    case Dtype::kBFloat16:
      return {BytesOf<uint16_t>(0x7f80), BytesOf<uint16_t>(0xff80), BytesOf<uint16_t>(0x7fc0),
              BytesOf<uint16_t>(0x7f81), BytesOf<uint16_t>(0xffff)};
    case Dtype::kFloat64:  // The last three are doubles that float32 has no finite value for.
      return {BytesOf<uint64_t>(0x7ff0'0000'0000'0000),
              BytesOf<uint64_t>(0xfff0'0000'0000'0000),
              BytesOf<uint64_t>(0x7ff8'0000'0000'0000),
              BytesOf<uint64_t>(0x7ff0'0000'0000'0001),
              BytesOf<uint64_t>(0xffff'ffff'ffff'ffff),
              BytesOf(1e300),
              BytesOf(-0x1p128),
              BytesOf(0x1.ffffffp127)};
    default:
      return {BytesOf<uint32_t>(0x7f800000), BytesOf<uint32_t>(0xff800000),
              BytesOf<uint32_t>(0x7fc00000), BytesOf<uint32_t>(0x7f800001),
              BytesOf<uint32_t>(0xffffffff)};
  }
}

// Whether a fold into `targets` reports the element.
inline bool IsReported(Dtype dtype, const Bytes& element, const std::vector<Target>& targets) {
  const bool is_rounded = std::any_of(targets.begin(), targets.end(),
                                      [](const Target& target) { return IsFloat32(target.kind); });
  return !std::isfinite(is_rounded ? ValueOf(dtype, element.data())
                                   : DoubleOf(dtype, element.data()));
}

}  // namespace ema

#endif  // EMA_TESTS_CONFORMANCE_DEVICE_TESTING_H_
