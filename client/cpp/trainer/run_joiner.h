// SPDX-License-Identifier: Apache-2.0
//
// Lets a rank of a trainer rejoin its run after the server was unreachable or restarted.
#ifndef EMA_CLIENT_CPP_TRAINER_RUN_JOINER_H_
#define EMA_CLIENT_CPP_TRAINER_RUN_JOINER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ema/client.h"
#include "ema/manifest.h"
#include "ema/track.h"

namespace ema::client_internal {

// Immutable. Thread-safe, as Client is.
class RunJoiner {
 public:
  struct Options {
    std::string model;
    Manifest manifest;
    std::vector<TrackConfig> tracks;
    Client::ModelOptions model_options;
    // Files to attach to the model: contents by name; see Client::AttachFile().
    std::map<std::string, std::string> files;
    Client::RunOptions run;  // Its shards are of `manifest`.
  };

  RunJoiner(std::shared_ptr<Client> client, Options options)
      : client_(std::move(client)), options_(std::move(options)) {}

  const std::string& model() const { return options_.model; }
  const Options& options() const { return options_; }

  // Creates the model unless it exists, with its files. Errors as Client::CreateModel().
  absl::Status CreateModel(absl::Duration timeout) const;
  // Reopens the run of the same launch; does not wait for the other ranks. The average continues
  // from the server's state, so a resume point is not applied again. If the server has lost the
  // model, rank 0 creates it. `last_run_epoch`: see Client::RunOptions. Errors as
  // Client::OpenRun(); INVALID_ARGUMENT, BAD_LAYOUT: the model has other tensors now.
  // ABORTED, FENCED: the message says who has ended this launch.
  absl::StatusOr<std::unique_ptr<Run>> Reopen(int64_t last_run_epoch, absl::Duration timeout) const;

 private:
  // Why this launch may not open the run again.
  absl::Status FencedError(absl::Duration timeout) const;

  const std::shared_ptr<Client> client_;
  const Options options_;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRAINER_RUN_JOINER_H_
