// SPDX-License-Identifier: Apache-2.0
//
// The keys of a registry as objects of the Kubernetes API: a ConfigMap for each key, and a Lease
// for each key of a member.
#ifndef EMA_SERVER_REGISTRY_KUBERNETES_OBJECTS_H_
#define EMA_SERVER_REGISTRY_KUBERNETES_OBJECTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/registry/registry.h"

namespace ema {

enum class KubernetesKind { kConfigMap, kLease };

struct KubernetesObject {
  KubernetesKind kind = KubernetesKind::kConfigMap;
  // The revision is metadata.resourceVersion; 0: not created yet. The API calls it opaque, but in
  // every release it is a number that grows with each change. Renewals change that of a lease.
  RegistryEntry entry;
  // Of a lease. The holder is a Membership; no two have the same name.
  std::string holder;
  absl::Duration ttl;
};

// The path of the objects of a kind, without a namespace: "/api/v1", "configmaps".
struct KubernetesPath {
  std::string_view api;
  std::string_view resource;
};
KubernetesPath PathOf(KubernetesKind kind);

// The name of a key's object: a readable part and a hash, since keys can have characters that names
// must not have.
std::string ObjectName(std::string_view key);

// The label selector, escaped for a URL, of all objects whose keys have `prefix`, and of as few
// others as possible.
std::string SelectorOf(std::string_view prefix);

// The JSON of an object to be put. The key and the value must be UTF-8.
std::string FormatObject(const KubernetesObject& object);
// The JSON of options to delete an object if it has the revision.
std::string FormatDeleteOptions(int64_t revision);

// Nullopt: not an object of a registry, so another program has made it, or has removed the
// annotation with the key.
std::optional<KubernetesObject> ParseObject(KubernetesKind kind, std::string_view text);

struct KubernetesList {
  std::vector<KubernetesObject> objects;
  std::string resource_version;  // Of the whole list, to watch from.
};
// Nullopt: not a list.
std::optional<KubernetesList> ParseList(KubernetesKind kind, std::string_view text);

struct KubernetesEvent {
  enum class Type { kPut, kDeleted, kOther };
  Type type = Type::kOther;
  std::optional<KubernetesObject> object;  // As ParseObject().
};
// UNAVAILABLE: the API server ended the watch with an error, or the line is not an event.
absl::StatusOr<KubernetesEvent> ParseEvent(KubernetesKind kind, std::string_view line);

// False: it is not from an API server, but for example from a proxy in front of one.
bool IsFromApiServer(std::string_view text);

// What the API server says about a failure.
struct KubernetesFailure {
  std::string reason;  // Such as "NotFound". Empty: the text is not a Status of the API.
  std::string message;
};
KubernetesFailure ParseFailure(std::string_view text);

}  // namespace ema

#endif  // EMA_SERVER_REGISTRY_KUBERNETES_OBJECTS_H_
