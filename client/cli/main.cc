// SPDX-License-Identifier: Apache-2.0
//
// emactl: makes, lists, watches and pulls the models of an EMA server, and explains schedules.
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "client/cli/argument_checks.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/exit_code.h"
#include "client/cpp/transport/quiet_grpc.h"
#include "ema/client.h"
#include "server/base/nearest_name.h"
#include "server/base/standard_files.h"

namespace {

using ema::Client;
using ema::cli::Session;

constexpr char kFooter[] =
    "Exit codes: 0 ok; 1 any other error; 2 wrong usage; 3 no such model, track, version,\n"
    "checkpoint, label or file; 4 rejected (invalid, not permitted, exists with other\n"
    "settings, wrong state, no room, disk error); 5 no server, or no answer in time; 130\n"
    "interrupted. An error goes to stderr; with --json as\n"
    "{\"error\": {code, reason, message}}.\n";

// The word, quoted for a shell.
std::string ShellWord(const std::string& word) {
  constexpr char kPlain[] =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./:=@%+,-";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
  return absl::StrCat("'", absl::StrReplaceAll(word, {{"'", "'\\''"}}), "'");
}

// The error, with the given command and the missing confirmation.
CLI::ParseError WithConfirmation(const CLI::ParseError& error, const std::string& command_name,
                                 const std::vector<std::string>& arguments,
                                 const std::string& model) {
  const std::string_view problem = error.what();
  std::string confirmation;
  if (problem == "--yes is required") confirmation = "--yes";
  if (problem == "--confirm is required") confirmation = "--confirm " + ShellWord(model);
  if (confirmation.empty()) return error;
  std::string text = command_name + " needs a confirmation: emactl ";
  for (const std::string& word : arguments) absl::StrAppend(&text, ShellWord(word), " ");
  return {text + confirmation, error.get_exit_code()};
}

// Names the unknown command or option if CLI11 says only that one is missing.
CLI::ParseError Explained(const CLI::ParseError& error, const CLI::App& app,
                          const std::vector<std::string>& arguments, const std::string& model) {
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  if (error.get_name() == "CallForVersion" && !chosen.empty()) {
    return {absl::StrCat(chosen[0]->get_name(), " has no option --version"),
            static_cast<int>(ema::cli::kExitUsage)};
  }
  const std::vector<std::string> words = app.remaining(/*recurse=*/true);
  if (error.get_name() != "RequiredError") return error;
  if (words.empty()) {
    return chosen.empty() ? error
                          : WithConfirmation(error, chosen[0]->get_name(), arguments, model);
  }
  const CLI::App& family = chosen.empty() ? app : *chosen.back();
  if (family.get_require_subcommand_min() == 0 || !family.get_subcommands().empty()) return error;
  if (words[0].starts_with('-')) {
    return {absl::StrCat("unknown option ", words[0], ", and no command is given"),
            error.get_exit_code()};
  }
  const std::vector<const CLI::App*> known =
      family.get_subcommands([](const CLI::App*) { return true; });
  // Their names must outlive the search.
  std::vector<std::string> names;
  names.reserve(known.size());
  for (const CLI::App* const command : known) names.push_back(command->get_name());
  const std::string nearest(ema::NearestName(
      words[0], names, [](const std::string& name) { return std::string_view(name); }));
  return {absl::StrCat(family.get_name(), " has no command \"", words[0], "\"; did you mean \"",
                       nearest, "\"?"),
          error.get_exit_code()};
}

volatile sig_atomic_t interrupted = 0;

void OnSignal(int) { interrupted = 1; }

bool IsInterrupted() { return interrupted != 0; }

// Ctrl-C, and closing the terminal unless nohup ignores that, interrupt the command from now on, so
// that it removes an incomplete file.
void CatchSignals() {
  struct sigaction action = {};
  action.sa_handler = &OnSignal;
  action.sa_flags = SA_RESETHAND;  // A second signal kills the process.
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  struct sigaction hang_up = {};
  if (sigaction(SIGHUP, nullptr, &hang_up) != 0 || hang_up.sa_handler == SIG_IGN) return;
  action.sa_flags = 0;  // A terminal may send SIGHUP twice.
  sigaction(SIGHUP, &action, nullptr);
}

// The exit code for wrong usage. For a probe it is 1, because Docker reserves 2.
int UsageExitCode(const CLI::App& app) {
  return app.got_subcommand("health") ? ema::cli::kExitOther : ema::cli::kExitUsage;
}

}  // namespace

