// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/checkpoint_index.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"

namespace ema {
namespace {

absl::Status SetAsideEarlier() {
  return MakeError(absl::StatusCode::kDataLoss, ErrorReason::kCheckpointCorrupt,
                   "it was set aside by an earlier server");
}

absl::Status Abandoned() {
  return MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
                   "a crash left it newer than LATEST, and training continued from the version "
                   "that LATEST named");
}

absl::Status Missing() {
  return MakeError(
      absl::StatusCode::kDataLoss, ErrorReason::kCheckpointCorrupt,
      "it is missing: LATEST named it when the server started, but the folder did not exist");
}

absl::Status UnknownLabel(std::string_view model_name, std::string_view label,
                          const LabelMap& labels) {
  constexpr size_t kListed = 16;
  std::vector<std::string> names;
  for (const auto& [name, known] : labels) {
    if (names.size() < kListed) names.push_back(absl::StrCat("\"", name, "\""));
  }
  return MakeError(
      absl::StatusCode::kNotFound, ErrorReason::kLabelNotFound,
      absl::StrCat("model \"", std::string(model_name), "\" has no label \"", std::string(label),
                   "\"; it has ", labels.empty() ? "none" : absl::StrJoin(names, ", "),
                   labels.size() > kListed ? ", ..." : ""));
}

}  // namespace

CheckpointEntry::Details DetailsOf(const CheckpointManifest& checkpoint) {
  CheckpointEntry::Details details{.commit_time = checkpoint.record.commit_time,
                                   .total_bytes = checkpoint.total_bytes};
  for (const CheckpointTrack& track : checkpoint.tracks) {
    if (track.weights.has_value()) details.tracks.push_back(track.config.name);
  }
  return details;
}

absl::Status VersionGoneError(const CheckpointLabel& label) {
  return MakeError(
      absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
      absl::StrCat("label \"", label.name, "\": version ", label.id.version, " of incarnation ",
                   label.id.incarnation, ", step ", label.step, ", is not on the disk"));
}

bool CheckpointIndex::is_current() const {
  absl::MutexLock lock(&mu_);
  return is_current_;
}

void CheckpointIndex::Invalidate() {
  absl::MutexLock lock(&mu_);
  is_current_ = false;
}

void CheckpointIndex::Replace(const std::vector<DirectoryEntry>& listing, LabelMap labels,
                              const absl::Status& lost_labels) {
  absl::MutexLock lock(&mu_);
  labels_ = std::move(labels);
  // They stay lost until the file that was set aside has been deleted.
  if (!lost_labels.ok()) lost_labels_ = lost_labels;
  Entries entries;
  for (const DirectoryEntry& listed : listing) {
    if (IsSetAsideLabelFile(listed.name)) {
      entries.emplace(listed.name, CheckpointEntry{.name = listed.name, .problem = lost_labels_});
    }
    if (!listed.is_directory) continue;
    CheckpointEntry entry{.name = listed.name};
    std::optional<StoredName> name = ParseStoredName(listed.name);
    if (!name.has_value()) {
      name = ParseSetAsideName(listed.name);
      if (!name.has_value()) continue;
      entry.problem = listed.name.starts_with(kAbandonedPrefix) ? Abandoned() : SetAsideEarlier();
    }
    if (missing_.has_value() && listed.name == CheckpointName(*missing_)) {
      missing_.reset();  // It has been put back.
    } else if (const auto known = entries_.find(listed.name); known != entries_.end()) {
      entry = known->second;
    }
    entry.id = name->id;
    entry.is_partial = name->is_partial;
    entries.emplace(listed.name, std::move(entry));
  }
  if (missing_.has_value()) {
    const std::string name = CheckpointName(*missing_);
    entries.emplace(name, CheckpointEntry{.name = name, .id = *missing_, .problem = Missing()});
  }
  entries_ = std::move(entries);
  is_current_ = true;
}

void CheckpointIndex::Clear() {
  absl::MutexLock lock(&mu_);
  entries_.clear();
  labels_.clear();
  lost_labels_ = absl::OkStatus();
  missing_.reset();
  is_current_ = true;
}

std::vector<CheckpointEntry> CheckpointIndex::All() const {
  std::vector<CheckpointEntry> all;
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [name, entry] : entries_) all.push_back(entry);
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const auto& a, const auto& b) { return a.id > b.id; });
  return all;
}

std::optional<CheckpointEntry> CheckpointIndex::Find(std::string_view name) const {
  absl::MutexLock lock(&mu_);
  const auto it = entries_.find(name);
  return it != entries_.end() ? std::optional(it->second) : std::nullopt;
}

