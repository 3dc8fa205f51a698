// SPDX-License-Identifier: Apache-2.0
//
// How many checkpoints a model has, by how they stand.
#ifndef EMA_SERVER_CORE_CHECKPOINT_COUNTS_H_
#define EMA_SERVER_CORE_CHECKPOINT_COUNTS_H_

#include <cstdint>

namespace ema {

struct CheckpointCounts {
  int64_t complete = 0;    // Those of some tracks, too.
  int64_t unreadable = 0;  // The same, but when it was last read, the disk failed.
  int64_t failed = 0;      // Could not be saved, or not with their labels, and have not been since.
  // Set aside because a byte is wrong or missing, files of labels among them; and the newest, if it
  // has gone as a whole.
  int64_t corrupt = 0;
  int64_t abandoned = 0;  // Set aside because a crash had left them newer than LATEST.
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_CHECKPOINT_COUNTS_H_
