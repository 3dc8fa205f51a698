// SPDX-License-Identifier: Apache-2.0
//
// This process as a member of its group, and what the group's registry says.
#ifndef EMA_SERVER_GROUP_MEMBER_H_
#define EMA_SERVER_GROUP_MEMBER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/log_event.h"
#include "server/base/steady_wait.h"
#include "server/group/model_record.h"
#include "server/registry/registry.h"

namespace ema::group {

// Keeps the key /ema/GROUP/members/NAME under a lease, follows all members and models of the group
// in a cache, and reads and writes the models' records. Thread-safe.
//
// Read(), Write(), Erase() and Leave() call the registry and block, each for at most the
// registry's limit. Their errors include those of Registry: UNAVAILABLE: no answer, and a change
// may have been made or not. All other methods use the cache. It lags behind the registry, but a
// record in it is not older than what this object has last read or written.
class Member {
 public:
  struct Options {
    std::string group;
    std::string name;
    MemberRecord record;
    Registry* registry = nullptr;  // Must outlive the member.
    // How long the key of a process that has crashed remains.
    absl::Duration ttl = absl::Seconds(10);
    LogSink log;
  };

  // Returns when the key has been put and the cache has all records. If the name is in use, the
  // key may belong to a previous process of this member, so Join() waits slightly longer than the
  // TTL for it to expire. ALREADY_EXISTS: it does not expire, so another process renews it.
  // UNAVAILABLE: the registry does not answer.
  static absl::StatusOr<std::unique_ptr<Member>> Join(Options options);
  // Stops the renewal of the key, which then expires, unless Leave() has deleted it. Waits for
  // running callbacks.
  ~Member();

  const std::string& group() const { return options_.group; }
  const std::string& name() const { return options_.name; }
  const std::string& boot() const { return options_.record.boot; }

  // Calls `on_change` on a thread of the registry's watch after each change of the cache. It must
  // not destroy this object. Changes before this call are not reported, so read the cache after it.
  // To be called at most once.
  void SetOnChange(std::function<void()> on_change) ABSL_LOCKS_EXCLUDED(mu_);

  // The cache, by name. It does not contain damaged records, of which the log has an error.
  std::map<std::string, MemberRecord> members() const ABSL_LOCKS_EXCLUDED(mu_);
  std::map<std::string, ModelRecord> models() const ABSL_LOCKS_EXCLUDED(mu_);
  // Nullopt: there is no such model in the cache.
  std::optional<ModelRecord> model(std::string_view name) const ABSL_LOCKS_EXCLUDED(mu_);
  // HOST:PORT of a process. Nullopt: the member is not in the cache, or with another boot.
  std::optional<std::string> AddressOf(std::string_view member, std::string_view boot) const
      ABSL_LOCKS_EXCLUDED(mu_);

  struct StoredModel {
    ModelRecord record;
    int64_t revision = 0;
  };
  // Reads the record from the registry itself. Nullopt: there is none. Errors also as
  // ParseModelRecord().
  absl::StatusOr<std::optional<StoredModel>> Read(std::string_view model) ABSL_LOCKS_EXCLUDED(mu_);
  // Replaces the record that has `revision` (0: there is none yet), and returns the new one's
  // revision. ABORTED: it was changed meanwhile, so read it again. Errors also as
  // FormatModelRecord().
  absl::StatusOr<int64_t> Write(std::string_view model, const ModelRecord& record, int64_t revision)
      ABSL_LOCKS_EXCLUDED(mu_);
  // ABORTED: the record was changed since it had `revision`.
  absl::Status Erase(std::string_view model, int64_t revision);

  // When the registry last read or wrote a key for this process.
  SteadyTime last_contact() const { return options_.registry->last_contact(); }
  RegistryHealth registry_health() const { return options_.registry->health(); }
  // As Membership::status(), of the member's key.
  absl::Status key_status() const { return membership_->status(); }

  // Deletes the key, so that the others need not wait for it to expire. To be called once, by the
  // owner. UNAVAILABLE: the key expires later.
  absl::Status Leave() { return membership_->Leave(); }

 private:
  struct Cache {
    std::map<std::string, MemberRecord, std::less<>> members;
    std::map<std::string, StoredModel, std::less<>> models;
  };

  explicit Member(Options options);

  std::string MemberKey() const;
  std::string ModelKey(std::string_view model) const;
  // Parts of Join().
  absl::Status AwaitFreeName();
  absl::Status AwaitOwnRecord();
  // False: the cache has not been filled, or `predicate` was false, for all of `timeout`.
  bool AwaitCache(absl::Duration timeout, absl::FunctionRef<bool(const Cache&)> predicate)
      ABSL_LOCKS_EXCLUDED(mu_);

  // On the watch's thread.
  void OnUpdate(const RegistryUpdate& update) ABSL_LOCKS_EXCLUDED(mu_);
  void Apply(const RegistryEntry& entry, Cache& cache);
  // Replaces the record of a model in the cache if `stored` is newer: the watch reports it later.
  void Remember(std::string_view model, const StoredModel& stored) ABSL_LOCKS_EXCLUDED(mu_);
  // Puts the records that have been remembered meanwhile into `cache`, which replaces cache_.
  void KeepNewerLocked(Cache& cache) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void ReportDamage(const RegistryEntry& entry, const absl::Status& error);

  const Options options_;
  const std::string prefix_;  // Of all keys of the group.

  // Only on the watch's thread: revisions of damaged records that have been logged, by key.
  std::map<std::string, int64_t> reported_damage_;

  mutable absl::Mutex mu_;
  SteadyWait cache_changed_;
  bool is_filled_ ABSL_GUARDED_BY(mu_) = false;
  Cache cache_ ABSL_GUARDED_BY(mu_);
  std::function<void()> on_change_ ABSL_GUARDED_BY(mu_);

  // Constant after Join().
  std::unique_ptr<Membership> membership_;
  std::unique_ptr<RegistryWatch> watch_;  // Destroyed first: its callback uses the rest.
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_MEMBER_H_
