// SPDX-License-Identifier: Apache-2.0
//
// A real RpcServer on a free port, and a plain gRPC client of the published contract: protobuf
// messages, no code of ours.
#ifndef EMA_TESTS_RPC_RPC_FIXTURE_H_
#define EMA_TESTS_RPC_RPC_FIXTURE_H_

#include <grpcpp/grpcpp.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/v1/ema_service.grpc.pb.h"
#include "ema/v1/error.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "server/base/crc32c.h"
#include "server/core/checkpoints.h"
#include "server/rpc/rpc_server.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/test_device.h"

namespace ema {

struct CallResult {
  grpc::Status status;
  v1::ErrorDetail detail;
};

class RpcFixture : public testing::Test {
 protected:
  static constexpr int64_t kElements = 1000;

  // Listens on a free port of 127.0.0.1, unless told other addresses.
  void StartServer(RpcServer::Options options = {}) {
    if (options.listen_addresses == RpcServer::Options().listen_addresses) {
      options.listen_addresses = {"127.0.0.1:0"};
    }
    ModelStore::Options store_options;
    store_options.memory_bytes = int64_t{1} << 30;
    store_options.model.incarnation = 7;
    if (device_ == nullptr) device_ = NewTestDevice(int64_t{64} << 20);
    store_ = std::make_shared<ModelStore>(device_, store_options);
    auto server = RpcServer::Start(store_, checkpoints_, options);
    ASSERT_THAT(server, IsOk());
    server_ = *std::move(server);
    address_ = absl::StrCat("127.0.0.1:", server_->port());
    channel_ = NewChannel();
    stub_ = v1::EmaService::NewStub(channel_);
  }

