// SPDX-License-Identifier: Apache-2.0
//
// A model on several servers of this machine, beside the same model on one.
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/bench/rows.h"
#include "tests/testutil/etcd_cluster.h"
#include "tests/testutil/free_ports.h"

namespace ema::bench {
namespace {

// A group of real servers, which meet in an etcd of their own, and a model on all of them.
class TrainedGroup {
 public:
  TrainedGroup(const std::string& server_binary, int size, const std::string& model,
               std::shared_ptr<const Weights> weights)
      // A benchmark that fails ends at once; etcd must not survive it.
      : etcd_(Must(EtcdCluster::Start({.launcher = {"/usr/bin/setpriv", "--pdeathsig", "KILL"}}))),
        servers_(StartServers(server_binary, size, etcd_->endpoints())),
        client_(Must(Client::Create(address(), {.same_host_lane = false}))),
        trainer_(*servers_.back(), model, std::move(weights)) {
    trainer_.WarmUp();
  }

  Client& client() const { return *client_; }
  const ServerProcess& last_server() const { return *servers_.back(); }
  Trainer& trainer() { return trainer_; }
  // As Bench::Ours().
  Side AsSide() const {
    Side side{.name = absl::StrCat("a group of ", servers_.size()),
              .gigabytes = trainer_.weights().gigabytes(),
              .client_pid = getpid()};
    for (const auto& server : servers_) side.server_pids.push_back(server->pid());
    return side;
  }

 private:
  using Servers = std::vector<std::unique_ptr<const ServerProcess>>;

  static Servers StartServers(const std::string& binary, int size, const std::string& etcd) {
    Servers servers;
    for (const int port : FindFreePorts(size)) {
      const std::string address = absl::StrCat("127.0.0.1:", port);
      servers.push_back(std::make_unique<const ServerProcess>(
          binary,
          std::vector<std::string>{"--listen", address, "--advertise", address, "--etcd", etcd,
                                   "--group", "bench", "--member", absl::StrCat("ema-", port)}));
    }
    return servers;
  }
  // The last server knows all members.
  const std::string& address() const { return servers_.back()->address(); }

  const std::unique_ptr<EtcdCluster> etcd_;
  const Servers servers_;
  const std::unique_ptr<Client> client_;
  Trainer trainer_;
};

// So small that a push takes as long as its first byte, and the reply, are on their way.
constexpr size_t kTinyTensorBytes = 4096;

// Models of one tensor, one on each server of a group: the same servers, streams and bytes as for
// one model on all of them, but every server commits alone.
class SeparateModels {
 public:
  SeparateModels(const TrainedGroup& group, size_t server_count) {
    const auto weights = std::make_shared<const Weights>(kTinyTensorBytes, 1);
    std::set<std::string> servers;
    for (int i = 0; servers.size() < server_count; ++i) {
      const std::string name = absl::StrCat("alone", i);
      auto trainer = std::make_unique<Trainer>(group.last_server(), name, weights);
      if (!servers.insert(HomeOf(group.client(), name)).second) continue;
      trainer->WarmUp();
      trainers_.push_back(std::move(trainer));
    }
  }

  // All of them at once, until the last reply.
  void Push() {
    for (const auto& trainer : trainers_) trainer->StartPush();
    for (const auto& trainer : trainers_) trainer->AwaitPush();
  }

 private:
  static std::string HomeOf(Client& client, const std::string& name) {
    for (const GroupInfo::Model& model : Must(client.GetGroup()).models) {
      if (model.name == name) return model.members.front();
    }
    return "";
  }

  std::vector<std::unique_ptr<Trainer>> trainers_;
};

Side OneServer(const Bench& bench, double gigabytes) {
  Side side = bench.Ours(gigabytes);
  side.name = "one server";
  return side;
}

}  // namespace

Row GroupPush(Bench& bench) {
  const std::shared_ptr<const Weights>& weights = bench.weights();
  const auto group =
      std::make_shared<TrainedGroup>(bench.options().server, 2, "push", bench.weights());
  const auto one = std::make_shared<Trainer>(bench.server(), "push", weights);
  one->WarmUp();
  return {.key = "group_push",
          .name = "push to commit over TCP, of a model on 2 servers",
          .unit = "s",
          .ours = TimeOf(group->AsSide(), [group] { group->trainer().Push(); }),
          .peer = TimeOf(OneServer(bench, weights->gigabytes()), [one] { one->Push(); }),
          .goal = AtMost(1.1)};
}

Row GroupPull(Bench& bench) {
  const std::shared_ptr<const Weights>& weights = bench.weights();
  const auto group =
      std::make_shared<TrainedGroup>(bench.options().server, 2, "pull", bench.weights());
  const auto one = std::make_shared<Trainer>(bench.server(), "pull", weights);
  one->Push();
  const auto memory = std::make_shared<Arena>(weights->total_bytes());
  return {.key = "group_pull",
          .name = "pull over TCP, of a model on 2 servers",
          .unit = "GB/s",
          .ours = SpeedOf(group->AsSide(),
                          [group, memory] {
                            Must(Pull(group->client(), group->trainer().model(), memory->bytes()));
                          }),
          .peer = SpeedOf(
              OneServer(bench, weights->gigabytes()),
              [&bench, one, memory] { Must(Pull(bench.client(), one->model(), memory->bytes())); }),
          .goal = AtLeast(1)};
}

Row GroupCommit(Bench& bench) {
  constexpr int kServers = 4;
  constexpr int kPushes = 50;
  constexpr double kMilliseconds = 1e3;
  constexpr double kLimitMs = 1;
  const auto weights = std::make_shared<const Weights>(kServers * kTinyTensorBytes, kServers);
  const auto group =
      std::make_shared<TrainedGroup>(bench.options().server, kServers, "commit", weights);
  const auto separate = std::make_shared<SeparateModels>(*group, kServers);
  return {.key = "group_commit",
          .name = absl::StrCat("push of a tiny model on ", kServers,
                               " servers, less that of a model on each of them"),
          .unit = "ms",
          .ours = {.name = "ours",
                   .run =
                       [group, separate] {
                         std::vector<double> milliseconds;
                         for (int i = 0; i < kPushes; ++i) {
                           const double together = SecondsOf([&] {
                             group->trainer().StartPush();
                             group->trainer().AwaitPush();
                           });
                           const double alone = SecondsOf([&] { separate->Push(); });
                           milliseconds.push_back((together - alone) * kMilliseconds);
                         }
                         return milliseconds;
                       }},
          .peer = Limit(kLimitMs),
          .goal = AtMost(1)};
}

}  // namespace ema::bench
