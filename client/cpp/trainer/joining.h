// SPDX-License-Identifier: Apache-2.0
//
// How a rank of a trainer makes the model and joins its run, the first time and again.
#ifndef EMA_CLIENT_CPP_TRAINER_JOINING_H_
#define EMA_CLIENT_CPP_TRAINER_JOINING_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ema/client.h"
#include "ema/manifest.h"
#include "ema/shard.h"
#include "ema/step_pusher.h"

namespace ema::client_internal {

// Immutable once made; may be used by one thread at a time.
class Joining {
 public:
  // `client` outlives the result. INVALID_ARGUMENT: an option is wrong.
  static absl::StatusOr<std::unique_ptr<Joining>> Make(Client& client, std::string_view model,
                                                       const Manifest& manifest, TensorSet frozen,
                                                       const StepPusher::Options& options);

  const std::string& model() const { return model_; }
  // What is sent: the tensors that a track has. Each one's index in the manifest that was given.
  const Manifest& manifest() const { return manifest_; }
  int64_t given_index(int64_t tensor_index) const { return given_indices_[tensor_index]; }
  // Of manifest(), on all ranks.
  const std::vector<int64_t>& frozen() const { return frozen_; }

  // Makes the model if it is not there, opens the run, and waits until all ranks have. Errors as
  // CreateModel(), OpenRun() and Run::WaitReady().
  absl::StatusOr<std::unique_ptr<Run>> Join() const;
  // The same after the server was away, with `timeout` for each call: without the resume point, as
  // the average goes on from where it is; and rank 0 alone makes the model. `last_run_epoch`: as
  // Client::RunOptions.
  absl::StatusOr<std::unique_ptr<Run>> JoinAgain(int64_t last_run_epoch,
                                                 absl::Duration timeout) const;

 private:
  Joining(Client& client, std::string_view model) : client_(client), model_(model) {}

  absl::Status CreateModel(absl::Duration timeout) const;

  Client& client_;
  const std::string model_;
  Manifest manifest_;
  std::vector<int64_t> given_indices_;
  std::vector<int64_t> frozen_;
  std::vector<TrackConfig> tracks_;
  Client::ModelOptions model_options_;
  Client::RunOptions run_options_;
  absl::Duration timeout_;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRAINER_JOINING_H_
