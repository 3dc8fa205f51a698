// SPDX-License-Identifier: Apache-2.0
//
// Flags, environment and file: every option of the table by each of them.
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/ops/option_table.h"
#include "server/ops/options.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

using Values = std::map<std::string, std::string>;

// The options, declared for `options`, which they set and print.
struct DeclaredOptions {
  explicit DeclaredOptions(const ServerOptions& values = {}) : options(values) {
    AddOptions(options, app, problems);
    app.set_help_flag();
  }

  // False: `option` cannot have the value.
  bool Set(CLI::Option& option, const std::string& value) {
    problems.texts.clear();
    option.clear();
    option.add_result(value)->run_callback();
    return problems.texts.empty();
  }

  static std::string Get(CLI::Option& option) {
    return option.capture_default_str()->get_default_str();
  }

  ServerOptions options;
  OptionProblems problems;
  CLI::App app;
};

// What each option has in `options`, by name.
Values ValuesOf(const ServerOptions& options) {
  DeclaredOptions declared(options);
  Values values;
  for (CLI::Option* const option : declared.app.get_options({})) {
    values[option->get_single_name()] = DeclaredOptions::Get(*option);
  }
  return values;
}

// Two values of `option`, the first of them not its default.
std::vector<std::string> TwoValues(DeclaredOptions& declared, CLI::Option& option) {
  // Of any option there are some among these; the first ones are the hardest to quote.
  const std::vector<std::string> candidates = {"/d r/\"x\"\\#'\xc3\xa9",
                                               "y = [1, 2]",
                                               "127.0.0.1:7,unix:/run/e.sock",
                                               "[::1]:8",
                                               "cpu",
                                               "cuda:1",
                                               "on",
                                               "off",
                                               "json",
                                               "text",
                                               "debug",
                                               "warn",
                                               "true",
                                               "false",
                                               "77",
                                               "88",
                                               "90s",
                                               "2h30m",
                                               "16MiB",
                                               "32MiB",
                                               "8KiB",
                                               "16KiB"};
  const std::string before = DeclaredOptions::Get(option);
  std::vector<std::string> values;
  for (const std::string& candidate : candidates) {
    if (candidate == before || values.size() == 2 || !declared.Set(option, candidate)) continue;
    values.push_back(DeclaredOptions::Get(option));
  }
  EXPECT_THAT(values, Not(IsEmpty())) << option.get_single_name() << ": no candidate fits; add one";
  if (values.size() == 1) values.push_back(before);
  return values;
}

// By the values' number. The options of a follower and of Kubernetes and the socket of lanes, which
// exclude values of some others, keep their defaults.
std::vector<Values> AllValues() {
  DeclaredOptions declared;
  std::vector<Values> all(2);
  for (CLI::Option* const option : declared.app.get_options({})) {
    const std::string& name = option->get_single_name();
    const bool is_exclusive =
        name.starts_with("follow") || name.starts_with("kubernetes") || name == "lane-socket";
    const std::vector<std::string> values =
        is_exclusive ? std::vector<std::string>(2, DeclaredOptions::Get(*option))
                     : TwoValues(declared, *option);
    for (size_t i = 0; i < all.size(); ++i) all[i][name] = values[i];
  }
  return all;
}

class OptionSourcesTest : public testing::Test {
 protected:
  ~OptionSourcesTest() override {
    Unsetenv();
    std::remove(path().c_str());
  }

  // Of this process: tests run side by side.
  static std::string path() {
    return absl::StrCat(testing::TempDir(), "/ema_options_test-", getpid(), ".toml");
  }

  static ParsedOptions Parse(const std::vector<std::string>& arguments) {
    std::vector<const char*> argv = {"ema-server"};
    for (const std::string& argument : arguments) argv.push_back(argument.c_str());
    return ParseOptions(static_cast<int>(argv.size()), argv.data());
  }

  static std::vector<std::string> Flags(const Values& values) {
    std::vector<std::string> flags;
    for (const auto& [name, value] : values) flags.push_back(absl::StrCat("--", name, "=", value));
    return flags;
  }

  void Setenv(const std::string& name, const std::string& value) {
    setenv(name.c_str(), value.c_str(), 1);
    variables_.push_back(name);
  }
  void Unsetenv() {
    for (const std::string& name : variables_) unsetenv(name.c_str());
    variables_.clear();
  }
  // Of the options' variables.
  void Setenv(const Values& values) {
    DeclaredOptions declared;
    for (const auto& [name, value] : values) {
      Setenv(declared.app.get_option("--" + name)->get_envname(), value);
    }
  }

