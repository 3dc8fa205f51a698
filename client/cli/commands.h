// SPDX-License-Identifier: Apache-2.0
//
// The commands of emactl. Each prints its result to stdout; the caller prints errors.
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

// The state that all commands share.
struct Session {
  Client* client = nullptr;
  bool json = false;  // Print one JSON document; `watch`: one per line.
  absl::Duration timeout = absl::Seconds(60);
  bool has_timeout = false;  // The user has set `timeout`.
  // Client::Options::is_interrupted of `client`, for work outside the client.
  std::function<bool()> is_interrupted;
  // Makes another client of the same server, whose calls Ctrl-C does not interrupt, for cleaning
  // up.
  std::function<absl::StatusOr<std::unique_ptr<Client>>()> new_client;
  // The timeout of calls that wait for the server's disk or read a whole version.
  absl::Duration disk_timeout() const { return has_timeout ? timeout : absl::Minutes(10); }
};

struct CreateOptions {
  std::string model;
  std::string file;  // For WeightsFile::Open(); only headers are read.
  std::vector<TrackConfig> tracks;
  Client::ModelOptions model_options;
};
absl::Status Create(const Session& session, const CreateOptions& options);

// `tracks`: new tracks, and changes of existing ones.
absl::Status Update(const Session& session, const std::string& model,
                    const std::vector<TrackOption>& tracks, Client::ModelChanges changes);

absl::Status List(const Session& session);
absl::Status Describe(const Session& session, const std::string& model);
// Prints the `last` newest versions, and the number of earlier ones; 0: all.
absl::Status Versions(const Session& session, const std::string& model, int64_t last);

struct WatchOptions {
  std::string model;
  std::optional<int64_t> after;
  int64_t incarnation = 0;  // The one in which `after` was counted.
  int64_t count = 0;        // Commits to print; 0: no limit.
};
// Waits for each commit without a limit, or at most for the user's timeout.
absl::Status Watch(const Session& session, const WatchOptions& options);

absl::Status Statistics(const Session& session, const std::string& model,
                        const Client::StatisticsOptions& request);
absl::Status Synthesize(const Session& session, const std::string& model,
                        const Client::SynthesizeOptions& request);

struct DeleteOptions {
  std::string model;
  std::string confirm;  // The model's name again.
  bool purge = false;
};
// INVALID_ARGUMENT: `confirm` is another name.
absl::Status Delete(const Session& session, const DeleteOptions& options);
// In a group whose registry has lost the model.
absl::Status RecoverModel(const Session& session, const std::string& model);

// `service`: see Client::IsServing(). OK: it is serving. UNAVAILABLE: it reports that it is not.
// Other errors as Client::IsServing(). Waits for 5 s, or for the user's timeout.
absl::Status Health(const Session& session, const std::string& service);

// Prints to stderr "emactl: message [REASON]", or with `json` {"error": {...}}.
void PrintError(const absl::Status& status, bool json);
// Prints to stderr, for Client::Options::on_wait. Not for use with --json.
void PrintWait(const absl::Status& error);

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_COMMANDS_H_
