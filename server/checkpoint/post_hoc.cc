// SPDX-License-Identifier: Apache-2.0
//
// All in long double: the condition of the system is 1e5 for 32 snapshots of two tracks, 1e10 for
// 512.
#include "server/checkpoint/post_hoc.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

namespace ema {
namespace {

constexpr long double kLn2 = 0.693147180559945309417232121458L;

// Added to the diagonal of the normalized system: the squared error of a stored average relative to
// how far the averages are apart. float32 is good for 6e-8 of the weights, which move by a good
// part of their size. Without it, sources that are nearly equal would get huge weights of opposite
// signs, which amplify that error.
constexpr long double kErrorSquared = 1e-13L;

long double SquaredNorm(const PowerProfile& p) { return InnerProduct(p, p); }

long double SquaredNorm(const HalfLifeProfile& p) {
  const long double rate = kLn2 / p.half_life;
  // rate / 2 * coth(rate * end / 2)
  return -rate / 2 * (1 + std::exp(-rate * p.end)) / std::expm1(-rate * p.end);
}

// The integral of x^g e^(-z (1 - x)) over 0 < x <= 1, which is the mean of 1 / (g + 1 + K), where K
// has Poisson's distribution of mean z.
long double PowerTimesExponential(long double g, long double z) {
  constexpr long double kLargeMean = 1e6L;
  if (z > kLargeMean) {
    // Its expansion around the mean; the next term is of relative size 1 / z^2.
    const long double c = g + 1 + z;
    return 1 / c + z / (c * c * c);
  }
  // From the mode outwards, by the ratio of neighbours: nothing overflows, and the sum of the
  // probabilities, whatever its scale, is 1.
  constexpr long double kNegligible = 1e-21L;
  const long double mode = std::floor(z);
  long double mass = 0;
  long double sum = 0;
  const auto add = [&](long double probability, long double k) {
    mass += probability;
    sum += probability / (g + 1 + k);
  };
  add(1, mode);
  long double probability = 1;
  for (long double k = mode; k > 0 && probability > kNegligible; --k) {
    probability *= k / z;
    add(probability, k - 1);
  }
  probability = 1;
  for (long double k = mode + 1; probability > kNegligible; ++k) {
    probability *= z / k;
    add(probability, k);
  }
  return sum / mass;
}

// Solves a x = b in place: a, n x n by rows, is symmetric and positive definite; only its lower
// half is read. Cholesky's method.
void SolveInPlace(std::vector<long double>& a, std::vector<long double>& b) {
  const size_t n = b.size();
  for (size_t i = 0; i < n; ++i) {
    long double* const row = &a[i * n];
    for (size_t j = 0; j <= i; ++j) {
      const long double* const other = &a[j * n];
      long double rest = row[j];
      for (size_t k = 0; k < j; ++k) rest -= row[k] * other[k];
      row[j] = j < i ? rest / other[j] : std::sqrt(std::max(rest, kErrorSquared));
    }
    for (size_t k = 0; k < i; ++k) b[i] -= row[k] * b[k];
    b[i] /= row[i];
  }
  for (size_t i = n; i-- > 0;) {
    b[i] /= a[i * n + i];
    for (size_t k = 0; k < i; ++k) b[k] -= a[i * n + k] * b[i];
  }
}

}  // namespace

long double InnerProduct(const PowerProfile& a, const PowerProfile& b) {
  const PowerProfile& later = a.end < b.end ? b : a;
  const long double ratio =
      static_cast<long double>(std::min(a.end, b.end)) / static_cast<long double>(later.end);
  const long double ga = a.gamma;
  const long double gb = b.gamma;
  return (ga + 1) * (gb + 1) / ((ga + gb + 1) * later.end) *
         std::pow(ratio, static_cast<long double>(later.gamma));
}

long double InnerProduct(const PowerProfile& a, const HalfLifeProfile& b) {
  const long double rate = kLn2 / b.half_life;
  const long double gap = static_cast<long double>(b.end) - a.end;
  return (a.gamma + 1.0L) * rate * std::exp(-rate * gap) / -std::expm1(-rate * b.end) *
         PowerTimesExponential(a.gamma, rate * a.end);
}

PostHocSolution SolvePostHoc(absl::Span<const PowerProfile> sources, const TargetProfile& target) {
  const size_t n = sources.size();
  const long double target_norm =
      std::sqrt(std::visit([](const auto& profile) { return SquaredNorm(profile); }, target));
  std::vector<long double> norms(n);
  for (size_t i = 0; i < n; ++i) norms[i] = std::sqrt(SquaredNorm(sources[i]));
  // Cosines between the profiles.
  const auto cosine = [&](size_t i, size_t j) {
    return InnerProduct(sources[i], sources[j]) / norms[i] / norms[j];
  };
  std::vector<long double> to_target(n);
  std::vector<long double> system(n * n);
  for (size_t i = 0; i < n; ++i) {
    to_target[i] =
        std::visit([&](const auto& profile) { return InnerProduct(sources[i], profile); }, target) /
        norms[i] / target_norm;
    for (size_t j = 0; j < i; ++j) system[i * n + j] = cosine(i, j);
    system[i * n + i] = 1 + kErrorSquared;
  }
  std::vector<long double> weights = to_target;
  SolveInPlace(system, weights);
  long double sum = 0;
  for (size_t i = 0; i < n; ++i) {
    weights[i] *= target_norm / norms[i];
    sum += weights[i];
  }
  if (!(sum > 0)) {
    // The target is nearly at right angles to all of them: take the nearest.
    size_t nearest = 0;
    for (size_t i = 1; i < n; ++i) {
      if (std::pair(to_target[i], sources[i].end) >
          std::pair(to_target[nearest], sources[nearest].end)) {
        nearest = i;
      }
    }
    weights.assign(n, 0);
    weights[nearest] = sum = 1;
  }

  // Of a sum that is rounded to float32.
  constexpr long double kNegligibleWeight = 0x1p-27L;
  long double left = 0;
  for (long double& weight : weights) {
    weight = std::abs(weight / sum) < kNegligibleWeight ? 0 : weight / sum;
    left += weight;
  }

  PostHocSolution solution;
  solution.weights.reserve(n);
  for (const long double weight : weights) {
    solution.weights.push_back(static_cast<double>(weight / left));
  }
  // Of the weights as they are returned.
  long double squared = 1;
  for (size_t i = 0; i < n; ++i) {
    const long double scaled = solution.weights[i] * norms[i] / target_norm;
    squared += scaled * (scaled - 2 * to_target[i]);
    for (size_t j = 0; j < i; ++j) {
      squared += 2 * scaled * cosine(i, j) * (solution.weights[j] * norms[j] / target_norm);
    }
  }
  solution.residual = static_cast<double>(std::sqrt(std::max(squared, 0.0L)));
  return solution;
}

}  // namespace ema
