// SPDX-License-Identifier: Apache-2.0
#include "server/ops/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "server/base/nearest_name.h"
#include "server/base/quoted.h"
#include "server/ops/config_file.h"
#include "server/ops/option_table.h"

namespace ema {
namespace {

constexpr int kUsageExitCode = 2;
constexpr char kConfigVariable[] = "EMA_CONFIG";

// What clients read, and the server does not; they may share its environment.
constexpr std::array<std::string_view, 4> kClientVariables = {"EMA_SERVER", "EMA_TLS_CA",
                                                              "EMA_TOKEN", "EMA_TOKEN_FILE"};

std::string Variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// `; did you mean "max-models"?`, or nothing if `name` resembles none of `names`.
std::string Suggestion(const std::string& name, const std::vector<std::string>& names) {
  const std::string_view nearest =
      NearestName(name, names, [](const std::string& known) { return std::string_view(known); });
  if (SharedEnds(name, nearest) * 2 < name.size()) return "";
  return absl::StrCat("; did you mean \"", std::string(nearest), "\"?");
}

// One reading of all options, from the weakest source to the strongest.
class OptionReader {
 public:
  explicit OptionReader(ServerOptions& options) : table_(OptionTable(options)) {
    for (const Option& option : table_) names_.push_back(option.name);
  }

  const std::vector<Option>& table() const { return table_; }
  const std::vector<std::string>& problems() const { return problems_; }

  void AddProblem(std::string problem) { problems_.push_back(std::move(problem)); }

  void ReadFile(const std::string& path) {
    const absl::StatusOr<std::vector<ConfigEntry>> entries = ReadConfigFile(path);
    if (!entries.ok()) return AddProblem(std::string(entries.status().message()));
    for (const ConfigEntry& entry : *entries) {
      const std::string where = absl::StrCat(path, ":", entry.line);
      const auto option = std::find(names_.begin(), names_.end(), entry.key);
      if (option == names_.end()) {
        const std::string as_key = absl::StrReplaceAll(entry.key, {{"_", "-"}});
        AddProblem(absl::StrCat(where, ": ", Quoted(entry.key), " is not an option",
                                Suggestion(as_key, names_)));
      } else if (!entry.problem.empty()) {
        AddProblem(absl::StrCat(where, ": ", entry.key, ": ", entry.problem));
      } else {
        Set(table_[option - names_.begin()], entry.value, absl::StrCat(where, ": ", entry.key),
            absl::StrCat("file, line ", entry.line));
      }
    }
  }

  void ReadEnvironment() {
    for (const Option& option : table_) {
      const std::string name = EnvironmentName(option.name);
      const std::string value = Variable(name.c_str());
      if (!value.empty()) Set(option, value, name, absl::StrCat("environment, ", name));
    }
  }

  void ReadFlag(const Option& option, const std::string& value) {
    const std::string flag = "--" + option.name;
    Set(option, value, flag, absl::StrCat("flag, ", flag));
  }

  void RefuseFlag(const std::string& argument) {
    const std::string name = argument.substr(0, argument.find('='));
    if (!name.starts_with("--")) {
      return AddProblem(
          absl::StrCat("unexpected argument \"", argument, "\"; options begin with --"));
    }
    std::vector<std::string> flags = {"--config", "--print-config", "--help", "--version"};
    for (const std::string& known : names_) flags.push_back("--" + known);
    AddProblem(absl::StrCat("\"", name, "\" is not an option",
                            Suggestion(absl::StrReplaceAll(name, {{"_", "-"}}), flags)));
  }

  // For variables that are no option of ours, nor a client's.
  std::vector<LogEvent> UnknownVariables() const {
    std::vector<std::string> known(kClientVariables.begin(), kClientVariables.end());
    known.emplace_back(kConfigVariable);
    for (const std::string& name : names_) known.push_back(EnvironmentName(name));
    std::vector<LogEvent> events;
    for (const std::string& name : EmaVariables()) {
      if (std::find(known.begin(), known.end(), name) != known.end()) continue;
      LogEvent& event = events.emplace_back();
      event = {LogLevel::kWarning, "unknown environment variable", {{"name", name}}};
      event.fields.emplace_back("nearest", NearestName(name, known, [](const std::string& other) {
                                  return std::string_view(other);
                                }));
    }
    return events;
  }

  // TOML that ReadFile() reads as the same values.
  std::string ToToml() const {
    std::string text = absl::StrCat("# ema-server ", std::string(ServerVersion()), "\n");
    std::string group;
    for (const Option& option : table_) {
      const auto source = sources_.find(option.name);
      if (option.is_hidden && source == sources_.end()) continue;
      if (group != option.group) absl::StrAppend(&text, "\n# ", option.group, "\n");
      group = option.group;
      absl::StrAppend(&text, option.name, " = ", TomlValue(option), "  # ",
                      source == sources_.end() ? "default" : source->second, "\n");
    }
    return text;
  }

 private:
  // `where`: for errors; `source`: for ToToml().
  void Set(const Option& option, const std::string& value, const std::string& where,
           const std::string& source) {
    const absl::Status status = option.set(value);
    if (!status.ok()) return AddProblem(absl::StrCat(where, ": ", std::string(status.message())));
    sources_[option.name] = source;
  }

  static std::string TomlValue(const Option& option) {
    switch (option.kind) {
      case Option::Kind::kNumber:
      case Option::Kind::kSwitch:
        return option.get();
      case Option::Kind::kText:
        return TomlString(option.get());
      case Option::Kind::kList:
        break;
    }
    std::vector<std::string> elements = absl::StrSplit(option.get(), ',');
    for (std::string& element : elements) element = TomlString(element);
    return absl::StrCat("[", absl::StrJoin(elements, ", "), "]");
  }

