// SPDX-License-Identifier: Apache-2.0
//
// The registry in etcd, 3.4 or newer.
#ifndef EMA_SERVER_REGISTRY_ETCD_REGISTRY_H_
#define EMA_SERVER_REGISTRY_ETCD_REGISTRY_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "server/base/log_event.h"
#include "server/registry/registry.h"

namespace ema {

class EtcdClient;

struct EtcdOptions {
  // Such as "http://a:2379,b,c". A scheme, http or https, counts for all endpoints. The default
  // port is 2379.
  std::string endpoints;
  // Paths of PEM files, for https only. They are read again for each new connection. Without a CA
  // the system's are trusted. Certificate and key are of the client; both or none.
  std::string ca_file;
  std::string certificate_file;
  std::string key_file;
  // Empty: without a user.
  std::string user;
  std::string password;
  // The longest time of a call, over all endpoints.
  absl::Duration call_timeout = absl::Seconds(2);
  LogSink log;  // Lost and regained contact.
};

// Uses one endpoint at a time. An endpoint that refuses the connection, or does not answer within
// half of the call's time, is left for the next one. Each call tries each endpoint at most once. A
// watch moves to the next endpoint when its stream breaks, or when its endpoint also misses a
// renewal of a membership. One slow call does not move it.
class EtcdRegistry final : public Registry {
 public:
  // Does not contact etcd. INVALID_ARGUMENT: an endpoint or a file.
  static absl::StatusOr<std::unique_ptr<EtcdRegistry>> Create(EtcdOptions options);

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
  explicit EtcdRegistry(std::shared_ptr<EtcdClient> client) : client_(std::move(client)) {}

  const std::shared_ptr<EtcdClient> client_;  // Shared with memberships and watches.
};

}  // namespace ema

#endif  // EMA_SERVER_REGISTRY_ETCD_REGISTRY_H_
