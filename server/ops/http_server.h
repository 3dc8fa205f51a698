// SPDX-License-Identifier: Apache-2.0
//
// The HTTP server for probes, Prometheus and the status page.
#ifndef EMA_SERVER_OPS_HTTP_SERVER_H_
#define EMA_SERVER_OPS_HTTP_SERVER_H_

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "server/base/listen_socket.h"

struct MHD_Daemon;

namespace ema {

// Answers GET and HEAD of a few paths with libmicrohttpd, on one thread of that library. It holds
// at most kMaxConnections connections; further ones wait in the kernel's backlog. A connection on
// which nothing happens for the timeout is closed, and so is each one after its answer.
class HttpServer {
 public:
  static constexpr int kMaxConnections = 64;
  static constexpr std::chrono::seconds kTimeout{5};

  struct Answer {
    int code = 200;
    std::string type = "text/plain; charset=utf-8";
    std::string body;
  };
  // By path, without the query. The functions run on the server's thread: while one runs, all other
  // requests wait.
  using Pages = std::map<std::string, std::function<Answer()>, std::less<>>;

  // Returns a server that is listening. Fails as ListenTcp() does, and with INTERNAL if the library
  // cannot start its thread.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address, Pages pages,
                                                           std::chrono::seconds timeout = kTimeout);
  // Closes all connections, also those that are being answered. Until it returns, pages may be
  // called.
  ~HttpServer();

  int port() const { return socket_.port; }
  std::string url() const { return "http://" + socket_.text + "/"; }

 private:
  HttpServer(ListenSocket socket, Pages pages)
      : socket_(std::move(socket)), pages_(std::move(pages)) {}

  const ListenSocket socket_;  // The library closes it.
  const Pages pages_;
  MHD_Daemon* daemon_ = nullptr;  // Null only if Start() fails.
};

}  // namespace ema

#endif  // EMA_SERVER_OPS_HTTP_SERVER_H_
