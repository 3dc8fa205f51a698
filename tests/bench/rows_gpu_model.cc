// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "server/device/accelerator_device.h"
#include "tests/bench/core_trainer.h"
#include "tests/bench/counting_accelerator.h"
#include "tests/bench/rows_gpu.h"

namespace ema::bench {
namespace {

// A server of its own, and who pushes to it.
struct PushedServer {
  // Trainers that looked for more could end with different numbers of them.
  static constexpr int64_t kConnections = 4;

  PushedServer(const GpuBench& bench, const std::string& device,
               std::shared_ptr<const Weights> weights, bool same_host_lane)
      : server(bench.options.server, {"--device", device, "--memory-bytes", "32G"}),
        trainer(server, "push", std::move(weights),
                {.same_host_lane = same_host_lane, .max_connections = kConnections}) {
    trainer.WarmUp();
  }

  ServerProcess server;
  Trainer trainer;
};

void PushBesideCpu(const GpuBench& bench, bool same_host_lane, Row& row) {
  const auto weights = std::make_shared<const Weights>(
      static_cast<size_t>(bench.options.megabytes) * 1'000'000, 400);
  const auto push_to = [&](Side side, const std::string& device) {
    const auto pushed = std::make_shared<PushedServer>(bench, device, weights, same_host_lane);
    side.gigabytes = weights->gigabytes();
    side.client_pid = getpid();
    side.server_pids = {pushed->server.pid()};
    return TimeOf(std::move(side), [pushed] { pushed->trainer.Push(); });
  };
  row.ours = push_to(row.ours, bench.server_device);
  row.peer = push_to(row.peer, "cpu");
}

// Readers of a version that is on the GPU, in this process.
class Readers {
 public:
  explicit Readers(const GpuBench& bench)
      : accelerator_(std::make_shared<CountingAccelerator>(bench.accelerator)),
        device_(MakeAcceleratorDevice(accelerator_,
                                      {.kept_free_bytes = std::numeric_limits<int64_t>::max()})),
        trainer_({.parameters = bench.parameters(),
                  .track = {.name = "ema", .schedule = Must(Schedule::Parse("100ba"))},
                  .device = device_}) {}

  // Reads all of it.
  void Read(const Selection& selection = {}) {
    const std::shared_ptr<Reading> reading =
        Must(trainer_.model().readings().Open("ema", 0, 0, selection));
    for (int64_t at = 0; at < reading->total_bytes(); at = reading->ChunkEnd(at)) {
      Must(reading->Read(at, reading->ChunkEnd(at) - at));
    }
  }
  // What the device has done for it: pieces of work, and GB that it has copied to the host.
  double WorkToRead() {
    const int64_t before = accelerator_->work_count();
    Read();
    return static_cast<double>(accelerator_->work_count() - before);
  }
  double GigabytesToRead(const Selection& selection) {
    const int64_t before = accelerator_->bytes_to_host();
    Read(selection);
    return static_cast<double>(accelerator_->bytes_to_host() - before) * 1e-9;
  }
  // Nothing of the version that is read from now on is on the host.
  void Forget() { trainer_.CommitSeconds(); }

 private:
  const std::shared_ptr<CountingAccelerator> accelerator_;
  const std::shared_ptr<Device> device_;
  CoreTrainer trainer_;
};

}  // namespace

void PushBesideCpu(const GpuBench& bench, Row& row) {
  PushBesideCpu(bench, /*same_host_lane=*/false, row);
}

void PushThroughMemoryBesideCpu(const GpuBench& bench, Row& row) {
  PushBesideCpu(bench, /*same_host_lane=*/true, row);
}

void SecondReader(const GpuBench& bench, Row& row) {
  const auto readers = std::make_shared<Readers>(bench);
  row.ours.run = [readers] {
    readers->Forget();
    readers->Read();
    return std::vector<double>{readers->WorkToRead()};
  };
  row.peer.run = [readers] {
    readers->Forget();
    return std::vector<double>{readers->WorkToRead()};
  };
}

void PullAsBfloat16(const GpuBench& bench, Row& row) {
  const auto readers = std::make_shared<Readers>(bench);
  const auto read_as = [readers](const Selection& selection) {
    return [readers, selection] {
      readers->Forget();
      return std::vector<double>{readers->GigabytesToRead(selection)};
    };
  };
  row.ours.run = read_as({.dtype = Dtype::kBFloat16});
  row.peer.run = read_as({});
}

}  // namespace ema::bench
