// SPDX-License-Identifier: Apache-2.0
//
// What a server that speaks TLS needs, as files have it.
#ifndef EMA_SERVER_RPC_TLS_H_
#define EMA_SERVER_RPC_TLS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ema {

// PEM files of a server that speaks TLS.
struct TlsFiles {
  std::string certificate;  // With its chain, the server's own first. Empty: no TLS.
  std::string key;          // Of the certificate.
  std::string client_ca;  // Clients must have a certificate that this signs. Empty: they need none.

  bool empty() const { return certificate.empty() && key.empty() && client_ca.empty(); }
};

// Their texts.
struct TlsTexts {
  std::string certificate;
  std::string key;
  std::string client_ca;
  bool operator==(const TlsTexts&) const = default;
};

// What connections can go by.
struct TlsIdentity {
  std::string key_and_chain;  // PEM: the key, the server's certificate, those that sign it.
  std::string client_ca;      // PEM. Empty: clients need no certificate.
  // The server's certificate is good from the one to the other.
  absl::Time start;
  absl::Time expiry;
};

// INVALID_ARGUMENT: a file cannot be read; the message has its path. Never waits for somebody who
// writes.
absl::StatusOr<TlsTexts> ReadTls(const TlsFiles& files);

// INVALID_ARGUMENT: a text is no PEM, or the key is another certificate's; the message has the path
// in `files`, and nothing of the text. What time it is plays no part.
absl::StatusOr<TlsIdentity> CheckTls(const TlsFiles& files, const TlsTexts& texts);

}  // namespace ema

#endif  // EMA_SERVER_RPC_TLS_H_
