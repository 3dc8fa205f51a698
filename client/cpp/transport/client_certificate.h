// SPDX-License-Identifier: Apache-2.0
#ifndef EMA_CLIENT_CPP_TRANSPORT_CLIENT_CERTIFICATE_H_
#define EMA_CLIENT_CPP_TRANSPORT_CLIENT_CERTIFICATE_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ema::client_internal {

// Checks the certificate that a client shows to a server: `pem` is the text of the file `path`.
// Returns its description for messages: its file, subject, issuer and dates.
//
// INVALID_ARGUMENT, BAD_REQUEST: there is no certificate in the text. UNAVAILABLE: it has expired
// at `now`, so that a server would close the connection without saying why; its file may be
// renewed (see CertificateError).
absl::StatusOr<std::string> CheckClientCertificate(const std::string& path, const std::string& pem,
                                                   absl::Time now);

// UNAVAILABLE, because calls are retried until a person has renewed the certificate.
absl::Status CertificateError(std::string_view message);
// Whether `error` was made by CertificateError().
bool IsCertificateError(const absl::Status& error);

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRANSPORT_CLIENT_CERTIFICATE_H_
