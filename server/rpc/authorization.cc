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
  bool is_rejected_while_draining = false;
  bool concerns_all_models = false;  // A token for some models does not allow it.
  bool changes_model = false;        // Needs to be set for evaluators' calls only.
};

constexpr Rule kRules[] = {
    // Probes have no token.
    {kHealthCheck, Role::kAnonymous},

    {"/ema.v1.EmaService/GetModel", Role::kEvaluator},
    {"/ema.v1.EmaService/ListModels", Role::kEvaluator},
    {"/ema.v1.EmaService/Pull", Role::kEvaluator, /*is_rejected_while_draining=*/true},
    {"/ema.v1.EmaService/Watch", Role::kEvaluator, /*is_rejected_while_draining=*/true},
    {"/ema.v1.EmaService/ListVersions", Role::kEvaluator},
    {"/ema.v1.EmaService/GetStatistics", Role::kEvaluator, /*is_rejected_while_draining=*/true},
    {"/ema.v1.EmaService/GetAttachedFile", Role::kEvaluator},
    {"/ema.v1.EmaService/GetCheckpoint", Role::kEvaluator},
    {"/ema.v1.EmaService/ListCheckpoints", Role::kEvaluator},
    {"/ema.v1.EmaService/ReportMetric", Role::kEvaluator, /*is_rejected_while_draining=*/false,
     /*concerns_all_models=*/false, /*changes_model=*/true},
    {"/ema.v1.EmaService/Synthesize", Role::kEvaluator, /*is_rejected_while_draining=*/true,
     /*concerns_all_models=*/false, /*changes_model=*/true},
    {"/ema.v1.EmaService/GetLane", Role::kEvaluator},
    {"/ema.v1.EmaService/GetServerInfo", Role::kEvaluator},
    {"/ema.v1.EmaService/GetGroup", Role::kEvaluator},

    {"/ema.v1.EmaService/CreateModel", Role::kTrainer},
    {"/ema.v1.EmaService/AttachFile", Role::kTrainer},
    {"/ema.v1.EmaService/OpenRun", Role::kTrainer},
    {"/ema.v1.EmaService/Push", Role::kTrainer},
    {"/ema.v1.EmaService/QueryPush", Role::kTrainer},
    {"/ema.v1.EmaService/CreateCheckpoint", Role::kTrainer, /*is_rejected_while_draining=*/true},
    // state_dict() names the version that belongs to a trainer's checkpoint.
    {"/ema.v1.EmaService/SetLabel", Role::kTrainer},

    {"/ema.v1.EmaService/UpdateModel", Role::kAdmin},
    {"/ema.v1.EmaService/DeleteModel", Role::kAdmin},
    {"/ema.v1.EmaService/RecoverModel", Role::kAdmin, /*is_rejected_while_draining=*/true},
    {"/ema.v1.EmaService/RebalanceModel", Role::kAdmin, /*is_rejected_while_draining=*/true},
    {"/ema.v1.EmaService/DeleteCheckpoint", Role::kAdmin},
    {"/ema.v1.EmaService/RestoreCheckpoint", Role::kAdmin, /*is_rejected_while_draining=*/true},
    {"/ema.v1.EmaService/SetLogLevel", Role::kAdmin, /*is_rejected_while_draining=*/false,
     /*concerns_all_models=*/true},
    {"/ema.v1.EmaService/Drain", Role::kAdmin, /*is_rejected_while_draining=*/false,
     /*concerns_all_models=*/true},

    {"/ema.v1.GroupService/ReservePartition", Role::kServer, /*is_rejected_while_draining=*/true},
    {"/ema.v1.GroupService/ProposeTracks", Role::kServer},
    {"/ema.v1.GroupService/Vote", Role::kServer},
    {"/ema.v1.GroupService/Sync", Role::kServer},
    {"/ema.v1.GroupService/PublishState", Role::kServer},
    {"/ema.v1.GroupService/GetPartStatistics", Role::kServer,
     /*is_rejected_while_draining=*/true},
    {"/ema.v1.GroupService/SynthesizePart", Role::kServer, /*is_rejected_while_draining=*/true},
    // Also while draining: homes save the newest versions of their models before they leave.
    {"/ema.v1.GroupService/SavePart", Role::kServer},
    {"/ema.v1.GroupService/SaveNow", Role::kServer},
    {"/ema.v1.GroupService/WriteCopy", Role::kServer, /*is_rejected_while_draining=*/true},
    {"/ema.v1.GroupService/FetchCopy", Role::kServer, /*is_rejected_while_draining=*/true},
    // Other servers may need this one's copies to load their partitions.
    {"/ema.v1.GroupService/ReadCopy", Role::kServer},
    {"/ema.v1.GroupService/DescribeMember", Role::kServer},
};

// Null: there is no rule.
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

std::string_view ShortName(std::string_view method) { return method.substr(method.rfind('/') + 1); }

std::optional<Role> RoleFor(std::string_view method) {
  const Rule* const rule = FindRule(method);
  return rule != nullptr ? std::optional(rule->role) : std::nullopt;
}

bool IsRejectedWhileDraining(std::string_view method) {
  const Rule* const rule = FindRule(method);
  return rule != nullptr && rule->is_rejected_while_draining;
}

bool IsRefusedByFollower(std::string_view method) {
  const Rule* const rule = FindRule(method);
  if (rule == nullptr) return true;
  return rule->changes_model ||
         (!HasRightsOf(Role::kEvaluator, rule->role) && !rule->concerns_all_models);
}

absl::StatusOr<Access> Authorize(const Authenticator* authenticator, std::string_view method,
                                 std::string_view authorization,
                                 std::optional<std::string_view> model) {
  if (authenticator == nullptr) return Access();
  const Rule* const rule = FindRule(method);
  if (rule != nullptr && rule->role == Role::kAnonymous) {
    return Access{.role = Role::kAnonymous, .models = {}};
  }
  EMA_ASSIGN_OR_RETURN(Access access, authenticator->Authenticate(authorization));
  const std::string name(ShortName(method));
  if (rule == nullptr) {
    return NotAllowed(absl::StrCat(name, ": no role is allowed to call it"));
  }
  if (!HasRightsOf(access.role, rule->role)) {
    return NotAllowed(absl::StrCat(name, ": the token has the role ",
                                   std::string(RoleName(access.role)), ", expected ",
                                   std::string(RoleName(rule->role))));
  }
  if (rule->concerns_all_models && !access.CoversAll()) {
    return NotAllowed(absl::StrCat(name,
                                   ": the token is limited to some models; expected one whose line "
                                   "in the token file names no models"));
  }
  if (model.has_value() && !access.Covers(*model)) {
    // Before the error repeats the name: an invalid one may be as long as a message.
    EMA_RETURN_IF_ERROR(ValidateName("model", *model));
    return NotAllowed(
        absl::StrCat("model \"", std::string(*model), "\": the token does not allow this model"));
  }
  return access;
}

}  // namespace ema
