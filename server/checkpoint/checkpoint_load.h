// SPDX-License-Identifier: Apache-2.0
//
// Loads models from their checkpoints when a server starts.
#ifndef EMA_SERVER_CHECKPOINT_CHECKPOINT_LOAD_H_
#define EMA_SERVER_CHECKPOINT_CHECKPOINT_LOAD_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "ema/checkpoint_info.h"
#include "server/checkpoint/checkpoint_folder.h"
#include "server/checkpoint/data_directory.h"
#include "server/checkpoint/folder_files.h"
#include "server/core/model.h"
#include "server/core/model_store.h"
#include "server/format/file_system.h"
#include "server/format/manifest_json.h"

namespace ema {

struct LoadReport {
  struct Loaded {
    std::string model;
    std::string checkpoint;
    Version record;
    int64_t total_bytes = 0;
  };
  std::vector<Loaded> loaded;  // By model.
  // Corrupt checkpoints that were set aside. A model that is listed here but not in `loaded` had no
  // good one left.
  struct CorruptCheckpoint {
    std::string model;
    std::string checkpoint;
    absl::Status problem;
  };
  std::vector<CorruptCheckpoint> corrupt;
  // Models, and the new names of checkpoints that a crash has left newer than LATEST.
  std::vector<std::pair<std::string, std::string>> abandoned;
  // Checkpoints that LATEST names and that are neither there nor set aside, so they were removed
  // from outside. They are listed, as bad ones, until they are deleted.
  struct Missing {
    std::string model;
    std::string checkpoint;
    std::string loaded;  // The one loaded in its place; empty: none.
  };
  std::vector<Missing> missing;
  // Folders that have a manifest.json but not the name of a checkpoint. They are ignored.
  struct Misnamed {
    std::string model;
    std::string folder;
    std::string expected;  // The name that it should have; empty: unreadable or partial.
  };
  std::vector<Misnamed> misnamed;
  // Models, and labels whose version has no good checkpoint.
  std::vector<std::pair<std::string, CheckpointLabel>> labels_without_checkpoint;
  // Models that may have lost labels because the file was corrupt, and CheckpointIndex's
  // lost_labels().
  std::vector<std::pair<std::string, absl::Status>> lost_labels;
  // Models that have checkpoints and no good one, and the error of creating such a model:
  // FAILED_PRECONDITION, ALL_CHECKPOINTS_CORRUPT.
  std::vector<std::pair<std::string, absl::Status>> all_corrupt;
};

// Creates the model of `folder` in `models` and loads its newest good checkpoint, verifying every
// byte: the one that LATEST names, else the newest by name. Bad checkpoints are set aside and the
// next older one is tried; a model without a good one is not created. Adds to `report`.
// A corrupt checkpoint is not an error of this call; any other failure to read one is, so that no
// model silently starts from scratch. The message names model and checkpoint. FAILED_PRECONDITION:
// written by a newer server. RESOURCE_EXHAUSTED: the model does not fit. UNAVAILABLE: the disk
// failed. Waits for the disk.
absl::Status LoadModel(DataDirectory& data, CheckpointFolder& folder, ModelStore& models,
                       LoadReport& report);

// --- Parts of LoadModel(), also for a model on several servers ---

// Attaches the files of the checkpoint at `path` to `model`. Errors as ReadAttachedFiles() and
// AttachedFiles::AddPart().
absl::Status LoadAttachedFiles(FileSystem& file_system, const std::string& path,
                               const CheckpointManifest& checkpoint, Model& model);
// Sets the model's kept time to that of its newest checkpoint with a KEEP file, ignoring those of
// later steps than the model's: a rollback has discarded these. REQUIRES: the model has a version.
absl::Status RestoreKeptTime(const FolderFiles& files, Model& model);

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_CHECKPOINT_LOAD_H_
