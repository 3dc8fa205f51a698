// SPDX-License-Identifier: Apache-2.0
//
// Makes what a server needs in a group from its options. REQUIRES: they name a group.
#ifndef EMA_SERVER_GROUP_PARTS_H_
#define EMA_SERVER_GROUP_PARTS_H_

#include <memory>

#include "absl/status/statusor.h"
#include "server/base/log_event.h"
#include "server/group/peers.h"
#include "server/ops/options.h"
#include "server/registry/registry.h"

namespace ema {

// The registry in etcd. Does not contact it. INVALID_ARGUMENT: an endpoint or a file; the message
// begins with the option.
absl::StatusOr<std::unique_ptr<Registry>> OpenRegistry(const ServerOptions& options, LogSink log);

// The servers of a group present their own certificates to each other, so a CA of clients is also
// the CA of the servers.
group::Peers::Options PeersOptions(const ServerOptions& options);

}  // namespace ema

#endif  // EMA_SERVER_GROUP_PARTS_H_
