// SPDX-License-Identifier: Apache-2.0
//
// emactl: makes, lists, watches and pulls the models of an EMA server, and explains schedules.
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/argument_checks.h"
#include "client/cli/attached_files.h"
#include "client/cli/bench.h"
#include "client/cli/checkpoint_commands.h"
#include "client/cli/checkpoint_files.h"
#include "client/cli/commands.h"
#include "client/cli/exit_code.h"
#include "client/cli/explain.h"
#include "client/cli/import.h"
#include "client/cli/pull_command.h"
#include "client/cli/server_commands.h"
#include "client/cli/signals.h"
#include "client/cli/track_option.h"
#include "client/cli/tracks_command.h"
#include "client/cpp/quiet_grpc.h"
#include "ema/client.h"
#include "server/base/nearest_name.h"
#include "server/base/standard_files.h"

namespace {

using ema::Client;
using ema::Schedule;
using ema::cli::Session;

constexpr char kFooter[] =
    "Exit codes: 0 ok; 1 any other error; 2 wrong usage; 3 no such model, track, version,\n"
    "checkpoint, label or file; 4 refused (invalid, exists otherwise, not in this state, no\n"
    "room); 5 no server, or no answer in time; 130 interrupted. An error goes to stderr; with\n"
    "--json as {\"error\": {code, reason, message}}.\n";

constexpr char kTrackHelp[] =
    "NAME=copy, NAME=HALFLIFE such as fast=200ba, or NAME=RULE=VALUE such as old=smoothing=0.99, "
    "with ,update_interval=10ba and the like behind it (emactl explain --help lists them; "
    "besides, with sigma_rel: snapshot_interval=1000ba)";

// What the command line says.
struct Options {
  std::string server = "127.0.0.1:50051";
  ema::Client::Tls tls;
  std::string token_file;
  bool json = false;
  std::string timeout = "60s";
  std::string model;
  bool yes = false;
  ema::cli::DeleteOptions remove;
  std::vector<std::string> tracks;
  ema::cli::CreateOptions create;
  ema::cli::ImportOptions import;
  Client::ModelChanges changes;
  ema::cli::WatchOptions watch;
  ema::cli::PullOptions pull;
  Client::StatisticsOptions statistics;
  Client::SynthesizeOptions synthesize;
  Client::CheckpointOptions save;
  std::string checkpoint;
  std::string directory;  // Of `checkpoint verify` and `copy`.
  std::string to;         // Of `checkpoint copy` and `rollback`.
  int64_t incarnation = 0;
  std::vector<std::string> paths;
  std::string file;
  std::string label;
  ema::VersionId labelled;
  Client::Metric metric;
  std::string service;
  std::string log_level;
  ema::cli::BenchOptions bench;
  ema::cli::ExplainOptions explain;
};

// Declares `explain`, with an option for each field of a schedule.
void AddExplain(CLI::App* sub, Options& options) {
  Schedule::Fields& fields = options.explain.fields;
  for (const ema::cli::ScheduleOption& option : ema::cli::ScheduleOptions()) {
    const std::string field = option.field;
    std::string name = "--" + field;
    std::replace(name.begin(), name.end(), '_', '-');
    if (option.is_flag) {
      sub->add_flag_callback(
          name, [&fields, field] { fields.emplace_back(field, "true"); }, option.help);
    } else {
      sub->add_option_function<std::string>(
          name, [&fields, field](const std::string& value) { fields.emplace_back(field, value); },
          option.help);
    }
  }
  sub->add_option("--total", options.explain.total,
                  "The whole training in the unit of the interval, for times in dur");
}

// What is to be done.
struct Command {
  std::function<absl::Status(const Session&)> run;
  bool needs_server = true;
  int (*exit_code)(const absl::Status&) = &ema::cli::ExitCode;
};

// Declares a command; when it is given, it is stored in `chosen`.
CLI::App* Add(CLI::App& app, Command& chosen, const char* name, const char* help,
              std::function<absl::Status(const Session&)> run, bool needs_server = true) {
  CLI::App* const sub = app.add_subcommand(name, help);
  sub->callback([&chosen, run = std::move(run), needs_server] {
    chosen = {.run = run,
              .needs_server = needs_server,
              .exit_code = needs_server ? &ema::cli::ExitCode : &ema::cli::LocalExitCode};
  });
  return sub;
}

void AddModel(CLI::App* sub, std::string& model) {
  sub->add_option("model", model, "Name of the model")->required();
}

// Can be given several times, each with one value: what comes behind that is not its.
CLI::Option* AddRepeatable(CLI::App* sub, const char* name, std::vector<std::string>& values,
                           const std::string& help) {
  return sub->add_option(name, values, help + ", repeatable")->take_all()->allow_extra_args(false);
}

// Behind `version`, the option of a version's number.
void AddIncarnation(CLI::App* sub, CLI::Option* version, int64_t& incarnation) {
  sub->add_option("--incarnation", incarnation,
                  "Life of the server in which that number was counted, as --json shows it "
                  "(default: any)")
      ->check(ema::cli::CheckPositive)
      ->needs(version);
}

CLI::Option* AddVersion(CLI::App* sub, int64_t& version, int64_t& incarnation, const char* help) {
  CLI::Option* const option =
      sub->add_option("--version", version, help)->check(ema::cli::CheckVersion);
  AddIncarnation(sub, option, incarnation);
  return option;
}

// A command that is a family of others.
CLI::App& AddFamily(CLI::App& app, const char* name, const char* help) {
  CLI::App* const family = app.add_subcommand(name, help);
  family->require_subcommand(1);
  family->fallthrough();
  return *family;
}

// Declares what is about versions on the server's disk.
void AddCheckpointCommands(CLI::App& app, Options& options, Command& chosen) {
  CLI::App& family = AddFamily(app, "checkpoint", "Versions on the server's disk");
  const auto add_checkpoint = [&](CLI::App* sub) {
    AddModel(sub, options.model);
    sub->add_option("checkpoint", options.checkpoint, "Its name, as `list` shows it")->required();
  };
  CLI::App* sub =
      Add(family, chosen, "create", "Save a version, by default the newest, and wait for the disk",
          [&](const Session& session) {
            return CreateCheckpoint(session, options.model, options.save);
          });
  AddModel(sub, options.model);
  AddVersion(sub, options.save.version, options.save.incarnation, "Version (default: the newest)");
  AddRepeatable(sub, "--track", options.save.tracks,
                "Only this track, for serving, not for a server to start from (default: all)");
  sub->add_option("--label", options.save.label, "A name for it, which keeps it")
      ->check(ema::cli::CheckLabel);
  sub->add_flag("--no-wait", options.save.async, "Return before it is on the disk");

  sub = Add(family, chosen, "list", "List what is on the disk, being saved, or could not be",
            [&](const Session& session) { return ListCheckpoints(session, options.model); });
  AddModel(sub, options.model);
  add_checkpoint(Add(family, chosen, "show", "Show one", [&](const Session& session) {
    return ShowCheckpoint(session, options.model, options.checkpoint);
  }));
  add_checkpoint(Add(family, chosen, "delete", "Remove one that has no label and is not the newest",
                     [&](const Session& session) {
                       return DeleteCheckpoint(session, options.model, options.checkpoint);
                     }));

  sub = Add(
      family, chosen, "verify",
      "Read every byte of a checkpoint's folder, a folder of checkpoints, or a server's data "
      "directory, compare the checksums, and see that what LATEST and the labels name is there; "
      "needs no server",
      [&](const Session& session) {
        return ema::cli::VerifyCheckpoints(options.directory, session.json);
      },
      /*needs_server=*/false);
  sub->add_option("dir", options.directory, "The folder")->required();
  sub = Add(
      family, chosen, "copy",
      "Copy a checkpoint's folder, such as to a mounted object store, verified; needs no server",
      [&](const Session& session) {
        return ema::cli::CopyCheckpoint(options.directory, options.to, session.json);
      },
      /*needs_server=*/false);
  sub->add_option("from", options.directory, "The checkpoint's folder")->required();
  sub->add_option("to", options.to, "The folder to make")->required();

  CLI::App& files =
      AddFamily(app, "files", "Small files beside the weights in checkpoints, such as config.json");
  sub =
      Add(files, chosen, "add", "Put files there, in the place of those of the same names",
          [&](const Session& session) { return AddFiles(session, options.model, options.paths); });
  AddModel(sub, options.model);
  sub->add_option(
         "paths", options.paths,
         "Files; or Hugging Face folders, of which .json, .txt, .model and .jinja files are taken, "
         "but no index of weights")
      ->required();
  sub = Add(files, chosen, "remove", "Take one away", [&](const Session& session) {
    return RemoveFile(session, options.model, options.file);
  });
  AddModel(sub, options.model);
  sub->add_option("name", options.file, "Its name")->required();

  sub = Add(app, chosen, "rollback",
            "Make a new version that is what an earlier one was; the run that pushes ends",
            [&](const Session& session) {
              return Rollback(session, options.model, options.to, options.incarnation);
            });
  AddModel(sub, options.model);
  CLI::Option* const to = sub->add_option("--to", options.to, "A version's number, or a label")
                              ->required()
                              ->check(ema::cli::CheckVersionOrLabel);
  AddIncarnation(sub, to, options.incarnation);
  sub->add_flag("--yes", options.yes, "Really")->required();

  CLI::App& labels = AddFamily(app, "label", "Names for versions, which retention keeps");
  const auto add_label = [&](CLI::App* command) {
    AddModel(command, options.model);
    return command->add_option("label", options.label, "Name, such as stable")->required();
  };
  sub = Add(labels, chosen, "set", "Give a version a name, saving it if need be",
            [&](const Session& session) {
              return SetLabel(session, options.model, options.label, options.labelled);
            });
  add_label(sub)->check(ema::cli::CheckLabel);
  AddVersion(sub, options.labelled.version, options.labelled.incarnation,
             "Version (default: the newest)");
  add_label(Add(labels, chosen, "remove", "Take a name away", [&](const Session& session) {
    return RemoveLabel(session, options.model, options.label);
  }));
  AddModel(Add(labels, chosen, "list", "List a model's labels",
               [&](const Session& session) { return ListLabels(session, options.model); }),
           options.model);

  Client::Metric& metric = options.metric;
  sub = Add(
      app, chosen, "metric", "Report a score for a version; the best one gets the label",
      [&](const Session& session) { return ReportMetric(session, options.model, options.metric); });
  AddModel(sub, options.model);
  AddVersion(sub, metric.id.version, metric.id.incarnation, "Version that was evaluated")
      ->required();
  sub->add_option("--value", metric.value, "The score")->required();
  sub->add_flag("--lower-is-better", metric.lower_is_better, "As for a loss");
  sub->add_option("--label", metric.label, "Which label (default: best)")
      ->check(ema::cli::CheckLabel);
}

// Declares what is about the server itself.
void AddServerCommands(CLI::App& app, Options& options, Command& chosen) {
  CLI::App* sub = app.add_subcommand(
      "health", "Ask as a probe does: exit code 0 if the server is serving, 1 in any other case");
  sub->callback([&] {
    chosen.run = [&](const Session& session) { return ema::cli::Health(session, options.service); };
    // What Docker knows; as UsageExitCode().
    chosen.exit_code = [](const absl::Status& status) {
      return status.ok() ? ema::cli::kExitOk : ema::cli::kExitOther;
    };
  });
  sub->add_option("--service", options.service,
                  "checkpoints: also whether it can save (default: the server as a whole)");

  Add(app, chosen, "info", "Show the server's version, device, memory and limits",
      [](const Session& session) { return ema::cli::Info(session); });

  sub = Add(
      app, chosen, "log-level", "Change which events the server logs, or show it",
      [&](const Session& session) { return ema::cli::SetLogLevel(session, options.log_level); });
  sub->add_option("level", options.log_level, "debug, info, warn or error (default: show it)");

  sub = Add(app, chosen, "drain", "Let the server save and end, as SIGTERM does",
            [](const Session& session) { return ema::cli::Drain(session); });
  sub->add_flag("--yes", options.yes, "Really")->required();

  sub = Add(app, chosen, "bench",
            "Measure how fast pushes and pulls are from here, with a model that is made for it and "
            "deleted; where tokens are asked for, with an admin's",
            [&](const Session& session) { return ema::cli::Bench(session, options.bench); });
  sub->add_option("--bytes", options.bench.bytes,
                  "Size of the weights, such as 512M or 4G; this host needs twice that")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->check(CLI::Range(int64_t{4096}, int64_t{1} << 50))
      ->default_str("256M");
  sub->add_option("--rounds", options.bench.rounds, "How often, after one that does not count")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
}

// Of texts that CheckTrack() has passed.
std::vector<ema::TrackConfig> ParseTracks(const std::vector<std::string>& texts) {
  std::vector<ema::TrackConfig> tracks;
  tracks.reserve(texts.size());
  for (const std::string& text : texts) tracks.push_back(*ema::cli::ParseTrackOption(text));
  return tracks;
}

// Declares the commands. The one that is given is stored in `chosen`.
void AddCommands(CLI::App& app, Options& options, Command& chosen) {
  const auto add = [&](const char* name, const char* help,
                       std::function<absl::Status(const Session&)> run) {
    return Add(app, chosen, name, help, std::move(run));
  };

  CLI::App* sub = add("create", "Make a model", [&](const Session& session) {
    options.create.tracks = ParseTracks(options.tracks);
    return ema::cli::Create(session, options.create);
  });
  AddModel(sub, options.create.model);
  sub->add_option("--from", options.create.file,
                  "Safetensors file, or Hugging Face folder, with tensors of the model's names, "
                  "dtypes and shapes")
      ->required();
  AddRepeatable(sub, "--track", options.tracks, kTrackHelp)
      ->required()
      ->check(ema::cli::CheckTrack);
  sub->add_option("--max-pinned", options.create.model_options.max_pinned_versions,
                  "Versions that readers may hold at once (default: the server's)")
      ->check(CLI::Range(1, 64));

  sub = add("import", "Make a model whose averages begin with the weights of a file",
            [&](const Session& session) {
              options.import.tracks = ParseTracks(options.tracks);
              return ema::cli::Import(session, options.import);
            });
  AddModel(sub, options.import.model);
  sub->add_option("--from", options.import.from, "Safetensors file, or Hugging Face folder")
      ->required();
  AddRepeatable(sub, "--track", options.tracks, kTrackHelp)
      ->required()
      ->check(ema::cli::CheckTrack);
  sub->add_option("--step", options.import.step,
                  "Step of the weights, after which training goes on (default: 0)")
      ->check(ema::cli::CheckCount);
  sub->add_option("--updates", options.import.updates,
                  "Updates that the average is of: for uniform tracks and those that begin at zero")
      ->check(ema::cli::CheckPositive);

  sub = add("update", "Change a model's tracks while training runs", [&](const Session& session) {
    options.changes.put = ParseTracks(options.tracks);
    return ema::cli::Update(session, options.model, options.changes);
  });
  AddModel(sub, options.model);
  AddRepeatable(sub, "--track", options.tracks, kTrackHelp)->check(ema::cli::CheckTrack);
  AddRepeatable(sub, "--remove", options.changes.remove, "Name of a track to forget");
  AddRepeatable(sub, "--pause", options.changes.pause, "Name of a track to leave as it is");
  AddRepeatable(sub, "--resume", options.changes.resume, "Name of a paused track to go on with");

  add("list", "List the models", [](const Session& session) { return ema::cli::List(session); });

  sub = add("describe", "Show a model's tracks and tensors",
            [&](const Session& session) { return ema::cli::Describe(session, options.model); });
  AddModel(sub, options.model);

  sub = add("tracks", "Show a model's tracks and how they stand",
            [&](const Session& session) { return ema::cli::Tracks(session, options.model); });
  AddModel(sub, options.model);

  sub = add("versions", "List a model's versions",
            [&](const Session& session) { return ema::cli::Versions(session, options.model); });
  AddModel(sub, options.model);

  sub = add("statistics",
            "Show the norms of a version's averages and their distances from the weights",
            [&](const Session& session) {
              return ema::cli::Statistics(session, options.model, options.statistics);
            });
  AddModel(sub, options.model);
  AddVersion(sub, options.statistics.id.version, options.statistics.id.incarnation,
             "Version (default: the newest)");
  AddRepeatable(sub, "--track", options.statistics.tracks,
                "Only this track (default: all that average a tensor)");

  sub = add("watch", "Print every commit as it happens",
            [&](const Session& session) { return ema::cli::Watch(session, options.watch); });
  AddModel(sub, options.watch.model);
  CLI::Option* const after =
      sub->add_option("--after", options.watch.after,
                      "Begin after this version; 0: with the oldest (default: now)")
          ->check(ema::cli::CheckCount);
  AddIncarnation(sub, after, options.watch.incarnation);
  sub->add_option("--count", options.watch.count, "End after so many commits")
      ->check(ema::cli::CheckPositive);

  sub = add("pull", "Write the weights of a track to a safetensors file, or a Hugging Face folder",
            [&](const Session& session) { return ema::cli::Pull(session, options.pull); });
  AddModel(sub, options.pull.model);
  sub->add_option("--track", options.pull.track, "Name of the track")->required();
  CLI::Option* const pull_version =
      sub->add_option("--version", options.pull.version,
                      "A version's number, or a label (default: the newest)")
          ->check(ema::cli::CheckVersionOrLabel);
  AddIncarnation(sub, pull_version, options.pull.request.incarnation);
  sub->add_option("--step", options.pull.request.step,
                  "Instead: the version of this step of the trainer")
      ->check(ema::cli::CheckCount)
      ->excludes(pull_version);
  AddRepeatable(sub, "--tensors", options.pull.request.selection.tensors,
                "Only this: a name, or a pattern such as 'encoder.*' (default: all)");
  sub->add_option("--dtype", options.pull.dtype,
                  "Cast floats to float32, float16 or bfloat16 (default: as the server keeps them)")
      ->check(ema::cli::CheckDtype);
  AddRepeatable(sub, "--slice", options.pull.slices,
                "A box of a tensor, such as 'head.weight[0:10,5:]'; besides, only what --tensors "
                "says");
  sub->add_option("-o,--output", options.pull.output,
                  "File.safetensors to write, or folder/: weights named as from_pretrained wants "
                  "them, and the model's attached files")
      ->required()
      ->check([](const std::string& path) { return path.empty() ? "must not be empty" : ""; });
  sub->add_option("--config-from", options.pull.config_from,
                  "Into the output folder, not the attached files but this Hugging Face folder's");

  AddCheckpointCommands(app, options, chosen);

  sub = add("synthesize", "Build an average of another length from kept snapshots, to be pulled",
            [&](const Session& session) {
              return ema::cli::Synthesize(session, options.model, options.synthesize);
            });
  AddModel(sub, options.model);
  Client::SynthesizeOptions& request = options.synthesize;
  sub->add_option("--name", request.name, "What pull --track calls the result")->required();
  CLI::Option_group* const profile = sub->add_option_group("profile");
  profile->add_option("--sigma-rel", request.sigma_rel,
                      "Relative width of a power function, above 0 and at most 0.288675");
  profile->add_option("--half-life", request.half_life,
                      "Half-life in the unit of the tracks' update_interval, such as 1000ba");
  profile->require_option(1);
  sub->add_option("--step", request.step,
                  "Step at which the average stands (default: the newest that is stored)")
      ->check(ema::cli::CheckPositive);
  AddRepeatable(sub, "--track", request.tracks,
                "Track to build from (default: all that fit together)");

  sub = add("delete", "Forget a model; its checkpoints stay on the disk, unless purged",
            [&](const Session& session) { return ema::cli::Delete(session, options.remove); });
  AddModel(sub, options.remove.model);
  sub->add_option("--confirm", options.remove.confirm, "The model's name again")
      ->type_name("MODEL")
      ->required();
  sub->add_flag("--purge", options.remove.purge,
                "Remove its checkpoints, too, also those of models of that name deleted before");

  AddServerCommands(app, options, chosen);

  sub = Add(
      app, chosen, "explain",
      "Show what a schedule does, such as --half-life 1000ba; needs no server",
      [&](const Session& session) { return ema::cli::Explain(options.explain, session.json); },
      /*needs_server=*/false);
  AddExplain(sub, options);
}

// Also says which command or option there is none of, where CLI11 says only that one is missing.
CLI::ParseError Explained(const CLI::ParseError& error, const CLI::App& app) {
  const std::vector<std::string> words = app.remaining(/*recurse=*/true);
  if (error.get_name() != "RequiredError" || words.empty()) return error;
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  const CLI::App& family = chosen.empty() ? app : *chosen.back();
  if (family.get_require_subcommand_min() == 0 || !family.get_subcommands().empty()) return error;
  if (words[0].starts_with('-')) {
    return {absl::StrCat("there is no option ", words[0], ", and a command is missing"),
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

// Of wrong usage. A probe's is 1, too: Docker has kept 2 for itself.
int UsageExitCode(const CLI::App& app) {
  return app.got_subcommand("health") ? ema::cli::kExitOther : ema::cli::kExitUsage;
}

}  // namespace

// What CLI11 throws before it parses is a wrong declaration above, which may end the program.
// NOLINTNEXTLINE(bugprone-exception-escape)
int main(int argc, char** argv) {
  ema::OccupyStandardFiles();
  signal(SIGXFSZ, SIG_IGN);  // Where files may not grow, a write is to fail.

  ema::client_internal::QuietGrpc();
  Options options;
  Command command;
  CLI::App app("Makes, lists, watches and pulls the models of an EMA server.", "emactl");
  app.footer(kFooter);
  app.require_subcommand(1);
  app.fallthrough();  // Global options may also stand behind the command.
  app.add_option(
         "--server", options.server,
         "Address of the server: host:port (50051 if left out), emas://host:port over TLS, or "
         "unix:/path")
      ->envname("EMA_SERVER")
      ->capture_default_str();
  const auto add_file = [&app](const char* flag, const char* environment, std::string& file,
                               const char* help) {
    app.add_option(flag, file, help)->envname(environment)->type_name("FILE");
  };
  add_file(
      "--tls-ca", "EMA_TLS_CA", options.tls.ca_file,
      "PEM file that signs the certificate of a server emas://host:port. Empty: the system's do");
  add_file("--tls-cert", "EMA_TLS_CERT", options.tls.certificate_file,
           "PEM file of our certificate, for a server that asks for one");
  add_file("--tls-key", "EMA_TLS_KEY", options.tls.key_file, "PEM file of our certificate's key");
  add_file("--token-file", "EMA_TOKEN_FILE", options.token_file,
           "File of a bearer token, for a server that asks for one; or EMA_TOKEN has the token");
  app.add_flag("--json", options.json, "Print JSON");
  const CLI::Option* const timeout =
      app.add_option(
             "--timeout", options.timeout,
             "How long a call may take; if not given, 10m for one that waits for the server's "
             "disk or moves a whole version")
          ->check(ema::cli::CheckDuration)
          ->capture_default_str();
  AddCommands(app, options, command);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& thrown) {
    const CLI::ParseError error = Explained(thrown, app);
    // What has been parsed so far may not have come to it.
    const bool wants_json = std::find(argv, argv + argc, std::string_view("--json")) != argv + argc;
    if (wants_json && error.get_exit_code() != 0) {
      ema::cli::PrintError(absl::InvalidArgumentError(error.what()), /*json=*/true);
      return UsageExitCode(app);
    }
    return app.exit(error) == 0 ? ema::cli::kExitOk : UsageExitCode(app);
  }

  ema::cli::CatchSignals();
  Session session{.json = options.json,
                  .has_timeout = timeout->count() > 0,
                  .is_interrupted = &ema::cli::IsInterrupted};
  absl::ParseDuration(options.timeout, &session.timeout);
  std::unique_ptr<ema::Client> client;
  if (command.needs_server) {
    // Not a flag: everybody on a host sees those.
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
  // As `emactl list > file` on a full disk.
  if (status.ok() && (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)) {
    status = absl::UnknownError("cannot write to the standard output");
  }
  if (!status.ok()) ema::cli::PrintError(status, options.json);
  std::fflush(stderr);
  // Not by the destructors: where the system had no threads for gRPC, its end waits for them.
  _exit(command.exit_code(status));
}
