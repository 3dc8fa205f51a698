// SPDX-License-Identifier: Apache-2.0
#include "server/registry/kubernetes_client.h"

#include <cstdlib>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "ema/internal/status_macros.h"
#include "server/base/quoted.h"
#include "server/base/small_file.h"
#include "server/registry/libcurl.h"

namespace ema {
namespace {

constexpr int64_t kMaxAccountFileBytes = 1 << 20;
// The API server ends a watch after this time, and all keys are listed again.
constexpr int kWatchSeconds = 300;
constexpr absl::Duration kWatchSlack = absl::Seconds(30);  // Then the API server hangs.

absl::Status CheckReadable(const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  absl::Status status = ReadSmallFile(path, kMaxAccountFileBytes).status();
  if (status.ok()) return status;
  return absl::InvalidArgumentError(absl::StrCat("file ", Quoted(path), ": ", status.message()));
}

// Fills what is not given from the environment and the service account of this pod.
absl::Status FillFromPod(KubernetesOptions& options) {
  const char* const host = std::getenv("KUBERNETES_SERVICE_HOST");
  const char* const port = std::getenv("KUBERNETES_SERVICE_PORT");
  if (host == nullptr || port == nullptr) {
    return absl::InvalidArgumentError(
        "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set, so this is not a pod of "
        "a cluster; the address of its API server is not known");
  }
  const bool is_v6 = absl::StrContains(host, ":");
  options.api_url = absl::StrCat("https://", is_v6 ? "[" : "", host, is_v6 ? "]" : "", ":", port);
  const std::string folder = options.account_folder + "/";
  if (options.token_file.empty()) options.token_file = folder + "token";
  if (options.ca_file.empty()) options.ca_file = folder + "ca.crt";
  if (options.name_space.empty()) {
    const std::string path = folder + "namespace";
    EMA_RETURN_IF_ERROR(CheckReadable(path));
    EMA_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(path, kMaxAccountFileBytes));
    options.name_space = std::string(absl::StripAsciiWhitespace(text));
  }
  return absl::OkStatus();
}

// Of an answer that is neither a success nor a conflict.
absl::StatusCode CodeOfHttp(int status) {
  switch (status) {
    case 400:  // Bad request.
    case 404:  // No such namespace, or not an API server.
    case 413:  // Too large.
    case 415:
    case 422:  // Rejected by the API's rules.
      return absl::StatusCode::kInvalidArgument;
    case 401:
      return absl::StatusCode::kUnauthenticated;
    case 403:
      return absl::StatusCode::kPermissionDenied;
    default:
      return absl::StatusCode::kUnavailable;
  }
}

bool IsSuccess(const HttpResponse& response) {
  return response.status >= 200 && response.status < 300;
}

// The API server is overloaded, stopping, or without its etcd; or it rejects the token. This is no
// contact with the registry: a server that cannot use it must notice that.
bool IsRefused(const HttpResponse& response) {
  return response.status == 401 || response.status == 403 || response.status == 429 ||
         response.status >= 500;
}

bool IsNoObject(const HttpResponse& response) {
  return response.status == 404 && ParseFailure(response.body).reason == "NotFound";
}

KubernetesObject ObjectOf(KubernetesKind kind, std::string_view key) {
  KubernetesObject object{.kind = kind};
  object.entry.key = std::string(key);
  return object;
}

}  // namespace

absl::StatusOr<std::shared_ptr<KubernetesClient>> KubernetesClient::Create(
    KubernetesOptions options) {
  if (options.api_url.empty()) EMA_RETURN_IF_ERROR(FillFromPod(options));
  options.api_url = std::string(absl::StripSuffix(options.api_url, "/"));
  const bool is_https = options.api_url.starts_with("https://");
  if (!is_https && !options.api_url.starts_with("http://")) {
    return absl::InvalidArgumentError(
        absl::StrCat("API server ", Quoted(options.api_url), ": expected https://HOST:PORT"));
  }
  if (!is_https && !options.ca_file.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("API server ", Quoted(options.api_url), ": a CA needs https://"));
  }
  constexpr const char* kNameBytes = "abcdefghijklmnopqrstuvwxyz0123456789-";
  if (options.name_space.empty() ||
      options.name_space.find_first_not_of(kNameBytes) != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("namespace ", Quoted(options.name_space),
                                                   ": expected lower-case letters, digits and -"));
  }
  EMA_RETURN_IF_ERROR(CheckReadable(options.token_file));
  EMA_RETURN_IF_ERROR(CheckReadable(options.ca_file));
  if (!is_https && !options.token_file.empty()) {
    LogTo(options.log, LogLevel::kWarning, "token is sent without TLS",
          {{"api", options.api_url}, {"token_file", options.token_file}});
  }
  EMA_ASSIGN_OR_RETURN(const LibCurl* const curl, LibCurl::Load());
  return std::shared_ptr<KubernetesClient>(new KubernetesClient(curl, std::move(options)));
}

