// SPDX-License-Identifier: Apache-2.0
#include "client/cli/attached_files.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/output.h"
#include "client/cli/weights_file.h"
#include "ema/attached_file.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/format/file_system.h"

namespace ema::cli {
namespace {

bool DescribesModel(const std::string& name) {
  constexpr const char* kEnds[] = {".json", ".txt", ".model", ".jinja"};
  return ValidateAttachedName(name).ok() && !absl::EndsWithIgnoreCase(name, ".index.json") &&
         std::any_of(std::begin(kEnds), std::end(kEnds),
                     [&](const char* end) { return absl::EndsWithIgnoreCase(name, end); });
}

// The file at `path`, or the files of a folder that describe a model.
absl::StatusOr<std::vector<std::string>> FilesOf(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error) && !error) {
    return absl::NotFoundError(absl::StrCat(path, ": there is no such file or folder"));
  }
  if (!std::filesystem::is_directory(path, error)) return std::vector<std::string>{path};
  std::vector<std::string> files;
  for (std::filesystem::directory_iterator it(path, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code ignored;
    if (it->is_regular_file(ignored) && DescribesModel(it->path().filename().string())) {
      files.push_back(it->path().string());
    }
  }
  if (error) return absl::UnknownError(absl::StrCat(path, ": ", error.message()));
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

absl::StatusOr<std::map<std::string, std::string>> ReadDescribingFiles(
    const std::vector<std::string>& paths) {
  std::map<std::string, std::string> contents;
  for (const std::string& path : paths) {
    EMA_ASSIGN_OR_RETURN(const std::vector<std::string> files, FilesOf(path));
    for (const std::string& file : files) {
      absl::StatusOr<std::string> bytes =
          PosixFileSystem().ReadSmallFile(RealPath(file), kMaxAttachedFileBytes);
      if (!bytes.ok()) return FileError(file, bytes.status());
      contents[std::filesystem::path(file).filename().string()] = *std::move(bytes);
    }
  }
  return contents;
}

absl::StatusOr<std::vector<std::string>> AttachFiles(const Session& session,
                                                     const std::string& model,
                                                     const std::vector<std::string>& paths) {
  EMA_ASSIGN_OR_RETURN(const auto contents, ReadDescribingFiles(paths));
  std::vector<std::string> names;
  for (const auto& [name, bytes] : contents) {
    EMA_RETURN_IF_ERROR(session.client->AttachFile(model, name, bytes, session.timeout));
    names.push_back(name);
  }
  return names;
}

absl::Status AddFiles(const Session& session, const std::string& model,
                      const std::vector<std::string>& paths) {
  EMA_ASSIGN_OR_RETURN(const std::vector<std::string> names, AttachFiles(session, model, paths));
  return PrintResult(session.json, {{"model", model}, {"attached", names}},
                     absl::StrCat("attached to ", model, ", from the next checkpoint on: ",
                                  names.empty() ? "nothing" : absl::StrJoin(names, ", "), "\n"));
}

absl::Status RemoveAttachedFile(const Session& session, const std::string& model,
                                const std::string& name) {
  EMA_ASSIGN_OR_RETURN(const ModelInfo info, session.client->GetModel(model, session.timeout));
  if (std::none_of(info.attached_files.begin(), info.attached_files.end(),
                   [&](const ModelInfo::AttachedFile& file) { return file.name == name; })) {
    return MakeError(absl::StatusCode::kNotFound, ErrorReason::kFileNotFound,
                     absl::StrCat("no file \"", name, "\" is attached to ", model));
  }
  EMA_RETURN_IF_ERROR(session.client->RemoveAttachedFile(model, name, session.timeout));
  return PrintResult(
      session.json, {{"model", model}, {"removed", name}},
      absl::StrCat("removed ", name, " from ", model, ", from the next checkpoint on\n"));
}

}  // namespace ema::cli
