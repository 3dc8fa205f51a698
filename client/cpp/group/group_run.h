// SPDX-License-Identifier: Apache-2.0
//
// A run of a model that is on a group of servers.
#ifndef EMA_CLIENT_CPP_GROUP_GROUP_RUN_H_
#define EMA_CLIENT_CPP_GROUP_GROUP_RUN_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/group/partition_map.h"
#include "client/cpp/push/group_part.h"
#include "client/cpp/push/opened_run.h"
#include "client/cpp/push/run_core.h"
#include "ema/client.h"

namespace ema::client_internal {

// One rank of a run on a group. For each partition it has a part: an ordinary run on that
// partition's server, which it joins even if the rank has no shards there. The home's part opens
// the run; the others join it. Thread-safe. It belongs to one incarnation of the model: in another
// one, its pushes fail with FENCED, and another run has to be opened; RejoiningRun does that.
class GroupRun final : public OpenedRun, public std::enable_shared_from_this<GroupRun> {
 public:
  // Joins the run on all servers, in the newest incarnation of the model, with its resume point, if
  // there is one. `model`: a reply to GetModel; it is called again if a newer incarnation has
  // begun, or while a server does not run. Errors as Open().
  static absl::StatusOr<std::shared_ptr<GroupRun>> OpenNewest(std::shared_ptr<Client::Impl> client,
                                                              v1::Model model,
                                                              const Client::RunOptions& options,
                                                              SteadyTime deadline,
                                                              Interrupt* interrupt);
  // Joins the run on all servers. `options` have a launch_id. Errors as Client::OpenRun(), and
  // UNAVAILABLE, GROUP_DEGRADED: a server does not run.
  static absl::StatusOr<std::shared_ptr<GroupRun>> Open(std::shared_ptr<Client::Impl> client,
                                                        PartitionMap map,
                                                        Client::RunOptions options,
                                                        SteadyTime deadline, Interrupt* interrupt);

  Client::Impl& client() const override { return *client_; }
  const std::string& model() const override { return map_.model().name; }
  const Manifest& manifest() const override { return map_.model().manifest; }
  const RankLayout& layout() const override { return layout_; }
  int64_t rank() const override { return rank_; }
  int64_t run_epoch() const override { return home().run_epoch(); }
  std::optional<Version> latest() const override { return home().latest(); }
  RunPlan plan() const override;
  bool may_omit_frozen() const override;
  absl::StatusOr<bool> IsDue(const TrainingTime& now) const override { return home().IsDue(now); }

  // Also returns ABORTED, FENCED: the incarnation of the run has ended. A server that was replaced
  // does not say so, because it does not run.
  absl::Status WaitReady(SteadyTime deadline, Interrupt* interrupt) override;
  absl::Status RefreshPlan(SteadyTime deadline, Interrupt* interrupt) override;
  // The home's answer, with the missing ranges of all servers while the step is open. To abandon a
  // step, it first calls FindRound(): another rank may have begun the step on another server only,
  // and then the home can abandon it only by its round.
  absl::StatusOr<PushProgress> QueryPush(int64_t step, bool abandon_if_unfinished,
                                         SteadyTime deadline, Interrupt* interrupt, bool retry,
                                         std::string_view skip_reason) override;
  absl::StatusOr<std::shared_ptr<RunningPush>> MakePush(PushArguments arguments) override;

  RunCore& home() const { return *parts_.front().run; }
  const NewestRound& round() const { return *round_; }

  // A part to which this rank pushes. Each rank pushes to the parts that have shards of it, and
  // rank 0 also to parts whose tensors have no elements. A rank without any such part pushes to the
  // home.
  struct PushingPart {
    RunCore* run = nullptr;
    std::vector<size_t> places;  // The index in layout() of each of its shards.
  };
  // In the order in which a push sends: this differs between ranks, so that not all of them send to
  // the same server.
  const std::vector<PushingPart>& pushing_parts() const { return pushing_parts_; }

 private:
  struct Part {
    std::shared_ptr<RunCore> run;
    std::vector<size_t> places;
  };

  GroupRun(std::shared_ptr<Client::Impl> client, PartitionMap map, RankLayout layout,
           const Client::RunOptions& options);
  // Creates a part and joins its run.
  absl::Status OpenPart(size_t partition, PartitionMap::RankPart shards, Client::RunOptions options,
                        SteadyTime deadline, Interrupt* interrupt);
  void OrderParts(int64_t world_size);
  // Waits until all ranks have joined. Does not check whether the incarnation has ended.
  absl::Status AwaitRanks(SteadyTime deadline, Interrupt* interrupt);
  // Calls `work` for all parts but the home's at once.
  absl::Status ForOthers(Interrupt* interrupt,
                         absl::FunctionRef<absl::Status(RunCore&, Interrupt*)> work);
  // The round in which a server other than the home has `step` open; 0: none is known to have.
  int64_t FindRound(int64_t step, SteadyTime deadline, Interrupt* interrupt);
  // Adds what is missing on the server of `part` to `progress`.
  absl::Status AddProgress(const PushingPart& part, int64_t step, SteadyTime deadline,
                           Interrupt* interrupt, PushProgress* progress) const;

  const std::shared_ptr<Client::Impl> client_;
  const PartitionMap map_;
  const RankLayout layout_;
  const int64_t rank_;
  const std::shared_ptr<NewestRound> round_;
  // Constant after Open().
  std::vector<Part> parts_;  // By partition.
  std::vector<PushingPart> pushing_parts_;
};

// The partition of `count` to which a rank sends first, so that not all ranks send to the same
// server. The others follow in their order.
int64_t FirstPart(int64_t rank, int64_t world_size, int64_t count);

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_GROUP_GROUP_RUN_H_
