// SPDX-License-Identifier: Apache-2.0
#include "server/group/peers.h"

#include <grpc/support/time.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/v1/group.grpc.pb.h"
#include "server/base/quoted.h"
#include "server/base/small_file.h"
#include "server/wire/convert_types.h"

namespace ema::group {
namespace {

using Stub = v1::GroupService::Stub;

constexpr int64_t kMaxFileBytes = 1 << 20;
// A connection that has failed is replaced no sooner than this after it was made.
constexpr absl::Duration kReconnectInterval = absl::Seconds(1);
constexpr int kReconnectMs = 1000;
// How long a TCP connection and the TLS handshake may take.
constexpr int kConnectMs = 5000;
// A call has had no data for this long: the connection is checked. Servers object to more pings.
constexpr int kKeepaliveMs = 30'000;
// Also how long data may remain unacknowledged, after which even a stuck write ends.
constexpr int kKeepaliveTimeoutMs = 10'000;
// A connection that had no call for this long is closed.
constexpr absl::Duration kMaxIdle = absl::Minutes(10);

gpr_timespec ToGrpc(SteadyTime time) {
  const std::chrono::nanoseconds since_zero = time.time_since_epoch();
  return gpr_time_from_nanos(since_zero.count(), GPR_CLOCK_MONOTONIC);
}

absl::StatusOr<std::string> ReadFile(const std::string& path, std::string_view expected,
                                     bool (*is_expected)(std::string_view)) {
  if (path.empty()) return "";
  absl::StatusOr<std::string> text = ReadSmallFile(path, kMaxFileBytes);
  if (!text.ok() || !is_expected(*text)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "file ", Quoted(path), ": ",
        text.ok() ? absl::StrCat("expected ", std::string(expected)) : text.status().message()));
  }
  return text;
}

bool IsPem(std::string_view text) { return text.find("-----BEGIN") != std::string_view::npos; }

bool IsToken(std::string_view text) {
  const absl::string_view token =
      absl::StripAsciiWhitespace(absl::string_view(text.data(), text.size()));
  return !token.empty() &&
         std::all_of(token.begin(), token.end(), [](char c) { return c > ' ' && c <= '~'; });
}

// The contents of the files of Peers::Options, each empty if there is none.
struct Files {
  grpc::SslCredentialsOptions tls;
  std::string authorization;  // The value of that header.
};

// FAILED_PRECONDITION: the message names the file.
absl::StatusOr<Files> ReadFiles(const Peers::Options& options) {
  Files files;
  if (!options.certificate_file.empty()) {
    EMA_ASSIGN_OR_RETURN(files.tls.pem_root_certs, ReadFile(options.ca_file, "PEM", IsPem));
    EMA_ASSIGN_OR_RETURN(files.tls.pem_cert_chain,
                         ReadFile(options.certificate_file, "PEM", IsPem));
    EMA_ASSIGN_OR_RETURN(files.tls.pem_private_key, ReadFile(options.key_file, "PEM", IsPem));
  }
  EMA_ASSIGN_OR_RETURN(std::string token, ReadFile(options.token_file, "one token", IsToken));
  absl::StripAsciiWhitespace(&token);
  if (!token.empty()) files.authorization = absl::StrCat("Bearer ", token);
  return files;
}

absl::Status NoAnswerError(absl::StatusCode code, const std::string& message) {
  return MakeError(code, ErrorReason::kGroupDegraded, message, absl::Seconds(1));
}

absl::Status StoppedError() { return absl::CancelledError("this server stops"); }

grpc::ChannelArguments ChannelSettings() {
  grpc::ChannelArguments arguments;
  // A connection of its own, without the pauses after an earlier one's failures.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  arguments.SetMaxReceiveMessageSize(-1);  // The manifest of a part may be long.
  return arguments;
}

}  // namespace

// A channel to a member.
struct Peers::Connection {
  Connection(const std::shared_ptr<grpc::Channel>& channel, std::string authorization_header)
      : stub(channel), authorization(std::move(authorization_header)) {}

  Stub stub;
  const std::string authorization;
  const SteadyTime opened = SteadyNow();
  SteadyTime last_call = opened;
  SteadyTime last_answer = opened;
  bool has_failed = false;
};

struct Peers::Call {
  std::string place;  // For errors.
  std::shared_ptr<Connection> connection;
  const SteadyTime start = SteadyNow();
  Timers::iterator timeout_timer;
  bool is_reported = false;
  grpc::ClientContext context;
  grpc::Status status;
  // Owns the response, which gRPC may write until the call has ended.
  std::function<void(const absl::Status&)> on_result;
};

