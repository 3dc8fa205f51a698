// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/pull_handler.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/rpc/convert.h"

namespace ema {

absl::Status PullHandler::Open(const v1::PullRequest& request) {
  EMA_ASSIGN_OR_RETURN(model_, store_->Get(request.model()));
  EMA_RETURN_IF_ERROR(OpenReading(request));
  if (reading_ == nullptr) return absl::OkStatus();
  EMA_RETURN_IF_ERROR(Begin(request.offset()));
  // Of a version after this one it is not known what has been the same.
  const VersionId base{request.base().version(), request.base().incarnation()};
  if (request.has_base() && base <= record_.id() &&
      model_->RemembersVersion(base.version, base.incarnation)) {
    base_version_ = base.version;
  }
  return absl::OkStatus();
}

absl::Status PullHandler::OpenStored() {
  if (!on_disk_.has_value()) return absl::OkStatus();
  OnDisk wanted = *std::exchange(on_disk_, std::nullopt);
  reading_ = model_->FindStoredReading(wanted.id, wanted.track, wanted.selection);
  if (reading_ == nullptr) {
    absl::StatusOr<SnapshotRef> snapshot =
        checkpoints_->OpenVersion(*model_, wanted.id, wanted.track);
    if (GetErrorReason(snapshot.status()) == ErrorReason::kVersionNotKept) {
      EMA_RETURN_IF_ERROR(wanted.too_many_pins);
    }
    EMA_RETURN_IF_ERROR(snapshot.status());
    EMA_ASSIGN_OR_RETURN(reading_,
                         model_->ReadStored(*std::move(snapshot), std::move(wanted.selection)));
  }
  return Begin(wanted.offset);
}

absl::Status PullHandler::Begin(int64_t offset) {
  record_ = reading_->snapshot()->record;
  if (offset < 0 || offset > reading_->total_bytes()) {
    return MakeError(
        absl::StatusCode::kOutOfRange, ErrorReason::kBadRequest,
        absl::StrCat("offset: ", offset, " given, expected 0 to ", reading_->total_bytes()));
  }
  position_ = offset;
  return absl::OkStatus();
}

absl::StatusOr<VersionId> PullHandler::FindVersion(const v1::PullRequest& request) const {
  if (request.version() < 0) {
    return BadMessage(absl::StrCat("version: ", request.version(), " given, expected 0 or more"));
  }
  if (request.has_if_newer_than() && request.version() != 0) {
    return BadMessage(absl::StrCat("version: ", request.version(),
                                   " given with if_newer_than, which is about the newest: "
                                   "expected 0"));
  }
  if (request.label().empty()) return VersionId{request.version(), request.incarnation()};
  const std::string label = absl::StrCat("label: \"", absl::CHexEscape(request.label()), "\"");
  if (request.version() != 0) {
    return BadMessage(absl::StrCat(label, " given with version ", request.version(), ": expected ",
                                   "one of the two"));
  }
  if (request.has_if_newer_than()) {
    return BadMessage(absl::StrCat(label,
                                   " given with if_newer_than, which is about the newest: "
                                   "expected one of the two"));
  }
  return checkpoints_->FindLabel(*model_, request.label());
}

absl::Status PullHandler::OpenReading(const v1::PullRequest& request) {
  EMA_ASSIGN_OR_RETURN(const VersionId id, FindVersion(request));
  if (request.has_if_newer_than()) {
    const v1::VersionId& known = request.if_newer_than();
    EMA_ASSIGN_OR_RETURN(const std::optional<VersionRecord> newest,
                         model_->NewestOf(request.track()));
    if (newest.has_value() && std::pair(newest->incarnation, newest->version) <=
                                  std::pair(known.incarnation(), known.version())) {
      record_ = *newest;
      return absl::OkStatus();
    }
  }
  EMA_ASSIGN_OR_RETURN(Selection selection, FromProto(request.selection()));
  absl::StatusOr<std::shared_ptr<Reading>> reading =
      model_->OpenReading(request.track(), id.version, id.incarnation, selection);
  const ErrorReason reason = GetErrorReason(reading.status());
  const bool is_not_in_memory =
      reason == ErrorReason::kVersionNotKept ||
      (reason == ErrorReason::kNoVersion && id.version != 0 && !model_->latest().has_value());
  const bool is_too_many = reason == ErrorReason::kTooManyPins && id.version != 0;
  if (is_not_in_memory || is_too_many) {
    on_disk_ = OnDisk{id, request.track(), std::move(selection), request.offset(),
                      is_too_many ? reading.status() : absl::OkStatus()};
    return absl::OkStatus();
  }
  EMA_RETURN_IF_ERROR(reading.status());
  reading_ = *std::move(reading);
  return absl::OkStatus();
}

v1::PullHeader PullHandler::Header() const {
  v1::PullHeader header;
  *header.mutable_version() = ToProto(record_);
  header.set_not_newer(reading_ == nullptr);
  header.set_omits_unchanged(base_version_.has_value());
  if (reading_ == nullptr) return header;
  header.set_total_bytes(reading_->total_bytes());
  reading_->ForEachTensor([&](const Reading::Tensor& read) {
    v1::PullHeader::Tensor* const tensor = header.add_tensors();
    v1::TensorSpec* const spec = tensor->mutable_spec();
    ToProto(model_->manifest().tensor(read.index), spec);
    spec->set_dtype(static_cast<v1::Dtype>(read.place.dtype));
    tensor->set_offset(read.place.offset);
    tensor->set_length_bytes(read.place.length_bytes);
    if (read.slice == nullptr) return;
    spec->mutable_shape()->Assign(read.slice->extents.begin(), read.slice->extents.end());
    tensor->mutable_slice_offsets()->Assign(read.slice->offsets.begin(), read.slice->offsets.end());
  });
  return header;
}

absl::StatusOr<std::optional<PullHandler::Chunk>> PullHandler::Next() {
  if (reading_ == nullptr) return std::nullopt;
  if (base_version_.has_value()) {
    while (position_ < reading_->total_bytes() &&
           !reading_->ChunkChangedSince(*base_version_, position_)) {
      position_ = reading_->ChunkEnd(position_);
    }
  }
  if (position_ == reading_->total_bytes()) return std::nullopt;
  Chunk chunk{
      .offset = position_, .length_bytes = reading_->ChunkEnd(position_) - position_, .pieces = {}};
  EMA_ASSIGN_OR_RETURN(chunk.pieces, reading_->Read(chunk.offset, chunk.length_bytes));
  position_ += chunk.length_bytes;
  sent_bytes_ += chunk.length_bytes;
  ++chunk_count_;
  return chunk;
}

ServerObserver::PullEnd PullHandler::EndOf(const absl::Status& status,
                                           absl::Duration duration) const {
  return {.model = model_ != nullptr ? std::string_view(model_->config().name) : std::string_view(),
          .status = status,
          .sent_bytes = sent_bytes_,
          .duration = duration};
}

v1::PullTrailer PullHandler::Trailer(uint32_t digest) const {
  v1::PullTrailer trailer;
  trailer.set_chunk_count(chunk_count_);
  trailer.set_total_bytes(sent_bytes_);
  trailer.set_digest(digest);
  return trailer;
}

}  // namespace ema
