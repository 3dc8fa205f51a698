// SPDX-License-Identifier: Apache-2.0
//
// What a save costs those who push meanwhile, on a server that has a disk.
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/bench/background.h"
#include "tests/bench/folder.h"
#include "tests/bench/rows.h"

namespace ema::bench {
namespace {

// A server that saves the newest version, again and again, while it is told to.
class SavingServer {
 public:
  explicit SavingServer(Bench& bench)
      : folder_(bench.options().data_dir / "server"),
        server_(bench.options().server, {"--data-dir", folder_.path(), "--keep-last", "1"}),
        trainer_(server_, "saved", bench.weights(), {.max_pinned_versions = 2}),
        saver_(1, [this]() -> std::function<void()> {
          const std::shared_ptr<Client> client = Must(Client::Create(server_.address()));
          return [this, client] { Must(client->CreateCheckpoint(trainer_.model())); };
        }) {
    trainer_.WarmUp();
  }

  Trainer& trainer() { return trainer_; }

  // A side whose rounds are kPushes, while versions are saved or not.
  Side PushSide(std::string name, bool is_saving,
                std::function<std::vector<double>(Trainer&)> push) {
    return {.name = std::move(name),
            .run =
                [this, is_saving, push] {
                  if (is_saving) saver_.Start();
                  std::vector<double> figures = push(trainer_);
                  saver_.Pause();
                  return figures;
                },
            .gigabytes = kPushes * trainer_.weights().gigabytes(),
            .client_pid = getpid(),
            .server_pids = {server_.pid()}};
  }

  // Some of them while the disk is written, some while what was written is read back.
  static constexpr int kPushes = 30;

 private:
  const Folder folder_;
  const ServerProcess server_;
  Trainer trainer_;
  Background saver_;
};

Row PushWhileSaving(Bench& bench, Row row,
                    const std::function<std::vector<double>(Trainer&)>& push) {
  const auto server = std::make_shared<SavingServer>(bench);
  const auto side = [&](const char* name, bool is_saving) {
    Side result = server->PushSide(name, is_saving, push);
    // Keeps the server until the row has gone.
    result.run = [server, run = std::move(result.run)] { return run(); };
    return result;
  };
  row.ours = side("ours", true);
  row.peer = side("while nothing is saved", false);
  return row;
}

}  // namespace

Row PushSpeedWhileSaving(Bench& bench) {
  return PushWhileSaving(
      bench,
      {.key = "saving",
       .name = "pushes over TCP while every version is saved that can be",
       .unit = "GB/s",
       .goal = AtLeast(0.75)},
      [](Trainer& trainer) {
        const double seconds = SecondsOf([&] {
          for (int i = 0; i < SavingServer::kPushes; ++i) trainer.Push();
        });
        return std::vector<double>{SavingServer::kPushes * trainer.weights().gigabytes() / seconds};
      });
}

Row CommitWhileSaving(Bench& bench) {
  return PushWhileSaving(
      bench,
      {.key = "saving_commit",
       .name = "commit (last byte's leaving to reply) while every version is saved that can be",
       .unit = "ms",
       .statistic = Statistic::kP99},
      [](Trainer& trainer) {
        std::vector<double> milliseconds;
        for (int i = 0; i < SavingServer::kPushes; ++i)
          milliseconds.push_back(trainer.Push() * 1e3);
        return milliseconds;
      });
}

}  // namespace ema::bench
