// SPDX-License-Identifier: Apache-2.0
#include "client/cli/pull_command.h"

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/cli/attached_files.h"
#include "client/cli/checkpoint_commands.h"
#include "client/cli/output.h"
#include "client/cli/progress.h"
#include "client/cli/pulled_file.h"
#include "client/cli/weights_file.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "include/ema/internal/tensor_pattern.h"
#include "server/format/file_system.h"

namespace ema::cli {
namespace {

using Files = std::map<std::string, std::string>;  // Contents by name.

// One bound of a range; empty: `otherwise`.
std::optional<int64_t> ParseBound(absl::string_view text, int64_t otherwise) {
  if (text.empty()) return otherwise;
  int64_t value = 0;
  if (!absl::SimpleAtoi(text, &value)) return std::nullopt;
  return value;
}

// Writes a file under a temporary name, and renames it when it is complete.
absl::Status WriteFile(const std::string& path, const std::string& bytes) {
  FileSystem& files = PosixFileSystem();
  const std::string temporary_path = TemporaryPath(path);
  const auto write = [&]() -> absl::Status {
    EMA_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file,
                         files.NewWritableFile(temporary_path));
    EMA_RETURN_IF_ERROR(file->Append(std::as_bytes(std::span(bytes))));
    EMA_RETURN_IF_ERROR(file->Sync());
    EMA_RETURN_IF_ERROR(file->Close());
    return files.Rename(temporary_path, path);
  };
  const absl::Status status = write();
  if (status.ok()) return absl::OkStatus();
  files.RemoveFile(temporary_path).IgnoreError();
  return FileError(path, status);
}

absl::StatusOr<Files> FilesBeside(const Session& session, const PullOptions& options,
                                  const ModelInfo& model) {
  if (!options.config_from.empty()) return ReadDescribingFiles({options.config_from});
  Files files;
  for (const ModelInfo::AttachedFile& file : model.attached_files) {
    EMA_ASSIGN_OR_RETURN(files[file.name], session.client->GetAttachedFile(options.model, file.name,
                                                                           session.timeout));
  }
  return files;
}

// FAILED_PRECONDITION: the folder has other weights, which tools would read in place of ours.
absl::Status CheckFolder(const std::string& folder, const std::string& weights_name) {
  const std::string index = JoinPath(folder, absl::StrCat(weights_name, ".index.json"));
  const absl::StatusOr<bool> has_pieces = PosixFileSystem().Exists(index);
  if (!has_pieces.ok()) return FileError(folder, has_pieces.status());
  if (!*has_pieces) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      index, ": the folder has weights in pieces; use another folder, or remove them"));
}

// OK: a file may be written to the output.
absl::Status CheckFile(const PullOptions& options) {
  if (!options.config_from.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("--config-from: the output ", options.output,
                                                   " is not a folder; end it with /"));
  }
  std::error_code ignored;
  const auto there = std::filesystem::status(options.output, ignored);
  if (exists(there) && !is_regular_file(there)) {
    // A rename would replace it, even /dev/null.
    return absl::FailedPreconditionError(
        absl::StrCat(options.output, ": exists and is not a regular file"));
  }
  for (const std::filesystem::path path : {options.output, RealPath(options.output)}) {
    if (path.extension() == ".safetensors") return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--output ", options.output,
                   ": must end in .safetensors (a file) or in / (a folder), or be a folder"));
}

absl::Status MakeFolder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return absl::UnknownError(absl::StrCat(folder, ": ", error.message()));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TensorSlice> ParseSlice(std::string_view text, const Manifest& manifest) {
  const auto error = [text](const std::string& why) {
    return BadRequest(absl::StrCat("--slice ", std::string(text), ": ", why,
                                   "; expected a slice such as head.weight[0:10,5:]"));
  };
  const size_t bracket = text.rfind('[');
  if (bracket == std::string_view::npos || text.back() != ']') {
    return error("must be NAME[BEGIN:END,...]");
  }
  TensorSlice slice{.tensor = std::string(text.substr(0, bracket))};
  GlobBudget budget;
  const absl::StatusOr<std::vector<int64_t>> found = FindTensors(slice.tensor, manifest, budget);
  if (!found.ok()) return error(std::string(found.status().message()));
  if (found->size() != 1) return error("matches several tensors");
  const std::vector<int64_t>& shape = manifest.tensor(found->front()).shape;

  const std::string inside(text.substr(bracket + 1, text.size() - bracket - 2));
  const std::vector<std::string> ranges = absl::StrSplit(inside, ',');
  if (ranges.size() > shape.size()) {
    return error(
        absl::StrCat("has ", ranges.size(), " ranges, the tensor ", shape.size(), " dimensions"));
  }
  for (size_t i = 0; i < shape.size(); ++i) {
    const std::string range = i < ranges.size() ? ranges[i] : ":";
    const std::vector<std::string> bounds = absl::StrSplit(range, ':');
    if (bounds.size() != 2) return error(absl::StrCat("\"", range, "\" must be BEGIN:END"));
    const std::optional<int64_t> begin = ParseBound(bounds[0], 0);
    const std::optional<int64_t> end = ParseBound(bounds[1], shape[i]);
    if (!begin.has_value() || !end.has_value() || *begin < 0 || *begin >= *end || *end > shape[i]) {
      return error(absl::StrCat("\"", range, "\" must be inside 0:", shape[i], ", and not empty"));
    }
    slice.offsets.push_back(*begin);
    slice.extents.push_back(*end - *begin);
  }
  return slice;
}

