// SPDX-License-Identifier: Apache-2.0
#include "client/cli/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <utility>

#include "client/cli/argument_checks.h"
#include "client/cli/attached_files.h"
#include "client/cli/checkpoint_commands.h"
#include "client/cli/group_commands.h"
#include "client/cli/local_checkpoints.h"
#include "client/cli/server_commands.h"
#include "client/cli/track_option.h"
#include "client/cli/tracks_command.h"

namespace ema::cli {
namespace {

constexpr char kTrackHelp[] =
    "NAME=copy, NAME=HALFLIFE such as fast=200ba, or NAME=RULE=VALUE such as old=smoothing=0.99. "
    "Further fields follow after commas: those of the schedule, such as update_interval=10ba "
    "(emactl explain --help lists them); dtype=float64; snapshot_interval=1000ba (with "
    "sigma_rel); buffers=copy (a weights file does not say which tensors are buffers); and, once "
    "or more, 'tensor_rule=PATTERN:ACTION', such as 'tensor_rule=head.*:ignore', whose action may "
    "be a half-life";

// Declares `explain`, with an option for each field of a schedule.
void AddExplain(CLI::App* sub, Options& options) {
  Schedule::Fields& fields = options.explain.fields;
  for (const ScheduleOption& option : ScheduleOptions()) {
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

// Declares a command; when it is given, it is stored in `chosen`.
CLI::App* Add(CLI::App& app, Command& chosen, const char* name, const char* help,
              std::function<absl::Status(const Session&)> run, bool needs_server = true) {
  CLI::App* const sub = app.add_subcommand(name, help);
  sub->callback([&chosen, run = std::move(run), needs_server] {
    chosen = {.run = run,
              .needs_server = needs_server,
              .exit_code = needs_server ? &ExitCode : &LocalExitCode};
  });
  return sub;
}

void AddModel(CLI::App* sub, std::string& model) {
  sub->add_option("model", model, "Name of the model")->required();
}

// Can be given several times, each with one value. The next argument is not another value.
CLI::Option* AddRepeatable(CLI::App* sub, const char* name, std::vector<std::string>& values,
                           const std::string& help) {
  return sub->add_option(name, values, help + ", repeatable")->take_all()->allow_extra_args(false);
}

// `version`: the option of the version's number, which --incarnation needs.
void AddIncarnation(CLI::App* sub, CLI::Option* version, int64_t& incarnation) {
  sub->add_option("--incarnation", incarnation,
                  "Incarnation of the server that gave the version its number, as --json shows it "
                  "(default: any)")
      ->check(CheckPositive)
      ->needs(version);
}

CLI::Option* AddVersion(CLI::App* sub, int64_t& version, int64_t& incarnation, const char* help) {
  CLI::Option* const option = sub->add_option("--version", version, help)->check(CheckVersion);
  AddIncarnation(sub, option, incarnation);
  return option;
}

// Declares a command that has only subcommands.
CLI::App& AddFamily(CLI::App& app, const char* name, const char* help) {
  CLI::App* const family = app.add_subcommand(name, help);
  family->require_subcommand(1);
  family->fallthrough();
  return *family;
}

// Declares the commands about checkpoints, except their labels.
void AddCheckpointCommands(CLI::App& app, Options& options, Command& chosen) {
  CLI::App& family =
      AddFamily(app, "checkpoint", "Save, list, verify and copy versions on the server's disk");
  const auto add_checkpoint = [&](CLI::App* sub) {
    AddModel(sub, options.model);
    sub->add_option("checkpoint", options.checkpoint, "Name of the checkpoint, as `list` shows it")
        ->required();
  };
  CLI::App* sub = Add(family, chosen, "create",
                      "Save a version (by default the newest), and wait until it is on the disk",
                      [&](const Session& session) {
                        return CreateCheckpoint(session, options.model, options.save);
                      });
  AddModel(sub, options.model);
  AddVersion(sub, options.save.version, options.save.incarnation, "Version (default: the newest)");
  AddRepeatable(sub, "--track", options.save.tracks,
                "Save only this track: such a checkpoint can be pulled, but a server cannot start "
                "from it (default: all)");
  sub->add_option("--label", options.save.label, "Label for the checkpoint, which is then kept")
      ->check(CheckLabel);
  sub->add_flag("--no-wait", options.save.async, "Return before the checkpoint is on the disk");

  sub = Add(family, chosen, "list",
            "List the checkpoints that are on the disk, are being saved, or could not be saved",
            [&](const Session& session) { return ListCheckpoints(session, options.model); });
  AddModel(sub, options.model);
  add_checkpoint(Add(family, chosen, "show", "Show a checkpoint", [&](const Session& session) {
    return ShowCheckpoint(session, options.model, options.checkpoint);
  }));
  add_checkpoint(Add(family, chosen, "delete",
                     "Delete a checkpoint that has no label and is not the newest",
                     [&](const Session& session) {
                       return DeleteCheckpoint(session, options.model, options.checkpoint);
                     }));

  sub = Add(
      family, chosen, "verify",
      "Read every byte of a checkpoint's folder, a folder of checkpoints, or a server's data "
      "directory, compare the checksums, and check that the checkpoints that LATEST and the labels "
      "name exist; needs no server",
      [&](const Session& session) { return VerifyCheckpoints(options.directory, session.json); },
      /*needs_server=*/false);
  sub->add_option("dir", options.directory, "Folder to verify")->required();
  sub = Add(
      family, chosen, "copy",
      "Copy a checkpoint's folder, such as to a mounted object store, and verify the copy; needs "
      "no server",
      [&](const Session& session) {
        return CopyCheckpoint(options.directory, options.to, session.json);
      },
      /*needs_server=*/false);
  sub->add_option("from", options.directory, "Folder of the checkpoint")->required();
  sub->add_option("to", options.to, "Folder to create")->required();
}

void AddFilesCommands(CLI::App& app, Options& options, Command& chosen) {
  CLI::App& files = AddFamily(
      app, "files",
      "Attach small files, such as config.json, that checkpoints store beside the weights");
  CLI::App* sub =
      Add(files, chosen, "add",
          "Attach files to a model; they replace attached files of the same names",
          [&](const Session& session) { return AddFiles(session, options.model, options.paths); });
  AddModel(sub, options.model);
  sub->add_option("paths", options.paths,
                  "Files, or Hugging Face folders: their .json, .txt, .model and .jinja files, "
                  "except the index of the weights")
      ->required();
  sub = Add(files, chosen, "remove", "Remove an attached file", [&](const Session& session) {
    return RemoveAttachedFile(session, options.model, options.file);
  });
  AddModel(sub, options.model);
  sub->add_option("name", options.file, "Name of the file")->required();
}

void AddRollback(CLI::App& app, Options& options, Command& chosen) {
  CLI::App* const sub =
      Add(app, chosen, "rollback",
          "Make a new version with the values of an earlier one, and end the run that pushes",
          [&](const Session& session) {
            return Rollback(session, options.model, options.to, options.incarnation);
          });
  AddModel(sub, options.model);
  CLI::Option* const to = sub->add_option("--to", options.to, "A version's number, or a label")
                              ->required()
                              ->check(CheckVersionOrLabel);
  AddIncarnation(sub, to, options.incarnation);
  sub->add_flag("--yes", options.yes, "Confirm the command")->required();
}

void AddLabelCommands(CLI::App& app, Options& options, Command& chosen) {
  CLI::App& labels = AddFamily(
      app, "label", "Set, list and remove labels: names of versions, which are then kept");
  const auto add_label = [&](CLI::App* command) {
    AddModel(command, options.model);
    return command->add_option("label", options.label, "Name, such as stable")->required();
  };
  CLI::App* sub = Add(labels, chosen, "set", "Label a version, and save it if necessary",
                      [&](const Session& session) {
                        return SetLabel(session, options.model, options.label, options.labelled);
                      });
  add_label(sub)->check(CheckLabel);
  AddVersion(sub, options.labelled.version, options.labelled.incarnation,
             "Version (default: the newest)");
  add_label(Add(labels, chosen, "remove", "Remove a label", [&](const Session& session) {
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
  sub->add_flag("--lower-is-better", metric.lower_is_better,
                "A lower score is better, as for a loss");
  sub->add_option("--label", metric.label, "Label to give to the best version (default: best)")
      ->check(CheckLabel);
}

// The exit codes of commands that Docker runs as probes, which may only be 0 and 1.
int ProbeExitCode(const absl::Status& status) { return status.ok() ? kExitOk : kExitOther; }

// Declares the commands about the server itself.
void AddServerCommands(CLI::App& app, Options& options, Command& chosen) {
  CLI::App* sub = app.add_subcommand("health",
                                     "Check the server's health, as a probe does: exit code 0 if "
                                     "it is serving, 1 in any other case");
  sub->callback([&] {
    chosen.run = [&](const Session& session) { return Health(session, options.service); };
    chosen.exit_code = &ProbeExitCode;
  });
  sub->add_option("--service", options.service,
                  "Service to check; checkpoints: also fail if nothing can be saved (default: the "
                  "whole server)");

  Add(app, chosen, "info", "Show the server's version, device, memory and limits",
      [](const Session& session) { return Info(session); });

  CLI::App* const group =
      app.add_subcommand("group",
                         "Show the servers and models of the server's group, and what is wrong "
                         "with them: exit code 0 if all is well, 1 in any other case");
  group->require_subcommand(0, 1);
  group->fallthrough();
  group->callback([&chosen, group] {
    if (!group->get_subcommands().empty()) return;
    chosen.run = [](const Session& session) { return ShowGroup(session); };
    chosen.exit_code = &ProbeExitCode;
  });
  sub = Add(*group, chosen, "recover",
            "Continue a model from the checkpoints in its folder, after the group's registry has "
            "lost the model",
            [&](const Session& session) { return RecoverModel(session, options.model); });
  AddModel(sub, options.model);
  sub = Add(
      *group, chosen, "rebalance",
      "Spread a model evenly over all running servers. Saves it first; trainers skip steps until "
      "the servers have loaded it",
      [&](const Session& session) {
        return RebalanceModel(session, options.model, options.without);
      });
  AddModel(sub, options.model);
  AddRepeatable(sub, "--without", options.without, "Server to exclude");
  sub =
      Add(*group, chosen, "replace",
          "Move the partitions of lost servers to the other servers. Their models return to their "
          "newest checkpoints",
          [&](const Session& session) { return ReplaceMembers(session, options.without); });
  sub->add_option("server", options.without, "Names of the lost servers")->required();

  sub = Add(app, chosen, "log-level", "Show the server's log level, or change it",
            [&](const Session& session) { return SetLogLevel(session, options.log_level); });
  sub->add_option("level", options.log_level, "debug, info, warn or error (default: show it)");

  sub = Add(app, chosen, "drain", "Stop the server as SIGTERM does: it saves and exits",
            [](const Session& session) { return Drain(session); });
  sub->add_flag("--yes", options.yes, "Confirm the command")->required();

  sub = Add(app, chosen, "bench",
            "Measure the speed of pushes and pulls from this host with a temporary model; needs an "
            "admin's token if the server uses tokens",
            [&](const Session& session) { return Bench(session, options.bench); });
  sub->add_option("--bytes", options.bench.bytes,
                  "Size of the weights, such as 512M or 4G; this host needs twice that")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->check(CLI::Range(int64_t{4096}, int64_t{1} << 50))
      ->default_str("256M");
  sub->add_option("--rounds", options.bench.rounds,
                  "Number of rounds, after one that is not counted")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
}

// REQUIRES: CheckTrack() accepts the texts.
std::vector<TrackOption> ParseTracks(const std::vector<std::string>& texts) {
  std::vector<TrackOption> tracks;
  tracks.reserve(texts.size());
  for (const std::string& text : texts) tracks.push_back(*ParseTrackOption(text));
  return tracks;
}
std::vector<TrackConfig> NewTracks(const std::vector<std::string>& texts) {
  std::vector<TrackConfig> tracks;
  for (const TrackOption& option : ParseTracks(texts)) tracks.push_back(option.On(nullptr));
  return tracks;
}

// Declares the options of commands that create a model.
void AddModelOptions(CLI::App* sub, Client::ModelOptions& options) {
  sub->add_option("--max-pinned", options.max_pinned_versions,
                  "Versions that readers may hold at once (default: the server's)")
      ->check(CLI::Range(1, 64));
  sub->add_option_function<std::string>(
         "--non-finite",
         [&options](const std::string& name) { options.non_finite = *ParseNonFinitePolicy(name); },
         "What to do if a step contains NaN or infinity: reject the step (default), skip the "
         "tensor, or allow them")
      ->check(CheckNonFinite);
}

// Declares the commands that create and change models.
void AddModelCommands(CLI::App& app, Options& options, Command& chosen) {
  CLI::App* sub = Add(app, chosen, "create", "Create a model", [&](const Session& session) {
    options.create.tracks = NewTracks(options.tracks);
    return Create(session, options.create);
  });
  AddModel(sub, options.create.model);
  sub->add_option("--from", options.create.file,
                  "Safetensors file, or Hugging Face folder, with tensors of the model's names, "
                  "dtypes and shapes")
      ->required();
  AddRepeatable(sub, "--track", options.tracks, kTrackHelp)->required()->check(CheckTrack);
  AddModelOptions(sub, options.create.model_options);

  sub = Add(app, chosen, "import", "Create a model whose averages start from the weights of a file",
            [&](const Session& session) {
              options.import.tracks = NewTracks(options.tracks);
              return Import(session, options.import);
            });
  AddModel(sub, options.import.model);
  sub->add_option("--from", options.import.from, "Safetensors file, or Hugging Face folder")
      ->required();
  AddRepeatable(sub, "--track", options.tracks, kTrackHelp)->required()->check(CheckTrack);
  sub->add_option("--step", options.import.step,
                  "Step of the weights, after which training continues (default: 0)")
      ->check(CheckCount);
  sub->add_option("--updates", options.import.updates,
                  "Number of updates that the imported average contains; needed by uniform tracks "
                  "and by those with zero_init")
      ->check(CheckPositive);
  AddModelOptions(sub, options.import.model_options);

  sub = Add(app, chosen, "update", "Change a model's tracks while training runs",
            [&](const Session& session) {
              return Update(session, options.model, ParseTracks(options.tracks), options.changes);
            });
  AddModel(sub, options.model);
  AddRepeatable(sub, "--track", options.tracks, kTrackHelp)->check(CheckTrack);
  AddRepeatable(sub, "--remove", options.changes.remove, "Name of a track to remove");
  AddRepeatable(sub, "--pause", options.changes.pause, "Name of a track to stop updating");
  AddRepeatable(sub, "--resume", options.changes.resume, "Name of a paused track to update again");
}

// Declares the commands that show models and their versions.
void AddShowCommands(CLI::App& app, Options& options, Command& chosen) {
  Add(app, chosen, "list", "List the models", [](const Session& session) { return List(session); });

  CLI::App* sub = Add(app, chosen, "describe", "Show a model's tracks and tensors",
                      [&](const Session& session) { return Describe(session, options.model); });
  AddModel(sub, options.model);

  sub = Add(app, chosen, "tracks", "Show the state of a model's tracks",
            [&](const Session& session) { return Tracks(session, options.model); });
  AddModel(sub, options.model);

  sub = Add(app, chosen, "versions", "List a model's versions, oldest first",
            [&](const Session& session) {
              return Versions(session, options.model, options.last.value_or(session.json ? 0 : 20));
            });
  AddModel(sub, options.model);
  sub->add_option("--last", options.last,
                  "Only this many of the newest versions; 0: all (default: 20, with --json all)")
      ->check(CheckCount);

  sub = Add(app, chosen, "statistics",
            "Show the norms of a version's averages and their distances from the weights",
            [&](const Session& session) {
              return Statistics(session, options.model, options.statistics);
            });
  AddModel(sub, options.model);
  AddVersion(sub, options.statistics.id.version, options.statistics.id.incarnation,
             "Version (default: the newest)");
  AddRepeatable(sub, "--track", options.statistics.tracks,
                "Only this track (default: all that average a tensor)");

  sub = Add(app, chosen, "watch", "Print every commit as it happens",
            [&](const Session& session) { return Watch(session, options.watch); });
  AddModel(sub, options.watch.model);
  CLI::Option* const after = sub->add_option("--after", options.watch.after,
                                             "Begin after this version; 0: begin with the oldest "
                                             "one (default: print only new commits)")
                                 ->check(CheckCount);
  AddIncarnation(sub, after, options.watch.incarnation);
  sub->add_option("--count", options.watch.count, "Exit after this number of commits")
      ->check(CheckPositive);
}

void AddPull(CLI::App& app, Options& options, Command& chosen) {
  CLI::App* const sub =
      Add(app, chosen, "pull",
          "Write the weights of a track to a safetensors file, or a Hugging Face folder",
          [&](const Session& session) { return Pull(session, options.pull); });
  AddModel(sub, options.pull.model);
  sub->add_option("--track", options.pull.track, "Name of the track")->required();
  CLI::Option* const pull_version =
      sub->add_option("--version", options.pull.version,
                      "A version's number, or a label (default: the newest)")
          ->check(CheckVersionOrLabel);
  AddIncarnation(sub, pull_version, options.pull.request.incarnation);
  sub->add_option("--step", options.pull.request.step,
                  "Pull the version of this step of the trainer")
      ->check(CheckCount)
      ->excludes(pull_version);
  AddRepeatable(sub, "--tensors", options.pull.request.selection.tensors,
                "Pull only this tensor, or those of a pattern such as 'encoder.*' (default: all)");
  sub->add_option("--dtype", options.pull.dtype,
                  "Cast floats to float32, float16 or bfloat16 (default: as the server keeps them)")
      ->check(CheckDtype);
  sub->add_option("--overflow", options.pull.overflow,
                  "What to do if a value is too large for --dtype: error, saturate (the largest "
                  "value of the dtype) or inf")
      ->check(CheckOverflow)
      ->capture_default_str();
  AddRepeatable(sub, "--slice", options.pull.slices,
                "Pull only this part of a tensor, such as 'head.weight[0:10,5:]', and the tensors "
                "of --tensors");
  sub->add_option("-o,--output", options.pull.output,
                  "File.safetensors to write, or folder/: weights named as from_pretrained expects "
                  "them, and the model's attached files")
      ->required()
      ->check([](const std::string& path) { return path.empty() ? "must not be empty" : ""; });
  sub->add_option("--config-from", options.pull.config_from,
                  "Copy the files of this Hugging Face folder to the output folder, instead of the "
                  "attached files");
}

void AddSynthesize(CLI::App& app, Options& options, Command& chosen) {
  CLI::App* const sub =
      Add(app, chosen, "synthesize",
          "Build an average of another length from kept snapshots; `pull` can then read it",
          [&](const Session& session) {
            return Synthesize(session, options.model, options.synthesize);
          });
  AddModel(sub, options.model);
  Client::SynthesizeOptions& request = options.synthesize;
  sub->add_option("--name", request.name, "Name of the result, for pull --track")->required();
  CLI::Option_group* const profile = sub->add_option_group("profile");
  profile->add_option("--sigma-rel", request.sigma_rel,
                      "Relative width of a power function, above 0 and at most 0.288675");
  profile->add_option("--half-life", request.half_life,
                      "Half-life in the unit of the tracks' update_interval, such as 1000ba");
  profile->require_option(1);
  sub->add_option("--step", request.step,
                  "Step of the average (default: that of the newest stored snapshot)")
      ->check(CheckPositive);
  AddRepeatable(sub, "--track", request.tracks,
                "Track to build from (default: all compatible ones)");
}

void AddDelete(CLI::App& app, Options& options, Command& chosen) {
  CLI::App* const sub =
      Add(app, chosen, "delete",
          "Delete a model; its checkpoints stay on the disk, unless --purge is given",
          [&](const Session& session) { return Delete(session, options.remove); });
  AddModel(sub, options.remove.model);
  sub->add_option("--confirm", options.remove.confirm, "The model's name again, as a confirmation")
      ->type_name("MODEL")
      ->required();
  sub->add_flag(
      "--purge", options.remove.purge,
      "Remove its checkpoints, too, and those of earlier deleted models of the same name");
}

}  // namespace

void AddCommands(CLI::App& app, Options& options, Command& chosen) {
  AddModelCommands(app, options, chosen);
  AddShowCommands(app, options, chosen);
  AddPull(app, options, chosen);
  AddCheckpointCommands(app, options, chosen);
  AddFilesCommands(app, options, chosen);
  AddRollback(app, options, chosen);
  AddLabelCommands(app, options, chosen);
  AddSynthesize(app, options, chosen);
  AddDelete(app, options, chosen);
  AddServerCommands(app, options, chosen);

  CLI::App* const sub = Add(
      app, chosen, "explain",
      "Show what a schedule does, such as --half-life 1000ba; needs no server",
      [&](const Session& session) { return Explain(options.explain, session.json); },
      /*needs_server=*/false);
  AddExplain(sub, options);
}

}  // namespace ema::cli
