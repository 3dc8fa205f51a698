// SPDX-License-Identifier: Apache-2.0
#include "server/ops/http_server.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

constexpr size_t kMaxHeadBytes = size_t{8} << 10;
// Where the system lacks what a connection takes, and the backlog stays readable.
constexpr std::chrono::milliseconds kBackoff(50);

std::string_view NameOf(int code) {
  switch (code) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 431:
      return "Request Header Fields Too Large";
    default:
      return "Service Unavailable";
  }
}

std::string Serialize(const HttpServer::Answer& answer, bool with_body) {
  std::string text = absl::StrCat(
      "HTTP/1.1 ", answer.code, " ", std::string(NameOf(answer.code)),
      "\r\nContent-Type: ", answer.type, "\r\nContent-Length: ", answer.body.size(),
      "\r\nConnection: close\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff"
      "\r\nContent-Security-Policy: default-src 'none'; style-src 'unsafe-inline'",
      answer.code == 405 ? "\r\nAllow: GET, HEAD" : "", "\r\n\r\n");
  if (with_body) text += answer.body;
  return text;
}

HttpServer::Answer Error(int code) {
  return {.code = code, .body = absl::StrCat(std::string(NameOf(code)), "\n")};
}

bool WouldBlock(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address,
                                                              Pages pages,
                                                              std::chrono::milliseconds timeout) {
  EMA_ASSIGN_OR_RETURN(ListenSocket socket, ListenTcp(address, "--http-listen"));
  absl::Cleanup close_socket = [fd = socket.fd] { close(fd); };
  EMA_ASSIGN_OR_RETURN(const int stop_fd, NewEvent());
  std::move(close_socket).Cancel();
  std::unique_ptr<HttpServer> server(
      new HttpServer(std::move(socket), stop_fd, std::move(pages), timeout));
  server->thread_ = std::thread([server = server.get()] { server->Run(); });
  return server;
}

HttpServer::~HttpServer() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(stop_fd_, &one, sizeof(one));
  thread_.join();
  for (const Connection& connection : connections_) close(connection.fd);
  close(socket_.fd);
  close(stop_fd_);
}

void HttpServer::Run() {
  std::vector<pollfd> polled;
  while (true) {
    const Clock::time_point now = Clock::now();
    std::erase_if(connections_, [now](const Connection& connection) {
      if (now < connection.deadline) return false;
      close(connection.fd);
      return true;
    });
    const bool has_place =
        connections_.size() < kMaxConnections || FindSilent() != connections_.end();
    const bool accepts = has_place && now >= accept_again_;
    polled = {{stop_fd_, POLLIN, 0}, {accepts ? socket_.fd : -1, POLLIN, 0}};
    Clock::time_point next = now + timeout_;
    if (!accepts) next = std::min(next, now + kBackoff);
    for (const Connection& connection : connections_) {
      const bool is_sending = !connection.answer.empty();
      polled.push_back({connection.fd, static_cast<short>(is_sending ? POLLOUT : POLLIN), 0});
      next = std::min(next, connection.deadline);
    }
    // Rounded up: a deadline is over when it wakes.
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(next - now);
    if (poll(polled.data(), polled.size(), static_cast<int>(wait.count())) <= 0) continue;
    if (polled[0].revents != 0) return;
    auto at = polled.begin() + 2;
    for (auto it = connections_.begin(); it != connections_.end(); ++at) {
      if (at->revents == 0 || !Advance(*it)) {
        ++it;
        continue;
      }
      close(it->fd);
      it = connections_.erase(it);
    }
    if (polled[1].revents != 0) Accept();
  }
}

std::list<HttpServer::Connection>::iterator HttpServer::FindSilent() {
  return std::find_if(connections_.begin(), connections_.end(),
                      [](const Connection& connection) { return connection.answer.empty(); });
}

void HttpServer::Accept() {
  const bool is_full = connections_.size() >= kMaxConnections;
  const auto silent = FindSilent();
  if (is_full && silent == connections_.end()) return;
  const ConnectionAcceptor::Accepted accepted = acceptor_.Accept(SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (accepted.outcome == ConnectionAcceptor::Outcome::kAccepted) {
    if (is_full) {
      // Probes must get in, whoever connects and says nothing.
      close(silent->fd);
      connections_.erase(silent);
    }
    connections_.push_back({.fd = accepted.fd, .deadline = Clock::now() + timeout_});
  } else if (accepted.outcome == ConnectionAcceptor::Outcome::kExhausted) {
    accept_again_ = Clock::now() + kBackoff;
  }
}

bool HttpServer::Advance(Connection& connection) {
  if (!connection.answer.empty()) return Send(connection);
  char buffer[4096];
  const ssize_t n = recv(connection.fd, buffer, sizeof(buffer), 0);
  if (n < 0) return !WouldBlock(errno);
  if (n == 0) return true;
  connection.request.append(buffer, n);
  const size_t end = connection.request.find("\r\n\r\n");
  if (end != std::string::npos && end <= kMaxHeadBytes) {
    connection.answer = AnswerTo(std::string_view(connection.request).substr(0, end));
  } else if (connection.request.size() > kMaxHeadBytes) {
    connection.answer = Serialize(Error(431), /*with_body=*/true);
  } else {
    return false;
  }
  return Send(connection);
}

bool HttpServer::Send(Connection& connection) {
  while (connection.sent < connection.answer.size()) {
    const ssize_t n = send(connection.fd, connection.answer.data() + connection.sent,
                           connection.answer.size() - connection.sent, MSG_NOSIGNAL);
    if (n < 0) return !WouldBlock(errno);
    connection.sent += n;
  }
  return true;
}

std::string HttpServer::AnswerTo(std::string_view request) const {
  const std::string_view line = request.substr(0, request.find("\r\n"));
  const size_t first = line.find(' ');
  const size_t last = line.rfind(' ');
  if (first == last || first == std::string_view::npos ||
      !line.substr(last + 1).starts_with("HTTP/1.")) {
    return Serialize(Error(400), /*with_body=*/true);
  }
  const std::string_view method = line.substr(0, first);
  const bool with_body = method != "HEAD";
  if (method != "GET" && method != "HEAD") return Serialize(Error(405), with_body);
  const std::string_view target = line.substr(first + 1, last - first - 1);
  const auto page = pages_.find(target.substr(0, target.find('?')));
  return Serialize(page != pages_.end() ? page->second() : Error(404), with_body);
}

}  // namespace ema
