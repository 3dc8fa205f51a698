// SPDX-License-Identifier: Apache-2.0
#include "server/base/authenticator.h"

#include <algorithm>

namespace ema {

bool HasRightsOf(Role role, Role needed) {
  if (role == Role::kServer) return needed == Role::kServer || needed == Role::kAnonymous;
  return role >= needed;
}

std::string_view RoleName(Role role) {
  switch (role) {
    case Role::kAnonymous:
      return "nobody";
    case Role::kEvaluator:
      return "evaluator";
    case Role::kTrainer:
      return "trainer";
    case Role::kAdmin:
      return "admin";
    case Role::kServer:
      return "server";
  }
  return "unknown";
}

bool Access::Covers(std::string_view model) const {
  const auto matches = [model](std::string_view pattern) {
    if (!pattern.ends_with('*')) return model == pattern;
    pattern.remove_suffix(1);
    return model.starts_with(pattern);
  };
  return models.empty() || std::any_of(models.begin(), models.end(), matches);
}

bool Access::CoversAll() const {
  return models.empty() || std::find(models.begin(), models.end(), "*") != models.end();
}

}  // namespace ema