KubernetesClient::KubernetesClient(const LibCurl* curl, KubernetesOptions options)
    : options_(std::move(options)),
      http_(curl, {.url = options_.api_url,
                   .token_file = options_.token_file,
                   .ca_file = options_.ca_file}) {}

std::string KubernetesClient::PathOfAll(KubernetesKind kind) const {
  const KubernetesPath path = PathOf(kind);
  return absl::StrCat(std::string(path.api), "/namespaces/", options_.name_space, "/",
                      std::string(path.resource));
}

std::string KubernetesClient::PathOfOne(const KubernetesObject& object) const {
  return absl::StrCat(PathOfAll(object.kind), "/", ObjectName(object.entry.key));
}

absl::StatusOr<KubernetesClient::Answer> KubernetesClient::Call(const std::string& operation,
                                                                const HttpRequest& request,
                                                                SteadyTime deadline) {
  Answer answer;
  const SteadyTime start = SteadyNow();
  absl::StatusOr<HttpResponse> response = http_.Send(request, After(start, Until(deadline) / 2));
  if (!response.ok() && Until(deadline) > absl::ZeroDuration()) {
    answer.is_repeated = true;
    response = http_.Send(request, deadline);
  }
  absl::Status error;
  if (!response.ok()) {
    error = absl::UnavailableError(absl::StrCat("Kubernetes cannot ", operation, ": ",
                                                std::string(response.status().message())));
  } else if (IsRefused(*response)) {
    error = ToStatus(operation, *response);
  } else if (!IsFromApiServer(response->body)) {
    error = UnexpectedAnswerError(operation);
  } else {
    NoteContact();
  }
  absl::MutexLock lock(&mu_);
  error_ = error;
  EMA_RETURN_IF_ERROR(error);
  latency_ = Since(start);
  answer.response = *std::move(response);
  return answer;
}

absl::Status KubernetesClient::ToStatus(const std::string& operation,
                                        const HttpResponse& response) const {
  const KubernetesFailure failure = ParseFailure(response.body);
  return {CodeOfHttp(response.status),
          absl::StrCat("Kubernetes cannot ", operation, ": ", options_.api_url, ", namespace ",
                       Quoted(options_.name_space), ": HTTP status ", response.status, " ",
                       failure.reason, ": ",
                       failure.reason.empty() ? Quoted(response.body) : failure.message)};
}

absl::Status KubernetesClient::UnexpectedAnswerError(const std::string& operation) const {
  return absl::InvalidArgumentError(
      absl::StrCat("Kubernetes cannot ", operation, ": ", options_.api_url,
                   " does not answer as an API server does; is it the right address?"));
}

absl::StatusOr<std::optional<KubernetesObject>> KubernetesClient::Get(KubernetesKind kind,
                                                                      std::string_view key,
                                                                      SteadyTime deadline) {
  const std::string operation = absl::StrCat("read ", Quoted(key));
  EMA_ASSIGN_OR_RETURN(const Answer answer,
                       Call(operation, {.path = PathOfOne(ObjectOf(kind, key))}, deadline));
  if (IsNoObject(answer.response)) return std::nullopt;
  if (!IsSuccess(answer.response)) return ToStatus(operation, answer.response);
  std::optional<KubernetesObject> object = ParseObject(kind, answer.response.body);
  if (object.has_value() && object->entry.key == key) return object;
  return absl::InvalidArgumentError(
      absl::StrCat("Kubernetes cannot ", operation, ": the object ", ObjectName(key),
                   " in namespace ", Quoted(options_.name_space), " is not one of this program"));
}

