// SPDX-License-Identifier: Apache-2.0
//
// Where a trainer resumes.
#ifndef EMA_RESUME_POINT_H_
#define EMA_RESUME_POINT_H_

#include <cstdint>
#include <optional>

#include "ema/time.h"
#include "ema/version_id.h"

namespace ema {

// The position of a trainer that resumes from its own checkpoint.
struct ResumePoint {
  int64_t step = 0;
  // The version that belongs to the checkpoint, of that step or an earlier one. Absent: the version
  // that an uninterrupted run would have after `step`.
  std::optional<VersionId> version;
  // Training time at `step`. Lets the server check whether an update was due after the version's
  // step.
  std::optional<TrainingTime> time;
};

}  // namespace ema

#endif  // EMA_RESUME_POINT_H_
