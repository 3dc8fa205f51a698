// SPDX-License-Identifier: Apache-2.0
//
// Names in a data directory: of checkpoints, and of entries that the start-up clears or skips.
#ifndef EMA_SERVER_FORMAT_CHECKPOINT_NAME_H_
#define EMA_SERVER_FORMAT_CHECKPOINT_NAME_H_

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ema/version.h"
#include "ema/version_id.h"

namespace ema {

// None of these can be the name of a model or a checkpoint.
inline constexpr std::string_view kTemporaryPrefix = ".tmp-";
inline constexpr std::string_view kCorruptPrefix = ".corrupt-";
inline constexpr std::string_view kAbandonedPrefix = ".abandoned-";
inline constexpr std::string_view kDeletedPrefix = ".deleted-";
inline constexpr std::string_view kLatestFileName = "LATEST";
inline constexpr std::string_view kLabelsFileName = "LABELS.json";
// The file that marks a checkpoint which retention never removes.
inline constexpr std::string_view kKeepFileName = "KEEP";

// Which version a checkpoint holds. Ordered as versions are: by incarnation, then version.
struct CheckpointId {
  int64_t incarnation = 0;
  int64_t version = 0;
  int64_t step = 0;

  VersionId version_id() const { return {version, incarnation}; }
  friend auto operator<=>(const CheckpointId&, const CheckpointId&) = default;
};

CheckpointId IdOf(const Version& record);

// "step-000000000040-version-1760000000-8": step, incarnation, version.
std::string CheckpointName(const CheckpointId& id);
// nullopt: `name` is not what CheckpointName() gives.
std::optional<CheckpointId> ParseCheckpointName(std::string_view name);

// Name of a checkpoint that has only these tracks: CheckpointName(), "-part-" and 8 hexadecimal
// digits: the CRC32C of the sorted track names, each followed by a line end.
std::string PartialCheckpointName(const CheckpointId& id, std::vector<std::string> tracks);

struct StoredName {
  CheckpointId id;
  bool is_partial = false;
  friend bool operator==(const StoredName&, const StoredName&) = default;
};
// nullopt: `name` is not what CheckpointName() or PartialCheckpointName() gives.
std::optional<StoredName> ParseStoredName(std::string_view name);
// The same for a checkpoint that was set aside: kCorruptPrefix or kAbandonedPrefix, its name, and
// perhaps a suffix such as "-1".
std::optional<StoredName> ParseSetAsideName(std::string_view name);

// Whether `name` is that of a label file that was set aside.
bool IsSetAsideLabelFile(std::string_view name);

// ".deleted-1760000000-1-gpt": name of the folder of a model that an incarnation has deleted, as
// its `count`th one of that name. DeletedModelName(): the model's name; "" if `name` is of another
// form.
std::string DeletedName(int64_t incarnation, int64_t count, std::string_view model);
std::string_view DeletedModelName(std::string_view name);

inline constexpr int64_t kMaxLatestBytes = 256;  // Of a LATEST file; a longer one is invalid.
// Text of a LATEST file: the name and its CRC32C. ParseLatest(): nullopt if `text` is anything
// else.
std::string EncodeLatest(const std::string& name);
std::optional<std::string> ParseLatest(std::string_view text);

}  // namespace ema

#endif  // EMA_SERVER_FORMAT_CHECKPOINT_NAME_H_
