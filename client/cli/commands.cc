// SPDX-License-Identifier: Apache-2.0
#include "client/cli/commands.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/output.h"
#include "client/cli/progress.h"
#include "client/cli/weights_file.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::cli {

absl::Status Create(const Session& session, const CreateOptions& options) {
  EMA_ASSIGN_OR_RETURN(const WeightsFile file, WeightsFile::Open(options.file));
  // The server accepts a rule that ignores tensors and matches none; here that is a mistake.
  for (const TrackConfig& track : options.tracks) {
    EMA_RETURN_IF_ERROR(CheckRulesMatch(track, file.manifest()));
  }
  EMA_ASSIGN_OR_RETURN(const Client::CreateModelResult result,
                       session.client->CreateModel(options.model, file.manifest(), options.tracks,
                                                   options.model_options, session.timeout));
  return PrintResult(
      session.json, {{"created", result.created}, {"model", result.model}},
      absl::StrCat(result.created ? "created " : "already exists: ", result.model.name, ", ",
                   result.model.manifest.tensor_count(), " tensors, ",
                   FormatBytes(result.model.reserved_bytes), " reserved\n"));
}

absl::Status Update(const Session& session, const std::string& model,
                    const std::vector<TrackOption>& tracks, Client::ModelChanges changes) {
  std::vector<TrackConfig> before;
  if (!tracks.empty()) {
    EMA_ASSIGN_OR_RETURN(const ModelInfo info, session.client->GetModel(model, session.timeout));
    before = info.pending_tracks.value_or(info.tracks);
  }
  const auto is_removed = [&changes](const TrackConfig& track) {
    return std::find(changes.remove.begin(), changes.remove.end(), track.name) !=
           changes.remove.end();
  };
  std::erase_if(before, is_removed);
  for (const TrackOption& option : tracks) {
    const auto it = std::find_if(before.begin(), before.end(), [&option](const TrackConfig& track) {
      return track.name == option.name;
    });
    changes.put.push_back(option.On(it != before.end() ? &*it : nullptr));
  }
  EMA_ASSIGN_OR_RETURN(const ModelInfo info,
                       session.client->UpdateModel(model, changes, session.timeout));
  return PrintResult(session.json, info, DescribeModel(info));
}

absl::Status List(const Session& session) {
  EMA_ASSIGN_OR_RETURN(const std::vector<ModelInfo> models,
                       session.client->ListModels(session.timeout));
  return PrintResult(session.json, Json::object({{"models", models}}),
                     models.empty() ? "no models\n" : ModelTable(models));
}

absl::Status Describe(const Session& session, const std::string& model) {
  EMA_ASSIGN_OR_RETURN(const ModelInfo info, session.client->GetModel(model, session.timeout));
  return PrintResult(session.json, info, DescribeModel(info));
}

absl::Status Versions(const Session& session, const std::string& model, int64_t last) {
  EMA_ASSIGN_OR_RETURN(std::vector<Client::ListedVersion> versions,
                       session.client->ListVersions(model, 0, session.timeout));
  const int64_t count = static_cast<int64_t>(versions.size());
  const int64_t earlier = last == 0 ? 0 : std::max(count - last, int64_t{0});
  versions.erase(versions.begin(), versions.begin() + earlier);
  return PrintResult(
      session.json, {{"versions", versions}, {"earlier_count", earlier}},
      absl::StrCat(versions.empty() ? "nothing committed yet\n" : VersionTable(versions),
                   earlier == 0 ? ""
                                : absl::StrCat("(", earlier,
                                               " earlier versions are not shown; --last 0 shows "
                                               "all)\n")));
}

absl::Status Watch(const Session& session, const WatchOptions& options) {
  // A watch waits for a server without a limit, so an unreachable server is reported here.
  EMA_RETURN_IF_ERROR(session.client->GetModel(options.model, session.timeout).status());
  std::optional<VersionId> after;
  if (options.after.has_value()) after = {*options.after, options.incarnation};
  EMA_ASSIGN_OR_RETURN(
      const std::unique_ptr<VersionWatch> watch,
      session.client->Watch(options.model, after,
                            session.has_timeout ? session.timeout : absl::InfiniteDuration()));
  for (int64_t printed = 0; options.count == 0 || printed < options.count; ++printed) {
    EMA_ASSIGN_OR_RETURN(const VersionWatch::Item item, watch->Next());
    std::string line;
    if (session.json) {
      Json json = item.version;
      json["skipped"] = item.skipped;
      line = Dump(json, -1);
    } else {
      line = DescribeVersion(item.version);
      if (item.skipped > 0) {
        absl::StrAppend(&line, "  (", item.skipped, " versions before it were skipped)\n");
      }
    }
    if (!Print(line)) break;
  }
  return absl::OkStatus();
}

