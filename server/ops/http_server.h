// SPDX-License-Identifier: Apache-2.0
//
// Answers probes, Prometheus and browsers.
#ifndef EMA_SERVER_OPS_HTTP_SERVER_H_
#define EMA_SERVER_OPS_HTTP_SERVER_H_

#include <chrono>
#include <cstddef>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "absl/status/statusor.h"
#include "server/base/listen_socket.h"

namespace ema {

// HTTP/1.1 for GET and HEAD of a few paths, one answer a connection. One thread does all of it, so
// that answers must come soon; whatever clients do, it holds at most kMaxConnections connections of
// at most 8 KiB and an answer each, none for longer than its time-out. A new one gets the place of
// the oldest that has not sent its request. When all have, or the process has no descriptor left,
// new ones wait in the kernel.
//
// Not cpp-httplib: what Debian 12 has (0.11.4) bounds neither a connection's time nor the size of
// its headers, stops accepting for good after some errors of accept(), and waits for its slowest
// client when it is stopped.
class HttpServer {
 public:
  static constexpr size_t kMaxConnections = 64;
  static constexpr std::chrono::milliseconds kTimeout{5000};

  struct Answer {
    int code = 200;
    std::string type = "text/plain; charset=utf-8";
    std::string body;
  };
  // By path, without a query. Each is called on the server's thread and must not block for long.
  using Pages = std::map<std::string, std::function<Answer()>, std::less<>>;

  // Serves when it returns. Errors as ListenTcp().
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(
      const std::string& address, Pages pages, std::chrono::milliseconds timeout = kTimeout);
  // Ends all connections. What the pages use is needed until it returns.
  ~HttpServer();

  int port() const { return socket_.port; }
  std::string url() const { return "http://" + socket_.text + "/"; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Connection {
    int fd = -1;
    Clock::time_point deadline;
    std::string request;  // As far as it has come.
    std::string answer;   // Not empty: it is being sent.
    size_t sent = 0;
  };

  HttpServer(ListenSocket socket, int stop_fd, Pages pages, std::chrono::milliseconds timeout)
      : socket_(std::move(socket)),
        acceptor_(socket_.fd),
        stop_fd_(stop_fd),
        pages_(std::move(pages)),
        timeout_(timeout) {}

  void Run();
  void Accept();
  // The oldest that has not sent its request. The end: all have.
  std::list<Connection>::iterator FindSilent();
  // True: the connection has ended.
  bool Advance(Connection& connection);
  bool Send(Connection& connection);
  // To what has come of a request, all of its head.
  std::string AnswerTo(std::string_view request) const;

  const ListenSocket socket_;
  ConnectionAcceptor acceptor_;  // The thread's own.
  const int stop_fd_;            // Readable: stop.
  const Pages pages_;
  const std::chrono::milliseconds timeout_;
  std::list<Connection> connections_;  // The thread's own.
  Clock::time_point accept_again_;     // Until then the system has nothing to accept with.
  std::thread thread_;
};

}  // namespace ema

#endif  // EMA_SERVER_OPS_HTTP_SERVER_H_
