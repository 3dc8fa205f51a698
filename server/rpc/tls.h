// SPDX-License-Identifier: Apache-2.0
//
// Reads and checks the files of a server that uses TLS.
#ifndef EMA_SERVER_RPC_TLS_H_
#define EMA_SERVER_RPC_TLS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ema {

// PEM files of a server that uses TLS.
struct TlsFiles {
  std::string certificate;  // With its chain, the server's own first. Empty: no TLS.
  std::string key;          // The certificate's private key.
  std::string client_ca;    // Clients must have a certificate signed by it. Empty: they need none.

  bool empty() const { return certificate.empty() && key.empty() && client_ca.empty(); }
};

// The contents of these files.
struct TlsTexts {
  std::string certificate;
  std::string key;
  std::string client_ca;
  bool operator==(const TlsTexts&) const = default;
};

// A checked certificate with its key.
struct TlsIdentity {
  std::string key_and_chain;  // PEM: the key, the server's certificate, those that sign it.
  std::string client_ca;      // PEM. Empty: clients need no certificate.
  // The validity of the server's certificate.
  absl::Time start;
  absl::Time expiry;
};

// INVALID_ARGUMENT: a file cannot be read; the message has its path. Does not block on a pipe.
absl::StatusOr<TlsTexts> ReadTls(const TlsFiles& files);

// INVALID_ARGUMENT: a text is not PEM, or the key belongs to another certificate; the message has
// the path in `files`, and nothing of the text. Does not check the certificate's validity in time.
absl::StatusOr<TlsIdentity> CheckTls(const TlsFiles& files, const TlsTexts& texts);

}  // namespace ema

#endif  // EMA_SERVER_RPC_TLS_H_