absl::Status Statistics(const Session& session, const std::string& model,
                        const Client::StatisticsOptions& request) {
  EMA_ASSIGN_OR_RETURN(const Version version,
                       session.client->GetStatistics(model, request, session.disk_timeout()));
  return PrintResult(session.json, version,
                     absl::StrCat("version ", version.number, ", step ", version.step, "\n\n",
                                  StatisticsTable(version.statistics)));
}

absl::Status Synthesize(const Session& session, const std::string& model,
                        const Client::SynthesizeOptions& request) {
  EMA_ASSIGN_OR_RETURN(const Synthesis result,
                       session.client->Synthesize(model, request, session.disk_timeout()));
  Json sources = Json::array();
  Table table({"TRACK", "STEP", "WEIGHT"});
  for (const auto& source : result.sources) {
    sources.push_back({{"track", source.track}, {"step", source.step}, {"weight", source.weight}});
    table.Add({source.track, absl::StrCat(source.step), absl::StrCat(source.weight)});
  }
  return PrintResult(
      session.json,
      {{"name", request.name},
       {"version", result.version},
       {"residual", result.residual},
       {"sources", std::move(sources)}},
      absl::StrCat(request.name, ": step ", result.version.step, ", residual ", result.residual,
                   ", from ", result.sources.size(), " snapshots\n\n", table.ToString()));
}

absl::Status Delete(const Session& session, const DeleteOptions& options) {
  const std::string& model = options.model;
  if (options.confirm != model) {
    return BadRequest(absl::StrCat("--confirm: \"", options.confirm, "\" given, expected \"", model,
                                   "\", the model that is to be deleted"));
  }
  const absl::Status found = session.client->GetModel(model, session.timeout).status();
  // Also if there is none: an earlier call may have deleted it but not its checkpoints.
  EMA_RETURN_IF_ERROR(session.client->DeleteModel(model, options.purge, session.timeout));
  // The client accepts an unknown name, but a person may have mistyped it. A model with this reason
  // was on the disk, and the call has set its checkpoints aside.
  const bool was_on_disk = GetErrorReason(found) == ErrorReason::kAllCheckpointsCorrupt;
  if (!options.purge && !was_on_disk) EMA_RETURN_IF_ERROR(found);
  return PrintResult(session.json, Json::object({{"deleted", model}}),
                     absl::StrCat("deleted ", model, "\n"));
}

absl::Status RecoverModel(const Session& session, const std::string& model) {
  EMA_ASSIGN_OR_RETURN(const Client::RecoveredModel recovered,
                       session.client->RecoverModel(model, session.timeout));
  const Json json = {{"model", model},
                     {"incarnation", recovered.incarnation},
                     {"version", recovered.base.version},
                     {"base_incarnation", recovered.base.incarnation},
                     {"step", recovered.step},
                     {"checkpoints", recovered.checkpoint_count},
                     {"members", recovered.members}};
  return PrintResult(
      session.json, json,
      absl::StrCat("model ", model, " continues from version ", recovered.base.version, ", step ",
                   recovered.step, ", on ", absl::StrJoin(recovered.members, ", "), "; ",
                   recovered.checkpoint_count, " checkpoints are recorded again\n"));
}

absl::Status Health(const Session& session, const std::string& service) {
  // The probes of Docker and Kubernetes do not wait longer.
  const absl::Duration timeout = session.has_timeout ? session.timeout : absl::Seconds(5);
  EMA_ASSIGN_OR_RETURN(const bool is_serving, session.client->IsServing(service, timeout));
  const char* const state = is_serving ? "SERVING" : "NOT_SERVING";
  EMA_RETURN_IF_ERROR(PrintResult(session.json, {{"service", service}, {"status", state}},
                                  absl::StrCat(state, "\n")));
  return is_serving ? absl::OkStatus() : absl::UnavailableError("the server is not serving");
}

void PrintError(const absl::Status& status, bool json) {
  const std::string code = absl::StatusCodeToString(status.code());
  const std::string message(status.message());
  const ErrorReason reason = GetErrorReason(status);
  if (json) {
    const Json error = {
        {"code", code},
        {"reason", reason == ErrorReason::kUnspecified ? Json() : Json(ErrorReasonName(reason))},
        {"message", message}};
    std::fputs(Dump(Json::object({{"error", error}}), -1).c_str(), stderr);
    return;
  }
  std::fprintf(stderr, "emactl: %s [%s]\n", message.c_str(),
               reason == ErrorReason::kUnspecified ? code.c_str()
                                                   : std::string(ErrorReasonName(reason)).c_str());
}

void PrintWait(const absl::Status& error) {
  std::fprintf(stderr, "emactl: %s; retrying until --timeout ends\n",
               std::string(error.message()).c_str());
}

}  // namespace ema::cli