Peers::Peers(Options options) : options_(std::move(options)) {}

Peers::~Peers() { Stop(); }

absl::StatusOr<std::unique_ptr<Peers>> Peers::Start(Options options) {
  if (const absl::Status files = ReadFiles(options).status(); !files.ok()) {
    return absl::InvalidArgumentError(files.message());
  }
  std::unique_ptr<Peers> peers(new Peers(std::move(options)));
  peers->thread_ = std::thread(&Peers::Run, peers.get());
  return peers;
}

void Peers::Stop() {
  if (!thread_.joinable()) return;
  Post([this] {
    is_stopping_ = true;
    for (const auto& [tag, call] : calls_) Cancel(*call, StoppedError());
  });
  thread_.join();
  timers_.clear();
}

bool Peers::Post(std::function<void()> work) {
  absl::MutexLock lock(&mu_);
  if (is_closed_) return false;
  posted_.push_back(std::move(work));
  // An alarm whose time is past enters its queue at once.
  if (posted_.size() == 1) posted_alarm_.Set(&queue_, gpr_inf_past(GPR_CLOCK_MONOTONIC), this);
  return true;
}

void Peers::AwaitPosted() {
  absl::Notification done;
  if (Post([&done] { done.Notify(); })) done.WaitForNotification();
}

void Peers::PostAfter(absl::Duration delay, std::function<void()> work) {
  Post([this, time = After(SteadyNow(), delay), work = std::move(work)] {
    timers_.emplace(time, work);
  });
}

void Peers::Run() {
  while (true) {
    if (!is_stopping_) RunDueTimers();
    if (is_stopping_ && calls_.empty() && TryClose()) break;
    // Timers of ours, since gRPC's stop while the system's clock is set back.
    const gpr_timespec deadline = is_stopping_ || timers_.empty()
                                      ? gpr_inf_future(GPR_CLOCK_MONOTONIC)
                                      : ToGrpc(timers_.begin()->first);
    void* tag = nullptr;
    bool ok = false;
    if (queue_.AsyncNext(&tag, &ok, deadline) != grpc::CompletionQueue::GOT_EVENT) continue;
    if (tag == this) {
      RunPosted();
    } else {
      EndCall(std::move(calls_.extract(tag).mapped()));
    }
  }
  queue_.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) {
  }
}

void Peers::RunPosted() {
  std::vector<std::function<void()>> works;
  {
    absl::MutexLock lock(&mu_);
    works.swap(posted_);
  }
  for (std::function<void()>& work : works) std::exchange(work, nullptr)();
}

void Peers::RunDueTimers() {
  while (!timers_.empty() && timers_.begin()->first <= SteadyNow()) {
    const std::function<void()> work = std::move(timers_.extract(timers_.begin()).mapped());
    work();
  }
}

bool Peers::TryClose() {
  absl::MutexLock lock(&mu_);
  is_closed_ = posted_.empty();
  return is_closed_;
}

absl::StatusOr<std::shared_ptr<Peers::Connection>> Peers::ConnectionTo(const std::string& address) {
  const auto found = connections_.find(address);
  if (found != connections_.end()) {
    Connection& known = *found->second;
    known.last_call = SteadyNow();
    if (!known.has_failed || Since(known.opened) < kReconnectInterval) return found->second;
  }
  std::erase_if(connections_, [&](const auto& entry) {
    return entry.first == address || Since(entry.second->last_call) > kMaxIdle;
  });
  EMA_ASSIGN_OR_RETURN(Files files, ReadFiles(options_));
  const auto channel = grpc::CreateCustomChannel(address,
                                                 options_.certificate_file.empty()
                                                     ? grpc::InsecureChannelCredentials()
                                                     : grpc::SslCredentials(files.tls),
                                                 ChannelSettings());
  auto connection = std::make_shared<Connection>(channel, std::move(files.authorization));
  connections_.emplace(address, connection);
  return connection;
}

