// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/pull_handler.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/quoted.h"
#include "server/core/known_versions.h"
#include "server/rpc/convert_core.h"

namespace ema {
namespace {

// INVALID_ARGUMENT: more than one field names the version, or a number is negative.
absl::Status CheckNamesOne(const v1::PullRequest& request) {
  if (request.version() < 0) {
    return BadRequest(absl::StrCat("version: ", request.version(), " given, expected 0 or more"));
  }
  if (request.step() < 0) {
    return BadRequest(absl::StrCat("step: ", request.step(), " given, expected 0 or more"));
  }
  std::vector<std::string> given;
  if (!request.label().empty()) {
    given.push_back(absl::StrCat("label: ", Quoted(request.label())));
  }
  if (request.version() != 0) given.push_back(absl::StrCat("version: ", request.version()));
  if (request.has_step()) given.push_back(absl::StrCat("step: ", request.step()));
  if (request.has_if_newer_than()) given.push_back("if_newer_than, which is about the newest");
  if (given.size() <= 1) return absl::OkStatus();
  return BadRequest(absl::StrCat(absl::StrJoin(given, " given with "), ": expected one of these"));
}

}  // namespace

absl::Status PullHandler::Open(const v1::PullRequest& request) {
  EMA_ASSIGN_OR_RETURN(model_, store_->Get(request.model()));
  if (model_->is_partition() && !request.partition_only()) {
    // The client does not know that there are other partitions.
    return MakeError(
        absl::StatusCode::kFailedPrecondition, ErrorReason::kNotHome,
        absl::StrCat("partition_only: not given, but model \"", request.model(),
                     "\" is on a group of servers: GetModel returns its partitions, each of which "
                     "is pulled from its own server"));
  }
  if (model_->is_partition() && request.model_incarnation() != 0 &&
      request.model_incarnation() != model_->incarnation()) {
    // The version may be in both, but the tensors of this partition are others.
    return MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced,
                     absl::StrCat("model_incarnation: ", request.model_incarnation(),
                                  " given, but model \"", request.model(), "\" has ",
                                  model_->incarnation(), " now: GetModel returns its partitions"));
  }
  offset_ = request.offset();
  EMA_RETURN_IF_ERROR(OpenReading(request));
  if (reading_ == nullptr) return absl::OkStatus();
  EMA_RETURN_IF_ERROR(Begin());
  // Changes since a version are known only if that is not a later one.
  const VersionId base{request.base().version(), request.base().incarnation()};
  if (request.has_base() && base <= record_.id() &&
      model_->history().FindRecord({base.version, base.incarnation}).has_value()) {
    base_version_ = base.version;
    SkipUnchanged();
  }
  return absl::OkStatus();
}

void PullHandler::SkipUnchanged() {
  if (!base_version_.has_value()) return;
  while (position_ < reading_->total_bytes() &&
         !reading_->ChunkChangedSince(*base_version_, position_)) {
    position_ = reading_->ChunkEnd(position_);
  }
}

absl::Status PullHandler::OpenStored() {
  if (!on_disk_.has_value()) return absl::OkStatus();
  if (on_disk_->step.has_value()) EMA_RETURN_IF_ERROR(FindStoredStep());
  if (on_disk_.has_value()) {
    Wanted wanted = *std::exchange(on_disk_, std::nullopt);
    reading_ = model_->readings().FindStored(wanted.id, wanted.track, wanted.selection);
    if (reading_ == nullptr) EMA_RETURN_IF_ERROR(OpenFromDisk(std::move(wanted)));
  }
  return Begin();
}

absl::Status PullHandler::FindStoredStep() {
  Wanted wanted = *std::exchange(on_disk_, std::nullopt);
  const std::optional<Version> latest = model_->history().latest();
  const auto find = [&](bool with_partial) -> absl::StatusOr<VersionId> {
    EMA_ASSIGN_OR_RETURN(const std::vector<KnownVersion> on_disk,
                         checkpoints_->OnDisk(*model_, with_partial));
    return VersionAtStep(model_->config().name,
                         BranchOf(MergeKnownVersions(model_->history(), on_disk), *latest),
                         *wanted.step);
  };
  absl::StatusOr<VersionId> found = find(/*with_partial=*/false);
  if (GetErrorReason(found.status()) == ErrorReason::kVersionNotKept) {
    // The track may have been saved without the others.
    if (const auto partial = find(/*with_partial=*/true); partial.ok()) found = partial;
  }
  EMA_ASSIGN_OR_RETURN(wanted.id, std::move(found));
  wanted.step.reset();
  // In memory after all, if a rollback has gone back to that step meanwhile.
  return OpenVersion(std::move(wanted));
}

