// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/pull/puller.h"

#include <array>
#include <cstring>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "client/cpp/pull/receive_heap.h"
#include "client/cpp/transport/convert_replies.h"
#include "client/cpp/transport/message_reader.h"
#include "client/cpp/transport/retry.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"
#include "server/base/stream_copy.h"

namespace ema::client_internal {
namespace {

// Pulls of this size and above reuse their receive buffers. For smaller ones it does not pay.
constexpr int64_t kLargeBytes = int64_t{8} << 20;

absl::Status DataLoss(ErrorReason reason, std::string_view message) {
  return MakeError(absl::StatusCode::kDataLoss, reason, message);
}

}  // namespace

absl::Status Puller::Run(Client::Impl& server, SteadyTime deadline, Interrupt* interrupt) {
  std::unique_ptr<LanePipe> lane;
  if (std::exchange(may_use_lane_, false)) {
    lane = server.TakeLane(deadline, interrupt).value_or(nullptr);
  }
  if (lane != nullptr) {
    absl::Status attempt = AttemptByLane(*lane, server.token().Authorization(), [&] {
      return interrupt->fired() || SteadyNow() >= deadline;
    });
    EMA_RETURN_IF_ERROR(target_error_);
    if (attempt.ok()) server.ReturnLane(std::move(lane));
    if (attempt.ok() || is_refused_) return attempt;
    // Otherwise gRPC continues where the lane has ended.
  }
  absl::Status status = server.Retry(deadline, interrupt, [this](Call& call) {
    absl::Status attempt = Attempt(call);
    return target_error_.ok() ? attempt : absl::CancelledError("ended by the target");
  });
  EMA_RETURN_IF_ERROR(target_error_);
  return status;
}

void Puller::Begin(Lane lane) {
  lane_ = lane;
  has_header_ = has_trailer_ = is_refused_ = false;
  chunk_count_ = chunk_bytes_ = 0;
  digest_ = 0;
  request_.set_offset(position_);
}

absl::Status Puller::AttemptByLane(LanePipe& lane, const std::string& authorization,
                                   const LanePipe::Stop& stop) {
  Begin(Lane::kSharedMemory);
  v1::LaneRequest request;
  *request.mutable_pull() = request_;
  request.set_authorization(authorization);
  EMA_RETURN_IF_ERROR(SendRequest(lane, request, stop));
  while (!has_trailer_) {
    EMA_ASSIGN_OR_RETURN(const LanePipe::Frame frame, lane.Receive(stop));
    if (frame.is_chunk) {
      const std::span<const std::byte> data = frame.bytes;
      const ChunkHeader header{.offset = frame.offset,
                               .data_bytes = static_cast<int64_t>(data.size()),
                               .skips_checksum = true};
      EMA_RETURN_IF_ERROR(OnChunk(header, [data](std::byte* to) {
        StreamCopy(data, to);
        return uint32_t{0};
      }));
      continue;
    }
    const absl::StatusOr<v1::LaneResponse> response = ParseResponse(frame);
    if (!response.ok()) {
      is_refused_ = !has_header_ &&
                    GetErrorReason(response.status()) != ErrorReason::kUnspecified &&
                    !IsRetryable(response.status());
      return response.status();
    }
    if (response->has_pull()) {
      EMA_RETURN_IF_ERROR(OnHeader(response->pull()));
    } else if (response->has_trailer()) {
      EMA_RETURN_IF_ERROR(OnTrailer(response->trailer()));
    } else {
      return MalformedReply("unexpected message in a pull");
    }
  }
  return absl::OkStatus();
}

absl::Status Puller::Attempt(Call& call) {
  Begin(Lane::kGrpc);
  std::optional<ReceiveHeap> heap;  // Freed after the last buffer.
  MessageReader reader(&call, "/ema.v1.EmaService/Pull", request_);
  while (reader.Next() == MessageReader::Event::kMessage) {
    EMA_RETURN_IF_ERROR(OnMessage(reader.message()));
    if (!heap.has_value() && info_.has_value() && info_->total_bytes >= kLargeBytes) heap.emplace();
  }
  EMA_RETURN_IF_ERROR(reader.Finish());
  if (has_trailer_) return absl::OkStatus();
  return DataLoss(ErrorReason::kDigestMismatch, "the stream ended before its trailer");
}

bool Puller::StartOver() {
  if (!wants_newest_ || !info_.has_value()) return false;
  request_ = original_request_;
  request_.clear_if_newer_than();
  request_.clear_base();  // What was there has been written over.
  info_.reset();
  position_ = received_bytes_ = 0;
  return true;
}

absl::Status Puller::OnMessage(grpc::ByteBuffer& message) {
  if (has_trailer_) return MalformedReply("a message after the trailer");
  if (!pieces_.Set(message)) return MalformedReply("an empty message");
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
    return MalformedReply("not a PullResponse");
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
  return MalformedReply("a message that this client does not know");
}

absl::Status Puller::OnHeader(const v1::PullHeader& header) {
  if (has_header_) return MalformedReply("two headers");
  has_header_ = true;
  omits_unchanged_ = header.omits_unchanged() && request_.has_base();
  EMA_ASSIGN_OR_RETURN(PullInfo info, FromProto(header));
  if (info.not_newer) {
    info_ = std::move(info);
    return absl::OkStatus();
  }
  if (info_.has_value() && !info_->not_newer) {
    if (info.total_bytes != info_->total_bytes || info.version.number != info_->version.number) {
      return MalformedReply("another version than before the connection broke");
    }
    // A version has one for good; a synthesized average, one for each time that it is built.
    if (info.version.commit_time != info_->version.commit_time) {
      return MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
                       "the average was built again after the pull began");
    }
    return absl::OkStatus();
  }
  if (request_.has_step() && info.version.step != request_.step()) {
    return MalformedReply("another step than requested");
  }
  absl::StatusOr<std::span<std::byte>> memory = target_(info);
  if (memory.ok() && static_cast<int64_t>(memory->size()) != info.total_bytes) {
    memory = absl::InvalidArgumentError(
        absl::StrCat("the target has ", memory->size(), " bytes, expected ", info.total_bytes));
  }
  if (!memory.ok()) {
    target_error_ = memory.status();
    return target_error_;
  }
  memory_ = *memory;
  // If the connection breaks, the same version is asked for again.
  request_.set_version(info.version.number);
  request_.set_incarnation(info.version.incarnation);
  request_.clear_label();
  request_.clear_step();
  request_.clear_if_newer_than();
  info_ = std::move(info);
  return absl::OkStatus();
}

