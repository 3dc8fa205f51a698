// SPDX-License-Identifier: Apache-2.0
//
// The unary calls, the connection and its retries.
#include "ema/client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/transport/dial.h"
#include "tests/client/fake_server.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/tcp_proxy.h"

namespace ema {
namespace {

using ::testing::_;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

Manifest OneTensor() { return *Manifest::Create({{.name = "w", .shape = {4}}}); }

struct AddressCase {
  const char* text;
  const char* canonical;  // Null: refused.
};
class AddressTest : public testing::TestWithParam<AddressCase> {};
TEST_P(AddressTest, Parse) {
  const absl::StatusOr<client_internal::Address> address =
      client_internal::Address::Parse(GetParam().text);
  if (GetParam().canonical == nullptr) {
    EXPECT_THAT(address, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("host:port")));
    EXPECT_THAT(Client::Create(GetParam().text), ReasonIs(ErrorReason::kBadRequest));
  } else {
    ASSERT_THAT(address, IsOk());
    EXPECT_EQ(address->ToString(), GetParam().canonical);
  }
}
INSTANTIATE_TEST_SUITE_P(
    All, AddressTest,
    testing::Values(AddressCase{"localhost:50051", "localhost:50051"},
                    AddressCase{"10.0.0.1:080", "10.0.0.1:80"}, AddressCase{"[::1]:7", "[::1]:7"},
                    AddressCase{"ema.svc.cluster.local:65535", "ema.svc.cluster.local:65535"},
                    AddressCase{"host", "host:50051"}, AddressCase{"[::1]", "[::1]:50051"},
                    AddressCase{"ema://host:1", "host:1"}, AddressCase{"ema://host/", "host:50051"},
                    AddressCase{"emas://host", "tls:host:50051"},
                    AddressCase{"emas://[::1]:7/", "tls:[::1]:7"},
                    AddressCase{"tls:host", "tls:host:50051"},
                    AddressCase{"tls:host:7", "tls:host:7"}, AddressCase{"", nullptr},
                    AddressCase{"ema://", nullptr}, AddressCase{"emas:///", nullptr},
                    AddressCase{"ema://host:1/m", nullptr}, AddressCase{"ema://tls:h:1", nullptr},
                    AddressCase{"http://host:1", nullptr}, AddressCase{"host:1/", nullptr},
                    AddressCase{":50051", nullptr}, AddressCase{"host:", nullptr},
                    AddressCase{"host:0", nullptr}, AddressCase{"host:65536", nullptr},
                    AddressCase{"host:5x", nullptr}, AddressCase{"host: 5", nullptr},
                    AddressCase{"host:-5", nullptr}, AddressCase{"::1:50051", nullptr},
                    AddressCase{"::1", nullptr}, AddressCase{"[host]:1", nullptr},
                    AddressCase{"unix:/tmp/x", "unix:/tmp/x"}, AddressCase{"unix:tmp/x", nullptr},
                    AddressCase{"unix:", nullptr}, AddressCase{"a b:1", nullptr}));

TEST(AddressListTest, ThePrefixCountsForAllAddresses) {
  const auto parse = [](std::string_view text) {
    std::vector<std::string> names;
    const auto addresses = client_internal::Address::ParseList(text);
    if (!addresses.ok()) return names;
    for (const client_internal::Address& one : *addresses) names.push_back(one.ToString());
    return names;
  };
  EXPECT_THAT(parse("ema://a:1,b,[::1]:3/"), ElementsAre("a:1", "b:50051", "[::1]:3"));
  EXPECT_THAT(parse("emas://a,b:2"), ElementsAre("tls:a:50051", "tls:b:2"));
  EXPECT_THAT(parse("tls:a,b"), ElementsAre("tls:a:50051", "tls:b:50051"));
  EXPECT_THAT(parse("a:1"), ElementsAre("a:1"));
  EXPECT_THAT(parse("unix:/tmp/a,b"), ElementsAre("unix:/tmp/a,b"));
  for (const char* bad : {"a,,b", ",a", "a,", "ema://a,ema://b", ""}) {
    EXPECT_THAT(parse(bad), IsEmpty()) << bad;
    EXPECT_THAT(Client::Create(bad), ReasonIs(ErrorReason::kBadRequest)) << bad;
  }
}

TEST(ClientOptionsTest, RefusesChunkSizesThatDoNotWork) {
  for (const int64_t bytes : {int64_t{0}, int64_t{7}, (int64_t{4} << 20) + 1}) {
    EXPECT_THAT(Client::Create("h:1", {.chunk_bytes = bytes}),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("chunk_bytes")));
  }
}

class ClientTest : public testing::Test {
 protected:
  void SetUp() override { EMA_ASSERT_OK_AND_ASSIGN(client_, Client::Create(server_.address())); }

