// SPDX-License-Identifier: Apache-2.0
//
// Lets a rank of a trainer open its run, and rejoin it after the server was unreachable or
// restarted.
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
#include "ema/step_pusher.h"
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
    // For Open().
    StepPusher::Existing existing = StepPusher::Existing::kContinue;
  };

  RunJoiner(std::shared_ptr<Client> client, Options options)
      : client_(std::move(client)), options_(std::move(options)) {}

  const std::string& model() const { return options_.model; }
  const Options& options() const { return options_; }

  // Creates the model, or treats the existing one as Options::existing says, and opens the run for
  // the first time, at its resume point; does not wait for the other ranks. `last_run_epoch`: of an
  // earlier call for the same launch; 0: there was none. Errors as StepPusher::Create().
  // UNAVAILABLE: rank 0 has not yet replaced the model (Existing::kNew).
  //
  // `started`: when this training began without the server. FAILED_PRECONDITION, RESUME_MISMATCH: a
  // version is later, so another training has begun since, which this one must not replace.
  absl::StatusOr<std::unique_ptr<Run>> Open(int64_t last_run_epoch, absl::Duration timeout,
                                            absl::Time started = absl::InfiniteFuture()) const;
  // The timeout of calls of Open() and Run::WaitReady() that resume a model from the server's disk;
  // `timeout` if this run resumes none.
  absl::Duration OpenTimeout(absl::Duration timeout) const;
  // Reopens the run of the same launch; does not wait for the other ranks. The average continues
  // from the server's state, so a resume point is not applied again. If the server has lost the
  // model, rank 0 creates it. `last_run_epoch`: see Client::RunOptions. Errors as
  // Client::OpenRun(); INVALID_ARGUMENT, BAD_LAYOUT: the model has other tensors now.
  // ABORTED, FENCED: the message says who has ended this launch.
  absl::StatusOr<std::unique_ptr<Run>> Reopen(int64_t last_run_epoch, absl::Duration timeout) const;

 private:
  // FAILED_PRECONDITION, RESUME_MISMATCH: the model's newest version is later than `started`.
  absl::Status CheckNoLaterTraining(absl::Time started, absl::Duration timeout) const;
  // Creates the model unless it exists, with its files. Errors as Client::CreateModel().
  absl::Status CreateModel(absl::Duration timeout) const;
  // CreateModel(), after treating the existing model as Options::existing says. All ranks decide
  // the same, because no version is made until all have joined.
  absl::Status CreateOrReplaceModel(absl::Duration timeout) const;
  // Why this launch may not open the run again.
  absl::Status FencedError(absl::Duration timeout) const;

  const std::shared_ptr<Client> client_;
  const Options options_;
};

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_TRAINER_RUN_JOINER_H_
