// SPDX-License-Identifier: Apache-2.0
//
// The part of Model that serves readers.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/core/known_versions.h"
#include "server/core/model.h"

namespace ema {

absl::StatusOr<std::shared_ptr<Reading>> Model::OpenReading(std::string_view track, int64_t version,
                                                            int64_t incarnation,
                                                            Selection selection) {
  if (SnapshotRef synthesized = FindSynthesized(track)) {
    const Version& record = synthesized->record;
    if (version != 0 && !VersionId{version, incarnation}.Names(record.id())) {
      return MakeError(
          absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
          absl::StrCat("version: ", version, " given, but \"", std::string(track),
                       "\" has been built as version ", record.number, " for step ", record.step));
    }
    const TrackSnapshot& only = synthesized->tracks[0];
    return readings_.Open(std::move(synthesized), only, selection);
  }
  absl::StatusOr<SnapshotRef> snapshot = history_.Pin(version, incarnation);
  if (!snapshot.ok()) {
    const ErrorReason reason = GetErrorReason(snapshot.status());
    // A version elsewhere may have the track.
    if (reason != ErrorReason::kVersionNotKept) EMA_RETURN_IF_ERROR(CheckTrack(track));
    if (reason == ErrorReason::kTooManyPins) history_.NotePinShortage();
    return snapshot.status();
  }
  EMA_ASSIGN_OR_RETURN(const TrackSnapshot* const found, FindTrack(**snapshot, track));
  return readings_.Open(*std::move(snapshot), *found, selection);
}

absl::StatusOr<const TrackSnapshot*> Model::FindTrack(const Snapshot& version,
                                                      std::string_view name) const {
  // A track that was removed is still in the versions that have it.
  if (const TrackSnapshot* const found = version.Find(name)) return found;
  EMA_RETURN_IF_ERROR(CheckTrack(name));
  return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNoVersion,
                   absl::StrCat("track \"", std::string(name), "\" has no value in version ",
                                version.record.number, " yet"));
}

absl::StatusOr<std::shared_ptr<Reading>> Model::ReadStored(SnapshotRef snapshot,
                                                           Selection selection) {
  EMA_RETURN_IF_ERROR(closed());
  const Snapshot* const raw = snapshot.get();
  // The reading needs what is the model's.
  SnapshotRef held(raw, [model = shared_from_this(), snapshot = std::move(snapshot)](
                            const Snapshot*) mutable { snapshot.reset(); });
  return readings_.Open(std::move(held), raw->tracks[0], selection);
}

std::shared_ptr<Reading> Model::FindStoredReading(const VersionId& id, std::string_view track,
                                                  const Selection& selection) {
  if (!closed().ok()) return nullptr;
  return readings_.FindStored(id, track, selection);
}

absl::StatusOr<std::optional<Version>> Model::NewestOf(std::string_view track) {
  if (FindSynthesized(track) != nullptr) return std::nullopt;
  EMA_RETURN_IF_ERROR(CheckTrack(track));
  EMA_RETURN_IF_ERROR(closed());
  return history_.latest();
}

absl::StatusOr<std::optional<VersionId>> Model::FindStep(std::string_view track, int64_t step) {
  if (const SnapshotRef synthesized = FindSynthesized(track)) {
    const Version& record = synthesized->record;
    if (record.step == step) return record.id();
    return MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
                     absl::StrCat("step: ", step, " given, but \"", std::string(track),
                                  "\" has been built for step ", record.step));
  }
  return history_.FindStep(step);
}

}  // namespace ema
