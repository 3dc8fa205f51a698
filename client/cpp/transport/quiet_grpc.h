// SPDX-License-Identifier: Apache-2.0
//
// What gRPC itself has to say, in programs of ours.
#ifndef EMA_CLIENT_CPP_TRANSPORT_QUIET_GRPC_H_
#define EMA_CLIENT_CPP_TRANSPORT_QUIET_GRPC_H_

namespace ema::client_internal {

// From here on gRPC writes nothing to stderr, unless GRPC_VERBOSITY is set, or it ends the process:
// calls return what it would say. For emactl and the Python module, which have a gRPC of their own;
// the library does not call it, for a program that links it may want gRPC's log. Once in a process,
// before gRPC is used.
void QuietGrpc();

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRANSPORT_QUIET_GRPC_H_
