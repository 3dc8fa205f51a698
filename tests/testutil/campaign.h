// SPDX-License-Identifier: Apache-2.0
//
// Tests with the label "campaign" have very many cases. `tests/run.sh --campaign` sets
// TEST_CAMPAIGN, and they try all. Otherwise they try a sample, which TEST_SEED chooses:
// `tests/run.sh --all` sets it to another number each time. Names with EMA_ would be options of the
// server, which warns of them.
#ifndef EMA_TESTS_TESTUTIL_CAMPAIGN_H_
#define EMA_TESTS_TESTUTIL_CAMPAIGN_H_

#include <cstdint>
#include <cstdlib>
#include <iostream>

#include "absl/strings/numbers.h"

namespace ema {

// True if every case is to be tried.
inline bool IsCampaign() { return std::getenv("TEST_CAMPAIGN") != nullptr; }

// The seed of the sample; prints it.
inline uint32_t CampaignSeed() {
  const char* const text = std::getenv("TEST_SEED");
  uint32_t seed = 0;
  if (text != nullptr && !absl::SimpleAtoi(text, &seed)) std::abort();
  std::cout << "TEST_SEED=" << seed << "\n";
  return seed;
}

}  // namespace ema

#endif  // EMA_TESTS_TESTUTIL_CAMPAIGN_H_
