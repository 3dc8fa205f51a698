// SPDX-License-Identifier: Apache-2.0
#include "tests/testutil/memory_registry.h"

#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

namespace ema {

class MemoryRegistry::Store {
 public:
  absl::Status Check() const ABSL_SHARED_LOCKS_REQUIRED(mu) {
    return is_unavailable ? absl::UnavailableError("the registry in memory is unavailable")
                          : absl::OkStatus();
  }
  RegistryEntry Find(const std::string& key) const ABSL_SHARED_LOCKS_REQUIRED(mu) {
    const auto found = entries.find(key);
    return found != entries.end() ? found->second : RegistryEntry{.key = key};
  }
  std::vector<RegistryEntry> FindAll(const std::string& prefix) const
      ABSL_SHARED_LOCKS_REQUIRED(mu) {
    std::vector<RegistryEntry> found;
    for (auto entry = entries.lower_bound(prefix);
         entry != entries.end() && entry->first.starts_with(prefix); ++entry) {
      found.push_back(entry->second);
    }
    return found;
  }
  // Without a value: deletes the key. Returns the revision of the change.
  absl::StatusOr<int64_t> CompareAndSet(const std::string& key, int64_t expected,
                                        std::optional<std::string> value)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (const int64_t found = Find(key).revision; found != expected) {
      return absl::AbortedError(absl::StrCat("key \"", key, "\" has revision ", found,
                                             ", expected ", expected, " (0: no such key)"));
    }
    if (!value.has_value() && expected == 0) return revision;
    ++revision;
    RegistryEntry entry{.key = key};
    if (value.has_value()) {
      entry.value = *std::move(value);
      entry.revision = revision;
      entries[key] = entry;
    } else {
      entries.erase(key);
    }
    changes.push_back(std::move(entry));
    wait.WakeAll();
    return revision;
  }

  mutable absl::Mutex mu;
  SteadyWait wait;  // For watchers.
  std::map<std::string, RegistryEntry> entries ABSL_GUARDED_BY(mu);
  std::vector<RegistryEntry> changes ABSL_GUARDED_BY(mu);  // All that were ever made.
  int64_t revision ABSL_GUARDED_BY(mu) = 0;
  bool is_unavailable ABSL_GUARDED_BY(mu) = false;
  bool loses_next_reply ABSL_GUARDED_BY(mu) = false;
  int64_t outage_count ABSL_GUARDED_BY(mu) = 0;
  SteadyTime last_contact ABSL_GUARDED_BY(mu) = SteadyNow();
};

class MemoryRegistry::Member final : public Membership {
 public:
  Member(std::shared_ptr<Store> store, std::string key, int64_t revision)
      : store_(std::move(store)), key_(std::move(key)), revision_(revision) {}
  ~Member() override {
    absl::MutexLock lock(&store_->mu);
    store_->CompareAndSet(key_, revision_, std::nullopt).status().IgnoreError();
  }

  absl::Status status() const override {
    absl::MutexLock lock(&store_->mu);
    return store_->Check();
  }
  absl::Status Leave() override {
    absl::MutexLock lock(&store_->mu);
    if (absl::Status status = store_->Check(); !status.ok()) return status;
    return store_->CompareAndSet(key_, revision_, std::nullopt).status();
  }

 private:
  const std::shared_ptr<Store> store_;
  const std::string key_;
  const int64_t revision_;
};

class MemoryRegistry::Watcher final : public RegistryWatch {
 public:
  Watcher(std::shared_ptr<Store> store, std::string prefix,
          std::function<void(const RegistryUpdate&)> on_update)
      : store_(std::move(store)),
        prefix_(std::move(prefix)),
        on_update_(std::move(on_update)),
        thread_(&Watcher::Run, this) {}
  ~Watcher() override {
    {
      absl::MutexLock lock(&store_->mu);
      is_stopped_ = true;
      store_->wait.WakeAll();
    }
    thread_.join();
  }

