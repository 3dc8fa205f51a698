// SPDX-License-Identifier: Apache-2.0
//
// What the servers of a group agree on: which of them run, and what the record of each model says.
#ifndef EMA_SERVER_REGISTRY_REGISTRY_H_
#define EMA_SERVER_REGISTRY_REGISTRY_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/steady_wait.h"

namespace ema {

struct RegistryEntry {
  std::string key;  // Text such as "/ema/GROUP/models/gpt".
  std::string value;
  // The registry numbers its changes from 1. This is the number of the key's last change. 0: there
  // is no such key, or it has been deleted.
  int64_t revision = 0;

  friend bool operator==(const RegistryEntry&, const RegistryEntry&) = default;
};

// How well a registry answers.
struct RegistryHealth {
  std::vector<std::string> endpoints;  // URLs, in the order of the configuration.
  absl::Duration latency;              // The last answered call's; zero: none was answered yet.
  // Why the last call got no answer, or was rejected because of the user or the token. OK: neither.
  absl::Status error;
};

// A report of a watch.
struct RegistryUpdate {
  // True: `entries` are all keys with the prefix, sorted; any other key is gone. False: they are
  // changes, in their order.
  bool is_complete = false;
  std::vector<RegistryEntry> entries;
};

// One member of the group. Its key exists while this object lives and reaches the registry. If the
// registry did not hear of it for the TTL, the key is deleted; it is put again once the registry
// answers. So a missing key says only that a member may be gone. Thread-safe.
//
// The destructor ends the renewal, and the key expires after the TTL, as after a crash. It waits
// for a running call.
class Membership {
 public:
  virtual ~Membership() = default;

  // OK: the last renewal was answered. ALREADY_EXISTS: the key expired, and now another member has
  // it. UNAVAILABLE: the registry did not answer; retried.
  virtual absl::Status status() const = 0;

  // Ends the renewal and deletes the key now. UNAVAILABLE: the key expires later. To be called
  // once, by the owner.
  virtual absl::Status Leave() = 0;
};

// Reports changes until it is destroyed. The destructor waits for a running callback, which must
// therefore not destroy the watch.
class RegistryWatch {
 public:
  virtual ~RegistryWatch() = default;
};

// A map of keys to values that all servers of a group share: a read returns every change that was
// completed before it began. Thread-safe.
//
// Every call blocks, but never for longer than the implementation's limit. Errors of all calls:
// UNAVAILABLE: the registry did not answer in time, a change may have been made or not, and the
// same call may succeed later; codes of the registry, such as PERMISSION_DENIED or
// UNAUTHENTICATED, which need another configuration. Messages name the key and the server.
class Registry {
 public:
  virtual ~Registry() = default;

  // Revision 0 if there is no such key.
  virtual absl::StatusOr<RegistryEntry> Read(std::string_view key) = 0;
  // Sorted by key. REQUIRES: `prefix` is not empty.
  virtual absl::StatusOr<std::vector<RegistryEntry>> ReadPrefix(std::string_view prefix) = 0;

  // Puts a value if the key's revision is `revision`; 0: if there is no such key. Returns the
  // key's new revision. ABORTED: it has another revision, so read it again. An implementation may
  // repeat a request whose answer was lost. If it then finds an equal value, it reports success,
  // although another server may have written it. So callers put the writer's name into the value.
  virtual absl::StatusOr<int64_t> CompareAndPut(std::string_view key, int64_t revision,
                                                std::string_view value) = 0;
  // Deletes the key if its revision is `revision`. ABORTED: it has another one.
  virtual absl::Status CompareAndDelete(std::string_view key, int64_t revision) = 0;

  // Puts the key of a member, which exists as Membership says. Renewals have a thread. `ttl` is
  // rounded up to seconds; the registry may choose a longer one. ALREADY_EXISTS: another member
  // has the key, or an earlier process, whose key has not expired yet.
  virtual absl::StatusOr<std::unique_ptr<Membership>> Join(std::string_view key,
                                                           std::string_view value,
                                                           absl::Duration ttl) = 0;

  // Calls `on_update` on a thread of the watch, at first with all keys that have the prefix. After
  // an interruption all keys are reported again, since changes may have been missed. The callback
  // may call the registry. REQUIRES: `prefix` is not empty.
  virtual std::unique_ptr<RegistryWatch> Watch(
      std::string_view prefix, std::function<void(const RegistryUpdate&)> on_update) = 0;

  // When the registry last read or wrote a key for this server; each membership causes that three
  // times in its TTL. A call that was rejected because of the user or the token does not count.
  // Before the first call: the time of creation.
  virtual SteadyTime last_contact() const = 0;
  // Memberships call the registry three times in their TTL, so `error` is not older than that.
  virtual RegistryHealth health() const = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_REGISTRY_REGISTRY_H_
