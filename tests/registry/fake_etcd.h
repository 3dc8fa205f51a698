// SPDX-License-Identifier: Apache-2.0
//
// A gRPC server with etcd's API whose answers a test decides.
#ifndef EMA_TESTS_REGISTRY_FAKE_ETCD_H_
#define EMA_TESTS_REGISTRY_FAKE_ETCD_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "etcd/v3/rpc.grpc.pb.h"

namespace ema {

// Grants leases of 3 s, renews them, and has no keys, unless the test sets other answers, before
// the first call. They are called on several threads.
class FakeEtcd {
 public:
  struct Answers {
    std::function<grpc::Status(grpc::ServerContext&, const etcdserverpb::RangeRequest&)> range;
    std::function<grpc::Status(const etcdserverpb::TxnRequest&, etcdserverpb::TxnResponse&)> txn;
    std::function<grpc::Status(grpc::ServerContext&)> renew;
    std::function<grpc::Status(grpc::ServerContext&)> revoke;
    // A watch. The default waits until it is cancelled, or End().
    std::function<grpc::Status()> watch;
  };

  explicit FakeEtcd(Answers answers = {}) : answers_(std::move(answers)) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&kv_);
    builder.RegisterService(&lease_);
    builder.RegisterService(&watch_);
    builder.RegisterService(&auth_);
    server_ = builder.BuildAndStart();
    url_ = absl::StrCat("http://127.0.0.1:", port);
  }
  ~FakeEtcd() {
    End();
    server_->Shutdown();
  }

  const std::string& url() const { return url_; }

  // Returns when the call was cancelled, or after End().
  void AwaitCancelled(const grpc::ServerContext& context) {
    absl::MutexLock lock(&mu_);
    while (!context.IsCancelled() &&
           !mu_.AwaitWithTimeout(absl::Condition(&is_ended_), absl::Milliseconds(1))) {
    }
  }
  void End() {
    absl::MutexLock lock(&mu_);
    is_ended_ = true;
  }
  // Reports a change of `key` to the watch, which is waited for. Without one nothing is reported.
  void Report(const std::string& key, const std::string& value) {
    etcdserverpb::WatchResponse response;
    etcdserverpb::Event& event = *response.add_events();
    event.mutable_kv()->set_key(key);
    event.mutable_kv()->set_value(value);
    event.mutable_kv()->set_mod_revision(2);
    absl::MutexLock lock(&mu_);
    const auto is_watched = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return stream_ != nullptr; };
    mu_.AwaitWithTimeout(absl::Condition(&is_watched), absl::Seconds(20));
    if (stream_ != nullptr) stream_->Write(response);
  }

 private:
  using WatchStream =
      grpc::ServerReaderWriter<etcdserverpb::WatchResponse, etcdserverpb::WatchRequest>;
  using LeaseStream = grpc::ServerReaderWriter<etcdserverpb::LeaseKeepAliveResponse,
                                               etcdserverpb::LeaseKeepAliveRequest>;

  struct Kv final : etcdserverpb::KV::Service {
    explicit Kv(FakeEtcd& etcd) : etcd(etcd) {}
    grpc::Status Range(grpc::ServerContext* context, const etcdserverpb::RangeRequest* request,
                       etcdserverpb::RangeResponse* response) override {
      response->mutable_header()->set_revision(1);
      return etcd.answers_.range ? etcd.answers_.range(*context, *request) : grpc::Status::OK;
    }
    grpc::Status Txn(grpc::ServerContext* /*context*/, const etcdserverpb::TxnRequest* request,
                     etcdserverpb::TxnResponse* response) override {
      if (etcd.answers_.txn) return etcd.answers_.txn(*request, *response);
      response->mutable_header()->set_revision(1);
      response->set_succeeded(true);
      return grpc::Status::OK;
    }
    FakeEtcd& etcd;
  };
  struct Lease final : etcdserverpb::Lease::Service {
    explicit Lease(FakeEtcd& etcd) : etcd(etcd) {}
    grpc::Status LeaseGrant(grpc::ServerContext* /*context*/,
                            const etcdserverpb::LeaseGrantRequest* /*request*/,
                            etcdserverpb::LeaseGrantResponse* response) override {
      response->set_id(1);
      response->set_ttl_seconds(kTtlSeconds);
      return grpc::Status::OK;
    }
    grpc::Status LeaseRevoke(grpc::ServerContext* context,
                             const etcdserverpb::LeaseRevokeRequest* /*request*/,
                             etcdserverpb::LeaseRevokeResponse* /*response*/) override {
      return etcd.answers_.revoke ? etcd.answers_.revoke(*context) : grpc::Status::OK;
    }
    grpc::Status LeaseKeepAlive(grpc::ServerContext* context, LeaseStream* stream) override {
      etcdserverpb::LeaseKeepAliveRequest request;
      stream->Read(&request);
      if (etcd.answers_.renew) {
        grpc::Status status = etcd.answers_.renew(*context);
        if (!status.ok()) return status;
      }
      etcdserverpb::LeaseKeepAliveResponse response;
      response.set_ttl_seconds(kTtlSeconds);
      stream->Write(response);
      return grpc::Status::OK;
    }
    FakeEtcd& etcd;
  };
  struct Watcher final : etcdserverpb::Watch::Service {
    explicit Watcher(FakeEtcd& etcd) : etcd(etcd) {}
    grpc::Status Watch(grpc::ServerContext* context, WatchStream* stream) override {
      if (etcd.answers_.watch) return etcd.answers_.watch();
      etcd.SetStream(stream);
      etcd.AwaitCancelled(*context);
      etcd.SetStream(nullptr);
      return grpc::Status::OK;
    }
    FakeEtcd& etcd;
  };
  struct Auth final : etcdserverpb::Auth::Service {
    grpc::Status Authenticate(grpc::ServerContext* /*context*/,
                              const etcdserverpb::AuthenticateRequest* /*request*/,
                              etcdserverpb::AuthenticateResponse* response) override {
      response->set_token("token");
      return grpc::Status::OK;
    }
  };

  static constexpr int64_t kTtlSeconds = 3;

  void SetStream(WatchStream* stream) {
    absl::MutexLock lock(&mu_);
    stream_ = stream;
  }

  const Answers answers_;
  absl::Mutex mu_;
  bool is_ended_ ABSL_GUARDED_BY(mu_) = false;
  WatchStream* stream_ ABSL_GUARDED_BY(mu_) = nullptr;  // Null: there is no watch.
  Kv kv_{*this};
  Lease lease_{*this};
  Watcher watch_{*this};
  Auth auth_;
  std::string url_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace ema

#endif  // EMA_TESTS_REGISTRY_FAKE_ETCD_H_
