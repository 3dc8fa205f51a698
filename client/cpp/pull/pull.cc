// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/transport/convert.h"
#include "client/cpp/transport/message_reader.h"
#include "client/cpp/transport/retry.h"
#include "ema/client.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"
#include "server/base/stream_copy.h"
#include "server/wire/chunk_codec.h"

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
    // What has just been copied is still in the first-level cache.
    constexpr size_t kPieceBytes = 8192;
    uint32_t crc = 0;
    for (const grpc::Slice& slice : slices_) {
      const int64_t size = static_cast<int64_t>(slice.size());
      const int64_t start = std::min(skipped, size);
      skipped -= start;
      if (start == size) continue;
      std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(slice.begin()), size);
      for (bytes = bytes.subspan(start); !bytes.empty();) {
        const std::span<const std::byte> piece = bytes.first(std::min(bytes.size(), kPieceBytes));
        StreamCopy(piece, to);
        crc = Crc32c(crc, piece);
        to += piece.size();
        bytes = bytes.subspan(piece.size());
      }
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
      : request_(std::move(request)),
        asked_(request_),
        wants_current_(request_.version() == 0),
        target_(*target),
        on_progress_(*on_progress) {}

  // One call, from where the last one ended.
  absl::Status Attempt(Call& call);
  // The same through a lane.
  absl::Status AttemptByLane(LanePipe& lane, const std::string& authorization,
                             const LanePipe::Stop& stop);
  // Begins anew with the newest version, the label's or the step's. False: a certain one was asked
  // for, or nothing has come yet.
  bool StartOver();

  // The server has refused the last AttemptByLane() before a byte came, and a retry does not help:
  // gRPC would be told the same.
  bool is_refused() const { return is_refused_; }
  // What the target failed with. Never retried, whatever its code.
  const absl::Status& target_error() const { return target_error_; }
  PullInfo TakeInfo() && {
    info_->received_bytes = received_bytes_;
    info_->lane = lane_;
    return *std::move(info_);
  }

 private:
  void Begin(Lane lane);
  absl::Status OnMessage(grpc::ByteBuffer& message);
  absl::Status OnHeader(const v1::PullHeader& header);
  // `copy(to)` copies the data, and gives their CRC32C (0 of undamaged ones).
  template <typename Copy>
  absl::Status OnChunk(const ChunkHeader& header, Copy copy);
  absl::Status OnTrailer(const v1::PullTrailer& trailer);

  v1::PullRequest request_;
  const v1::PullRequest asked_;
  const bool wants_current_;
  const Client::PullTarget& target_;
  const std::function<void(int64_t)>& on_progress_;

  std::optional<PullInfo> info_;
  std::span<std::byte> memory_;
  absl::Status target_error_;
  int64_t position_ = 0;  // Up to here the memory is right.
  int64_t received_bytes_ = 0;
  Pieces pieces_;

  // Of the running call.
  Lane lane_ = Lane::kGrpc;
  bool has_header_ = false;
  bool has_trailer_ = false;
  bool omits_unchanged_ = false;
  bool is_refused_ = false;
  int64_t chunk_count_ = 0;
  int64_t chunk_bytes_ = 0;
  uint32_t digest_ = 0;
};

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
  EMA_RETURN_IF_ERROR(client_internal::SendRequest(lane, request, stop));
  while (!has_trailer_) {
    EMA_ASSIGN_OR_RETURN(const LanePipe::Frame frame, lane.Receive(stop));
    if (frame.is_chunk) {
      const std::span<const std::byte> data = frame.bytes;
      const ChunkHeader header{.offset = frame.offset,
                               .data_bytes = static_cast<int64_t>(data.size()),
                               .is_undamaged = true};
      EMA_RETURN_IF_ERROR(OnChunk(header, [data](std::byte* to) {
        StreamCopy(data, to);
        return uint32_t{0};
      }));
      continue;
    }
    const absl::StatusOr<v1::LaneResponse> response = client_internal::ParseResponse(frame);
    if (!response.ok()) {
      is_refused_ = !has_header_ &&
                    GetErrorReason(response.status()) != ErrorReason::kUnspecified &&
                    !client_internal::IsRetryable(response.status());
      return response.status();
    }
    if (response->has_pull()) {
      EMA_RETURN_IF_ERROR(OnHeader(response->pull()));
    } else if (response->has_trailer()) {
      EMA_RETURN_IF_ERROR(OnTrailer(response->trailer()));
    } else {
      return client_internal::MalformedReply("unexpected message in a pull");
    }
  }
  return absl::OkStatus();
}

