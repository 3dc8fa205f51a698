// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/authorization.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "ema/manifest.h"
#include "server/rpc/generic_service.h"

namespace ema {
namespace {

struct Rule {
  std::string_view method;
  Role role;
  // A server that drains does not begin it any more. The others end what is under way, only look,
  // or are refused by the models themselves.
  bool begins_work = false;
  bool concerns_all_models = false;  // Whoever is for some of them may not call it.
};

constexpr Rule kRules[] = {
    // Probes have no token.
    {kHealthCheck, Role::kNobody},

    {"/ema.v1.EmaService/GetModel", Role::kEvaluator},
    {"/ema.v1.EmaService/ListModels", Role::kEvaluator},
    {"/ema.v1.EmaService/Pull", Role::kEvaluator, /*begins_work=*/true},
    {"/ema.v1.EmaService/Watch", Role::kEvaluator, /*begins_work=*/true},
    {"/ema.v1.EmaService/ListVersions", Role::kEvaluator},
    {"/ema.v1.EmaService/GetStatistics", Role::kEvaluator, /*begins_work=*/true},
    {"/ema.v1.EmaService/GetAttachedFile", Role::kEvaluator},
    {"/ema.v1.EmaService/GetCheckpoint", Role::kEvaluator},
    {"/ema.v1.EmaService/ListCheckpoints", Role::kEvaluator},
    {"/ema.v1.EmaService/ReportMetric", Role::kEvaluator},
    {"/ema.v1.EmaService/Synthesize", Role::kEvaluator, /*begins_work=*/true},
    {"/ema.v1.EmaService/GetLane", Role::kEvaluator},
    {"/ema.v1.EmaService/GetServerInfo", Role::kEvaluator},

    {"/ema.v1.EmaService/CreateModel", Role::kTrainer},
    {"/ema.v1.EmaService/AttachFile", Role::kTrainer},
    {"/ema.v1.EmaService/OpenRun", Role::kTrainer},
    {"/ema.v1.EmaService/Push", Role::kTrainer},
    {"/ema.v1.EmaService/QueryPush", Role::kTrainer},
    {"/ema.v1.EmaService/CreateCheckpoint", Role::kTrainer, /*begins_work=*/true},
    // state_dict() names the version that belongs to a trainer's checkpoint.
    {"/ema.v1.EmaService/SetLabel", Role::kTrainer},

    {"/ema.v1.EmaService/UpdateModel", Role::kAdmin},
    {"/ema.v1.EmaService/DeleteModel", Role::kAdmin},
    {"/ema.v1.EmaService/DeleteCheckpoint", Role::kAdmin},
    {"/ema.v1.EmaService/RestoreCheckpoint", Role::kAdmin, /*begins_work=*/true},
    {"/ema.v1.EmaService/SetLogLevel", Role::kAdmin, /*begins_work=*/false,
     /*concerns_all_models=*/true},
    {"/ema.v1.EmaService/Drain", Role::kAdmin, /*begins_work=*/false, /*concerns_all_models=*/true},
};

// Null: there is none.
const Rule* FindRule(std::string_view method) {
  const Rule* const rule =
      std::find_if(std::begin(kRules), std::end(kRules),
                   [method](const Rule& candidate) { return candidate.method == method; });
  return rule != std::end(kRules) ? rule : nullptr;
}

absl::Status NotAllowed(std::string_view what) {
  return MakeError(absl::StatusCode::kPermissionDenied, ErrorReason::kNotAllowed, what);
}

}  // namespace

std::optional<Role> RoleFor(std::string_view method) {
  const Rule* const rule = FindRule(method);
  return rule != nullptr ? std::optional(rule->role) : std::nullopt;
}

bool BeginsWork(std::string_view method) {
  const Rule* const rule = FindRule(method);
  return rule != nullptr && rule->begins_work;
}

absl::StatusOr<Access> Authorize(const Authenticator* authenticator, std::string_view method,
                                 std::string_view authorization) {
  if (authenticator == nullptr) return Access();
  const Rule* const rule = FindRule(method);
  if (rule != nullptr && rule->role == Role::kNobody)
    return Access{.role = Role::kNobody, .models = {}};
  EMA_ASSIGN_OR_RETURN(Access access, authenticator->Authenticate(authorization));
  const std::string name(ShortName(method));
  if (rule == nullptr) {
    return NotAllowed(absl::StrCat(name, ": no role may call it"));
  }
  if (access.role < rule->role) {
    return NotAllowed(absl::StrCat(name, ": the token is of role ",
                                   std::string(RoleName(access.role)), ", expected ",
                                   std::string(RoleName(rule->role))));
  }
  if (rule->concerns_all_models && !access.CoversAll()) {
    return NotAllowed(absl::StrCat(
        name, ": the token is for some models, expected one whose line names no models"));
  }
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
