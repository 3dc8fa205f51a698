// SPDX-License-Identifier: Apache-2.0
#include "client/cli/bench.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/output.h"
#include "client/cli/progress.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"
#include "server/base/random_hex.h"
#include "server/base/steady_wait.h"

namespace ema::cli {
namespace {

constexpr char kTrack[] = "ema";

struct Measured {
  std::vector<double> gigabytes_per_second;  // Of each round.
  Lane lane = Lane::kGrpc;
};
struct Results {
  Measured push;
  Measured pull;
};

// The memory that this host has for a program now; nullopt: unknown.
std::optional<int64_t> AvailableBytes() {
  std::ifstream file("/proc/meminfo");
  std::string name;
  int64_t kilobytes = 0;
  while (file >> name >> kilobytes) {
    if (name == "MemAvailable:") return kilobytes << 10;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return std::nullopt;
}

absl::Status CheckFits(int64_t bytes) {
  const std::optional<int64_t> available = AvailableBytes();
  // One half for the pushed weights, the other for the pulled ones.
  if (!available.has_value() || bytes <= *available / 2) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kMemoryBudget,
                   absl::StrCat("--bytes: ", FormatBytes(bytes), " given; the host needs twice ",
                                "that, but has ", FormatBytes(*available), " free, enough ", "for ",
                                FormatBytes(*available / 2)));
}

// Weights, as a trainer has them: tensors of 16 MiB at most.
class Weights {
 public:
  explicit Weights(int64_t bytes) : count_(static_cast<size_t>(bytes) / sizeof(float)) {}

  absl::StatusOr<Manifest> MakeManifest() const {
    std::vector<TensorSpec> specs;
    for (size_t begin = 0; begin < count_; begin += kTensorElements) {
      specs.push_back({.name = absl::StrCat("w", specs.size()),
                       .dtype = Dtype::kFloat32,
                       .shape = {static_cast<int64_t>(std::min(kTensorElements, count_ - begin))}});
    }
    return Manifest::Create(std::move(specs));
  }
  void Fill() { values_.assign(count_, 1.0F); }
  // REQUIRES: Fill().
  std::vector<std::span<const std::byte>> Tensors() const {
    std::vector<std::span<const std::byte>> tensors;
    for (size_t begin = 0; begin < count_; begin += kTensorElements) {
      const size_t count = std::min(kTensorElements, count_ - begin);
      tensors.push_back(std::as_bytes(std::span(values_).subspan(begin, count)));
    }
    return tensors;
  }
  int64_t total_bytes() const { return static_cast<int64_t>(count_ * sizeof(float)); }

 private:
  static constexpr size_t kTensorElements = size_t{4} << 20;

  const size_t count_;
  std::vector<float> values_;
};

class Benchmark {
 public:
  Benchmark(const Session& session, std::string model, const BenchOptions& options)
      : session_(session),
        model_(std::move(model)),
        rounds_(options.rounds),
        weights_(options.bytes) {}

  absl::StatusOr<Results> Run() {
    EMA_ASSIGN_OR_RETURN(const Manifest manifest, weights_.MakeManifest());
    EMA_ASSIGN_OR_RETURN(Schedule schedule, Schedule::Parse("100ba"));
    EMA_RETURN_IF_ERROR(session_.client
                            ->CreateModel(model_, manifest,
                                          {TrackConfig{.name = kTrack, .schedule = schedule}},
                                          {.max_pinned_versions = 1}, session_.timeout)
                            .status());
    // Filled only now, because the server has accepted the model.
    weights_.Fill();
    pulled_.resize(static_cast<size_t>(weights_.total_bytes()));
    EMA_ASSIGN_OR_RETURN(run_,
                         session_.client->OpenRun(model_, Client::RunOptions(), session_.timeout));
    Results results;
    // The first round does not count: it connects, and touches memory for the first time.
    for (int64_t round = 0; round <= rounds_; ++round) {
      // Calls check this only while they wait.
      if (session_.is_interrupted()) return absl::CancelledError("interrupted");
      EMA_RETURN_IF_ERROR(Push(round + 1, results.push));
      EMA_RETURN_IF_ERROR(Pull(results.pull));
      if (round == 0) results = Results();
    }
    return results;
  }

