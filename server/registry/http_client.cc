// SPDX-License-Identifier: Apache-2.0
#include "server/registry/http_client.h"

#include <algorithm>
#include <array>
#include <climits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"
#include "server/base/small_file.h"
#include "server/registry/libcurl.h"

namespace ema {
namespace {

// For all models at once, each of which has at most 1 MiB.
constexpr size_t kMaxResponseBytes = size_t{256} << 20;
constexpr int64_t kMaxTokenBytes = 64 << 10;
constexpr size_t kMaxIdleHandles = 8;
constexpr absl::Duration kConnectTimeout = absl::Seconds(4);
// Of a stream without data, so that the loss of the network is noticed.
constexpr long kProbeAfterSeconds = 10;
constexpr long kProbeIntervalSeconds = 5;
// If a stream is silent for longer, its server hangs, and the stream has broken.
constexpr long kLongestSilenceSeconds = 180;

long ToMilliseconds(absl::Duration duration) {
  // Zero would be no limit.
  return static_cast<long>(std::clamp<int64_t>(absl::ToInt64Milliseconds(duration), 1, INT_MAX));
}

}  // namespace

// One request and what has arrived of its response. libcurl has pointers to it.
class HttpClient::Transfer {
 public:
  Transfer(const LibCurl& curl, const std::string& url, HttpRequest request, Handle handle)
      : curl_(curl), url_(url), request_(std::move(request)), handle_(std::move(handle)) {}
  ~Transfer() { curl_.slist_free_all(headers_); }
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  void AddHeader(const std::string& text) {
    headers_ = curl_.slist_append(headers_, text.c_str());  // Copies the text.
  }

  void Prepare(const Options& options, absl::Duration timeout) {
    const auto set = [this](CURLoption option, auto value) {
      curl_.easy_setopt(handle_.get(), option, value);
    };
    const std::string address = absl::StrCat(options.url, request_.path);
    set(CURLOPT_URL, address.c_str());
    set(CURLOPT_CUSTOMREQUEST, request_.method.c_str());
    if (!request_.body.empty()) {
      AddHeader("Content-Type: application/json");
      AddHeader("Expect:");  // Without this, libcurl asks for permission to send large bodies.
      set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(request_.body.size()));
      set(CURLOPT_POSTFIELDS, request_.body.c_str());
    }
    set(CURLOPT_HTTPHEADER, headers_);
    set(CURLOPT_HTTP_VERSION, long{CURL_HTTP_VERSION_1_1});
    set(CURLOPT_PROTOCOLS_STR, "http,https");
    set(CURLOPT_NOPROXY, "*");
    set(CURLOPT_NOSIGNAL, 1L);  // Signals would be a matter of the whole process.
    set(CURLOPT_TIMEOUT_MS, ToMilliseconds(timeout));
    set(CURLOPT_CONNECTTIMEOUT_MS, ToMilliseconds(std::min(timeout, kConnectTimeout)));
    set(CURLOPT_FRESH_CONNECT, request_.needs_new_connection ? 1L : 0L);
    set(CURLOPT_TCP_KEEPALIVE, 1L);
    set(CURLOPT_TCP_KEEPIDLE, kProbeAfterSeconds);
    set(CURLOPT_TCP_KEEPINTVL, kProbeIntervalSeconds);
    if (!options.ca_file.empty()) {
      set(CURLOPT_CAINFO, options.ca_file.c_str());
      // Otherwise the system's CAs would be trusted, too.
      set(CURLOPT_CAPATH, static_cast<const char*>(nullptr));
    }
    set(CURLOPT_QUICK_EXIT, 1L);  // A name server that hangs does not hold the call.
    set(CURLOPT_ERRORBUFFER, error_.data());
    set(CURLOPT_WRITEDATA, this);
    set(CURLOPT_WRITEFUNCTION, &Transfer::Receive);
  }

  // REQUIRES: the transfer has ended.
  absl::Status ToStatus(CURLcode code) const {
    if (code == CURLE_OK) return absl::OkStatus();
    return absl::UnavailableError(
        absl::StrCat(url_, ": ", error_[0] != '\0' ? error_.data() : curl_.easy_strerror(code)));
  }
  int status() const {
    long status = 0;
    curl_.easy_getinfo(handle_.get(), CURLINFO_RESPONSE_CODE, &status);
    return static_cast<int>(status);
  }

  const std::string& url() const { return url_; }
  CURL* handle() const { return handle_.get(); }
  Handle ReleaseHandle() { return std::move(handle_); }
  std::string& received() { return received_; }  // Bytes of the body so far.

 private:
  static size_t Receive(const char* data, size_t /*size*/, size_t bytes, void* transfer) {
    std::string& received = static_cast<Transfer*>(transfer)->received_;
    if (received.size() + bytes > kMaxResponseBytes) return 0;  // libcurl aborts the transfer.
    received.append(data, bytes);
    return bytes;
  }

  const LibCurl& curl_;
  const std::string url_;
  const HttpRequest request_;
  Handle handle_;
  std::string received_;
  curl_slist* headers_ = nullptr;
  std::array<char, CURL_ERROR_SIZE> error_{};
};

HttpClient::HttpClient(const LibCurl* curl, Options options)
    : curl_(*curl), options_(std::move(options)) {}

HttpClient::~HttpClient() = default;