absl::StatusOr<KubernetesList> KubernetesClient::List(KubernetesKind kind,
                                                      std::string_view prefix) {
  const std::string operation = absl::StrCat("read the keys with the prefix ", Quoted(prefix));
  const std::string path = absl::StrCat(PathOfAll(kind), "?labelSelector=", SelectorOf(prefix));
  EMA_ASSIGN_OR_RETURN(const Answer answer, Call(operation, {.path = path}, CallDeadline()));
  if (!IsSuccess(answer.response)) return ToStatus(operation, answer.response);
  std::optional<KubernetesList> list = ParseList(kind, answer.response.body);
  if (!list.has_value()) return UnexpectedAnswerError(operation);
  std::erase_if(list->objects, [prefix](const KubernetesObject& object) {
    return !object.entry.key.starts_with(prefix);
  });
  return *std::move(list);
}

absl::StatusOr<KubernetesClient::Change> KubernetesClient::Put(const KubernetesObject& object,
                                                               SteadyTime deadline) {
  const std::string operation = absl::StrCat("put ", Quoted(object.entry.key));
  const bool is_new = object.entry.revision == 0;
  const HttpRequest request = {
      .method = is_new ? "POST" : "PUT",
      .path = is_new ? PathOfAll(object.kind) : PathOfOne(object),
      .body = FormatObject(object),
      // A renewal may be repeated: a lease names its holder.
      .needs_new_connection = is_new || object.kind != KubernetesKind::kLease};
  EMA_ASSIGN_OR_RETURN(Answer answer, Call(operation, request, deadline));
  return Finish(operation, object, std::move(answer), deadline);
}

absl::StatusOr<KubernetesClient::Change> KubernetesClient::Delete(const KubernetesObject& object,
                                                                  SteadyTime deadline) {
  const std::string operation = absl::StrCat("delete ", Quoted(object.entry.key));
  const HttpRequest request = {.method = "DELETE",
                               .path = PathOfOne(object),
                               .body = FormatDeleteOptions(object.entry.revision),
                               .needs_new_connection = true};
  EMA_ASSIGN_OR_RETURN(Answer answer, Call(operation, request, deadline));
  if (IsSuccess(answer.response)) return Change{.is_made = true};
  return Finish(operation, object, std::move(answer), deadline);
}

absl::StatusOr<KubernetesClient::Change> KubernetesClient::Finish(const std::string& operation,
                                                                  const KubernetesObject& object,
                                                                  Answer answer,
                                                                  SteadyTime deadline) {
  const HttpResponse& response = answer.response;
  if (IsSuccess(response)) {
    Change change{.is_made = true, .object = ParseObject(object.kind, response.body)};
    if (change.object.has_value()) return change;
    return UnexpectedAnswerError(operation);
  }
  const bool is_update = object.entry.revision != 0;
  if (response.status != 409 && !(is_update && IsNoObject(response))) {
    return ToStatus(operation, response);
  }
  Change change{.may_be_ours = answer.is_repeated};
  EMA_ASSIGN_OR_RETURN(change.object, Get(object.kind, object.entry.key, deadline));
  const int64_t found = change.object.has_value() ? change.object->entry.revision : 0;
  // AlreadyExists: the object existed, and was deleted before it was read. Any other 409 with the
  // expected revision is temporary, such as that of a quota which was updated meanwhile.
  const bool has_existed = ParseFailure(response.body).reason == "AlreadyExists";
  if (found == object.entry.revision && !has_existed) {
    return absl::UnavailableError(ToStatus(operation, response).message());
  }
  return change;
}

absl::Status KubernetesClient::OpenWatch(KubernetesKind kind, std::string_view prefix,
                                         const KubernetesList& list, HttpStreams& streams) {
  return streams.Open(absl::StrCat(PathOfAll(kind), "?watch=1&labelSelector=", SelectorOf(prefix),
                                   "&allowWatchBookmarks=true&resourceVersion=",
                                   list.resource_version, "&timeoutSeconds=", kWatchSeconds),
                      absl::Seconds(kWatchSeconds) + kWatchSlack);
}

RegistryHealth KubernetesClient::health() const {
  absl::MutexLock lock(&mu_);
  return {.endpoints = {options_.api_url}, .latency = latency_, .error = error_};
}

}  // namespace ema
