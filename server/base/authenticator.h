// SPDX-License-Identifier: Apache-2.0
//
// Roles, and the interface that authenticates callers.
#ifndef EMA_SERVER_BASE_AUTHENTICATOR_H_
#define EMA_SERVER_BASE_AUTHENTICATOR_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace ema {

// HasRightsOf() compares roles.
enum class Role {
  kAnonymous,  // Callers that have not identified themselves.
  kEvaluator,  // Reads, and reports scores.
  kTrainer,    // Creates models and pushes to them.
  kAdmin,      // Deletes, rolls back, and changes running models.
  kServer,     // Another server of the group. Only it may make the calls between servers.
};

// Whether `role` has the rights of `needed`. From kAnonymous to kAdmin, each role includes the
// rights of the ones before it. kServer includes only those of kAnonymous, and no other role
// includes kServer.
bool HasRightsOf(Role role, Role needed);

// Returns "trainer" and so on.
std::string_view RoleName(Role role);

// The rights of one caller. The default is all rights: every caller's, if there is no
// authenticator.
struct Access {
  Role role = Role::kAdmin;
  // Names of models, or prefixes that end in '*'. Empty: all models.
  std::vector<std::string> models;

  bool Covers(std::string_view model) const;
  bool CoversAll() const;
};

// Authenticates callers. Thread-safe.
class Authenticator {
 public:
  virtual ~Authenticator() = default;
  // `authorization` is the value of the call's header of that name, empty if it has none.
  // UNAUTHENTICATED, BAD_TOKEN: no token, or an unknown one. The message does not contain it.
  virtual absl::StatusOr<Access> Authenticate(std::string_view authorization) const = 0;
  // Loads changed credentials, and returns whether they have changed. Called once a second, by one
  // thread; may read files.
  virtual bool Refresh() = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_BASE_AUTHENTICATOR_H_
