// SPDX-License-Identifier: Apache-2.0
//
// Connections over TLS: who gets in, and who does not.
#include <stdlib.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/time/clock.h"
#include "ema/client.h"
#include "tests/rpc/rpc_fixture.h"

namespace ema {
namespace {

using ::testing::HasSubstr;

class TlsTest : public RpcFixture {
 protected:
  void SetUp() override {
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
    // The CA and the server are one; "other" is nobody's.
    for (const std::string name : {"server", "other"}) {
      Openssl(
          "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=", name,
          " -addext subjectAltName=IP:127.0.0.1 -keyout ", Key(name), " -out ", Cert(name));
    }
    Openssl(
        "req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=trainer -keyout ",
        Key("trainer"), " -out ", folder_, "/trainer.csr");
    Openssl("x509 -req -days 2 -in ", folder_, "/trainer.csr -CA ", Cert("server"), " -CAkey ",
            Key("server"), " -CAcreateserial -out ", Cert("trainer"));
  }
  void TearDown() override {
    server_.reset();
    std::system(absl::StrCat("rm -r ", folder_).c_str());
  }

  template <typename... Parts>
  void Openssl(const Parts&... parts) {
    const std::string command = absl::StrCat("openssl ", parts..., " 2>&1");
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
  }
  std::string Cert(const std::string& name) const {
    return absl::StrCat(folder_, "/", name, ".pem");
  }
  std::string Key(const std::string& name) const {
    return absl::StrCat(folder_, "/", name, ".key");
  }
  TlsFiles ServerFiles() const { return {Cert("server"), Key("server"), ""}; }

  void StartTls(const TlsFiles& files) {
    RpcServer::Options options;
    options.tls = files;
    StartServer(options);
    tls_address_ = absl::StrCat("tls:", address_);
  }

  static std::unique_ptr<Client> NewClient(const std::string& address, const Client::Tls& tls,
                                           absl::Duration timeout = absl::Seconds(20)) {
    return *Client::Create(address, {.timeout = timeout, .same_host_lane = false, .tls = tls});
  }
  // A call that is no use without a connection; it fails soon.
  static absl::Status Call(const std::string& address, const Client::Tls& tls) {
    return NewClient(address, tls, absl::Seconds(2))->ListModels().status();
  }

  std::string folder_ = "/tmp/ema-tls-test-XXXXXX";
  std::string tls_address_;
};

TEST_F(TlsTest, PushesAndPullsGoThroughIt) {
  ASSERT_NO_FATAL_FAILURE(StartTls(ServerFiles()));
  const std::unique_ptr<Client> client = NewClient(tls_address_, {.ca_file = Cert("server")});
  constexpr int64_t kCount = 2'000'000;
  const Manifest manifest = *Manifest::Create({{"w", Dtype::kFloat32, {kCount}}});
  ASSERT_THAT(
      client->CreateModel("m", manifest, {{.name = "ema", .schedule = *Schedule::Parse("1ba")}}),
      IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ema::Run> run, client->OpenRun("m", {}));
  std::vector<float> weights(kCount);
  for (int64_t step = 1; step <= 3; ++step) {
    for (int64_t i = 0; i < kCount; ++i) weights[i] = static_cast<float>(i % 1000 + step);
    TrainingTime time;
    time.Set(TimeUnit::kBatch, static_cast<double>(step));
    EMA_ASSERT_OK_AND_ASSIGN(
        const std::unique_ptr<PendingPush> push,
        run->StartPush(step, time, {std::as_bytes(std::span(weights))}, absl::Seconds(20)));
    // Released before the reply: gRPC has dropped every slice.
    EXPECT_TRUE(push->WaitReleased(absl::Seconds(20)));
    EXPECT_THAT(push->Wait(), IsOk());
  }
  std::vector<float> pulled(kCount);
  const auto target = [&](const PullInfo&) -> absl::StatusOr<std::span<std::byte>> {
    return std::as_writable_bytes(std::span(pulled));
  };
  ASSERT_THAT(client->Pull("m", "ema", {}, target, absl::Seconds(20)), IsOk());
  // Half-life 1: initialized with x + 1, then (x + 1 + x + 2) / 2, then that and x + 3.
  for (int64_t i = 0; i < kCount; i += 997)
    ASSERT_EQ(pulled[i], static_cast<float>(i % 1000) + 2.25f);
}

TEST_F(TlsTest, WhoIsNotTrustedOrSpeaksPlainlyDoesNotGetIn) {
  ASSERT_NO_FATAL_FAILURE(StartTls(ServerFiles()));
  EXPECT_THAT(Call(tls_address_, {.ca_file = Cert("server")}), IsOk());
  EXPECT_THAT(Call(tls_address_, {.ca_file = Cert("other")}),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("tls:127.0.0.1")));
  // Another name than the certificate's.
  EXPECT_THAT(Call(absl::StrCat("tls:localhost:", server_->port()), {.ca_file = Cert("server")}),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("localhost")));
  EXPECT_FALSE(Call(address_, {}).ok());
  EXPECT_THAT(Call(tls_address_, {.ca_file = Cert("server")}), IsOk());  // It still serves.
}

TEST_F(TlsTest, ClientsShowACertificateWhereTheServerAsksForOne) {
  TlsFiles files = ServerFiles();
  files.client_ca = Cert("server");
  ASSERT_NO_FATAL_FAILURE(StartTls(files));
  EXPECT_FALSE(Call(tls_address_, {.ca_file = Cert("server")}).ok());
  EXPECT_FALSE(
      Call(tls_address_,
           {.ca_file = Cert("server"), .certificate_file = Cert("other"), .key_file = Key("other")})
          .ok());
  EXPECT_THAT(Call(tls_address_, {.ca_file = Cert("server"),
                                  .certificate_file = Cert("trainer"),
                                  .key_file = Key("trainer")}),
              IsOk());
}

