// SPDX-License-Identifier: Apache-2.0
#include <grpcpp/server_builder.h>

#include <cstdio>

#include "peers/grpc_peer.grpc.pb.h"
#include "server/base/crc32c.h"
#include "tests/bench/peers/peer_server.h"

namespace ema::bench {
namespace {

class WeightServer final : public WeightService::Service {
 public:
  explicit WeightServer(size_t total) : average_(total) {}

  grpc::Status Push(grpc::ServerContext*, grpc::ServerReader<Chunk>* reader, Done* done) override {
    Chunk chunk;
    int64_t total_bytes = 0;
    while (reader->Read(&chunk)) {
      const std::string& data = chunk.data();
      const auto* const bytes = reinterpret_cast<const std::byte*>(data.data());
      if (Crc32c(0, {bytes, data.size()}) != chunk.crc32c()) Die("damaged bytes");
      average_.Fold(static_cast<size_t>(chunk.offset()), bytes, data.size());
      total_bytes += static_cast<int64_t>(data.size());
    }
    average_.Commit();
    done->set_total_bytes(total_bytes);
    return grpc::Status::OK;
  }

 private:
  PeerAverage average_;
};

}  // namespace

void ServeGrpc(size_t total) {
  WeightServer service(total);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) Die("gRPC did not start");
  std::printf("%d\n", port);
  std::fflush(stdout);
  while (std::getchar() != EOF) continue;
  server->Shutdown();
}

}  // namespace ema::bench
