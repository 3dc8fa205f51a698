// SPDX-License-Identifier: Apache-2.0
#include "client/cli/checkpoint_commands.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/cli/output.h"
#include "client/cli/progress.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/manifest.h"

namespace ema::cli {
namespace {

std::string Describe(const CheckpointLabel& label) {
  return absl::StrCat("label ", label.name, ": version ", label.id.version, " (step ", label.step,
                      ")", label.metric.has_value() ? absl::StrCat(", metric ", *label.metric) : "",
                      "\n");
}

}  // namespace

absl::StatusOr<VersionOrLabel> ParseVersionOrLabel(std::string_view text, int64_t incarnation) {
  VersionOrLabel result{.id = {.version = 0, .incarnation = incarnation}, .label = {}};
  int64_t& version = result.id.version;
  if (absl::SimpleAtoi(absl::string_view(text.data(), text.size()), &version)) {
    if (version > 0) return result;
    return BadRequest(absl::StrCat("version ", version, ": must be 1 or more, or a label"));
  }
  EMA_RETURN_IF_ERROR(ValidateName("label", text));
  if (incarnation != 0) {
    return BadRequest(absl::StrCat("--incarnation ", incarnation,
                                   ": needs a version's number, but label \"", std::string(text),
                                   "\" is given"));
  }
  result.label = std::string(text);
  return result;
}

absl::Status CreateCheckpoint(const Session& session, const std::string& model,
                              const Client::CheckpointOptions& request) {
  EMA_ASSIGN_OR_RETURN(const Client::CheckpointResult result,
                       session.client->CreateCheckpoint(model, request, session.disk_timeout()));
  const bool is_saving = result.state == CheckpointInfo::State::kSaving;
  return PrintResult(
      session.json,
      {{"checkpoint", result.checkpoint},
       {"state", CheckpointStateName(result.state)},
       {"version", result.version},
       {"total_bytes", result.total_bytes}},
      absl::StrCat("checkpoint ", result.checkpoint, ": version ", result.version.number, " (step ",
                   result.version.step, "), ",
                   is_saving ? "being saved"
                             : absl::StrCat(FormatBytes(result.total_bytes), ", on the disk"),
                   "\n"));
}

absl::Status ListCheckpoints(const Session& session, const std::string& model) {
  EMA_ASSIGN_OR_RETURN(const CheckpointList list,
                       session.client->ListCheckpoints(model, session.timeout));
  return PrintResult(
      session.json, {{"checkpoints", list.checkpoints}, {"labels", list.labels}},
      list.checkpoints.empty() ? "no checkpoints\n" : CheckpointTable(list.checkpoints));
}

absl::Status ShowCheckpoint(const Session& session, const std::string& model,
                            const std::string& checkpoint) {
  EMA_ASSIGN_OR_RETURN(const CheckpointInfo info,
                       session.client->GetCheckpoint(model, checkpoint, session.timeout));
  return PrintResult(session.json, info, DescribeCheckpoint(info));
}

// Reports a checkpoint that does not exist, as all commands that remove: the client accepts it.
absl::Status DeleteCheckpoint(const Session& session, const std::string& model,
                              const std::string& checkpoint) {
  EMA_RETURN_IF_ERROR(session.client->GetCheckpoint(model, checkpoint, session.timeout).status());
  EMA_RETURN_IF_ERROR(session.client->DeleteCheckpoint(model, checkpoint, session.timeout));
  return PrintResult(session.json, Json::object({{"deleted", checkpoint}}),
                     absl::StrCat("deleted checkpoint ", checkpoint, "\n"));
}

absl::Status Rollback(const Session& session, const std::string& model, const std::string& to,
                      int64_t incarnation) {
  EMA_ASSIGN_OR_RETURN(const VersionOrLabel found, ParseVersionOrLabel(to, incarnation));
  const absl::StatusOr<Version> version =
      found.label.empty()
          ? session.client->RestoreCheckpoint(model, found.id, session.disk_timeout())
          : session.client->RestoreCheckpoint(model, found.label, session.disk_timeout());
  EMA_RETURN_IF_ERROR(version.status());
  return PrintResult(
      session.json, *version,
      absl::StrCat("version ", version->number, " of ", model, " has the values of ", to, " (step ",
                   version->step, "); the run that pushed has ended\n"));
}

absl::Status SetLabel(const Session& session, const std::string& model, const std::string& label,
                      const VersionId& id) {
  EMA_ASSIGN_OR_RETURN(const CheckpointLabel set,
                       session.client->SetLabel(model, label, id, session.disk_timeout()));
  return PrintResult(session.json, set, Describe(set));
}

absl::Status RemoveLabel(const Session& session, const std::string& model,
                         const std::string& label) {
  EMA_ASSIGN_OR_RETURN(const CheckpointList list,
                       session.client->ListCheckpoints(model, session.timeout));
  if (std::none_of(list.labels.begin(), list.labels.end(),
                   [&](const CheckpointLabel& one) { return one.name == label; })) {
    return MakeError(absl::StatusCode::kNotFound, ErrorReason::kLabelNotFound,
                     absl::StrCat("model \"", model, "\" has no label \"", label, "\""));
  }
  EMA_RETURN_IF_ERROR(session.client->RemoveLabel(model, label, session.timeout));
  return PrintResult(session.json, Json::object({{"removed", label}}),
                     absl::StrCat("removed label ", label, "\n"));
}

absl::Status ListLabels(const Session& session, const std::string& model) {
  EMA_ASSIGN_OR_RETURN(const CheckpointList list,
                       session.client->ListCheckpoints(model, session.timeout));
  return PrintResult(session.json, Json::object({{"labels", list.labels}}),
                     list.labels.empty() ? "no labels\n" : LabelTable(list.labels));
}

absl::Status ReportMetric(const Session& session, const std::string& model,
                          const Client::Metric& metric) {
  EMA_ASSIGN_OR_RETURN(const MetricResult result,
                       session.client->ReportMetric(model, metric, session.disk_timeout()));
  return PrintResult(
      session.json, {{"moved", result.moved}, {"label", result.label}},
      absl::StrCat(result.moved ? "better: " : "not better: ", Describe(result.label)));
}

}  // namespace ema::cli
