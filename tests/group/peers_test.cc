// SPDX-License-Identifier: Apache-2.0
#include "server/group/peers.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "ema/v1/group.grpc.pb.h"
#include "server/wire/convert_types.h"
#include "tests/testutil/status_matchers.h"

namespace ema::group {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(60);

// Answers each call with what it was sent, or as it is told.
class FakeMember final : public v1::GroupService::Service {
 public:
  explicit FakeMember(const std::string& address = "127.0.0.1:0",
                      const std::shared_ptr<grpc::ServerCredentials>& credentials =
                          grpc::InsecureServerCredentials()) {
    grpc::ServerBuilder builder;
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddListeningPort(address, credentials, &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~FakeMember() override {
    Release();
    server_->Shutdown();
  }

  // Cancels the calls that run.
  void Abort() { server_->Shutdown(std::chrono::system_clock::now()); }

  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

  // Vote() is answered after Release(), or when it was cancelled.
  void Release() {
    absl::MutexLock lock(&mu_);
    is_released_ = true;
  }
  void AwaitHeld(int count) {
    absl::MutexLock lock(&mu_);
    const auto are_held = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return held_count_ == count; };
    mu_.Await(absl::Condition(&are_held));
  }
  void SetError(absl::Status error) {
    absl::MutexLock lock(&mu_);
    error_ = std::move(error);
  }
  void SetToken(std::string token) {
    absl::MutexLock lock(&mu_);
    token_ = std::move(token);
  }
  // Of the calls so far: the addresses of their callers' sockets.
  std::vector<std::string> callers() {
    absl::MutexLock lock(&mu_);
    return callers_;
  }

 private:
  grpc::Status Answer(grpc::ServerContext* context) {
    absl::MutexLock lock(&mu_);
    callers_.push_back(context->peer());
    absl::Status error = error_;
    const auto header = context->client_metadata().find("authorization");
    const std::string given = header == context->client_metadata().end()
                                  ? ""
                                  : std::string(header->second.data(), header->second.size());
    if (given != token_) {
      error = MakeError(absl::StatusCode::kUnauthenticated, ErrorReason::kBadToken, given);
    }
    if (error.ok()) return grpc::Status::OK;
    v1::ErrorDetail detail;
    detail.set_reason(static_cast<v1::ErrorReason>(GetErrorReason(error)));
    context->AddTrailingMetadata(kErrorDetailKey, detail.SerializeAsString());
    return {static_cast<grpc::StatusCode>(error.code()), std::string(error.message())};
  }

  grpc::Status ReservePartition(grpc::ServerContext* context,
                                const v1::ReservePartitionRequest* /*request*/,
                                v1::ReservePartitionResponse* /*response*/) override {
    return Answer(context);
  }
  grpc::Status Vote(grpc::ServerContext* context, const v1::VoteRequest* request,
                    v1::GroupState* response) override {
    response->set_round(request->round());
    {
      absl::MutexLock lock(&mu_);
      ++held_count_;
      const auto is_over = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return is_released_; };
      while (!context->IsCancelled() &&
             !mu_.AwaitWithTimeout(absl::Condition(&is_over), absl::Milliseconds(1))) {
      }
      --held_count_;
    }
    return Answer(context);
  }
  grpc::Status Sync(grpc::ServerContext* context, const v1::SyncRequest* request,
                    v1::GroupState* response) override {
    response->set_round(request->round());
    return Answer(context);
  }
  grpc::Status PublishState(grpc::ServerContext* context,
                            const v1::PublishStateRequest* /*request*/,
                            v1::PublishStateResponse* /*response*/) override {
    return Answer(context);
  }

  absl::Mutex mu_;
  bool is_released_ ABSL_GUARDED_BY(mu_) = false;
  int held_count_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status error_ ABSL_GUARDED_BY(mu_);
  std::string token_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> callers_ ABSL_GUARDED_BY(mu_);
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

// The result of one call, for the thread of the test.
template <typename Response>
class Result {
 public:
  Peers::OnResult<Response> callback() {
    return [this](absl::StatusOr<Response> result) {
      thread_ = std::this_thread::get_id();
      result_ = std::move(result);
      ended_.Notify();
    };
  }
  const absl::StatusOr<Response>& Await() {
    ended_.WaitForNotification();
    return result_;
  }
  std::thread::id thread() const { return thread_; }

