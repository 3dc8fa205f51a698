// SPDX-License-Identifier: Apache-2.0
//
// Which checkpoints of a model are removed after a save.
#ifndef EMA_SERVER_CHECKPOINT_RETENTION_H_
#define EMA_SERVER_CHECKPOINT_RETENTION_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/checkpoint/folder_files.h"
#include "server/format/checkpoint_name.h"
#include "server/format/label_file.h"

namespace ema {

// The checkpoints that retention keeps. Those with a KEEP file are kept, too, and are not counted.
struct RetentionRules {
  // How many of the newest whole checkpoints, and of the newest partial ones, are kept. Of the
  // abandoned ones only the newest is kept.
  int64_t keep_count = 1;
  // Checkpoints whose step is a multiple of this are kept. 0: none.
  int64_t keep_step_multiple = 0;
  // The versions with a label are kept.
  LabelMap labels;
  // The checkpoint that a restart would load is kept; all zero: none.
  CheckpointId latest;
  // The checkpoint of this name, which has just been saved, is kept.
  std::string_view saved_name;
};

// Returns the names of the checkpoints that `rules` do not keep: first the whole ones, then the
// partial ones, then the abandoned ones, the newest first of each kind. Removes nothing. Blocks on
// the disk. UNAVAILABLE: the disk failed.
absl::StatusOr<std::vector<std::string>> FindExpiredCheckpoints(const FolderFiles& files,
                                                                const RetentionRules& rules);

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_RETENTION_H_
