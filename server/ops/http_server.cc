// SPDX-License-Identifier: Apache-2.0
#include "server/ops/http_server.h"

#include <microhttpd.h>

#include <cstddef>
#include <string_view>

#include "ema/internal/catch_exceptions.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

// Of one connection: its request's head and the answer's, each of which must fit.
constexpr size_t kConnectionBytes = size_t{8} << 10;

absl::StatusOr<HttpServer::Answer> AnswerTo(const HttpServer::Pages& pages, std::string_view method,
                                            std::string_view path) {
  if (method != MHD_HTTP_METHOD_GET && method != MHD_HTTP_METHOD_HEAD) {
    return HttpServer::Answer{.code = MHD_HTTP_METHOD_NOT_ALLOWED, .body = "Method Not Allowed\n"};
  }
  const auto page = pages.find(path);
  if (page == pages.end()) {
    return HttpServer::Answer{.code = MHD_HTTP_NOT_FOUND, .body = "Not Found\n"};
  }
  return page->second();
}

// Called by the library for each request when its head has arrived.
MHD_Result HandleRequest(void* pages, MHD_Connection* connection, const char* path,
                         const char* method, const char* /*version*/, const char* /*upload*/,
                         size_t* /*upload_bytes*/, void** /*request*/) {
  absl::StatusOr<HttpServer::Answer> answer = CatchExceptions(
      [&] { return AnswerTo(*static_cast<const HttpServer::Pages*>(pages), method, path); });
  if (!answer.ok()) return MHD_NO;  // Closes the connection.
  MHD_Response* const response = MHD_create_response_from_buffer(
      answer->body.size(), answer->body.data(), MHD_RESPMEM_MUST_COPY);
  if (response == nullptr) return MHD_NO;
  const auto add_header = [response](const char* name, const char* value) {
    MHD_add_response_header(response, name, value);
  };
  add_header(MHD_HTTP_HEADER_CONTENT_TYPE, answer->type.c_str());
  add_header(MHD_HTTP_HEADER_CONNECTION, "close");
  add_header(MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
  add_header("X-Content-Type-Options", "nosniff");
  // What the status page needs: its own script and endpoint, and the styles inside it.
  add_header("Content-Security-Policy",
             "default-src 'none'; script-src 'self'; connect-src 'self'; style-src "
             "'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'");
  if (answer->code == MHD_HTTP_METHOD_NOT_ALLOWED) add_header(MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
  const MHD_Result result =
      MHD_queue_response(connection, static_cast<unsigned>(answer->code), response);
  MHD_destroy_response(response);
  return result;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address,
                                                              Pages pages,
                                                              std::chrono::seconds timeout) {
  EMA_ASSIGN_OR_RETURN(ListenSocket socket, ListenTcp(address, "--http-listen"));
  std::unique_ptr<HttpServer> server(new HttpServer(std::move(socket), std::move(pages)));
  // Without MHD_USE_ERROR_LOG the library writes nothing to stderr.
  server->daemon_ = MHD_start_daemon(
      MHD_USE_POLL_INTERNAL_THREAD | MHD_USE_ITC, /*port=*/0, /*accept policy*/ nullptr, nullptr,
      &HandleRequest, const_cast<Pages*>(&server->pages_),  //
      MHD_OPTION_LISTEN_SOCKET, server->socket_.fd,         //
      MHD_OPTION_CONNECTION_LIMIT, static_cast<unsigned>(kMaxConnections),
      MHD_OPTION_CONNECTION_TIMEOUT, static_cast<unsigned>(timeout.count()),
      MHD_OPTION_CONNECTION_MEMORY_LIMIT, kConnectionBytes, MHD_OPTION_END);
  if (server->daemon_ == nullptr) return absl::InternalError("libmicrohttpd: cannot start");
  return server;
}

HttpServer::~HttpServer() {
  if (daemon_ != nullptr) MHD_stop_daemon(daemon_);
}

}  // namespace ema
