// SPDX-License-Identifier: Apache-2.0
#include "server/registry/etcd_client.h"

#include <grpc/support/time.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ema/internal/status_macros.h"
#include "server/base/quoted.h"
#include "server/base/small_file.h"

namespace ema {
namespace {

constexpr const char* kHttp = "http://";
constexpr const char* kHttps = "https://";
// etcd closes connections that ping more often than every 5 s.
constexpr int kKeepaliveMs = 6000;
constexpr int kKeepaliveTimeoutMs = 2000;
// For all models at once, each of which has at most 1.5 MiB.
constexpr int kMaxReceivedBytes = 256 << 20;
constexpr int64_t kMaxPemBytes = 1 << 20;
// Of limits in messages.
constexpr absl::Duration kTimeUnit = absl::Milliseconds(100);

// "http://a:2379,b,c" as URLs with ports.
absl::StatusOr<std::vector<std::string>> ParseEndpoints(const EtcdOptions& options) {
  std::string scheme;
  std::vector<std::string> endpoints;
  for (const absl::string_view piece : absl::StrSplit(options.endpoints, ',')) {
    const std::string given(piece);
    std::string own_scheme;
    for (const char* const known : {kHttp, kHttps}) {
      if (given.starts_with(known)) own_scheme = known;
    }
    if (scheme.empty()) scheme = own_scheme.empty() ? kHttp : own_scheme;
    const std::string address = given.substr(own_scheme.size());
    if (address.empty() || absl::StrContains(address, "/") ||
        (!own_scheme.empty() && own_scheme != scheme)) {
      return absl::InvalidArgumentError(absl::StrCat("etcd endpoint ", Quoted(given), " of ",
                                                     Quoted(options.endpoints), ": expected ",
                                                     scheme, "HOST:PORT, and one scheme for all"));
    }
    // The colons of an IPv6 address are inside brackets.
    const bool has_port = address.back() != ']' && absl::StrContains(address, ":");
    endpoints.push_back(absl::StrCat(scheme, address, has_port ? "" : ":2379"));
  }
  const bool has_files = !options.ca_file.empty() || !options.certificate_file.empty();
  if (has_files && scheme == kHttp) {
    return absl::InvalidArgumentError(absl::StrCat("etcd endpoints ", Quoted(options.endpoints),
                                                   ": files of TLS need https:// endpoints"));
  }
  if (options.certificate_file.empty() != options.key_file.empty()) {
    return absl::InvalidArgumentError(
        "etcd: the client's certificate needs its key, and the key needs the certificate");
  }
  return endpoints;
}

absl::StatusOr<std::string> ReadPem(const std::string& path) {
  if (path.empty()) return "";
  absl::StatusOr<std::string> text = ReadSmallFile(path, kMaxPemBytes);
  if (text.ok() && absl::StrContains(*text, "-----BEGIN")) return text;
  return absl::InvalidArgumentError(
      absl::StrCat("etcd: file ", Quoted(path), ": ",
                   text.ok() ? "expected PEM" : std::string(text.status().message())));
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(const std::string& endpoint,
                                                           const EtcdOptions& options) {
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  const bool is_tls = endpoint.starts_with(kHttps);
  if (is_tls) {
    grpc::SslCredentialsOptions files;
    EMA_ASSIGN_OR_RETURN(files.pem_root_certs, ReadPem(options.ca_file));
    EMA_ASSIGN_OR_RETURN(files.pem_cert_chain, ReadPem(options.certificate_file));
    EMA_ASSIGN_OR_RETURN(files.pem_private_key, ReadPem(options.key_file));
    credentials = grpc::SslCredentials(files);
  }
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxReceivedBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  // A watch may have no data for hours. gRPC would stop pinging after two pings.
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // A socket of its own, without the pauses after an earlier one's failures.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  const std::string address = endpoint.substr(std::strlen(is_tls ? kHttps : kHttp));
  return grpc::CreateCustomChannel(address, credentials, arguments);
}

// The monotonic clock, since the system's may be set before gRPC reads it.
gpr_timespec ToGrpc(SteadyTime time) {
  const std::chrono::nanoseconds since_zero = time.time_since_epoch();
  return gpr_time_from_nanos(since_zero.count(), GPR_CLOCK_MONOTONIC);
}

// The endpoint did not execute the request, as far as it is known; another one may.
bool IsMiss(const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::DEADLINE_EXCEEDED:
    case grpc::StatusCode::CANCELLED:  // etcd stops.
    case grpc::StatusCode::UNKNOWN:
    case grpc::StatusCode::INTERNAL:  // The transport's.
      return true;
    default:
      return false;
  }
}

// True if etcd rejects the user.
bool IsRejected(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::PERMISSION_DENIED ||
         status.error_code() == grpc::StatusCode::UNAUTHENTICATED ||
         absl::StrContains(status.error_message(), "authentication failed") ||
         absl::StrContains(status.error_message(), "user name is empty");
}

// The code of an error that is not a miss.
absl::StatusCode CodeOf(const grpc::Status& status) {
  // etcd returns INVALID_ARGUMENT for some rejected users.
  if (IsRejected(status) && status.error_code() != grpc::StatusCode::PERMISSION_DENIED) {
    return absl::StatusCode::kUnauthenticated;
  }
  // "too many requests", or the database is full, until an operator has compacted it.
  if (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED) {
    return absl::StatusCode::kUnavailable;
  }
  return static_cast<absl::StatusCode>(status.error_code());  // Their numbers are equal.
}

// A token expires, and changes of users make older ones invalid.
bool IsStaleToken(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::UNAUTHENTICATED ||
         absl::StrContains(status.error_message(), "revision of auth store is old");
}

}  // namespace

std::string PrefixEnd(std::string_view prefix) {
  std::string end(prefix);
  ++end.back();
  return end;
}

RegistryEntry ToEntry(const etcdserverpb::KeyValue& pair) {
  return {.key = pair.key(), .value = pair.value(), .revision = pair.mod_revision()};
}

absl::StatusOr<std::shared_ptr<EtcdClient>> EtcdClient::Create(EtcdOptions options) {
  EMA_ASSIGN_OR_RETURN(std::vector<std::string> endpoints, ParseEndpoints(options));
  std::shared_ptr<EtcdClient> client(new EtcdClient(std::move(options), std::move(endpoints)));
  EMA_RETURN_IF_ERROR(client->CurrentConnection().status());
  return client;
}

absl::StatusOr<std::shared_ptr<EtcdClient::Connection>> EtcdClient::CurrentConnection() {
  absl::MutexLock lock(&mu_);
  if (connection_ == nullptr) {
    const std::string& endpoint = endpoints_[endpoint_index_];
    EMA_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel,
                         OpenChannel(endpoint, options_));
    connection_ = std::make_shared<Connection>(endpoint, channel);
  }
  return connection_;
}

