// SPDX-License-Identifier: Apache-2.0
//
// Changes of the tracks of a model that is on several servers.
#ifndef EMA_SERVER_GROUP_GROUP_TRACKS_H_
#define EMA_SERVER_GROUP_GROUP_TRACKS_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "ema/manifest.h"
#include "ema/v1/group.pb.h"
#include "server/core/model.h"
#include "server/group/fan_out.h"
#include "server/group/hosted_partition.h"

namespace ema::group {

using TracksCalls = FanOut<v1::ProposeTracksResponse>;

// Changes the tracks of the whole model of which `home` is partition 0, as Model::UpdateTracks()
// does on one server: in all partitions, or in none. `start` sends the request to all other
// partitions, after setting the field that identifies the called process. After an error,
// `withdraw` sends them the withdrawal, which frees the memory of the change: it repeats that until
// they have answered. `whole`: the model's manifest. Blocks on the other servers, but not for the
// withdrawal. Errors as Model::UpdateTracks(), of `start` and of the calls. Not to be called for a
// model while a call for it runs.
absl::Status UpdateGroupTracks(
    Model& home, HostedPartition& partition, const Manifest& whole,
    const v1::UpdateModelRequest& request,
    absl::FunctionRef<absl::Status(const v1::ProposeTracksRequest&, TracksCalls&)> start,
    absl::FunctionRef<void(const v1::ProposeTracksRequest&)> withdraw);

// Handles GroupService.ProposeTracks for `partition`.
absl::Status ProposeTracks(Model& partition, const v1::ProposeTracksRequest& request);

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_GROUP_TRACKS_H_
