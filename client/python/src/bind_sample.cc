// SPDX-License-Identifier: Apache-2.0
//
// sample_words: whether memory has been written, all but surely, at little cost.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "client/python/src/bind.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT: the only way to "name"_a.

namespace ema::python {
namespace {

// Address, bytes.
using Place = std::pair<uintptr_t, int64_t>;

// Of 64 words that are spread evenly, the first and the last ones among them: all there are in up
// to 512 bytes.
uint64_t SampleOf(const Place& place) {
  if (place.second <= 0) return 0;
  constexpr int64_t kWords = 64;
  constexpr int64_t kWordBytes = 8;
  const auto* const begin = reinterpret_cast<const char*>(place.first);  // NOLINT: a given address.
  const auto word_bytes = static_cast<size_t>(std::min(kWordBytes, place.second));
  const int64_t last = std::max<int64_t>(0, place.second - kWordBytes);
  uint64_t sum = 0;
  for (int64_t i = 0; i < kWords; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, begin + last * i / (kWords - 1), word_bytes);
    // Odd, so that no bit is lost.
    sum = (sum ^ word) * 0x9E3779B97F4A7C15U;
    sum ^= sum >> 32U;
  }
  return sum;
}

std::vector<uint64_t> SampleWords(const std::vector<Place>& places) {
  std::vector<uint64_t> sums;
  sums.reserve(places.size());
  for (const Place& place : places) sums.push_back(SampleOf(place));
  return sums;
}

}  // namespace

void BindSample(nb::module_& module) { module.def("sample_words", &SampleWords, "places"_a); }

}  // namespace ema::python
