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

// Those that are coming, which nobody sees.
inline constexpr size_t kMaxUnfinishedFiles = 2;

// The files of one model. Thread-safe.
class AttachedFiles {
 public:
  // `budget` outlives this.
  explicit AttachedFiles(MemoryBudget* budget) : budget_(*budget) {}

  // Bytes [offset, offset + data.size()) of a file of `total_bytes`. Parts come in order; offset 0
  // begins anew, and the last one attaches the file, in the place of one of its name. The last part
  // again is OK. INVALID_ARGUMENT: BAD_NAME; BAD_REQUEST: a size, or another part than the next.
  // RESOURCE_EXHAUSTED, MEMORY_BUDGET: kMaxAttachedFiles, unfinished ones among them, or no memory;
  // TOO_MANY_CALLS: kMaxUnfinishedFiles others. After an error of offset 0 the file is as it was
  // attached before; else what has come of it is kept.
  absl::Status AddPart(const std::string& name, int64_t total_bytes, int64_t offset,
                       std::string_view data) ABSL_LOCKS_EXCLUDED(mu_);
  // Forgets unfinished files of which no part has come for `timeout`.
  void ExpireUnfinished(SteadyTime now, SteadyTime::duration timeout) ABSL_LOCKS_EXCLUDED(mu_);
  // One that is not there is OK.
  void Remove(const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);

  struct Found {
    std::shared_ptr<const AttachedFile> file;
    uint32_t crc32c = 0;  // Of its bytes.
  };
  // NOT_FOUND, FILE_NOT_FOUND: none of that name is attached; lists those that are.
  absl::StatusOr<Found> Find(const std::string& name) const ABSL_LOCKS_EXCLUDED(mu_);

  // By name.
  std::vector<std::shared_ptr<const AttachedFile>> files() const ABSL_LOCKS_EXCLUDED(mu_);
  // Grows with each change of that.
  int64_t revision() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // The same file is `attached` and `unfinished`, once each, while a new one comes.
  struct Held {
    std::shared_ptr<AttachedFile> file;
    uint32_t crc32c = 0;  // Of what has come.
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
