// SPDX-License-Identifier: Apache-2.0
#include "server/group/group_tracks.h"

#include "ema/internal/status_macros.h"
#include "server/core/track_table.h"
#include "server/rpc/convert_core.h"

namespace ema::group {
namespace {

absl::Status Validate(const TrackChanges& changes, const Manifest& whole) {
  if (!changes.put.empty()) EMA_RETURN_IF_ERROR(CheckTrackCount(changes.put.size()));
  GlobBudget budget;
  for (const TrackConfig& config : changes.put) {
    EMA_RETURN_IF_ERROR(ValidateTrack(config, whole, budget));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status UpdateGroupTracks(
    Model& home, HostedPartition& partition, const Manifest& whole,
    const v1::UpdateModelRequest& request,
    absl::FunctionRef<absl::Status(const v1::ProposeTracksRequest&, TracksCalls&)> start,
    absl::FunctionRef<void(const v1::ProposeTracksRequest&)> withdraw) {
  EMA_ASSIGN_OR_RETURN(const TrackChanges changes, ema::FromProto(request));
  EMA_RETURN_IF_ERROR(Validate(changes, whole));
  const TrackTable::State before = home.tracks().state();
  v1::ProposeTracksRequest proposal;
  proposal.set_model(home.config().name);
  proposal.set_incarnation(home.incarnation());
  proposal.set_revision(before.newest_change + 1);
  proposal.set_accepted_revision(before.accepted_change);
  *proposal.mutable_changes() = request;
  // First here: most refusals are the same on all servers.
  EMA_RETURN_IF_ERROR(ProposeTracks(home, proposal));
  TracksCalls calls(partition.partitions());
  absl::Status result = start(proposal, calls);
  if (result.ok()) {
    calls.EndOf(0)(v1::ProposeTracksResponse());
    result = calls.Wait().status();
  }
  if (result.ok()) {
    partition.SetTracksRevision(proposal.revision(), home.AcceptTracks(proposal.revision()));
    home.ApplyTracksInForce();
    return result;
  }
  home.WithdrawTracks(proposal.revision());
  proposal.set_withdraw(true);
  withdraw(proposal);
  return result;
}

absl::Status ProposeTracks(Model& partition, const v1::ProposeTracksRequest& request) {
  if (request.withdraw()) {
    partition.WithdrawTracks(request.revision());
    return absl::OkStatus();
  }
  EMA_ASSIGN_OR_RETURN(const TrackChanges changes, ema::FromProto(request.changes()));
  return partition.ProposeTracks(changes, request.revision(), request.accepted_revision());
}

}  // namespace ema::group
