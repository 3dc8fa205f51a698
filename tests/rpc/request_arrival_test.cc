// SPDX-License-Identifier: Apache-2.0
//
// What is told of calls whose request comes late, or never.
#include <grpcpp/generic/generic_stub.h>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "tests/rpc/rpc_fixture.h"

namespace ema {
namespace {

// Remembers how calls have ended.
class Observer final : public ServerObserver {
 public:
  void OnRpcEnded(std::string_view rpc, const absl::Status& status) override {
    absl::MutexLock lock(&mu_);
    ended_[std::string(rpc)] = status;
  }
  void OnPullEnded(const PullEnd& end) override {
    absl::MutexLock lock(&mu_);
    pull_duration_ = end.duration;
  }
  // Waits until a call of `rpc` has ended.
  absl::Status EndOf(const std::string& rpc) const {
    absl::MutexLock lock(&mu_);
    const auto has_ended = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return ended_.contains(rpc); };
    mu_.Await(absl::Condition(&has_ended));
    return ended_.at(rpc);
  }
  absl::Duration pull_duration() const {
    absl::MutexLock lock(&mu_);
    return pull_duration_;
  }

 private:
  mutable absl::Mutex mu_;
  std::map<std::string, absl::Status> ended_ ABSL_GUARDED_BY(mu_);
  absl::Duration pull_duration_ ABSL_GUARDED_BY(mu_);
};

class RequestArrivalTest : public RpcFixture {
 protected:
  void SetUp() override {
    RpcServer::Options options;
    options.observer = &observer_;
    StartServer(options);
  }
  void TearDown() override {
    stream_.reset();
    server_.reset();
  }

  // A call that the server has let in, and that has sent nothing but its headers.
  void Begin(const std::string& method) {
    stream_.reset();  // It lies in the context's memory.
    context_ = std::make_unique<grpc::ClientContext>();
    context_->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    grpc::GenericStub stub(channel_);
    stream_ = stub.PrepareCall(context_.get(), "/ema.v1.EmaService/" + method, &queue_);
    stream_->StartCall(nullptr);
    Next();
    while (server_->usage().arriving_requests == 0) absl::SleepFor(absl::Milliseconds(1));
  }
  bool Next() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }
  grpc::Status Finish() {
    grpc::Status status;
    stream_->Finish(&status, nullptr);
    Next();
    return status;
  }

  Observer observer_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
};

TEST_F(RequestArrivalTest, WhoLeavesBeforeTheRequestIsThereHasCancelled) {
  for (const char* method : {"GetModel", "GetStatistics", "Pull", "Watch"}) {
    SCOPED_TRACE(method);
    Begin(method);
    context_->TryCancel();
    EXPECT_EQ(Finish().error_code(), grpc::StatusCode::CANCELLED);
    const absl::Status status = observer_.EndOf(method);
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
    EXPECT_EQ(GetErrorReason(status), ErrorReason::kUnspecified);
  }
}

TEST_F(RequestArrivalTest, WhoEndsTheStreamWithoutARequestIsToldSo) {
  for (const char* method : {"GetModel", "Pull", "Watch"}) {
    SCOPED_TRACE(method);
    Begin(method);
    stream_->WritesDone(nullptr);
    Next();
    EXPECT_EQ(Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(GetErrorReason(observer_.EndOf(method)), ErrorReason::kBadRequest);
  }
}

TEST_F(RequestArrivalTest, WhoSendsWhatIsNoRequestIsToldWhatWasExpected) {
  for (const std::string method : {"GetModel", "CreateCheckpoint", "Pull", "Watch"}) {
    SCOPED_TRACE(method);
    Begin(method);
    const grpc::Slice slice("\xff\xff\xff");
    stream_->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
    Next();
    const grpc::Status status = Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(status.error_message(),
              "the request cannot be parsed as ema.v1." + method + "Request");
    EXPECT_EQ(GetErrorReason(observer_.EndOf(method)), ErrorReason::kBadRequest);
  }
}

TEST_F(RequestArrivalTest, APullBeginsWhenItsRequestIsThere) {
  CreateAndOpen();
  v1::PushResponse pushed;
  ASSERT_TRUE(PushFilled(1, 1, &pushed).status.ok());
  Begin("Pull");
  absl::SleepFor(
      absl::Milliseconds(50));  // The caller's; longer than the rest, or this shows less.
  const absl::Time sent = absl::Now();
  v1::PullRequest request;
  request.set_model("m");
  request.set_track("ema");
  grpc::ByteBuffer message;
  bool owns = false;
  grpc::GenericSerialize<grpc::ProtoBufferWriter, google::protobuf::Message>(request, &message,
                                                                             &owns);
  stream_->WriteLast(message, grpc::WriteOptions(), nullptr);
  Next();
  grpc::ByteBuffer response;
  do {
    stream_->Read(&response, nullptr);
  } while (Next());
  EXPECT_TRUE(Finish().ok());
  EXPECT_LE(observer_.pull_duration(), absl::Now() - sent);
}

TEST_F(RequestArrivalTest, ALongReplyThatIsNotTakenHasAPlaceForSoLong) {
  server_.reset();
  RpcServer::Options options;
  options.limits.stream_timeout = absl::Milliseconds(600);
  options.limits.max_arriving_requests = 1;
  options.observer = &observer_;
  StartServer(options);
  v1::CreateModelRequest create = CreateRequest();
  for (int i = 0; i < 4000; ++i) {
    v1::TensorSpec& tensor = *create.mutable_manifest()->add_tensors();
    tensor.set_name(absl::StrCat(std::string(900, 'x'), i));
    tensor.set_dtype(v1::DTYPE_FLOAT32);
    tensor.add_shape(1);
  }
  {
    grpc::ClientContext context;
    v1::CreateModelResponse created;
    ASSERT_TRUE(stub_->CreateModel(&context, create, &created).ok());
  }
  // Whose window does not grow to the reply's size.
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  channel_ = grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), arguments);
  Begin("GetModel");
  v1::GetModelRequest request;
  request.set_model("m");
  const grpc::Slice slice(request.SerializeAsString());
  stream_->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
  Next();
  // The reply is under way, and nobody reads it.
  EXPECT_THAT(observer_.EndOf("GetModel"), IsOk());
  while (server_->usage().arriving_requests != 0) absl::SleepFor(absl::Milliseconds(1));
  grpc::ByteBuffer reply;
  stream_->Read(&reply, nullptr);
  EXPECT_FALSE(Next());
  EXPECT_EQ(Finish().error_code(), grpc::StatusCode::CANCELLED);
  grpc::ClientContext context;
  v1::GetModelResponse response;
  EXPECT_TRUE(stub_->GetModel(&context, request, &response).ok());
}

}  // namespace
}  // namespace ema
