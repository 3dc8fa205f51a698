// SPDX-License-Identifier: Apache-2.0
#include "server/registry/kubernetes_objects.h"

#include <openssl/sha.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace ema {
namespace {

using nlohmann::json;

constexpr const char* kKeyAnnotation = "ema.dev/key";
constexpr const char* kValueAnnotation = "ema.dev/value";  // Of a lease. A ConfigMap has data.
constexpr const char* kValue = "value";
constexpr const char* kManagerLabel = "app.kubernetes.io/managed-by";
constexpr const char* kManager = "ema-server";
constexpr const char* kScopeLabel = "ema.dev/scope";
// The scope of a key is its first parts, which is "/ema/GROUP" of a group's keys.
constexpr int kScopeParts = 2;
constexpr size_t kMaxReadableBytes = 80;

// 80 bits, enough for a namespace.
std::string HashOf(std::string_view text) {
  constexpr size_t kBytes = 10;
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest;
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  return absl::BytesToHexString({reinterpret_cast<const char*>(digest.data()), kBytes});
}

// The scope of all keys with the prefix. Nullopt: they may have several.
std::optional<std::string_view> ScopeOf(std::string_view prefix) {
  size_t end = 0;
  for (int part = 0; part < kScopeParts; ++part) {
    end = prefix.find('/', end + 1);
    if (end == std::string_view::npos) return std::nullopt;
  }
  return prefix.substr(0, end);
}

const json* Find(const json& parent, std::initializer_list<const char*> path) {
  const json* value = &parent;
  for (const char* const name : path) {
    if (!value->is_object()) return nullptr;
    const auto found = value->find(name);
    if (found == value->end()) return nullptr;
    value = &*found;
  }
  return value;
}

std::string TextAt(const json& parent, std::initializer_list<const char*> path) {
  const json* const value = Find(parent, path);
  return value != nullptr && value->is_string() ? value->get<std::string>() : "";
}

json Parse(std::string_view text) { return json::parse(text, nullptr, /*allow_exceptions=*/false); }

std::string Format(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string NowText() {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", absl::Now(), absl::UTCTimeZone());
}

std::optional<KubernetesObject> ToObject(KubernetesKind kind, const json& value) {
  KubernetesObject object{.kind = kind};
  object.entry.key = TextAt(value, {"metadata", "annotations", kKeyAnnotation});
  if (object.entry.key.empty() ||
      !absl::SimpleAtoi(TextAt(value, {"metadata", "resourceVersion"}), &object.entry.revision)) {
    return std::nullopt;
  }
  if (kind == KubernetesKind::kConfigMap) {
    object.entry.value = TextAt(value, {"data", kValue});
    return object;
  }
  object.entry.value = TextAt(value, {"metadata", "annotations", kValueAnnotation});
  object.holder = TextAt(value, {"spec", "holderIdentity"});
  const json* const seconds = Find(value, {"spec", "leaseDurationSeconds"});
  if (seconds == nullptr || !seconds->is_number_integer()) return std::nullopt;
  object.ttl = absl::Seconds(seconds->get<int64_t>());
  return object;
}

}  // namespace

KubernetesPath PathOf(KubernetesKind kind) {
  return kind == KubernetesKind::kLease ? KubernetesPath{"/apis/coordination.k8s.io/v1", "leases"}
                                        : KubernetesPath{"/api/v1", "configmaps"};
}

std::string ObjectName(std::string_view key) {
  std::string readable;
  for (const char c : key.substr(0, kMaxReadableBytes)) {
    if (absl::ascii_isalnum(c)) {
      readable += absl::ascii_tolower(c);
    } else if (!readable.empty() && readable.back() != '-') {
      readable += '-';
    }
  }
  if (!readable.empty() && readable.back() != '-') readable += '-';
  return absl::StrCat(readable, HashOf(key));
}

std::string SelectorOf(std::string_view prefix) {
  std::string selector = "app.kubernetes.io%2Fmanaged-by%3Dema-server";
  if (const auto scope = ScopeOf(prefix); scope.has_value()) {
    absl::StrAppend(&selector, "%2Cema.dev%2Fscope%3D", HashOf(*scope));
  }
  return selector;
}

std::string FormatObject(const KubernetesObject& object) {
  const bool is_lease = object.kind == KubernetesKind::kLease;
  const std::string& key = object.entry.key;
  json value = {{"apiVersion", is_lease ? "coordination.k8s.io/v1" : "v1"},
                {"kind", is_lease ? "Lease" : "ConfigMap"},
                {"metadata",
                 {{"name", ObjectName(key)},
                  {"labels", {{kManagerLabel, kManager}}},
                  {"annotations", {{kKeyAnnotation, key}}}}}};
  json& metadata = value["metadata"];
  if (const auto scope = ScopeOf(key); scope.has_value()) {
    metadata["labels"][kScopeLabel] = HashOf(*scope);
  }
  if (object.entry.revision != 0) {
    metadata["resourceVersion"] = absl::StrCat(object.entry.revision);
  }
  if (is_lease) {
    metadata["annotations"][kValueAnnotation] = object.entry.value;
    // Nothing compares the time, as clocks differ. It is for people.
    value["spec"] = {{"holderIdentity", object.holder},
                     {"leaseDurationSeconds", absl::ToInt64Seconds(object.ttl)},
                     {"renewTime", NowText()}};
  } else {
    value["data"] = {{kValue, object.entry.value}};
  }
  return Format(value);
}

std::string FormatDeleteOptions(int64_t revision) {
  return Format({{"apiVersion", "v1"},
                 {"kind", "DeleteOptions"},
                 {"preconditions", {{"resourceVersion", absl::StrCat(revision)}}}});
}

std::optional<KubernetesObject> ParseObject(KubernetesKind kind, std::string_view text) {
  return ToObject(kind, Parse(text));
}

std::optional<KubernetesList> ParseList(KubernetesKind kind, std::string_view text) {
  const json parsed = Parse(text);
  KubernetesList list{.resource_version = TextAt(parsed, {"metadata", "resourceVersion"})};
  const json* const items = Find(parsed, {"items"});
  if (list.resource_version.empty() || items == nullptr) return std::nullopt;
  for (const json& item : *items) {
    if (auto object = ToObject(kind, item)) list.objects.push_back(*std::move(object));
  }
  return list;
}

absl::StatusOr<KubernetesEvent> ParseEvent(KubernetesKind kind, std::string_view line) {
  using Type = KubernetesEvent::Type;
  const json event = Parse(line);
  const std::string type = TextAt(event, {"type"});
  const json* const object = Find(event, {"object"});
  if (object == nullptr || type == "ERROR") {
    // 410: the changes since the list have been compacted.
    return absl::UnavailableError(absl::StrCat(
        "watch ended: ", object == nullptr ? std::string(line.substr(0, 200)) : Format(*object)));
  }
  KubernetesEvent result{.object = ToObject(kind, *object)};
  if (type == "ADDED" || type == "MODIFIED") result.type = Type::kPut;
  if (type == "DELETED") result.type = Type::kDeleted;
  return result;
}

bool IsFromApiServer(std::string_view text) { return !TextAt(Parse(text), {"kind"}).empty(); }

KubernetesFailure ParseFailure(std::string_view text) {
  const json parsed = Parse(text);
  if (TextAt(parsed, {"kind"}) != "Status") return {};
  return {.reason = TextAt(parsed, {"reason"}), .message = TextAt(parsed, {"message"})};
}

}  // namespace ema
