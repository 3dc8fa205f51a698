// SPDX-License-Identifier: Apache-2.0
//
// Pins a version that the home has published, on the server of another partition.
#ifndef EMA_SERVER_GROUP_PIN_PUBLISHED_H_
#define EMA_SERVER_GROUP_PIN_PUBLISHED_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "ema/version_id.h"
#include "server/core/model.h"
#include "server/core/snapshot.h"

namespace ema::group {

// Pins version `id` of a partition by `pin`, such as VersionHistory::Pin. If the version is not
// published here yet, waits some seconds for it. Errors as `pin`.
absl::StatusOr<SnapshotRef> PinPublished(
    Model& partition, const VersionId& id,
    absl::StatusOr<SnapshotRef> (VersionHistory::*pin)(int64_t version, int64_t incarnation));

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_PIN_PUBLISHED_H_