absl::Status Pull(const Session& session, const PullOptions& options) {
  Client::PullOptions request = options.request;
  if (!options.version.empty()) {
    EMA_ASSIGN_OR_RETURN(const VersionOrLabel wanted,
                         ParseVersionOrLabel(options.version, request.incarnation));
    request.version = wanted.id.version;
    request.label = wanted.label;
  }
  if (!options.dtype.empty()) {
    EMA_ASSIGN_OR_RETURN(request.selection.dtype, ParseDtype(options.dtype));
  }
  EMA_ASSIGN_OR_RETURN(request.selection.overflow, ParseOverflowPolicy(options.overflow));
  std::error_code ignored;
  const bool is_folder =
      options.output.back() == '/' || std::filesystem::is_directory(options.output, ignored);
  if (!is_folder) EMA_RETURN_IF_ERROR(CheckFile(options));
  // The pull retries for a long time, so an unreachable server is reported here.
  EMA_ASSIGN_OR_RETURN(const ModelInfo model,
                       session.client->GetModel(options.model, session.timeout));
  for (const std::string& text : options.slices) {
    EMA_ASSIGN_OR_RETURN(request.selection.slices.emplace_back(), ParseSlice(text, model.manifest));
  }
  Files files;
  std::string path = RealPath(options.output);
  if (is_folder) {
    EMA_ASSIGN_OR_RETURN(files, FilesBeside(session, options, model));
    const auto config = files.find(kConfigName);
    const std::string name =
        WeightsName(config != files.end() ? config->second : ReadConfig(options.output));
    EMA_RETURN_IF_ERROR(CheckFolder(options.output, name));
    path = JoinPath(options.output, name);
  }
  PulledFile file(path);
  int64_t total_bytes = 0;
  absl::StatusOr<PullInfo> info;
  {
    ProgressBar bar(!session.json);
    info = session.client->Pull(
        options.model, options.track, request,
        [&](const PullInfo& coming) -> absl::StatusOr<std::span<std::byte>> {
          if (is_folder) EMA_RETURN_IF_ERROR(MakeFolder(options.output));
          total_bytes = coming.total_bytes;
          // The same metadata as in the server's checkpoints; transformers requires "format".
          return file.Reserve(coming,
                              {{"format", "pt"},
                               {"ema.model", options.model},
                               {"ema.track", options.track},
                               {"ema.step", absl::StrCat(coming.version.step)},
                               {"ema.version", absl::StrCat(coming.version.number)},
                               {"ema.incarnation", absl::StrCat(coming.version.incarnation)}});
        },
        session.disk_timeout(), [&](int64_t done_bytes) { bar.Show(done_bytes, total_bytes); });
  }
  EMA_RETURN_IF_ERROR(info.status());
  // After the weights, so that a failed pull leaves the folder as it was.
  for (const auto& [name, bytes] : files) {
    EMA_RETURN_IF_ERROR(WriteFile(JoinPath(options.output, name), bytes));
  }
  EMA_RETURN_IF_ERROR(file.Commit());
  std::vector<std::string> beside;
  for (const auto& entry : files) beside.push_back(entry.first);
  return PrintResult(
      session.json,
      {{"file", file.path()},
       {"beside", beside},
       {"model", options.model},
       {"track", options.track},
       {"version", info->version},
       {"tensor_count", info->tensors.size()},
       {"total_bytes", info->total_bytes}},
      absl::StrCat(file.path(), ": version ", info->version.number, " (step ", info->version.step,
                   ") of ", options.model, "/", options.track, ", ", info->tensors.size(),
                   " tensors, ", FormatBytes(info->total_bytes),
                   beside.empty() ? "" : absl::StrCat(", and ", absl::StrJoin(beside, ", ")),
                   "\n"));
}

}  // namespace ema::cli
