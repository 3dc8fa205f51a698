// SPDX-License-Identifier: Apache-2.0
//
// What Synthesize asks for and gives: between the layers that know RPCs and those that know files.
#ifndef EMA_SERVER_CORE_SYNTHESIS_H_
#define EMA_SERVER_CORE_SYNTHESIS_H_

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "ema/time.h"
#include "server/core/snapshot.h"

namespace ema {

// Mirrors ema.v1.SynthesizeRequest, which says what each field means.
struct SynthesisRequest {
  std::string name;
  std::variant<double, TrainingDuration> profile;  // sigma_rel, or a half-life.
  int64_t step = 0;
  std::vector<std::string> tracks;
};

// Mirrors ema.v1.SynthesizeResponse.
struct Synthesis {
  struct Source {
    std::string track;
    int64_t step = 0;
    double weight = 0;
  };
  Version record;
  double residual = 0;
  std::vector<Source> sources;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_SYNTHESIS_H_
