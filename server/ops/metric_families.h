// SPDX-License-Identifier: Apache-2.0
//
// Builds metric families for prometheus-cpp.
#ifndef EMA_SERVER_OPS_METRIC_FAMILIES_H_
#define EMA_SERVER_OPS_METRIC_FAMILIES_H_

#include <prometheus/metric_family.h>

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "server/ops/server_state.h"

namespace ema {

using MetricLabels = std::vector<prometheus::ClientMetric::Label>;

// The series of one metric.
struct MetricFamily : prometheus::MetricFamily {
  // REQUIRES: a counter or a gauge.
  MetricFamily& Add(double value, MetricLabels labels = {}) {
    prometheus::ClientMetric series;
    (type == prometheus::MetricType::Counter ? series.counter.value : series.gauge.value) = value;
    return Add(std::move(series), std::move(labels));
  }
  MetricFamily& Add(prometheus::ClientMetric series, MetricLabels labels) {
    series.label = std::move(labels);
    metric.push_back(std::move(series));
    return *this;
  }
};

// Metrics, in the order in which they are added. References to a family stay valid.
class MetricFamilies {
 public:
  MetricFamily& Counter(std::string name, std::string help) {
    return Add(std::move(name), std::move(help), prometheus::MetricType::Counter);
  }
  MetricFamily& Gauge(std::string name, std::string help) {
    return Add(std::move(name), std::move(help), prometheus::MetricType::Gauge);
  }
  MetricFamily& Histogram(std::string name, std::string help) {
    return Add(std::move(name), std::move(help), prometheus::MetricType::Histogram);
  }
  // A metric with one series.
  void Gauge(std::string name, std::string help, double value) {
    Gauge(std::move(name), std::move(help)).Add(value);
  }

  std::vector<prometheus::MetricFamily> All() const { return {all_.begin(), all_.end()}; }

 private:
  MetricFamily& Add(std::string name, std::string help, prometheus::MetricType type) {
    return all_.emplace_back(MetricFamily{{std::move(name), std::move(help), type, {}}});
  }

  std::deque<MetricFamily> all_;
};

// Adds the metrics of `state` and of this process.
void AddStateMetrics(const ServerState& state, MetricFamilies& families);

}  // namespace ema

#endif  // EMA_SERVER_OPS_METRIC_FAMILIES_H_
