// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/retention.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <utility>

#include "ema/internal/status_macros.h"

namespace ema {

absl::StatusOr<std::vector<std::string>> FindExpiredCheckpoints(const FolderFiles& files,
                                                                const RetentionRules& rules) {
  std::set<VersionId> labelled;
  for (const auto& [name, label] : rules.labels) labelled.insert(label.id);
  EMA_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> listing, files.List());
  enum Kind { kWhole, kPartial, kAbandoned };
  std::vector<std::pair<CheckpointId, std::string>> found[3];
  for (const DirectoryEntry& listed : listing) {
    const bool is_abandoned = listed.name.starts_with(kAbandonedPrefix);
    const std::optional<StoredName> name =
        is_abandoned ? ParseSetAsideName(listed.name) : ParseStoredName(listed.name);
    if (!name.has_value() || !listed.is_directory) continue;
    EMA_ASSIGN_OR_RETURN(const bool is_kept, files.IsKept(listed.name));
    const Kind kind = is_abandoned ? kAbandoned : name->is_partial ? kPartial : kWhole;
    if (!is_kept) found[kind].emplace_back(name->id, listed.name);
  }
  std::vector<std::string> expired;
  for (const Kind kind : {kWhole, kPartial, kAbandoned}) {
    auto& ids = found[kind];
    std::sort(ids.begin(), ids.end(), std::greater<>());
    // If an operator has put an old LATEST back, several checkpoints were abandoned.
    const int64_t keep_count = kind == kAbandoned ? 1 : rules.keep_count;
    for (size_t i = static_cast<size_t>(keep_count); i < ids.size(); ++i) {
      auto& [id, name] = ids[i];
      const bool is_kept =
          name == rules.saved_name || id == rules.latest || labelled.contains(id.version_id()) ||
          (rules.keep_step_multiple > 0 && id.step % rules.keep_step_multiple == 0);
      if (!is_kept) expired.push_back(std::move(name));
    }
  }
  return expired;
}

}  // namespace ema
