// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/bench/background.h"
#include "tests/bench/rows.h"

namespace ema::bench {
namespace {

constexpr double kMilliseconds = 1e3;

// Evaluators that pull again and again what is old when they begin.
std::shared_ptr<Background> NewReaders(const ServerProcess& server,
                                       const std::shared_ptr<const Trainer>& trainer, int count) {
  return std::make_shared<Background>(count, [&server, trainer]() -> std::function<void()> {
    const std::shared_ptr<Client> client =
        Must(Client::Create(server.address(), {.same_host_lane = false}));
    const auto memory = std::make_shared<const Arena>(trainer->weights().total_bytes());
    return [client, memory, trainer] {
      const Version latest = Must(client->GetModel(trainer->model())).latest.value();
      const absl::Status pulled =
          Pull(*client, trainer->model(), memory->bytes(), {.version = latest.number - 1});
      // An old version may go between the two calls: then the next.
      if (!absl::IsOutOfRange(pulled)) Must(pulled);
    };
  });
}

// What the server's formula, which it logs when it starts, allows beside models: receive windows,
// lanes, freed buffers, and what it begins with.
double BytesBesideModels(const std::string& server) {
  ChildProcess process(
      {"/bin/sh", "-c", absl::StrCat("exec ", server, " --listen 127.0.0.1:0 2>&1")},
      ChildProcess::Stop::kTerminate);
  while (true) {
    const std::string line = process.ReadLine();
    if (line.find(" info memory ") == std::string::npos) continue;
    double total = 0;
    double models = 0;
    const size_t of_total = line.find(" at_most_bytes=");
    const size_t of_models = line.find(" models=");
    if (of_total == std::string::npos || of_models == std::string::npos ||
        std::sscanf(line.c_str() + of_total, " at_most_bytes=%lf", &total) != 1 ||
        std::sscanf(line.c_str() + of_models, " models=%lf", &models) != 1) {
      Die(absl::StrCat("not the formula of the server's memory: ", line));
    }
    return total - models;
  }
}

}  // namespace

Row PushWhileOthersRead(Bench& bench) {
  constexpr int kReaders = 8;
  constexpr int kPushes = 10;
  const auto weights = std::make_shared<const Weights>(bench.standard_bytes() / 4, 400);
  // Each reader may hold another version.
  const auto trainer = std::make_shared<Trainer>(
      bench.server(), "busy", weights, Trainer::Options{.max_pinned_versions = kReaders + 1});
  trainer->WarmUp();
  const std::shared_ptr<Background> readers = NewReaders(bench.server(), trainer, kReaders);
  const auto commits = [trainer] {
    std::vector<double> milliseconds;
    for (int i = 0; i < kPushes; ++i) milliseconds.push_back(trainer->Push() * kMilliseconds);
    return milliseconds;
  };
  return {.key = "readers",
          .name = absl::StrCat("commit (last byte's leaving to reply) while ", kReaders,
                               " evaluators pull old versions"),
          .unit = "ms",
          .ours = {.name = "ours",
                   .run =
                       [commits, readers] {
                         readers->Start();
                         std::vector<double> milliseconds = commits();
                         readers->Pause();
                         return milliseconds;
                       }},
          .peer = {.name = "alone", .run = commits},
          .goal = AtMost(2),
          .statistic = Statistic::kP99};
}

Row CommitAfterIdleness(Bench& bench) {
  constexpr double kLimitMs = 10;
  // So small that all of a push is the latency of its first byte, and of the reply.
  const auto trainer =
      std::make_shared<Trainer>(bench.server(), "idle", std::make_shared<const Weights>(4096, 1));
  trainer->WarmUp();
  const auto gaps = std::make_shared<std::mt19937>(1);
  return {.key = "idle",
          .name = "push of 4 kB after 1 to 2.2 s of idleness, to its reply",
          .unit = "ms",
          .ours = {.name = "ours",
                   .run =
                       [trainer, gaps] {
                         std::uniform_real_distribution<double> seconds(1.0, 2.2);
                         absl::SleepFor(absl::Seconds(seconds(*gaps)));
                         return std::vector<double>{SecondsOf([&] { trainer->Push(); }) *
                                                    kMilliseconds};
                       }},
          .peer = Limit(kLimitMs),
          .goal = AtMost(1),
          .statistic = Statistic::kP99,
          .min_rounds = bench.options().idle_commits,
          .max_rounds = bench.options().idle_commits,
          .warm_up_rounds = 0};
}

Row ServerMemory(Bench& bench) {
  constexpr double kMegabyte = 1e6;
  constexpr double kAllowanceMb = 100;
  return {
      .key = "memory",
      .name = "server's memory at most, in all rows before this",
      .unit = "MB",
      .ours = {.name = "ours",
               .run =
                   [&bench] {
                     return std::vector<double>{
                         static_cast<double>(PeakResidentBytes(bench.server().pid())) / kMegabyte};
                   }},
      .peer = {.name = "the formula + 100 MB",
               .run =
                   [&bench] {
                     const double bytes = BytesBesideModels(bench.options().server) +
                                          static_cast<double>(bench.most_reserved_bytes());
                     return std::vector<double>{bytes / kMegabyte + kAllowanceMb};
                   }},
      .goal = AtMost(1),
      .max_rounds = 1,
      .warm_up_rounds = 0};
}

}  // namespace ema::bench
