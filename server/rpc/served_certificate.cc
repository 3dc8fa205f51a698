// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/served_certificate.h"

#include <grpcpp/security/tls_credentials_options.h>

#include <string>
#include <utility>

#include "ema/internal/status_macros.h"

namespace ema {
namespace {

// gRPC's, at the files in memory.
constexpr unsigned kRefreshSeconds = 1;
// gRPC reads key and certificate one after the other, and again if a time of modification, in whole
// seconds, has changed meanwhile: so both are one file, each with a time of its own. 0 would be an
// error to it.
constexpr int64_t kFirstSecond = 1;

}  // namespace

absl::StatusOr<std::unique_ptr<ServedCertificate>> ServedCertificate::Open(const TlsFiles& files,
                                                                           LogSink log) {
  EMA_ASSIGN_OR_RETURN(TlsTexts texts, ReadTls(files));
  EMA_ASSIGN_OR_RETURN(const TlsIdentity identity, CheckTls(files, texts));
  EMA_ASSIGN_OR_RETURN(MemoryFile file, MemoryFile::Make(identity.key_and_chain, kFirstSecond));
  std::optional<MemoryFile> client_ca;
  if (!files.client_ca.empty()) {
    EMA_ASSIGN_OR_RETURN(MemoryFile ca, MemoryFile::Make(identity.client_ca, kFirstSecond));
    client_ca.emplace(std::move(ca));
  }
  return std::unique_ptr<ServedCertificate>(
      new ServedCertificate(files, std::move(log), std::move(texts), identity.expiry,
                            std::move(file), std::move(client_ca)));
}

ServedCertificate::ServedCertificate(const TlsFiles& files, LogSink log, TlsTexts texts,
                                     absl::Time expiry, MemoryFile identity,
                                     std::optional<MemoryFile> client_ca)
    : files_(files),
      log_(std::move(log)),
      judged_(std::move(texts)),
      modified_seconds_(kFirstSecond),
      identity_(std::move(identity)),
      client_ca_(std::move(client_ca)),
      state_{.expiry = expiry} {
  grpc::experimental::TlsServerCredentialsOptions options(
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
          identity_.path(), identity_.path(), client_ca_.has_value() ? client_ca_->path() : "",
          kRefreshSeconds));
  options.watch_identity_key_cert_pairs();
  if (client_ca_.has_value()) {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  credentials_ = grpc::experimental::TlsServerCredentials(options);
}

ServedCertificate::State ServedCertificate::state() const {
  absl::MutexLock lock(&mu_);
  return state_;
}

void ServedCertificate::Refresh() {
  absl::StatusOr<TlsTexts> texts = ReadTls(files_);
  if (texts == judged_) {
    found_.reset();
    return;
  }
  if (found_ != texts) {
    found_ = std::move(texts);
    return;
  }
  const absl::Status status = texts.ok() ? TakeOver(*texts) : texts.status();
  Tell(status);
  // The system may have what it takes when the next look comes.
  if (absl::IsInternal(status)) return;
  judged_ = *std::exchange(found_, std::nullopt);
}

absl::Status ServedCertificate::TakeOver(const TlsTexts& texts) {
  EMA_ASSIGN_OR_RETURN(TlsIdentity identity, CheckTls(files_, texts));
  EMA_ASSIGN_OR_RETURN(MemoryFile file,
                       MemoryFile::Make(identity.key_and_chain, modified_seconds_ + 1));
  if (client_ca_.has_value()) {
    EMA_ASSIGN_OR_RETURN(MemoryFile ca, MemoryFile::Make(identity.client_ca, kFirstSecond));
    EMA_RETURN_IF_ERROR(client_ca_->ReplaceBy(std::move(ca)));
  }
  EMA_RETURN_IF_ERROR(identity_.ReplaceBy(std::move(file)));
  ++modified_seconds_;
  absl::MutexLock lock(&mu_);
  state_.expiry = identity.expiry;
  return absl::OkStatus();
}

void ServedCertificate::Tell(const absl::Status& status) {
  if (status.ok()) {
    const std::string not_after =
        absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", state().expiry, absl::UTCTimeZone());
    LogTo(log_, LogLevel::kInfo, "TLS files taken over",
          {{"certificate", files_.certificate}, {"not_after", not_after}});
  } else if (status != told_) {
    LogTo(log_, LogLevel::kError, "TLS files not taken over", {{"error", status}});
  }
  told_ = status;
  // Last: whoever sees it finds it in the log.
  absl::MutexLock lock(&mu_);
  state_.is_rejected = !status.ok();
}

}  // namespace ema
