// SPDX-License-Identifier: Apache-2.0
#include "server/ops/options.h"

#include <toml++/toml.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "ema/internal/status_macros.h"
#include "ema/manifest.h"
#include "server/base/nearest_name.h"
#include "server/base/printable.h"
#include "server/base/quoted.h"
#include "server/base/small_file.h"
#include "server/ops/option_conflicts.h"
#include "server/ops/option_table.h"

namespace ema {
namespace {

constexpr int kUsageExitCode = 2;
// The group of the options that are not in ServerOptions, such as --config.
constexpr char kConfiguration[] = "Configuration";

// What clients read, and the server does not; they may share its environment.
constexpr std::array<std::string_view, 4> kClientVariables = {"EMA_SERVER", "EMA_TLS_CA",
                                                              "EMA_TOKEN", "EMA_TOKEN_FILE"};

// Those of ServerOptions.
std::vector<CLI::Option*> Settings(CLI::App& app) {
  return app.get_options(
      [](const CLI::Option* option) { return option->get_group() != kConfiguration; });
}

bool IsNumber(const CLI::Option& option) { return option.get_type_name() == "N"; }

// `"max-modles" is not an option`, and the one of `options` that resembles it, if one does.
// `dashes`: what names begin with here.
std::string NotAnOption(const std::string& given, const std::string& dashes,
                        const std::vector<CLI::Option*>& options) {
  const std::string name = absl::StrReplaceAll(given.substr(dashes.size()), {{"_", "-"}});
  const std::string nearest(NearestName(name, options, [](const CLI::Option* option) {
    return std::string_view(option->get_single_name());
  }));
  std::string text = absl::StrCat(Quoted(given), " is not an option");
  if (SharedEnds(name, nearest) * 2 < name.size()) return text;
  return absl::StrCat(text, "; did you mean \"", dashes, nearest, "\"?");
}

// The arguments, the last one first, as CLI11 takes them.
std::vector<std::string> Reversed(int argc, const char* const* argv) {
  std::vector<std::string> arguments;
  for (int i = argc - 1; i > 0; --i) {
    std::string argument = argv[i];
    // "--data-dir=" would take the next argument for its value.
    if (argument.starts_with("--") && argument.find('=') == argument.size() - 1) {
      arguments.emplace_back();
      argument.pop_back();
    }
    arguments.push_back(std::move(argument));
  }
  return arguments;
}

// The text that the flag would have. INVALID_ARGUMENT: no option can have the value.
absl::StatusOr<std::string> FlagText(const toml::node& node) {
  if (const auto* const text = node.as_string()) return text->get();
  if (const auto* const number = node.as_integer()) return absl::StrCat(number->get());
  if (const auto* const truth = node.as_boolean()) return truth->get() ? "true" : "false";
  if (const auto* const array = node.as_array();
      array != nullptr && (array->empty() || array->is_homogeneous<std::string>())) {
    std::vector<std::string> texts;
    for (const toml::node& element : *array) texts.push_back(element.as_string()->get());
    return absl::StrJoin(texts, ",");
  }
  if (node.is_table()) {
    return absl::InvalidArgumentError(
        "is a table; expected an option outside of any table, such as max-models = 64");
  }
  std::ostringstream kind;
  kind << node.type();
  return absl::InvalidArgumentError(
      absl::StrCat("is of the TOML type ", kind.str(),
                   "; expected text, an integer, true or false, or an array of text"));
}

// Sets what neither a flag nor the environment has set. The file is TOML 1.0 with one key for each
// option and no tables, of at most 1 MiB.
void ReadFile(const std::string& path, CLI::App& app, OptionProblems& problems) {
  constexpr int64_t kMaxBytes = 1 << 20;
  const absl::StatusOr<std::string> content = ReadSmallFile(path, kMaxBytes);
  if (!content.ok()) {
    problems.texts.push_back(absl::StrCat(NameWhereSet(app, "config", ""), ": ", path, ": ",
                                          std::string(content.status().message())));
    return;
  }
  const toml::parse_result parsed = toml::parse(*content, path);
  if (!parsed) {
    problems.texts.push_back(
        absl::StrCat(path, ":", parsed.error().source().begin.line,
                     ": not TOML: ", std::string(parsed.error().description())));
    return;
  }
  const std::vector<CLI::Option*> settings = Settings(app);
  for (const auto& [toml_key, node] : parsed.table()) {
    const std::string key(toml_key.str());
    problems.file = absl::StrCat(path, ":", toml_key.source().begin.line);
    const auto option = absl::c_find_if(
        settings, [&key](const CLI::Option* other) { return other->get_single_name() == key; });
    if (option == settings.end()) {
      problems.texts.push_back(absl::StrCat(problems.file, ": ", NotAnOption(key, "", settings)));
      continue;
    }
    const absl::StatusOr<std::string> text = FlagText(node);
    if (!text.ok()) {
      problems.texts.push_back(
          absl::StrCat(problems.file, ": ", key, ": ", std::string(text.status().message())));
    } else if ((*option)->empty()) {
      (*option)->add_result(*text)->run_callback();
    }
  }
}

std::string TomlString(const std::string& text) {
  std::ostringstream out;
  out << toml::toml_formatter{toml::value<std::string>(text), toml::format_flags::none};
  return out.str();
}

// The current value.
std::string TomlValue(const CLI::Option& option) {
  std::string text = option.get_default_str();
  if (IsNumber(option) || option.get_expected_max() == 0) return text;
  if (option.get_expected_max() == 1) return TomlString(text);
  std::vector<std::string> elements = absl::StrSplit(text, ',', absl::SkipEmpty());
  for (std::string& element : elements) element = TomlString(element);
  return absl::StrCat("[", absl::StrJoin(elements, ", "), "]");
}

// TOML that ReadFile() reads as the current values.
std::string ToToml(CLI::App& app) {
  std::string text = absl::StrCat("# ema-server ", std::string(ServerVersion()), "\n");
  std::string group;
  for (CLI::Option* const option : Settings(app)) {
    if (option->get_group().empty() && option->empty()) continue;  // Hidden.
    if (group != option->get_group()) absl::StrAppend(&text, "\n# ", option->get_group(), "\n");
    group = option->get_group();
    absl::StrAppend(&text, option->get_single_name(), " = ",
                    TomlValue(*option->capture_default_str()), "  # ", SourceOf(app, *option),
                    "\n");
  }
  return text;
}

// For variables that are no option of ours, nor a client's.
std::vector<LogEvent> UnknownVariables(CLI::App& app) {
  std::vector<std::string> known(kClientVariables.begin(), kClientVariables.end());
  for (const CLI::Option* const option : app.get_options({})) {
    if (!option->get_envname().empty()) known.push_back(option->get_envname());
  }
  std::vector<LogEvent> events;
  for (const std::string& name : EmaVariables()) {
    if (absl::c_linear_search(known, name)) continue;
    const std::string_view nearest =
        NearestName(name, known, [](const std::string& other) { return std::string_view(other); });
    events.push_back({LogLevel::kWarning,
                      "unknown environment variable",
                      {{"name", name}, {"nearest", nearest}}});
  }
  return events;
}

}  // namespace

ParsedOptions ParseOptions(int argc, const char* const* argv) {
  ParsedOptions parsed;
  OptionProblems problems;
  CLI::App app(
      "EMA Server: keeps exponential moving averages of a model's weights outside the training "
      "job.\nEach option can be a flag, the environment variable shown with it, or a line in the "
      "file of --config; the first of these wins.",
      "ema-server");
  app.get_formatter()->column_width(36);
  app.allow_extras();
  app.get_help_ptr()->group(kConfiguration);
  app.set_version_flag("--version", absl::StrCat("ema-server ", std::string(ServerVersion())),
                       "Print the version and exit")
      ->group(kConfiguration);
  app.add_option("--config", parsed.config_file,
                 "TOML file with an option on each line, such as max-models = 64")
      ->type_name("FILE")
      ->envname("EMA_CONFIG")
      ->group(kConfiguration);
  const CLI::Option* const print_config =
      app.add_flag("--print-config")
          ->description(
              "Print the value and the source of every option in the format of this file, and exit")
          ->group(kConfiguration);
  AddOptions(parsed.options, app, problems);
  try {
    app.parse(Reversed(argc, argv));
  } catch (const CLI::ParseError& error) {
    std::ostringstream out;
    parsed.exit_code = app.exit(error, out, out) == 0 ? 0 : kUsageExitCode;
    parsed.should_exit = true;
    parsed.text = out.str();
    return parsed;
  }
  // What follows an unknown flag may be its value.
  if (const std::vector<std::string> others = app.remaining(); !others.empty()) {
    const std::string name = others[0].substr(0, others[0].find('='));
    problems.texts.push_back(
        name.starts_with("--")
            ? NotAnOption(name, "--", app.get_options({}))
            : absl::StrCat("unexpected argument ", Quoted(others[0]), "; options begin with --"));
  }
  if (!parsed.config_file.empty()) ReadFile(parsed.config_file, app, problems);
  if (problems.texts.empty()) {
    for (const OptionConflict& conflict : OptionConflicts(parsed.options)) {
      problems.texts.push_back(absl::StrCat(NameWhereSet(app, conflict.name, parsed.config_file),
                                            ": ", conflict.problem));
    }
  }
  parsed.warnings = UnknownVariables(app);
  absl::c_move(OptionWarnings(parsed.options), std::back_inserter(parsed.warnings));
  if (!problems.texts.empty()) {
    parsed.should_exit = true;
    parsed.exit_code = kUsageExitCode;
    for (const std::string& problem : problems.texts) {
      // Values come from anywhere, and this is shown on a terminal.
      absl::StrAppend(&parsed.text, EscapeUnprintable(problem), "\n");
    }
    parsed.text += "Run with --help for all options.\n";
  } else if (print_config->count() > 0) {
    parsed.should_exit = true;
    parsed.text = ToToml(app);
  }
  if (parsed.options.thread_count == 0) {
    parsed.options.thread_count = std::max<int64_t>(1, std::thread::hardware_concurrency() / 2);
  }
  if (parsed.options.member.empty()) parsed.options.member = HostName();
  return parsed;
}

absl::StatusOr<FollowedModel> ParseFollow(const std::string& url) {
  const size_t host = url.starts_with("ema://") ? 6 : url.starts_with("emas://") ? 7 : 0;
  const size_t slash = url.find('/', host);
  if (host == 0 || slash == std::string::npos || slash == host) {
    return absl::InvalidArgumentError(absl::StrCat(
        Quoted(url), " is not the URL of a model, such as ema://ema.example:50051/my-model"));
  }
  FollowedModel followed{url.substr(0, slash), url.substr(slash + 1)};
  EMA_RETURN_IF_ERROR(ValidateName("model", followed.model));
  return followed;
}

std::string_view ServerVersion() { return EMA_VERSION; }

LogEvent LimitsEvent(const ServerOptions& options) {
  LogEvent event{.name = "limits"};
  ServerOptions copy = options;
  OptionProblems problems;
  CLI::App app;
  AddOptions(copy, app, problems);
  for (const CLI::Option* const option : Settings(app)) {
    if (option->get_group() != kLimits && option->get_group() != kTimeLimits) continue;
    const std::string key = absl::StrReplaceAll(option->get_single_name(), {{"-", "_"}});
    int64_t number = 0;
    if (IsNumber(*option) && absl::SimpleAtoi(option->get_default_str(), &number)) {
      event.fields.emplace_back(key, number);
    } else {
      event.fields.emplace_back(key, option->get_default_str());
    }
  }
  return event;
}

}  // namespace ema
