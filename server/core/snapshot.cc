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

absl::StatusOr<std::vector<HostPiece>> ReadBlocks(Device& device, const Track& track,
                                                  const Blocks& blocks, int64_t offset,
                                                  int64_t length_bytes) {
  std::vector<HostPiece> pieces;
  while (length_bytes > 0) {
    const int64_t index = track.FindBlock(offset);
    const BlockRef& block = blocks[index];
    const int64_t in_block = offset - track.block_start(index);
    const int64_t n = std::min(length_bytes, block->size_bytes() - in_block);
    EMA_ASSIGN_OR_RETURN(std::shared_ptr<const std::byte> view, device.HostView(block));
    const std::span<const std::byte> bytes(view.get() + in_block, n);
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
  for (const std::shared_ptr<Block>& block : blocks) {
    EMA_RETURN_IF_ERROR(stream->Zero(block->data(), block->size_bytes()));
  }
  return std::unique_ptr<BlocksWriter>(
      new BlocksWriter(track, std::move(blocks), std::move(stream)));
}

absl::Status BlocksWriter::Write(int64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const int64_t index = track_.FindBlock(offset);
    const std::shared_ptr<Block>& block = blocks_[index];
    const int64_t in_block = offset - track_.block_start(index);
    const int64_t n = std::min(static_cast<int64_t>(bytes.size()), block->size_bytes() - in_block);
    EMA_RETURN_IF_ERROR(stream_->CopyFromHost(block->data() + in_block, bytes.data(), n));
    offset += n;
    bytes = bytes.subspan(n);
  }
  // The caller may reuse its buffer for the next piece.
  return stream_->Synchronize().status();
}

absl::StatusOr<Blocks> BlocksWriter::Finish() {
  EMA_RETURN_IF_ERROR(stream_->Synchronize().status());
  return Blocks(blocks_.begin(), blocks_.end());
}

}  // namespace ema
