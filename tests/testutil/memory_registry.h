// SPDX-License-Identifier: Apache-2.0
//
// A registry in memory, for tests of code that uses one.
#ifndef EMA_TESTS_TESTUTIL_MEMORY_REGISTRY_H_
#define EMA_TESTS_TESTUTIL_MEMORY_REGISTRY_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/registry/registry.h"

namespace ema {

// Shared by all servers of a test. Members need no renewals: a key expires when its Membership is
// destroyed. Memberships and watches may outlive this object.
class MemoryRegistry final : public Registry {
 public:
  MemoryRegistry();

  // While it is unavailable, calls and memberships say UNAVAILABLE, and watches report nothing.
  // Afterwards they report all keys again.
  void SetUnavailable(bool is_unavailable);
  // The next CompareAndPut() that changes a value says UNAVAILABLE.
  void LoseNextReply();

  absl::StatusOr<RegistryEntry> Read(std::string_view key) override;
  absl::StatusOr<std::vector<RegistryEntry>> ReadPrefix(std::string_view prefix) override;
  absl::StatusOr<int64_t> CompareAndPut(std::string_view key, int64_t revision,
                                        std::string_view value) override;
  absl::Status CompareAndDelete(std::string_view key, int64_t revision) override;
  absl::StatusOr<std::unique_ptr<Membership>> Join(std::string_view key, std::string_view value,
                                                   absl::Duration ttl) override;
  std::unique_ptr<RegistryWatch> Watch(
      std::string_view prefix, std::function<void(const RegistryUpdate&)> on_update) override;
  SteadyTime last_contact() const override;
  RegistryHealth health() const override;

 private:
  class Store;
  class Member;
  class Watcher;

  const std::shared_ptr<Store> store_;
};

}  // namespace ema

#endif  // EMA_TESTS_TESTUTIL_MEMORY_REGISTRY_H_
