// SPDX-License-Identifier: Apache-2.0
//
// Who may do what.
#ifndef EMA_SERVER_BASE_AUTHENTICATOR_H_
#define EMA_SERVER_BASE_AUTHENTICATOR_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace ema {

// Each may do what those before it may.
enum class Role {
  kAnonymous,  // Callers that have not identified themselves.
  kEvaluator,  // Reads, and reports scores.
  kTrainer,    // Makes models and pushes to them.
  kAdmin,      // Deletes, rolls back, and changes what runs.
};

// "trainer" and so on.
std::string_view RoleName(Role role);

// What one caller may do.
struct Access {
  Role role = Role::kAdmin;
  // Names of models, or what they begin with before a last '*'. Empty: all models.
  std::vector<std::string> models;

  bool Covers(std::string_view model) const;
  bool CoversAll() const;
};

// Knows callers by what they say of themselves. Thread-safe.
class Authenticator {
 public:
  virtual ~Authenticator() = default;
  // Of a call whose header "authorization" has this value; "": it has none. UNAUTHENTICATED,
  // BAD_TOKEN: it says nothing, or nothing that is known. The message does not repeat it.
  virtual absl::StatusOr<Access> Authenticate(std::string_view authorization) const = 0;
  // Loads changed credentials, and returns whether they have changed. Called once a second, by one
  // thread; may read files.
  virtual bool Refresh() = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_BASE_AUTHENTICATOR_H_
