// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/served_certificate.h"

#include <grpcpp/security/tls_credentials_options.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

// How often gRPC checks the files in memory.
constexpr unsigned kRefreshSeconds = 1;
// gRPC reads key and certificate one after the other, and again if a time of modification, in whole
// seconds, has changed meanwhile: so both are one file, and each new file has a new time. gRPC
// takes 0 for an error.
constexpr int64_t kFirstSecond = 1;

std::string ToText(absl::Time time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", time, absl::UTCTimeZone());
}

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
  return std::unique_ptr<ServedCertificate>(new ServedCertificate(
      files, std::move(log), std::move(texts), {.start = identity.start, .expiry = identity.expiry},
      std::move(file), std::move(client_ca)));
}

ServedCertificate::ServedCertificate(const TlsFiles& files, LogSink log, TlsTexts texts,
                                     Validity validity, MemoryFile identity,
                                     std::optional<MemoryFile> client_ca)
    : files_(files),
      log_(std::move(log)),
      last_processed_(std::move(texts)),
      validity_(validity),
      modified_seconds_(kFirstSecond),
      identity_(std::move(identity)),
      client_ca_(std::move(client_ca)),
      state_{.expiry = validity.expiry} {
  ReportInvalid();
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
  const bool is_same = texts == last_processed_;
  if (is_same && absl::Now() < next_retry_time_) {
    candidate_.reset();
    return;
  }
  if (!is_same && candidate_ != texts) {
    candidate_ = std::move(texts);
    return;
  }
  next_retry_time_ = absl::InfiniteFuture();
  const absl::Status status = texts.ok() ? Use(*texts) : texts.status();
  Report(status);
  // The system call may succeed at the next call.
  if (absl::IsInternal(status)) {
    next_retry_time_ = absl::InfinitePast();
    return;
  }
  last_processed_ = std::move(texts);
  candidate_.reset();
}

absl::Status ServedCertificate::Use(const TlsTexts& texts) {
  EMA_ASSIGN_OR_RETURN(TlsIdentity identity, CheckTls(files_, texts));
  const Validity validity{.start = identity.start, .expiry = identity.expiry};
  const absl::Time now = absl::Now();
  if (validity_.Has(now) && !validity.Has(now)) {
    next_retry_time_ = validity_.expiry + absl::Seconds(1);
    if (validity.start > now) next_retry_time_ = std::min(next_retry_time_, validity.start);
    return absl::InvalidArgumentError(
        absl::StrCat("TLS certificate \"", files_.certificate, "\": not valid now, but from ",
                     ToText(validity.start), " to ", ToText(validity.expiry),
                     "; the one in use is valid until ", ToText(validity_.expiry)));
  }
  EMA_ASSIGN_OR_RETURN(MemoryFile file,
                       MemoryFile::Make(identity.key_and_chain, modified_seconds_ + 1));
  if (client_ca_.has_value()) {
    EMA_ASSIGN_OR_RETURN(MemoryFile ca, MemoryFile::Make(identity.client_ca, kFirstSecond));
    EMA_RETURN_IF_ERROR(client_ca_->ReplaceBy(std::move(ca)));
  }
  EMA_RETURN_IF_ERROR(identity_.ReplaceBy(std::move(file)));
  ++modified_seconds_;
  validity_ = validity;
  absl::MutexLock lock(&mu_);
  state_.expiry = identity.expiry;
  return absl::OkStatus();
}

void ServedCertificate::ReportInvalid() const {
  if (validity_.Has(absl::Now())) return;
  LogTo(log_, LogLevel::kError, "TLS certificate not valid now",
        {{"certificate", files_.certificate},
         {"not_before", ToText(validity_.start)},
         {"not_after", ToText(validity_.expiry)}});
}

void ServedCertificate::Report(const absl::Status& status) {
  if (status.ok()) {
    LogTo(log_, LogLevel::kInfo, "TLS files reloaded",
          {{"certificate", files_.certificate}, {"not_after", ToText(validity_.expiry)}});
    ReportInvalid();
  } else if (status != reported_) {
    LogTo(log_, LogLevel::kError, "TLS files reload failed", {{"error", status}});
  }
  reported_ = status;
  // Last: readers of the state find the reason in the log.
  absl::MutexLock lock(&mu_);
  state_.is_rejected = !status.ok();
}

}  // namespace ema
