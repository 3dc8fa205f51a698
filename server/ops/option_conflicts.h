// SPDX-License-Identifier: Apache-2.0
//
// Options that are valid each by itself, but not together.
#ifndef EMA_SERVER_OPS_OPTION_CONFLICTS_H_
#define EMA_SERVER_OPS_OPTION_CONFLICTS_H_

#include <string>
#include <vector>

#include "server/base/log_event.h"
#include "server/ops/options.h"

namespace ema {

// Warnings, for the log, about settings that are valid but probably not intended.
std::vector<LogEvent> OptionWarnings(const ServerOptions& options);

// An option that contradicts another one, and what to do.
struct OptionConflict {
  std::string name;
  std::string problem;
};
std::vector<OptionConflict> OptionConflicts(const ServerOptions& options);

}  // namespace ema

#endif  // EMA_SERVER_OPS_OPTION_CONFLICTS_H_
