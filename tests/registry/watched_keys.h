// SPDX-License-Identifier: Apache-2.0
//
// What a watch of a registry has reported.
#ifndef EMA_TESTS_REGISTRY_WATCHED_KEYS_H_
#define EMA_TESTS_REGISTRY_WATCHED_KEYS_H_

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/registry/registry.h"

namespace ema {

// Must outlive the watch. Thread-safe.
class WatchedKeys {
 public:
  using Values = std::map<std::string, std::string>;

  std::function<void(const RegistryUpdate&)> callback() {
    return [this](const RegistryUpdate& update) {
      absl::MutexLock lock(&mu_);
      if (update.is_complete) {
        ++complete_count_;
        values_.clear();
      }
      for (const RegistryEntry& entry : update.entries) {
        if (entry.revision == 0) {
          values_.erase(entry.key);
        } else {
          values_[entry.key] = entry.value;
        }
        if (!update.is_complete) {
          changes_.push_back(entry.revision == 0 ? absl::StrCat(entry.key, " deleted")
                                                 : absl::StrCat(entry.key, "=", entry.value));
        }
      }
    };
  }

  // Returns the values when they are `expected`, or the last ones after the timeout.
  Values Await(const Values& expected, absl::Duration timeout = absl::Seconds(20)) {
    absl::MutexLock lock(&mu_);
    const auto is_expected = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      return complete_count_ > 0 && values_ == expected;
    };
    mu_.AwaitWithTimeout(absl::Condition(&is_expected), timeout);
    return values_;
  }
  // Updates that had all keys.
  int AwaitCompleteCount(int expected) {
    absl::MutexLock lock(&mu_);
    const auto is_reached = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      return complete_count_ >= expected;
    };
    mu_.AwaitWithTimeout(absl::Condition(&is_reached), absl::Seconds(20));
    return complete_count_;
  }
  // Changes since the watch began, without those that were part of all keys.
  std::vector<std::string> changes() const {
    absl::MutexLock lock(&mu_);
    return changes_;
  }

 private:
  mutable absl::Mutex mu_;
  Values values_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> changes_ ABSL_GUARDED_BY(mu_);
  int complete_count_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace ema

#endif  // EMA_TESTS_REGISTRY_WATCHED_KEYS_H_
