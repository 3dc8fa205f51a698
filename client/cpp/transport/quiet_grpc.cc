// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/transport/quiet_grpc.h"

#include <grpc/support/log.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace ema::client_internal {
namespace {

void TellLastWords(gpr_log_func_args* args) {
  // GPR_ASSERT() aborts next.
  if (!std::string_view(args->message).starts_with("assertion failed")) return;
  std::fprintf(stderr, "gRPC: %s:%d: %s\n", args->file, args->line, args->message);
}

}  // namespace

void QuietGrpc() {
  if (std::getenv("GRPC_VERBOSITY") == nullptr) gpr_set_log_function(&TellLastWords);
}

}  // namespace ema::client_internal
