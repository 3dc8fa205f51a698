// SPDX-License-Identifier: Apache-2.0
#include "client/cli/local_checkpoints.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/checkpoint_copy.h"
#include "client/cli/output.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/format/checkpoint_files.h"
#include "server/format/checkpoint_name.h"
#include "server/format/label_file.h"
#include "server/format/verify.h"

namespace ema::cli {
namespace {

// The result of verifying one track, or a checkpoint as a whole.
struct Finding {
  std::string checkpoint;
  std::string track;  // Empty: the checkpoint as a whole.
  int64_t file_count = 0;
  int64_t bytes = 0;
  absl::Status status;

  friend bool operator==(const Finding&, const Finding&) = default;
};

// True if `path` has files of a checkpoint, complete or not.
absl::StatusOr<bool> IsCheckpoint(const std::string& path) {
  for (const std::string& part : {JoinPath(path, kManifestFileName), TracksPath(path)}) {
    EMA_ASSIGN_OR_RETURN(const bool exists, PosixFileSystem().Exists(part));
    if (exists) return true;
  }
  return false;
}

// False also if one of them cannot be read.
bool IsWithin(const std::string& path, const std::string& folder) {
  std::error_code error;
  const auto inner =
      std::filesystem::weakly_canonical(std::filesystem::absolute(path, error), error);
  const auto outer = std::filesystem::canonical(folder, error);
  return !error &&
         std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
}

struct Found {
  std::string path;
  std::string name;  // For the output.
};

// Adds the checkpoints that are in `directory`, if there is one; their names begin with `prefix`.
absl::Status AddCheckpointsIn(const std::string& directory, const std::string& prefix,
                              std::vector<Found>& found) {
  EMA_ASSIGN_OR_RETURN(const bool exists, PosixFileSystem().Exists(directory));
  if (!exists) return absl::OkStatus();
  EMA_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                       PosixFileSystem().ListDirectory(directory));
  for (const DirectoryEntry& entry : entries) {
    // The names of unfinished checkpoints, and of those set aside, begin with a dot.
    if (!entry.is_directory || entry.name[0] == '.') continue;
    const std::string path = JoinPath(directory, entry.name);
    EMA_ASSIGN_OR_RETURN(const bool looks_like_one, IsCheckpoint(path));
    if (looks_like_one || ParseCheckpointName(entry.name).has_value()) {
      found.push_back({path, prefix + entry.name});
    }
  }
  return absl::OkStatus();
}

// The folder of a model's checkpoints in a data directory, laid out as in folder_files.h.
std::string CheckpointsOf(const std::string& models, const std::string& model) {
  return JoinPath(JoinPath(models, model), "checkpoints");
}

// The folders that may have checkpoints: `directory`, and if it is a data directory its models'.
// Each has as its name the prefix of its checkpoints' names.
absl::StatusOr<std::vector<Found>> FindFolders(const std::string& directory) {
  std::vector<Found> folders = {{directory, ""}};
  const std::string models = JoinPath(directory, "models");
  EMA_ASSIGN_OR_RETURN(const bool is_data_dir, PosixFileSystem().Exists(models));
  if (!is_data_dir) return folders;
  EMA_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                       PosixFileSystem().ListDirectory(models));
  for (const DirectoryEntry& model : entries) {
    if (!model.is_directory || model.name[0] == '.') continue;
    folders.push_back({CheckpointsOf(models, model.name), model.name + "/"});
  }
  return folders;
}

absl::Status NothingFound(const std::string& directory) {
  EMA_ASSIGN_OR_RETURN(const bool exists, PosixFileSystem().Exists(directory));
  return absl::NotFoundError(absl::StrCat(
      directory,
      exists ? ": no checkpoint found; expected a checkpoint's folder, a folder of checkpoints, "
               "or a server's data directory"
             : ": there is no such folder"));
}

int64_t FileCount(const CheckpointManifest& checkpoint, const CheckpointTrack& track) {
  size_t count = checkpoint.attached_files.size();
  for (const TensorFiles* const files : track.all_files()) count += files->files.size();
  if (track.weights->index.has_value()) ++count;
  return static_cast<int64_t>(count);
}

// A finding for each track of a checkpoint, or one for the whole. Empty: it was removed.
std::vector<Finding> Verify(const Found& found) {
  std::vector<Finding> findings;
  bool is_bad_track = false;
  const auto on_track = [&](const CheckpointManifest& checkpoint, const CheckpointTrack& track,
                            const absl::Status& status) {
    is_bad_track = is_bad_track || !status.ok();
    findings.push_back({found.name, track.config.name, FileCount(checkpoint, track),
                        checkpoint.FolderBytes(track), status});
  };
  const absl::StatusOr<CheckpointManifest> verified =
      VerifyCheckpoint(PosixFileSystem(), found.path, on_track);
  const absl::Status status = verified.ok()
                                  ? CheckNoUnknownFiles(PosixFileSystem(), found.path, *verified)
                                  : verified.status();
  if (!status.ok()) {
    const absl::StatusOr<bool> exists = PosixFileSystem().Exists(found.path);
    if (exists.ok() && !*exists) return {};
    if (!is_bad_track) findings.push_back({.checkpoint = found.name, .status = status});
  }
  return findings;
}

// Whether `name` is in the folder; true also if the disk fails.
bool IsIn(const Found& folder, std::string_view name) {
  return PosixFileSystem().Exists(JoinPath(folder.path, name)).value_or(true);
}

