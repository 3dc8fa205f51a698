// SPDX-License-Identifier: Apache-2.0
#include "server/group_parts.h"

#include <utility>

#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "server/registry/etcd_registry.h"

namespace ema {

absl::StatusOr<std::unique_ptr<Registry>> OpenRegistry(const ServerOptions& options, LogSink log) {
  absl::StatusOr<std::unique_ptr<EtcdRegistry>> registry =
      EtcdRegistry::Create({.endpoints = absl::StrJoin(options.etcd, ","),
                            .ca_file = options.etcd_ca,
                            .certificate_file = options.etcd_cert,
                            .key_file = options.etcd_key,
                            .log = std::move(log)});
  if (!registry.ok()) return WithPlace(registry.status(), "--etcd: ");
  return *std::move(registry);
}

group::Peers::Options PeersOptions(const ServerOptions& options) {
  return {.ca_file = options.tls_client_ca,
          .certificate_file = options.tls_cert,
          .key_file = options.tls_key,
          .token_file = options.group_token_file};
}

}  // namespace ema
