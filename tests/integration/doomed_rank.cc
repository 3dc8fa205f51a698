// SPDX-License-Identifier: Apache-2.0
//
// One rank of a trainer that pushes some steps rightly and then kills itself in the middle of one.
// Protobuf messages and no client of ours, so that it dies exactly where it is told.
//
//   doomed_rank ADDRESS LAUNCH_ID RANK GOOD_STEPS DEATH
//
// DEATH: 0 after the header, 1 to kFillChunks after so many chunks, one more: after the commit.
#include <grpcpp/grpcpp.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "ema/v1/ema_service.grpc.pb.h"
#include "server/base/crc32c.h"
#include "tests/integration/fill_model.h"

namespace ema {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr absl::Duration kPollInterval = absl::Milliseconds(2);
// A header that the server does not have after this long was refused: other ranks have gone on.
constexpr absl::Duration kHeaderPatience = absl::Seconds(2);

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "doomed_rank: %s\n", what.c_str());
  std::exit(1);
}

class DoomedRank {
 public:
  DoomedRank(const std::string& address, std::string launch_id, int64_t rank)
      : stub_(v1::EmaService::NewStub(
            grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))),
        launch_id_(std::move(launch_id)),
        rank_(rank) {
    ReadManifest();
    Join();
  }

  // True: the step has been committed with this rank.
  bool Push(int64_t step) { return PushUntil(step, kNever); }
  // Does not return if the step came as far as `death`.
  void PushAndDie(int64_t step, int64_t death) { PushUntil(step, death); }

  int64_t latest_step() const { return run_.has_latest() ? run_.latest().step() : 0; }

 private:
  static constexpr int64_t kNever = -1;

  void ReadManifest() {
    grpc::ClientContext context;
    v1::GetModelRequest request;
    request.set_model(kFillModel);
    v1::Model response;
    const grpc::Status status = stub_->GetModel(&context, request, &response);
    if (!status.ok()) Die(status.error_message());
    // The first tensor's rows say the scale.
    const int64_t rows = response.manifest().tensors(0).shape(0);
    const int64_t unit = FillManifest(1).tensor(0).shape[0];
    manifest_ = FillManifest(rows / unit);
    absl::StatusOr<RankLayout> layout = RankLayout::Create(manifest_, FillShards(manifest_, rank_));
    if (!layout.ok()) Die(layout.status().ToString());
    layout_ = std::make_unique<RankLayout>(*std::move(layout));
    bytes_ = std::make_unique<FillBytes>(manifest_, *layout_);
    // Between elements, as even as may be.
    for (int64_t i = 0; i <= kFillChunks; ++i) {
      int64_t end = layout_->total_bytes() * i / kFillChunks;
      while (!layout_->IsElementBoundary(end)) ++end;
      ends_.push_back(end);
    }
  }

  void Join() {
    v1::OpenRunRequest request;
    request.set_model(kFillModel);
    request.set_launch_id(launch_id_);
    request.set_rank(rank_);
    request.set_world_size(kFillRanks);
    request.set_manifest_digest(manifest_.digest());
    for (const Shard& shard : layout_->shards()) {
      v1::Shard* const message = request.mutable_layout()->add_shards();
      message->set_tensor_index(shard.tensor_index);
      for (const int64_t offset : shard.offsets) message->add_offsets(offset);
      for (const int64_t extent : shard.extents) message->add_extents(extent);
    }
    const absl::Time wait_end = absl::Now() + kPatience;
    while (true) {
      grpc::ClientContext context;
      const grpc::Status status = stub_->OpenRun(&context, request, &run_);
      if (!status.ok()) Die(status.error_message());
      if (run_.ready()) return;
      if (absl::Now() > wait_end) Die("the other ranks do not join");
      absl::SleepFor(kPollInterval);
    }
  }

  bool PushUntil(int64_t step, int64_t death) {
    bytes_->Set(FillValue(step));
    grpc::ClientContext context;
    v1::PushResponse response;
    const auto writer = stub_->Push(&context, &response);
    bool is_whole = writer->Write(Header(step));
    if (death == 0) AwaitAndDie(step, 0);
    for (int64_t i = 0; is_whole && i < kFillChunks; ++i) {
      is_whole = writer->Write(Chunk(i));
      if (is_whole && death == i + 1) AwaitAndDie(step, ends_[i + 1]);
    }
    if (is_whole) is_whole = writer->Write(Commit());
    if (is_whole && death == kFillChunks + 1) AwaitAndDie(step, layout_->total_bytes() + 1);
    writer->WritesDone();
    return writer->Finish().ok();
  }

  v1::PushRequest Header(int64_t step) const {
    v1::PushRequest message;
    v1::PushHeader& header = *message.mutable_header();
    header.set_model(kFillModel);
    header.set_run_epoch(run_.run_epoch());
    header.set_rank(rank_);
    header.set_layout_digest(run_.layout_digest());
    header.set_step(step);
    header.mutable_time()->set_batch(step);
    return message;
  }

  v1::PushRequest Chunk(int64_t i) const {
    const std::span<const std::byte> data =
        bytes_->bytes().subspan(ends_[i], ends_[i + 1] - ends_[i]);
    v1::PushRequest message;
    message.mutable_chunk()->set_offset(ends_[i]);
    message.mutable_chunk()->set_crc32c(Crc32c(0, data));
    message.mutable_chunk()->set_data(data.data(), data.size());
    return message;
  }

  v1::PushRequest Commit() const {
    v1::PushRequest message;
    message.mutable_commit()->set_chunk_count(kFillChunks);
    message.mutable_commit()->set_total_bytes(layout_->total_bytes());
    message.mutable_commit()->set_digest(Crc32c(0, bytes_->bytes()));
    return message;
  }

  // Waits until the server has the first `bytes` of the step (one more than all: and the commit),
  // then kills this process. Returns if the step has ended.
  void AwaitAndDie(int64_t step, int64_t bytes) const {
    v1::QueryPushRequest request;
    request.set_model(kFillModel);
    request.set_run_epoch(run_.run_epoch());
    request.set_step(step);
    request.set_rank(rank_);
    const absl::Time begin = absl::Now();
    while (absl::Now() < begin + kPatience) {
      grpc::ClientContext context;
      v1::QueryPushResponse response;
      if (!stub_->QueryPush(&context, request, &response).ok()) return;
      if (response.state() == v1::QueryPushResponse::STATE_COMMITTED) {
        if (bytes > layout_->total_bytes()) kill(getpid(), SIGKILL);
        return;
      }
      if (response.state() == v1::QueryPushResponse::STATE_OPEN) {
        const int64_t arrived =
            response.missing().empty() ? layout_->total_bytes() : response.missing(0).offset();
        const bool is_there =
            bytes > layout_->total_bytes() ? response.rank_committed() : arrived >= bytes;
        if (is_there) kill(getpid(), SIGKILL);
      } else if (bytes > 0 || absl::Now() > begin + kHeaderPatience) {
        return;
      }
      absl::SleepFor(kPollInterval);
    }
    Die("the server does not get what was sent");
  }

  const std::unique_ptr<v1::EmaService::Stub> stub_;
  const std::string launch_id_;
  const int64_t rank_;
  Manifest manifest_;
  std::unique_ptr<RankLayout> layout_;
  std::unique_ptr<FillBytes> bytes_;
  std::vector<int64_t> ends_;  // Of the chunks, after 0.
  v1::OpenRunResponse run_;
};

int Main(int argc, char** argv) {
  int64_t rank = 0;
  int64_t good_steps = 0;
  int64_t death = 0;
  if (argc != 6 || !absl::SimpleAtoi(argv[3], &rank) || !absl::SimpleAtoi(argv[4], &good_steps) ||
      !absl::SimpleAtoi(argv[5], &death)) {
    Die("ADDRESS LAUNCH_ID RANK GOOD_STEPS DEATH");
  }
  DoomedRank doomed(argv[1], argv[2], rank);
  int64_t step = doomed.latest_step();
  const absl::Time wait_end = absl::Now() + kPatience;
  while (absl::Now() < wait_end) {
    step = NextFillStep(step);
    if (good_steps > 0) {
      if (doomed.Push(step)) --good_steps;
    } else {
      doomed.PushAndDie(step, death);
    }
  }
  Die("no step came so far");
}

}  // namespace
}  // namespace ema

int main(int argc, char** argv) { return ema::Main(argc, argv); }
