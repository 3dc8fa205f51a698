// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_SERVER_RPC_TLS_H_
#define EMA_SERVER_RPC_TLS_H_

#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace ema {

// PEM files of a server that speaks TLS.
struct TlsFiles {
  std::string certificate;  // With its chain, the server's own first. Empty: no TLS.
  std::string key;          // Of the certificate.
  std::string client_ca;  // Clients must have a certificate that this signs. Empty: they need none.
};

// Without a certificate: plain connections. Files that change are read again within ten seconds;
// connections that are open stay. INVALID_ARGUMENT: a file cannot be read, is no PEM, or the key is
// another certificate's.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(
    const TlsFiles& files);

}  // namespace ema

#endif  // EMA_SERVER_RPC_TLS_H_
