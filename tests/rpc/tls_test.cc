// SPDX-License-Identifier: Apache-2.0
//
// Connections over TLS: who gets in, and who does not.
#include <stdlib.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "ema/client.h"
#include "tests/rpc/rpc_fixture.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

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
  // Key and certificate of 127.0.0.1 that is good from the one time to the other.
  void MakeValid(const std::string& name, absl::Time start, absl::Time end) {
    const std::string place = absl::StrCat(folder_, "/", name);
    std::ofstream(place + ".index").close();
    std::ofstream(place + ".cnf")
        << "[ca]\ndefault_ca = a\n[a]\ndatabase = " << place
        << ".index\nnew_certs_dir = " << folder_
        << "\nrand_serial = yes\ndefault_md = sha256\npolicy = p\ncopy_extensions = copy\n"
        << "[p]\ncommonName = supplied\n";
    Openssl("req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=", name,
            " -addext subjectAltName=IP:127.0.0.1 -keyout ", Key(name), " -out ", place, ".csr");
    const auto text = [](absl::Time time) {
      return absl::FormatTime("%Y%m%d%H%M%SZ", time, absl::UTCTimeZone());
    };
    Openssl("ca -batch -notext -selfsign -config ", place, ".cnf -keyfile ", Key(name), " -in ",
            place, ".csr -out ", Cert(name), " -startdate ", text(start), " -enddate ", text(end));
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
    options.log = [this](const LogEvent& event) {
      absl::MutexLock lock(&mu_);
      events_.push_back(event);
    };
    StartServer(options);
    tls_address_ = absl::StrCat("tls:", address_);
  }

  static std::unique_ptr<Client> NewClient(const std::string& address, const Client::Tls& tls,
                                           absl::Duration timeout = absl::Seconds(20)) {
    return *Client::Create(address, {.timeout = timeout, .same_host_lane = false, .tls = tls});
  }
  // A call that is no use without a connection.
  static absl::Status Call(const std::string& address, const Client::Tls& tls,
                           absl::Duration timeout = absl::Seconds(20)) {
    return NewClient(address, tls, timeout)->ListModels().status();
  }
  // One that may fail, and does so soon.
  static absl::Status TryCall(const std::string& address, const Client::Tls& tls) {
    return Call(address, tls, absl::Seconds(2));
  }

  // All at once, as a rename does it.
  static void Replace(const std::string& path, const std::string& text) {
    std::ofstream(path + ".new") << text;
    std::filesystem::rename(path + ".new", path);
  }
  static std::string TextOf(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // The server looks now and then.
  void AwaitRejected(bool is_rejected) const {
    const absl::Time deadline = absl::Now() + absl::Seconds(60);
    while (server_->certificate()->is_rejected != is_rejected) {
      ASSERT_LT(absl::Now(), deadline);
      absl::SleepFor(absl::Milliseconds(5));
    }
  }
  void AwaitServed(const std::string& certificate) const {
    const absl::Time deadline = absl::Now() + absl::Seconds(60);
    while (!TryCall(tls_address_, {.ca_file = certificate}).ok()) ASSERT_LT(absl::Now(), deadline);
  }
  // What the log was told of the files since the last call.
  std::vector<std::string> TakeTold() {
    absl::MutexLock lock(&mu_);
    std::vector<std::string> told;
    for (const LogEvent& event : std::exchange(events_, {})) {
      if (event.name.starts_with("TLS ")) {
        told.push_back(
            absl::StrCat(event.level == LogLevel::kError ? "error " : "info ", ToText(event)));
      }
    }
    return told;
  }

  std::string folder_ = "/tmp/ema-tls-test-XXXXXX";
  std::string tls_address_;
  absl::Mutex mu_;
  std::vector<LogEvent> events_ ABSL_GUARDED_BY(mu_);
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
    EMA_ASSERT_OK_AND_ASSIGN(
        const std::unique_ptr<PendingPush> push,
        run->StartPush(step, TrainingTime::AtBatch(step), {std::as_bytes(std::span(weights))},
                       absl::Seconds(20)));
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
  EXPECT_THAT(TryCall(tls_address_, {.ca_file = Cert("other")}),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("tls:127.0.0.1")));
  // Another name than the certificate's.
  EXPECT_THAT(TryCall(absl::StrCat("tls:localhost:", server_->port()), {.ca_file = Cert("server")}),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("localhost")));
  EXPECT_FALSE(TryCall(address_, {}).ok());
  EXPECT_THAT(Call(tls_address_, {.ca_file = Cert("server")}), IsOk());  // It still serves.
}