absl::Status Puller::Attempt(Call& call) {
  Begin(Lane::kGrpc);
  MessageReader reader(&call, "/ema.v1.EmaService/Pull", request_);
  while (reader.Next() == MessageReader::Event::kMessage) {
    EMA_RETURN_IF_ERROR(OnMessage(reader.message()));
  }
  EMA_RETURN_IF_ERROR(reader.Finish());
  if (has_trailer_) return absl::OkStatus();
  return DataLoss(ErrorReason::kDigestMismatch, "the stream ended before its trailer");
}

bool Puller::StartOver() {
  if (!wants_current_ || !info_.has_value()) return false;
  request_ = asked_;
  request_.clear_if_newer_than();
  request_.clear_base();  // What was there has been written over.
  info_.reset();
  position_ = received_bytes_ = 0;
  return true;
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
  omits_unchanged_ = header.omits_unchanged() && request_.has_base();
  EMA_ASSIGN_OR_RETURN(PullInfo info, client_internal::FromProto(header));
  if (info.not_newer) {
    info_ = std::move(info);
    return absl::OkStatus();
  }
  if (info_.has_value() && !info_->not_newer) {
    if (info.total_bytes != info_->total_bytes || info.version.number != info_->version.number) {
      return client_internal::MalformedReply("another version than before the connection broke");
    }
    // A version has one for good; a synthesized average, one for each time that it is built.
    if (info.version.commit_time != info_->version.commit_time) {
      return MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotKept,
                       "the average was built again after the pull began");
    }
    return absl::OkStatus();
  }
  if (request_.has_step() && info.version.step != request_.step()) {
    return client_internal::MalformedReply("another step than requested");
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
  if (!has_header_) return client_internal::MalformedReply("a chunk before the header");
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
  if (!header.is_undamaged) digest_ = Crc32cCombine(digest_, crc, header.data_bytes);
  position_ = header.offset + header.data_bytes;
  chunk_bytes_ += header.data_bytes;
  received_bytes_ += header.data_bytes;
  ++chunk_count_;
  if (on_progress_) on_progress_(position_);
  return absl::OkStatus();
}

absl::Status Puller::OnTrailer(const v1::PullTrailer& trailer) {
  if (!has_header_) return client_internal::MalformedReply("a trailer before the header");
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

}  // namespace

absl::StatusOr<PullInfo> Client::Pull(std::string_view model, std::string_view track,
                                      const PullOptions& options, const PullTarget& target,
                                      absl::Duration timeout,
                                      const std::function<void(int64_t)>& on_progress) {
  auto request =
      client_internal::MakeRequest<v1::PullRequest>(model, {options.version, options.incarnation});
  request.set_track(std::string(track));
  request.set_label(options.label);
  if (options.step) request.set_step(*options.step);
  if (!options.selection.is_default()) {
    ToProto(options.selection, request.mutable_selection());
  }
  const auto set_id = [](const VersionId& id, v1::VersionId* proto) {
    proto->set_version(id.version);
    proto->set_incarnation(id.incarnation);
  };
  if (options.if_newer_than) set_id(*options.if_newer_than, request.mutable_if_newer_than());
  if (options.base) set_id(*options.base, request.mutable_base());
  Puller puller(std::move(request), &target, &on_progress);
  client_internal::Interrupt interrupt(&impl_->options().is_interrupted);
  const SteadyTime deadline = impl_->Deadline(timeout);
  if (std::unique_ptr<LanePipe> lane = impl_->TakeLane(deadline, &interrupt)) {
    const absl::Status attempt = puller.AttemptByLane(*lane, impl_->token().Authorization(), [&] {
      return interrupt.fired() || SteadyNow() >= deadline;
    });
    EMA_RETURN_IF_ERROR(puller.target_error());
    if (attempt.ok()) {
      impl_->GiveBackLane(std::move(lane));
      return std::move(puller).TakeInfo();
    }
    if (puller.is_refused()) return attempt;
    // Else gRPC goes on where the lane has ended.
  }
  absl::Status status;
  do {
    status = impl_->Retry(deadline, &interrupt, [&puller](Call& call) {
      const absl::Status attempt = puller.Attempt(call);
      return puller.target_error().ok() ? attempt : absl::CancelledError("ended by the target");
    });
  } while (GetErrorReason(status) == ErrorReason::kVersionNotKept && puller.StartOver());
  EMA_RETURN_IF_ERROR(puller.target_error());
  EMA_RETURN_IF_ERROR(status);
  return std::move(puller).TakeInfo();
}

}  // namespace ema