 private:
  absl::Notification ended_;
  std::thread::id thread_;
  absl::StatusOr<Response> result_;
};

absl::StatusOr<v1::GroupState> Sync(Peers& peers, const std::string& address,
                                    absl::Duration timeout = kLong) {
  v1::SyncRequest request;
  request.set_round(7);
  Result<v1::GroupState> result;
  peers.Sync(address, request, timeout, result.callback());
  return result.Await();
}

std::unique_ptr<Peers> StartPeers(Peers::Options options = {}) {
  return *Peers::Start(std::move(options));
}

TEST(PeersTest, WorkRunsInItsOrder) {
  const auto peers = StartPeers();
  std::vector<std::string> order;
  absl::Notification ended;
  peers->Post([&] {
    peers->Post([&] {
      order.emplace_back("inner");
      ended.Notify();
    });
    order.emplace_back("first");
  });
  // Before "inner" or after it.
  peers->Post([&] { order.emplace_back("second"); });
  ended.WaitForNotification();
  peers->Stop();
  EXPECT_EQ(order.front(), "first");
  EXPECT_THAT(order, testing::UnorderedElementsAre("first", "second", "inner"));
}

TEST(PeersTest, TimersRunInTheOrderOfTheirTimes) {
  const auto peers = StartPeers();
  std::vector<std::string> order;
  absl::Duration setting;
  do {
    order.clear();
    absl::Notification ended;
    peers->Post([&] {
      const SteadyTime start = SteadyNow();
      peers->PostAfter(absl::Milliseconds(20), [&] {
        order.emplace_back("last");
        ended.Notify();
      });
      peers->PostAfter(absl::Milliseconds(10), [&] { order.emplace_back("second"); });
      peers->PostAfter(absl::ZeroDuration(), [&] { order.emplace_back("first"); });
      setting = Since(start);
    });
    ended.WaitForNotification();
    // A timer counts from when it was set. So the order is certain only if that was quick.
  } while (setting >= absl::Milliseconds(10));
  EXPECT_THAT(order, ElementsAre("first", "second", "last"));
}

TEST(PeersTest, ResultsOfAllCallsComeOnTheThread) {
  FakeMember member;
  member.Release();
  const auto peers = StartPeers();
  absl::Notification started;
  std::thread::id thread;
  peers->Post([&] {
    thread = std::this_thread::get_id();
    started.Notify();
  });
  started.WaitForNotification();
  Result<v1::ReservePartitionResponse> reserved;
  peers->ReservePartition(member.address(), {}, kLong, reserved.callback());
  v1::VoteRequest vote;
  vote.set_round(3);
  Result<v1::GroupState> prepared;
  peers->Vote(member.address(), vote, kLong, prepared.callback());
  v1::SyncRequest sync;
  sync.set_round(4);
  Result<v1::GroupState> synced;
  peers->Sync(member.address(), sync, kLong, synced.callback());
  Result<v1::PublishStateResponse> published;
  peers->PublishState(member.address(), {}, kLong, published.callback());

  EXPECT_THAT(reserved.Await(), IsOk());
  ASSERT_THAT(prepared.Await(), IsOk());
  EXPECT_EQ(prepared.Await()->round(), 3);
  ASSERT_THAT(synced.Await(), IsOk());
  EXPECT_EQ(synced.Await()->round(), 4);
  EXPECT_THAT(published.Await(), IsOk());
  EXPECT_THAT(
      (std::vector{reserved.thread(), prepared.thread(), synced.thread(), published.thread()}),
      Each(thread));
  const std::vector<std::string> callers = member.callers();
  EXPECT_THAT(callers, Each(callers[0]));  // One connection.
}

TEST(PeersTest, ErrorHasItsReason) {
  FakeMember member;
  member.SetError(MakeError(absl::StatusCode::kUnavailable, ErrorReason::kDraining, "stops"));
  const auto peers = StartPeers();
  const absl::Status error = Sync(*peers, member.address()).status();
  EXPECT_THAT(error, StatusIs(absl::StatusCode::kUnavailable, "stops"));
  EXPECT_THAT(error, ReasonIs(ErrorReason::kDraining));
}

TEST(PeersTest, HeldCallEndsAtItsTimeoutWhileOthersAreAnswered) {
  FakeMember member;
  const auto peers = StartPeers();
  Result<v1::GroupState> held;
  peers->Vote(member.address(), {}, kLong, held.callback());
  member.AwaitHeld(1);
  Result<v1::GroupState> late;
  peers->Vote(member.address(), {}, absl::Milliseconds(50), late.callback());
  EXPECT_THAT(late.Await(),
              AllOf(StatusIs(absl::StatusCode::kDeadlineExceeded,
                             absl::StrCat("Vote at ", member.address(), ": no answer within 50ms")),
                    ReasonIs(ErrorReason::kGroupDegraded)));
  EXPECT_THAT(Sync(*peers, member.address()), IsOk());
  member.AwaitHeld(1);  // The late one was cancelled.
  member.Release();
  EXPECT_THAT(held.Await(), IsOk());
}

TEST(PeersTest, CallWithoutAConnectionFailsAndALaterOneConnects) {
  std::optional<FakeMember> member(std::in_place);
  const std::string address = member->address();
  const auto peers = StartPeers();
  EXPECT_THAT(Sync(*peers, address), IsOk());
  member.reset();
  absl::StatusOr<v1::GroupState> result;
  do {
    result = Sync(*peers, address);
  } while (result.ok());
  EXPECT_THAT(Sync(*peers, address), AllOf(StatusIs(absl::StatusCode::kUnavailable,
                                                    HasSubstr("Sync at " + address + ": ")),
                                           ReasonIs(ErrorReason::kGroupDegraded)));
  member.emplace(address);
  do {
    result = Sync(*peers, address);
  } while (absl::IsUnavailable(result.status()));
  EXPECT_THAT(result, IsOk());
}

TEST(PeersTest, CallThatTheStoppingServerEndsIsUnavailable) {
  std::optional<FakeMember> member(std::in_place);
  const auto peers = StartPeers();
  Result<v1::GroupState> held;
  peers->Vote(member->address(), {}, kLong, held.callback());
  member->AwaitHeld(1);
  member->Abort();
  EXPECT_THAT(held.Await(), AllOf(StatusIs(absl::StatusCode::kUnavailable, testing::_),
                                  ReasonIs(ErrorReason::kGroupDegraded)));
}

TEST(PeersTest, StopRunsPostedWorkAndCancelsCalls) {
  FakeMember member;
  const auto peers = StartPeers();
  Result<v1::GroupState> held;
  Result<v1::GroupState> next;
  // The first call ends because the thread stops, and what it posts then still runs.
  peers->Vote(member.address(), {}, kLong, [&](absl::StatusOr<v1::GroupState> result) {
    held.callback()(std::move(result));
    peers->Post([&] { peers->Sync(member.address(), {}, kLong, next.callback()); });
  });
  member.AwaitHeld(1);
  const auto timer = std::make_shared<bool>(false);
  peers->PostAfter(absl::Hours(1), [timer] { *timer = true; });
  bool has_run = false;
  peers->Post([&] { has_run = true; });
  peers->Stop();
  EXPECT_TRUE(has_run);
  EXPECT_THAT(held.Await(), StatusIs(absl::StatusCode::kCancelled, "this server stops"));
  EXPECT_THAT(next.Await(), StatusIs(absl::StatusCode::kCancelled, "this server stops"));
  EXPECT_FALSE(*timer);
  EXPECT_EQ(timer.use_count(), 1);

  const auto late = std::make_shared<bool>(false);
  peers->Post([late] { *late = true; });
  EXPECT_FALSE(*late);
  EXPECT_EQ(late.use_count(), 1);
}

// With files in a temporary folder.
class PeersFilesTest : public testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(mkdtemp(folder_.data()), nullptr); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string File(const std::string& name) const { return absl::StrCat(folder_, "/", name); }
  std::string Write(const std::string& name, const std::string& text) const {
    std::ofstream(File(name)) << text;
    return File(name);
  }
  std::string Read(const std::string& name) const {
    std::ifstream file(File(name));
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void MakeCertificate(const std::string& name) const {
    const std::string command = absl::StrCat(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=",
        name, " -addext subjectAltName=IP:127.0.0.1 -keyout ", File(name + ".key"), " -out ",
        File(name + ".pem"), " 2>/dev/null");
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
  }

  std::string folder_ = (std::filesystem::temp_directory_path() / "ema-peers.XXXXXX").string();
};

TEST_F(PeersFilesTest, FileThatCannotBeReadIsNamedAtTheStart) {
  EXPECT_THAT(Peers::Start({.token_file = File("none")}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(File("none"))));
  const std::string secret = Write("two", "secret secret2");
  EXPECT_THAT(Peers::Start({.token_file = secret}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("expected one token"), testing::Not(HasSubstr("secret")))));
  EXPECT_THAT(Peers::Start({.certificate_file = secret, .key_file = secret}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("expected PEM")));
}

TEST_F(PeersFilesTest, ChangedTokenIsReadAfterARejection) {
  FakeMember member;
  member.SetToken("Bearer old");
  const auto peers = StartPeers({.token_file = Write("token", "old\n")});
  EXPECT_THAT(Sync(*peers, member.address()), IsOk());
  member.SetToken("Bearer new");
  EXPECT_THAT(Sync(*peers, member.address()), ReasonIs(ErrorReason::kBadToken));
  Write("token", "new\n");
  absl::StatusOr<v1::GroupState> result;
  do {
    result = Sync(*peers, member.address());
  } while (absl::IsUnauthenticated(result.status()));
  EXPECT_THAT(result, IsOk());
}

TEST_F(PeersFilesTest, BothSidesCheckCertificates) {
  for (const char* const name : {"good", "other"}) ASSERT_NO_FATAL_FAILURE(MakeCertificate(name));
  grpc::SslServerCredentialsOptions server(
      GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  server.pem_root_certs = Read("good.pem");
  server.pem_key_cert_pairs.push_back({Read("good.key"), Read("good.pem")});
  FakeMember member("127.0.0.1:0", grpc::SslServerCredentials(server));
  const auto call = [&](const std::string& ca, const std::string& own) {
    return Sync(*StartPeers({.ca_file = File(ca + ".pem"),
                             .certificate_file = File(own + ".pem"),
                             .key_file = File(own + ".key")}),
                member.address());
  };
  EXPECT_THAT(call("good", "good"), IsOk());
  EXPECT_THAT(call("good", "other"), StatusIs(absl::StatusCode::kUnavailable, testing::_));
  EXPECT_THAT(call("other", "good"), StatusIs(absl::StatusCode::kUnavailable, testing::_));
}

}  // namespace
}  // namespace ema::group