absl::Status PullHandler::OpenFromDisk(Wanted wanted) {
  absl::StatusOr<SnapshotRef> snapshot =
      checkpoints_->OpenVersion(*model_, wanted.id, wanted.track);
  if (GetErrorReason(snapshot.status()) == ErrorReason::kVersionNotKept) {
    EMA_RETURN_IF_ERROR(wanted.too_many_pins);
  }
  EMA_RETURN_IF_ERROR(snapshot.status());
  EMA_ASSIGN_OR_RETURN(reading_,
                       model_->readings().OpenStored(*std::move(snapshot), wanted.selection));
  return absl::OkStatus();
}

absl::Status PullHandler::Begin() {
  record_ = reading_->snapshot()->record;
  if (offset_ < 0 || offset_ > reading_->total_bytes()) {
    return MakeError(
        absl::StatusCode::kOutOfRange, ErrorReason::kBadRequest,
        absl::StrCat("offset: ", offset_, " given, expected 0 to ", reading_->total_bytes()));
  }
  position_ = offset_;
  EMA_ASSIGN_OR_RETURN(header_memory_, reading_->ReserveHeader());
  return absl::OkStatus();
}

absl::StatusOr<VersionId> PullHandler::FindVersion(const v1::PullRequest& request) const {
  EMA_RETURN_IF_ERROR(CheckNamesOne(request));
  if (!request.label().empty()) return checkpoints_->FindLabel(*model_, request.label());
  VersionId id{request.version(), request.incarnation()};
  // A client that knows only the model's incarnation gives that, but the version may be from before
  // the model returned to a checkpoint.
  const bool is_of_model = model_->is_partition() && id.incarnation == model_->incarnation();
  if (is_of_model && !model_->history().FindRecord(id).has_value()) {
    const std::optional<Version> latest = model_->history().latest();
    if (latest.has_value() && id.version <= latest->number) id.incarnation = 0;
  }
  return id;
}

absl::Status PullHandler::OpenReading(const v1::PullRequest& request) {
  Wanted wanted{.track = request.track()};
  EMA_ASSIGN_OR_RETURN(wanted.id, FindVersion(request));
  if (request.has_if_newer_than()) {
    const v1::VersionId& known = request.if_newer_than();
    EMA_ASSIGN_OR_RETURN(const std::optional<Version> newest,
                         model_->readings().NewestOf(request.track()));
    if (newest.has_value() && newest->id() <= VersionId{known.version(), known.incarnation()}) {
      record_ = *newest;
      return absl::OkStatus();
    }
  }
  EMA_RETURN_IF_ERROR(
      Reading::CheckCounts(request.selection().tensors_size(), request.selection().slices_size()));
  EMA_ASSIGN_OR_RETURN(wanted.selection, FromProto(request.selection()));
  EMA_RETURN_IF_ERROR(Reading::CheckCounts(wanted.selection));
  if (request.has_step()) {
    EMA_ASSIGN_OR_RETURN(const std::optional<VersionId> found,
                         model_->readings().FindStep(request.track(), request.step()));
    wanted.step = request.step();
    if (!found.has_value()) {
      on_disk_ = std::move(wanted);
      return absl::OkStatus();
    }
    wanted.id = *found;
  }
  return OpenVersion(std::move(wanted));
}

absl::Status PullHandler::OpenVersion(Wanted wanted) {
  const int64_t version = wanted.id.version;
  absl::StatusOr<std::shared_ptr<Reading>> reading =
      model_->readings().Open(wanted.track, version, wanted.id.incarnation, wanted.selection);
  const ErrorReason reason = GetErrorReason(reading.status());
  const bool is_first = reason == ErrorReason::kNoVersion && version != 0 &&
                        wanted.id.incarnation == model_->incarnation() &&
                        !model_->history().latest().has_value();
  if (model_->is_partition() && (is_first || reason == ErrorReason::kVersionNotYet)) {
    // Another partition may have published it already; this one does so in a moment.
    return MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotYet,
                     std::string(reading.status().message()), absl::Milliseconds(20));
  }
  const bool is_not_in_memory = reason == ErrorReason::kVersionNotKept ||
                                (reason == ErrorReason::kNoVersion && version != 0 &&
                                 !model_->history().latest().has_value());
  const bool is_too_many = reason == ErrorReason::kTooManyPins && version != 0;
  if (is_not_in_memory || is_too_many) {
    if (is_too_many) {
      wanted.too_many_pins = reading.status();
      wanted.step.reset();
    }
    on_disk_ = std::move(wanted);
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
  header_memory_.reset();
  if (reading_ == nullptr || position_ == reading_->total_bytes()) return std::nullopt;
  Chunk chunk{
      .offset = position_, .length_bytes = reading_->ChunkEnd(position_) - position_, .pieces = {}};
  EMA_ASSIGN_OR_RETURN(chunk.pieces, reading_->Read(chunk.offset, chunk.length_bytes));
  position_ += chunk.length_bytes;
  sent_bytes_ += chunk.length_bytes;
  ++chunk_count_;
  SkipUnchanged();
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