  const std::vector<Option> table_;
  std::vector<std::string> names_;  // Of the table.
  std::vector<std::string> problems_;
  std::map<std::string, std::string> sources_;  // By name, of what is not a default.
};

// The command line, as CLI11 takes it apart.
class CommandLine {
 public:
  explicit CommandLine(const std::vector<Option>& table) {
    app_.set_version_flag("--version", absl::StrCat("ema-server ", std::string(ServerVersion())),
                          "Print the version and exit");
    app_.get_formatter()->column_width(36);
    app_.allow_extras();
    constexpr char kGroup[] = "Configuration";
    app_.get_help_ptr()->group(kGroup);
    app_.get_option("--version")->group(kGroup);
    config_ = app_.add_option("--config", CLI::callback_t(),
                              "TOML file with an option on each line, such as max-models = 64")
                  ->option_text(absl::StrCat("FILE (Env:", kConfigVariable, ")"))
                  ->group(kGroup);
    print_config_ = app_.add_flag("--print-config")
                        ->description(
                            "Print the value and the source of every option in the format of this "
                            "file, and exit")
                        ->group(kGroup);
    for (const Option& option : table) Add(option);
  }

  // True: parsed is ready.
  bool Parse(int argc, const char* const* argv, ParsedOptions& parsed) {
    // The last argument first, as CLI11 takes them.
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
    try {
      app_.parse(std::move(arguments));
      return true;
    } catch (const CLI::ParseError& error) {
      std::ostringstream out;
      std::ostringstream problem;
      parsed.exit_code = app_.exit(error, out, problem) == 0 ? 0 : kUsageExitCode;
      parsed.should_exit = true;
      parsed.text = parsed.exit_code == 0 ? out.str() : problem.str();
      return false;
    }
  }

  std::string config_file() const {
    return config_->count() > 0 ? config_->results().back() : Variable(kConfigVariable);
  }
  bool print_config() const { return print_config_->count() > 0; }

  // Gives `reading` what has been parsed.
  void Read(OptionReader& reader) {
    for (const Option& option : reader.table()) {
      const CLI::Option* const flag = flags_[option.name];
      if (flag->count() > 0) reader.ReadFlag(option, absl::StrJoin(flag->results(), ","));
    }
    // What follows an unknown flag may be its value.
    const std::vector<std::string> others = app_.remaining();
    if (!others.empty()) reader.RefuseFlag(others.front());
  }

 private:
  void Add(const Option& option) {
    const std::string flag = "--" + option.name;
    CLI::Option* const added =
        option.kind == Option::Kind::kSwitch ? app_.add_flag(flag) : app_.add_option(flag);
    added->description(option.help);
    if (option.kind == Option::Kind::kList) added->expected(CLI::detail::expected_max_vector_size);
    std::string text = option.type_name;
    const std::string value = option.get();
    if (option.kind != Option::Kind::kSwitch && !value.empty()) absl::StrAppend(&text, "=", value);
    if (option.kind == Option::Kind::kList) absl::StrAppend(&text, " ...");
    absl::StrAppend(&text, text.empty() ? "" : " ", "(Env:", EnvironmentName(option.name), ")");
    added->option_text(text)->group(option.is_hidden ? "" : option.group);
    flags_[option.name] = added;
  }

  CLI::App app_{
      "EMA Server: keeps exponential moving averages of a model's weights outside the training "
      "job.\nEach option can be a flag, the environment variable shown with it, or a line in the "
      "file of --config; the first of these wins.",
      "ema-server"};
  const CLI::Option* config_ = nullptr;
  const CLI::Option* print_config_ = nullptr;
  std::map<std::string, const CLI::Option*> flags_;
};

}  // namespace

ParsedOptions ParseOptions(int argc, const char* const* argv) {
  ParsedOptions parsed;
  OptionReader reader(parsed.options);
  CommandLine command_line(reader.table());
  if (!command_line.Parse(argc, argv, parsed)) return parsed;
  parsed.config_file = command_line.config_file();
  if (!parsed.config_file.empty()) reader.ReadFile(parsed.config_file);
  reader.ReadEnvironment();
  command_line.Read(reader);
  if (reader.problems().empty()) {
    for (std::string& problem : OptionConflicts(parsed.options)) {
      reader.AddProblem(std::move(problem));
    }
  }
  parsed.warnings = reader.UnknownVariables();
  for (LogEvent& doubt : OptionWarnings(parsed.options))
    parsed.warnings.push_back(std::move(doubt));
  if (!reader.problems().empty()) {
    parsed.should_exit = true;
    parsed.exit_code = kUsageExitCode;
    parsed.text = absl::StrCat(absl::StrJoin(reader.problems(), "\n"),
                               "\nRun with --help for all options.\n");
  } else if (command_line.print_config()) {
    parsed.should_exit = true;
    parsed.text = reader.ToToml();
  }
  if (parsed.options.thread_count == 0) {
    parsed.options.thread_count = std::max<int64_t>(1, std::thread::hardware_concurrency() / 2);
  }
  return parsed;
}

std::string_view ServerVersion() { return EMA_VERSION; }

LogEvent LimitsEvent(const ServerOptions& options) {
  LogEvent event{.name = "limits"};
  ServerOptions copy = options;
  for (const Option& option : OptionTable(copy)) {
    if (option.group != kLimits && option.group != kTimeLimits) continue;
    const std::string key = absl::StrReplaceAll(option.name, {{"-", "_"}});
    int64_t number = 0;
    if (option.kind == Option::Kind::kNumber && absl::SimpleAtoi(option.get(), &number)) {
      event.fields.emplace_back(key, number);
    } else {
      event.fields.emplace_back(key, option.get());
    }
  }
  return event;
}

}  // namespace ema
