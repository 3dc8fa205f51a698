// SPDX-License-Identifier: Apache-2.0
//
// What gRPC and protobuf themselves have to say.
#ifndef EMA_SERVER_RPC_LIBRARY_LOG_H_
#define EMA_SERVER_RPC_LIBRARY_LOG_H_

#include <functional>

#include "server/base/log_event.h"

namespace ema {

// From here on `sink` is told what these libraries would write to stderr in lines of their own:
// events "gRPC" and "protobuf" with the message and the place in the source. Their errors, which
// are mostly what strangers send, are warnings, each library's throttled as LogThrottle does it;
// what they say before they end the process is an error. gRPC's info and debug come if
// GRPC_VERBOSITY asks for them, and all of them. `flush` is called between what they say last and
// the end of the process. Once in a process, before the libraries are used; both are kept until the
// process ends.
void SendLibraryLogTo(LogSink sink, std::function<void()> flush);

}  // namespace ema

#endif  // EMA_SERVER_RPC_LIBRARY_LOG_H_
