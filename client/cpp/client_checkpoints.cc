// SPDX-License-Identifier: Apache-2.0
//
// The calls about versions on the server's disk, and the files beside them.
#include <span>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/transport/convert_replies.h"
#include "ema/client.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/crc32c.h"

namespace ema {

using client_internal::FromProto;
using client_internal::MakeRequest;
using client_internal::Stub;

namespace {

// A message has at most 8 MiB.
constexpr size_t kFilePartBytes = size_t{4} << 20;
// Tries to read a file that another client replaces at the same time.
constexpr int kFileTries = 4;

}  // namespace

std::string_view CheckpointStateName(CheckpointInfo::State state) {
  switch (state) {
    case CheckpointInfo::State::kSaving:
      return "saving";
    case CheckpointInfo::State::kComplete:
      return "complete";
    case CheckpointInfo::State::kFailed:
      return "failed";
    case CheckpointInfo::State::kCorrupt:
      return "corrupt";
  }
  return "unknown";
}

absl::Status Client::AttachFile(std::string_view model, std::string_view name,
                                std::string_view bytes, absl::Duration timeout) {
  client_internal::Interrupt interrupt(&impl_->options().is_interrupted);
  const SteadyTime deadline = impl_->Deadline(timeout);
  auto request = MakeRequest<v1::AttachFileRequest>(model);
  request.set_name(std::string(name));
  request.set_total_bytes(static_cast<int64_t>(bytes.size()));
  // One part also of an empty file.
  size_t offset = 0;
  do {
    const std::string_view part = bytes.substr(offset, kFilePartBytes);
    request.set_offset(static_cast<int64_t>(offset));
    request.set_data(part.data(), part.size());
    EMA_RETURN_IF_ERROR(
        impl_->UnaryWithRetries(&Stub::PrepareAsyncAttachFile, request, deadline, &interrupt)
            .status());
    offset += part.size();
  } while (offset < bytes.size());
  return absl::OkStatus();
}

absl::StatusOr<std::string> Client::GetAttachedFile(std::string_view model, std::string_view name,
                                                    absl::Duration timeout) {
  client_internal::Interrupt interrupt(&impl_->options().is_interrupted);
  const SteadyTime deadline = impl_->Deadline(timeout);
  auto request = MakeRequest<v1::GetAttachedFileRequest>(model);
  request.set_name(std::string(name));
  for (int tries = 0; tries < kFileTries; ++tries) {
    std::string bytes;
    while (true) {
      request.set_offset(static_cast<int64_t>(bytes.size()));
      const absl::StatusOr<v1::GetAttachedFileResponse> part = impl_->UnaryWithRetries(
          &Stub::PrepareAsyncGetAttachedFile, request, deadline, &interrupt);
      // A shorter one has taken its place.
      if (absl::IsOutOfRange(part.status())) break;
      EMA_RETURN_IF_ERROR(part.status());
      bytes += part->data();
      const int64_t left = part->total_bytes() - static_cast<int64_t>(bytes.size());
      if (left > 0 && !part->data().empty()) continue;
      if (left == 0 && Crc32c(0, std::as_bytes(std::span(bytes))) == part->crc32c()) return bytes;
      break;
    }
  }
  return absl::AbortedError(absl::StrCat("file \"", std::string(name), "\" of model \"",
                                         std::string(model), "\" changed while it was being read"));
}

absl::Status Client::RemoveAttachedFile(std::string_view model, std::string_view name,
                                        absl::Duration timeout) {
  auto request = MakeRequest<v1::AttachFileRequest>(model);
  request.set_name(std::string(name));
  request.set_remove(true);
  return impl_->UnaryWithRetries(&Stub::PrepareAsyncAttachFile, request, timeout).status();
}

absl::StatusOr<Client::CheckpointResult> Client::CreateCheckpoint(std::string_view model,
                                                                  const CheckpointOptions& options,
                                                                  absl::Duration timeout) {
  auto request =
      MakeRequest<v1::CreateCheckpointRequest>(model, {options.version, options.incarnation});
  for (const std::string& track : options.tracks) request.add_tracks(track);
  request.set_async(options.async);
  request.set_label(options.label);
  EMA_ASSIGN_OR_RETURN(
      const v1::CreateCheckpointResponse response,
      impl_->UnaryWithRetries(&Stub::PrepareAsyncCreateCheckpoint, request, timeout));
  return CheckpointResult{
      FromProto(response.version()), response.checkpoint(), response.total_bytes(),
      response.state() == v1::Checkpoint::STATE_SAVING ? CheckpointInfo::State::kSaving
                                                       : CheckpointInfo::State::kComplete};
}

absl::StatusOr<CheckpointInfo> Client::GetCheckpoint(std::string_view model,
                                                     std::string_view checkpoint,
                                                     absl::Duration timeout) {
  auto request = MakeRequest<v1::GetCheckpointRequest>(model);
  request.set_checkpoint(std::string(checkpoint));
  EMA_ASSIGN_OR_RETURN(const v1::Checkpoint reply,
                       impl_->UnaryWithRetries(&Stub::PrepareAsyncGetCheckpoint, request, timeout));
  return FromProto(reply);
}

absl::StatusOr<CheckpointList> Client::ListCheckpoints(std::string_view model,
                                                       absl::Duration timeout) {
  EMA_ASSIGN_OR_RETURN(
      const v1::ListCheckpointsResponse response,
      impl_->UnaryWithRetries(&Stub::PrepareAsyncListCheckpoints,
                              MakeRequest<v1::ListCheckpointsRequest>(model), timeout));
  CheckpointList list;
  for (const v1::Checkpoint& checkpoint : response.checkpoints()) {
    EMA_ASSIGN_OR_RETURN(CheckpointInfo info, FromProto(checkpoint));
    list.checkpoints.push_back(std::move(info));
  }
  for (const v1::Label& label : response.labels()) list.labels.push_back(FromProto(label));
  return list;
}

absl::Status Client::DeleteCheckpoint(std::string_view model, std::string_view checkpoint,
                                      absl::Duration timeout) {
  auto request = MakeRequest<v1::DeleteCheckpointRequest>(model);
  request.set_checkpoint(std::string(checkpoint));
  return impl_->UnaryWithRetries(&Stub::PrepareAsyncDeleteCheckpoint, request, timeout).status();
}

absl::StatusOr<Version> Client::RestoreCheckpoint(std::string_view model, const VersionId& id,
                                                  absl::Duration timeout) {
  auto request = MakeRequest<v1::RestoreCheckpointRequest>(model, id);
  // Not retried: if the answer is lost, the call may have succeeded.
  EMA_ASSIGN_OR_RETURN(const v1::VersionRecord record,
                       impl_->UnaryOnce(&Stub::PrepareAsyncRestoreCheckpoint, request, timeout));
  return FromProto(record);
}

absl::StatusOr<Version> Client::RestoreCheckpoint(std::string_view model, std::string_view label,
                                                  absl::Duration timeout) {
  auto request = MakeRequest<v1::RestoreCheckpointRequest>(model);
  request.set_label(std::string(label));
  EMA_ASSIGN_OR_RETURN(const v1::VersionRecord record,
                       impl_->UnaryOnce(&Stub::PrepareAsyncRestoreCheckpoint, request, timeout));
  return FromProto(record);
}

absl::StatusOr<CheckpointLabel> Client::SetLabel(std::string_view model, std::string_view label,
                                                 const VersionId& id, absl::Duration timeout) {
  auto request = MakeRequest<v1::SetLabelRequest>(model, id);
  request.set_label(std::string(label));
  EMA_ASSIGN_OR_RETURN(const v1::Label reply,
                       impl_->UnaryWithRetries(&Stub::PrepareAsyncSetLabel, request, timeout));
  return FromProto(reply);
}

absl::Status Client::RemoveLabel(std::string_view model, std::string_view label,
                                 absl::Duration timeout) {
  auto request = MakeRequest<v1::SetLabelRequest>(model);
  request.set_label(std::string(label));
  request.set_remove(true);
  absl::Status status =
      impl_->UnaryWithRetries(&Stub::PrepareAsyncSetLabel, request, timeout).status();
  // Perhaps a try before, whose answer was lost, has taken it away.
  return GetErrorReason(status) == ErrorReason::kLabelNotFound ? absl::OkStatus() : status;
}

absl::StatusOr<MetricResult> Client::ReportMetric(std::string_view model, const Metric& metric,
                                                  absl::Duration timeout) {
  auto request = MakeRequest<v1::ReportMetricRequest>(model, metric.id);
  request.set_value(metric.value);
  request.set_lower_is_better(metric.lower_is_better);
  request.set_label(metric.label);
  EMA_ASSIGN_OR_RETURN(const v1::ReportMetricResponse response,
                       impl_->UnaryWithRetries(&Stub::PrepareAsyncReportMetric, request, timeout));
  return MetricResult{FromProto(response.label()), response.moved()};
}

}  // namespace ema
