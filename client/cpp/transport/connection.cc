// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/transport/connection.h"

#include <fcntl.h>
#include <grpc/grpc.h>
#include <grpcpp/create_channel_posix.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/transport/client_certificate.h"
#include "client/cpp/transport/convert_replies.h"
#include "client/cpp/transport/grpc_time.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {
namespace {

constexpr int kMaxSentBytes = 8 << 20;  // As the server takes.
// A model's manifest, its tracks, and those to come.
constexpr int kMaxReceivedBytes = 16 << 20;
// How long an operation of a cancelled call may take to end, before the connection is given up.
constexpr absl::Duration kCancelGrace = absl::Milliseconds(100);

grpc::ChannelArguments ChannelSettings(const Address& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxReceivedBytes);
  arguments.SetMaxSendMessageSize(kMaxSentBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 60'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  // For as long as a call lasts. gRPC's own way is two pings, and none any more until there is data
  // to send: a watch has none.
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // The path of a unix socket is no authority.
  arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY,
                      address.path.empty() ? address.Authority() : "localhost");
  arguments.SetUserAgentPrefix("ema-client");
  return arguments;
}

// Empty: none was named.
absl::StatusOr<std::string> ReadPem(const char* field, const std::string& path) {
  if (path.empty()) return "";
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (file.good() && absl::StrContains(text, "-----BEGIN")) return text;
  return BadRequest(absl::StrCat("tls.", field, " \"", path, "\": expected a PEM file"));
}

struct TlsChannel {
  std::shared_ptr<grpc::Channel> channel;
  // For the error if the server closes the connection during the handshake: the likely cause.
  std::string likely_problem;
};

absl::StatusOr<TlsChannel> OpenTlsChannel(const Address& address, const Client::Tls& tls) {
  grpc::SslCredentialsOptions files;
  EMA_ASSIGN_OR_RETURN(files.pem_root_certs, ReadPem("ca_file", tls.ca_file));
  EMA_ASSIGN_OR_RETURN(files.pem_cert_chain, ReadPem("certificate_file", tls.certificate_file));
  EMA_ASSIGN_OR_RETURN(files.pem_private_key, ReadPem("key_file", tls.key_file));
  std::string likely_problem = "the server may ask for a client certificate, and none is set";
  if (!files.pem_cert_chain.empty()) {
    EMA_ASSIGN_OR_RETURN(
        const std::string certificate,
        CheckClientCertificate(tls.certificate_file, files.pem_cert_chain, absl::Now()));
    likely_problem = absl::StrCat("the server may not accept ", certificate);
  }
  grpc::ChannelArguments settings = ChannelSettings(address);
  // A connection of its own, without the pauses after another one's failures.
  settings.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  settings.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // How long connecting may take.
  settings.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);
  return TlsChannel{
      grpc::CreateCustomChannel(address.Authority(), grpc::SslCredentials(files), settings),
      std::move(likely_problem)};
}

// OK: it is connected, or its first call will say why not.
absl::Status AwaitTls(grpc::Channel& channel, const std::string& address, SteadyTime deadline,
                      Interrupt* interrupt) {
  while (true) {
    const grpc_connectivity_state state = channel.GetState(/*try_to_connect=*/true);
    if (state == GRPC_CHANNEL_READY || state == GRPC_CHANNEL_TRANSIENT_FAILURE) {
      return absl::OkStatus();
    }
    if (interrupt->fired()) return absl::CancelledError("interrupted");
    const SteadyTime now = SteadyNow();
    if (now >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat("server ", address, ": no answer in time"));
    }
    channel.WaitForStateChange(state,
                               ToGrpc(std::min(deadline, After(now, Interrupt::kPollInterval))));
  }
}

// gRPC runs from the first connection until the process ends. It would otherwise stop with each
// lost connection, if it is the only one, and start again with the next. In 1.51 that stop never
// ends if a timer thread could not be created before.
void KeepGrpcStarted() {
  [[maybe_unused]] static const bool is_started = [] {
    grpc_init();
    return true;
  }();
}

}  // namespace

absl::StatusOr<std::shared_ptr<Connection>> Connection::Open(Dialer& dialer, const Client::Tls& tls,
                                                             const Token& token,
                                                             SteadyTime deadline,
                                                             Interrupt* interrupt) {
  const std::string text = dialer.address().ToString();
  if (dialer.address().is_tls) {
    KeepGrpcStarted();
    EMA_ASSIGN_OR_RETURN(TlsChannel tls_channel, OpenTlsChannel(dialer.address(), tls));
    EMA_RETURN_IF_ERROR(AwaitTls(*tls_channel.channel, text, deadline, interrupt));
    return std::shared_ptr<Connection>(new Connection(text, token, /*fd=*/-1,
                                                      std::move(tls_channel.channel),
                                                      std::move(tls_channel.likely_problem)));
  }
  absl::StatusOr<int> fd = dialer.Dial(deadline, interrupt);
  if (!fd.ok()) {
    return absl::Status(fd.status().code(),
                        absl::StrCat("server ", text, ": ", fd.status().message()));
  }
  const int own_fd = fcntl(*fd, F_DUPFD_CLOEXEC, 0);
  if (own_fd < 0) {
    const int error = errno;
    close(*fd);
    return absl::UnavailableError(absl::StrCat("server ", text, ": ", std::strerror(error)));
  }
  // Not before the address has been looked up, which needs a thread, too.
  KeepGrpcStarted();
  // Takes *fd.
  std::shared_ptr<grpc::Channel> channel =
      grpc::CreateCustomInsecureChannelFromFd(text, *fd, ChannelSettings(dialer.address()));
  return std::shared_ptr<Connection>(new Connection(text, token, own_fd, std::move(channel)));
}

