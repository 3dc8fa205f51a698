// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/post_hoc.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <random>

#include "ema/schedule.h"

namespace ema {
namespace {

PowerProfile At(double end, double sigma_rel) { return {end, GammaOfSigmaRel(sigma_rel)}; }

// Snapshots of two tracks at `count` times, evenly spaced up to 1000.
std::vector<PowerProfile> Snapshots(int count) {
  std::vector<PowerProfile> sources;
  for (int k = 1; k <= count; ++k) {
    for (const double sigma_rel : {.05, .10}) sources.push_back(At(1000.0 * k / count, sigma_rel));
  }
  return sources;
}

double Density(const PowerProfile& p, double u) {
  return u > p.end ? 0 : (p.gamma + 1) / p.end * std::pow(u / p.end, p.gamma);
}

double Density(const HalfLifeProfile& p, double u) {
  const double rate = std::log(2.0) / p.half_life;
  return rate * std::exp(-rate * (p.end - u)) / -std::expm1(-rate * p.end);
}

// Independent of the formulas: Simpson's rule over (0, end], dense towards the end, where narrow
// profiles live.
template <class A, class B>
double Integrate(const A& a, const B& b, double end) {
  constexpr int kSteps = 200'000;
  const auto value = [&](double v) {
    // u = end (1 - v^3)
    const double u = end * (1 - v * v * v);
    return Density(a, u) * Density(b, u) * 3 * v * v * end;
  };
  double sum = value(0) + value(1);
  for (int i = 1; i < kSteps; ++i)
    sum += (i % 2 == 1 ? 4 : 2) * value(static_cast<double>(i) / kSteps);
  return sum / (3 * kSteps);
}

TEST(PostHocTest, InnerProductsAreTheReferences) {
  struct Case {
    PowerProfile a, b;
    double expected;
  };
  for (const Case& c : {Case{At(1000, .05), At(1000, .05), 9.243253523859763e-3},
                        Case{At(1000, .05), At(1000, .10), 5.726713247539305e-3},
                        Case{At(500, .05), At(1000, .05), 7.189256741938294e-8},
                        Case{At(500, .10), At(1000, .05), 4.454147202361635e-8}}) {
    EXPECT_NEAR(InnerProduct(c.a, c.b) / c.expected, 1, 1e-12);
    EXPECT_EQ(InnerProduct(c.a, c.b), InnerProduct(c.b, c.a));
  }
}

TEST(PostHocTest, InnerProductsAreTheIntegrals) {
  for (const double sigma_rel : {.02, .05, .10, .25, kMaxSigmaRel}) {
    for (const double end : {1.0, 90.0, 1000.0}) {
      const PowerProfile source = At(end, sigma_rel);
      const PowerProfile other = At(1000, .07);
      // Not where both are too far apart for either way to be right.
      if (end > 1) {
        EXPECT_NEAR(InnerProduct(source, other) / Integrate(source, other, end), 1, 1e-8)
            << sigma_rel << " " << end;
      }
      for (const double half_life : {3.0, 100.0, 700.0, 1e9}) {
        const HalfLifeProfile target{1000, half_life};
        const double integral = Integrate(source, target, end);
        if (integral < 1e-250) continue;
        EXPECT_NEAR(InnerProduct(source, target) / integral, 1, 1e-8)
            << sigma_rel << " " << end << " " << half_life;
      }
    }
  }
}

TEST(PostHocTest, InnerProductsWithShortHalfLivesHaveNoSeam) {
  // Around the mean from which the sum is replaced by its expansion.
  const PowerProfile source = At(1e6, .05);
  const long double below = InnerProduct(source, HalfLifeProfile{1e6, std::log(2.0) * 1.0000001});
  const long double above = InnerProduct(source, HalfLifeProfile{1e6, std::log(2.0) * 0.9999999});
  EXPECT_NEAR(static_cast<double>(below / above), 1, 1e-9);
  // A half-life of next to nothing is the newest weights alone: the density at the end.
  EXPECT_NEAR(InnerProduct(source, HalfLifeProfile{1e6, 1e-9}) / ((source.gamma + 1) / 1e6), 1,
              1e-9);
}

// Section 3.5 of the reference. Its residual is of the solution before that is divided by its sum,
// ours of the weights that are returned, which is larger.
struct Solution {
  const char* name;
  std::vector<double> times;
  std::vector<double> normalized;
  double sum;       // Before.
  double residual;  // 0: the reference has none.
};

class PostHocSolutionTest : public testing::TestWithParam<Solution> {};

TEST_P(PostHocSolutionTest, IsTheReferences) {
  std::vector<PowerProfile> sources;
  for (const double time : GetParam().times) {
    for (const double sigma_rel : {.05, .10}) sources.push_back(At(time, sigma_rel));
  }
  const PostHocSolution solution = SolvePostHoc(sources, At(1000, .07));
  ASSERT_EQ(solution.weights.size(), sources.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    EXPECT_NEAR(solution.weights[i], GetParam().normalized[i], 1e-10) << i;
  }
  if (GetParam().residual == 0) return;
  // Of c x instead of the best x: the square grows by (1 - c)^2 (1 - residual^2).
  const double excess = 1 - 1 / GetParam().sum;
  const double squared = GetParam().residual * GetParam().residual;
  EXPECT_NEAR(solution.residual, std::sqrt(squared + excess * excess * (1 - squared)), 5e-5);
}

INSTANTIATE_TEST_SUITE_P(
    Reference, PostHocSolutionTest,
    testing::Values(Solution{"One", {1000}, {.4383223043, .5616776957}, 1.0363341394, .0440},
                    Solution{"Two",
                             {500, 1000},
                             {.0000887800, -.0021808358, .4391578954, .5629341604},
                             1.0342112579,
                             .0},
                    Solution{"Four",
                             {250, 500, 750, 1000},
                             {1.87e-8, -4.594e-7, .0000835074, -.0005680481, .0106857393,
                              -.0439212356, .4345671402, .5991533375},
                             1.0114592289,
                             .0343}),
    [](const auto& tested) { return tested.param.name; });

TEST(PostHocTest, ResidualsFallWithTheNumberOfSnapshots) {
  struct Row {
    int count;
    double of[5];  // Of sigma_rel .02, .07, .15, .20, .25; the reference's.
  };
  const double sigma_rels[] = {.02, .07, .15, .20, .25};
  std::printf("snapshots  .02      .07      .15      .20      .25\n");
  for (const Row& row :
       {Row{8, {.25, .013, .033, .075, .17}}, Row{32, {.040, 9.8e-4, 2.3e-3, 6.4e-3, .034}},
        Row{128, {2.8e-3, 6.2e-5, 1.4e-4, 4.4e-4, 6.2e-3}}}) {
    std::printf("%9d", row.count);
    for (size_t i = 0; i < std::size(sigma_rels); ++i) {
      const double residual = SolvePostHoc(Snapshots(row.count), At(1000, sigma_rels[i])).residual;
      std::printf("  %.1e", residual);
      // Again a little more, by the division.
      EXPECT_NEAR(residual / row.of[i], 1, .08) << row.count << " " << sigma_rels[i];
    }
    std::printf("\n");
  }
}

TEST(PostHocTest, WhatIsStoredIsFoundExactly) {
  std::vector<PowerProfile> sources = Snapshots(32);
  const PostHocSolution solution = SolvePostHoc(sources, sources[41]);
  EXPECT_LT(solution.residual, 1e-5);
  // The one that it is may share its weight with near ones, no more.
  double sum = 0;
  for (const double weight : solution.weights) sum += weight;
  EXPECT_NEAR(sum, 1, 1e-12);
  EXPECT_NEAR(solution.weights[41], 1, 1e-3);
}

TEST(PostHocTest, EqualAndNearlyEqualSourcesDoNotBreakIt) {
  const std::vector<PowerProfile> plain = Snapshots(16);
  const PostHocSolution expected = SolvePostHoc(plain, At(1000, .07));
  for (const double gap : {0.0, 1e-13, 1e-9, 1e-6, 1e-3}) {
    std::vector<PowerProfile> sources = plain;
    for (const PowerProfile& source : plain) {
      sources.push_back({source.end * (1 - gap), source.gamma});
    }
    const PostHocSolution solution = SolvePostHoc(sources, At(1000, .07));
    double sum = 0;
    double size = 0;
    for (const double weight : solution.weights) {
      sum += weight;
      size += std::abs(weight);
    }
    EXPECT_NEAR(sum, 1, 1e-12);
    EXPECT_LE(solution.residual, expected.residual * 1.001) << gap;
    EXPECT_LT(size, 1e4) << gap;
  }
}

TEST(PostHocTest, ATargetFarFromAllSourcesIsStillAnAverage) {
  for (const double end : {1e-3, 1.0, 999.0}) {
    const PostHocSolution solution = SolvePostHoc({At(end, .05), At(end / 2, .10)}, At(1000, 1e-4));
    EXPECT_NEAR(solution.weights[0] + solution.weights[1], 1, 1e-12);
    EXPECT_GT(solution.residual, .5);
    EXPECT_TRUE(std::isfinite(solution.residual));
  }
}

TEST(PostHocTest, ManySourcesAreSolvedInTime) {
  const PostHocSolution solution = SolvePostHoc(Snapshots(256), At(1000, .07));
  EXPECT_LT(solution.residual, 3e-5);
}

// A random walk that is averaged directly, and from snapshots.
struct Simulation {
  static constexpr int kSteps = 2000;
  static constexpr int kWalks = 64;
  std::mt19937_64 random{20240607};
  std::vector<PowerProfile> profiles;
  std::vector<std::vector<double>> snapshots;
  std::vector<double> direct = std::vector<double>(kWalks);