  // Writes the file; gives the flag that names it.
  static std::string File(const std::string& content) {
    std::ofstream(path()) << content;
    return "--config=" + path();
  }
  // What --print-config says of `values`.
  static std::string Printed(const Values& values) {
    std::vector<std::string> flags = Flags(values);
    flags.emplace_back("--print-config");
    const ParsedOptions parsed = Parse(flags);
    EXPECT_EQ(parsed.exit_code, 0) << parsed.text;
    EXPECT_TRUE(parsed.should_exit);
    return parsed.text;
  }

  static ServerOptions OptionsOf(const std::vector<std::string>& arguments) {
    const ParsedOptions parsed = Parse(arguments);
    EXPECT_FALSE(parsed.should_exit) << parsed.text;
    return parsed.options;
  }

  const std::vector<Values> all_ = AllValues();

 private:
  std::vector<std::string> variables_;
};

TEST_F(OptionSourcesTest, EveryOptionIsSetByAFlag) {
  EXPECT_EQ(ValuesOf(OptionsOf(Flags(all_[0]))), all_[0]);
}

TEST_F(OptionSourcesTest, EveryOptionIsSetByTheEnvironment) {
  Setenv(all_[0]);
  EXPECT_EQ(ValuesOf(OptionsOf({})), all_[0]);
}

TEST_F(OptionSourcesTest, EveryOptionIsSetByTheFileThatPrintConfigWrites) {
  const std::string config = File(Printed(all_[0]));
  EXPECT_EQ(ValuesOf(OptionsOf({config})), all_[0]);
  const std::string printed_again = Parse({config, "--print-config"}).text;
  EXPECT_THAT(printed_again, HasSubstr("max-models = 77  # file\n"));
  EXPECT_EQ(ValuesOf(OptionsOf({File(printed_again)})), all_[0]);
}

TEST_F(OptionSourcesTest, ExclusiveOptionsAreSetInEachWay) {
  const Values of_follower = {
      {"follow", "emas://a:1,b:2/m"}, {"follow-token-file", "/d r/\"x\""}, {"follow-ca", "ca"}};
  const Values of_kubernetes = {{"group", "g"},
                                {"member", "m"},
                                {"advertise", "a:1"},
                                {"kubernetes", "true"},
                                {"kubernetes-api", "https://a:6443"},
                                {"kubernetes-namespace", "n"},
                                {"kubernetes-token-file", "/d r/\"x\""},
                                {"kubernetes-ca", "ca"}};
  const Values defaults = ValuesOf(OptionsOf({}));
  for (const Values& values : {of_follower, of_kubernetes}) {
    Values expected = defaults;
    for (const auto& [name, value] : values) expected[name] = value;
    EXPECT_EQ(ValuesOf(OptionsOf(Flags(values))), expected);
    EXPECT_EQ(ValuesOf(OptionsOf({File(Printed(values))})), expected);
    Setenv(values);
    EXPECT_EQ(ValuesOf(OptionsOf({})), expected);
    Unsetenv();
  }
}

TEST_F(OptionSourcesTest, TheDefaultsArePrintedAndReadBack) {
  const std::string printed = Printed({});
  EXPECT_THAT(printed, AllOf(HasSubstr("\n# Limits\n"), HasSubstr("max-models = 64  # default\n"),
                             HasSubstr("max-message-bytes = \"8MiB\"  # default\n"),
                             HasSubstr("session-timeout = \"30s\"  # default\n"),
                             HasSubstr("allow-unauthenticated = false  # default\n")));
  EXPECT_EQ(ValuesOf(OptionsOf({File(printed)})), ValuesOf(OptionsOf({})));
}

TEST_F(OptionSourcesTest, TheEnvironmentBeatsTheFileAndAFlagBeatsBoth) {
  const std::string config = File(Printed(all_[0]));
  Setenv(all_[1]);
  EXPECT_EQ(ValuesOf(OptionsOf({config})), all_[1]);
  std::vector<std::string> flags = Flags(all_[0]);
  flags.push_back(config);
  EXPECT_EQ(ValuesOf(OptionsOf(flags)), all_[0]);
}

TEST_F(OptionSourcesTest, PrintConfigSaysWhereEachValueComesFrom) {
  Setenv("EMA_MAX_MODELS", "5");
  const ParsedOptions parsed =
      Parse({File("keep-last = 9\nmax-models = 6\n"), "--device=cpu", "--print-config"});
  EXPECT_THAT(parsed.text, AllOf(HasSubstr("device = \"cpu\"  # flag\n"),
                                 HasSubstr("max-models = 5  # EMA_MAX_MODELS\n"),
                                 HasSubstr("keep-last = 9  # file\n"),
                                 HasSubstr("listen = [\"127.0.0.1:50051\"]  # default\n")));
}

