// SPDX-License-Identifier: Apache-2.0
//
// The one definition of each option: flags, environment, configuration file, --help,
// --print-config and the log's line of limits all come from this table.
#ifndef EMA_SERVER_OPS_OPTION_TABLE_H_
#define EMA_SERVER_OPS_OPTION_TABLE_H_

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "server/base/log_event.h"
#include "server/ops/options.h"

namespace ema {

struct Option {
  enum class Kind {
    kText,    // Anything that is written as text, also durations and bytes.
    kNumber,  // An integer.
    kSwitch,  // true or false; as a flag it may stand alone.
    kList,    // Texts, separated by commas.
  };

  std::string name;       // Of the flag, without its dashes, and of the file's key.
  std::string group;      // In --help.
  std::string type_name;  // In --help: N, FILE, DURATION, ...
  std::string help;
  Kind kind = Kind::kText;
  bool is_hidden = false;  // Not in --help.
  // INVALID_ARGUMENT: names the value and what is expected, not the option; nothing is changed.
  std::function<absl::Status(const std::string& text)> set;
  // The value in a form that `set` takes.
  std::function<std::string()> get;
};

// The environment variable of an option: "data-dir" -> "EMA_DATA_DIR".
std::string EnvironmentName(std::string_view option);

// The names of the variables that begin with EMA_ and are not empty, sorted. Left out are those
// that Kubernetes makes for a service whose name is, or begins with, "ema" (EMA_SERVICE_HOST,
// EMA_PORT, EMA_PORT_50051_TCP, ...). Not safe against a concurrent setenv().
std::vector<std::string> EmaVariables();

// Groups whose options are limits.
inline constexpr std::string_view kLimits = "Limits";
inline constexpr std::string_view kTimeLimits = "Time limits";

// All options, by group, in the order of --help. They set and get the fields of `options`, which
// outlives them.
std::vector<Option> OptionTable(ServerOptions& options);

// Warnings, for the log, about settings that are valid but probably not intended.
std::vector<LogEvent> OptionWarnings(const ServerOptions& options);

// Errors of options that contradict each other, each with what to do. Empty: there are none.
std::vector<std::string> OptionConflicts(const ServerOptions& options);

}  // namespace ema

#endif  // EMA_SERVER_OPS_OPTION_TABLE_H_