std::shared_ptr<EtcdClient::Connection> EtcdClient::SuspectConnection() {
  absl::MutexLock lock(&mu_);
  for (const OpenedStream& stream : streams_) {
    std::shared_ptr<Connection> connection = stream.connection.lock();
    if (connection != nullptr && connection != connection_ && !stream.context.expired()) {
      return connection;
    }
  }
  return nullptr;
}

void EtcdClient::Abandon(const Connection& missed) {
  absl::MutexLock lock(&mu_);
  if (connection_.get() != &missed) return;
  connection_ = nullptr;
  endpoint_index_ = (endpoint_index_ + 1) % endpoints_.size();
}

void EtcdClient::EndStreams(const Connection& missed) {
  absl::MutexLock lock(&mu_);
  std::erase_if(streams_, [&](const OpenedStream& stream) {
    if (stream.connection.lock().get() != &missed) return stream.context.expired();
    if (const auto context = stream.context.lock()) context->TryCancel();
    return true;
  });
}

void EtcdClient::NoteContact() {
  last_contact_ = SteadyNow();
  absl::MutexLock lock(&mu_);
  error_ = absl::OkStatus();
}

absl::Status EtcdClient::NoteError(absl::Status error) {
  absl::MutexLock lock(&mu_);
  error_ = error;
  return error;
}

RegistryHealth EtcdClient::health() const {
  absl::MutexLock lock(&mu_);
  return {.endpoints = endpoints_, .latency = latency_, .error = error_};
}

absl::Status EtcdClient::Call(const std::string& operation, SteadyTime deadline, Attempt attempt) {
  return CallFrom(nullptr, operation, deadline, attempt, /*ends_streams=*/false);
}

absl::Status EtcdClient::Probe(const std::string& operation, SteadyTime deadline, Attempt attempt) {
  return CallFrom(SuspectConnection(), operation, deadline, attempt, /*ends_streams=*/true);
}

absl::Status EtcdClient::CallFrom(std::shared_ptr<Connection> first, const std::string& operation,
                                  SteadyTime deadline, Attempt attempt, bool ends_streams) {
  const size_t most_attempts = endpoints_.size() + (first != nullptr ? 1 : 0);
  std::string misses;
  for (size_t tried = 1;; ++tried) {
    std::shared_ptr<Connection> connection = std::exchange(first, nullptr);
    if (connection == nullptr) {
      EMA_ASSIGN_OR_RETURN(connection, CurrentConnection());
    }
    const bool is_last = tried == most_attempts;
    const SteadyTime start = SteadyNow();
    const SteadyTime end =
        is_last ? deadline : std::min(deadline, After(start, options_.call_timeout / 2));
    const grpc::Status status = CallOnce(*connection, end, attempt);
    if (status.ok()) {
      absl::MutexLock lock(&mu_);
      latency_ = Since(start);
      return absl::OkStatus();
    }

    const absl::Duration limit =
        absl::Floor(absl::FromChrono(end - start) + kTimeUnit / 2, kTimeUnit);
    const std::string text = status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED
                                 ? absl::StrCat("no answer within ", absl::FormatDuration(limit))
                                 : status.error_message();
    absl::StrAppend(&misses, misses.empty() ? "" : "; ", connection->endpoint, ": ", text);
    const std::string message = absl::StrCat("etcd cannot ", operation, ": ", misses);
    if (!IsMiss(status)) return NoteError(absl::Status(CodeOf(status), message));
    Abandon(*connection);
    if (ends_streams) EndStreams(*connection);
    if (is_last || SteadyNow() >= deadline) return NoteError(absl::UnavailableError(message));
  }
}