TEST_F(OptionSourcesTest, AnEmptyVariableIsNone) {
  Setenv("EMA_MAX_MODELS", "");
  Setenv("EMA_CONFIG", "");
  EXPECT_EQ(OptionsOf({}).max_models, 64);
}

TEST_F(OptionSourcesTest, AnEmptyFlagTakesAFileNameAway) {
  Setenv("EMA_DATA_DIR", "/d");
  EXPECT_EQ(OptionsOf({"--data-dir="}).data_dir, "");
  const ServerOptions options = OptionsOf({"--data-dir=", "--max-models", "5"});
  EXPECT_EQ(options.data_dir, "");
  EXPECT_EQ(options.max_models, 5);
  EXPECT_EQ(OptionsOf({"--data-dir", ""}).data_dir, "");
}

TEST_F(OptionSourcesTest, TheFileIsNamedByAFlagOrTheEnvironment) {
  File("max-models = 3\n");
  Setenv("EMA_CONFIG", path());
  const ParsedOptions parsed = Parse({});
  EXPECT_EQ(parsed.options.max_models, 3);
  EXPECT_EQ(parsed.config_file, path());
  EXPECT_THAT(parsed.warnings, IsEmpty());
  EXPECT_EQ(OptionsOf({"--config="}).max_models, 64);
}

TEST_F(OptionSourcesTest, AFileIsRealToml) {
  const ServerOptions options =
      OptionsOf({File("# A comment.\n"
                      "listen = [\n  \"127.0.0.1:1\", # one\n  'unix:/run/#.sock',\n]\n"
                      "data-dir = \"/a # b \\u00e9\"\n"
                      "\"max-models\" = 1_000\n"
                      "max-push-streams = 0x10\n"
                      "allow-unauthenticated = true\r\n"
                      "etcd = []\n"
                      "max-message-bytes = 8388608\n")});
  EXPECT_THAT(options.etcd, IsEmpty());
  EXPECT_THAT(options.listen, ElementsAre("127.0.0.1:1", "unix:/run/#.sock"));
  EXPECT_EQ(options.data_dir, "/a # b \xc3\xa9");
  EXPECT_EQ(options.max_models, 1000);
  EXPECT_EQ(options.limits.max_push_streams, 16);
  EXPECT_TRUE(options.allow_unauthenticated);
  EXPECT_EQ(options.limits.max_message_bytes, 8 << 20);
}

struct BadFile {
  std::string name;
  std::string content;
  std::string message;  // Behind the path.
};

class BadFileTest : public OptionSourcesTest, public testing::WithParamInterface<BadFile> {};

