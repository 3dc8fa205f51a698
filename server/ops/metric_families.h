// SPDX-License-Identifier: Apache-2.0
//
// Builds metric families for prometheus-cpp.
#ifndef EMA_SERVER_OPS_METRIC_FAMILIES_H_
#define EMA_SERVER_OPS_METRIC_FAMILIES_H_

#include <prometheus/metric_family.h>

#include <string>
#include <utility>
#include <vector>

#include "server/ops/server_state.h"

namespace ema {

using MetricLabels = std::vector<prometheus::ClientMetric::Label>;

// Builds the series of one metric. REQUIRES: all are of one type.
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

// The gauges of `state` and of this process.
std::vector<prometheus::MetricFamily> StateMetrics(const ServerState& state);

}  // namespace ema

#endif  // EMA_SERVER_OPS_METRIC_FAMILIES_H_
