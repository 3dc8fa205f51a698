// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/convert.h"
#include "client/cpp/message_reader.h"
#include "ema/client.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/v1/chunk_codec.h"
#include "server/base/crc32c.h"

namespace ema {
namespace {

using client_internal::Call;
using client_internal::MessageReader;

absl::Status DataLoss(ErrorReason reason, std::string_view message) {
  return MakeError(absl::StatusCode::kDataLoss, reason, message);
}

// The bytes of a message, as gRPC has received them.
class Pieces {
 public:
  // False: there is nothing in it.
  bool Set(const grpc::ByteBuffer& message) { return message.Dump(&slices_).ok(); }

  int64_t total_bytes() const {
    int64_t total = 0;
    for (const grpc::Slice& slice : slices_) total += static_cast<int64_t>(slice.size());
    return total;
  }

  // Copies the first bytes to `head`. How many there are.
  size_t CopyHead(std::span<std::byte> head) const {
    size_t size = 0;
    for (const grpc::Slice& slice : slices_) {
      const size_t taken = std::min(slice.size(), head.size() - size);
      std::memcpy(head.data() + size, slice.begin(), taken);
      size += taken;
      if (size == head.size()) break;
    }
    return size;
  }

  // Copies all after the first `skipped` bytes to `to`, which has room for them; gives their
  // CRC32C.
  uint32_t CopyTail(int64_t skipped, std::byte* to) const {
    uint32_t crc = 0;
    for (const grpc::Slice& slice : slices_) {
      const int64_t size = static_cast<int64_t>(slice.size());
      const int64_t start = std::min(skipped, size);
      skipped -= start;
      if (start == size) continue;
      std::memcpy(to, slice.begin() + start, size - start);
      // What has just been copied is still in the cache.
      crc = Crc32c(crc, {to, static_cast<size_t>(size - start)});
      to += size - start;
    }
    return crc;
  }

 private:
  std::vector<grpc::Slice> slices_;
};

// One pull, over as many calls as it takes.
class Puller {
 public:
  Puller(v1::PullRequest request, const Client::PullTarget* target,
         const std::function<void(int64_t)>* on_progress)
      : request_(std::move(request)), target_(*target), on_progress_(*on_progress) {}

  // One call, from the first byte. What it has learned of the version holds for the next one.
  absl::Status Attempt(Call& call);

  // What the target failed with. Never retried, whatever its code.
  const absl::Status& target_error() const { return target_error_; }
  PullInfo TakeInfo() && { return *std::move(info_); }

 private:
  absl::Status OnMessage(grpc::ByteBuffer& message);
  absl::Status OnHeader(const v1::PullHeader& header);
  // `copy(to)` copies the data and gives their CRC32C.
  template <typename Copy>
  absl::Status OnChunk(const ChunkHeader& header, Copy copy);
  absl::Status OnTrailer(const v1::PullTrailer& trailer);

  v1::PullRequest request_;
  const Client::PullTarget& target_;
  const std::function<void(int64_t)>& on_progress_;

  std::optional<PullInfo> info_;
  std::span<std::byte> memory_;
  absl::Status target_error_;
  int64_t reported_bytes_ = 0;
  Pieces pieces_;

