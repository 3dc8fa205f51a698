// SPDX-License-Identifier: Apache-2.0
//
// The certificate that a server shows.
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

// Holds the certificate, the key and the clients' CA that new connections go by: the last good ones
// that were in the user's files. gRPC, which would refuse every connection as soon as its files do
// not fit together, watches files in memory that only this class writes. Outlives the servers that
// use it. Thread-safe, but Refresh() is for one thread.
class ServedCertificate {
 public:
  struct State {
    absl::Time expiry;         // Of the certificate in use.
    bool is_rejected = false;  // What is in the files is not in use, for it is wrong.
  };

  // Errors as ReadTls() and CheckTls(), or INTERNAL: the system has no memory for a file. A
  // certificate that is not valid now is an error in the log only: at the start of a machine it may
  // be the clock that is wrong.
  static absl::StatusOr<std::unique_ptr<ServedCertificate>> Open(const TlsFiles& files,
                                                                 LogSink log);

  // Of servers whose connections go by what is held here, from a second after it has changed.
  // Connections that are open stay.
  std::shared_ptr<grpc::ServerCredentials> credentials() const { return credentials_; }
  State state() const ABSL_LOCKS_EXCLUDED(mu_);

  // Takes over files that have changed, once two looks in a row have found the same: files that are
  // just being written are of two pairs. What is wrong, or has gone: what was before stays, and the
  // log is told, once. So it is with a certificate that is not valid now, while the one in use is:
  // it is taken over as soon as it becomes valid, or the other ends.
  void Refresh() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // When a certificate is good.
  struct Validity {
    absl::Time start;
    absl::Time expiry;
    bool Has(absl::Time time) const { return start <= time && time <= expiry; }
  };

  ServedCertificate(const TlsFiles& files, LogSink log, TlsTexts texts, Validity validity,
                    MemoryFile identity, std::optional<MemoryFile> client_ca);

  // As CheckTls(), or INVALID_ARGUMENT: it is not valid now, and the one in use is. Nothing has
  // changed then. INTERNAL: the system refuses; the clients' CA may be the new one.
  absl::Status TakeOver(const TlsTexts& texts) ABSL_LOCKS_EXCLUDED(mu_);
  void Tell(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  // Tells the log if what is in use is of no use to clients.
  void TellInvalid() const;

  const TlsFiles files_;
  const LogSink log_;
  // Refresh()'s own.
  absl::StatusOr<TlsTexts> judged_;                // What is in use, or was wrong.
  std::optional<absl::StatusOr<TlsTexts>> found_;  // By the look before, if it was another.
  absl::Status told_;                              // To the log.
  Validity validity_;                              // Of what is in use.
  // When what was judged wrong may be right.
  absl::Time judge_again_time_ = absl::InfiniteFuture();
  int64_t modified_seconds_ = 1;  // Of identity_.

  MemoryFile identity_;
  std::optional<MemoryFile> client_ca_;  // Absent: clients need none.
  std::shared_ptr<grpc::ServerCredentials> credentials_;
  mutable absl::Mutex mu_;
  State state_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema

#endif  // EMA_SERVER_RPC_SERVED_CERTIFICATE_H_
