// SPDX-License-Identifier: Apache-2.0
#include "server/core/attached_files.h"

#include <algorithm>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/manifest.h"
#include "server/base/crc32c.h"
#include "server/base/quoted.h"
#include "server/base/steady_wait.h"

namespace ema {
namespace {

// Others need seconds for theirs.
constexpr absl::Duration kUnfinishedRetryDelay = absl::Seconds(1);

absl::Status BadPart(const std::string& name, const std::string& problem) {
  return BadRequest(absl::StrCat("file \"", name, "\": ", problem));
}

bool HasPart(const AttachedFile& file, int64_t offset, std::string_view data) {
  return file.bytes.compare(static_cast<size_t>(offset), data.size(), data) == 0;
}

}  // namespace

absl::Status AttachedFiles::AddPart(const std::string& name, int64_t total_bytes, int64_t offset,
                                    std::string_view data) {
  EMA_RETURN_IF_ERROR(ValidateAttachedName(name));
  if (total_bytes < 0 || total_bytes > kMaxAttachedFileBytes) {
    return BadPart(
        name, absl::StrCat("total_bytes ", total_bytes, ", expected 0 to ", kMaxAttachedFileBytes));
  }
  const int64_t size = static_cast<int64_t>(data.size());
  if (offset < 0 || offset > total_bytes || size > total_bytes - offset ||
      (size == 0 && total_bytes > 0)) {
    return BadPart(name, absl::StrCat("a part of ", size, " bytes at offset ", offset,
                                      " is empty or not inside its ", total_bytes, " bytes"));
  }
  absl::MutexLock lock(&mu_);
  auto it = unfinished_.find(name);
  if (offset == 0) {
    if (it != unfinished_.end()) unfinished_.erase(it);
    if (!attached_.contains(name) && attached_.size() + unfinished_.size() >= kMaxAttachedFiles) {
      return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kMemoryBudget,
                       absl::StrCat("file \"", name, "\": the model has ", kMaxAttachedFiles,
                                    " attached files, the maximum"));
    }
    if (size < total_bytes && unfinished_.size() >= kMaxUnfinishedFiles) {
      return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyCalls,
                       absl::StrCat("file \"", name, "\": ", kMaxUnfinishedFiles,
                                    " other files of the model are incomplete, the maximum"),
                       kUnfinishedRetryDelay);
    }
    Held held{.file = std::make_shared<AttachedFile>()};
    EMA_ASSIGN_OR_RETURN(held.reservation,
                         budget_.Reserve(absl::StrCat("file \"", name, "\""), total_bytes));
    held.file->name = name;
    held.file->bytes.reserve(static_cast<size_t>(total_bytes));
    it = unfinished_.emplace(name, std::move(held)).first;
  }
  if (it == unfinished_.end() || it->second.reservation->bytes() != total_bytes) {
    // Perhaps the answer to the last part was lost.
    const auto done = attached_.find(name);
    if (done != attached_.end() &&
        static_cast<int64_t>(done->second.file->bytes.size()) == total_bytes &&
        HasPart(*done->second.file, offset, data)) {
      return absl::OkStatus();
    }
    return BadPart(name, absl::StrCat("a part at offset ", offset, " of ", total_bytes,
                                      " bytes, expected the first part of such a file"));
  }
  std::string& bytes = it->second.file->bytes;
  const int64_t received = static_cast<int64_t>(bytes.size());
  if (offset < received && size <= received - offset && HasPart(*it->second.file, offset, data)) {
    return absl::OkStatus();
  }
  if (offset != received) {
    return BadPart(name,
                   absl::StrCat("a part at offset ", offset, ", expected the one at ", received));
  }
  bytes.append(data);
  it->second.last_part_time = SteadyNow();
  it->second.crc32c = Crc32c(it->second.crc32c, std::as_bytes(std::span(data)));
  if (offset + size == total_bytes) {
    Held& attached = attached_[name];
    if (attached.file == nullptr || attached.file->bytes != bytes) ++revision_;
    attached = std::move(it->second);
    unfinished_.erase(it);
  }
  return absl::OkStatus();
}

void AttachedFiles::ExpireUnfinished(SteadyTime now, SteadyTime::duration timeout) {
  absl::MutexLock lock(&mu_);
  std::erase_if(unfinished_,
                [&](const auto& entry) { return now - entry.second.last_part_time > timeout; });
}

void AttachedFiles::Remove(const std::string& name) {
  absl::MutexLock lock(&mu_);
  if (attached_.erase(name) > 0) ++revision_;
  unfinished_.erase(name);
}

int64_t AttachedFiles::revision() const {
  absl::MutexLock lock(&mu_);
  return revision_;
}

absl::StatusOr<AttachedFiles::Found> AttachedFiles::Find(const std::string& name) const {
  absl::MutexLock lock(&mu_);
  const auto it = attached_.find(name);
  if (it != attached_.end()) return Found{it->second.file, it->second.crc32c};
  const std::string names = absl::StrJoin(attached_, ", ", [](std::string* out, const auto& entry) {
    absl::StrAppend(out, entry.first);
  });
  return MakeError(absl::StatusCode::kNotFound, ErrorReason::kFileNotFound,
                   absl::StrCat("no file ", Quoted(name),
                                " is attached; attached files: ", names.empty() ? "none" : names));
}

std::vector<std::shared_ptr<const AttachedFile>> AttachedFiles::files() const {
  absl::MutexLock lock(&mu_);
  std::vector<std::shared_ptr<const AttachedFile>> files;
  for (const auto& [name, held] : attached_) files.push_back(held.file);
  return files;
}

}  // namespace ema
