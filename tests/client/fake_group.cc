// SPDX-License-Identifier: Apache-2.0
#include "tests/client/fake_group.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/transport/convert_replies.h"
#include "ema/error_reason.h"

namespace ema {

FakeGroup::FakeGroup(const Manifest& manifest, const std::vector<int64_t>& sizes)
    : manifest_(manifest), pull_counts_(sizes.size()) {
  int64_t first = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const absl::Span<const TensorSpec> tensors = manifest_.tensors().subspan(first, sizes[i]);
    parts_.push_back(*Manifest::Create({tensors.begin(), tensors.end()}));
    first_tensors_.push_back(first);
    first += sizes[i];
    servers_.push_back(std::make_unique<FakeServer>(parts_.back()));
    FakeServer& server = *servers_.back();
    server.edit_model = [this](v1::Model& model) { Describe(model); };
    server.check_push = [this](const v1::PushHeader& header) { return CheckPush(header); };
    server.check_pull = [this, i](const v1::PullRequest& request) { return CheckPull(i, request); };
    server.edit_open_run = [this](v1::OpenRunResponse& response) { response.set_round(round()); };
    server.on_complete = [this, i](int64_t step) { OnComplete(i, step); };
    if (i == 0) server.on_abandon = [this](int64_t step) { return OnAbandon(step); };
    // Bytes that say where they come from.
    server.pulled_bytes = std::string(100 + 10 * i, static_cast<char>('a' + i));
    server.edit_pull_header = [this, i](v1::PullHeader& header) {
      header.mutable_tensors(0)->mutable_spec()->set_name(parts_[i].tensor(0).name);
      header.mutable_version()->set_incarnation(kIncarnation);
      if (static_cast<int64_t>(i) == diverging_partition_) header.mutable_version()->set_step(9);
    };
  }
}

FakeGroup::~FakeGroup() {
  // Their calls use this object.
  for (const std::unique_ptr<FakeServer>& server : servers_) server->Stop();
}

int64_t FakeGroup::round() const {
  absl::MutexLock lock(&mu_);
  return round_;
}

void FakeGroup::Describe(v1::Model& model) const {
  model.clear_manifest();
  ToProto(manifest_, model.mutable_manifest());
  model.set_manifest_digest(manifest_.digest());
  model.set_incarnation(kIncarnation);
  for (size_t i = 0; i < servers_.size(); ++i) {
    v1::Partition* const partition = model.add_partitions();
    partition->set_member(absl::StrCat("ema-", i));
    partition->set_address(servers_[i]->address());
    partition->set_first_tensor(first_tensors_[i]);
    partition->set_tensor_count(parts_[i].tensor_count());
  }
}

absl::Status FakeGroup::CheckPush(const v1::PushHeader& header) {
  absl::MutexLock lock(&mu_);
  if (header.incarnation() != kIncarnation) {
    return MakeError(absl::StatusCode::kAborted, ErrorReason::kFenced, "incarnation");
  }
  if (header.round() == round_) return absl::OkStatus();
  absl::Status stale = MakeError(absl::StatusCode::kAborted, ErrorReason::kStaleRound,
                                 absl::StrCat("round ", header.round(), " has ended"));
  SetGroupHint(stale, {.round = round_, .incarnation = kIncarnation});
  return stale;
}

absl::Status FakeGroup::CheckPull(size_t partition, const v1::PullRequest& request) {
  if (!request.partition_only()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNotHome,
                     "the model has several partitions");
  }
  absl::MutexLock lock(&mu_);
  if (partition > 0 && pull_counts_[partition]++ < not_yet_count_) {
    return MakeError(absl::StatusCode::kOutOfRange, ErrorReason::kVersionNotYet, "not yet",
                     absl::Milliseconds(1));
  }
  return absl::OkStatus();
}

void FakeGroup::AbortRound() {
  absl::MutexLock lock(&mu_);
  complete_.clear();
  ++round_;
}

v1::VersionRecord FakeGroup::Commit(int64_t step) {
  v1::VersionRecord record;
  record.set_incarnation(kIncarnation);
  record.set_version(++version_);
  record.set_step(step);
  record.set_commit_time_us(1'000'000 + version_);
  complete_.clear();
  ++round_;
  return record;
}

void FakeGroup::Publish(const v1::VersionRecord& record, int64_t round) {
  for (size_t i = 0; i < servers_.size(); ++i) {
    v1::VersionRecord published = record;
    if (static_cast<int64_t>(i) == diverging_partition_) published.set_version(1000);
    servers_[i]->Publish(published, round);
  }
}

void FakeGroup::OnComplete(size_t partition, int64_t step) {
  v1::VersionRecord record;
  int64_t round = 0;
  {
    absl::MutexLock lock(&mu_);
    complete_.insert(partition);
    if (complete_.size() < servers_.size()) return;
    record = Commit(step);
    round = round_;
  }
  Publish(record, round);
}

int64_t FakeGroup::OnAbandon(int64_t step) {
  v1::VersionRecord record;
  int64_t round = 0;
  {
    absl::MutexLock lock(&mu_);
    if (commits_abandoned_steps_) record = Commit(step);
    complete_.clear();
    if (!commits_abandoned_steps_) ++round_;
    round = round_;
  }
  if (commits_abandoned_steps_) {
    Publish(record, round);
  } else {
    for (const std::unique_ptr<FakeServer>& server : servers_) server->AbandonStep(step);
  }
  return round;
}

}  // namespace ema
