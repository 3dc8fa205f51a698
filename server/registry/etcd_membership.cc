// SPDX-License-Identifier: Apache-2.0
#include "server/registry/etcd_membership.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"
#include "server/base/quoted.h"
#include "server/registry/registry_errors.h"

namespace ema {

absl::StatusOr<std::unique_ptr<Membership>> EtcdMembership::Join(std::shared_ptr<EtcdClient> client,
                                                                 std::string_view key,
                                                                 std::string_view value,
                                                                 absl::Duration ttl) {
  std::unique_ptr<EtcdMembership> member(new EtcdMembership(std::move(client), key, value, ttl));
  const SteadyTime deadline = member->client_->CallDeadline();
  if (absl::Status status = member->Renew(deadline); !status.ok()) {
    // Without this it would end after the TTL.
    if (member->lease_ != 0) member->RevokeLease(deadline).IgnoreError();
    return status;
  }
  const auto renew = [self = member.get()]() -> absl::StatusOr<RenewalThread::Renewal> {
    const int64_t old_lease = self->lease_;
    EMA_RETURN_IF_ERROR(self->Renew(self->client_->CallDeadline()));
    return RenewalThread::Renewal{.ttl = self->ttl_, .is_new_lease = self->lease_ != old_lease};
  };
  member->thread_ = std::make_unique<RenewalThread>(std::string(key), member->ttl_,
                                                    member->client_->log(), renew);
  return member;
}

absl::Status EtcdMembership::Leave() {
  // A renewal that runs uses a part of the time.
  const SteadyTime deadline = client_->CallDeadline();
  thread_->Stop();
  return lease_ == 0 ? absl::OkStatus() : RevokeLease(deadline);
}

absl::Status EtcdMembership::Renew(SteadyTime deadline) {
  if (lease_ != 0) EMA_RETURN_IF_ERROR(KeepLease(deadline));
  if (lease_ == 0) EMA_RETURN_IF_ERROR(GrantLease(deadline));
  // The key may have been deleted, or the user may have lost its role, and etcd renews the lease
  // all the same.
  if (has_key_) {
    EMA_ASSIGN_OR_RETURN(has_key_, IsKeyThere());
  }
  return has_key_ ? absl::OkStatus() : PutKey(deadline);
}

absl::Status EtcdMembership::GrantLease(SteadyTime deadline) {
  etcdserverpb::LeaseGrantRequest request;
  request.set_ttl_seconds(absl::ToInt64Seconds(absl::Ceil(requested_ttl_, absl::Seconds(1))));
  etcdserverpb::LeaseGrantResponse response;
  EMA_RETURN_IF_ERROR(
      client_->Call(absl::StrCat("grant a lease for ", Quoted(key_)), deadline,
                    [&](EtcdClient::Connection& connection, grpc::ClientContext& context) {
                      return connection.lease.LeaseGrant(&context, request, &response);
                    }));
  lease_ = response.id();
  ttl_ = absl::Seconds(response.ttl_seconds());
  return absl::OkStatus();
}

absl::Status EtcdMembership::KeepLease(SteadyTime deadline) {
  etcdserverpb::LeaseKeepAliveRequest request;
  request.set_id(lease_);
  etcdserverpb::LeaseKeepAliveResponse response;
  EMA_RETURN_IF_ERROR(client_->Probe(
      absl::StrCat("renew the lease of ", Quoted(key_)), deadline,
      [&](EtcdClient::Connection& connection, grpc::ClientContext& context) {
        // A stream for each renewal, so that a renewal has a deadline, and can move to another
        // endpoint.
        const auto stream = connection.lease.LeaseKeepAlive(&context);
        const bool is_answered = stream->Write(request) && stream->Read(&response);
        stream->WritesDone();
        const grpc::Status status = stream->Finish();
        return status.ok() && !is_answered
                   ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "ended without an answer")
                   : status;
      }));
  if (response.ttl_seconds() <= 0) {
    lease_ = 0;
    has_key_ = false;
  }
  return absl::OkStatus();
}

absl::Status EtcdMembership::RevokeLease(SteadyTime deadline) {
  etcdserverpb::LeaseRevokeRequest request;
  request.set_id(lease_);
  etcdserverpb::LeaseRevokeResponse response;
  const absl::Status status =
      client_->Call(absl::StrCat("revoke the lease of ", Quoted(key_)), deadline,
                    [&](EtcdClient::Connection& connection, grpc::ClientContext& context) {
                      return connection.lease.LeaseRevoke(&context, request, &response);
                    });
  // It has expired, or a first attempt, whose answer was lost, has revoked it.
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

absl::StatusOr<bool> EtcdMembership::IsKeyThere() {
  EMA_ASSIGN_OR_RETURN(const etcdserverpb::RangeResponse found, client_->Range(key_, ""));
  return found.kvs_size() > 0 && found.kvs(0).lease() == lease_;
}

absl::Status EtcdMembership::PutKey(SteadyTime deadline) {
  EMA_ASSIGN_OR_RETURN(const EtcdClient::Change change,
                       client_->CompareAndSet(key_, /*revision=*/0, value_, lease_, deadline));
  has_key_ = change.is_made || change.found.lease() == lease_;
  if (has_key_) return absl::OkStatus();
  return OccupiedError(key_, change.found.value());
}

}  // namespace ema