  FakeServer server_{OneTensor()};
  std::unique_ptr<Client> client_;
};

TEST_F(ClientTest, UsesTheFirstServerOfAListThatCanBeReached) {
  FakeServer second(OneTensor());
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto client,
      Client::Create(absl::StrCat("ema://127.0.0.1:1,", server_.address(), ",", second.address())));
  server_.edit_model = [](v1::Model& model) { model.set_run_epoch(1); };
  second.edit_model = [](v1::Model& model) { model.set_run_epoch(2); };
  EMA_ASSERT_OK_AND_ASSIGN(const ModelInfo of_first, client->GetModel("m"));
  EXPECT_EQ(of_first.run_epoch, 1);
  server_.Stop();
  EMA_ASSERT_OK_AND_ASSIGN(const ModelInfo of_second, client->GetModel("m"));
  EXPECT_EQ(of_second.run_epoch, 2);
  second.Stop();
  EXPECT_THAT(client->IsServing(),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr("127.0.0.1:1"), HasSubstr(second.address()))));
}

TEST_F(ClientTest, ACallIsRepeatedAtTheHome) {
  FakeServer home(OneTensor());
  home.edit_model = [](v1::Model& model) { model.set_run_epoch(7); };
  absl::Status not_home =
      MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNotHome, "the home is there");
  SetGroupHint(not_home, {.home = home.address()});
  server_.unary_errors = {not_home, not_home, not_home};
  EMA_ASSERT_OK_AND_ASSIGN(const ModelInfo info, client_->GetModel("m"));
  EXPECT_EQ(info.run_epoch, 7);

  // While a model moves, the server that was named may not know yet that it is the home.
  absl::Status moved =
      MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNotHome, "it was elsewhere");
  SetGroupHint(moved, {.home = server_.address()});
  home.unary_errors = {absl::OkStatus(), moved, absl::OkStatus()};
  EXPECT_THAT(client_->GetModel("m"), IsOk());
  server_.unary_errors.assign(100, not_home);
  home.unary_errors.assign(100, moved);
  EXPECT_THAT(client_->GetModel("m", absl::Milliseconds(300)),
              AllOf(StatusIs(absl::StatusCode::kUnavailable, HasSubstr("the model moves")),
                    ReasonIs(ErrorReason::kNotHome)));
  // A home that names itself or no server is not asked again.
  const absl::Status for_all_partitions =
      MakeError(absl::StatusCode::kFailedPrecondition, ErrorReason::kNotHome, "partition_only");
  for (const absl::Status& last : {not_home, for_all_partitions}) {
    home.unary_errors.assign(100, last);
    const size_t count = home.unary_count();
    EXPECT_THAT(client_->GetModel("m"), StatusIs(absl::StatusCode::kFailedPrecondition, _));
    EXPECT_EQ(home.unary_count(), count + 1);
  }

  SetGroupHint(not_home, {.home = "not an address"});
  server_.unary_errors.assign(100, not_home);
  EXPECT_THAT(client_->GetModel("m"),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("not an address")));
}

TEST_F(ClientTest, ModelsComeAsTheyAre) {
  const absl::StatusOr<Client::CreateModelResult> created = client_->CreateModel(
      "m", OneTensor(),
      std::vector<TrackConfig>{{.name = "ema", .schedule = *Schedule::Parse("100ba")}});
  ASSERT_THAT(created, IsOk());
  EXPECT_TRUE(created->created);
  const absl::StatusOr<ModelInfo> model = client_->GetModel("m");
  ASSERT_THAT(model, IsOk());
  EXPECT_EQ(model->manifest, OneTensor());
  EXPECT_EQ(model->tracks[0].schedule.ToString(), "half_life=100ba, update_interval=10ba");
  const absl::StatusOr<std::vector<ModelInfo>> models = client_->ListModels();
  ASSERT_THAT(models, IsOk());
  EXPECT_EQ(models->at(0).manifest.tensor_count(), 0);
}

TEST_F(ClientTest, RetriesWhileTheServerIsUnavailable) {
  server_.unary_errors = {
      MakeError(absl::StatusCode::kUnavailable, ErrorReason::kDraining, "draining"),
      absl::UnavailableError("broken"),
      MakeError(absl::StatusCode::kResourceExhausted, ErrorReason::kTooManyStreams, "full")};
  EXPECT_THAT(client_->GetModel("m"), IsOk());
}