absl::StatusOr<std::unique_ptr<HttpClient::Transfer>> HttpClient::NewTransfer(
    const HttpRequest& request, absl::Duration timeout, Handle handle) {
  std::string token;
  if (!options_.token_file.empty()) {
    absl::StatusOr<std::string> text = ReadSmallFile(options_.token_file, kMaxTokenBytes);
    if (!text.ok()) {
      return absl::UnavailableError(
          absl::StrCat("token file ", options_.token_file, ": ", text.status().message()));
    }
    token = std::string(absl::StripAsciiWhitespace(*text));
  }
  auto transfer = std::make_unique<Transfer>(curl_, options_.url, request, std::move(handle));
  transfer->AddHeader("Accept: application/json");
  if (!token.empty()) transfer->AddHeader(absl::StrCat("Authorization: Bearer ", token));
  transfer->Prepare(options_, timeout);
  return transfer;
}

HttpClient::Handle HttpClient::NewHandle() const { return {curl_.easy_init(), curl_.easy_cleanup}; }

HttpClient::Handle HttpClient::TakeIdleHandle() {
  absl::MutexLock lock(&mu_);
  if (idle_handles_.empty()) return NewHandle();
  Handle handle = std::move(idle_handles_.back());
  idle_handles_.pop_back();
  return handle;
}

void HttpClient::KeepIdleHandle(Handle handle) {
  curl_.easy_reset(handle.get());  // It has pointers into the transfer.
  absl::MutexLock lock(&mu_);
  if (idle_handles_.size() < kMaxIdleHandles) idle_handles_.push_back(std::move(handle));
}

absl::StatusOr<HttpResponse> HttpClient::Send(const HttpRequest& request, SteadyTime deadline) {
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<Transfer> transfer,
                       NewTransfer(request, Until(deadline), TakeIdleHandle()));
  absl::Status status = transfer->ToStatus(curl_.easy_perform(transfer->handle()));
  if (!status.ok()) {
    // The other connections may be as dead as this one.
    absl::MutexLock lock(&mu_);
    idle_handles_.clear();
    return status;
  }
  HttpResponse response{.status = transfer->status(), .body = std::move(transfer->received())};
  KeepIdleHandle(transfer->ReleaseHandle());
  return response;
}

HttpStreams::HttpStreams(HttpClient* client)
    : client_(*client), curl_(client->curl_), multi_(curl_.multi_init()) {}

HttpStreams::~HttpStreams() {
  for (const auto& transfer : transfers_) curl_.multi_remove_handle(multi_, transfer->handle());
  curl_.multi_cleanup(multi_);
}

absl::Status HttpStreams::Open(const std::string& path, absl::Duration timeout) {
  EMA_ASSIGN_OR_RETURN(auto transfer,
                       client_.NewTransfer({.path = path}, timeout, client_.NewHandle()));
  // The server sends something about once a minute.
  curl_.easy_setopt(transfer->handle(), CURLOPT_LOW_SPEED_LIMIT, 1L);
  curl_.easy_setopt(transfer->handle(), CURLOPT_LOW_SPEED_TIME, kLongestSilenceSeconds);
  curl_.multi_add_handle(multi_, transfer->handle());
  transfers_.push_back(std::move(transfer));
  return absl::OkStatus();
}

void HttpStreams::Stop() { curl_.multi_wakeup(multi_); }

void HttpStreams::TakeLines(std::vector<Line>& lines) {
  for (size_t i = 0; i < transfers_.size(); ++i) {
    if (transfers_[i]->status() != 200) continue;  // Wait() reports the error when it is complete.
    std::string& received = transfers_[i]->received();
    size_t begin = 0;
    for (size_t end; (end = received.find('\n', begin)) != std::string::npos; begin = end + 1) {
      lines.push_back({static_cast<int>(i), received.substr(begin, end - begin)});
    }
    received.erase(0, begin);
  }
}

absl::StatusOr<HttpStreams::Progress> HttpStreams::Wait(SteadyTime deadline) {
  Progress progress;
  for (bool is_last = false;; is_last = true) {
    int running = 0;
    curl_.multi_perform(multi_, &running);
    int queued = 0;
    while (const CURLMsg* const message = curl_.multi_info_read(multi_, &queued)) {
      if (message->msg != CURLMSG_DONE) continue;
      const auto ended = std::find_if(
          transfers_.begin(), transfers_.end(),
          [message](const auto& transfer) { return transfer->handle() == message->easy_handle; });
      EMA_RETURN_IF_ERROR((*ended)->ToStatus(message->data.result));
      if (const int status = (*ended)->status(); status != 200) {
        return absl::UnavailableError(absl::StrCat((*ended)->url(), ": HTTP status ", status, ": ",
                                                   (*ended)->received().substr(0, 500)));
      }
      progress.is_ended = true;
    }
    TakeLines(progress.lines);
    if (is_last || progress.is_ended || !progress.lines.empty()) return progress;
    const int64_t milliseconds =
        absl::ToInt64Milliseconds(absl::Ceil(Until(deadline), absl::Milliseconds(1)));
    curl_.multi_poll(multi_, nullptr, 0,
                     static_cast<int>(std::clamp<int64_t>(milliseconds, 0, INT_MAX)), nullptr);
  }
}

}  // namespace ema
