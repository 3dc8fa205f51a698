// SPDX-License-Identifier: Apache-2.0
//
// What people plot of an average.
#ifndef EMA_STATISTICS_H_
#define EMA_STATISTICS_H_

#include <optional>
#include <string>

namespace ema {

// Of one track at one version; ema.v1.TrackStatistics says what each field means.
struct TrackStatistics {
  std::string track;
  double norm = 0;
  std::optional<double> distance;
};

}  // namespace ema

#endif  // EMA_STATISTICS_H_
