// SPDX-License-Identifier: Apache-2.0
#include "server/registry/etcd_watch.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

constexpr absl::Duration kShortestPause = absl::Milliseconds(200);
constexpr absl::Duration kLongestPause = absl::Seconds(5);

RegistryUpdate ToUpdate(const etcdserverpb::WatchResponse& response) {
  RegistryUpdate update;
  for (const etcdserverpb::Event& event : response.events()) {
    RegistryEntry& entry = update.entries.emplace_back(ToEntry(event.kv()));
    if (event.type() == etcdserverpb::Event::DELETE) entry.revision = 0;
  }
  return update;
}

}  // namespace

EtcdWatch::EtcdWatch(std::shared_ptr<EtcdClient> client, std::string_view prefix,
                     std::function<void(const RegistryUpdate&)> on_update)
    : client_(std::move(client)),
      prefix_(prefix),
      on_update_(std::move(on_update)),
      thread_(&EtcdWatch::Run, this) {}

EtcdWatch::~EtcdWatch() {
  {
    absl::MutexLock lock(&mu_);
    is_stopped_ = true;
    if (context_ != nullptr) context_->TryCancel();
    stop_wait_.WakeAll();
  }
  thread_.join();
}

void EtcdWatch::Run() {
  absl::Duration pause = kShortestPause;
  while (true) {
    const SteadyTime start = SteadyNow();
    const absl::StatusOr<int64_t> revision = ReportAll();
    const absl::Status status =
        revision.ok() ? FollowChanges(/*start_revision=*/*revision + 1) : revision.status();
    // etcd answers, but refuses the watch or ends it soon. Each attempt costs it a read of all
    // keys.
    const bool is_refused =
        (revision.ok() || !absl::IsUnavailable(status)) && Since(start) < kLongestPause;
    pause = is_refused ? std::min(2 * pause, kLongestPause) : kShortestPause;
    absl::MutexLock lock(&mu_);
    if (!is_stopped_ && !is_interrupted_) {
      is_interrupted_ = true;
      LogTo(client_->log(), LogLevel::kWarning, "registry watch interrupted",
            {{"prefix", prefix_}, {"error", status}});
    }
    const auto is_stopped = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return is_stopped_; };
    if (stop_wait_.AwaitUntil(mu_, After(SteadyNow(), pause), is_stopped)) return;
  }
}

absl::StatusOr<int64_t> EtcdWatch::ReportAll() {
  EMA_ASSIGN_OR_RETURN(const etcdserverpb::RangeResponse range,
                       client_->Range(prefix_, PrefixEnd(prefix_)));
  if (std::exchange(is_interrupted_, false)) {
    LogTo(client_->log(), LogLevel::kInfo, "registry watch resumed", {{"prefix", prefix_}});
  }
  RegistryUpdate update{.is_complete = true};
  for (const etcdserverpb::KeyValue& pair : range.kvs()) update.entries.push_back(ToEntry(pair));
  on_update_(update);
  return range.header().revision();
}

absl::Status EtcdWatch::FollowChanges(int64_t start_revision) {
  EMA_ASSIGN_OR_RETURN(const EtcdClient::Stream stream, client_->OpenStream());
  {
    absl::MutexLock lock(&mu_);
    if (is_stopped_) return absl::CancelledError("stopped");
    context_ = stream.context;
  }
  etcdserverpb::WatchRequest request;
  request.mutable_create()->set_key(prefix_);
  request.mutable_create()->set_range_end(PrefixEnd(prefix_));
  request.mutable_create()->set_start_revision(start_revision);
  const auto call = stream.connection->watch.Watch(stream.context.get());
  etcdserverpb::WatchResponse response;
  std::string reason;
  bool is_open = call->Write(request);
  while (is_open && call->Read(&response)) {
    if (response.events_size() > 0) on_update_(ToUpdate(response));
    if (response.canceled()) {
      reason = response.compact_revision() != 0
                   ? absl::StrCat("changes before revision ", response.compact_revision(),
                                  " have been compacted")
                   : response.cancel_reason();
      is_open = false;
    }
  }
  stream.context->TryCancel();
  const grpc::Status status = call->Finish();
  if (reason.empty()) reason = status.error_message();
  return absl::UnavailableError(absl::StrCat(stream.connection->endpoint, ": ", reason));
}

}  // namespace ema
