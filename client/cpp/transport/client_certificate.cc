// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/transport/client_certificate.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <ctime>
#include <memory>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"

namespace ema::client_internal {
namespace {

constexpr char kCertificateUrl[] = "ema.client/certificate";

std::string NameOf(const X509_NAME* name) {
  const std::unique_ptr<BIO, decltype(&BIO_free)> bio(BIO_new(BIO_s_mem()), &BIO_free);
  if (bio == nullptr || X509_NAME_print_ex(bio.get(), name, 0, XN_FLAG_ONELINE) < 0) return "";
  char* text = nullptr;
  const auto size = BIO_get_mem_data(bio.get(), &text);
  return {text, static_cast<size_t>(size)};
}

// `absent`: it is malformed.
absl::Time TimeOf(const ASN1_TIME* time, absl::Time absent) {
  std::tm utc{};
  return ASN1_TIME_to_tm(time, &utc) == 1 ? absl::FromTM(utc, absl::UTCTimeZone()) : absent;
}

std::string Text(absl::Time time) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", time, absl::UTCTimeZone());
}

}  // namespace

absl::StatusOr<std::string> CheckClientCertificate(const std::string& path, const std::string& pem,
                                                   absl::Time now) {
  const std::unique_ptr<BIO, decltype(&BIO_free)> bio(
      BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), &BIO_free);
  const std::unique_ptr<X509, decltype(&X509_free)> certificate(
      PEM_read_bio_X509_AUX(bio.get(), nullptr, nullptr, nullptr), &X509_free);
  ERR_clear_error();
  if (certificate == nullptr) {
    return BadRequest(
        absl::StrCat("tls.certificate_file \"", path, "\": expected a certificate in PEM format"));
  }
  const absl::Time start = TimeOf(X509_get0_notBefore(certificate.get()), absl::InfinitePast());
  const absl::Time end = TimeOf(X509_get0_notAfter(certificate.get()), absl::InfiniteFuture());
  const std::string text = absl::StrCat(
      "the client certificate \"", path, "\" (", NameOf(X509_get_subject_name(certificate.get())),
      ", issued by ", NameOf(X509_get_issuer_name(certificate.get())), ")");
  if (now > end) return CertificateError(absl::StrCat(text, " has expired at ", Text(end)));
  return absl::StrCat(text, ", valid from ", Text(start), " to ", Text(end));
}

absl::Status CertificateError(std::string_view message) {
  absl::Status error = absl::UnavailableError(std::string(message));
  error.SetPayload(kCertificateUrl, absl::Cord());
  return error;
}

bool IsCertificateError(const absl::Status& error) {
  return error.GetPayload(kCertificateUrl).has_value();
}

}  // namespace ema::client_internal
