// SPDX-License-Identifier: Apache-2.0
//
// Sends the log lines of gRPC and protobuf to the server's log.
#ifndef EMA_SERVER_RPC_LIBRARY_LOG_H_
#define EMA_SERVER_RPC_LIBRARY_LOG_H_

#include <functional>

#include "server/base/log_event.h"

namespace ema {

// From now on `sink` gets the lines that these libraries would write to stderr, as events "gRPC"
// and "protobuf" with the message and the place in the source. Their errors are logged as warnings,
// throttled for each library, since peers cause most of them; only an error that ends the process
// is logged as an error. gRPC's info and debug lines are not throttled; GRPC_VERBOSITY enables
// them. `flush` is called between the last line and the end of the process. To be called once in a
// process, before the libraries are used; both arguments are kept until the process ends.
void SendLibraryLogTo(LogSink sink, std::function<void()> flush);

}  // namespace ema

#endif  // EMA_SERVER_RPC_LIBRARY_LOG_H_
