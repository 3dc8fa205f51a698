// SPDX-License-Identifier: Apache-2.0
//
// A version on a disk that is none.
#ifndef EMA_TESTS_TESTUTIL_FAKE_STORED_TRACK_H_
#define EMA_TESTS_TESTUTIL_FAKE_STORED_TRACK_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "ema/internal/status_macros.h"
#include "server/core/snapshot.h"
#include "server/device/device.h"

namespace ema {

// Gives its bytes as a bad disk might: in pieces of an odd size, which cut elements, at odd
// addresses, each with an owner of its own. Thread-safe.
class FakeStoredTrack final : public StoredTrack {
 public:
  // Called before each read, with its range; may block, or fail.
  using OnRead = std::function<absl::Status(int64_t offset, int64_t length_bytes)>;

  explicit FakeStoredTrack(std::vector<std::byte> bytes, OnRead on_read = nullptr)
      : bytes_(std::move(bytes)), on_read_(std::move(on_read)) {}

  absl::StatusOr<std::vector<HostPiece>> Read(int64_t offset, int64_t length_bytes) override {
    constexpr int64_t kPieceBytes = 65'537;
    ++read_count_;
    if (on_read_) EMA_RETURN_IF_ERROR(on_read_(offset, length_bytes));
    std::vector<HostPiece> pieces;
    for (const int64_t end = offset + length_bytes; offset < end;) {
      const int64_t n = std::min(kPieceBytes, end - offset);
      const auto memory = std::make_shared<std::vector<std::byte>>(n + 1);
      std::copy_n(bytes_.begin() + offset, n, memory->begin() + 1);
      pieces.push_back({std::shared_ptr<const std::byte>(memory, memory->data()),
                        std::span(*memory).subspan(1)});
      offset += n;
    }
    return pieces;
  }

  int64_t read_count() const { return read_count_.load(); }

 private:
  const std::vector<std::byte> bytes_;
  const OnRead on_read_;
  std::atomic<int64_t> read_count_ = 0;
};

// All bytes of a track that is in blocks.
inline std::vector<std::byte> BytesOfBlocks(Device& device, const TrackSnapshot& track) {
  std::vector<std::byte> bytes;
  const auto pieces =
      ReadBlocks(device, *track.track, track.blocks, 0, track.track->layout().total_bytes());
  for (const HostPiece& piece : *pieces) {
    bytes.insert(bytes.end(), piece.bytes.begin(), piece.bytes.end());
  }
  return bytes;
}

// One track of a version as Checkpoints::OpenVersion() gives it. REQUIRES: it has the track.
inline SnapshotRef AsStored(const Snapshot& version, std::string_view track,
                            std::shared_ptr<StoredTrack> stored) {
  auto snapshot = std::make_shared<Snapshot>();
  snapshot->record = version.record;
  snapshot->tracks.push_back(*version.Find(track));
  TrackSnapshot& only = snapshot->tracks[0];
  only.blocks.clear();
  only.block_versions.clear();
  only.stored = std::move(stored);
  return snapshot;
}

}  // namespace ema

#endif  // EMA_TESTS_TESTUTIL_FAKE_STORED_TRACK_H_