  // The target is a profile of sigma_rel .07, or one of a half-life of 100.
  Simulation(int count, bool is_half_life) {
    const PowerProfile tracks[] = {At(1, .05), At(1, .10)};
    std::vector<double> walk(kWalks);
    std::vector<double> ema[2] = {walk, walk};
    std::normal_distribution<double> normal;
    for (int step = 1; step <= kSteps; ++step) {
      const auto keep = [&](double gamma) { return std::pow(1 - 1.0 / step, gamma + 1); };
      const double direct_keep = is_half_life ? 1 - -std::expm1(-std::log(2) / 100) /
                                                        -std::expm1(-std::log(2) * step / 100)
                                              : keep(GammaOfSigmaRel(.07));
      for (int w = 0; w < kWalks; ++w) {
        walk[w] += normal(random);
        for (int t = 0; t < 2; ++t) {
          ema[t][w] += (1 - keep(tracks[t].gamma)) * (walk[w] - ema[t][w]);
        }
        direct[w] += (1 - direct_keep) * (walk[w] - direct[w]);
      }
      if (step * count / kSteps == (step - 1) * count / kSteps) continue;
      for (int t = 0; t < 2; ++t) {
        profiles.push_back({static_cast<double>(step), tracks[t].gamma});
        snapshots.push_back(ema[t]);
      }
    }
  }
};

TEST(PostHocTest, RebuildsTheAverageOfARandomWalk) {
  constexpr double kPi = 3.14159265358979323846;
  for (const bool is_half_life : {false, true}) {
    const double rate = std::log(2) / 100;
    const double gamma = GammaOfSigmaRel(.07);
    const double norm = is_half_life
                            ? std::sqrt(rate / 2 / std::tanh(rate * Simulation::kSteps / 2))
                            : (gamma + 1) / std::sqrt((2 * gamma + 1) * Simulation::kSteps);
    std::printf("%s\nsnapshots  residual  error / the walk's size\n",
                is_half_life ? "half-life 100" : "sigma_rel .07");
    double last_error = 1e9;
    for (const int count : {5, 10, 20, 40, 80}) {
      Simulation simulation(count, is_half_life);
      const TargetProfile target = is_half_life
                                       ? TargetProfile(HalfLifeProfile{Simulation::kSteps, 100})
                                       : TargetProfile(At(Simulation::kSteps, .07));
      const PostHocSolution solution = SolvePostHoc(simulation.profiles, target);
      double error = 0;
      for (int w = 0; w < Simulation::kWalks; ++w) {
        double rebuilt = 0;
        for (size_t i = 0; i < solution.weights.size(); ++i) {
          rebuilt += solution.weights[i] * simulation.snapshots[i][w];
        }
        error += std::pow(rebuilt - simulation.direct[w], 2) / Simulation::kWalks;
      }
      error = std::sqrt(error);
      std::printf("%9d  %.2e  %.2e\n", count, solution.residual,
                  error / std::sqrt(Simulation::kSteps));
      // The difference d of the profiles has a running integral D that is 0 at both ends. Of a walk
      // with steps of size 1 the error's variance is the integral of D^2, which is at most that of
      // d^2 times (end / pi)^2 (Wirtinger's inequality).
      EXPECT_LT(error, solution.residual * norm * Simulation::kSteps / kPi);
      EXPECT_LT(error, last_error / 3);
      last_error = error;
    }
  }
}

}  // namespace
}  // namespace ema