TEST_F(TlsTest, ClientsShowACertificateWhereTheServerAsksForOne) {
  TlsFiles files = ServerFiles();
  files.client_ca = Cert("server");
  ASSERT_NO_FATAL_FAILURE(StartTls(files));
  EXPECT_FALSE(TryCall(tls_address_, {.ca_file = Cert("server")}).ok());
  EXPECT_FALSE(TryCall(tls_address_, {.ca_file = Cert("server"),
                                      .certificate_file = Cert("other"),
                                      .key_file = Key("other")})
                   .ok());
  const Client::Tls trainer = {
      .ca_file = Cert("server"), .certificate_file = Cert("trainer"), .key_file = Key("trainer")};
  EXPECT_THAT(Call(tls_address_, trainer), IsOk());
  // Without tokens it may do what admins may.
  EXPECT_THAT(NewClient(tls_address_, trainer)->DeleteModel("m"), IsOk());
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
  // Whose writer never comes.
  ASSERT_EQ(mkfifo(Key("pipe").c_str(), 0600), 0);
  refuses({Cert("server"), Key("pipe"), ""}, "not a regular file");
  Replace(Cert("long"), std::string((1 << 20) + 1, '\n'));
  refuses({Cert("long"), Key("server"), ""}, "longer than");
  // A chain whose second certificate is broken.
  Replace(Cert("half"), TextOf(Cert("server")) + TextOf(Cert("other")).substr(0, 100));
  refuses({Cert("half"), Key("server"), ""}, Cert("half"));
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
  while (!TryCall(tls_address_, {.ca_file = Cert("server")}).ok()) ASSERT_LT(absl::Now(), deadline);
  EXPECT_FALSE(TryCall(tls_address_, {.ca_file = old_cert}).ok());
  EXPECT_THAT(client->ListModels(), IsOk());  // Its connection stays.
}

TEST_F(TlsTest, AKeyThatIsReplacedBeforeItsCertificateWaitsForIt) {
  ASSERT_NO_FATAL_FAILURE(StartTls(ServerFiles()));
  const std::string old_cert = Cert("old");
  std::filesystem::copy(Cert("server"), old_cert);
  const absl::Time old_expiry = server_->certificate()->expiry;
  EXPECT_GT(old_expiry, absl::Now() + absl::Hours(47));
  EXPECT_LT(old_expiry, absl::Now() + absl::Hours(49));
  Openssl("req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 9 -subj /CN=new",
          " -addext subjectAltName=IP:127.0.0.1 -keyout ", Key("new"), " -out ", Cert("new"));

  Replace(Key("server"), TextOf(Key("new")));
  ASSERT_NO_FATAL_FAILURE(AwaitRejected(true));
  // Longer than gRPC takes to look at its files.
  const absl::Time until = absl::Now() + absl::Seconds(2);
  while (absl::Now() < until) ASSERT_THAT(Call(tls_address_, {.ca_file = old_cert}), IsOk());
  EXPECT_EQ(server_->certificate()->expiry, old_expiry);
  EXPECT_THAT(TakeTold(),
              ElementsAre(AllOf(StartsWith("error TLS files reload failed"),
                                HasSubstr(Key("server")), HasSubstr("does not match"))));

  Replace(Cert("server"), TextOf(Cert("new")));
  ASSERT_NO_FATAL_FAILURE(AwaitServed(Cert("new")));
  EXPECT_FALSE(TryCall(tls_address_, {.ca_file = old_cert}).ok());
  EXPECT_FALSE(server_->certificate()->is_rejected);
  EXPECT_GT(server_->certificate()->expiry, absl::Now() + absl::Hours(24 * 8));
  EXPECT_THAT(TakeTold(),
              ElementsAre(AllOf(StartsWith("info TLS files reloaded"), HasSubstr("not_after="))));
}

