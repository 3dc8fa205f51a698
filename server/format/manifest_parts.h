// SPDX-License-Identifier: Apache-2.0
//
// The manifest of a checkpoint as the manifests of its parts: each part has consecutive tensors of
// all tracks, such as those of one partition of a model that is on several servers.
#ifndef EMA_SERVER_FORMAT_MANIFEST_PARTS_H_
#define EMA_SERVER_FORMAT_MANIFEST_PARTS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "ema/manifest.h"
#include "server/format/manifest_json.h"

namespace ema {

// Merges `parts` into the manifest of one checkpoint, with their tensors and files in their order.
// The record's statistics are those of the first part. A frozen_digest covers all frozen tensors of
// one manifest and cannot be merged, so the result of several parts has none. The caller adds the
// indexes, the attached files and total_bytes. FAILED_PRECONDITION, MODEL_DIFFERS: the parts are of
// different versions, or have different tracks, states or settings, or have a tensor twice; the
// message names the partition and both values. REQUIRES: there is a part.
absl::StatusOr<CheckpointManifest> MergeManifests(std::vector<CheckpointManifest> parts);

// The manifest of `tensor_count` tensors of `whole`, beginning with `first_tensor`.
// INVALID_ARGUMENT, BAD_REQUEST: `whole` does not have these tensors.
absl::StatusOr<Manifest> SliceManifest(const Manifest& whole, int64_t first_tensor,
                                       int64_t tensor_count);

// A manifest for reading only `tensor_count` tensors of `whole`, beginning with `first_tensor`. It
// names all files of `whole`, so these may also have other tensors. It has no indexes and no
// attached files, and a frozen_digest only if it has all tensors. Errors as SliceManifest().
absl::StatusOr<CheckpointManifest> PartOf(const CheckpointManifest& whole, int64_t first_tensor,
                                          int64_t tensor_count);

}  // namespace ema

#endif  // EMA_SERVER_FORMAT_MANIFEST_PARTS_H_
