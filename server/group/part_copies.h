// SPDX-License-Identifier: Apache-2.0
//
// Writes, exchanges and loads copies of partitions.
#ifndef EMA_SERVER_GROUP_PART_COPIES_H_
#define EMA_SERVER_GROUP_PART_COPIES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/v1/group.pb.h"
#include "server/base/log_event.h"
#include "server/core/model.h"
#include "server/core/snapshot.h"
#include "server/format/manifest_json.h"
#include "server/format/verify.h"
#include "server/group/copy_directory.h"
#include "server/group/hosted_models.h"
#include "server/group/hosted_partition.h"
#include "server/group/model_record.h"

namespace ema::group {

// One member's side of copies: the calls of GroupService about them, and the load of a partition
// from a copy. Thread-safe. Calls block on the disk, and on other members where they say so.
class PartCopies {
 public:
  // Both outlive this. `directory`: null without --copy-dir.
  PartCopies(HostedModels* hosted, CopyDirectory* directory, LogSink log)
      : hosted_(*hosted), directory_(directory), log_(std::move(log)) {}

  // --- Making a copy ---

  // Handles GroupService.WriteCopy for `model`, the partition with that index. If the version is
  // not published here yet, waits some seconds for it.
  absl::StatusOr<v1::WriteCopyResponse> Write(Model& model, int64_t partition,
                                              const v1::WriteCopyRequest& request);
  // The same on the home, which has pinned the version.
  absl::StatusOr<CheckpointManifest> WriteSnapshot(Model& model, int64_t partition,
                                                   const Snapshot& snapshot,
                                                   const v1::WriteCopyRequest& request);
  // On the home: writes the manifest of the model, of which `whole` has all tensors.
  absl::Status WriteManifest(const CopyId& copy, CheckpointManifest whole);
  // Handles GroupService.FetchCopy for `model`, that partition. Waits for another member.
  absl::Status Fetch(Model& model, const HostedPartition& partition,
                     const v1::FetchCopyRequest& request);
  // Handles GroupService.ReadCopy.
  absl::StatusOr<v1::ReadCopyResponse> Read(const v1::ReadCopyRequest& request) const;
  // Makes running calls of Fetch() end soon, and later ones fail.
  void Stop() { is_stopping_.store(true, std::memory_order_relaxed); }

  // --- Loading the copy with which an incarnation begins ---

  // Both functions use this member's own files. If these cannot be read, they are fetched from the
  // member of the next partition, and replaced. DATA_LOSS: that member does not have them either,
  // so the copy is lost; or they cannot be used here, and the model has a checkpoint. UNAVAILABLE:
  // that member does not answer, or is not in the registry. They block while they wait for it, and
  // call `pause` as VerifyCheckpoint() does. REQUIRES: record.BeginsWithCopy().
  //
  // The manifest of the model, without weights.
  absl::StatusOr<CheckpointManifest> LoadManifest(const std::string& model,
                                                  const ModelRecord& record, size_t partition,
                                                  const PauseHook& pause);
  // Makes the tensors of the partition the newest version of `model`. REQUIRES: nothing has been
  // committed.
  absl::Status LoadPart(const ModelRecord& record, size_t partition, Model& model,
                        const PauseHook& pause);

  // Removes the copies that no record of `models`, the cache of the registry, needs.
  absl::Status RemoveUnneeded(const std::map<std::string, ModelRecord>& models);

 private:
  absl::StatusOr<CopyDirectory*> GetDirectory() const;
  // OK, or an error that ends an exchange of files.
  absl::Status CheckMayContinue(const PauseHook& pause) const;
  // Reads a file of another member, and passes its bytes to `sink` in order.
  absl::Status ReadFrom(const std::string& address, const CopyFile& file,
                        absl::FunctionRef<absl::Status(std::string_view)> sink,
                        const PauseHook& pause);
  absl::StatusOr<std::string> ReadTextFrom(const std::string& address, const CopyFile& file,
                                           const PauseHook& pause);
  // Copies a file of another member, which must have that size.
  absl::Status FetchFile(const std::string& address, const CopyFile& file, int64_t file_bytes,
                         const PauseHook& pause);
  absl::Status FetchManifest(const std::string& address, const CopyId& copy,
                             const PauseHook& pause);
  absl::Status FetchPart(const std::string& address, const CopyId& copy, int64_t partition,
                         const PauseHook& pause);
  // Runs `load`; after an error runs `fetch` with the address of the member that also has the files
  // of `partition`, and `load` again.
  absl::Status LoadOrFetch(const std::string& model, const ModelRecord& record, size_t partition,
                           absl::FunctionRef<absl::Status()> load,
                           absl::FunctionRef<absl::Status(const std::string&)> fetch,
                           const PauseHook& pause);

  HostedModels& hosted_;
  CopyDirectory* const directory_;
  const LogSink log_;
  std::atomic<bool> is_stopping_ = false;  // Relaxed: ends a running call a moment later.
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_PART_COPIES_H_
