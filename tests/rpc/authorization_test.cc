// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/authorization.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "ema/client.h"
#include "ema/v1/group.pb.h"
#include "tests/rpc/rpc_fixture.h"

namespace ema {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::UnorderedElementsAre;

constexpr Role kRoles[] = {Role::kEvaluator, Role::kTrainer, Role::kAdmin, Role::kServer};

// Tokens are the roles' names; those that end with "-of-m" are only for models that begin with m.
class FakeAuthenticator final : public Authenticator {
 public:
  absl::StatusOr<Access> Authenticate(std::string_view authorization) const override {
    if (knows_nobody) {
      return MakeError(absl::StatusCode::kUnauthenticated, ErrorReason::kBadToken, "revoked");
    }
    if (knows_only_of_others) return Access{.role = Role::kAdmin, .models = {"other"}};
    for (const Role role : kRoles) {
      const std::string token = "Bearer " + std::string(RoleName(role));
      if (authorization == token) return Access{.role = role, .models = {}};
      if (authorization == token + "-of-m") return Access{.role = role, .models = {"m*"}};
    }
    return MakeError(absl::StatusCode::kUnauthenticated, ErrorReason::kBadToken, "unknown");
  }
  bool Refresh() override { return has_changed; }

  std::atomic<bool> knows_nobody = false;
  std::atomic<bool> knows_only_of_others = false;
  std::atomic<bool> has_changed = false;
};

std::vector<const google::protobuf::MethodDescriptor*> AllMethods() {
  const google::protobuf::ServiceDescriptor* const service =
      v1::CreateModelRequest::descriptor()->file()->FindServiceByName("EmaService");
  std::vector<const google::protobuf::MethodDescriptor*> methods;
  for (int i = 0; i < service->method_count(); ++i) methods.push_back(service->method(i));
  return methods;
}

std::string PathOf(const google::protobuf::MethodDescriptor& method) {
  return absl::StrCat("/", method.service()->full_name(), "/", method.name());
}

// A request of `method` that has nothing but the model's name, if it has one.
std::unique_ptr<google::protobuf::Message> RequestOf(
    const google::protobuf::MethodDescriptor& method, const std::string& model) {
  std::unique_ptr<google::protobuf::Message> request(
      google::protobuf::MessageFactory::generated_factory()
          ->GetPrototype(method.input_type())
          ->New());
  google::protobuf::Message* named = request.get();
  if (const auto* header = request->GetDescriptor()->FindFieldByName("header")) {
    named = request->GetReflection()->MutableMessage(request.get(), header);
  }
  if (const auto* field = named->GetDescriptor()->FindFieldByName("model")) {
    named->GetReflection()->SetString(named, field, model);
  }
  return request;
}

class AuthorizationTest : public RpcFixture {
 protected:
  ~AuthorizationTest() override { server_.reset(); }  // It uses the authenticator.

  void SetUp() override { StartServer({.authenticator = &authenticator_}); }

  // The result of a call of `method` with a request that has nothing but the model's name.
  CallResult Call(const google::protobuf::MethodDescriptor& method, const std::string& token,
                  const std::string& model) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
    grpc::GenericStub stub(channel_);
    grpc::CompletionQueue queue;
    const auto stream = stub.PrepareCall(&context, PathOf(method), &queue);
    const auto next = [&] {
      void* tag = nullptr;
      bool ok = false;
      return queue.Next(&tag, &ok) && ok;
    };
    stream->StartCall(nullptr);
    next();
    grpc::ByteBuffer message;
    bool owns = false;
    grpc::GenericSerialize<grpc::ProtoBufferWriter, google::protobuf::Message>(
        *RequestOf(method, model), &message, &owns);
    stream->WriteLast(message, grpc::WriteOptions(), nullptr);
    next();
    grpc::ByteBuffer response;
    // A watch that was let in says so, and then nothing.
    stream->ReadInitialMetadata(nullptr);
    next();
    if (method.name() == "Watch" && !context.GetServerInitialMetadata().empty()) {
      context.TryCancel();
    }
    grpc::Status status;
    do {
      stream->Read(&response, nullptr);
    } while (next());
    stream->Finish(&status, nullptr);
    next();
    queue.Shutdown();
    while (next()) {
    }
    return Result(status, context);
  }

  static bool IsRefused(const CallResult& result) {
    return result.detail.reason() == v1::ERROR_REASON_BAD_TOKEN ||
           result.detail.reason() == v1::ERROR_REASON_NOT_ALLOWED;
  }

  FakeAuthenticator authenticator_;
};