 private:
  absl::Status Push(int64_t step, Measured& measured) {
    const SteadyTime begin = SteadyNow();
    EMA_ASSIGN_OR_RETURN(const std::unique_ptr<PendingPush> push,
                         run_->StartPush(step, TrainingTime::AtBatch(step), weights_.Tensors(),
                                         session_.disk_timeout()));
    EMA_RETURN_IF_ERROR(push->Wait().status());
    Note(Since(begin), push->stats().lane, measured);
    return absl::OkStatus();
  }

  absl::Status Pull(Measured& measured) {
    const SteadyTime begin = SteadyNow();
    EMA_ASSIGN_OR_RETURN(
        const PullInfo info,
        session_.client->Pull(
            model_, kTrack, Client::PullOptions(),
            [this](const PullInfo& coming) -> absl::StatusOr<std::span<std::byte>> {
              if (coming.total_bytes != weights_.total_bytes()) {
                return absl::InternalError(absl::StrCat("the pulled track has ", coming.total_bytes,
                                                        " bytes, expected ",
                                                        weights_.total_bytes()));
              }
              return std::span(pulled_);
            },
            session_.disk_timeout()));
    Note(Since(begin), info.lane, measured);
    return absl::OkStatus();
  }

  void Note(absl::Duration duration, Lane lane, Measured& measured) const {
    measured.gigabytes_per_second.push_back(static_cast<double>(weights_.total_bytes()) / 1e9 /
                                            absl::ToDoubleSeconds(duration));
    measured.lane = lane;
  }

  const Session& session_;
  const std::string model_;
  const int64_t rounds_;
  Weights weights_;
  std::vector<std::byte> pulled_;
  std::unique_ptr<::ema::Run> run_;
};

Json ToJson(const Measured& measured) {
  const Speeds speeds = SpeedsOf(measured.gigabytes_per_second);
  return {{"gigabytes_per_second",
           {{"median", speeds.median}, {"least", speeds.least}, {"most", speeds.most}}},
          {"lane", LaneName(measured.lane)}};
}

std::string ToText(const char* what, const Measured& measured) {
  const Speeds speeds = SpeedsOf(measured.gigabytes_per_second);
  return absl::StrFormat("%s  %.2f GB/s  (%.2f to %.2f)  by %s\n", what, speeds.median,
                         speeds.least, speeds.most, std::string(LaneName(measured.lane)));
}

}  // namespace

Speeds SpeedsOf(std::vector<double> speeds) {
  std::sort(speeds.begin(), speeds.end());
  const size_t half = speeds.size() / 2;
  return {.median = (speeds[half] + speeds[(speeds.size() - 1) / 2]) / 2,
          .least = speeds.front(),
          .most = speeds.back()};
}

absl::Status Bench(const Session& session, const BenchOptions& options) {
  constexpr absl::Duration kLongestDelete = absl::Seconds(20);
  const std::string model = "emactl-bench-" + RandomHex(2);
  Benchmark benchmark(session, model, options);
  EMA_ASSIGN_OR_RETURN(const std::unique_ptr<Client> cleaner, session.new_client());
  const auto remove = [&] {
    return cleaner->DeleteModel(model, /*purge=*/true, std::min(session.timeout, kLongestDelete));
  };
  // Create no model without the right to delete it.
  if (absl::Status allowed = remove(); !allowed.ok()) {
    return absl::IsPermissionDenied(allowed)
               ? WithPrefix(allowed,
                            "bench makes a model and deletes it, so it needs the role admin: ")
               : allowed;
  }
  EMA_RETURN_IF_ERROR(CheckFits(options.bytes));
  const absl::StatusOr<Results> results = benchmark.Run();
  absl::Status removed = remove();
  if (!removed.ok()) {
    PrintError(WithPrefix(removed, absl::StrCat("model ", model, " is left on the server: ")),
               session.json);
  }
  EMA_RETURN_IF_ERROR(results.status());
  EMA_RETURN_IF_ERROR(PrintResult(
      session.json,
      {{"bytes", options.bytes},
       {"rounds", options.rounds},
       {"push", ToJson(results->push)},
       {"pull", ToJson(results->pull)}},
      absl::StrCat(ToText("push to commit", results->push), ToText("pull          ", results->pull),
                   options.rounds, " rounds of ", FormatBytes(options.bytes), ", one track\n")));
  return removed;
}

}  // namespace ema::cli
