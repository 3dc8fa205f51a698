// SPDX-License-Identifier: Apache-2.0
//
// Where calls come from: services whose requests are read when we want to. Therefore each method,
// also one with one request and one reply, is declared as a bidirectional stream.
#ifndef EMA_SERVER_RPC_GENERIC_SERVICE_H_
#define EMA_SERVER_RPC_GENERIC_SERVICE_H_

#include <grpcpp/completion_queue.h>
#include <grpcpp/impl/service_type.h>
#include <grpcpp/server_context.h>

#include <string>
#include <string_view>
#include <vector>

namespace ema {

// Gives calls when their headers have come. What gRPC generates for methods with one request holds
// a call back until its whole request, as long as a message may be, is in memory: before anybody
// has looked at who calls. On the wire nothing differs.
class GenericService final : public grpc::Service {
 public:
  // `methods`: as clients name them, such as "/ema.v1.EmaService/Push".
  explicit GenericService(std::vector<std::string> methods);

  // Asks for the next call of `method`, on a queue of the server's. REQUIRES: it is one of them.
  void Request(std::string_view method, grpc::ServerContext* context,
               grpc::internal::ServerAsyncStreamingInterface* stream,
               grpc::ServerCompletionQueue* queue, void* tag);

 private:
  const std::vector<std::string> methods_;  // gRPC refers to their bytes.
};

// The methods of EmaService, from its descriptor.
std::vector<std::string> EmaMethods();

// "Push" of "/ema.v1.EmaService/Push".
std::string_view ShortName(std::string_view method);

}  // namespace ema

#endif  // EMA_SERVER_RPC_GENERIC_SERVICE_H_
