// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/chunk_plan.h"

#include <algorithm>

#include "client/cpp/push/staged_chunks.h"
#include "server/base/crc32c.h"
#include "server/kernel/cast.h"
#include "server/wire/chunk_codec.h"

namespace ema::client_internal {
namespace {

// Below this a copy costs less than a slice and the two more buffers of a sendmsg().
constexpr int64_t kCopyBelowBytes = 4096;

}  // namespace

ChunkPlan::ChunkPlan(const RankLayout& layout, int64_t chunk_bytes)
    : max_chunk_bytes_(chunk_bytes) {
  const int64_t total_bytes = layout.total_bytes();
  starts_.reserve(total_bytes / chunk_bytes + 2);
  starts_.push_back(0);
  while (starts_.back() < total_bytes) {
    const bool is_live = starts_.back() < layout.trained_bytes();
    int64_t end = std::min(is_live ? layout.trained_bytes() : layout.total_bytes(),
                           starts_.back() + chunk_bytes);
    while (!layout.IsElementBoundary(end)) --end;
    starts_.push_back(end);
  }
}

std::vector<int64_t> ChunkPlan::ChunksIn(absl::Span<const PushProgress::Range> ranges) const {
  std::vector<int64_t> chunks;
  for (const PushProgress::Range& range : ranges) {
    if (range.length_bytes <= 0) continue;
    const auto after = std::upper_bound(starts_.begin(), starts_.end(), range.offset);
    int64_t chunk = std::max<int64_t>(after - starts_.begin() - 1, 0);
    for (; chunk < chunk_count() && starts_[chunk] < range.offset + range.length_bytes; ++chunk) {
      chunks.push_back(chunk);
    }
  }
  std::sort(chunks.begin(), chunks.end());
  chunks.erase(std::unique(chunks.begin(), chunks.end()), chunks.end());
  return chunks;
}

ChunkWriter::ChunkWriter(const RankLayout* layout, const ChunkPlan* plan, int64_t chunk_count,
                         absl::Span<const std::span<const std::byte>> shards, WeightsGate* gate,
                         StagedChunks* staged, absl::Span<const Strides> strides)
    : layout_(layout),
      plan_(plan),
      weights_(layout, shards, strides),
      gate_(gate),
      staged_(staged),
      crcs_(chunk_count) {}

uint32_t ChunkWriter::CopyInto(int64_t chunk, const std::byte* from, std::byte* to) const {
  uint32_t crc32c = 0;
  std::vector<std::byte> gathered;
  ForEachPiece(*layout_, *plan_, chunk, [&](int64_t shard, int64_t offset, int64_t length) {
    const int64_t source_bytes = weights_.RangeBytes(shard, length);
    const bool is_rounded = source_bytes != length;
    const bool is_gathered = from == nullptr && !weights_.IsContiguous(shard);
    const std::byte* source = from;
    if (from != nullptr) {
      from += source_bytes;
    } else if (!is_gathered) {
      source = weights_.ContiguousRange(shard, offset, length).data();
    } else {
      if (is_rounded) gathered.resize(source_bytes);
      std::byte* const into = is_rounded ? gathered.data() : to;
      weights_.CopyRange(shard, offset, length, into);
      source = into;
    }
    const std::span<std::byte> written(to, length);
    if (is_rounded) {
      CastOnCpu(Dtype::kFloat32, source, Dtype::kBFloat16, to, length / 2);
      crc32c = Crc32c(crc32c, written);
    } else if (is_gathered) {
      crc32c = Crc32c(crc32c, written);
    } else {
      crc32c = CopyWithCrc32c(crc32c, {source, static_cast<size_t>(length)}, to);
    }
    to += length;
  });
  return crc32c;
}

bool ChunkWriter::IsInPlace(int64_t chunk) const {
  bool is_contiguous = true;
  ForEachPiece(*layout_, *plan_, chunk, [&](int64_t shard, int64_t, int64_t) {
    is_contiguous = is_contiguous && weights_.IsContiguous(shard);
  });
  return is_contiguous && layout_->wire_dtype() == WireDtype::kAsPushed;
}

bool ChunkWriter::Checksum(int64_t chunk) {
  std::vector<std::byte> copy;
  if (staged_ != nullptr) {
    copy.resize(plan_->length_bytes(chunk));
    return staged_->Stage({chunk}).ok() && CopyStaged(chunk, copy.data()).has_value();
  }
  if (!gate_->BeginRead()) return false;
  uint32_t crc32c = 0;
  if (IsInPlace(chunk)) {
    ForEachPiece(*layout_, *plan_, chunk, [&](int64_t shard, int64_t offset, int64_t length) {
      crc32c = Crc32c(crc32c, weights_.ContiguousRange(shard, offset, length));
    });
  } else {
    copy.resize(plan_->length_bytes(chunk));
    crc32c = CopyInto(chunk, nullptr, copy.data());
  }
  gate_->EndRead();
  crcs_[chunk] = {.value = crc32c, .known = true};
  return true;
}

std::optional<grpc::ByteBuffer> ChunkWriter::Write(int64_t chunk, Scratch& scratch, bool copies) {
  if (staged_ != nullptr) return WriteStaged(chunk, copies);
  if (!gate_->BeginRead()) return std::nullopt;
  grpc::ByteBuffer message =
      IsInPlace(chunk) ? Encode(chunk, scratch, copies) : EncodeCopy(chunk, nullptr);
  gate_->EndRead();
  return message;
}

grpc::ByteBuffer ChunkWriter::Encode(int64_t chunk, Scratch& scratch, bool copies) {
  auto& [pieces, slices] = scratch;
  pieces.clear();
  ForEachPiece(*layout_, *plan_, chunk, [&](int64_t shard, int64_t offset, int64_t length) {
    scratch.pieces.push_back(weights_.ContiguousRange(shard, offset, length));
  });
  const auto is_long = [copies](std::span<const std::byte> piece) {
    return !copies && static_cast<int64_t>(piece.size()) >= kCopyBelowBytes;
  };
  uint32_t crc32c = 0;
  slices.emplace_back();  // The prefix, once the checksum is known.
  for (auto piece = pieces.begin(); piece != pieces.end();) {
    if (is_long(*piece)) {
      crc32c = Crc32c(crc32c, *piece);
      gate_->AddSlice();
      // gRPC takes a void*, but only reads.
      slices.emplace_back(const_cast<std::byte*>(piece->data()), piece->size(),
                          &WeightsGate::DropSlice, gate_);
      ++piece;
      continue;
    }
    const auto end = std::find_if(piece, pieces.end(), is_long);
    size_t total_bytes = 0;
    for (auto next = piece; next != end; ++next) total_bytes += next->size();
    grpc::Slice copied(total_bytes);
    auto* to = const_cast<std::byte*>(reinterpret_cast<const std::byte*>(copied.begin()));
    for (; piece != end; ++piece) {
      crc32c = CopyWithCrc32c(crc32c, *piece, to);
      to += piece->size();
    }
    slices.push_back(std::move(copied));
  }
  crcs_[chunk] = {.value = crc32c, .known = true};
  const ChunkPrefix prefix = EncodeChunkPrefix(
      {.offset = plan_->offset(chunk), .crc32c = crc32c, .data_bytes = plan_->length_bytes(chunk)});
  slices.front() = grpc::Slice(prefix.bytes.data(), prefix.size);
  grpc::ByteBuffer message(slices.data(), slices.size());
  slices.clear();
  return message;
}

grpc::ByteBuffer ChunkWriter::Assemble(int64_t chunk, uint32_t crc32c, grpc::Slice data) {
  crcs_[chunk] = {.value = crc32c, .known = true};
  const ChunkPrefix prefix = EncodeChunkPrefix(
      {.offset = plan_->offset(chunk), .crc32c = crc32c, .data_bytes = plan_->length_bytes(chunk)});
  const grpc::Slice slices[] = {grpc::Slice(prefix.bytes.data(), prefix.size), std::move(data)};
  return grpc::ByteBuffer(slices, std::size(slices));
}

grpc::ByteBuffer ChunkWriter::EncodeCopy(int64_t chunk, const std::byte* from) {
  grpc::Slice data(plan_->length_bytes(chunk));
  auto* const to = const_cast<std::byte*>(reinterpret_cast<const std::byte*>(data.begin()));
  const uint32_t crc32c = CopyInto(chunk, from, to);
  return Assemble(chunk, crc32c, std::move(data));
}

std::optional<grpc::ByteBuffer> ChunkWriter::WriteStaged(int64_t chunk, bool copies) {
  const std::optional<int> slot = staged_->Take(chunk);
  if (!slot.has_value()) return std::nullopt;
  PinnedRing& ring = staged_->ring();
  const std::byte* const bytes = ring.slot(*slot);
  if (!copies && layout_->wire_dtype() == WireDtype::kAsPushed) {
    const int64_t length_bytes = plan_->length_bytes(chunk);
    if (std::optional<grpc::Slice> lent = ring.TryLend(*slot, length_bytes)) {
      const uint32_t crc32c = Crc32c(0, {bytes, static_cast<size_t>(length_bytes)});
      return Assemble(chunk, crc32c, *std::move(lent));
    }
  }
  grpc::ByteBuffer message = EncodeCopy(chunk, bytes);
  ring.Return(*slot);
  return message;
}

std::optional<uint32_t> ChunkWriter::CopyStaged(int64_t chunk, std::byte* to) {
  const std::optional<int> slot = staged_->Take(chunk);
  if (!slot.has_value()) return std::nullopt;
  crcs_[chunk] = {.value = CopyInto(chunk, staged_->ring().slot(*slot), to), .known = true};
  staged_->ring().Return(*slot);
  return crcs_[chunk].value;
}

std::optional<uint32_t> ChunkWriter::Copy(int64_t chunk, std::byte* to) {
  if (staged_ != nullptr) return CopyStaged(chunk, to);
  if (!gate_->BeginRead()) return std::nullopt;
  crcs_[chunk] = {.value = CopyInto(chunk, nullptr, to), .known = true};
  gate_->EndRead();
  return crcs_[chunk].value;
}

std::optional<ChunkWriter::Loan> ChunkWriter::Borrow(int64_t chunk) {
  const std::optional<int> slot = staged_->Borrow(chunk);
  if (!slot.has_value()) return std::nullopt;
  const std::span<const std::byte> bytes(staged_->ring().slot(*slot),
                                         static_cast<size_t>(plan_->length_bytes(chunk)));
  crcs_[chunk] = {.value = Crc32c(0, bytes), .known = true};
  return Loan{.slot = *slot, .bytes = bytes, .crc32c = crcs_[chunk].value};
}

std::optional<std::vector<uint32_t>> ChunkWriter::Checksums() {
  std::vector<uint32_t> result(crcs_.size());
  for (int64_t chunk = 0; chunk < std::ssize(crcs_); ++chunk) {
    if (!crcs_[chunk].known && !Checksum(chunk)) return std::nullopt;
    result[chunk] = crcs_[chunk].value;
  }
  return result;
}

std::optional<uint32_t> ChunkWriter::Digest() {
  uint32_t digest = 0;
  for (int64_t chunk = 0; chunk < std::ssize(crcs_); ++chunk) {
    if (!crcs_[chunk].known && !Checksum(chunk)) return std::nullopt;
    digest = Crc32cCombine(digest, crcs_[chunk].value, plan_->length_bytes(chunk));
  }
  return digest;
}

}  // namespace ema::client_internal
