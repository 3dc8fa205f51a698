// SPDX-License-Identifier: Apache-2.0
//
// Calls to etcd: connections, deadlines, the next endpoint, and the user's token.
#ifndef EMA_SERVER_REGISTRY_ETCD_CLIENT_H_
#define EMA_SERVER_REGISTRY_ETCD_CLIENT_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "etcd/v3/rpc.grpc.pb.h"
#include "server/base/log_event.h"
#include "server/base/steady_wait.h"
#include "server/registry/etcd_registry.h"

namespace ema {

// The end of the range of all keys with a prefix. REQUIRES: `prefix` is not empty, and is text.
std::string PrefixEnd(std::string_view prefix);

RegistryEntry ToEntry(const etcdserverpb::KeyValue& pair);

// Errors as Registry. Thread-safe.
class EtcdClient {
 public:
  // A channel to one endpoint. One that has failed is never used again, so that gRPC's pauses
  // between attempts to connect do not delay calls, and renewed files of TLS are read.
  struct Connection {
    Connection(std::string endpoint_url, const std::shared_ptr<grpc::Channel>& channel)
        : endpoint(std::move(endpoint_url)),
          kv(channel),
          lease(channel),
          watch(channel),
          auth(channel) {}

    const std::string endpoint;
    etcdserverpb::KV::Stub kv;
    etcdserverpb::Lease::Stub lease;
    etcdserverpb::Watch::Stub watch;
    etcdserverpb::Auth::Stub auth;
  };

  // As EtcdRegistry::Create().
  static absl::StatusOr<std::shared_ptr<EtcdClient>> Create(EtcdOptions options);

  // When a call that begins now must end.
  SteadyTime CallDeadline() const { return After(SteadyNow(), options_.call_timeout); }

  // Runs `attempt` until it succeeds, perhaps at several endpoints. `operation` is for the message:
  // "put \"key\"". After a miss (no answer, or none in time) later calls use the next endpoint.
  using Attempt = absl::FunctionRef<grpc::Status(Connection&, grpc::ClientContext&)>;
  absl::Status Call(const std::string& operation, SteadyTime deadline, Attempt attempt)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The same for a request that etcd answers fast. If an earlier miss abandoned a connection that
  // still has streams, that connection is tried first. A miss ends the streams of the missed
  // connection.
  absl::Status Probe(const std::string& operation, SteadyTime deadline, Attempt attempt)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Reads a key, or all keys from `key` to `range_end` if that is not empty.
  absl::StatusOr<etcdserverpb::RangeResponse> Range(std::string_view key,
                                                    std::string_view range_end);

  struct Change {
    bool is_made = false;
    int64_t revision = 0;          // The key's, if the change was made.
    etcdserverpb::KeyValue found;  // Otherwise what is there; mod_revision 0: nothing.
    bool may_be_ours = false;      // `found` may come from an attempt whose answer was lost.
  };
  // Puts a value under a lease (0: none), or deletes the key without a value, if the key's revision
  // is `revision`.
  absl::StatusOr<Change> CompareAndSet(std::string_view key, int64_t revision,
                                       std::optional<std::string_view> value, int64_t lease,
                                       SteadyTime deadline);

  // A context for a stream on the current connection. It is cancelled when a Probe() on that
  // connection is missed. Other missed calls do not end it: etcd may only have been slow.
  struct Stream {
    std::shared_ptr<Connection> connection;
    std::shared_ptr<grpc::ClientContext> context;
  };
  absl::StatusOr<Stream> OpenStream() ABSL_LOCKS_EXCLUDED(mu_);

  SteadyTime last_contact() const { return last_contact_; }
  RegistryHealth health() const ABSL_LOCKS_EXCLUDED(mu_);
  const LogSink& log() const { return options_.log; }

 private:
  // A Stream, as the client sees it; its owner ends it.
  struct OpenedStream {
    std::weak_ptr<Connection> connection;
    std::weak_ptr<grpc::ClientContext> context;
  };

  EtcdClient(EtcdOptions options, std::vector<std::string> endpoints)
      : options_(std::move(options)), endpoints_(std::move(endpoints)) {}

  // The connection for the next call; opens one if the last one was abandoned after a miss.
  absl::StatusOr<std::shared_ptr<Connection>> CurrentConnection() ABSL_LOCKS_EXCLUDED(mu_);
  // An abandoned connection that still has streams. Null: there is none.
  std::shared_ptr<Connection> SuspectConnection() ABSL_LOCKS_EXCLUDED(mu_);
  // `first`: the connection of the first attempt; null: the current one.
  absl::Status CallFrom(std::shared_ptr<Connection> first, const std::string& operation,
                        SteadyTime deadline, Attempt attempt, bool ends_streams);
  // Abandons `missed`, so the next call uses the next endpoint. No effect if abandoned before.
  void Abandon(const Connection& missed) ABSL_LOCKS_EXCLUDED(mu_);
  void EndStreams(const Connection& missed) ABSL_LOCKS_EXCLUDED(mu_);
  // To be called when etcd has read or written a key for this user. Only this is contact with the
  // registry: etcd grants and renews leases even for a user without permission to read or write.
  void NoteContact() ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status NoteError(absl::Status error) ABSL_LOCKS_EXCLUDED(mu_);
  // Runs `attempt` once, or twice if etcd rejects the token.
  grpc::Status CallOnce(Connection& connection, SteadyTime deadline, Attempt attempt)
      ABSL_LOCKS_EXCLUDED(mu_);
  grpc::Status Authenticate(Connection& connection, SteadyTime deadline) ABSL_LOCKS_EXCLUDED(mu_);

  const EtcdOptions options_;
  const std::vector<std::string> endpoints_;  // URLs with ports, of one scheme.
  // Relaxed would do: it orders nothing.
  std::atomic<SteadyTime> last_contact_ = SteadyNow();

  mutable absl::Mutex mu_;
  size_t endpoint_index_ ABSL_GUARDED_BY(mu_) = 0;
  std::shared_ptr<Connection> connection_ ABSL_GUARDED_BY(mu_);  // Null: none to that endpoint yet.
  std::vector<OpenedStream> streams_ ABSL_GUARDED_BY(mu_);
  std::string token_ ABSL_GUARDED_BY(mu_);  // Empty: none yet.
  absl::Duration latency_ ABSL_GUARDED_BY(mu_);
  absl::Status error_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema

#endif  // EMA_SERVER_REGISTRY_ETCD_CLIENT_H_