  std::shared_ptr<grpc::Channel> NewChannel() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetMaxSendMessageSize(-1);
    return grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), arguments);
  }

  static CallResult Result(const grpc::Status& status, const grpc::ClientContext& context) {
    CallResult result{status, {}};
    const auto& trailers = context.GetServerTrailingMetadata();
    if (auto it = trailers.find("ema-error-detail-bin"); it != trailers.end()) {
      result.detail.ParseFromArray(it->second.data(), static_cast<int>(it->second.size()));
    }
    return result;
  }

  static v1::CreateModelRequest CreateRequest(const std::string& model = "m") {
    v1::CreateModelRequest request;
    request.set_model(model);
    v1::TensorSpec* const tensor = request.mutable_manifest()->add_tensors();
    tensor->set_name("w");
    tensor->set_dtype(v1::DTYPE_FLOAT32);
    tensor->add_shape(kElements);
    v1::Track* track = request.add_tracks();
    track->set_name("ema");
    (*track->mutable_schedule())["half_life"] = "1ba";
    track = request.add_tracks();
    track->set_name("raw");
    (*track->mutable_schedule())["copy"] = "true";
    return request;
  }

  void CreateAndOpen() {
    grpc::ClientContext create_context;
    v1::CreateModelResponse created;
    const grpc::Status status = stub_->CreateModel(&create_context, CreateRequest(), &created);
    ASSERT_TRUE(status.ok()) << status.error_code() << ": " << status.error_message();
    v1::OpenRunRequest request;
    request.set_model("m");
    request.set_launch_id("launch");
    request.set_world_size(1);
    request.set_manifest_digest(created.model().manifest_digest());
    v1::Shard* const shard = request.mutable_layout()->add_shards();
    shard->add_offsets(0);
    shard->add_extents(kElements);
    grpc::ClientContext context;
    ASSERT_TRUE(stub_->OpenRun(&context, request, &run_).ok());
    ASSERT_TRUE(run_.ready());
  }

  v1::PushRequest Header(int64_t step) const {
    v1::PushRequest request;
    v1::PushHeader& header = *request.mutable_header();
    header.set_model("m");
    header.set_run_epoch(run_.run_epoch());
    header.set_layout_digest(run_.layout_digest());
    header.set_step(step);
    header.mutable_time()->set_batch(step);
    return request;
  }
  static v1::PushRequest Chunk(int64_t offset, const std::string& data) {
    v1::PushRequest request;
    request.mutable_chunk()->set_offset(offset);
    request.mutable_chunk()->set_crc32c(Crc(data));
    request.mutable_chunk()->set_data(data);
    return request;
  }
  static v1::PushRequest Commit(int64_t chunks, const std::string& data) {
    v1::PushRequest request;
    request.mutable_commit()->set_chunk_count(chunks);
    request.mutable_commit()->set_total_bytes(static_cast<int64_t>(data.size()));
    request.mutable_commit()->set_digest(Crc(data));
    return request;
  }
  static uint32_t Crc(const std::string& data) {
    return Crc32c(0, std::as_bytes(std::span(data.data(), data.size())));
  }
  static std::string Filled(float value) {
    std::string bytes;
    for (int64_t i = 0; i < kElements; ++i) {
      bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
    }
    return bytes;
  }

  // Sends `messages` and ends the stream.
  CallResult Push(const std::vector<v1::PushRequest>& messages, v1::PushResponse* response) {
    grpc::ClientContext context;
    auto writer = stub_->Push(&context, response);
    for (const v1::PushRequest& message : messages) {
      if (!writer->Write(message)) break;
    }
    writer->WritesDone();
    return Result(writer->Finish(), context);
  }
  CallResult PushFilled(int64_t step, float value, v1::PushResponse* response) {
    const std::string data = Filled(value);
    return Push({Header(step), Chunk(0, data.substr(0, 2400)), Chunk(2400, data.substr(2400)),
                 Commit(2, data)},
                response);
  }

  struct Pulled {
    CallResult result;
    v1::PullHeader header;
    std::string data;
    bool complete = false;  // The trailer came, and agrees.
  };
  Pulled Pull(const std::string& track, int64_t version = 0, const std::string& model = "m") {
    v1::PullRequest request;
    request.set_model(model);
    request.set_track(track);
    request.set_version(version);
    return Pull(request);
  }
  Pulled Pull(const v1::PullRequest& request) {
    grpc::ClientContext context;
    auto reader = stub_->Pull(&context, request);
    Pulled pulled;
    v1::PullResponse response;
    while (reader->Read(&response)) {
      if (response.has_header()) pulled.header = response.header();
      if (response.has_chunk()) {
        EXPECT_EQ(response.chunk().offset(),
                  request.offset() + static_cast<int64_t>(pulled.data.size()));
        EXPECT_EQ(response.chunk().crc32c(), Crc(response.chunk().data()));
        pulled.data += response.chunk().data();
      }
      if (response.has_trailer()) {
        const v1::PullTrailer& trailer = response.trailer();
        pulled.complete = trailer.digest() == Crc(pulled.data) &&
                          trailer.total_bytes() == static_cast<int64_t>(pulled.data.size());
      }
    }
    pulled.result = Result(reader->Finish(), context);
    return pulled;
  }

  // No disk, but one that fails to forget.
  class NoDisk final : public Checkpoints {
   public:
    absl::Status SetAsideAll(std::string_view) override {
      return std::exchange(forget_status, absl::OkStatus());
    }
    absl::Status forget_status;  // What the next DeleteModel finds.
  };
  NoDisk no_disk_;
  Checkpoints* checkpoints_ = &no_disk_;  // What StartServer() gives the server.
  std::shared_ptr<Device> device_;        // Null: StartServer() makes the one of tests.
  std::shared_ptr<ModelStore> store_;
  std::unique_ptr<RpcServer> server_;
  std::string address_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::EmaService::Stub> stub_;
  v1::OpenRunResponse run_;
};

}  // namespace ema

#endif  // EMA_TESTS_RPC_RPC_FIXTURE_H_
