// SPDX-License-Identifier: Apache-2.0
//
// A group of real servers with a model, and the client that trains and reads it.
#ifndef EMA_TESTS_GROUP_TRAINED_GROUP_H_
#define EMA_TESTS_GROUP_TRAINED_GROUP_H_

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ema/client.h"
#include "ema/internal/status_macros.h"
#include "ema/shard.h"
#include "tests/group/group_fixture.h"
#include "tests/testutil/status_matchers.h"

namespace ema::group {

inline constexpr absl::Duration kPatience = absl::Seconds(60);

// A group with the model "m", and a client of a server that need not be the home.
class TrainedGroup : public GroupFixture {
 public:
  // Of the servers that the constructor starts.
  struct Servers {
    int64_t reported_memory_bytes = 0;
    absl::Duration replace_after;
    std::string copy_dir;  // Empty: no copies.
    absl::Duration copy_interval = absl::Milliseconds(10);
    LogSink log;
  };
  // `data_dir`: a directory that all servers share; empty: they save nothing.
  TrainedGroup(int server_count, int tensor_count, const std::string& data_dir = "")
      : TrainedGroup(server_count, tensor_count, data_dir, Servers()) {}
  TrainedGroup(int server_count, int tensor_count, const std::string& data_dir,
               const Servers& servers) {
    data_dir_ = data_dir;
    reported_memory_bytes_ = servers.reported_memory_bytes;
    replace_after_ = servers.replace_after;
    copy_dir_ = servers.copy_dir;
    copy_interval_ = servers.copy_interval;
    log_ = servers.log;
    StartServers(server_count);
    Create("m", 0, tensor_count);
    client_ = *Client::Create(servers_.back()->address());
  }
  void TestBody() override {}
  using GroupFixture::Await;
  using GroupFixture::AwaitMembers;
  using GroupFixture::AwaitReceived;
  using GroupFixture::copy_dir_;
  using GroupFixture::Create;
  using GroupFixture::Describe;
  using GroupFixture::registry_;
  using GroupFixture::Restart;
  using GroupFixture::ServerAt;
  using GroupFixture::servers_;
  using GroupFixture::StartServer;

  Client& client() { return *client_; }
  std::unique_ptr<ema::Run> Open(int64_t rank = 0, int64_t world_size = 1, TensorSet frozen = {},
                                 const std::string& launch_id = "life") {
    const absl::StatusOr<ModelInfo> info = client_->GetModel("m");
    EXPECT_THAT(info, IsOk());
    const absl::StatusOr<RankShare> share = EvenShare(info->manifest, {}, frozen, rank, world_size);
    EXPECT_THAT(share, IsOk());
    auto run = client_->OpenRun("m",
                                {.launch_id = launch_id,
                                 .rank = rank,
                                 .world_size = world_size,
                                 .shards = share->shards,
                                 .frozen_shard_count = share->frozen_shard_count},
                                kPatience);
    EXPECT_THAT(run, IsOk());
    return run.ok() ? *std::move(run) : nullptr;
  }
  struct Pulled {
    PullInfo info;
    std::map<std::string, std::string> tensors;
  };
  absl::StatusOr<Pulled> Pull(const std::string& track, const Client::PullOptions& options = {},
                              const std::string& model = "m") {
    std::string bytes;
    const auto target = [&](const PullInfo& info) -> absl::StatusOr<std::span<std::byte>> {
      bytes.assign(info.total_bytes, '?');
      return std::as_writable_bytes(std::span(bytes.data(), bytes.size()));
    };
    EMA_ASSIGN_OR_RETURN(PullInfo info, client_->Pull(model, track, options, target, kPatience));
    Pulled pulled{std::move(info), {}};
    for (const PulledTensor& tensor : pulled.info.tensors) {
      pulled.tensors[tensor.spec.name] = bytes.substr(tensor.offset, tensor.length_bytes);
    }
    return pulled;
  }

 private:
  std::unique_ptr<Client> client_;
};

// The bytes of a rank at a step: each element has a value of its own.
class Weights {
 public:
  Weights(const ema::Run& run, int64_t step) : layout_(run.layout()) {
    values_.resize(layout_.total_bytes() / sizeof(float));
    for (size_t i = 0; i < values_.size(); ++i) {
      values_[i] = std::sin(static_cast<float>(i) * 0.37f + static_cast<float>(step));
    }
  }
  std::vector<float>& values() { return values_; }
  std::vector<std::span<const std::byte>> shards() const {
    std::vector<std::span<const std::byte>> shards;
    const auto bytes = std::as_bytes(std::span(values_.data(), values_.size()));
    for (int64_t i = 0; i < std::ssize(layout_.shards()); ++i) {
      shards.push_back(bytes.subspan(layout_.shard_start(i),
                                     layout_.shard_start(i + 1) - layout_.shard_start(i)));
    }
    return shards;
  }

 private:
  const RankLayout& layout_;
  std::vector<float> values_;
};

inline absl::StatusOr<Version> Push(ema::Run& run, int64_t step) {
  absl::StatusOr<Version> version =
      run.Push(step, TrainingTime::AtBatch(step), Weights(run, step).shards(), kPatience);
  EXPECT_TRUE(version.ok()) << version.status();
  return version;
}

}  // namespace ema::group

#endif  // EMA_TESTS_GROUP_TRAINED_GROUP_H_
