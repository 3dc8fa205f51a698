// SPDX-License-Identifier: Apache-2.0
//
// The commands of emactl. Each prints its result to stdout; an error is the caller's to print.
#ifndef EMA_CLIENT_CLI_COMMANDS_H_
#define EMA_CLIENT_CLI_COMMANDS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cli/track_option.h"
#include "ema/client.h"

namespace ema::cli {

// What all commands share.
struct Session {
  Client* client = nullptr;
  bool json = false;  // One JSON document; `watch`: one a line.
  absl::Duration timeout = absl::Seconds(60);
  bool has_timeout = false;  // The user gave one.
  // As Client::Options::is_interrupted, for work that is not the client's.
  std::function<bool()> is_interrupted;
  // Another client of the same server, whose calls no Ctrl-C ends: for what must be cleaned up.
  std::function<absl::StatusOr<std::unique_ptr<Client>>()> new_client;
  // Of calls that wait for the server's disk, or read a whole version.
  absl::Duration disk_timeout() const { return has_timeout ? timeout : absl::Minutes(10); }
};

struct CreateOptions {
  std::string model;
  std::string file;  // As WeightsFile::Open() reads it; only headers are.
  std::vector<TrackConfig> tracks;
  Client::ModelOptions model_options;
};
absl::Status Create(const Session& session, const CreateOptions& options);

// `tracks`: new ones, and what changes of others.
absl::Status Update(const Session& session, const std::string& model,
                    const std::vector<TrackOption>& tracks, Client::ModelChanges changes);

absl::Status List(const Session& session);
absl::Status Describe(const Session& session, const std::string& model);
absl::Status Versions(const Session& session, const std::string& model);

struct WatchOptions {
  std::string model;
  std::optional<int64_t> after;
  int64_t incarnation = 0;  // Of `after`.
  int64_t count = 0;        // 0: no end.
};
// Waits for ever, or as long as the user's time-out for each commit.
absl::Status Watch(const Session& session, const WatchOptions& options);

absl::Status Statistics(const Session& session, const std::string& model,
                        const Client::StatisticsOptions& request);
absl::Status Synthesize(const Session& session, const std::string& model,
                        const Client::SynthesizeOptions& request);

struct DeleteOptions {
  std::string model;
  std::string confirm;  // The name again.
  bool purge = false;
};
// INVALID_ARGUMENT: `confirm` is another name.
absl::Status Delete(const Session& session, const DeleteOptions& options);

// `service`: as Client::IsServing() takes it. OK: it serves. UNAVAILABLE: it says that it does not.
// Other errors as Client::IsServing(). Waits for 5 s, or the user's time-out.
absl::Status Health(const Session& session, const std::string& service);

// To stderr: "emactl: message", or with `json` {"error": {...}}.
void PrintError(const absl::Status& status, bool json);
// For Client::Options::on_wait. To stderr; not for use with --json.
void PrintWait(const absl::Status& error);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_COMMANDS_H_