 private:
  void Run() {
    int64_t outages = -1;  // That all keys have been reported after. -1: never reported.
    size_t next = 0;       // The first change that has not been reported.
    while (true) {
      RegistryUpdate update;
      {
        absl::MutexLock lock(&store_->mu);
        const auto has_news = [&]() ABSL_SHARED_LOCKS_REQUIRED(store_->mu) {
          return is_stopped_ || (!store_->is_unavailable && (outages != store_->outage_count ||
                                                             next < store_->changes.size()));
        };
        store_->wait.AwaitUntil(store_->mu, SteadyTime::max(), has_news);
        if (is_stopped_) return;
        update.is_complete = outages != store_->outage_count;
        outages = store_->outage_count;
        if (update.is_complete) {
          update.entries = store_->FindAll(prefix_);
          next = store_->changes.size();
        }
        for (; next < store_->changes.size(); ++next) {
          const RegistryEntry& change = store_->changes[next];
          if (change.key.starts_with(prefix_)) update.entries.push_back(change);
        }
      }
      if (update.is_complete || !update.entries.empty()) on_update_(update);
    }
  }

  const std::shared_ptr<Store> store_;
  const std::string prefix_;
  const std::function<void(const RegistryUpdate&)> on_update_;
  bool is_stopped_ = false;  // Guarded by store_->mu.
  std::thread thread_;
};

MemoryRegistry::MemoryRegistry() : store_(std::make_shared<Store>()) {}

void MemoryRegistry::SetUnavailable(bool is_unavailable) {
  absl::MutexLock lock(&store_->mu);
  store_->last_contact = SteadyNow();
  store_->is_unavailable = is_unavailable;
  if (is_unavailable) ++store_->outage_count;
  store_->wait.WakeAll();
}

void MemoryRegistry::LoseNextReply() {
  absl::MutexLock lock(&store_->mu);
  store_->loses_next_reply = true;
}

absl::StatusOr<RegistryEntry> MemoryRegistry::Read(std::string_view key) {
  absl::MutexLock lock(&store_->mu);
  if (absl::Status status = store_->Check(); !status.ok()) return status;
  return store_->Find(std::string(key));
}

absl::StatusOr<std::vector<RegistryEntry>> MemoryRegistry::ReadPrefix(std::string_view prefix) {
  absl::MutexLock lock(&store_->mu);
  if (absl::Status status = store_->Check(); !status.ok()) return status;
  return store_->FindAll(std::string(prefix));
}

absl::StatusOr<int64_t> MemoryRegistry::CompareAndPut(std::string_view key, int64_t revision,
                                                      std::string_view value) {
  absl::MutexLock lock(&store_->mu);
  if (absl::Status status = store_->Check(); !status.ok()) return status;
  absl::StatusOr<int64_t> changed =
      store_->CompareAndSet(std::string(key), revision, std::string(value));
  if (changed.ok() && std::exchange(store_->loses_next_reply, false)) {
    return absl::UnavailableError("the reply is lost");
  }
  return changed;
}

absl::Status MemoryRegistry::CompareAndDelete(std::string_view key, int64_t revision) {
  absl::MutexLock lock(&store_->mu);
  if (absl::Status status = store_->Check(); !status.ok()) return status;
  return store_->CompareAndSet(std::string(key), revision, std::nullopt).status();
}

absl::StatusOr<std::unique_ptr<Membership>> MemoryRegistry::Join(std::string_view key,
                                                                 std::string_view value,
                                                                 absl::Duration /*ttl*/) {
  absl::MutexLock lock(&store_->mu);
  if (absl::Status status = store_->Check(); !status.ok()) return status;
  const absl::StatusOr<int64_t> revision =
      store_->CompareAndSet(std::string(key), 0, std::string(value));
  if (!revision.ok()) return absl::AlreadyExistsError(revision.status().message());
  return std::make_unique<Member>(store_, std::string(key), *revision);
}

std::unique_ptr<RegistryWatch> MemoryRegistry::Watch(
    std::string_view prefix, std::function<void(const RegistryUpdate&)> on_update) {
  return std::make_unique<Watcher>(store_, std::string(prefix), std::move(on_update));
}

SteadyTime MemoryRegistry::last_contact() const {
  absl::MutexLock lock(&store_->mu);
  return store_->is_unavailable ? store_->last_contact : SteadyNow();
}

RegistryHealth MemoryRegistry::health() const {
  absl::MutexLock lock(&store_->mu);
  return {.endpoints = {"memory"}, .latency = absl::ZeroDuration(), .error = store_->Check()};
}

}  // namespace ema