TEST_P(BadFileTest, IsRefusedWithFileLineKeyValueAndWhatWasExpected) {
  const ParsedOptions parsed = Parse({File(GetParam().content)});
  EXPECT_TRUE(parsed.should_exit);
  EXPECT_EQ(parsed.exit_code, 2);
  EXPECT_THAT(parsed.text, HasSubstr(path() + GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    Options, BadFileTest,
    testing::Values(
        BadFile{"UnknownKey", "keep-last = 3\nmax-modles = 3\n",
                ":2: \"max-modles\" is not an option; did you mean \"max-models\"?"},
        BadFile{"Underscores", "max_models = 3",
                ":1: \"max_models\" is not an option; did you mean \"max-models\"?"},
        BadFile{"NothingLikeIt", "zzz = 3", ":1: \"zzz\" is not an option\n"},
        BadFile{"KeyWithControlCharacters", "\"a\\nb\" = 3", ":1: \"a\\nb\" is not an option\n"},
        BadFile{"Value", "\nmax-models = 0",
                ":2: max-models: \"0\" is not an integer from 1 to 1048576"},
        BadFile{"Duration", "session-timeout = 30",
                ":1: session-timeout: \"30\" is not a duration from 1ms"},
        BadFile{"Bytes", "max-message-bytes = '1M'",
                ":1: max-message-bytes: \"1M\" is not a number of bytes from 5MiB to 1GiB"},
        BadFile{"Float", "max-models = 3.5", ":1: max-models: is of the TOML type floating-point"},
        BadFile{"Date", "max-models = 2026-01-01", ":1: max-models: is of the TOML type date"},
        BadFile{"ArrayOfOne", "device = ['cpu', 'auto']", ":1: device: \"cpu,auto\" is not auto"},
        BadFile{"MixedArray", "listen = ['127.0.0.1:1', 2]", ":1: listen: is of the TOML type"},
        BadFile{"Table", "[max-models]\nn = 3", ":1: max-models: is a table"},
        BadFile{"OtherTable", "[limits]\nmax-models = 3", ":1: \"limits\" is not an option"},
        BadFile{"Config", "config = 'other.toml'", ":1: \"config\" is not an option"},
        BadFile{"NoQuotes", "keep-last = 3\ndevice = cpu", ":2: not TOML: "},
        BadFile{"NoValue", "max-models", ":1: not TOML: "},
        BadFile{"Twice", "max-models = 3\nmax-models = 4", ":2: not TOML: "},
        BadFile{"NoUtf8", "device = \"\xff\"", ":1: not TOML: "}),
    [](const testing::TestParamInfo<BadFile>& tested) { return tested.param.name; });

TEST_F(OptionSourcesTest, AllErrorsAreSaidAtOnceWithTheirPlace) {
  Setenv("EMA_KEEP_LAST", "few");
  const ParsedOptions parsed =
      Parse({File("max-modles = 1\nmax-models = -1\n"), "--device=tpu", "--bogus=1"});
  EXPECT_THAT(parsed.text,
              AllOf(HasSubstr("\"max-modles\""), HasSubstr(":2: max-models: \"-1\""),
                    HasSubstr("EMA_KEEP_LAST: \"few\" is not an integer"),
                    HasSubstr("--device: \"tpu\" is not auto"), HasSubstr("\"--bogus\"")));
}

TEST_F(OptionSourcesTest, ErrorsNameTheVariableOrFileThatHasTheValue) {
  Setenv("EMA_LISTEN", "0.0.0.0:1");
  EXPECT_THAT(Parse({}).text, StartsWith("EMA_LISTEN: \"0.0.0.0:1\" can be reached"));
  Setenv("EMA_TLS_CERT", "/c");
  const ParsedOptions parsed = Parse({File("tls-client-ca = '/ca'"), "--tls-cert="});
  EXPECT_THAT(parsed.text, StartsWith(path() + ": tls-client-ca: given without --tls-cert"));
  EXPECT_THAT(Parse({"--listen=[::1]:0"}).text,
              StartsWith("EMA_TLS_CERT: given without --tls-key\n"));
  Setenv("EMA_CONFIG", "/no/such.toml");
  EXPECT_THAT(Parse({}).text, StartsWith("EMA_CONFIG: /no/such.toml: cannot be read"));
}

TEST_F(OptionSourcesTest, AFileThatCannotBeReadIsRefused) {
  EXPECT_THAT(Parse({"--config=/no/such.toml"}).text,
              HasSubstr("/no/such.toml: cannot be read: No such file or directory"));
  EXPECT_THAT(Parse({"--config=" + testing::TempDir()}).text, HasSubstr("not a regular file"));
  EXPECT_EQ(Parse({"--config=/no/such.toml"}).exit_code, 2);
  // Its writer may never come.
  const std::string pipe = absl::StrCat(testing::TempDir(), "/ema_config_pipe-", getpid());
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(Parse({"--config=" + pipe}).text, HasSubstr("not a regular file"));
  std::remove(pipe.c_str());
}

TEST_F(OptionSourcesTest, UnknownVariablesAreWarnedOfWithTheNearestName) {
  Setenv("EMA_MAX_MODLES", "3");
  // Clients', and what Kubernetes makes of a service named "ema".
  for (const char* const name : {"EMA_TLS_CA", "EMA_SERVICE_HOST", "EMA_SERVICE_PORT_GRPC",
                                 "EMA_PORT", "EMA_PORT_50051_TCP_ADDR"}) {
    Setenv(name, "x");
  }
  const ParsedOptions parsed = Parse({});
  EXPECT_FALSE(parsed.should_exit) << parsed.text;
  std::vector<std::string> warnings;
  for (const LogEvent& event : parsed.warnings) warnings.push_back(ToText(event));
  EXPECT_THAT(
      warnings,
      ElementsAre("unknown environment variable name=EMA_MAX_MODLES nearest=EMA_MAX_MODELS"));
}

TEST_F(OptionSourcesTest, NoOptionIsNamedLikeAVariableOfKubernetes) {
  Values values = all_[0];
  for (auto& [name, value] : values) value = "any";
  Setenv(values);
  EXPECT_EQ(EmaVariables().size(), values.size());
}

}  // namespace
}  // namespace ema
