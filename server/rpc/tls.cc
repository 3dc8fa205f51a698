// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/tls.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>

#include <ctime>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/internal/status_macros.h"
#include "server/base/small_file.h"

namespace ema {
namespace {

using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;
using Context = std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)>;

absl::Status BadFile(absl::string_view what, const std::string& path, absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrCat("TLS ", what, " \"", path, "\": ", problem));
}

absl::Status NotUsable(absl::string_view what, const std::string& path) {
  const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
  ERR_clear_error();
  return BadFile(what, path,
                 absl::StrCat(reason != nullptr ? reason : "not usable", "; expected a PEM file"));
}

Bio Open(const std::string& text) {
  ERR_clear_error();
  return {BIO_new_mem_buf(text.data(), static_cast<int>(text.size())), &BIO_free};
}

// Empty: there is none, or one is malformed; OpenSSL's last error tells the cases apart.
std::vector<Certificate> ParseCertificates(const std::string& text) {
  const Bio bio = Open(text);
  std::vector<Certificate> all;
  while (true) {
    all.emplace_back(PEM_read_bio_X509_AUX(bio.get(), nullptr, nullptr, nullptr), &X509_free);
    if (all.back() != nullptr) continue;
    all.pop_back();
    if (ERR_GET_REASON(ERR_peek_last_error()) != PEM_R_NO_START_LINE) all.clear();
    return all;
  }
}

Key ParseKey(const std::string& text) {
  // Without a phrase, OpenSSL would ask for it on the terminal.
  char no_phrase[] = "";
  return {PEM_read_bio_PrivateKey(Open(text).get(), nullptr, nullptr, no_phrase), &EVP_PKEY_free};
}

// Returns the text that `write` writes to a BIO.
template <typename Write>
std::string Written(const Write& write) {
  const Bio bio(BIO_new(BIO_s_mem()), &BIO_free);
  write(bio.get());
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &data);
  return {data, static_cast<size_t>(size)};
}

absl::Time TimeOf(const ASN1_TIME* time) {
  std::tm utc{};
  // Cannot fail: the certificate has been parsed.
  ASN1_TIME_to_tm(time, &utc);
  return absl::FromTM(utc, absl::UTCTimeZone());
}

// Loads them as gRPC will, which only logs an error and then refuses every connection.
absl::Status TryOut(const TlsFiles& files, const std::vector<Certificate>& chain,
                    EVP_PKEY* const key) {
  const Context context(SSL_CTX_new(TLS_server_method()), &SSL_CTX_free);
  if (context == nullptr) return absl::InternalError("OpenSSL is out of memory");
  bool is_good = SSL_CTX_use_certificate(context.get(), chain.front().get()) == 1;
  for (size_t i = 1; i < chain.size() && is_good; ++i) {
    is_good = SSL_CTX_add1_chain_cert(context.get(), chain[i].get()) == 1;
  }
  if (!is_good) return NotUsable("certificate", files.certificate);
  if (X509_check_private_key(chain.front().get(), key) != 1) {
    ERR_clear_error();
    return BadFile("key", files.key,
                   absl::StrCat("does not match the certificate \"", files.certificate, "\""));
  }
  if (SSL_CTX_use_PrivateKey(context.get(), key) != 1) return NotUsable("key", files.key);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TlsTexts> ReadTls(const TlsFiles& files) {
  constexpr int64_t kMaxBytes = 1 << 20;
  TlsTexts texts;
  const auto read = [](const char* what, const std::string& path, std::string& text) {
    absl::StatusOr<std::string> found = ReadSmallFile(path, kMaxBytes);
    if (!found.ok()) return BadFile(what, path, found.status().message());
    text = *std::move(found);
    return absl::OkStatus();
  };
  EMA_RETURN_IF_ERROR(read("certificate", files.certificate, texts.certificate));
  EMA_RETURN_IF_ERROR(read("key", files.key, texts.key));
  if (!files.client_ca.empty()) {
    EMA_RETURN_IF_ERROR(read("client CA", files.client_ca, texts.client_ca));
  }
  return texts;
}

absl::StatusOr<TlsIdentity> CheckTls(const TlsFiles& files, const TlsTexts& texts) {
  const std::vector<Certificate> chain = ParseCertificates(texts.certificate);
  if (chain.empty()) return NotUsable("certificate", files.certificate);
  const Key key = ParseKey(texts.key);
  if (key == nullptr) return NotUsable("key", files.key);
  EMA_RETURN_IF_ERROR(TryOut(files, chain, key.get()));
  if (!files.client_ca.empty() && ParseCertificates(texts.client_ca).empty()) {
    return NotUsable("client CA", files.client_ca);
  }
  ERR_clear_error();
  // Either file may also hold entries of the other: only those that are used are passed on.
  return TlsIdentity{.key_and_chain = Written([&](BIO* bio) {
                       PEM_write_bio_PrivateKey(bio, key.get(), nullptr, nullptr, 0, nullptr,
                                                nullptr);
                       for (const Certificate& one : chain) PEM_write_bio_X509(bio, one.get());
                     }),
                     .client_ca = texts.client_ca,
                     .start = TimeOf(X509_get0_notBefore(chain.front().get())),
                     .expiry = TimeOf(X509_get0_notAfter(chain.front().get()))};
}

}  // namespace ema
