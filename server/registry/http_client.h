// SPDX-License-Identifier: Apache-2.0
//
// Requests over HTTP/1.1 and TLS, by libcurl.
#ifndef EMA_SERVER_REGISTRY_HTTP_CLIENT_H_
#define EMA_SERVER_REGISTRY_HTTP_CLIENT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/steady_wait.h"

namespace ema {

struct LibCurl;

struct HttpRequest {
  std::string method = "GET";
  std::string path;  // With the query.
  std::string body;  // JSON; empty: none.
  // libcurl silently repeats a request if the server has closed an old connection. On a new one it
  // never does, so the request reaches the server at most once.
  bool needs_new_connection = false;
};

struct HttpResponse {
  int status = 0;  // Such as 200.
  std::string body;
};

// Sends requests to one server, and keeps connections open between them. Thread-safe.
class HttpClient {
 public:
  struct Options {
    std::string url;  // Such as "https://10.0.0.1:443", without a path.
    // File with a bearer token, which is read again for each request. Empty: no token.
    std::string token_file;
    // PEM file, which is read again for each connection. Empty: the system's CAs.
    std::string ca_file;
  };

  HttpClient(const LibCurl* curl, Options options);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  const std::string& url() const { return options_.url; }

  // OK: the server answered, with any status. UNAVAILABLE: no complete answer until `deadline`, or
  // the token cannot be read.
  absl::StatusOr<HttpResponse> Send(const HttpRequest& request, SteadyTime deadline)
      ABSL_LOCKS_EXCLUDED(mu_);

 private:
  friend class HttpStreams;
  class Transfer;
  // A handle of libcurl, which keeps its connections open.
  using Handle = std::unique_ptr<void, void (*)(void*)>;

  // A transfer that Send() or HttpStreams runs. UNAVAILABLE: the token cannot be read.
  absl::StatusOr<std::unique_ptr<Transfer>> NewTransfer(const HttpRequest& request,
                                                        absl::Duration timeout, Handle handle);
  Handle NewHandle() const;
  Handle TakeIdleHandle() ABSL_LOCKS_EXCLUDED(mu_);
  void KeepIdleHandle(Handle handle) ABSL_LOCKS_EXCLUDED(mu_);

  const LibCurl& curl_;
  const Options options_;
  absl::Mutex mu_;
  std::vector<Handle> idle_handles_ ABSL_GUARDED_BY(mu_);
};

// Responses that consist of lines, and that the server continues for as long as it can. For one
// thread, apart from Stop().
class HttpStreams {
 public:
  struct Line {
    int stream = 0;  // As Open() was called: 0, 1, ...
    std::string text;
  };
  struct Progress {
    std::vector<Line> lines;
    bool is_ended = false;  // The server ended a stream in the regular way.
  };

  // `client` must outlive this.
  explicit HttpStreams(HttpClient* client);
  ~HttpStreams();

  // Begins a GET request. No error of the server is reported before Wait(). UNAVAILABLE: the token
  // cannot be read.
  absl::Status Open(const std::string& path, absl::Duration timeout);
  // Waits for lines, for the end of a stream, for `deadline`, or for Stop(). UNAVAILABLE: a stream
  // broke, or the server answered with another status than 200.
  absl::StatusOr<Progress> Wait(SteadyTime deadline);
  // Ends the current Wait(), or the next one. Thread-safe.
  void Stop();

 private:
  void TakeLines(std::vector<Line>& lines);

  HttpClient& client_;
  const LibCurl& curl_;
  void* const multi_;  // Of libcurl: runs all transfers.
  std::vector<std::unique_ptr<HttpClient::Transfer>> transfers_;
};

}  // namespace ema

#endif  // EMA_SERVER_REGISTRY_HTTP_CLIENT_H_
