// SPDX-License-Identifier: Apache-2.0
//
// What a Pull sends, whatever carries it.
#ifndef EMA_SERVER_RPC_PULL_HANDLER_H_
#define EMA_SERVER_RPC_PULL_HANDLER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ema/selection.h"
#include "ema/v1/ema_service.pb.h"
#include "ema/version_id.h"
#include "server/base/observer.h"
#include "server/core/checkpoints.h"
#include "server/core/memory_budget.h"
#include "server/core/model.h"
#include "server/core/model_store.h"
#include "server/core/reading.h"

namespace ema {

// One pull: header, chunks, trailer. Keeps the version pinned. For one thread at a time.
class PullHandler {
 public:
  // `waiting`: for long lists of tensors, while they wait for the disk. All outlive it.
  PullHandler(ModelStore* store, Checkpoints* checkpoints, MemoryBudget* waiting)
      : store_(store), checkpoints_(checkpoints), waiting_(waiting) {}

  // Errors as Pull in ema_service.proto. Does not block on the disk: opens what is in memory.
  absl::Status Open(const v1::PullRequest& request);
  // After Open(), and before all else: opens a version that is only on the disk, if that is what is
  // pulled. Errors likewise.
  absl::Status OpenStored();
  // True: OpenStored() or Next(), whichever comes next, blocks on the disk.
  bool needs_disk() const {
    return on_disk_.has_value() || (reading_ != nullptr && reading_->is_stored());
  }
  // True: Next() waits until a copy has come from the device.
  bool needs_device() const {
    return reading_ != nullptr && position_ < reading_->total_bytes() &&
           !reading_->IsAtHand(position_);
  }

  v1::PullHeader Header() const;
  struct Chunk {
    int64_t offset = 0;
    int64_t length_bytes = 0;
    std::vector<HostPiece> pieces;  // Valid while their owners and reading() are held.
  };
  // The next chunk; absent: all have been sent. Errors as Reading::Read().
  absl::StatusOr<std::optional<Chunk>> Next();
  // `digest`: CRC32C of the chunks' data.
  v1::PullTrailer Trailer(uint32_t digest) const;

  const std::shared_ptr<Reading>& reading() const { return reading_; }
  // The version that the pull pins in memory; nullopt: none.
  std::optional<VersionId> pinned_version() const {
    if (reading_ == nullptr || !model_->history().IsPinned(*reading_->snapshot()))
      return std::nullopt;
    return record_.id();
  }
  // What an observer is told of the pull, which has ended so.
  ServerObserver::PullEnd EndOf(const absl::Status& status, absl::Duration duration) const;
  // Lets the version go.
  void Close() { reading_.reset(); }

 private:
  // A version, and what of it is asked for; in `on_disk_`: it is to be read from the disk.
  struct Wanted {
    VersionId id;
    std::optional<int64_t> step;  // Instead: of this step, and not in memory.
    std::string track;
    Selection selection;
    std::unique_ptr<MemoryBudget::Reservation> memory;  // Of a long selection.
    absl::Status too_many_pins;                         // Not OK: it is in memory; because of this.
  };

  // Sets `reading_`, or `on_disk_`, unless there is nothing newer to read.
  absl::Status OpenReading(const v1::PullRequest& request);
  // Which version is asked for, if not by its step; all zero: the newest.
  absl::StatusOr<VersionId> FindVersion(const v1::PullRequest& request) const;
  // Sets `on_disk_`.
  absl::Status WaitForDisk(Wanted wanted);
  // Sets `reading_` if the version is in memory, else `on_disk_`.
  absl::Status OpenVersion(Wanted wanted);
  // OpenVersion() of the step in `on_disk_`, wherever it is.
  absl::Status FindStoredStep();
  // Sets `reading_`.
  absl::Status OpenFromDisk(Wanted wanted);
  // Goes on once `reading_` is known.
  absl::Status Begin();
  // Passes over chunks that the reader has.
  void SkipUnchanged();

  ModelStore* const store_;
  Checkpoints* const checkpoints_;
  MemoryBudget* const waiting_;
  std::shared_ptr<Model> model_;
  Version record_;
  std::optional<Wanted> on_disk_;        // Until it is open.
  std::shared_ptr<Reading> reading_;     // Null: the newest version is not newer.
  std::optional<int64_t> base_version_;  // The reader has what was the same then.
  int64_t offset_ = 0;                   // Where the reader wants to begin.
  int64_t position_ = 0;                 // In the reading's bytes: what is sent next.
  int64_t sent_bytes_ = 0;
  int64_t chunk_count_ = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_PULL_HANDLER_H_
