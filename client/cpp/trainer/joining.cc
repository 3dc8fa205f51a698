// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/trainer/joining.h"

#include <algorithm>
#include <utility>

#include "absl/container/fixed_array.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/gpu/pinned_ring.h"
#include "client/cpp/push/run_core.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/track.h"
#include "server/base/random_hex.h"

namespace ema::client_internal {
namespace {

// A model may have to be read from the server's disk.
constexpr absl::Duration kDiskTimeout = absl::Minutes(10);

absl::Status CheckOptions(const StepPusher::Options& options, TensorSet frozen,
                          const Manifest& manifest) {
  if (options.start_step.has_value() && options.resume.has_value()) {
    return BadRequest(absl::StrCat("start_step ", *options.start_step,
                                   " and resume are both given: resume says the step"));
  }
  if (options.start_step.value_or(0) < 0) {
    return BadRequest(absl::StrCat("start_step ", *options.start_step, ": must be 0 or more"));
  }
  if (options.max_outage < absl::ZeroDuration()) {
    return BadRequest(absl::StrCat("max_outage ", absl::FormatDuration(options.max_outage),
                                   ": must be 0 or more"));
  }
  EMA_RETURN_IF_ERROR(PinnedRing::CheckMaxStagingBytes(options.max_staging_bytes));
  if (options.launch_id.empty() && options.world_size > 1) {
    return BadRequest(absl::StrCat("launch_id is empty: with ", options.world_size,
                                   " ranks it must be given, the same to all of them"));
  }
  if (!frozen.empty() && static_cast<int64_t>(frozen.size()) != manifest.tensor_count()) {
    return BadRequest(absl::StrCat("frozen: has ", frozen.size(), " entries, but there are ",
                                   manifest.tensor_count(), " tensors"));
  }
  return absl::OkStatus();
}

// By tensor: no track has it.
std::vector<bool> IgnoredByAll(const Manifest& manifest, absl::Span<const TrackConfig> tracks) {
  std::vector<bool> ignored(manifest.tensor_count(), !tracks.empty());
  for (const TrackConfig& track : tracks) {
    const std::vector<TensorAction> actions = ActionsOf(track, manifest);
    for (size_t i = 0; i < actions.size(); ++i) {
      if (actions[i] != TensorAction::kIgnore) ignored[i] = false;
    }
  }
  return ignored;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Joining>> Joining::Make(Client& client, std::string_view model,
                                                       const Manifest& manifest, TensorSet frozen,
                                                       const StepPusher::Options& options) {
  EMA_RETURN_IF_ERROR(CheckOptions(options, frozen, manifest));
  for (const TrackConfig& track : options.tracks) {
    // Of what all ignore the server does not hear, so it cannot tell a misspelled rule.
    EMA_RETURN_IF_ERROR(CheckRulesMatch(track, manifest));
  }
  std::unique_ptr<Joining> joining(new Joining(client, model));
  const std::vector<bool> ignored = IgnoredByAll(manifest, options.tracks);
  std::vector<TensorSpec> specs;
  for (int64_t i = 0; i < manifest.tensor_count(); ++i) {
    if (ignored[i]) continue;
    const TensorSpec& spec = manifest.tensor(i);
    // A buffer comes from one rank, whose word about it is enough.
    if (!frozen.empty() && frozen[i] && !spec.is_buffer) {
      joining->frozen_.push_back(static_cast<int64_t>(specs.size()));
    }
    specs.push_back(spec);
    joining->given_indices_.push_back(i);
  }
  EMA_ASSIGN_OR_RETURN(joining->manifest_, Manifest::Create(std::move(specs)));
  for (const TrackConfig& track : options.tracks) {
    joining->tracks_.push_back(WithoutIdleRules(track, joining->manifest_));
  }

  const size_t count = joining->manifest_.tensor_count();
  absl::FixedArray<bool> is_buffer(count);
  absl::FixedArray<bool> is_frozen(count, false);
  for (size_t i = 0; i < count; ++i) is_buffer[i] = joining->manifest_.tensor(i).is_buffer;
  for (const int64_t i : joining->frozen_) is_frozen[i] = true;
  EMA_ASSIGN_OR_RETURN(RankShare share, EvenShare(joining->manifest_, is_buffer, is_frozen,
                                                  options.rank, options.world_size));
  Client::RunOptions& run = joining->run_options_;
  run.launch_id = options.launch_id;
  // Kept, so that joining again does not fence a newer run.
  if (run.launch_id.empty()) run.launch_id = RandomHex(4);
  run.rank = options.rank;
  run.world_size = options.world_size;
  run.shards = std::move(share.shards);
  run.frozen_shard_count = share.frozen_shard_count;
  run.wire_dtype = options.wire_dtype;
  run.max_staging_bytes = options.max_staging_bytes;
  run.rejoins = false;
  run.resume = options.resume;
  joining->model_options_ = options.model;
  joining->timeout_ = options.timeout;
  return joining;
}

absl::Status Joining::CreateModel(absl::Duration timeout) const {
  return client_.CreateModel(model_, manifest_, tracks_, model_options_, timeout).status();
}

absl::StatusOr<std::unique_ptr<Run>> Joining::Join() const {
  absl::Duration timeout = timeout_;
  if (run_options_.resume.has_value()) {
    timeout = std::max(timeout, kDiskTimeout);
    if (run_options_.resume->version.has_value()) {
      // A model that is gone cannot be resumed; it must not be made anew.
      EMA_RETURN_IF_ERROR(client_.GetModel(model_, timeout_).status());
    }
  }
  EMA_RETURN_IF_ERROR(CreateModel(timeout_));
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<Run> run, client_.OpenRun(model_, run_options_, timeout));
  EMA_RETURN_IF_ERROR(run->WaitReady(timeout));
  return run;
}

absl::StatusOr<std::unique_ptr<Run>> Joining::JoinAgain(int64_t last_run_epoch,
                                                        absl::Duration timeout) const {
  Client::RunOptions options = run_options_;
  options.resume.reset();
  options.last_run_epoch = last_run_epoch;
  absl::StatusOr<std::unique_ptr<Run>> run = client_.OpenRun(model_, options, timeout);
  if (GetErrorReason(run.status()) == ErrorReason::kModelNotFound && options.rank == 0) {
    // The server keeps no data, and was restarted.
    EMA_RETURN_IF_ERROR(CreateModel(timeout));
    run = client_.OpenRun(model_, options, timeout);
  }
  EMA_RETURN_IF_ERROR(run.status());
  EMA_RETURN_IF_ERROR((*run)->WaitReady(timeout));
  return run;
}

}  // namespace ema::client_internal
