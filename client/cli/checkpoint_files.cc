// SPDX-License-Identifier: Apache-2.0
#include "client/cli/checkpoint_files.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/output.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/checkpoint_files.h"
#include "server/checkpoint/checkpoint_name.h"
#include "server/checkpoint/copy.h"
#include "server/checkpoint/verify.h"

namespace ema::cli {
namespace {

// What was found of one track, or of a checkpoint as a whole.
struct Finding {
  std::string checkpoint;
  std::string track;  // Empty: of what is not one track's.
  int64_t file_count = 0;
  int64_t bytes = 0;
  absl::Status status;
};

std::string BaseName(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path.substr(path.find_last_of('/') + 1);
}

// True if `path` looks like a checkpoint, whole or not.
absl::StatusOr<bool> IsCheckpoint(const std::string& path) {
  for (const std::string& part : {JoinPath(path, kManifestFileName), TracksPath(path)}) {
    EMA_ASSIGN_OR_RETURN(const bool exists, PosixFileSystem().Exists(part));
    if (exists) return true;
  }
  return false;
}

absl::StatusOr<std::vector<std::string>> FindCheckpoints(const std::string& directory) {
  EMA_ASSIGN_OR_RETURN(const bool is_one, IsCheckpoint(directory));
  if (is_one) return std::vector<std::string>{directory};
  EMA_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                       PosixFileSystem().ListDirectory(directory));
  std::vector<std::string> found;
  for (const DirectoryEntry& entry : entries) {
    // What the server has set aside or not finished begins with a dot.
    if (!entry.is_directory || entry.name[0] == '.') continue;
    const std::string path = JoinPath(directory, entry.name);
    EMA_ASSIGN_OR_RETURN(const bool looks_like_one, IsCheckpoint(path));
    if (looks_like_one || ParseCheckpointName(entry.name).has_value()) found.push_back(path);
  }
  if (found.empty()) {
    return absl::NotFoundError(absl::StrCat(
        directory, ": there is no checkpoint: neither a manifest.json, nor a folder that has one"));
  }
  return found;
}

int64_t FileCount(const CheckpointManifest& checkpoint, const CheckpointTrack& track) {
  size_t count = checkpoint.attached_files.size() + track.weights->files.size();
  if (track.weights->index.has_value()) ++count;
  if (track.low_parts.has_value()) count += track.low_parts->files.size();
  return static_cast<int64_t>(count);
}

// One checkpoint's tracks; what is wrong with the whole is a finding by itself.
std::vector<Finding> Verify(const std::string& path) {
  std::vector<Finding> findings;
  bool is_bad_track = false;
  const std::string name = BaseName(path);
  const auto on_track = [&](const CheckpointManifest& checkpoint, const CheckpointTrack& track,
                            const absl::Status& status) {
    is_bad_track = is_bad_track || !status.ok();
    findings.push_back({name, track.config.name, FileCount(checkpoint, track),
                        checkpoint.FolderBytes(track), status});
  };
  const absl::StatusOr<CheckpointManifest> verified =
      VerifyCheckpoint(PosixFileSystem(), path, on_track);
  const absl::Status status =
      verified.ok() ? CheckNothingElse(PosixFileSystem(), path, *verified) : verified.status();
  if (!status.ok() && !is_bad_track) findings.push_back({.checkpoint = name, .status = status});
  return findings;
}

void PrintFindings(const std::vector<Finding>& findings, bool json) {
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
  const Json document = {{"verified", std::move(rows)}};
  Print(json ? Dump(document, 2) : table.ToString());
}

}  // namespace

absl::Status VerifyCheckpoints(const std::string& directory, bool json) {
  EMA_ASSIGN_OR_RETURN(const std::vector<std::string> paths, FindCheckpoints(directory));
  std::vector<Finding> findings;
  for (const std::string& path : paths) {
    for (Finding& finding : Verify(path)) findings.push_back(std::move(finding));
  }
  PrintFindings(findings, json);
  for (const Finding& finding : findings) {
    if (finding.status.ok()) continue;
    const std::string track =
        finding.track.empty() ? "" : absl::StrCat("track \"", finding.track, "\": ");
    return WithPlace(finding.status,
                     absl::StrCat("checkpoint \"", finding.checkpoint, "\": ", track));
  }
  return absl::OkStatus();
}

absl::Status CopyCheckpoint(const std::string& from, const std::string& to, bool json) {
  const absl::StatusOr<CheckpointManifest> copied =
      ema::CopyCheckpoint(PosixFileSystem(), from, to);
  if (!copied.ok()) return WithPlace(copied.status(), absl::StrCat(from, " to ", to, ": "));
  if (json) {
    const Json document = {{"copied", BaseName(from)},
                           {"to", to},
                           {"step", copied->record.step},
                           {"version", copied->record.version},
                           {"bytes", copied->total_bytes}};
    PrintJson(document);
    return absl::OkStatus();
  }
  Print(absl::StrCat(BaseName(from), " (step ", copied->record.step, ", ", copied->total_bytes,
                     " bytes of weights and more) copied to ", to, " and verified\n"));
  return absl::OkStatus();
}

}  // namespace ema::cli