template <typename Copy>
absl::Status Puller::OnChunk(const ChunkHeader& header, Copy copy) {
  if (!has_header_) return MalformedReply("a chunk before the header");
  // What is skipped is as it was.
  const bool is_next = omits_unchanged_ ? header.offset >= position_ : header.offset == position_;
  if (!is_next || header.data_bytes > info_->total_bytes - header.offset) {
    return DataLoss(ErrorReason::kDigestMismatch,
                    absl::StrCat("a chunk of ", header.data_bytes, " bytes at ", header.offset,
                                 ", expected one at ", position_, " of ", info_->total_bytes));
  }
  const uint32_t crc = copy(memory_.data() + header.offset);
  if (crc != header.crc32c) {
    return DataLoss(ErrorReason::kChunkCorrupt,
                    absl::StrCat("chunk at ", header.offset, ": its CRC32C is ", absl::Hex(crc),
                                 ", sent as ", absl::Hex(header.crc32c)));
  }
  if (!header.skips_checksum) digest_ = Crc32cCombine(digest_, crc, header.data_bytes);
  position_ = header.offset + header.data_bytes;
  chunk_bytes_ += header.data_bytes;
  received_bytes_ += header.data_bytes;
  ++chunk_count_;
  if (on_progress_) on_progress_(position_);
  return absl::OkStatus();
}

absl::Status Puller::OnTrailer(const v1::PullTrailer& trailer) {
  if (!has_header_) return MalformedReply("a trailer before the header");
  has_trailer_ = true;
  const bool is_whole = omits_unchanged_ || position_ == info_->total_bytes;
  if (trailer.chunk_count() != chunk_count_ || trailer.total_bytes() != chunk_bytes_ || !is_whole) {
    return DataLoss(
        ErrorReason::kDigestMismatch,
        absl::StrCat(chunk_count_, " chunks with ", chunk_bytes_, " bytes arrived, up to byte ",
                     position_, " of ", info_->total_bytes, "; sent were ", trailer.chunk_count(),
                     " with ", trailer.total_bytes()));
  }
  if (trailer.digest() != digest_) {
    return DataLoss(ErrorReason::kDigestMismatch,
                    absl::StrCat("CRC32C of all bytes is ", absl::Hex(digest_), ", sent as ",
                                 absl::Hex(trailer.digest())));
  }
  return absl::OkStatus();
}

}  // namespace ema::client_internal
