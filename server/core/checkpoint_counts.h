// SPDX-License-Identifier: Apache-2.0
//
// Numbers of a model's checkpoints, by state.
#ifndef EMA_SERVER_CORE_CHECKPOINT_COUNTS_H_
#define EMA_SERVER_CORE_CHECKPOINT_COUNTS_H_

#include <cstdint>

namespace ema {

struct CheckpointCounts {
  int64_t complete = 0;    // With all their files; also those that have only some tracks.
  int64_t unreadable = 0;  // Complete, but the disk failed when it was last read.
  int64_t failed = 0;      // The save or its label failed, and has not succeeded since.
  // Set aside because bytes are wrong or missing, label files included; also the newest one if its
  // folder is missing.
  int64_t corrupt = 0;
  int64_t abandoned = 0;  // Set aside because a crash left them newer than LATEST.
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_CHECKPOINT_COUNTS_H_
