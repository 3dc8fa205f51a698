// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/stalled_peers.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace ema {

StalledPeers::~StalledPeers() {
  Leave();
  queue_.Shutdown();
  thread_.join();
}

void StalledPeers::Connect(const std::string& address, std::string_view token) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // Or gRPC takes megabytes that nobody has asked for.
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  const std::shared_ptr<grpc::Channel> channel =
      grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(10));
  absl::MutexLock lock(&mu_);
  channel_ = channel;
  authorization_ = token.empty() ? "" : absl::StrCat("Bearer ", std::string(token));
  stub_ = v1::EmaService::NewStub(channel_);
}

StalledPeers::Peer& StalledPeers::AddPeer() {
  Peer& peer = peers_.emplace_back();
  if (!authorization_.empty()) peer.context.AddMetadata("authorization", authorization_);
  peer.begin = absl::Now();
  return peer;
}

void StalledPeers::StartPush(std::vector<v1::PushRequest> messages) {
  absl::MutexLock lock(&mu_);
  Peer& peer = AddPeer();
  peer.messages = std::move(messages);
  peer.writer = stub_->PrepareAsyncPush(&peer.context, &peer.response, &queue_);
  peer.writer->StartCall(&peer.progress);
  peer.writer->Finish(&peer.status, &peer.finish);
}

void StalledPeers::StartPull(const v1::PullRequest& request) {
  absl::MutexLock lock(&mu_);
  Peer& peer = AddPeer();
  peer.reader = stub_->PrepareAsyncPull(&peer.context, request, &queue_);
  peer.reader->StartCall(&peer.progress);
  peer.reader->Finish(&peer.status, &peer.finish);
}

void StalledPeers::OnProgress(Peer& peer, bool ok) {
  if (ok && peer.sent_count < peer.messages.size()) {
    peer.writer->Write(peer.messages[peer.sent_count++], &peer.progress);
  } else {
    peer.is_stalled = true;
  }
}

void StalledPeers::Loop() {
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) {
    const Event& event = *static_cast<Event*>(tag);
    absl::MutexLock lock(&mu_);
    if (event.is_end) {
      event.peer->has_ended = true;
      event.peer->end = absl::Now();
    } else {
      OnProgress(*event.peer, ok);
    }
  }
}

std::vector<StalledPeers::Ended> StalledPeers::ended() const {
  absl::MutexLock lock(&mu_);
  std::vector<Ended> ended;
  for (const Peer& peer : peers_) {
    if (!peer.has_ended) continue;
    Ended& one = ended.emplace_back();
    one.status = peer.status;
    one.after = peer.end - peer.begin;
    const auto& trailers = peer.context.GetServerTrailingMetadata();
    if (const auto it = trailers.find("ema-error-detail-bin"); it != trailers.end()) {
      one.detail.ParseFromArray(it->second.data(), static_cast<int>(it->second.size()));
    }
  }
  return ended;
}

bool StalledPeers::AwaitEnded(size_t count, absl::Duration timeout) const {
  absl::MutexLock lock(&mu_);
  const auto enough = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return static_cast<size_t>(std::count_if(peers_.begin(), peers_.end(), [](const Peer& peer) {
             return peer.has_ended;
           })) >= count;
  };
  return mu_.AwaitWithTimeout(absl::Condition(&enough), timeout);
}

bool StalledPeers::AwaitStalled(size_t count, absl::Duration timeout) const {
  absl::MutexLock lock(&mu_);
  const auto enough = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return static_cast<size_t>(std::count_if(peers_.begin(), peers_.end(), [](const Peer& peer) {
             return peer.is_stalled || peer.has_ended;
           })) >= count;
  };
  return mu_.AwaitWithTimeout(absl::Condition(&enough), timeout);
}

void StalledPeers::Leave() {
  absl::MutexLock lock(&mu_);
  for (Peer& peer : peers_) peer.context.TryCancel();
  const auto gone = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return std::all_of(peers_.begin(), peers_.end(),
                       [](const Peer& peer) { return peer.has_ended && peer.is_stalled; });
  };
  mu_.Await(absl::Condition(&gone));
  peers_.clear();
  stub_ = nullptr;
  channel_ = nullptr;
}

}  // namespace ema
