// SPDX-License-Identifier: Apache-2.0
//
// A rank and a reader of a uniformly filled model, with our client; the rank repeats, abandons and
// doubles a fifth of its pushes.
#ifndef EMA_TESTS_INTEGRATION_FILL_RANK_H_
#define EMA_TESTS_INTEGRATION_FILL_RANK_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <random>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "tests/integration/fill_model.h"
#include "tests/integration/history.h"

namespace ema {

// Which life of the trainer is on, and which of its ranks is left to another process. Thread-safe.
class FillLives {
 public:
  struct Life {
    int64_t number = 0;
    int64_t left_out_rank = -1;
    std::string launch_id() const { return "life-" + std::to_string(number); }
  };
  Life now() const ABSL_LOCKS_EXCLUDED(mu_);
  Life Begin(int64_t left_out_rank) ABSL_LOCKS_EXCLUDED(mu_);
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);
  bool stopped() const ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until another life than `number` is on in which `rank` has a part, or the end. False: the
  // end.
  bool AwaitAfter(int64_t number, int64_t rank) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  mutable absl::Mutex mu_;
  Life life_ ABSL_GUARDED_BY(mu_);
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
};

// What was injected.
struct FillCounts {
  std::atomic<int64_t> pushes = 0;  // Begun, whatever came of them.
  std::atomic<int64_t> repeated = 0;
  std::atomic<int64_t> other_content = 0;
  std::atomic<int64_t> abandoned = 0;
  std::atomic<int64_t> doubled = 0;  // By two clients at once.
  std::atomic<int64_t> resumed = 0;  // By more than one stream.
  std::atomic<int64_t> failed = 0;   // Of those that nobody injected: lost steps.
  std::atomic<int64_t> failed_pulls = 0;
};

// How a rank or a reader comes to the server.
enum class FillWay {
  kSharedMemory,
  kTcp,
  kProxy,  // Its connections are cut.
};

// One rank, in all lives but those that leave it out. For one thread.
class FillRank {
 public:
  FillRank(const std::string& address, FillWay way, int64_t rank, const FillLives* lives,
           History* history, FillCounts* counts);

  // Pushes until the lives are stopped.
  void Run();

 private:
  // One life, until it has been fenced.
  void Live(const FillLives::Life& life);
  // One step, by any of the ways. False: the life is over.
  bool PushStep(int64_t step);
  // A push, perhaps with one of the same rank beside it.
  absl::StatusOr<Version> Push(int64_t step);
  absl::StatusOr<Version> PushTwice(int64_t step);
  // A push that is given up. OK: it had committed.
  absl::StatusOr<Version> PushAndAbandon(int64_t step);
  // Sends a committed step again, as it was or otherwise.
  void Repeat(int64_t step, const Version& version);
  std::unique_ptr<PendingPush> Start(ema::Run& run, int64_t step, const FillBytes& bytes);
  absl::StatusOr<Version> Finish(PendingPush* push, int64_t step);
  bool OneOf(int64_t n) { return static_cast<int64_t>(random_() % n) == 0; }

  const FillWay way_;
  const int64_t rank_;
  const FillLives& lives_;
  History& history_;
  FillCounts& counts_;
  std::mt19937 random_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Client> twin_client_;

  // Of the life that is on.
  std::unique_ptr<ema::Run> run_;
  std::unique_ptr<ema::Run> twin_;
  std::unique_ptr<FillBytes> bytes_;
};

// Pulls both tracks, mostly the newest version, until the lives are stopped.
void PullFilled(const std::string& address, FillWay way, int puller, const FillLives& lives,
                History& history, FillCounts& counts);

}  // namespace ema

#endif  // EMA_TESTS_INTEGRATION_FILL_RANK_H_
