// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/authorization.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/manifest.h"

namespace ema {
namespace {

struct Rule {
  std::string_view method;
  Role role;
};

constexpr Rule kRules[] = {
    // Probes have no token.
    {"Check", Role::kNobody},

    {"GetModel", Role::kEvaluator},
    {"ListModels", Role::kEvaluator},
    {"Pull", Role::kEvaluator},
    {"Watch", Role::kEvaluator},
    {"ListVersions", Role::kEvaluator},
    {"GetStatistics", Role::kEvaluator},
    {"GetAttachedFile", Role::kEvaluator},
    {"GetCheckpoint", Role::kEvaluator},
    {"ListCheckpoints", Role::kEvaluator},
    {"ReportMetric", Role::kEvaluator},
    {"Synthesize", Role::kEvaluator},
    {"GetLane", Role::kEvaluator},
    {"GetServerInfo", Role::kEvaluator},

    {"CreateModel", Role::kTrainer},
    {"AttachFile", Role::kTrainer},
    {"OpenRun", Role::kTrainer},
    {"Push", Role::kTrainer},
    {"QueryPush", Role::kTrainer},
    {"CreateCheckpoint", Role::kTrainer},
    // state_dict() names the version that belongs to a trainer's checkpoint.
    {"SetLabel", Role::kTrainer},

    {"UpdateModel", Role::kAdmin},
    {"DeleteModel", Role::kAdmin},
    {"DeleteCheckpoint", Role::kAdmin},
    {"RestoreCheckpoint", Role::kAdmin},
    {"SetLogLevel", Role::kAdmin},
    {"Drain", Role::kAdmin},
};

// What a server that drains does not begin any more. The others end what is under way, only look,
// or are refused by the models themselves.
constexpr std::string_view kWork[] = {
    "Pull", "Watch", "GetStatistics", "Synthesize", "CreateCheckpoint", "RestoreCheckpoint"};

absl::Status NotAllowed(std::string_view what) {
  return MakeError(absl::StatusCode::kPermissionDenied, ErrorReason::kNotAllowed, what);
}

}  // namespace

std::optional<Role> RoleFor(std::string_view method) {
  const Rule* const rule =
      std::find_if(std::begin(kRules), std::end(kRules),
                   [method](const Rule& candidate) { return candidate.method == method; });
  if (rule == std::end(kRules)) return std::nullopt;
  return rule->role;
}

bool BeginsWork(std::string_view method) {
  return std::find(std::begin(kWork), std::end(kWork), method) != std::end(kWork);
}

absl::StatusOr<Access> Authorize(const Authenticator* authenticator, std::string_view method,
                                 std::string_view authorization,
                                 std::optional<std::string_view> model) {
  if (authenticator == nullptr) return Access();
  const std::optional<Role> needed = RoleFor(method);
  if (needed == Role::kNobody) return Access{.role = Role::kNobody, .models = {}};
  EMA_ASSIGN_OR_RETURN(Access access, authenticator->Authenticate(authorization));
  if (!needed.has_value()) {
    return NotAllowed(absl::StrCat(std::string(method), ": no role may call it"));
  }
  if (access.role < *needed) {
    return NotAllowed(absl::StrCat(std::string(method), ": the token is of role ",
                                   std::string(RoleName(access.role)), ", expected ",
                                   std::string(RoleName(*needed))));
  }
  if (model.has_value()) EMA_RETURN_IF_ERROR(CheckCovers(access, *model));
  return access;
}

absl::Status CheckCovers(const Access& access, std::string_view model) {
  if (access.Covers(model)) return absl::OkStatus();
  // What is no name would be as long as a message may be.
  EMA_RETURN_IF_ERROR(ValidateName("model", model));
  return NotAllowed(
      absl::StrCat("model \"", std::string(model), "\": not one of those that the token is for"));
}

std::string AuthorizationOf(const grpc::ServerContext& context) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find("authorization");
  if (found == metadata.end()) return "";
  return std::string(found->second.data(), found->second.size());
}

}  // namespace ema
