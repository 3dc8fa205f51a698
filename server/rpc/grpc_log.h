// SPDX-License-Identifier: Apache-2.0
//
// What gRPC itself has to say.
#ifndef EMA_SERVER_RPC_GRPC_LOG_H_
#define EMA_SERVER_RPC_GRPC_LOG_H_

#include "server/base/log_event.h"

namespace ema {

// From here on `sink` is told what gRPC would write to stderr in lines of its own: events "gRPC"
// with its message and the place in its source. Its errors, which are mostly what strangers do to
// connections, are warnings, and throttled as LogThrottle does it; what it says before it ends the
// process is an error. Info and debug come if GRPC_VERBOSITY asks for them, and all of them. Once
// in a process, before gRPC is used; `sink` is kept until the process ends.
void SendGrpcLogTo(LogSink sink);

}  // namespace ema

#endif  // EMA_SERVER_RPC_GRPC_LOG_H_
