// SPDX-License-Identifier: Apache-2.0
//
// Makes the messages of a Pull, for gRPC or a same-host lane.
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
  // Both outlive it.
  PullHandler(ModelStore* store, Checkpoints* checkpoints)
      : store_(store), checkpoints_(checkpoints) {}

  // Does not block on the disk: leaves a version that is not in memory to OpenStored(). Errors as
  // Pull in ema_service.proto.
  absl::Status Open(const v1::PullRequest& request);
  // To be called after Open(), before anything else: opens the version if it is only on the disk.
  // Errors as Open().
  absl::Status OpenStored();
  // True: OpenStored() or Next(), whichever comes next, blocks on the disk.
  bool needs_disk() const {
    return on_disk_.has_value() || (reading_ != nullptr && reading_->is_stored());
  }
  // Memory of the selection that waits for OpenStored().
  int64_t selection_bytes() const {
    return on_disk_.has_value() ? Reading::BytesOf(on_disk_->selection) : 0;
  }
  // True: Next() waits until a copy has come from the device.
  bool needs_device() const {
    return reading_ != nullptr && position_ < reading_->total_bytes() &&
           !reading_->CanReadWithoutWaiting(position_);
  }

  v1::PullHeader Header() const;
  struct Chunk {
    int64_t offset = 0;
    int64_t length_bytes = 0;
    std::vector<HostPiece> pieces;  // Valid while their owners and reading() are held.
  };
  // The next chunk; absent: all have been sent. To be called once the header has been sent. Errors
  // as Reading::Read().
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
  // The event that reports a pull which has ended with `status`.
  ServerObserver::PullEnd EndOf(const absl::Status& status, absl::Duration duration) const;
  // Releases the version.
  void Close() {
    header_memory_.reset();
    reading_.reset();
  }

 private:
  // A version, and the part of it that is to be sent.
  struct Wanted {
    VersionId id;
    std::optional<int64_t> step;  // Instead of `id`: find the version at this step on the disk.
    std::string track;
    Selection selection;
    absl::Status too_many_pins;  // Not OK: the version is in memory, but cannot be pinned.
  };

  // Sets `reading_` or `on_disk_`, unless the reader has the newest version.
  absl::Status OpenReading(const v1::PullRequest& request);
  // The version that the request names other than by its step. All zero: the newest.
  absl::StatusOr<VersionId> FindVersion(const v1::PullRequest& request) const;
  // Sets `reading_` if the version is in memory, else `on_disk_`.
  absl::Status OpenVersion(Wanted wanted);
  // Calls OpenVersion() for the step in `on_disk_`.
  absl::Status FindStoredStep();
  // Sets `reading_`.
  absl::Status OpenFromDisk(Wanted wanted);
  // Continues once `reading_` is known.
  absl::Status Begin();
  // Skips chunks that the reader has.
  void SkipUnchanged();

  ModelStore* const store_;
  Checkpoints* const checkpoints_;
  std::shared_ptr<Model> model_;
  Version record_;
  std::optional<Wanted> on_disk_;     // For OpenStored().
  std::shared_ptr<Reading> reading_;  // Null: the reader has the newest version already.
  // Until the header has been sent. Null: it is small.
  std::unique_ptr<MemoryBudget::Reservation> header_memory_;
  std::optional<int64_t> base_version_;  // The reader has the chunks that are unchanged since.
  int64_t offset_ = 0;                   // Where the reader wants to begin.
  int64_t position_ = 0;                 // In the reading's bytes: the next to be sent.
  int64_t sent_bytes_ = 0;
  int64_t chunk_count_ = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_PULL_HANDLER_H_
