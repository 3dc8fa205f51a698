// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/ops/status_page.h"

namespace ema {
namespace {

constexpr double kWidth = 900;
constexpr double kHeight = 200;
constexpr double kLeft = 56;  // For the numbers of the axis.
constexpr double kBottom = 22;
constexpr double kTop = 8;
constexpr size_t kMaxTracks = 8;  // As many colours as the page has.

using Line = std::vector<std::pair<int64_t, double>>;  // Step and distance.

std::map<std::string, Line> LinesOf(const std::vector<StatisticsPoint>& history) {
  std::map<std::string, Line> lines;
  for (const StatisticsPoint& point : history) {
    for (const TrackStatistics& track : point.tracks) {
      if (!track.distance.has_value()) continue;
      const auto found = lines.find(track.track);
      if (found == lines.end() && lines.size() == kMaxTracks) continue;
      lines[track.track].emplace_back(point.step, *track.distance);
    }
  }
  return lines;
}

// A round number, at least `value`.
double RoundUp(double value) {
  if (!(value > 0)) return 1;
  const double power = std::pow(10, std::floor(std::log10(value)));
  for (const double factor : {1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0}) {
    if (value <= factor * power) return factor * power;
  }
  return 10 * power;
}

std::string Text(double x, double y, const char* anchor, const std::string& text) {
  return absl::StrFormat("<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"%s\">%s</text>", x, y, anchor,
                         text);
}

}  // namespace

std::string DistancePlot(const std::vector<StatisticsPoint>& history) {
  const std::map<std::string, Line> lines = LinesOf(history);
  if (lines.empty()) return "";
  int64_t first = std::numeric_limits<int64_t>::max();
  int64_t last = std::numeric_limits<int64_t>::min();
  double most = 0;
  for (const auto& [track, line] : lines) {
    for (const auto& [step, distance] : line) {
      first = std::min(first, step);
      last = std::max(last, step);
      if (std::isfinite(distance)) most = std::max(most, distance);
    }
  }
  const double top = RoundUp(most);
  const auto x = [&](int64_t step) {
    const double share =
        last > first ? static_cast<double>(step - first) / static_cast<double>(last - first) : 0.5;
    return kLeft + share * (kWidth - kLeft - 8);
  };
  const auto y = [&](double distance) {
    return kHeight - kBottom - distance / top * (kHeight - kBottom - kTop);
  };
  std::string svg = absl::StrFormat(
      "<svg viewBox=\"0 0 %.0f %.0f\" role=\"img\" aria-label=\"distance of each track from the "
      "raw weights, by step\">",
      kWidth, kHeight);
  for (const double share : {0.0, 0.5, 1.0}) {
    const double at = y(share * top);
    absl::StrAppendFormat(&svg,
                          "<line class=\"grid\" x1=\"%.0f\" x2=\"%.0f\" y1=\"%.1f\" y2=\"%.1f\"/>",
                          kLeft, kWidth - 8, at, at);
    svg += Text(kLeft - 6, at + 4, "end", absl::StrFormat("%.3g", share * top));
  }
  svg += Text(kLeft, kHeight - 4, "start", absl::StrCat("step ", first));
  if (last > first) svg += Text(kWidth - 8, kHeight - 4, "end", absl::StrCat(last));
  size_t color = 0;
  std::string legend;
  for (const auto& [track, line] : lines) {
    std::string points;
    for (const auto& [step, distance] : line) {
      if (std::isfinite(distance)) {
        absl::StrAppendFormat(&points, "%.1f,%.1f ", x(step), y(distance));
      }
    }
    absl::StrAppendFormat(&svg, "<polyline class=\"t%d\" points=\"%s\"/>", color, points);
    if (line.size() == 1 && std::isfinite(line[0].second)) {
      absl::StrAppendFormat(&svg, "<circle class=\"t%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"2\"/>", color,
                            x(line[0].first), y(line[0].second));
    }
    absl::StrAppendFormat(&legend, "<span class=\"key t%d\">%s</span>", color, EscapeHtml(track));
    ++color;
  }
  return absl::StrCat("<figure>", svg, "</svg><figcaption>Distance from the raw weights: ", legend,
                      "</figcaption></figure>");
}

}  // namespace ema