TEST_F(AuthorizationTest, EveryRpcHasARuleAndRefusesWhoHasNoToken) {
  for (const auto* method : AllMethods()) {
    EXPECT_TRUE(RoleFor(PathOf(*method)).has_value()) << method->name();
    EXPECT_NE(RoleFor(PathOf(*method)), Role::kAnonymous) << method->name();
    for (const char* token : {"", "unknown", "admi", "admin2"}) {
      const CallResult result = Call(*method, token, "m");
      EXPECT_EQ(result.status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << method->name();
      EXPECT_EQ(result.detail.reason(), v1::ERROR_REASON_BAD_TOKEN) << method->name();
    }
  }
}

TEST_F(AuthorizationTest, EveryRpcIsOpenToItsRoleAndThoseAbove) {
  for (const auto* method : AllMethods()) {
    const Role needed = RoleFor(PathOf(*method)).value_or(Role::kAnonymous);
    for (const Role role : kRoles) {
      const CallResult result = Call(*method, std::string(RoleName(role)), "m");
      const bool is_allowed = role != Role::kServer && role >= needed;
      EXPECT_EQ(IsRefused(result), !is_allowed) << method->name() << " " << RoleName(role);
      if (!is_allowed) {
        EXPECT_EQ(result.status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
        EXPECT_THAT(result.status.error_message(),
                    HasSubstr(absl::StrCat(method->name(), ": the token has the role ",
                                           std::string(RoleName(role)), ", expected ",
                                           std::string(RoleName(needed)))));
      }
    }
  }
}

TEST_F(AuthorizationTest, AFollowerAcceptsReadsAndCallsThatConcernItself) {
  std::vector<std::string> accepted;
  for (const auto* method : AllMethods()) {
    if (!IsRefusedByFollower(PathOf(*method))) accepted.push_back(std::string(method->name()));
  }
  EXPECT_THAT(accepted, UnorderedElementsAre("GetModel", "ListModels", "Pull", "Watch",
                                             "ListVersions", "GetStatistics", "GetAttachedFile",
                                             "GetCheckpoint", "ListCheckpoints", "GetLane",
                                             "GetServerInfo", "GetGroup", "SetLogLevel", "Drain"));
}

TEST_F(AuthorizationTest, CallsBetweenServersAreForServersOnly) {
  const google::protobuf::ServiceDescriptor* const service =
      v1::SyncRequest::descriptor()->file()->FindServiceByName("GroupService");
  for (int i = 0; i < service->method_count(); ++i) {
    const std::string path = PathOf(*service->method(i));
    for (const Role role : kRoles) {
      const std::string token = absl::StrCat("Bearer ", std::string(RoleName(role)));
      const absl::StatusOr<Access> access = Authorize(&authenticator_, path, token, "m");
      if (role == Role::kServer) {
        EXPECT_THAT(access, IsOk()) << path;
      } else {
        EXPECT_THAT(access,
                    StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("expected server")))
            << path;
      }
    }
    EXPECT_THAT(Authorize(&authenticator_, path, "", "m"), ReasonIs(ErrorReason::kBadToken));
  }
}

TEST_F(AuthorizationTest, APushEndsWhoseTokenIsNotForItsModelAnyMore) {
  grpc::ClientContext create_context;
  create_context.AddMetadata("authorization", "Bearer admin");
  v1::CreateModelResponse created;
  ASSERT_TRUE(stub_->CreateModel(&create_context, CreateRequest(), &created).ok());
  grpc::ClientContext open_context;
  open_context.AddMetadata("authorization", "Bearer admin");
  v1::OpenRunRequest open;
  open.set_model("m");
  open.set_launch_id("launch");
  open.set_world_size(1);
  open.set_manifest_digest(created.model().manifest_digest());
  v1::Shard* const shard = open.mutable_layout()->add_shards();
  shard->add_offsets(0);
  shard->add_extents(kElements);
  ASSERT_TRUE(stub_->OpenRun(&open_context, open, &run_).ok());

  grpc::ClientContext context;
  context.AddMetadata("authorization", "Bearer admin");
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  v1::PushResponse response;
  const auto writer = stub_->Push(&context, &response);
  writer->Write(Header(1));
  while (store_->sessions().used_count() == 0) absl::SleepFor(absl::Milliseconds(1));
  authenticator_.knows_only_of_others = true;
  authenticator_.has_changed = true;
  const CallResult result = Result(writer->Finish(), context);
  EXPECT_EQ(result.status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(result.detail.reason(), v1::ERROR_REASON_BAD_TOKEN);
}

TEST_F(AuthorizationTest, EveryRpcAboutAModelRefusesOneThatTheTokenIsNotFor) {
  const std::set<std::string> of_no_model = {"ListModels", "GetLane", "GetServerInfo", "GetGroup"};
  const std::set<std::string> concern_all = {"SetLogLevel", "Drain"};
  for (const auto* method : AllMethods()) {
    if (concern_all.contains(method->name())) continue;
    EXPECT_FALSE(IsRefused(Call(*method, "admin-of-m", "m2"))) << method->name();
    const CallResult result = Call(*method, "admin-of-m", "other");
    EXPECT_EQ(IsRefused(result), !of_no_model.contains(method->name())) << method->name();
    // Nor says whether there is such a model.
    if (IsRefused(result)) {
      EXPECT_EQ(result.status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
      EXPECT_EQ(result.status.error_message(),
                "model \"other\": the token does not allow this model");
    }
  }
}

TEST_F(AuthorizationTest, WhatConcernsAllModelsNeedsAnAdminOfAll) {
  for (const auto* method : AllMethods()) {
    if (method->name() != "SetLogLevel" && method->name() != "Drain") continue;
    EXPECT_FALSE(IsRefused(Call(*method, "admin", "")));
    const CallResult result = Call(*method, "admin-of-m", "");
    EXPECT_EQ(result.status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
    EXPECT_EQ(result.detail.reason(), v1::ERROR_REASON_NOT_ALLOWED);
    EXPECT_THAT(result.status.error_message(),
                HasSubstr("expected one whose line in the token file names no models"));
  }
}

TEST_F(AuthorizationTest, ProbesNeedNoToken) {
  const auto health = grpc::health::v1::Health::NewStub(channel_);
  grpc::ClientContext context;
  grpc::health::v1::HealthCheckResponse response;
  ASSERT_TRUE(health->Check(&context, {}, &response).ok());
  EXPECT_EQ(response.status(), grpc::health::v1::HealthCheckResponse::SERVING);
}

// gRPC would answer some of these itself if it were asked to.
TEST_F(AuthorizationTest, NoServiceButOursAndHealthIsThere) {
  for (const char* method : {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                             "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                             "/grpc.channelz.v1.Channelz/GetServers", "/ema.v1.EmaService/Nothing",
                             "/grpc.health.v1.Health/Watch", "/"}) {
    for (const char* token : {"", "admin"}) {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
      if (*token != '\0') context.AddMetadata("authorization", absl::StrCat("Bearer ", token));
      grpc::GenericStub stub(channel_);
      grpc::CompletionQueue queue;
      const auto call = stub.PrepareUnaryCall(&context, method, grpc::ByteBuffer(), &queue);
      grpc::ByteBuffer response;
      grpc::Status status;
      call->StartCall();
      call->Finish(&response, &status, nullptr);
      void* tag = nullptr;
      bool ok = false;
      ASSERT_TRUE(queue.Next(&tag, &ok));
      EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED) << method << token;
    }
  }
}

TEST_F(AuthorizationTest, ModelsAreListedToThoseWhoMayReadThem) {
  const auto names = [&](const std::string& token) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", "Bearer " + token);
    v1::ListModelsResponse response;
    EXPECT_TRUE(stub_->ListModels(&context, {}, &response).ok());
    std::vector<std::string> result;
    for (const v1::Model& model : response.models()) result.push_back(model.name());
    return result;
  };
  for (const char* model : {"m", "other"}) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", "Bearer trainer");
    v1::CreateModelResponse created;
    ASSERT_TRUE(stub_->CreateModel(&context, CreateRequest(model), &created).ok());
  }
  EXPECT_THAT(names("evaluator"), ElementsAre("m", "other"));
  EXPECT_THAT(names("evaluator-of-m"), ElementsAre("m"));
}

// Our own client, by gRPC and through shared memory.
class AuthorizedClientTest : public AuthorizationTest, public testing::WithParamInterface<bool> {};

TEST_P(AuthorizedClientTest, PushesAndPullsWithItsToken) {
  const auto client_of = [&](const std::string& token) {
    auto client = Client::Create(address_, {.same_host_lane = GetParam(), .token = token});
    EXPECT_THAT(client, IsOk());
    return *std::move(client);
  };
  const auto trainer = client_of("trainer-of-m");
  const Manifest manifest = *Manifest::Create({{"w", Dtype::kFloat32, {kElements}}});
  const std::vector<TrackConfig> tracks = {{.name = "ema", .schedule = *Schedule::Parse("1ba")}};
  EXPECT_THAT(trainer->CreateModel("other", manifest, tracks), ReasonIs(ErrorReason::kNotAllowed));
  ASSERT_THAT(trainer->CreateModel("m", manifest, tracks), IsOk());
  const auto run = trainer->OpenRun("m", Client::RunOptions());
  ASSERT_THAT(run, IsOk());
  const std::vector<float> weights(kElements, 1.0F);
  const auto push = (*run)->StartPush(1, TrainingTime::AtBatch(1),
                                      {std::as_bytes(std::span(weights))}, absl::Seconds(30));
  ASSERT_THAT(push, IsOk());
  ASSERT_THAT((*push)->Wait(), IsOk());
  EXPECT_EQ((*push)->stats().lane == Lane::kSharedMemory, GetParam());

  std::vector<float> pulled(kElements);
  const auto pull = [&](Client& client) {
    return client.Pull(
        "m", "ema", Client::PullOptions(),
        [&](const PullInfo&) { return std::as_writable_bytes(std::span(pulled)); },
        absl::Seconds(30));
  };
  EXPECT_THAT(pull(*client_of("evaluator")), IsOk());
  EXPECT_EQ(pulled, weights);
  EXPECT_THAT(pull(*client_of("somebody")), ReasonIs(ErrorReason::kBadToken));
  EXPECT_THAT(client_of("evaluator")->OpenRun("m", Client::RunOptions()),
              ReasonIs(ErrorReason::kNotAllowed));
}

INSTANTIATE_TEST_SUITE_P(Lanes, AuthorizedClientTest, testing::Bool(),
                         [](const auto& suite) { return suite.param ? "SharedMemory" : "Grpc"; });

}  // namespace
}  // namespace ema