TEST_F(TlsTest, FilesThatAreNotUsableAreNamed) {
  RpcServer::Options options;
  options.listen_addresses = {"127.0.0.1:0"};
  const auto refuses = [&](const TlsFiles& files, const std::string& name) {
    options.tls = files;
    EXPECT_THAT(RpcServer::Start(store_, checkpoints_, options),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(name)));
  };
  std::ofstream(Cert("empty")).close();
  refuses({Cert("none"), Key("server"), ""}, Cert("none"));
  refuses({Cert("empty"), Key("server"), ""}, Cert("empty"));
  refuses({Cert("server"), Key("other"), ""}, Key("other"));
  refuses({Cert("server"), Key("server"), Cert("empty")}, Cert("empty"));
  // A variable that is not set must not open the server to all.
  refuses({"", Key("server"), Cert("ca")}, "certificate");
  refuses({"", "", Cert("ca")}, "certificate");
  refuses({Cert("server"), "", ""}, "key");
  EXPECT_THAT(Call("tls:127.0.0.1:1", {.ca_file = Cert("none")}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("tls.ca_file")));
  EXPECT_THAT(Call("tls:127.0.0.1:1", {.ca_file = Cert("server"),
                                       .certificate_file = Cert("server"),
                                       .key_file = Cert("empty")}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("tls.key_file")));
  EXPECT_THAT(Client::Create("tls:127.0.0.1:1", {.tls = {.certificate_file = Cert("server")}}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("both or none")));
}

TEST_F(TlsTest, ChangedFilesAreReadAgain) {
  const auto replace = [&](const std::string& with) {
    std::filesystem::rename(Key(with), Key("server"));
    std::filesystem::rename(Cert(with), Cert("server"));
  };
  ASSERT_NO_FATAL_FAILURE(StartTls(ServerFiles()));
  const std::string old_cert = Cert("old");
  std::filesystem::copy(Cert("server"), old_cert);
  const std::unique_ptr<Client> client = NewClient(tls_address_, {.ca_file = old_cert});
  ASSERT_THAT(client->ListModels(), IsOk());
  replace("other");
  const absl::Time deadline = absl::Now() + absl::Seconds(40);
  while (!Call(tls_address_, {.ca_file = Cert("server")}).ok()) ASSERT_LT(absl::Now(), deadline);
  EXPECT_FALSE(Call(tls_address_, {.ca_file = old_cert}).ok());
  EXPECT_THAT(client->ListModels(), IsOk());  // Its connection stays.
}

TEST_F(TlsTest, ASameHostLaneComesBackWithTheServer) {
  ASSERT_NO_FATAL_FAILURE(StartTls(ServerFiles()));
  const std::unique_ptr<Client> client = *Client::Create(
      tls_address_, {.timeout = absl::Seconds(20), .tls = {.ca_file = Cert("server")}});
  // What a push and a pull of a model go by.
  const auto use = [&]() -> absl::StatusOr<Lane> {
    const std::vector<float> weights(1000, 2.0f);
    EMA_RETURN_IF_ERROR(client
                            ->CreateModel("m", *Manifest::Create({{"w", Dtype::kFloat32, {1000}}}),
                                          {{.name = "ema", .schedule = *Schedule::Parse("1ba")}})
                            .status());
    EMA_ASSIGN_OR_RETURN(const std::unique_ptr<ema::Run> run, client->OpenRun("m", {}));
    const int64_t step = run->latest().has_value() ? run->latest()->step + 1 : 1;
    TrainingTime time;
    time.Set(TimeUnit::kBatch, static_cast<double>(step));
    EMA_RETURN_IF_ERROR(
        run->Push(step, time, {std::as_bytes(std::span(weights))}, absl::Seconds(20)).status());
    std::vector<float> pulled(1000);
    EMA_ASSIGN_OR_RETURN(const PullInfo info,
                         client->Pull(
                             "m", "ema", {},
                             [&](const PullInfo&) -> absl::StatusOr<std::span<std::byte>> {
                               return std::as_writable_bytes(std::span(pulled));
                             },
                             absl::Seconds(20)));
    return info.lane;
  };
  EMA_ASSERT_OK_AND_ASSIGN(const Lane before, use());
  EXPECT_EQ(before, Lane::kSharedMemory);
  const std::string address = address_;
  server_.reset();
  RpcServer::Options options;
  options.listen_addresses = {address};
  options.tls = ServerFiles();
  StartServer(options);
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (true) {
    EMA_ASSERT_OK_AND_ASSIGN(const Lane after, use());
    if (after == Lane::kSharedMemory) break;
    ASSERT_LT(absl::Now(), deadline);
    absl::SleepFor(absl::Milliseconds(100));
  }
}

TEST_F(TlsTest, AServerThatComesBackIsFoundAgain) {
  ASSERT_NO_FATAL_FAILURE(StartTls(ServerFiles()));
  const std::unique_ptr<Client> client =
      NewClient(tls_address_, {.ca_file = Cert("server")}, absl::Seconds(20));
  ASSERT_THAT(client->ListModels(), IsOk());
  const std::string address = address_;
  server_.reset();
  RpcServer::Options options;
  options.listen_addresses = {address};
  options.tls = ServerFiles();
  StartServer(options);
  EXPECT_THAT(client->ListModels(), IsOk());
}

}  // namespace
}  // namespace ema
