// SPDX-License-Identifier: Apache-2.0
//
// The status page: two static files, and the JSON that they show.
#ifndef EMA_SERVER_OPS_STATUS_PAGE_H_
#define EMA_SERVER_OPS_STATUS_PAGE_H_

#include <string>
#include <vector>

#include "server/ops/metrics.h"
#include "server/ops/server_state.h"

namespace ema {

// The content of status_page.html and status_page.js. CMake puts it into the program.
extern const char kStatusPageHtml[];
extern const char kStatusPageScript[];

// The data of the page as one JSON object. Times are in seconds since the epoch. Numbers that are
// unknown or not finite are null. Invalid UTF-8 is replaced.
std::string StatusJson(const ServerState& state, const std::vector<Metrics::Problem>& problems);

}  // namespace ema

#endif  // EMA_SERVER_OPS_STATUS_PAGE_H_
