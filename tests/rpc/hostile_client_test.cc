// SPDX-License-Identifier: Apache-2.0
//
// Clients that break the rules: each is told so, the average does not change, and a good client
// goes on.
#include <arpa/inet.h>
#include <fcntl.h>
#include <grpcpp/generic/generic_stub.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/time/clock.h"
#include "tests/rpc/rpc_fixture.h"

namespace ema {
namespace {

class HostileClientTest : public RpcFixture {
 protected:
  void SetUp() override {
    RpcServer::Options options;
    options.limits.max_push_streams = 4;
    options.limits.max_pull_streams = 4;
    options.limits.stream_timeout = absl::Seconds(5);
    options.limits.session_timeout = absl::Seconds(5);
    StartServer(options);
    CreateAndOpen();
    v1::PushResponse response;
    ASSERT_TRUE(PushFilled(1, 1.0f, &response).status.ok());
  }
  // The average is as it was, and the next step of a good client works.
  void TearDown() override {
    EXPECT_EQ(Pull("ema", 1).data, Filled(1.0f));
    EXPECT_EQ(Pull("ema").header.version().version(), 1);
    v1::PushResponse response;
    const CallResult result = PushFilled(100, 1.0f, &response);
    EXPECT_TRUE(result.status.ok()) << result.status.error_message();
  }

  CallResult PushMessages(const std::vector<v1::PushRequest>& messages) {
    v1::PushResponse response;
    return Push(messages, &response);
  }

