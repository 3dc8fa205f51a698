// SPDX-License-Identifier: Apache-2.0
//
// The manifest of a checkpoint as the manifests of its parts: each part has consecutive tensors of
// all tracks, such as those of one partition of a model that is on several servers.
#ifndef EMA_SERVER_FORMAT_MANIFEST_PARTS_H_
#define EMA_SERVER_FORMAT_MANIFEST_PARTS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "server/format/manifest_json.h"

namespace ema {

// The manifest of the checkpoint that consists of `parts`, in their order: their tensors and files.
// The record's statistics are those of the first part. A frozen_digest is about all frozen tensors
// of one manifest, so several parts have none together. The indexes, the attached files and
// total_bytes are left to the caller. FAILED_PRECONDITION, MODEL_DIFFERS: the parts are of
// different versions, or have different tracks, states or settings, or have a tensor twice; the
// message names the partition and both values. REQUIRES: there is a part.
absl::StatusOr<CheckpointManifest> MergeManifests(std::vector<CheckpointManifest> parts);

// The part of `whole` with `tensor_count` tensors from number `first_tensor` on, for reading these
// only: its files are those of `whole`, which may have other tensors, too. It has neither indexes
// nor attached files, nor a frozen_digest unless it has all tensors. INVALID_ARGUMENT, BAD_REQUEST:
// there are no such tensors.
absl::StatusOr<CheckpointManifest> PartOf(const CheckpointManifest& whole, int64_t first_tensor,
                                          int64_t tensor_count);

}  // namespace ema

#endif  // EMA_SERVER_FORMAT_MANIFEST_PARTS_H_
