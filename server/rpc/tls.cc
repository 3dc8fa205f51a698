// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/tls.h"

#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

constexpr unsigned kRefreshSeconds = 10;

absl::Status BadFile(const char* what, const std::string& path) {
  const unsigned long code = ERR_get_error();
  const char* const reason = ERR_reason_error_string(code);
  ERR_clear_error();
  return absl::InvalidArgumentError(absl::StrCat("TLS ", what, " \"", path,
                                                 "\": ", reason != nullptr ? reason : "not usable",
                                                 "; expected a PEM file"));
}

// gRPC only logs what is wrong with its files, and then refuses every connection.
absl::Status Check(const TlsFiles& files) {
  const std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context(SSL_CTX_new(TLS_server_method()),
                                                             &SSL_CTX_free);
  if (context == nullptr) return absl::InternalError("OpenSSL has no memory");
  if (SSL_CTX_use_certificate_chain_file(context.get(), files.certificate.c_str()) != 1) {
    return BadFile("certificate", files.certificate);
  }
  // Says, too, if it is not this certificate's.
  if (SSL_CTX_use_PrivateKey_file(context.get(), files.key.c_str(), SSL_FILETYPE_PEM) != 1) {
    return BadFile("key", files.key);
  }
  if (!files.client_ca.empty() &&
      SSL_CTX_load_verify_locations(context.get(), files.client_ca.c_str(), nullptr) != 1) {
    return BadFile("client CA", files.client_ca);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(
    const TlsFiles& files) {
  if (files.certificate.empty() && files.key.empty() && files.client_ca.empty()) {
    return grpc::InsecureServerCredentials();
  }
  EMA_RETURN_IF_ERROR(Check(files));
  grpc::experimental::TlsServerCredentialsOptions options(
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
          files.key, files.certificate, files.client_ca, kRefreshSeconds));
  options.watch_identity_key_cert_pairs();
  if (!files.client_ca.empty()) {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return grpc::experimental::TlsServerCredentials(options);
}

}  // namespace ema
