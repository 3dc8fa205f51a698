// SPDX-License-Identifier: Apache-2.0
//
// Post-hoc averages: the weighted sum of stored power-function averages that comes nearest to an
// average of another length (Karras et al., "Analyzing and Improving the Training Dynamics of
// Diffusion Models", 2024, section 3.2 and appendix C). Numbers only; knows no models and no files.
#ifndef EMA_SERVER_CHECKPOINT_POST_HOC_H_
#define EMA_SERVER_CHECKPOINT_POST_HOC_H_

#include <variant>
#include <vector>

#include "absl/types/span.h"

namespace ema {

// The share of an average at time `end` that the weights of time u contribute, 0 < u <= end: a
// density, whose integral is 1. Times are in one unit, counted from the start of averaging.

// (gamma + 1) u^gamma / end^(gamma + 1). end > 0, gamma >= 0.
struct PowerProfile {
  double end = 1;
  double gamma = 0;
};

// Proportional to 2^(-(end - u) / half_life). end > 0, half_life > 0.
struct HalfLifeProfile {
  double end = 1;
  double half_life = 1;
};

using TargetProfile = std::variant<PowerProfile, HalfLifeProfile>;

// The integral of the product of two profiles. REQUIRES: a.end <= b.end for a half-life.
long double InnerProduct(const PowerProfile& a, const PowerProfile& b);
long double InnerProduct(const PowerProfile& a, const HalfLifeProfile& b);

struct PostHocSolution {
  // Parallel to the sources. Their sum is 1.
  std::vector<double> weights;
  // |sum of weight * source - target| / |target|, where |p|^2 is the integral of p^2.
  double residual = 0;
};

// The weights by which `sources` approximate `target`: least squares, then divided by their sum, as
// EDM2 does. Sources may be equal or nearly so; weights stay so small that the rounding of float32
// averages does not show, and weights too small to change a float32 are 0. O(n^3). REQUIRES: at
// least one source, none ends after the target.
PostHocSolution SolvePostHoc(absl::Span<const PowerProfile> sources, const TargetProfile& target);

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_POST_HOC_H_