grpc::Status EtcdClient::CallOnce(Connection& connection, SteadyTime deadline, Attempt attempt) {
  for (bool is_repeated = false;; is_repeated = true) {
    grpc::ClientContext context;
    context.set_deadline(ToGrpc(deadline));
    if (!options_.user.empty()) {
      std::string token;
      {
        absl::MutexLock lock(&mu_);
        token = token_;
      }
      if (token.empty() || is_repeated) {
        grpc::Status status = Authenticate(connection, deadline);
        if (!status.ok()) return status;
        absl::MutexLock lock(&mu_);
        token = token_;
      }
      context.AddMetadata("token", token);
    }
    grpc::Status status = attempt(connection, context);
    if (is_repeated || options_.user.empty() || !IsStaleToken(status)) return status;
  }
}

grpc::Status EtcdClient::Authenticate(Connection& connection, SteadyTime deadline) {
  grpc::ClientContext context;
  context.set_deadline(ToGrpc(deadline));
  etcdserverpb::AuthenticateRequest request;
  request.set_name(options_.user);
  request.set_password(options_.password);
  etcdserverpb::AuthenticateResponse response;
  grpc::Status status = connection.auth.Authenticate(&context, request, &response);
  if (!status.ok()) {
    return {status.error_code(),
            absl::StrCat("user ", Quoted(options_.user), ": ", status.error_message())};
  }
  absl::MutexLock lock(&mu_);
  token_ = response.token();
  return status;
}

absl::StatusOr<etcdserverpb::RangeResponse> EtcdClient::Range(std::string_view key,
                                                              std::string_view range_end) {
  etcdserverpb::RangeRequest request;
  request.set_key(std::string(key));
  request.set_range_end(std::string(range_end));
  etcdserverpb::RangeResponse response;
  EMA_RETURN_IF_ERROR(Call(absl::StrCat("read ", Quoted(key)), CallDeadline(),
                           [&](Connection& connection, grpc::ClientContext& context) {
                             return connection.kv.Range(&context, request, &response);
                           }));
  NoteContact();
  return response;
}

absl::StatusOr<EtcdClient::Change> EtcdClient::CompareAndSet(std::string_view key, int64_t revision,
                                                             std::optional<std::string_view> value,
                                                             int64_t lease, SteadyTime deadline) {
  etcdserverpb::TxnRequest request;
  etcdserverpb::Compare& compare = *request.add_compare();
  compare.set_target(etcdserverpb::Compare::MOD);
  compare.set_key(std::string(key));
  compare.set_mod_revision(revision);
  etcdserverpb::RequestOp& change = *request.add_success();
  if (value.has_value()) {
    change.mutable_put()->set_key(std::string(key));
    change.mutable_put()->set_value(std::string(*value));
    change.mutable_put()->set_lease(lease);
  } else {
    change.mutable_delete_range()->set_key(std::string(key));
  }
  request.add_failure()->mutable_range()->set_key(std::string(key));

  etcdserverpb::TxnResponse response;
  bool may_be_made_before = false;
  EMA_RETURN_IF_ERROR(Call(absl::StrCat(value.has_value() ? "put " : "delete ", Quoted(key)),
                           deadline, [&](Connection& connection, grpc::ClientContext& context) {
                             grpc::Status status = connection.kv.Txn(&context, request, &response);
                             if (IsMiss(status)) may_be_made_before = true;
                             return status;
                           }));
  NoteContact();
  Change result{.is_made = response.succeeded(), .revision = response.header().revision()};
  if (!result.is_made) {
    result.may_be_ours = may_be_made_before;
    if (response.responses_size() > 0 && response.responses(0).range().kvs_size() > 0) {
      result.found = response.responses(0).range().kvs(0);
    }
  }
  return result;
}

absl::StatusOr<EtcdClient::Stream> EtcdClient::OpenStream() {
  EMA_ASSIGN_OR_RETURN(std::shared_ptr<Connection> connection, CurrentConnection());
  auto context = std::make_shared<grpc::ClientContext>();
  // An etcd that has no leader ends the stream, instead of being silent.
  context->AddMetadata("hasleader", "true");
  absl::MutexLock lock(&mu_);
  if (!token_.empty()) context->AddMetadata("token", token_);
  std::erase_if(streams_, [](const OpenedStream& stream) { return stream.context.expired(); });
  streams_.push_back({connection, context});
  return Stream{std::move(connection), std::move(context)};
}

}  // namespace ema
