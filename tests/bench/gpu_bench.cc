// SPDX-License-Identifier: Apache-2.0
//
// What a GPU makes of it, row by row, each beside its peer, in turns and in one run. Prints what
// data_bench does; tests/gpu.sh makes the report. Where there is no GPU each row says so.
//
//   gpu_bench --server build/release/server/ema-server [--row gpu_fold] [--seconds 5]
#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "server/device/cuda_accelerator.h"
#include "tests/bench/row.h"
#include "tests/bench/rows_gpu.h"
#include "tests/testutil/fake_accelerator.h"

namespace ema::bench {
namespace {

struct Entry {
  Row row;
  void (*fill_in)(const GpuBench&, Row&);
};

// Of milliseconds each, until a GPU that was at rest has its clocks up.
constexpr int kClockRounds = 10;

// The sides are filled in where there is a GPU.
std::vector<Entry> AllRows() {
  return {
      {{.key = "gpu_fold",
        .name = "fold of one float32 track, by the kernel (bytes moved)",
        .unit = "GB/s",
        .peer = {.name = "copy on the device of the same bytes moved"},
        .goal = AtLeast(0.95),
        .warm_up_rounds = kClockRounds},
       FoldBesideCopy},
      {{.key = "gpu_tracks_bytes",
        .name = "4 tracks in one pass of the kernel (bytes moved)",
        .unit = "GB/s",
        .peer = {.name = "copy on the device of the same bytes moved"},
        .goal = AtLeast(0.95),
        .warm_up_rounds = kClockRounds},
       FourTracksBesideCopy},
      {{.key = "gpu_tracks",
        .name = "4 tracks in one pass of the kernel",
        .unit = "s",
        .peer = {.name = "4 passes of one track"},
        .goal = AtMost(0.75),
        .warm_up_rounds = kClockRounds},
       FourTracksAtOnce},
      {{.key = "gpu_tensors_kernel",
        .name = "tensors of 1000 elements, each in tiles of its own, by the kernel",
        .unit = "s",
        .peer = {.name = "one tensor of the same bytes"},
        .goal = AtMost(1.1),
        .warm_up_rounds = kClockRounds},
       SmallTensorsInOneTable},
      {{.key = "gpu_tensors",
        .name = "tensors of 1000 elements, pushed from host memory without a network",
        .unit = "s",
        .peer = {.name = "one tensor of the same bytes"},
        .goal = AtMost(1.1)},
       SmallTensorsArriving},
      {{.key = "gpu_receive",
        .name = "host to device while receiving, from host memory without a network",
        .unit = "GB/s",
        .peer = {.name = "one copy of pinned memory, nothing else"},
        .goal = AtLeast(0.95)},
       ReceiveBesideCopy},
      {{.key = "gpu_push",
        .name = "push to commit over TCP, averages on the GPU",
        .unit = "s",
        .peer = {.name = "averages in host memory"},
        .goal = AtMost(1.05)},
       PushBesideCpu},
      {{.key = "gpu_lane_push",
        .name = "push through the same-host lane, averages on the GPU",
        .unit = "s",
        .peer = {.name = "averages in host memory"},
        .goal = AtMost(1.05)},
       PushThroughMemoryBesideCpu},
      {{.key = "gpu_second_reader",
        .name = "the GPU's work for the second reader of a version",
        .unit = "pieces",
        .peer = {.name = "for the first"},
        .goal = AtMost(0),
        .max_rounds = 5},
       SecondReader},
      {{.key = "gpu_bfloat16",
        .name = "copied to the host for a pull as bfloat16",
        .unit = "GB",
        .peer = {.name = "as float32"},
        .goal = AtMost(0.5),
        .max_rounds = 5},
       PullAsBfloat16},
      // Last: a torch that does not work ends the rows.
      {{.key = "gpu_tracks_foreach",
        .name = "4 tracks in one pass of the kernel",
        .unit = "s",
        .peer = {.name = "torch._foreach_lerp_ for each track, in place"}},
       FourTracksBesideForeach},
      {{.key = "gpu_tracks_loop",
        .name = "4 tracks in one pass of the kernel",
        .unit = "s",
        .peer = {.name = "lerp_ for each track and tensor, in place"}},
       FourTracksBesideLoop},
  };
}

int Main(int argc, char** argv) {
  GpuBench bench;
  bench.options.megabytes = 1000;
  // What the goals are about is small.
  MeasureOptions measure{.error = 0.01};
  std::vector<std::string> chosen;
  bool is_fake = false;
  bool is_list = false;
  CLI::App app("A GPU beside its peers");
  app.add_option("--server", bench.options.server, "The ema-server binary");
  app.add_option("--python", bench.options.python, "A Python with torch; without: no such rows");
  app.add_option("--scripts", bench.options.scripts, "The folder of the peers in Python")
      ->capture_default_str();
  app.add_option("--row", chosen, "Its key; repeatable; default: all");
  app.add_option("--megabytes", bench.options.megabytes, "Size of the weights")
      ->check(CLI::Range(4, 16'000))
      ->capture_default_str();
  app.add_option("--repeats", bench.repeats, "Folds of weights on the GPU that are timed as one")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--streams", bench.streams,
                 "Streams of gpu_receive; 0: as many as a server here has threads")
      ->check(CLI::Range(0, 64))
      ->capture_default_str();
  app.add_option("--slab-bytes", bench.slab_bytes,
                 "Of each of the two slabs of a stream of gpu_receive")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->check(CLI::Range(int64_t{1} << 16, int64_t{1} << 30))
      ->check([](const std::string& text) {
        return std::stoll(text) % 64 == 0 ? "" : "must be a multiple of 64";
      })
      ->capture_default_str();
  app.add_option("--seconds", measure.seconds, "The longest that a row is measured")
      ->capture_default_str();
  app.add_option("--rounds", measure.max_rounds, "The most rounds of a row")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  app.add_flag("--fake", is_fake, "On the CPU, as if it were a GPU: that it runs, not how fast");
  app.add_flag("--list", is_list, "Prints the keys of all rows, and does nothing else");
  CLI11_PARSE(app, argc, argv);
  if (is_list) {
    for (const Entry& entry : AllRows()) std::cout << entry.row.key << "\n";
    return 0;
  }
  if (bench.options.server.empty()) {
    std::cerr << "--server is required\n";
    return 1;
  }

  std::string missing;
  if (is_fake) {
    bench.accelerator = std::make_shared<FakeAccelerator>(
        FakeAccelerator::Options{.memory_bytes = int64_t{1} << 40});
    bench.server_device = "cpu";
  } else {
    absl::StatusOr<std::shared_ptr<Accelerator>> gpu = MakeCudaAccelerator(0);
    if (absl::IsFailedPrecondition(gpu.status())) {
      missing = absl::StrCat("both: ", gpu.status().message());
    } else {
      bench.accelerator = Must(std::move(gpu));
    }
  }
  for (Entry& entry : AllRows()) {
    Row row = std::move(entry.row);
    if (!chosen.empty() && std::find(chosen.begin(), chosen.end(), row.key) == chosen.end()) {
      continue;
    }
    row.missing = missing;
    if (missing.empty()) entry.fill_in(bench, row);
    const nlohmann::json result = Measure(row, measure);
    std::cout << result.dump() << std::endl;
    std::cerr << Summary(result) << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace ema::bench

int main(int argc, char** argv) { return ema::bench::Main(argc, argv); }
