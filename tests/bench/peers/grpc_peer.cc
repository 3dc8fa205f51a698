// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/peers/grpc_peer.h"

#include <fcntl.h>
#include <grpcpp/create_channel_posix.h>

#include "absl/strings/str_cat.h"
#include "server/base/crc32c.h"
#include "tests/bench/bench_util.h"
#include "tests/bench/peers/peer_server.h"
#include "tests/bench/peers/socket_wire.h"

namespace ema::bench {
namespace {

// gRPC wants a socket that does not block.
int ConnectForGrpc(int port) {
  const int fd = ConnectOnLoopback(port);
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  return fd;
}

}  // namespace

GrpcPeer::GrpcPeer(size_t total)
    : process_({PeerServerPath(), "grpc", absl::StrCat(total)}, ChildProcess::Stop::kEndOfInput),
      stub_(WeightService::NewStub(grpc::CreateInsecureChannelFromFd(
          "weights", ConnectForGrpc(std::stoi(process_.ReadLine()))))) {}

void GrpcPeer::Push(std::span<const std::byte> weights) {
  grpc::ClientContext context;
  Done done;
  const std::unique_ptr<grpc::ClientWriter<Chunk>> writer = stub_->Push(&context, &done);
  Chunk chunk;
  ForEachPiece(weights.size(), [&](size_t offset, size_t size) {
    const std::span<const std::byte> piece = weights.subspan(offset, size);
    chunk.set_offset(static_cast<int64_t>(offset));
    chunk.set_crc32c(Crc32c(0, piece));
    chunk.set_data(piece.data(), piece.size());
    if (!writer->Write(chunk)) Die("the gRPC peer has gone");
  });
  writer->WritesDone();
  const grpc::Status status = writer->Finish();
  if (!status.ok() || done.total_bytes() != static_cast<int64_t>(weights.size())) {
    Die(absl::StrCat("the gRPC peer: ", status.error_message()));
  }
}

}  // namespace ema::bench