// An exception of CLI11 before parsing is a bug in our declarations, and may end the program.
// NOLINTNEXTLINE(bugprone-exception-escape)
int main(int argc, char** argv) {
  ema::OccupyStandardFiles();
  signal(SIGXFSZ, SIG_IGN);  // A write beyond `ulimit -f` then fails with an error.

  ema::client_internal::QuietGrpc();
  ema::cli::Options options;
  ema::cli::Command command;
  CLI::App app("Makes, lists, watches and pulls the models of an EMA server.", "emactl");
  app.footer(kFooter);
  app.require_subcommand(1);
  app.fallthrough();  // Global options may also follow the command.
  app.set_version_flag("--version", "emactl " EMA_VERSION);
  app.add_option(
         "--server", options.server,
         "Address of the server: host:port (50051 if left out), emas://host:port over TLS, or "
         "unix:/path; several servers of one group: ema://host:port,host:port")
      ->envname("EMA_SERVER")
      ->capture_default_str();
  const auto add_file = [&app](const char* flag, const char* environment, std::string& file,
                               const char* help) {
    app.add_option(flag, file, help)->envname(environment)->type_name("FILE");
  };
  add_file("--tls-ca", "EMA_TLS_CA", options.tls.ca_file,
           "PEM file of the CA that signed the certificate of a server emas://host:port. Empty: "
           "the system's CAs");
  add_file("--tls-cert", "EMA_TLS_CERT", options.tls.certificate_file,
           "PEM file of the client's certificate, for a server that requires one");
  add_file("--tls-key", "EMA_TLS_KEY", options.tls.key_file,
           "PEM file of the key of the client's certificate");
  add_file("--token-file", "EMA_TOKEN_FILE", options.token_file,
           "File with a bearer token, for a server that requires one. The variable EMA_TOKEN may "
           "hold the token instead");
  app.add_flag("--json", options.json, "Print JSON");
  const CLI::Option* const timeout =
      app.add_option("--timeout", options.timeout,
                     "Time limit of a call. If it is not given, calls that wait for the server's "
                     "disk or transfer a whole version have 10m")
          ->check(ema::cli::CheckDuration)
          ->capture_default_str();
  ema::cli::AddCommands(app, options, command);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& thrown) {
    const CLI::ParseError error =
        Explained(thrown, app, {argv + std::min(argc, 1), argv + argc}, options.remove.model);
    // The error may precede --json on the command line.
    const bool wants_json = std::find(argv, argv + argc, std::string_view("--json")) != argv + argc;
    if (wants_json && error.get_exit_code() != 0) {
      ema::cli::PrintError(absl::InvalidArgumentError(error.what()), /*json=*/true);
      return UsageExitCode(app);
    }
    return app.exit(error) == 0 ? ema::cli::kExitOk : UsageExitCode(app);
  }

  CatchSignals();
  Session session{
      .json = options.json, .has_timeout = timeout->count() > 0, .is_interrupted = &IsInterrupted};
  absl::ParseDuration(options.timeout, &session.timeout);
  std::unique_ptr<ema::Client> client;
  if (command.needs_server) {
    // The token is not a flag, because all users of a host can see the flags of a process.
    const char* const token = std::getenv("EMA_TOKEN");
    const Client::Options client_options{
        .timeout = session.timeout,
        .tls = options.tls,
        .token = token == nullptr || !options.token_file.empty() ? "" : token,
        .token_file = options.token_file,
        .is_interrupted = session.is_interrupted,
        .on_wait = options.json ? nullptr : ema::cli::PrintWait};
    session.new_client = [&options, client_options] {
      Client::Options uninterrupted = client_options;
      uninterrupted.is_interrupted = nullptr;
      return Client::Create(options.server, uninterrupted);
    };
    auto created = Client::Create(options.server, client_options);
    if (!created.ok()) {
      ema::cli::PrintError(created.status(), options.json);
      return UsageExitCode(app);
    }
    client = *std::move(created);
    session.client = client.get();
  }
  absl::Status status = command.run(session);
  // This fails for `emactl list > file` on a full disk, for example.
  if (status.ok() && (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)) {
    status = absl::UnknownError("cannot write to the standard output");
  }
  if (!status.ok()) ema::cli::PrintError(status, options.json);
  std::fflush(stderr);
  // Skips destructors: if the system had no threads for gRPC, its shutdown would wait for them.
  _exit(command.exit_code(status));
}
