// SPDX-License-Identifier: Apache-2.0
//
// The output of emactl: tables for people, JSON for programs.
#ifndef EMA_CLIENT_CLI_OUTPUT_H_
#define EMA_CLIENT_CLI_OUTPUT_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ema/client.h"
#include "server/format/record_json.h"

namespace ema {

// server/format/record_json.h has the functions for the other records.
void to_json(Json& json, const Client::ListedVersion& entry);
void to_json(Json& json, const CheckpointInfo& checkpoint);
// Without tensors and tensor rules if the manifest is empty, as in lists.
void to_json(Json& json, const ModelInfo& model);

}  // namespace ema

namespace ema::cli {

// Prints to stdout. False: the write failed; main() reports that at the end.
bool Print(const std::string& text);
// Prints a command's result: `document` with --json, else `text`. Always OK.
absl::Status PrintResult(bool json, const Json& document, const std::string& text);
// Serializes JSON, on one line if `indent` is negative, with a newline at the end. Names and
// messages are UTF-8 by contract; invalid bytes are replaced, without an exception.
std::string Dump(const Json& json, int indent);

// A track with the interval that it has, set or not.
Json TrackJson(const TrackConfig& track);

// Aligned columns, two spaces between them; the first row is the heading.
class Table {
 public:
  explicit Table(std::vector<std::string> heading) { rows_.push_back(std::move(heading)); }
  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string ToString() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// A text such as "fast (w 0.0069), raw": the tracks that the version updated; or the version that a
// rollback restored.
std::string DescribeUpdates(const Version& version);
std::string DescribeModel(const ModelInfo& model);
std::string ModelTable(const std::vector<ModelInfo>& models);
std::string VersionTable(const std::vector<Client::ListedVersion>& versions);
std::string StatisticsTable(const std::vector<TrackStatistics>& statistics);
std::string CheckpointTable(const std::vector<CheckpointInfo>& checkpoints);
std::string LabelTable(const std::vector<CheckpointLabel>& labels);
std::string DescribeCheckpoint(const CheckpointInfo& checkpoint);
// One line, for `watch`.
std::string DescribeVersion(const Version& version);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_OUTPUT_H_
