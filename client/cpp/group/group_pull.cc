// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/group/group_pull.h"

#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/group/check_incarnation.h"
#include "client/cpp/group/same_commit.h"
#include "client/cpp/pull/puller.h"
#include "client/cpp/transport/convert_replies.h"
#include "client/cpp/transport/retry.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {
namespace {

// How long a server may take to publish a version that another one has published.
constexpr absl::Duration kPublishTimeout = absl::Seconds(5);
// The bytes of each partition begin at a multiple of this, as large tensors do.
constexpr int64_t kAlignment = 64;

int64_t Aligned(int64_t offset) { return (offset + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

GroupPull::GroupPull(Client::Impl* client, const PartitionMap* map, v1::PullRequest request,
                     const Client::PullTarget* target,
                     const std::function<void(int64_t)>* on_progress)
    : client_(client),
      map_(map),
      request_(std::move(request)),
      target_(*target),
      on_progress_(*on_progress) {}

absl::StatusOr<PullInfo> GroupPull::Run(SteadyTime deadline, Interrupt* interrupt) {
  if (request_.incarnation() == 0) request_.set_incarnation(map_->incarnation());
  const bool wants_current = request_.version() == 0;
  while (true) {
    EMA_RETURN_IF_ERROR(SelectParts());
    absl::StatusOr<PullInfo> info = Attempt(deadline, interrupt);
    const bool is_gone = GetErrorReason(info.status()) == ErrorReason::kVersionNotKept;
    // Nothing has come if the leading server does not have what is wanted.
    if (!is_gone || !wants_current || !parts_.front().header.has_value()) return info;
    request_.clear_if_newer_than();
    request_.clear_base();  // The memory has been written over.
  }
}

absl::Status GroupPull::SelectParts() {
  Selection selection;
  if (request_.has_selection()) {
    EMA_ASSIGN_OR_RETURN(selection, ema::FromProto(request_.selection()));
  }
  EMA_ASSIGN_OR_RETURN(std::vector<std::optional<Selection>> selections,
                       map_->Split(selection, request_.track()));
  parts_.clear();
  for (size_t i = 0; i < selections.size(); ++i) {
    if (!selections[i].has_value()) continue;
    Part& part = parts_.emplace_back();
    part.partition = i;
    part.request = request_;
    part.request.set_partition_only(true);
    part.request.set_model_incarnation(map_->incarnation());
    part.request.clear_selection();
    if (!selections[i]->is_default()) ToProto(*selections[i], part.request.mutable_selection());
  }
  position_ = reported_position_ = 0;
  absl::MutexLock lock(&mu_);
  has_memory_ = false;
  first_error_ = absl::OkStatus();
  return absl::OkStatus();
}

absl::StatusOr<PullInfo> GroupPull::Attempt(SteadyTime deadline, Interrupt* interrupt) {
  Interrupt inner;
  std::vector<std::jthread> threads;
  try {
    for (Part& part : parts_) {
      threads.emplace_back([this, &part, deadline, &inner] { RunPart(part, deadline, &inner); });
    }
  } catch (const std::system_error& error) {
    inner.Fire();
    return absl::UnavailableError(
        absl::StrCat("cannot start a thread for a server of the group: ", error.what()));
  }
  const auto has_header = [](const Part& part) { return part.header.has_value(); };
  const auto has_ended = [](const Part& part) { return part.has_ended; };
  bool is_wanted = false;
  {
    absl::MutexLock lock(&mu_);
    AwaitHeaders(interrupt, &inner, [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      return std::all_of(parts_.begin(), parts_.end(), has_header) ||
             std::all_of(parts_.begin(), parts_.end(), has_ended);
    });
    is_wanted = first_error_.ok() && !parts_.front().header->not_newer;
  }
  absl::Status called;
  if (is_wanted) called = CallTarget();
  if (!called.ok()) inner.Fire();
  PullInfo info;
  {
    absl::MutexLock lock(&mu_);
    AwaitUntil(SteadyTime::max(), interrupt, &inner, [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      return std::all_of(parts_.begin(), parts_.end(), has_ended);
    });
    EMA_RETURN_IF_ERROR(called);
    EMA_RETURN_IF_ERROR(first_error_);
    if (!is_wanted) return *std::move(parts_.front().header);
    EMA_ASSIGN_OR_RETURN(info, JoinHeaders());
    for (const Part& part : parts_) info.received_bytes += part.result->received_bytes;
    info.lane = parts_.front().result->lane;
  }
  ReportProgress();
  return info;
}

void GroupPull::RunPart(Part& part, SteadyTime deadline, Interrupt* interrupt) {
  absl::StatusOr<PullInfo> result = PullPart(part, deadline, interrupt);
  const bool has_failed = !result.ok();
  {
    absl::MutexLock lock(&mu_);
    first_error_.Update(result.status());
    part.result = std::move(result);
    part.has_ended = true;
    wait_.WakeAll();
  }
  if (!has_failed) return;
  // The others are of no use.
  interrupt->Fire();
  absl::MutexLock lock(&mu_);
  wait_.WakeAll();
}

absl::StatusOr<PullInfo> GroupPull::PullPart(Part& part, SteadyTime deadline,
                                             Interrupt* interrupt) {
  const PartitionMap::Partition& place = map_->partitions()[part.partition];
  if (place.address.empty()) {
    return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kGroupDegraded,
                     absl::StrCat("model \"", request_.model(), "\": server \"", place.member,
                                  "\", which has partition ", part.partition, ", does not run"));
  }
  EMA_ASSIGN_OR_RETURN(const std::shared_ptr<Client::Impl> server,
                       client_->ClientOfMember(place.address));
  Part& leading = parts_.front();
  const bool is_leading = &part == &leading;
  if (!is_leading) {
    absl::MutexLock lock(&mu_);
    while (!leading.header.has_value() && !interrupt->fired()) {
      wait_.AwaitUntil(mu_, After(SteadyNow(), Interrupt::kPollInterval),
                       [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
                         return leading.header.has_value() || !first_error_.ok();
                       });
    }
    if (!leading.header.has_value()) return absl::CancelledError("interrupted");
    if (leading.header->not_newer) return *leading.header;
    part.request.set_version(leading.header->version.number);
    part.request.set_incarnation(leading.header->version.incarnation);
    part.request.clear_label();
    part.request.clear_step();
    part.request.clear_if_newer_than();
  }
  const Client::PullTarget target = [&](const PullInfo& header) {
    return AwaitMemory(part, header, interrupt);
  };
  int64_t reported = 0;
  const std::function<void(int64_t)> on_progress = [&](int64_t position) {
    position_.fetch_add(position - std::exchange(reported, position), std::memory_order_relaxed);
  };
  Puller puller(part.request, &target, &on_progress);
  const SteadyTime publish_deadline = std::min(deadline, After(SteadyNow(), kPublishTimeout));
  Backoff backoff;
  while (true) {
    const absl::Status status = puller.Run(*server, deadline, interrupt);
    if (status.ok()) break;
    const bool may_come = !is_leading && GetErrorReason(status) == ErrorReason::kVersionNotYet;
    if (!may_come) return status;
    if (SteadyNow() >= publish_deadline) {
      return MakeError(absl::StatusCode::kUnavailable, ErrorReason::kGroupDegraded,
                       absl::StrCat("model \"", request_.model(), "\": server \"", place.member,
                                    "\" has not published a version that the group has committed: ",
                                    status.message()));
    }
    if (!interrupt->Sleep(backoff.Next(status))) return absl::CancelledError("interrupted");
  }
  PullInfo info = std::move(puller).TakeInfo();
  if (!info.not_newer) return info;
  absl::MutexLock lock(&mu_);
  part.header = info;
  wait_.WakeAll();
  return info;
}

absl::StatusOr<std::span<std::byte>> GroupPull::AwaitMemory(Part& part, const PullInfo& header,
                                                            Interrupt* interrupt) {
  absl::MutexLock lock(&mu_);
  part.header = header;
  wait_.WakeAll();
  const auto has_memory = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return has_memory_; };
  while (!wait_.AwaitUntil(mu_, After(SteadyNow(), Interrupt::kPollInterval), has_memory)) {
    if (interrupt->fired()) return absl::CancelledError("interrupted");
  }
  return part.memory;
}

absl::Status GroupPull::CallTarget() {
  PullInfo whole;
  {
    absl::MutexLock lock(&mu_);
    EMA_ASSIGN_OR_RETURN(whole, JoinHeaders());
  }
  EMA_ASSIGN_OR_RETURN(const std::span<std::byte> memory, target_(whole));
  if (static_cast<int64_t>(memory.size()) != whole.total_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the target has ", memory.size(), " bytes, expected ", whole.total_bytes));
  }
  absl::MutexLock lock(&mu_);
  int64_t end = 0;
  for (Part& part : parts_) {
    const int64_t start = Aligned(end);
    std::memset(memory.data() + end, 0, start - end);
    part.memory = memory.subspan(start, part.header->total_bytes);
    end = start + part.header->total_bytes;
  }
  has_memory_ = true;
  wait_.WakeAll();
  return absl::OkStatus();
}

absl::StatusOr<PullInfo> GroupPull::JoinHeaders() const {
  PullInfo whole;
  whole.version = parts_.front().header->version;
  // A model that has returned to a checkpoint has a version of an earlier incarnation.
  if (whole.version.incarnation > map_->incarnation()) {
    // The partitions may be others now.
    return MakeError(
        absl::StatusCode::kAborted, ErrorReason::kFenced,
        absl::StrCat("model \"", request_.model(), "\": incarnation ", whole.version.incarnation,
                     " found, expected at most ", map_->incarnation()));
  }
  for (const Part& part : parts_) {
    const PullInfo& header = *part.header;
    if (!IsSameCommit(header.version, whole.version)) {
      return MalformedReply(absl::StrCat("partition ", part.partition, " has version ",
                                         header.version.number, " of step ", header.version.step,
                                         ", partition ", parts_.front().partition, " has version ",
                                         whole.version.number, " of step ", whole.version.step));
    }
    const int64_t start = Aligned(whole.total_bytes);
    for (PulledTensor tensor : header.tensors) {
      tensor.offset += start;
      whole.tensors.push_back(std::move(tensor));
    }
    whole.total_bytes = start + header.total_bytes;
  }
  return whole;
}

void GroupPull::AwaitHeaders(Interrupt* interrupt, Interrupt* inner,
                             absl::FunctionRef<bool()> is_reached) {
  while (!AwaitUntil(After(SteadyNow(), kIncarnationCheckInterval), interrupt, inner, is_reached)) {
    mu_.Unlock();
    const absl::Status current =
        CheckIncarnation(*client_, request_.model(), map_->incarnation(), interrupt);
    mu_.Lock();
    first_error_.Update(current);
    if (current.ok()) continue;
    mu_.Unlock();  // Fire() may run callbacks.
    inner->Fire();
    mu_.Lock();
  }
}

bool GroupPull::AwaitUntil(SteadyTime until, Interrupt* interrupt, Interrupt* inner,
                           absl::FunctionRef<bool()> is_reached) {
  while (!wait_.AwaitUntil(mu_, std::min(until, After(SteadyNow(), Interrupt::kPollInterval)),
                           is_reached)) {
    // Not under the lock: these may run the user's code.
    mu_.Unlock();
    if (interrupt->fired()) inner->Fire();
    ReportProgress();
    mu_.Lock();
    if (SteadyNow() >= until) return false;
  }
  return true;
}

void GroupPull::ReportProgress() {
  const int64_t position = position_.load(std::memory_order_relaxed);
  if (!on_progress_ || position <= reported_position_) return;
  reported_position_ = position;
  on_progress_(position);
}

}  // namespace ema::client_internal
