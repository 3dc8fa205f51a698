// SPDX-License-Identifier: Apache-2.0
//
// Peers that open a push or a pull and then do nothing.
#ifndef EMA_TESTS_INTEGRATION_STALLED_PEERS_H_
#define EMA_TESTS_INTEGRATION_STALLED_PEERS_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ema/v1/ema_service.grpc.pb.h"
#include "ema/v1/error.pb.h"

namespace ema {

// Any number of streams, over as many connections as it is told. Thread-safe.
class StalledPeers {
 public:
  StalledPeers() : thread_([this] { Loop(); }) {}
  ~StalledPeers();

  // The next streams go over a new connection to this address, with this token, if it is one.
  void Connect(const std::string& address, std::string_view token = "") ABSL_LOCKS_EXCLUDED(mu_);
  // Opens a push, sends `messages`, then nothing.
  void StartPush(std::vector<v1::PushRequest> messages) ABSL_LOCKS_EXCLUDED(mu_);
  // Asks for a version and reads nothing of it.
  void StartPull(const v1::PullRequest& request) ABSL_LOCKS_EXCLUDED(mu_);

  // A stream that the server has ended.
  struct Ended {
    grpc::Status status;
    v1::ErrorDetail detail;
    absl::Duration after;  // Since it was started.
  };
  std::vector<Ended> ended() const ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until so many have been ended. False: they were not, in time.
  bool AwaitEnded(size_t count, absl::Duration timeout) const ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until so many have sent all that they are to send, or have been ended.
  bool AwaitStalled(size_t count, absl::Duration timeout) const ABSL_LOCKS_EXCLUDED(mu_);

  // Cancels all that are still open, closes the connections and forgets them.
  void Leave() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // One stream. Operations are tagged with its two events.
  struct Peer;
  struct Event {
    Peer* peer = nullptr;
    bool is_end = false;
  };
  struct Peer {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientAsyncWriter<v1::PushRequest>> writer;
    std::unique_ptr<grpc::ClientAsyncReader<v1::PullResponse>> reader;
    v1::PushResponse response;
    std::vector<v1::PushRequest> messages;
    size_t sent_count = 0;
    bool is_stalled = false;
    bool has_ended = false;
    grpc::Status status;
    absl::Time begin;
    absl::Time end;
    Event progress{this, false};
    Event finish{this, true};
  };

  void Loop() ABSL_LOCKS_EXCLUDED(mu_);
  Peer& AddPeer() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void OnProgress(Peer& peer, bool ok) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  grpc::CompletionQueue queue_;
  mutable absl::Mutex mu_;
  std::shared_ptr<grpc::Channel> channel_ ABSL_GUARDED_BY(mu_);
  std::string authorization_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<v1::EmaService::Stub> stub_ ABSL_GUARDED_BY(mu_);
  std::list<Peer> peers_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace ema

#endif  // EMA_TESTS_INTEGRATION_STALLED_PEERS_H_