// The checkpoints that LATEST and the labels of a folder name although they do not exist.
std::vector<Finding> CheckNamesOnce(const Found& folder) {
  std::vector<Finding> findings;
  const auto add = [&](std::string_view name, const absl::Status& problem) {
    findings.push_back({.checkpoint = std::string(folder.name).append(name), .status = problem});
  };
  const absl::StatusOr<std::string> latest_text =
      PosixFileSystem().ReadSmallFile(JoinPath(folder.path, kLatestFileName), kMaxLatestBytes);
  if (latest_text.ok()) {
    const std::optional<std::string> latest = ParseLatest(*latest_text);
    if (!latest.has_value()) {
      add(kLatestFileName, CorruptCheckpoint("the checksum is wrong, or missing"));
    } else if (!IsIn(folder, *latest) && !IsIn(folder, std::string(kCorruptPrefix) + *latest)) {
      add(*latest, CorruptCheckpoint("it is missing: LATEST names it"));
    }
  } else if (!absl::IsNotFound(latest_text.status())) {
    add(kLatestFileName, latest_text.status());
  }
  const absl::StatusOr<std::string> labels_text =
      PosixFileSystem().ReadSmallFile(JoinPath(folder.path, kLabelsFileName), kMaxLabelsFileBytes);
  if (absl::IsNotFound(labels_text.status())) return findings;
  const absl::StatusOr<LabelMap> labels =
      labels_text.ok() ? ParseLabels(*labels_text) : labels_text.status();
  if (!labels.ok()) {
    add(kLabelsFileName, labels.status());
    return findings;
  }
  for (const auto& [name, label] : *labels) {
    const std::string checkpoint =
        CheckpointName({label.id.incarnation, label.id.version, label.step});
    if (IsIn(folder, checkpoint)) continue;
    add(checkpoint,
        CorruptCheckpoint(absl::StrCat("it is missing: label \"", name, "\" names it")));
  }
  return findings;
}

// Checks again, because a running server may have named another checkpoint and removed the old one.
std::vector<Finding> CheckNames(const Found& folder) {
  std::vector<Finding> findings = CheckNamesOnce(folder);
  for (int i = 0; i < 10 && !findings.empty(); ++i) {
    std::vector<Finding> again = CheckNamesOnce(folder);
    if (again == findings) break;
    findings = std::move(again);
  }
  return findings;
}

absl::Status PrintFindings(const std::vector<Finding>& findings, bool json) {
  const auto verdict = [](const Finding& finding) {
    return finding.status.ok() ? std::string("ok") : std::string(finding.status.message());
  };
  Table table({"CHECKPOINT", "TRACK", "FILES", "BYTES", "VERDICT"});
  Json rows = Json::array();
  for (const Finding& finding : findings) {
    table.Add({finding.checkpoint, finding.track.empty() ? "-" : finding.track,
               absl::StrCat(finding.file_count), absl::StrCat(finding.bytes), verdict(finding)});
    rows.push_back({{"checkpoint", finding.checkpoint},
                    {"track", finding.track},
                    {"files", finding.file_count},
                    {"bytes", finding.bytes},
                    {"ok", finding.status.ok()}});
    if (!finding.status.ok()) rows.back()["problem"] = verdict(finding);
  }
  return PrintResult(json, Json::object({{"verified", std::move(rows)}}), table.ToString());
}

}  // namespace

absl::Status VerifyCheckpoints(const std::string& directory, bool json) {
  EMA_ASSIGN_OR_RETURN(const bool is_one, IsCheckpoint(directory));
  std::vector<Found> checkpoints;
  std::vector<Found> folders;
  if (is_one) {
    checkpoints = {{directory, BaseName(directory)}};
  } else {
    EMA_ASSIGN_OR_RETURN(folders, FindFolders(directory));
  }
  for (const Found& folder : folders) {
    EMA_RETURN_IF_ERROR(AddCheckpointsIn(folder.path, folder.name, checkpoints));
  }
  std::vector<Finding> findings;
  for (const Found& checkpoint : checkpoints) {
    for (Finding& finding : Verify(checkpoint)) findings.push_back(std::move(finding));
  }
  for (const Found& folder : folders) {
    for (Finding& finding : CheckNames(folder)) findings.push_back(std::move(finding));
  }
  if (checkpoints.empty() && findings.empty()) return NothingFound(directory);
  EMA_RETURN_IF_ERROR(PrintFindings(findings, json));
  for (const Finding& finding : findings) {
    if (finding.status.ok()) continue;
    const std::string track =
        finding.track.empty() ? "" : absl::StrCat("track \"", finding.track, "\": ");
    return WithPrefix(finding.status,
                      absl::StrCat("checkpoint \"", finding.checkpoint, "\": ", track));
  }
  return absl::OkStatus();
}

absl::Status CopyCheckpoint(const std::string& from, const std::string& to, bool json) {
  EMA_ASSIGN_OR_RETURN(const bool is_one, IsCheckpoint(from));
  if (!is_one) return absl::NotFoundError(from + ": not a checkpoint's folder");
  // The copy would make `from` invalid.
  if (IsWithin(to, from)) {
    return BadRequest(absl::StrCat(to, " is inside ", from, "; expected a folder elsewhere"));
  }
  const absl::StatusOr<CheckpointManifest> copied = CopyVerified(PosixFileSystem(), from, to);
  if (!copied.ok()) return WithPrefix(copied.status(), absl::StrCat(from, " to ", to, ": "));
  return PrintResult(
      json,
      {{"copied", BaseName(from)},
       {"to", to},
       {"step", copied->record.step},
       {"version", copied->record.number},
       {"bytes", copied->total_bytes}},
      absl::StrCat(BaseName(from), " (step ", copied->record.step, ", ", copied->total_bytes,
                   " bytes of weights and more) copied to ", to, " and verified\n"));
}

}  // namespace ema::cli