TEST_F(TlsTest, FilesThatTurnBadLeaveTheServerWithWhatItHas) {
  TlsFiles files = ServerFiles();
  files.client_ca = Cert("ca");
  std::filesystem::copy(Cert("server"), files.client_ca);
  std::filesystem::copy(Cert("server"), Cert("old"));
  ASSERT_NO_FATAL_FAILURE(StartTls(files));
  const Client::Tls ours = {
      .ca_file = Cert("old"), .certificate_file = Cert("trainer"), .key_file = Key("trainer")};
  const auto garbage = [](const std::string& path) { Replace(path, "no certificate, secret"); };
  const auto gone = [](const std::string& path) { std::filesystem::remove(path); };
  const auto pipe = [](const std::string& path) {
    std::filesystem::remove(path);
    ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  };
  const std::vector<std::pair<std::string, std::function<void(const std::string&)>>> cases = {
      {files.certificate, garbage},
      {files.key, garbage},
      {files.client_ca, garbage},
      {files.key, gone},
      {files.key, pipe},
  };
  for (const auto& [path, spoil] : cases) {
    SCOPED_TRACE(path);
    const std::string text = TextOf(path);
    spoil(path);
    ASSERT_NO_FATAL_FAILURE(AwaitRejected(true));
    EXPECT_THAT(Call(tls_address_, ours), IsOk());
    const std::vector<std::string> told = TakeTold();
    EXPECT_THAT(told, ElementsAre(AllOf(StartsWith("error "), HasSubstr(path))));
    EXPECT_THAT(told, ElementsAre(testing::Not(HasSubstr("secret"))));
    Replace(path, text);
    ASSERT_NO_FATAL_FAILURE(AwaitRejected(false));
    EXPECT_THAT(TakeTold(), ElementsAre(StartsWith("info TLS files reloaded")));
    EXPECT_THAT(Call(tls_address_, ours), IsOk());
  }
}

TEST_F(TlsTest, ACertificateThatIsNotValidNowReplacesNoneThatIs) {
  const absl::Time now = absl::Now();
  ASSERT_NO_FATAL_FAILURE(MakeValid("expired", now - absl::Hours(9), now - absl::Hours(1)));
  const TlsFiles files = {Cert("both"), Cert("both"), ""};
  const auto put = [&](const std::string& name) {
    Replace(Cert("both"), TextOf(Key(name)) + TextOf(Cert(name)));
  };
  put("server");
  ASSERT_NO_FATAL_FAILURE(StartTls(files));
  EXPECT_THAT(TakeTold(), ElementsAre());
  put("expired");
  ASSERT_NO_FATAL_FAILURE(AwaitRejected(true));
  EXPECT_THAT(Call(tls_address_, {.ca_file = Cert("server")}), IsOk());
  EXPECT_THAT(
      TakeTold(),
      ElementsAre(AllOf(StartsWith("error TLS files reload failed"),
                        HasSubstr(absl::FormatTime("%Y-%m-%dT%H:%M:%SZ; the one in use",
                                                   now - absl::Hours(1), absl::UTCTimeZone())))));
  put("server");
  ASSERT_NO_FATAL_FAILURE(AwaitRejected(false));
  // One that becomes valid is taken over then; its files do not change.
  TakeTold();
  const absl::Time before = absl::Now();
  ASSERT_NO_FATAL_FAILURE(MakeValid("soon", before + absl::Seconds(8), before + absl::Hours(1)));
  put("soon");
  ASSERT_NO_FATAL_FAILURE(AwaitRejected(true));
  ASSERT_NO_FATAL_FAILURE(AwaitRejected(false));
  EXPECT_GE(absl::Now(), before + absl::Seconds(7));
  EXPECT_THAT(TakeTold(), ElementsAre(StartsWith("error TLS files reload failed"),
                                      StartsWith("info TLS files reloaded")));
  ASSERT_NO_FATAL_FAILURE(AwaitServed(Cert("soon")));
}