Connection::Connection(std::string address, const Token& token, int fd,
                       std::shared_ptr<grpc::Channel> channel, std::string likely_tls_problem)
    : address_(std::move(address)),
      token_(token),
      fd_(fd),
      likely_tls_problem_(std::move(likely_tls_problem)),
      channel_(std::move(channel)),
      stub_(channel_),
      generic_stub_(channel_),
      health_stub_(channel_) {}

Connection::~Connection() {
  if (fd_ >= 0) close(fd_);
}

bool Connection::is_alive() const {
  if (is_broken()) return false;
  if (fd_ < 0) return channel_->GetState(/*try_to_connect=*/false) == GRPC_CHANNEL_READY;
  // gRPC reports a dead connection only when a call fails, so the kernel is asked.
  pollfd peer = {.fd = fd_, .events = POLLRDHUP, .revents = 0};
  return poll(&peer, 1, 0) == 0;
}

bool Connection::is_broken() const {
  absl::MutexLock lock(&mu_);
  return is_broken_;
}

void Connection::Break() {
  std::vector<std::shared_ptr<grpc::ClientContext>> contexts;
  {
    absl::MutexLock lock(&mu_);
    is_broken_ = true;
    contexts = contexts_;
  }
  // A write that waits for the peer's window fails at once, and drops its slices.
  if (fd_ >= 0) shutdown(fd_, SHUT_RDWR);
  for (const auto& context : contexts) context->TryCancel();
}

void Connection::Add(std::shared_ptr<grpc::ClientContext> context) {
  grpc::ClientContext* const added = context.get();
  bool broken = false;
  {
    absl::MutexLock lock(&mu_);
    contexts_.push_back(std::move(context));
    broken = is_broken_;
  }
  if (broken) added->TryCancel();
}

void Connection::Remove(const grpc::ClientContext* context) {
  absl::MutexLock lock(&mu_);
  const auto found = std::find_if(contexts_.begin(), contexts_.end(),
                                  [context](const auto& other) { return other.get() == context; });
  if (found != contexts_.end()) contexts_.erase(found);
}

Call::Call(std::shared_ptr<Connection> connection, SteadyTime deadline, Interrupt* interrupt)
    : connection_(std::move(connection)),
      context_(std::make_shared<grpc::ClientContext>()),
      deadline_(deadline),
      interrupt_(interrupt) {
  context_->set_deadline(ToGrpc(deadline));
  const std::string authorization = connection_->token_.Authorization();
  if (!authorization.empty()) context_->AddMetadata("authorization", authorization);
  connection_->Add(context_);
  interrupt_->AddCall(context_);
}

Call::~Call() {
  interrupt_->RemoveCall(context_.get());
  connection_->Remove(context_.get());
}

void Call::NoteCancelled() {
  SteadyTime never = SteadyTime::max();
  cancelled_at_.compare_exchange_strong(never, SteadyNow());
}

void Call::Cancel() {
  NoteCancelled();
  context_->TryCancel();
}

Call::Event Call::Await(grpc::CompletionQueue* queue, SteadyTime wait_end) {
  void* tag = nullptr;
  bool ok = false;
  while (true) {
    const SteadyTime now = SteadyNow();
    if (interrupt_->fired()) {
      NoteCancelled();
    } else if (now >= deadline_) {
      // gRPC's thread for deadlines waits by the system's clock: if that has been set back, it is
      // late.
      Cancel();
    }
    // gRPC does not end a write that the kernel has begun to take, not even of a cancelled call.
    if (now >= After(cancelled_at_.load(), kCancelGrace)) connection_->Break();
    const SteadyTime until = std::min(wait_end, After(now, Interrupt::kPollInterval));
    switch (queue->AsyncNext(&tag, &ok, ToGrpc(until))) {
      case grpc::CompletionQueue::GOT_EVENT:
        return ok ? Event::kOk : Event::kFailed;
      case grpc::CompletionQueue::SHUTDOWN:
        return Event::kFailed;
      case grpc::CompletionQueue::TIMEOUT:
        if (until == wait_end) return Event::kTimeout;
    }
  }
}

absl::Status Call::Result(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const auto& trailer = context_->GetServerTrailingMetadata();
  if (const auto detail = trailer.find(kErrorDetailKey); detail != trailer.end()) {
    return ErrorFromDetail(status, {detail->second.data(), detail->second.size()});
  }
  const std::string message =
      absl::StrCat("server ", connection_->address(), ": ", status.error_message());
  const bool is_cancelled = status.error_code() == grpc::StatusCode::CANCELLED;
  if (is_cancelled && interrupt_->fired()) return absl::CancelledError("interrupted");
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED ||
      (is_cancelled && SteadyNow() >= deadline_)) {
    return absl::DeadlineExceededError(
        absl::StrCat("server ", connection_->address(), ": no answer in time"));
  }
  if (is_cancelled) {
    if (connection_->is_broken()) {
      return absl::UnavailableError(absl::StrCat(message, " (the connection was closed)"));
    }
    if (cancelled_at_.load() == SteadyTime::max()) {
      return absl::UnavailableError(absl::StrCat(message, " (the server has ended the stream)"));
    }
  }
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    connection_->Break();
    // A server that rejects the certificate closes the connection while gRPC connects.
    if (const std::string& likely_problem = connection_->likely_tls_problem_;
        !likely_problem.empty() && absl::StrContains(message, "failed to connect") &&
        absl::StrContains(message, "Socket closed")) {
      return CertificateError(absl::StrCat(message, " (", likely_problem, ")"));
    }
  }
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), message);
}

}  // namespace ema::client_internal