TEST_F(ClientTest, DoesNotRetryWhatStaysWrong) {
  server_.unary_errors = {
      MakeError(absl::StatusCode::kNotFound, ErrorReason::kModelNotFound, "none"),
      MakeError(absl::StatusCode::kUnavailable, ErrorReason::kStoreReadOnly, "ro"),
      MakeError(absl::StatusCode::kUnavailable, ErrorReason::kDiskFailed, "I/O error")};
  EXPECT_THAT(client_->GetModel("m"), ReasonIs(ErrorReason::kModelNotFound));
  EXPECT_THAT(client_->GetModel("m"), ReasonIs(ErrorReason::kStoreReadOnly));
  EXPECT_THAT(client_->GetModel("m"), ReasonIs(ErrorReason::kDiskFailed));
  EXPECT_THAT(client_->GetModel("m"), IsOk());
}

TEST_F(ClientTest, ReportsTheErrorItRetriedUntilTheEnd) {
  server_.unary_errors.assign(
      1000, MakeError(absl::StatusCode::kUnavailable, ErrorReason::kDraining, "draining"));
  const absl::Time start = absl::Now();
  EXPECT_THAT(client_->GetModel("m", absl::Seconds(2)), ReasonIs(ErrorReason::kDraining));
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
}

TEST_F(ClientTest, RefusesAFileThatLeadsOutOfItsFolder) {
  server_.edit_model = [](v1::Model& model) {
    model.add_attached_files()->set_name("../../.ssh/authorized_keys");
  };
  EXPECT_THAT(client_->GetModel("m"),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("authorized_keys")));
}

TEST_F(ClientTest, FindsARestartedServerSoon) {
  ASSERT_THAT(client_->GetModel("m"), IsOk());
  server_.Stop();
  std::thread restart([&] {
    absl::SleepFor(absl::Milliseconds(300));
    server_.Start();
  });
  const absl::Time start = absl::Now();
  EXPECT_THAT(client_->GetModel("m"), IsOk());
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));  // TCP gives a dead connection up after 20 s.
  restart.join();
}

TEST_F(ClientTest, AllCallsShareOneConnection) {
  TcpProxy proxy(server_.port());
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(proxy.address()));
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 10; ++j) EXPECT_THAT(client->GetModel("m"), IsOk());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(proxy.connection_count(), 1);
}

TEST_F(ClientTest, ConnectsAgainAfterTheConnectionWasCut) {
  TcpProxy proxy(server_.port());
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(proxy.address()));
  for (int i = 1; i <= 3; ++i) {
    ASSERT_THAT(client->GetModel("m"), IsOk());
    EXPECT_EQ(proxy.connection_count(), i);
    proxy.CutAll();
    proxy.AwaitCut();
  }
}

TEST(NoServerTest, IsUnavailable) {
  // A port that is free: its last user has gone.
  const std::string address = FakeServer(OneTensor()).address();
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(address));
  EXPECT_THAT(client->GetModel("m", absl::Seconds(2)),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr(address)));
}

TEST(NoServerTest, SomebodyIsToldOfALongWaitOnce) {
  const std::string address = FakeServer(OneTensor()).address();
  std::vector<absl::Status> told;
  EMA_ASSERT_OK_AND_ASSIGN(const auto client,
                           Client::Create(address, {.on_wait = [&](const absl::Status& error) {
                                            told.push_back(error);
                                          }}));
  EXPECT_FALSE(client->GetModel("m", absl::Milliseconds(500)).ok());
  EXPECT_THAT(told, IsEmpty());
  EXPECT_FALSE(client->GetModel("m", absl::Seconds(6)).ok());
  EXPECT_THAT(told, ElementsAre(StatusIs(absl::StatusCode::kUnavailable, HasSubstr(address))));
}

TEST(NoServerTest, ASilentServerEndsWithTheDeadline) {
  FakeServer server(OneTensor());
  TcpProxy proxy(server.port());
  proxy.SetStalled(true);
  EMA_ASSERT_OK_AND_ASSIGN(const auto client, Client::Create(proxy.address()));
  const absl::Time start = absl::Now();
  EXPECT_THAT(client->GetModel("m", absl::Milliseconds(200)),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("no answer")));
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
}

TEST(InterruptTest, EndsAWaitForAnAnswer) {
  FakeServer server(OneTensor());
  TcpProxy proxy(server.port());
  proxy.SetStalled(true);
  const absl::Time start = absl::Now();
  const auto client = Client::Create(proxy.address(), {.is_interrupted = [&] {
                                       return absl::Now() - start > absl::Milliseconds(100);
                                     }});
  ASSERT_THAT(client, IsOk());
  EXPECT_THAT((*client)->GetModel("m"),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("interrupted")));
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
}

TEST(InterruptTest, EndsAWaitForAServer) {
  const std::string address = FakeServer(OneTensor()).address();
  const absl::Time start = absl::Now();
  const auto client = Client::Create(
      address, {.is_interrupted = [&] { return absl::Now() - start > absl::Milliseconds(100); }});
  ASSERT_THAT(client, IsOk());
  EXPECT_THAT((*client)->GetModel("m"),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("interrupted")));
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
}

}  // namespace
}  // namespace ema
