// SPDX-License-Identifier: Apache-2.0
//
// Bearer tokens and their rights.
#ifndef EMA_SERVER_OPS_TOKEN_FILE_H_
#define EMA_SERVER_OPS_TOKEN_FILE_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/base/authenticator.h"

namespace ema {

// A text file with one token a line:
//
//   # role    token                             models that it is for; none: all
//   trainer   6f1d2c70b4e94b0f9b9d6b0c8a4c1e52  vision-* gpt
//   evaluator 0d0f6f0c0b3a4a8c9e1d2f3a4b5c6d7e
//
// Tokens have 16 to 512 printable characters and no blanks. They are kept as SHA-256 and compared
// in constant time. Thread-safe, but Refresh() is for one thread.
class TokenFile final : public Authenticator {
 public:
  // INVALID_ARGUMENT: the file, or a line of it, cannot be read; the message contains no token.
  static absl::StatusOr<std::unique_ptr<TokenFile>> Open(const std::string& path);

  absl::StatusOr<Access> Authenticate(std::string_view authorization) const override
      ABSL_LOCKS_EXCLUDED(mu_);
  // Reloads a changed file once two calls in a row have read the same text, as it may be half
  // written. If it is invalid or missing, the previous tokens stay in force, and `on_change` is
  // called once.
  bool Refresh() override ABSL_LOCKS_EXCLUDED(mu_);

  // OK: the file's tokens are in use. Else why they are not.
  absl::Status problem() const ABSL_LOCKS_EXCLUDED(mu_);

  // Called with problem() after each reload, failed ones included. Set before the first Refresh().
  std::function<void(const absl::Status&)> on_change;

 private:
  struct Entry {
    std::array<unsigned char, 32> token_sha256;
    Access access;
  };

  explicit TokenFile(std::string path) : path_(std::move(path)) {}
  static absl::StatusOr<std::vector<Entry>> Parse(std::string_view text);

  void ReportReload(const absl::Status& problem) ABSL_LOCKS_EXCLUDED(mu_);

  const std::string path_;
  // Only for Refresh().
  absl::StatusOr<std::string> last_processed_;            // In use, or found to be invalid.
  std::optional<absl::StatusOr<std::string>> candidate_;  // Of the previous call, if it differed.
  mutable absl::Mutex mu_;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mu_);
  absl::Status problem_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema

#endif  // EMA_SERVER_OPS_TOKEN_FILE_H_
