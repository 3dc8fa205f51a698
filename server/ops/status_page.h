// SPDX-License-Identifier: Apache-2.0
//
// The page that people look at.
#ifndef EMA_SERVER_OPS_STATUS_PAGE_H_
#define EMA_SERVER_OPS_STATUS_PAGE_H_

#include <string>
#include <string_view>
#include <vector>

#include "server/ops/metrics.h"
#include "server/ops/server_state.h"

namespace ema {

// One HTML page that needs nothing else and loads itself again every few seconds. Whatever comes
// from clients is escaped.
std::string StatusPage(const ServerState& state, const std::vector<Metrics::Problem>& problems);

// `text` as HTML shows it, also in an attribute.
std::string EscapeHtml(std::string_view text);

// The distances of up to 8 tracks over steps, as an SVG element. Empty: there are none.
std::string DistancePlot(const std::vector<StatisticsPoint>& history);

}  // namespace ema

#endif  // EMA_SERVER_OPS_STATUS_PAGE_H_
