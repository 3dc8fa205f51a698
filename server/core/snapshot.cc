// SPDX-License-Identifier: Apache-2.0
#include "server/core/snapshot.h"

#include <algorithm>
#include <utility>

#include "ema/internal/status_macros.h"

namespace ema {

const TrackSnapshot* Snapshot::Find(std::string_view name) const {
  const auto it = std::find_if(tracks.begin(), tracks.end(),
                               [&](const TrackSnapshot& t) { return t.track->name() == name; });
  return it != tracks.end() ? &*it : nullptr;
}

const TrackSnapshot* Snapshot::FindId(int64_t track_id) const {
  const auto it = std::find_if(tracks.begin(), tracks.end(),
                               [&](const TrackSnapshot& t) { return t.track->id() == track_id; });
  return it != tracks.end() ? &*it : nullptr;
}

SnapshotRef WithOwner(SnapshotRef snapshot, std::shared_ptr<const void> owner) {
  const Snapshot* const raw = snapshot.get();
  return SnapshotRef(raw, [owner = std::move(owner), snapshot = std::move(snapshot)](
                              const Snapshot*) mutable { snapshot.reset(); });
}

TrackStates TrackStatesOf(const Snapshot& version) {
  TrackStates states;
  for (const TrackSnapshot& track : version.tracks) states[track.track->name()] = track.state;
  return states;
}

absl::StatusOr<std::vector<HostPiece>> ReadBlocks(Device& device, const Track& track,
                                                  const Blocks& blocks, int64_t offset,
                                                  int64_t length_bytes, std::optional<Dtype> cast) {
  const int64_t ratio = cast.has_value() ? DtypeSize(Dtype::kFloat32) / DtypeSize(*cast) : 1;
  std::vector<HostPiece> pieces;
  while (length_bytes > 0) {
    const int64_t index = track.FindBlock(offset);
    const BlockRef& block = blocks[index];
    const int64_t in_block = offset - track.block_start(index);
    const int64_t n = std::min(length_bytes, block->size_bytes() - in_block);
    EMA_ASSIGN_OR_RETURN(std::shared_ptr<const std::byte> view, device.HostView(block, cast));
    const std::span<const std::byte> bytes(view.get() + in_block / ratio, n / ratio);
    pieces.push_back({std::move(view), bytes});
    offset += n;
    length_bytes -= n;
  }
  return pieces;
}

absl::StatusOr<std::vector<HostPiece>> ReadTrack(Device& device, const TrackSnapshot& track,
                                                 int64_t offset, int64_t length_bytes) {
  return track.stored != nullptr
             ? track.stored->Read(offset, length_bytes)
             : ReadBlocks(device, *track.track, track.blocks, offset, length_bytes);
}

absl::StatusOr<std::vector<std::shared_ptr<Block>>> AllocateBlocks(Device& device,
                                                                   const Track& track) {
  std::vector<std::shared_ptr<Block>> blocks;
  blocks.reserve(track.block_count());
  for (int64_t i = 0; i < track.block_count(); ++i) {
    EMA_ASSIGN_OR_RETURN(std::shared_ptr<Block> block, device.Allocate(track.block_size(i)));
    blocks.push_back(std::move(block));
  }
  return blocks;
}

absl::StatusOr<std::unique_ptr<BlocksWriter>> BlocksWriter::Create(Device& device,
                                                                   const Track& track) {
  EMA_ASSIGN_OR_RETURN(std::vector<std::shared_ptr<Block>> blocks, AllocateBlocks(device, track));
  EMA_ASSIGN_OR_RETURN(std::unique_ptr<DeviceStream> stream, device.NewStream());
  return std::unique_ptr<BlocksWriter>(
      new BlocksWriter(track, device.is_host(), std::move(blocks), std::move(stream)));
}

std::span<std::byte> BlocksWriter::InPlace(int64_t offset, int64_t length_bytes) const {
  if (!is_host_ || length_bytes == 0) return {};
  const int64_t index = track_.FindBlock(offset);
  const int64_t in_block = offset - track_.block_start(index);
  if (length_bytes > track_.block_size(index) - in_block) return {};
  return {blocks_[index]->data() + in_block, static_cast<size_t>(length_bytes)};
}

absl::Status BlocksWriter::ForEachPart(
    Range range, absl::FunctionRef<absl::Status(std::byte* memory, int64_t length_bytes)> visit) {
  while (range.begin < range.end) {
    const int64_t index = track_.FindBlock(range.begin);
    const int64_t end = std::min(range.end, track_.block_start(index + 1));
    EMA_RETURN_IF_ERROR(visit(blocks_[index]->data() + (range.begin - track_.block_start(index)),
                              end - range.begin));
    range.begin = end;
  }
  return absl::OkStatus();
}

absl::Status BlocksWriter::Write(int64_t offset, std::span<const std::byte> bytes) {
  const Range range{offset, offset + static_cast<int64_t>(bytes.size())};
  absl::MutexLock lock(&mu_);
  if (!written_.empty() && written_.back().end == range.begin) {
    written_.back().end = range.end;
  } else {
    written_.push_back(range);
  }
  if (InPlace(offset, static_cast<int64_t>(bytes.size())).data() == bytes.data()) {
    return absl::OkStatus();
  }
  const auto copy = [&](std::byte* memory, int64_t length_bytes)
                        ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
                          const std::byte* const from = bytes.data();
                          bytes = bytes.subspan(length_bytes);
                          return stream_->CopyFromHost(memory, from, length_bytes);
                        };
  return ForEachPart(range, copy);
}

absl::StatusOr<Blocks> BlocksWriter::Finish() {
  absl::MutexLock lock(&mu_);
  std::sort(written_.begin(), written_.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  const int64_t total_bytes = track_.layout().total_bytes();
  written_.push_back({total_bytes, total_bytes});
  int64_t done = 0;
  for (const Range& range : written_) {
    const auto zero = [this](std::byte* memory, int64_t length_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(
                          mu_) { return stream_->Zero(memory, length_bytes); };
    EMA_RETURN_IF_ERROR(ForEachPart({done, range.begin}, zero));
    done = std::max(done, range.end);
  }
  EMA_RETURN_IF_ERROR(stream_->Synchronize().status());
  return Blocks(blocks_.begin(), blocks_.end());
}

}  // namespace ema