std::optional<CheckpointCounts> CheckpointIndex::Count() const {
  absl::MutexLock lock(&mu_);
  if (entries_.empty()) return std::nullopt;
  CheckpointCounts counts;
  for (const auto& [name, entry] : entries_) {
    ++(!entry.read_error.ok()               ? counts.unreadable
       : entry.problem.ok()                 ? counts.complete
       : name.starts_with(kAbandonedPrefix) ? counts.abandoned
                                            : counts.corrupt);
  }
  return counts;
}

void CheckpointIndex::Put(CheckpointEntry entry) {
  absl::MutexLock lock(&mu_);
  std::string name = entry.name;
  entries_.insert_or_assign(std::move(name), std::move(entry));
}

void CheckpointIndex::Erase(std::string_view name) {
  absl::MutexLock lock(&mu_);
  if (const auto it = entries_.find(name); it != entries_.end()) entries_.erase(it);
}

void CheckpointIndex::SetDetails(std::string_view name, const CheckpointEntry::Details& details) {
  absl::MutexLock lock(&mu_);
  if (const auto it = entries_.find(name); it != entries_.end()) it->second.details = details;
}

bool CheckpointIndex::SetUnread(std::string_view name, const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  const auto it = entries_.find(name);
  if (it == entries_.end() || !it->second.problem.ok()) return false;
  it->second.read_error = status;
  return true;
}

std::optional<CheckpointId> CheckpointIndex::missing() const {
  absl::MutexLock lock(&mu_);
  return missing_;
}

void CheckpointIndex::SetMissing(const CheckpointId& id) {
  absl::MutexLock lock(&mu_);
  missing_ = id;
  const std::string name = CheckpointName(id);
  entries_[name] = {.name = name, .id = id, .problem = Missing()};
}

void CheckpointIndex::ForgetMissing(const CheckpointId& id) {
  absl::MutexLock lock(&mu_);
  if (missing_ == id) missing_.reset();
}

// --- Readers ---

std::optional<CheckpointEntry> CheckpointIndex::Hold(std::string_view name) {
  absl::MutexLock lock(&mu_);
  const auto it = entries_.find(name);
  if (it == entries_.end() || !it->second.problem.ok()) return std::nullopt;
  ++held_[it->first];
  return it->second;
}

void CheckpointIndex::HoldAll(const std::vector<std::string>& names) {
  absl::MutexLock lock(&mu_);
  for (const std::string& name : names) ++held_[name];
}

void CheckpointIndex::Release(const std::vector<std::string>& names) {
  absl::MutexLock lock(&mu_);
  for (const std::string& name : names) {
    const auto it = held_.find(name);
    if (--it->second == 0) held_.erase(it);
  }
}

bool CheckpointIndex::is_held(std::string_view name) const {
  absl::MutexLock lock(&mu_);
  return held_.contains(name);
}

bool CheckpointIndex::EraseUnlessHeld(std::string_view name,
                                      std::optional<CheckpointEntry>* taken) {
  absl::MutexLock lock(&mu_);
  if (held_.contains(name)) return false;
  const auto it = entries_.find(name);
  if (it == entries_.end()) return true;
  if (taken != nullptr) *taken = std::move(it->second);
  entries_.erase(it);
  return true;
}

// --- Labels ---

LabelMap CheckpointIndex::labels() const {
  absl::MutexLock lock(&mu_);
  return labels_;
}

void CheckpointIndex::SetLabels(LabelMap labels) {
  absl::MutexLock lock(&mu_);
  labels_ = std::move(labels);
}

absl::StatusOr<FoundLabel> CheckpointIndex::FindLabel(std::string_view label) const {
  absl::MutexLock lock(&mu_);
  const auto it = labels_.find(label);
  if (it == labels_.end()) return UnknownLabel(model_name_, label, labels_);
  FoundLabel found{.label = it->second, .checkpoint = VersionGoneError(it->second)};
  for (const auto& [name, entry] : entries_) {
    if (entry.is_partial || entry.id.version_id() != found.label.id) continue;
    found.checkpoint = entry.problem;
    if (entry.problem.ok()) break;
  }
  return found;
}

absl::Status CheckpointIndex::lost_labels() const {
  absl::MutexLock lock(&mu_);
  return lost_labels_;
}

void CheckpointIndex::ClearLostLabelsIfDeleted() {
  absl::MutexLock lock(&mu_);
  if (std::none_of(entries_.begin(), entries_.end(),
                   [](const auto& entry) { return IsSetAsideLabelFile(entry.first); })) {
    lost_labels_ = absl::OkStatus();
  }
}

}  // namespace ema
