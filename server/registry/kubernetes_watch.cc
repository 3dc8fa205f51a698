// SPDX-License-Identifier: Apache-2.0
#include "server/registry/kubernetes_watch.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

constexpr absl::Duration kShortestListPause = absl::Milliseconds(200);
constexpr absl::Duration kLongestListPause = absl::Seconds(5);
// In the order of the streams.
constexpr std::array<KubernetesKind, 2> kKinds = {KubernetesKind::kConfigMap,
                                                  KubernetesKind::kLease};

// A renewal of a lease is not a change.
bool IsChange(const KubernetesObject& before, const KubernetesObject& now) {
  if (before.kind == KubernetesKind::kLease && now.kind == KubernetesKind::kLease) {
    return before.holder != now.holder || before.entry.value != now.entry.value;
  }
  return before.entry.revision != now.entry.revision;
}

}  // namespace

KubernetesWatch::KubernetesWatch(std::shared_ptr<KubernetesClient> client, std::string_view prefix,
                                 std::function<void(const RegistryUpdate&)> on_update)
    : client_(std::move(client)),
      prefix_(prefix),
      on_update_(std::move(on_update)),
      thread_(&KubernetesWatch::Run, this) {}

KubernetesWatch::~KubernetesWatch() {
  {
    absl::MutexLock lock(&mu_);
    is_stopped_ = true;
    if (streams_ != nullptr) streams_->Stop();
    stop_wait_.WakeAll();
  }
  thread_.join();
}

bool KubernetesWatch::is_stopped() const {
  absl::MutexLock lock(&mu_);
  return is_stopped_;
}

void KubernetesWatch::Run() {
  absl::Duration pause = kShortestListPause;
  while (true) {
    const SteadyTime start = SteadyNow();
    const absl::Status status = Follow();
    // Each attempt costs the API server two lists.
    pause = Since(start) < kLongestListPause ? std::min(2 * pause, kLongestListPause)
                                             : kShortestListPause;
    absl::MutexLock lock(&mu_);
    if (!is_stopped_ && !status.ok()) {
      must_report_all_ = true;
      if (!std::exchange(is_interrupted_, true)) {
        LogTo(client_->log(), LogLevel::kWarning, "registry watch interrupted",
              {{"prefix", prefix_}, {"error", status}});
      }
    }
    const auto is_stopped = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return is_stopped_; };
    if (stop_wait_.AwaitUntil(mu_, After(SteadyNow(), pause), is_stopped)) return;
  }
}

absl::Status KubernetesWatch::Follow() {
  std::array<KubernetesList, kKinds.size()> lists;
  for (size_t i = 0; i < kKinds.size(); ++i) {
    absl::StatusOr<KubernetesList> list = client_->List(kKinds[i], prefix_);
    has_lost_contact_ |= !list.ok();
    EMA_RETURN_IF_ERROR(list.status());
    lists[i] = *std::move(list);
  }
  if (std::exchange(has_lost_contact_, false)) client_->leases().Restart();
  Objects objects;
  std::vector<KubernetesObject> expired;
  for (KubernetesList& list : lists) {
    for (KubernetesObject& object : list.objects) {
      if (object.kind == KubernetesKind::kLease && client_->leases().IsExpired(object)) {
        expired.push_back(std::move(object));
      } else {
        objects.insert_or_assign(object.entry.key, std::move(object));
      }
    }
  }
  ReportAll(std::move(objects));
  for (const KubernetesObject& lease : expired) {
    if (is_stopped()) return absl::OkStatus();
    DeleteExpired(lease);
  }

  HttpStreams streams(client_->http());
  for (size_t i = 0; i < kKinds.size(); ++i) {
    EMA_RETURN_IF_ERROR(client_->OpenWatch(kKinds[i], prefix_, lists[i], streams));
  }
  {
    absl::MutexLock lock(&mu_);
    streams_ = &streams;
  }
  const absl::Cleanup forget_streams = [this] {
    absl::MutexLock lock(&mu_);
    streams_ = nullptr;
  };
  while (!is_stopped()) {
    const SteadyTime expiry = NextExpiry();
    if (SteadyNow() >= expiry) return absl::OkStatus();
    EMA_ASSIGN_OR_RETURN(const HttpStreams::Progress progress, streams.Wait(expiry));
    for (const HttpStreams::Line& line : progress.lines) {
      EMA_RETURN_IF_ERROR(ReportEvent(kKinds[line.stream], line.text));
      client_->NoteContact();
    }
    if (progress.is_ended) return absl::OkStatus();
  }
  return absl::OkStatus();
}

void KubernetesWatch::ReportAll(Objects objects) {
  RegistryUpdate update{.is_complete = std::exchange(must_report_all_, false)};
  if (!update.is_complete) {
    for (const auto& [key, object] : reported_) {
      if (!objects.contains(key)) update.entries.push_back({.key = key});
    }
  }
  for (const auto& [key, object] : objects) {
    const auto reported = reported_.find(key);
    if (update.is_complete || reported == reported_.end() || IsChange(reported->second, object)) {
      update.entries.push_back(object.entry);
    }
  }
  reported_ = std::move(objects);
  if (std::exchange(is_interrupted_, false)) {
    LogTo(client_->log(), LogLevel::kInfo, "registry watch resumed", {{"prefix", prefix_}});
  }
  if (update.is_complete || !update.entries.empty()) on_update_(update);
}

absl::Status KubernetesWatch::ReportEvent(KubernetesKind kind, const std::string& line) {
  EMA_ASSIGN_OR_RETURN(const KubernetesEvent event, ParseEvent(kind, line));
  if (event.type == KubernetesEvent::Type::kOther || !event.object.has_value()) {
    return absl::OkStatus();
  }
  const KubernetesObject& object = *event.object;
  const std::string& key = object.entry.key;
  if (!key.starts_with(prefix_)) return absl::OkStatus();
  const auto reported = reported_.find(key);
  RegistryUpdate update;
  if (event.type == KubernetesEvent::Type::kDeleted) {
    client_->leases().Forget(key);
    if (reported == reported_.end()) return absl::OkStatus();
    reported_.erase(reported);
    update.entries.push_back({.key = key});
  } else {
    const bool is_expired = kind == KubernetesKind::kLease && client_->leases().IsExpired(object);
    if (is_expired || (reported != reported_.end() && !IsChange(reported->second, object))) {
      return absl::OkStatus();
    }
    reported_.insert_or_assign(key, object);
    update.entries.push_back(object.entry);
  }
  on_update_(update);
  return absl::OkStatus();
}

void KubernetesWatch::DeleteExpired(const KubernetesObject& lease) {
  const std::string& key = lease.entry.key;
  const auto change = client_->Delete(lease, client_->CallDeadline());
  if (!change.ok()) {
    LogTo(client_->log(), LogLevel::kWarning, "expired lease not deleted",
          {{"key", key}, {"error", change.status()}});
  } else if (change->is_made) {
    LogTo(client_->log(), LogLevel::kInfo, "expired lease deleted",
          {{"key", key}, {"ttl", lease.ttl}});
  }
}

SteadyTime KubernetesWatch::NextExpiry() const {
  SteadyTime next = SteadyTime::max();
  for (const auto& [key, object] : reported_) {
    if (object.kind != KubernetesKind::kLease) continue;
    next = std::min(next, client_->leases().ExpiryOf(key));
  }
  return next;
}

}  // namespace ema
