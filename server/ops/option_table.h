// SPDX-License-Identifier: Apache-2.0
//
// The one declaration of each option: flags, environment, configuration file, --help,
// --print-config and the log's line of limits all come from this table.
#ifndef EMA_SERVER_OPS_OPTION_TABLE_H_
#define EMA_SERVER_OPS_OPTION_TABLE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "server/ops/options.h"

namespace CLI {  // NOLINT(readability-identifier-naming): CLI11 calls it that.
class App;
class Option;
}  // namespace CLI

namespace ema {

// The problems with option values. Each text has the option as NameWhereSet() writes it, the value,
// and the expected one.
struct OptionProblems {
  std::string file;  // "FILE:LINE", of the value that is read from a file.
  std::vector<std::string> texts;
};

// --block-bytes is a multiple of this.
inline constexpr int64_t kBlockGranule = 4096;

// Groups whose options are limits.
inline constexpr std::string_view kLimits = "Limits";
inline constexpr std::string_view kTimeLimits = "Time limits";

// Declares all options to `app`, by group, in the order of --help. Their callbacks set the fields
// of `options`, or add to `problems` and change nothing; an option's default text
// (capture_default_str()) is the current value. Both arguments must outlive `app`.
void AddOptions(ServerOptions& options, CLI::App& app, OptionProblems& problems);

// The name of this host; the default of --member.
std::string HostName();

// "default", "flag", "file", or the name of the environment variable. REQUIRES: `app` has parsed.
// Not safe against a concurrent setenv().
std::string SourceOf(const CLI::App& app, const CLI::Option& option);

// An option as the operator has set it: "--max-models", "EMA_MAX_MODELS" or "`file`: max-models".
std::string NameWhereSet(const CLI::App& app, const std::string& name, const std::string& file);

// The names of the variables that begin with EMA_ and are not empty, sorted. Left out are those
// that Kubernetes makes for a service whose name is, or begins with, "ema" (EMA_SERVICE_HOST,
// EMA_PORT, EMA_PORT_50051_TCP, ...). Not safe against a concurrent setenv().
std::vector<std::string> EmaVariables();

}  // namespace ema

#endif  // EMA_SERVER_OPS_OPTION_TABLE_H_
