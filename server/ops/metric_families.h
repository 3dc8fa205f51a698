// SPDX-License-Identifier: Apache-2.0
//
// Builds what prometheus-cpp serializes.
#ifndef EMA_SERVER_OPS_METRIC_FAMILIES_H_
#define EMA_SERVER_OPS_METRIC_FAMILIES_H_

#include <prometheus/metric_family.h>

#include <string>
#include <utility>
#include <vector>

#include "server/ops/server_state.h"

namespace ema {

using MetricLabels = std::vector<prometheus::ClientMetric::Label>;

// One metric's series. REQUIRES: of one type only.
class FamilyBuilder {
 public:
  FamilyBuilder(std::string name, std::string help, prometheus::MetricType type) {
    family_.name = std::move(name);
    family_.help = std::move(help);
    family_.type = type;
  }

  // A counter's or a gauge's value.
  FamilyBuilder& Add(double value, MetricLabels labels = {}) {
    prometheus::ClientMetric metric;
    (family_.type == prometheus::MetricType::Counter ? metric.counter.value : metric.gauge.value) =
        value;
    return Add(std::move(metric), std::move(labels));
  }
  FamilyBuilder& Add(prometheus::ClientMetric metric, MetricLabels labels) {
    metric.label = std::move(labels);
    family_.metric.push_back(std::move(metric));
    return *this;
  }

  prometheus::MetricFamily Take() { return std::move(family_); }

 private:
  prometheus::MetricFamily family_;
};

// The gauges of a state, and what the system knows of this process.
std::vector<prometheus::MetricFamily> StateMetrics(const ServerState& state);

}  // namespace ema

#endif  // EMA_SERVER_OPS_METRIC_FAMILIES_H_
