// SPDX-License-Identifier: Apache-2.0
//
// The certificate of a server, which is reloaded when its files change.
#ifndef EMA_SERVER_RPC_SERVED_CERTIFICATE_H_
#define EMA_SERVER_RPC_SERVED_CERTIFICATE_H_

#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/log_event.h"
#include "server/rpc/memory_file.h"
#include "server/rpc/tls.h"

namespace ema {

// Holds the certificate, the key and the clients' CA that new connections use: the last valid ones
// of the user's files. gRPC would refuse every connection while key and certificate do not match,
// so it watches files in memory that only this class writes. Outlives the servers that use it.
// Thread-safe, except that Refresh() is for one thread.
class ServedCertificate {
 public:
  struct State {
    absl::Time expiry;         // The expiry of the certificate in use.
    bool is_rejected = false;  // The files are invalid and not in use.
  };

  // Errors as ReadTls() and CheckTls(), or INTERNAL: no memory for a file. A certificate that is
  // not valid now only causes an error in the log: when a machine starts, its clock may be wrong.
  static absl::StatusOr<std::unique_ptr<ServedCertificate>> Open(const TlsFiles& files,
                                                                 LogSink log);

  // Credentials of a server. New connections use a changed certificate after a second; open ones
  // stay.
  std::shared_ptr<grpc::ServerCredentials> credentials() const { return credentials_; }
  State state() const ABSL_LOCKS_EXCLUDED(mu_);

  // Loads files that have changed, once two calls in a row have found the same: files that are just
  // being written may not match. Files that are invalid or missing are logged once, and the
  // previous ones stay in use. A certificate that is not valid now, while the one in use is, is
  // loaded when it becomes valid, or when the other expires.
  void Refresh() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // The time in which a certificate is valid.
  struct Validity {
    absl::Time start;
    absl::Time expiry;
    bool Has(absl::Time time) const { return start <= time && time <= expiry; }
  };

  ServedCertificate(const TlsFiles& files, LogSink log, TlsTexts texts, Validity validity,
                    MemoryFile identity, std::optional<MemoryFile> client_ca);

  // Errors as CheckTls(), or INVALID_ARGUMENT: it is not valid now, and the one in use is. Nothing
  // has changed then. INTERNAL: a system call failed; the clients' CA may be the new one.
  absl::Status Use(const TlsTexts& texts) ABSL_LOCKS_EXCLUDED(mu_);
  // Logs the result of loading changed files.
  void Report(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  // Logs an error if the certificate in use is not valid now.
  void ReportInvalid() const;

  const TlsFiles files_;
  const LogSink log_;
  // Only for Refresh().
  absl::StatusOr<TlsTexts> last_processed_;            // In use, or found to be invalid.
  std::optional<absl::StatusOr<TlsTexts>> candidate_;  // Read by the previous call, if it differed.
  absl::Status reported_;                              // The last logged result.
  Validity validity_;                                  // That of the certificate in use.
  // When rejected files may become valid.
  absl::Time next_retry_time_ = absl::InfiniteFuture();
  int64_t modified_seconds_ = 1;  // The time of identity_.

  MemoryFile identity_;
  std::optional<MemoryFile> client_ca_;  // nullopt: clients need no certificate.
  std::shared_ptr<grpc::ServerCredentials> credentials_;
  mutable absl::Mutex mu_;
  State state_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_SERVED_CERTIFICATE_H_
