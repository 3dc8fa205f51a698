// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/peers/peer_server.h"

int main(int argc, char** argv) {
  const std::string kind = argc == 3 ? argv[1] : "";
  if (kind == "socket") {
    ema::bench::ServeSocket(std::stoul(argv[2]));
  } else if (kind == "grpc") {
    ema::bench::ServeGrpc(std::stoul(argv[2]));
  } else {
    ema::bench::Die("usage: peer_server socket|grpc BYTES");
  }
}
