// SPDX-License-Identifier: Apache-2.0
//
// The part of a save that concerns all servers of a model with several partitions.
#ifndef EMA_SERVER_CHECKPOINT_PARTITIONED_SAVES_H_
#define EMA_SERVER_CHECKPOINT_PARTITIONED_SAVES_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/manifest.h"
#include "ema/version.h"
#include "ema/version_id.h"
#include "server/checkpoint/checkpoint_writer.h"
#include "server/checkpoint/synthesis_plan.h"
#include "server/core/model.h"
#include "server/core/snapshot.h"
#include "server/format/manifest_json.h"

namespace ema {

// What a group's registry records about the checkpoints of one model.
struct RecordedCheckpoints {
  std::vector<VersionId> ids;  // The durable ones.
  // The current history: the last version in it of each incarnation that it has.
  std::vector<VersionId> history;

  bool Has(const VersionId& id) const { return std::find(ids.begin(), ids.end(), id) != ids.end(); }
  // False: the version has been discarded, by a rollback or a crash.
  bool IsInHistory(const VersionId& id) const {
    return std::any_of(history.begin(), history.end(), [&](const VersionId& last) {
      return last.incarnation == id.incarnation && id.version <= last.version;
    });
  }
};

// How the checkpoints of models on several servers are written, committed and read for synthesized
// averages; implemented by the group layer. `home`: partition 0 of the model, which this server
// has. Thread-safe. Calls block.
class PartitionedSaves {
 public:
  virtual ~PartitionedSaves() = default;

  // Makes every partition of the model write its files of the version `snapshot.record` into the
  // directory `path`, which exists (with its tracks' folders), and read them back, and merges them:
  // WritePart(), VerifyPart() and MergeParts(). Errors name the member.
  virtual absl::StatusOr<CheckpointManifest> Write(const std::string& path, Model& home,
                                                   const Snapshot& snapshot,
                                                   const WriteOptions& options) = 0;

  // Records a checkpoint in the registry, after it has its final name. Only then is it a durable
  // version. May be repeated, also with another `keep`. ABORTED, FENCED: the model has a newer
  // incarnation, so the checkpoint was not recorded. After any other error it may or may not have
  // been recorded.
  virtual absl::Status Commit(Model& home, const Version& record, int64_t total_bytes,
                              bool keep) = 0;

  // Includes all changes that this server has made. UNAVAILABLE, GROUP_DEGRADED: this server is not
  // a member of its group. UNAVAILABLE, REGISTRY_UNAVAILABLE. NOT_FOUND, MODEL_NOT_FOUND.
  virtual absl::StatusOr<RecordedCheckpoints> Recorded(const std::string& model) const = 0;

  // Removes a checkpoint from the registry, before its files are removed. OK if it is not there.
  // After an error the files stay. FAILED_PRECONDITION, CHECKPOINT_IN_USE: a crash would take the
  // model back to it.
  virtual absl::Status Remove(Model& home, const VersionId& id) = 0;

  // The manifest of the whole model.
  virtual absl::StatusOr<std::shared_ptr<const Manifest>> WholeManifest(const Model& home) = 0;

  // Makes every partition build its tensors of an average: SynthesizePart(). The caller keeps the
  // checkpoints that `order` names. Errors name the member; after an error some partitions may have
  // the average, which then cannot be pulled.
  virtual absl::Status Synthesize(Model& home, const SynthesisOrder& order) = 0;

  // Makes all partitions return to the checkpoint of version `id`, and fences the runs of `home`.
  // Closes `home`: each partition loads the checkpoint into a new Model. Release `home` soon,
  // because the new Model needs its memory. NOT_FOUND, CHECKPOINT_NOT_FOUND: the registry does not
  // have the checkpoint.
  virtual absl::Status RollBack(Model& home, const VersionId& id) = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_CHECKPOINT_PARTITIONED_SAVES_H_