TEST_F(TlsTest, WhereNoneIsValidTheNewestIsServedAndTheLogSaysSo) {
  const absl::Time now = absl::Now();
  ASSERT_NO_FATAL_FAILURE(MakeValid("old", now - absl::Hours(9), now - absl::Hours(2)));
  ASSERT_NO_FATAL_FAILURE(MakeValid("new", now - absl::Hours(9), now - absl::Hours(1)));
  Replace(Cert("both"), TextOf(Key("old")) + TextOf(Cert("old")));
  ASSERT_NO_FATAL_FAILURE(StartTls({Cert("both"), Cert("both"), ""}));
  const auto not_valid = AllOf(StartsWith("error TLS certificate not valid now"),
                               HasSubstr("not_before="), HasSubstr("not_after="));
  EXPECT_THAT(TakeTold(), ElementsAre(not_valid));
  const absl::Time old_expiry = server_->certificate()->expiry;
  Replace(Cert("both"), TextOf(Key("new")) + TextOf(Cert("new")));
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (server_->certificate()->expiry == old_expiry) ASSERT_LT(absl::Now(), deadline);
  Replace(Cert("both"), TextOf(Key("server")) + TextOf(Cert("server")));
  ASSERT_NO_FATAL_FAILURE(AwaitServed(Cert("server")));
  EXPECT_THAT(TakeTold(), ElementsAre(StartsWith("info TLS files reloaded"), not_valid,
                                      StartsWith("info TLS files reloaded")));
  EXPECT_FALSE(server_->certificate()->is_rejected);
}

TEST_F(TlsTest, ANewCaDecidesWhichClientsGetIn) {
  TlsFiles files = ServerFiles();
  files.client_ca = Cert("ca");
  std::filesystem::copy(Cert("server"), files.client_ca);
  ASSERT_NO_FATAL_FAILURE(StartTls(files));
  const auto tls = [this](const std::string& name) {
    return Client::Tls{
        .ca_file = Cert("server"), .certificate_file = Cert(name), .key_file = Key(name)};
  };
  ASSERT_THAT(Call(tls_address_, tls("trainer")), IsOk());
  Replace(files.client_ca, TextOf(Cert("other")));
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (!TryCall(tls_address_, tls("other")).ok()) ASSERT_LT(absl::Now(), deadline);
  EXPECT_FALSE(TryCall(tls_address_, tls("trainer")).ok());
}

TEST_F(TlsTest, OneFileMayHoldTheKeyAndTheChain) {
  const std::string both = Cert("both");
  // The other one's certificate is behind, and not what the server shows.
  Replace(both, TextOf(Key("server")) + TextOf(Cert("server")) + TextOf(Cert("other")));
  ASSERT_NO_FATAL_FAILURE(StartTls({both, both, ""}));
  EXPECT_THAT(Call(tls_address_, {.ca_file = Cert("server")}), IsOk());
  EXPECT_FALSE(TryCall(tls_address_, {.ca_file = Cert("other")}).ok());
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
    EMA_RETURN_IF_ERROR(run->Push(step, TrainingTime::AtBatch(step),
                                  {std::as_bytes(std::span(weights))}, absl::Seconds(20))
                            .status());
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