template <auto kMethod, typename Request, typename Response>
void Peers::StartCall(const char* name, const std::string& address, const Request& request,
                      absl::Duration timeout, OnResult<Response> on_result) {
  Post([this, name, address, request, timeout, on_result = std::move(on_result)] {
    if (is_stopping_) return on_result(StoppedError());
    absl::StatusOr<std::shared_ptr<Connection>> connection = ConnectionTo(address);
    if (!connection.ok()) return on_result(connection.status());
    auto call = std::make_unique<Call>();
    call->place = absl::StrCat(name, " at ", address, ": ");
    call->connection = *std::move(connection);
    const std::string& authorization = call->connection->authorization;
    if (!authorization.empty()) call->context.AddMetadata("authorization", authorization);

    const auto response = std::make_shared<Response>();
    const std::shared_ptr<grpc::ClientAsyncResponseReader<Response>> reader =
        (call->connection->stub.*kMethod)(&call->context, request, &queue_);
    reader->StartCall();
    reader->Finish(response.get(), &call->status, call.get());
    call->on_result = [reader, response, on_result](const absl::Status& status) {
      if (!status.ok()) return on_result(status);
      on_result(std::move(*response));
    };
    AddCall(std::move(call), timeout);
  });
}

void Peers::AddCall(std::unique_ptr<Call> call, absl::Duration timeout) {
  const auto end_late = [this, running = call.get(), timeout] {
    // One late answer is no failure of the connection if other calls are answered.
    Connection& connection = *running->connection;
    if (connection.last_answer < running->start) connection.has_failed = true;
    Cancel(*running, NoAnswerError(absl::StatusCode::kDeadlineExceeded,
                                   absl::StrCat(running->place, "no answer within ",
                                                absl::FormatDuration(timeout))));
  };
  call->timeout_timer = timers_.emplace(After(call->start, timeout), end_late);
  Call* const tag = call.get();
  calls_.emplace(tag, std::move(call));
}

void Peers::Cancel(Call& call, const absl::Status& status) {
  if (std::exchange(call.is_reported, true)) return;
  call.context.TryCancel();
  call.on_result(status);
}

void Peers::EndCall(std::unique_ptr<Call> call) {
  if (call->is_reported) return;
  timers_.erase(call->timeout_timer);
  Connection& connection = *call->connection;
  const bool is_answered = call->status.ok() || !call->context.GetServerTrailingMetadata().empty();
  if (is_answered) connection.last_answer = SteadyNow();
  // After UNAUTHENTICATED the file of the token is read again.
  if ((!is_answered && call->status.error_code() == grpc::StatusCode::UNAVAILABLE) ||
      call->status.error_code() == grpc::StatusCode::UNAUTHENTICATED) {
    connection.has_failed = true;
  }
  call->on_result(ResultOf(*call));
}

absl::Status Peers::ResultOf(const Call& call) {
  if (call.status.ok()) return absl::OkStatus();
  const auto code = static_cast<absl::StatusCode>(call.status.error_code());
  const auto& trailers = call.context.GetServerTrailingMetadata();
  if (const auto found = trailers.find(kErrorDetailKey); found != trailers.end()) {
    return ErrorFromDetail(call.status, {found->second.data(), found->second.size()});
  }
  const std::string message = absl::StrCat(call.place, call.status.error_message());
  // Not by us: the called server stops.
  if (code == absl::StatusCode::kUnavailable || code == absl::StatusCode::kCancelled) {
    return NoAnswerError(absl::StatusCode::kUnavailable, message);
  }
  return absl::Status(code, message);
}

// Each call is one of the stub's methods.
#define EMA_CALL(method, Response)                                                   \
  void Peers::method(const std::string& address, const v1::method##Request& request, \
                     absl::Duration timeout, OnResult<v1::Response> on_result) {     \
    StartCall<&Stub::PrepareAsync##method>(#method, address, request, timeout,       \
                                           std::move(on_result));                    \
  }
EMA_CALL(ReservePartition, ReservePartitionResponse)
EMA_CALL(ProposeTracks, ProposeTracksResponse)
EMA_CALL(Vote, GroupState)
EMA_CALL(Sync, GroupState)
EMA_CALL(PublishState, PublishStateResponse)
EMA_CALL(SavePart, SavePartResponse)
EMA_CALL(WriteCopy, WriteCopyResponse)
EMA_CALL(FetchCopy, FetchCopyResponse)
EMA_CALL(ReadCopy, ReadCopyResponse)
EMA_CALL(GetPartStatistics, GetPartStatisticsResponse)
EMA_CALL(SynthesizePart, SynthesizePartResponse)
EMA_CALL(SaveNow, SaveNowResponse)
EMA_CALL(DescribeMember, DescribeMemberResponse)
#undef EMA_CALL

}  // namespace ema::group