  // Of the running call.
  bool has_header_ = false;
  bool has_trailer_ = false;
  int64_t received_bytes_ = 0;
  int64_t chunk_count_ = 0;
  uint32_t digest_ = 0;
};

absl::Status Puller::Attempt(Call& call) {
  has_header_ = has_trailer_ = false;
  received_bytes_ = chunk_count_ = 0;
  digest_ = 0;
  MessageReader reader(&call, "/ema.v1.EmaService/Pull", request_);
  while (reader.Next() == MessageReader::Event::kMessage) {
    EMA_RETURN_IF_ERROR(OnMessage(reader.message()));
  }
  EMA_RETURN_IF_ERROR(reader.Finish());
  if (has_trailer_) return absl::OkStatus();
  return DataLoss(ErrorReason::kDigestMismatch, "the stream ended before its trailer");
}

absl::Status Puller::OnMessage(grpc::ByteBuffer& message) {
  if (has_trailer_) return client_internal::MalformedReply("a message after the trailer");
  if (!pieces_.Set(message)) return client_internal::MalformedReply("an empty message");
  std::array<std::byte, kMaxChunkPrefixBytes> head;
  const size_t head_bytes = pieces_.CopyHead(head);
  const std::optional<ParsedChunk> chunk =
      ParseChunkPrefix({head.data(), head_bytes}, pieces_.total_bytes());
  if (chunk.has_value()) {
    return OnChunk(chunk->header, [this, &chunk](std::byte* to) {
      return pieces_.CopyTail(chunk->data_start, to);
    });
  }
  v1::PullResponse response;
  if (!grpc::SerializationTraits<v1::PullResponse>::Deserialize(&message, &response).ok()) {
    return client_internal::MalformedReply("not a PullResponse");
  }
  switch (response.message_case()) {
    case v1::PullResponse::kHeader:
      return OnHeader(response.header());
    case v1::PullResponse::kChunk: {
      // In another order of fields than ours.
      const std::string& data = response.chunk().data();
      return OnChunk({.offset = response.chunk().offset(),
                      .crc32c = static_cast<uint32_t>(response.chunk().crc32c()),
                      .data_bytes = static_cast<int64_t>(data.size())},
                     [&data](std::byte* to) {
                       std::memcpy(to, data.data(), data.size());
                       return Crc32c(0, {to, data.size()});
                     });
    }
    case v1::PullResponse::kTrailer:
      return OnTrailer(response.trailer());
    case v1::PullResponse::MESSAGE_NOT_SET:
      break;
  }
  return client_internal::MalformedReply("a message that this client does not know");
}

absl::Status Puller::OnHeader(const v1::PullHeader& header) {
  if (has_header_) return client_internal::MalformedReply("two headers");
  has_header_ = true;
  EMA_ASSIGN_OR_RETURN(PullInfo info, client_internal::FromProto(header));
  if (info_.has_value()) {
    if (info.total_bytes != info_->total_bytes || info.version.number != info_->version.number) {
      return client_internal::MalformedReply("another version than before the connection broke");
    }
    return absl::OkStatus();
  }
  absl::StatusOr<std::span<std::byte>> memory = target_(info);
  if (memory.ok() && static_cast<int64_t>(memory->size()) != info.total_bytes) {
    memory = absl::InvalidArgumentError(absl::StrCat(
        "the target has ", memory->size(), " bytes, but ", info.total_bytes, " are pulled"));
  }
  if (!memory.ok()) {
    target_error_ = memory.status();
    return target_error_;
  }
  memory_ = *memory;
  // If the connection breaks, the same version is asked for again.
  request_.set_version(info.version.number);
  request_.set_incarnation(info.version.incarnation);
  info_ = std::move(info);
  return absl::OkStatus();
}

template <typename Copy>
absl::Status Puller::OnChunk(const ChunkHeader& header, Copy copy) {
  if (!has_header_) return client_internal::MalformedReply("a chunk before the header");
  if (header.offset != received_bytes_ ||
      header.data_bytes > info_->total_bytes - received_bytes_) {
    return DataLoss(
        ErrorReason::kDigestMismatch,
        absl::StrCat("a chunk of ", header.data_bytes, " bytes at ", header.offset,
                     ", expected one at ", received_bytes_, " of ", info_->total_bytes));
  }
  const uint32_t crc = copy(memory_.data() + received_bytes_);
  if (crc != header.crc32c) {
    return DataLoss(ErrorReason::kChunkCorrupt,
                    absl::StrCat("chunk at ", header.offset, ": its CRC32C is ", absl::Hex(crc),
                                 ", sent as ", absl::Hex(header.crc32c)));
  }
  digest_ = Crc32cCombine(digest_, crc, header.data_bytes);
  received_bytes_ += header.data_bytes;
  ++chunk_count_;
  // A pull that had to begin again does not report that.
  if (on_progress_ && received_bytes_ > reported_bytes_) on_progress_(received_bytes_);
  reported_bytes_ = std::max(reported_bytes_, received_bytes_);
  return absl::OkStatus();
}

absl::Status Puller::OnTrailer(const v1::PullTrailer& trailer) {
  if (!has_header_) return client_internal::MalformedReply("a trailer before the header");
  has_trailer_ = true;
  if (trailer.chunk_count() != chunk_count_ || trailer.total_bytes() != received_bytes_ ||
      received_bytes_ != info_->total_bytes) {
    return DataLoss(
        ErrorReason::kDigestMismatch,
        absl::StrCat(chunk_count_, " chunks with ", received_bytes_, " bytes arrived; sent were ",
                     trailer.chunk_count(), " with ", trailer.total_bytes()));
  }
  if (trailer.digest() != digest_) {
    return DataLoss(ErrorReason::kDigestMismatch,
                    absl::StrCat("CRC32C of all bytes is ", absl::Hex(digest_), ", sent as ",
                                 absl::Hex(trailer.digest())));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PullInfo> Client::Pull(std::string_view model, std::string_view track,
                                      int64_t version, const PullTarget& target,
                                      absl::Duration timeout,
                                      const std::function<void(int64_t)>& on_progress) {
  v1::PullRequest request;
  request.set_model(std::string(model));
  request.set_track(std::string(track));
  request.set_version(version);
  Puller puller(std::move(request), &target, &on_progress);
  client_internal::Interrupt interrupt(&impl_->options().is_interrupted);
  const absl::Status status =
      impl_->Retry(impl_->Deadline(timeout), &interrupt, [&puller](Call& call) {
        const absl::Status attempt = puller.Attempt(call);
        return puller.target_error().ok() ? attempt : absl::CancelledError("ended by the target");
      });
  EMA_RETURN_IF_ERROR(puller.target_error());
  EMA_RETURN_IF_ERROR(status);
  return std::move(puller).TakeInfo();
}

}  // namespace ema
