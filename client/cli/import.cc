// SPDX-License-Identifier: Apache-2.0
#include "client/cli/import.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cli/attached_files.h"
#include "client/cli/output.h"
#include "client/cli/progress.h"
#include "client/cli/weights_file.h"
#include "client/cpp/trainer/import_check.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::cli {
namespace {

bool CanPlan(absl::Span<const TrackConfig> tracks, const TrainingTime& now) {
  return std::all_of(tracks.begin(), tracks.end(), [&](const TrackConfig& track) {
    return PlanTrack(track, TrackState(), now).ok();
  });
}

// Has only the units that the tracks need, because every later push must have the same units.
TrainingTime TimeOf(int64_t step, absl::Span<const TrackConfig> tracks) {
  std::vector<TimeUnit> units;
  units.reserve(kTimeUnitCount);
  for (int i = 0; i < kTimeUnitCount; ++i) units.push_back(static_cast<TimeUnit>(i));
  const auto make = [step](const std::vector<TimeUnit>& of) {
    TrainingTime time;
    for (const TimeUnit unit : of) {
      const bool is_step = unit == TimeUnit::kBatch || unit == TimeUnit::kIteration;
      time.Set(unit, is_step ? static_cast<double>(step) : 0);
    }
    return time;
  };
  for (int i = 0; i < kTimeUnitCount; ++i) {
    std::vector<TimeUnit> fewer = units;
    std::erase(fewer, static_cast<TimeUnit>(i));
    if (CanPlan(tracks, make(fewer))) units = std::move(fewer);
  }
  return make(units);
}

}  // namespace

absl::Status Import(const Session& session, const ImportOptions& options) {
  const TrainingTime time = TimeOf(options.step, options.tracks);
  for (const TrackConfig& track : options.tracks) {
    EMA_RETURN_IF_ERROR(CheckCanContinueImport(track, time, options.updates));
  }
  EMA_ASSIGN_OR_RETURN(const WeightsFile file, WeightsFile::Open(options.from));
  EMA_ASSIGN_OR_RETURN(const Client::CreateModelResult made,
                       session.client->CreateModel(options.model, file.manifest(), options.tracks,
                                                   options.model_options, session.timeout));
  if (made.model.latest.has_value()) {
    return MakeError(absl::StatusCode::kAlreadyExists, ErrorReason::kModelDiffers,
                     absl::StrCat("model \"", options.model, "\" has version ",
                                  made.model.latest->number, " (step ", made.model.latest->step,
                                  ") already; an import must create the first version"));
  }
  if (std::error_code error; std::filesystem::is_directory(options.from, error)) {
    EMA_RETURN_IF_ERROR(AttachFiles(session, options.model, {options.from}).status());
  }
  absl::StatusOr<Version> version;
  {
    ProgressBar bar(!session.json);
    EMA_ASSIGN_OR_RETURN(WeightsFile::Weights weights, file.Read([&](int64_t done_bytes) {
      bar.Show(done_bytes, file.manifest().total_bytes());
      return !(session.is_interrupted && session.is_interrupted());
    }));
    EMA_ASSIGN_OR_RETURN(
        const std::unique_ptr<Run> run,
        session.client->OpenRun(options.model, {.imported_updates = options.updates},
                                session.timeout));
    version = run->Push(options.step, time, std::move(weights.tensors), session.disk_timeout());
  }
  EMA_RETURN_IF_ERROR(version.status());
  return PrintResult(
      session.json,
      {{"model", options.model},
       {"tensor_count", file.manifest().tensor_count()},
       {"total_bytes", file.manifest().total_bytes()},
       {"version", *version}},
      absl::StrCat("imported ", options.from, ": version ", version->number, " (step ",
                   version->step, ") of ", options.model, ", ", file.manifest().tensor_count(),
                   " tensors, ", FormatBytes(file.manifest().total_bytes()), "\n"));
}

}  // namespace ema::cli