  // A call whose messages are the given bytes.
  grpc::Status CallRaw(const std::string& method, const std::vector<std::string>& messages) {
    grpc::GenericStub stub(channel_);
    grpc::CompletionQueue queue;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    auto call = stub.PrepareCall(&context, "/ema.v1.EmaService/" + method, &queue);
    const auto wait = [&queue] {
      void* tag = nullptr;
      bool ok = false;
      return queue.Next(&tag, &ok) && ok;
    };
    call->StartCall(nullptr);
    bool ok = wait();
    for (size_t i = 0; ok && i < messages.size(); ++i) {
      const grpc::Slice slice(messages[i]);
      call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
      ok = wait();
    }
    if (ok) {
      call->WritesDone(nullptr);
      wait();
    }
    grpc::Status status;
    call->Finish(&status, nullptr);
    wait();
    queue.Shutdown();
    while (wait()) {
    }
    return status;
  }
};

TEST_F(HostileClientTest, AStreamThatEndsWithoutItsCommitAppliesNothing) {
  const CallResult result = PushMessages({Header(2), Chunk(0, Filled(9.0f))});
  EXPECT_EQ(result.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(result.detail.reason(), v1::ERROR_REASON_NO_COMMIT);
  EXPECT_EQ(PushMessages({}).detail.reason(), v1::ERROR_REASON_NO_COMMIT);
}

TEST_F(HostileClientTest, MessagesOutOfOrderAreRefused) {
  const std::string data = Filled(9.0f);
  EXPECT_EQ(PushMessages({Chunk(0, data)}).detail.reason(), v1::ERROR_REASON_BAD_REQUEST);
  EXPECT_EQ(PushMessages({Commit(0, "")}).detail.reason(), v1::ERROR_REASON_BAD_REQUEST);
  EXPECT_EQ(PushMessages({Header(2), Header(2)}).detail.reason(), v1::ERROR_REASON_BAD_REQUEST);
  EXPECT_EQ(PushMessages({v1::PushRequest()}).detail.reason(), v1::ERROR_REASON_BAD_REQUEST);
}

TEST_F(HostileClientTest, MalformedAndOversizedMessagesApplyNothing) {
  const std::string header = Header(2).SerializeAsString();
  const std::string chunk = Chunk(0, Filled(9.0f)).SerializeAsString();
  for (const std::string& garbage :
       {std::string("\xff\xff\xff\xff\xff"), chunk.substr(0, chunk.size() - 3),
        std::string(1, '\0'), std::string("\x12\x7f"), std::string(5000, '\x12')}) {
    EXPECT_FALSE(
        CallRaw("Push", {header, garbage, Commit(1, Filled(9.0f)).SerializeAsString()}).ok());
  }
  EXPECT_FALSE(CallRaw("Push", {header, std::string(9 << 20, '\x12')}).ok());
}

TEST_F(HostileClientTest, MalformedRequestsAreRejected) {
  for (const auto& [method, code] : {std::pair("GetModel", grpc::StatusCode::INTERNAL),
                                     std::pair("CreateCheckpoint", grpc::StatusCode::INTERNAL),
                                     std::pair("Watch", grpc::StatusCode::INTERNAL),
                                     std::pair("Pull", grpc::StatusCode::INVALID_ARGUMENT)}) {
    EXPECT_EQ(CallRaw(method, {"\xff\xff\xff"}).error_code(), code) << method;
  }
}

TEST_F(HostileClientTest, ACallWithoutARequestIsRejected) {
  for (const char* method : {"GetModel", "Pull", "Watch"}) {
    EXPECT_EQ(CallRaw(method, {}).error_code(), grpc::StatusCode::INTERNAL) << method;
  }
}

TEST_F(HostileClientTest, OfSeveralRequestsInOneCallTheFirstCounts) {
  v1::GetModelRequest known;
  known.set_model("m");
  v1::GetModelRequest unknown;
  unknown.set_model("unknown");
  for (const std::string& second : {known.SerializeAsString(), std::string("\xff\xff\xff")}) {
    for (const char* method : {"GetModel", "CreateCheckpoint", "Pull", "Watch"}) {
      EXPECT_EQ(CallRaw(method, {unknown.SerializeAsString(), second}).error_code(),
                grpc::StatusCode::NOT_FOUND)
          << method;
    }
  }
}

TEST_F(HostileClientTest, ControlCharactersOfARequestAreEscapedInTheError) {
  const std::string name = "a\x1b[31m\xc2\x9b\n";
  const std::string escaped = R"("a\x1b[31m\xc2\x9b\n")";
  EXPECT_THAT(Pull(name).result.status.error_message(), testing::HasSubstr(escaped));
  v1::CreateModelRequest request = CreateRequest("n");
  request.add_tracks()->set_name(name);
  grpc::ClientContext context;
  v1::CreateModelResponse response;
  EXPECT_THAT(stub_->CreateModel(&context, request, &response).error_message(),
              testing::HasSubstr(escaped));
}

TEST_F(HostileClientTest, ACompressedRequestIsRefused) {
  grpc::ClientContext context;
  context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  v1::GetModelRequest request;
  request.set_model(std::string(1 << 20, 'm'));
  v1::Model response;
  EXPECT_EQ(stub_->GetModel(&context, request, &response).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(HostileClientTest, DamagedAndMisplacedChunksAreRefusedByName) {
  const std::string data = Filled(9.0f);
  v1::PushRequest damaged = Chunk(0, data);
  (*damaged.mutable_chunk()->mutable_data())[100] ^= 1;
  CallResult result = PushMessages({Header(2), damaged});
  EXPECT_EQ(result.status.error_code(), grpc::StatusCode::DATA_LOSS);
  EXPECT_EQ(result.detail.reason(), v1::ERROR_REASON_CHUNK_CORRUPT);
  for (const auto& [offset, length] : {std::pair<int64_t, int64_t>{4, 4000},
                                       {-4, 8},
                                       {1, 4},
                                       {0, 3},
                                       {int64_t{1} << 62, 8},
                                       {INT64_MAX, 8}}) {
    EXPECT_EQ(PushMessages({Header(2), Chunk(offset, data.substr(0, length))}).detail.reason(),
              v1::ERROR_REASON_BAD_CHUNK)
        << offset;
  }
  v1::PushRequest bad_checksum = Chunk(0, data);
  bad_checksum.mutable_chunk()->set_crc32c(-1);
  EXPECT_EQ(PushMessages({Header(2), bad_checksum}).detail.reason(), v1::ERROR_REASON_BAD_REQUEST);
}

TEST_F(HostileClientTest, CommitsThatDoNotFitWhatArrivedAreRefusedByName) {
  const std::string data = Filled(9.0f);
  const std::string begin = data.substr(0, 1600);
  const std::string end = data.substr(2400);
  const v1::PushRequest right = Commit(1, data);
  v1::PushRequest digest = right;
  digest.mutable_commit()->set_digest(right.commit().digest() ^ 1);
  v1::PushRequest chunk_count = right;
  chunk_count.mutable_commit()->set_chunk_count(2);
  v1::PushRequest total_bytes = right;
  total_bytes.mutable_commit()->set_total_bytes(right.commit().total_bytes() - 4);
  struct Case {
    std::string name;
    std::vector<v1::PushRequest> messages;  // After the header.
    grpc::StatusCode code;
    v1::ErrorReason reason;
  };
  const std::vector<Case> cases = {
      {"digest", {Chunk(0, data), digest}, grpc::DATA_LOSS, v1::ERROR_REASON_DIGEST_MISMATCH},
      {"chunk count",
       {Chunk(0, data), chunk_count},
       grpc::INVALID_ARGUMENT,
       v1::ERROR_REASON_COUNT_MISMATCH},
      {"byte count",
       {Chunk(0, data), total_bytes},
       grpc::INVALID_ARGUMENT,
       v1::ERROR_REASON_COUNT_MISMATCH},
      {"hole at the end",
       {Chunk(0, begin), Commit(1, begin)},
       grpc::FAILED_PRECONDITION,
       v1::ERROR_REASON_PUSH_INCOMPLETE},
      {"hole inside",
       {Chunk(0, begin), Chunk(2400, end), Commit(2, begin + end)},
       grpc::FAILED_PRECONDITION,
       v1::ERROR_REASON_PUSH_INCOMPLETE},
      {"no bytes", {Commit(0, "")}, grpc::FAILED_PRECONDITION, v1::ERROR_REASON_PUSH_INCOMPLETE},
  };
  int64_t step = 1;
  for (const Case& bad : cases) {
    SCOPED_TRACE(bad.name);
    // A step each: what an earlier case covered does not fill a hole.
    std::vector<v1::PushRequest> messages = {Header(++step)};
    messages.insert(messages.end(), bad.messages.begin(), bad.messages.end());
    const CallResult result = PushMessages(messages);
    EXPECT_EQ(result.status.error_code(), bad.code) << result.status.error_message();
    EXPECT_EQ(result.detail.reason(), bad.reason) << result.status.error_message();
    const Pulled pulled = Pull("ema");
    EXPECT_EQ(pulled.header.version().version(), 1);
    EXPECT_EQ(pulled.data, Filled(1.0f));
  }
}

TEST_F(HostileClientTest, HeadersThatDoNotFitTheRunAreRefused) {
  const auto refused = [this](const v1::PushRequest& header) {
    return PushMessages({header}).detail.reason();
  };
  v1::PushRequest header = Header(2);
  header.mutable_header()->set_run_epoch(99);
  EXPECT_EQ(refused(header), v1::ERROR_REASON_FENCED);
  header = Header(2);
  header.mutable_header()->set_rank(1);
  EXPECT_EQ(refused(header), v1::ERROR_REASON_BAD_REQUEST);
  header = Header(2);
  header.mutable_header()->set_layout_digest(1);
  EXPECT_EQ(refused(header), v1::ERROR_REASON_LAYOUT_MISMATCH);
  header = Header(2);
  header.mutable_header()->set_model("nope");
  EXPECT_EQ(refused(header), v1::ERROR_REASON_MODEL_NOT_FOUND);
  header = Header(2);
  header.mutable_header()->mutable_time()->set_batch(0);
  EXPECT_EQ(refused(header), v1::ERROR_REASON_BAD_TIME);
  EXPECT_EQ(refused(Header(-1)), v1::ERROR_REASON_BAD_REQUEST);
  EXPECT_EQ(refused(Header(0)), v1::ERROR_REASON_STALE_STEP);
}

TEST_F(HostileClientTest, StreamsBeyondTheLimitAreRefusedAtOnceWithARetryHint) {
  struct OpenStream {
    grpc::ClientContext context;
    v1::PushResponse response;
    std::unique_ptr<grpc::ClientWriter<v1::PushRequest>> writer;
  };
  std::vector<OpenStream> streams(4);
  for (OpenStream& stream : streams) {
    stream.writer = stub_->Push(&stream.context, &stream.response);
  }
  const absl::Time begin = absl::Now();
  CallResult refused;
  // The four take their places when the server has seen them, headers or not.
  do {
    refused = PushMessages({});
  } while (refused.detail.reason() != v1::ERROR_REASON_TOO_MANY_STREAMS &&
           absl::Now() - begin < absl::Seconds(5));
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_GT(refused.detail.retry_delay_ms(), 0);
  // They send nothing: they are ended, and their places are free again.
  for (OpenStream& stream : streams) {
    const CallResult ended = Result(stream.writer->Finish(), stream.context);
    EXPECT_EQ(ended.status.error_code(), grpc::StatusCode::ABORTED);
  }
}

TEST_F(HostileClientTest, OneMomentWithoutDescriptorsDoesNotEndAccepting) {
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const int next_fd = open("/dev/null", O_RDONLY);
  close(next_fd);
  rlimit low = before;
  sockaddr_in server{};
  server.sin_family = AF_INET;
  server.sin_port = htons(static_cast<uint16_t>(server_->port()));
  server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::vector<int> silent;
  for (int i = 0; i < 60; ++i) silent.push_back(socket(AF_INET, SOCK_STREAM, 0));
  // The sockets exist; the server's ends of their connections are what no descriptor is left for.
  low.rlim_cur = next_fd + 60 + 10;
  setrlimit(RLIMIT_NOFILE, &low);
  for (const int fd : silent) connect(fd, reinterpret_cast<sockaddr*>(&server), sizeof(server));
  std::vector<pollfd> refused;
  for (const int fd : silent) refused.push_back({fd, POLLIN, 0});
  EXPECT_GT(poll(refused.data(), refused.size(), 5000), 0) << "no connection was refused";
  for (const int fd : silent) close(fd);
  setrlimit(RLIMIT_NOFILE, &before);

  const auto channel = NewChannel();
  EXPECT_TRUE(
      channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(10)));
  grpc::ClientContext context;
  v1::ListModelsResponse response;
  EXPECT_TRUE(v1::EmaService::NewStub(channel)->ListModels(&context, {}, &response).ok());
}

// Two bytes each, of which a message may hold four million.
TEST_F(HostileClientTest, MillionsOfEmptyEntriesAreRejectedBeforeAnythingIsMadeOfThem) {
  constexpr int kCount = 1'000'000;
  const auto create = [this](const v1::CreateModelRequest& request) {
    grpc::ClientContext context;
    v1::CreateModelResponse response;
    return Result(stub_->CreateModel(&context, request, &response), context);
  };
  v1::CreateModelRequest tensors = CreateRequest("n");
  for (int i = 0; i < kCount; ++i) tensors.mutable_manifest()->add_tensors();
  EXPECT_THAT(create(tensors).status.error_message(), testing::HasSubstr("1000001 tensors"));
  v1::CreateModelRequest tracks = CreateRequest("n");
  constexpr int kTracks = 400'000;  // In the largest message.
  for (int i = 0; i < kTracks; ++i) (*tracks.add_tracks()->mutable_schedule())["copy"] = "true";
  const CallResult result = create(tracks);
  EXPECT_EQ(result.detail.reason(), v1::ERROR_REASON_BAD_REQUEST);
  EXPECT_THAT(result.status.error_message(), testing::HasSubstr("400002 given"));
  v1::CreateModelRequest rules = CreateRequest("n");
  for (int i = 0; i < kCount; ++i) rules.mutable_tracks(0)->add_tensor_rules();
  EXPECT_THAT(create(rules).status.error_message(), testing::HasSubstr("16000000 bytes"));
  v1::UpdateModelRequest names;
  names.set_model("m");
  for (int i = 0; i < kCount; ++i) names.add_pause_tracks();
  grpc::ClientContext context;
  v1::Model response;
  EXPECT_THAT(stub_->UpdateModel(&context, names, &response).error_message(),
              testing::HasSubstr("1000000 given"));
}

}  // namespace
}  // namespace ema
