// SPDX-License-Identifier: Apache-2.0
//
// Small files that lie beside a model's weights in its checkpoints: config.json, a tokenizer.
#ifndef EMA_SERVER_CORE_ATTACHED_FILES_H_
#define EMA_SERVER_CORE_ATTACHED_FILES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "ema/attached_file.h"
#include "server/base/steady_wait.h"
#include "server/core/memory_budget.h"

namespace ema {

// Files that a model may receive at the same time. Readers do not see them until they are complete.
inline constexpr size_t kMaxUnfinishedFiles = 2;

// The files of one model. Thread-safe.
class AttachedFiles {
 public:
  // `budget` outlives this.
  explicit AttachedFiles(MemoryBudget* budget) : budget_(*budget) {}

  // Adds bytes [offset, offset + data.size()) of a file of `total_bytes`. Parts must arrive in
  // order; offset 0 starts over, and the last part attaches the file, replacing one of that name.
  // Sending a received part again is OK, unless its offset is 0. INVALID_ARGUMENT: BAD_NAME;
  // BAD_REQUEST: a bad size, or not the next part. RESOURCE_EXHAUSTED, MEMORY_BUDGET:
  // kMaxAttachedFiles, unfinished ones included, or no memory; TOO_MANY_CALLS: kMaxUnfinishedFiles
  // others. RESOURCE_EXHAUSTED discards the parts received so far, other errors keep them. No error
  // changes an attached file.
  absl::Status AddPart(const std::string& name, int64_t total_bytes, int64_t offset,
                       std::string_view data) ABSL_LOCKS_EXCLUDED(mu_);
  // Discards unfinished files that have received no part for `timeout`.
  void ExpireUnfinished(SteadyTime now, SteadyTime::duration timeout) ABSL_LOCKS_EXCLUDED(mu_);
  // Removes the file of that name, attached or unfinished. OK if there is none.
  void Remove(const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);

  struct Found {
    std::shared_ptr<const AttachedFile> file;
    uint32_t crc32c = 0;  // CRC32C of the file's bytes.
  };
  // NOT_FOUND, FILE_NOT_FOUND: no such file is attached; the message lists the attached ones.
  absl::StatusOr<Found> Find(const std::string& name) const ABSL_LOCKS_EXCLUDED(mu_);

  // All attached files, sorted by name.
  std::vector<std::shared_ptr<const AttachedFile>> files() const ABSL_LOCKS_EXCLUDED(mu_);
  // Grows with each change of files().
  int64_t revision() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // While a file is being replaced, both maps have an entry of its name.
  struct Held {
    std::shared_ptr<AttachedFile> file;
    uint32_t crc32c = 0;  // CRC32C of the bytes received so far.
    SteadyTime last_part_time;
    std::unique_ptr<MemoryBudget::Reservation> reservation;
  };
  using HeldFiles = std::map<std::string, Held>;

  MemoryBudget& budget_;
  mutable absl::Mutex mu_;
  HeldFiles attached_ ABSL_GUARDED_BY(mu_);
  HeldFiles unfinished_ ABSL_GUARDED_BY(mu_);
  int64_t revision_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_ATTACHED_FILES_H_
