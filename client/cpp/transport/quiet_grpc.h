// SPDX-License-Identifier: Apache-2.0
//
// Silences gRPC's own log in our programs.
#ifndef EMA_CLIENT_CPP_TRANSPORT_QUIET_GRPC_H_
#define EMA_CLIENT_CPP_TRANSPORT_QUIET_GRPC_H_

namespace ema::client_internal {

// Stops gRPC from writing to stderr, except for failed assertions, and unless GRPC_VERBOSITY is
// set; calls return the same information. For emactl and the Python module, which contain their own
// copy of gRPC. The library does not call it, since a program that links it may want gRPC's log. To
// be called once in a process, before gRPC is used.
void QuietGrpc();

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRANSPORT_QUIET_GRPC_H_
