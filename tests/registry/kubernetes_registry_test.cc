// SPDX-License-Identifier: Apache-2.0
//
// What the registry in Kubernetes does when answers, leases, tokens and changes are lost.
#include "server/registry/kubernetes_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/registry/kubernetes_objects.h"
#include "tests/registry/watched_keys.h"
#include "tests/testutil/fake_kubernetes.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/tcp_proxy.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Lt;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::SizeIs;

constexpr absl::Duration kTtl = absl::Seconds(2);
constexpr const char* kNames = "[a-z0-9]([-a-z0-9]*[a-z0-9])?";

template <typename Predicate>
bool Await(const Predicate& done, absl::Duration timeout = absl::Seconds(20)) {
  const SteadyTime deadline = After(SteadyNow(), timeout);
  while (!done()) {
    if (SteadyNow() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(10));
  }
  return true;
}

TEST(KubernetesObjectsTest, KeysHaveValidAndDifferentNames) {
  const std::string longest(128, 'M');
  for (const std::string& key : {std::string("/ema/g/models/gpt-2.run_1"),
                                 absl::StrCat("/ema/", longest, "/models/", longest),
                                 std::string("/"), std::string("_"), std::string("/ü")}) {
    EXPECT_THAT(ObjectName(key), AllOf(MatchesRegex(kNames), SizeIs(Lt(254)))) << key;
  }
  EXPECT_THAT(ObjectName("/ema/g/models/gpt"), MatchesRegex("ema-g-models-gpt-[0-9a-f]{20}"));
  EXPECT_NE(ObjectName("/m/a_b"), ObjectName("/m/a-b"));
  EXPECT_NE(ObjectName("/m/a"), ObjectName("/m/A"));
}

TEST(KubernetesObjectsTest, KeysOfAGroupHaveItsSelector) {
  EXPECT_EQ(SelectorOf("/ema/g/"), SelectorOf("/ema/g/models/"));
  EXPECT_NE(SelectorOf("/ema/g/"), SelectorOf("/ema/h/"));
  // Keys with these prefixes may belong to several groups.
  EXPECT_EQ(SelectorOf("/ema/"), SelectorOf("/ema/g"));
}

TEST(KubernetesObjectsTest, ForeignObjectsAreNoKeys) {
  const auto parse = [](const std::string& text) {
    return ParseObject(KubernetesKind::kLease, text).has_value();
  };
  const std::string metadata =
      R"({"metadata":{"resourceVersion":"7","annotations":{"ema.dev/key":"/s/a"}})";
  EXPECT_TRUE(parse(metadata + R"(,"spec":{"leaseDurationSeconds":2}})"));
  for (const std::string& text :
       {std::string(""), std::string("[]"), std::string(R"({"metadata":3})"), metadata + "}",
        metadata + R"(,"spec":{"leaseDurationSeconds":"2"}})",
        std::string(R"({"metadata":{"resourceVersion":"7"},"spec":{"leaseDurationSeconds":2}})")}) {
    EXPECT_FALSE(parse(text)) << text;
  }
}

TEST(KubernetesOptionsTest, WrongOnesAreRefusedWithTheirText) {
  const struct {
    KubernetesOptions options;
    const char* message;
  } cases[] = {
      {{.api_url = "10.0.0.1:443"}, "API server \"10.0.0.1:443\": expected https://HOST:PORT"},
      {{.api_url = "http://a", .ca_file = "ca.pem"}, "a CA needs https://"},
      {{.api_url = "https://a", .name_space = "a/b"}, "namespace \"a/b\": expected lower-case"},
      {{.api_url = "https://a"}, "namespace \"\": expected lower-case"},
      {{.api_url = "https://a", .name_space = "n", .token_file = "/nowhere/token"},
       "file \"/nowhere/token\": "},
      {{.api_url = "https://a", .name_space = "n", .ca_file = "/nowhere/ca.pem"},
       "file \"/nowhere/ca.pem\": "},
      {{}, "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set"},
  };
  for (const auto& each : cases) {
    EXPECT_THAT(KubernetesRegistry::Create(each.options),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(each.message)));
  }
}

class KubernetesTest : public testing::Test {
 protected:
  static constexpr absl::Duration kCallTimeout = absl::Seconds(20);  // For busy machines.

  std::unique_ptr<KubernetesRegistry> NewRegistry(const std::string& url,
                                                  absl::Duration call_timeout = kCallTimeout) {
    return *KubernetesRegistry::Create(
        {.api_url = url, .name_space = "ema", .call_timeout = call_timeout});
  }
  void Control(const std::string& path) { ASSERT_THAT(server_->Control("POST", path), IsOk()); }
  std::string Objects() { return *server_->Control("GET", "/control/objects"); }

  const std::unique_ptr<FakeKubernetes> server_ = *FakeKubernetes::Start({});
  const std::unique_ptr<KubernetesRegistry> registry_ = NewRegistry(server_->url());
};

TEST_F(KubernetesTest, ErrorsNameTheKeyAndTheServer) {
  EXPECT_THAT(registry_->CompareAndPut("/m/a", 0, std::string((1 << 20) + 1, 'x')),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr(absl::StrCat("Kubernetes cannot put \"/m/a\": ",
                                                    server_->url(), ", namespace \"ema\": ")),
                             HasSubstr("422 Invalid"), HasSubstr("at most 1048576 bytes"))));
  EXPECT_THAT(registry_->CompareAndPut("/m/a", 0, std::string(4 << 20, 'x')),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("413")));
  EXPECT_THAT(registry_->Join("/s/a", std::string(300 << 10, 'x'), kTtl),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("422 Invalid")));
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto elsewhere,
      KubernetesRegistry::Create({.api_url = server_->url(), .name_space = "other"}));
  EXPECT_THAT(
      elsewhere->CompareAndPut("/m/a", 0, "x"),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("namespaces \"other\" not found")));
}

TEST_F(KubernetesTest, OverloadedServerIsUnavailable) {
  const SteadyTime created = registry_->last_contact();
  for (const int status : {429, 500, 503}) {
    Control(absl::StrCat("/control/fail?status=", status));
    EXPECT_THAT(registry_->CompareAndPut("/m/a", 0, "x"),
                StatusIs(absl::StatusCode::kUnavailable, HasSubstr(absl::StrCat(status))));
    EXPECT_THAT(registry_->health().error, StatusIs(absl::StatusCode::kUnavailable, testing::_));
  }
  Control("/control/fail?status=403");
  EXPECT_THAT(registry_->Read("/m/a"),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("403")));
  EXPECT_THAT(registry_->health().error, Not(IsOk()));
  // The server cannot use the registry, so it had no contact.
  EXPECT_EQ(registry_->last_contact(), created);
  // A conflict with something else than the key, such as a quota.
  Control("/control/fail?status=409");
  EXPECT_THAT(registry_->CompareAndPut("/m/a", 0, "x"),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("409")));
  EXPECT_THAT(registry_->CompareAndPut("/m/a", 0, "x"), IsOk());
  EXPECT_GT(registry_->last_contact(), created);
  EXPECT_THAT(registry_->health().error, IsOk());
}

TEST_F(KubernetesTest, LeaseThatIsDeletedDuringTheJoinIsCreated) {
  // It is deleted after the answer, so it cannot be read any more.
  Control("/control/fail?status=409&reason=AlreadyExists");
  EXPECT_THAT(registry_->Join("/s/a", "boot-1", kTtl), IsOk());
  EXPECT_EQ(registry_->Read("/s/a")->value, "boot-1");
}

TEST_F(KubernetesTest, OtherProgramBehindTheAddressIsReported) {
  const auto registry = NewRegistry(server_->url() + "/control/objects?");
  EXPECT_THAT(registry->ReadPrefix("/m/"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("does not answer as an API server does")));
}

TEST_F(KubernetesTest, WriteWhoseAnswerWasLostCountsOnce) {
  Control("/control/lose-answers");
  EMA_ASSERT_OK_AND_ASSIGN(const int64_t first, registry_->CompareAndPut("/m/a", 0, "x"));
  EXPECT_THAT(registry_->Read("/m/a"), IsOkAndHolds(RegistryEntry{"/m/a", "x", first}));
  Control("/control/lose-answers");
  EMA_ASSERT_OK_AND_ASSIGN(const int64_t second, registry_->CompareAndPut("/m/a", first, "y"));
  EXPECT_THAT(registry_->Read("/m/a"), IsOkAndHolds(RegistryEntry{"/m/a", "y", second}));
  // Nothing was lost here, so an equal value of another server is a conflict.
  EXPECT_THAT(registry_->CompareAndPut("/m/a", first, "y"),
              StatusIs(absl::StatusCode::kAborted, testing::_));
  Control("/control/lose-answers");
  EXPECT_THAT(registry_->CompareAndDelete("/m/a", second), IsOk());
  EXPECT_THAT(registry_->Read("/m/a"), IsOkAndHolds(RegistryEntry{.key = "/m/a"}));
  EXPECT_THAT(registry_->CompareAndDelete("/m/a", second),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("has revision 0")));
}

TEST_F(KubernetesTest, MemberSurvivesLostAnswers) {
  Control("/control/lose-answers");
  // A renewal may be late on a busy machine.
  EMA_ASSERT_OK_AND_ASSIGN(const auto member,
                           registry_->Join("/s/a", "boot-1", /*ttl=*/absl::Seconds(6)));
  WatchedKeys keys;
  const auto watch = registry_->Watch("/s/", keys.callback());
  ASSERT_EQ(keys.AwaitCompleteCount(1), 1);
  // Whether a renewal loses its answer, or the removal does.
  Control("/control/lose-answers");
  EXPECT_EQ(keys.Await({}, absl::Seconds(9)), (WatchedKeys::Values{{"/s/a", "boot-1"}}));
  EXPECT_THAT(member->status(), IsOk());
  Control("/control/lose-answers");
  EXPECT_THAT(member->Leave(), IsOk());
  EXPECT_EQ(Objects(), "[]\n");
}

TEST_F(KubernetesTest, WatchFromCompactedVersionReportsAllKeysAgain) {
  WatchedKeys keys;
  const auto report = keys.callback();
  bool is_compacted = false;
  // Between the list and the stream of changes.
  const auto watch = registry_->Watch("/m/", [&](const RegistryUpdate& update) {
    if (!is_compacted) {
      is_compacted = true;
      EXPECT_THAT(registry_->CompareAndPut("/m/a", 0, "1"), IsOk());
      Control("/control/compact");
    }
    report(update);
  });
  const WatchedKeys::Values expected = {{"/m/a", "1"}};
  EXPECT_EQ(keys.Await(expected), expected);
  EXPECT_EQ(keys.AwaitCompleteCount(2), 2);
  EXPECT_THAT(keys.changes(), IsEmpty());
}

TEST_F(KubernetesTest, RegularEndOfAWatchIsNoInterruption) {
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto registry,
      KubernetesRegistry::Create(
          {.api_url = server_->url(), .name_space = "ema", .log = [](const LogEvent& event) {
             ADD_FAILURE() << ToText(event);
           }}));
  EMA_ASSERT_OK_AND_ASSIGN(const int64_t a, registry->CompareAndPut("/m/a", 0, "1"));
  WatchedKeys keys;
  const auto watch = registry->Watch("/m/", keys.callback());
  ASSERT_EQ(keys.AwaitCompleteCount(1), 1);
  for (int i = 0; i < 3; ++i) Control("/control/end-watches");
  EXPECT_THAT(registry->CompareAndPut("/m/b", 0, "2"), IsOk());
  EXPECT_THAT(registry->CompareAndDelete("/m/a", a), IsOk());
  const WatchedKeys::Values expected = {{"/m/b", "2"}};
  EXPECT_EQ(keys.Await(expected), expected);
  EXPECT_THAT(keys.changes(), Contains("/m/a deleted"));
  EXPECT_EQ(keys.AwaitCompleteCount(1), 1);
}

TEST_F(KubernetesTest, CutWatchReportsAllKeysAgain) {
  TcpProxy proxy(server_->port());
  const auto behind_proxy = NewRegistry("http://" + proxy.address());
  EMA_ASSERT_OK_AND_ASSIGN(const int64_t a, registry_->CompareAndPut("/m/a", 0, "1"));
  WatchedKeys keys;
  const auto watch = behind_proxy->Watch("/m/", keys.callback());
  ASSERT_EQ(keys.AwaitCompleteCount(1), 1);
  EMA_ASSERT_OK_AND_ASSIGN(const int64_t b, registry_->CompareAndPut("/m/b", 0, "2"));
  const WatchedKeys::Values both = {{"/m/a", "1"}, {"/m/b", "2"}};
  ASSERT_EQ(keys.Await(both), both);  // The streams are open.
  proxy.CutAll();
  proxy.AwaitCut();
  EXPECT_THAT(registry_->CompareAndDelete("/m/a", a), IsOk());
  EXPECT_THAT(registry_->CompareAndDelete("/m/b", b), IsOk());
  EXPECT_THAT(registry_->CompareAndPut("/m/c", 0, "3"), IsOk());
  const WatchedKeys::Values last = {{"/m/c", "3"}};
  EXPECT_EQ(keys.Await(last), last);
  EXPECT_EQ(keys.AwaitCompleteCount(2), 2);
}

TEST_F(KubernetesTest, StalledWatchDoesNotExpireALivingMember) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto member, registry_->Join("/s/a", "boot-1", kTtl));
  TcpProxy proxy(server_->port());
  const auto behind_proxy = NewRegistry("http://" + proxy.address(), absl::Seconds(1));
  WatchedKeys keys;
  const auto watch = behind_proxy->Watch("/s/", keys.callback());
  const WatchedKeys::Values joined = {{"/s/a", "boot-1"}};
  ASSERT_EQ(keys.Await(joined), joined);
  proxy.HoldReplies(true);
  absl::SleepFor(2 * kTtl);  // The renewals do not arrive, and neither does a list.
  proxy.HoldReplies(false);
  EXPECT_EQ(keys.AwaitCompleteCount(2), 2);
  EXPECT_EQ(keys.Await(joined), joined);
  EXPECT_THAT(keys.changes(), IsEmpty());
  EXPECT_THAT(member->status(), IsOk());
}

TEST_F(KubernetesTest, HungServerIsUnavailableUntilItAnswers) {
  const auto registry = NewRegistry(server_->url(), absl::Seconds(1));
  EXPECT_THAT(registry_->CompareAndPut("/m/a", 0, "1"), IsOk());
  ASSERT_TRUE(Await([&] { return registry->Read("/m/a").ok(); }));
  server_->Signal(SIGSTOP);
  EXPECT_THAT(registry->Read("/m/a"),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr("Kubernetes cannot read \"/m/a\": " + server_->url()),
                             HasSubstr("timed out"))));
  server_->Signal(SIGCONT);
  EXPECT_THAT(registry_->Read("/m/a"), IsOk());
}

TEST_F(KubernetesTest, ExpiredMemberIsDeletedAndItsNameIsFree) {
  const auto other = NewRegistry(server_->url());
  EMA_ASSERT_OK_AND_ASSIGN(auto member, registry_->Join("/s/a", "boot-1", kTtl));
  EXPECT_THAT(Objects(), HasSubstr("leases/s-a-"));
  member.reset();
  EXPECT_THAT(other->Join("/s/a", "boot-2", kTtl),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("has the value \"boot-1\"")));
  WatchedKeys keys;
  const auto watch = other->Watch("/s/", keys.callback());
  EXPECT_EQ(keys.Await({}), WatchedKeys::Values());
  EXPECT_TRUE(Await([&] { return Objects() == "[]\n"; }));
  EXPECT_THAT(other->Join("/s/a", "boot-2", kTtl), IsOk());
}

TEST_F(KubernetesTest, ExpiredLeaseIsTakenOverWithoutAWatch) {
  EMA_ASSERT_OK_AND_ASSIGN(auto member, registry_->Join("/s/a", "boot-1", kTtl));
  member.reset();
  const auto other = NewRegistry(server_->url());
  EXPECT_EQ(other->Read("/s/a")->value, "boot-1");
  EXPECT_TRUE(Await([&] { return other->Read("/s/a")->revision == 0; }));
  EXPECT_THAT(other->ReadPrefix("/s/"), IsOkAndHolds(IsEmpty()));
  // The first registry has never seen it unchanged for its TTL.
  EXPECT_THAT(registry_->Join("/s/a", "boot-3", kTtl),
              StatusIs(absl::StatusCode::kAlreadyExists, testing::_));
  EMA_ASSERT_OK_AND_ASSIGN(const auto second, other->Join("/s/a", "boot-2", kTtl));
  EXPECT_EQ(registry_->Read("/s/a")->value, "boot-2");
  EXPECT_THAT(second->Leave(), IsOk());
}

TEST_F(KubernetesTest, StoppedMemberThatWasReplacedReportsIt) {
  TcpProxy proxy(server_->port());
  const auto cut_off = NewRegistry("http://" + proxy.address(), absl::Seconds(5));
  EMA_ASSERT_OK_AND_ASSIGN(const auto member, cut_off->Join("/s/a", "boot-1", kTtl));
  WatchedKeys keys;
  const auto watch = registry_->Watch("/s/", keys.callback());
  proxy.HoldReplies(true);
  proxy.SetStalled(true);
  EXPECT_EQ(keys.Await({}), WatchedKeys::Values());
  EMA_ASSERT_OK_AND_ASSIGN(const auto other, registry_->Join("/s/a", "boot-2", kTtl));
  proxy.CutAll();
  proxy.SetStalled(false);
  proxy.HoldReplies(false);
  EXPECT_TRUE(Await([&] { return absl::IsAlreadyExists(member->status()); }));
  EXPECT_THAT(member->status(),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("has the value \"boot-2\"")));
  EXPECT_EQ(registry_->Read("/s/a")->value, "boot-2");
  // The name is free again.
  EXPECT_THAT(other->Leave(), IsOk());
  EXPECT_TRUE(Await([&] { return member->status().ok(); }));
  EXPECT_EQ(registry_->Read("/s/a")->value, "boot-1");
}

TEST_F(KubernetesTest, DeletedLeaseIsCreatedAgain) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto member, registry_->Join("/s/a", "boot-1", kTtl));
  WatchedKeys keys;
  const auto watch = registry_->Watch("/s/", keys.callback());
  const WatchedKeys::Values joined = {{"/s/a", "boot-1"}};
  ASSERT_EQ(keys.Await(joined), joined);
  const std::string path =
      absl::StrCat("/apis/coordination.k8s.io/v1/namespaces/ema/leases/", ObjectName("/s/a"));
  ASSERT_THAT(server_->Control("DELETE", path), IsOk());
  EXPECT_TRUE(Await([&] { return keys.changes().size() >= 2; }));
  EXPECT_THAT(keys.changes(), ElementsAre("/s/a deleted", "/s/a=boot-1"));
  EXPECT_TRUE(Await([&] { return member->status().ok(); }));
}

TEST(KubernetesTokenTest, ReplacedTokenIsReadAgain) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto server, FakeKubernetes::Start({.tokens = "first"}));
  const std::string file = server->WriteFile("token", "first\n");
  std::vector<std::string> logged;
  EMA_ASSERT_OK_AND_ASSIGN(const auto registry,
                           KubernetesRegistry::Create({.api_url = server->url(),
                                                       .name_space = "ema",
                                                       .token_file = file,
                                                       .log = [&](const LogEvent& event) {
                                                         logged.push_back(event.name);
                                                       }}));
  EXPECT_THAT(logged, ElementsAre("token is sent without TLS"));
  EXPECT_THAT(registry->CompareAndPut("/m/a", 0, "1"), IsOk());
  server->SetTokens("second");
  EXPECT_THAT(registry->Read("/m/a"),
              StatusIs(absl::StatusCode::kUnauthenticated, HasSubstr("401 Unauthorized")));
  server->WriteFile("token", "second\n");
  EXPECT_THAT(registry->Read("/m/a"), IsOk());
  std::filesystem::remove(file);
  EXPECT_THAT(registry->Read("/m/a"), StatusIs(absl::StatusCode::kUnavailable, HasSubstr(file)));
}

class KubernetesTlsTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
    for (const std::string ca : {"ca", "other"}) {
      Openssl("req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=", ca,
              " -keyout ", File(ca + ".key"), " -out ", File(ca + ".pem"));
    }
    for (const auto& [name, address] : {std::pair("api", "127.0.0.1"), {"else", "127.0.0.2"}}) {
      const std::string file = File(name);
      Openssl("req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=api",
              " -addext subjectAltName=IP:", address, " -keyout ", file, ".key -out ", file,
              ".csr");
      Openssl("x509 -req -days 2 -copy_extensions copy -in ", file, ".csr -CA ", File("ca.pem"),
              " -CAkey ", File("ca.key"), " -CAcreateserial -out ", file, ".pem");
    }
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string File(const std::string& name) const { return absl::StrCat(folder_, "/", name); }
  template <typename... Parts>
  static void Openssl(const Parts&... parts) {
    const std::string command = absl::StrCat("openssl ", parts..., " 2>/dev/null");
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
  }
  static std::unique_ptr<KubernetesRegistry> NewRegistry(const std::string& url,
                                                         const std::string& ca_file) {
    return *KubernetesRegistry::Create({.api_url = url, .name_space = "ema", .ca_file = ca_file});
  }

  std::string folder_ = (std::filesystem::temp_directory_path() / "ema-tls.XXXXXX").string();
};

TEST_F(KubernetesTlsTest, CertificateOfTheServerIsChecked) {
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto server,
      FakeKubernetes::Start({.certificate_file = File("api.pem"), .key_file = File("api.key")}));
  const auto registry = NewRegistry(server->url(), File("ca.pem"));
  EXPECT_THAT(registry->CompareAndPut("/m/a", 0, "x"), IsOk());
  WatchedKeys keys;
  const auto watch = registry->Watch("/m/", keys.callback());
  const WatchedKeys::Values expected = {{"/m/a", "x"}};
  EXPECT_EQ(keys.Await(expected), expected);

  for (const std::string& ca_file : {File("other.pem"), std::string()}) {
    EXPECT_THAT(NewRegistry(server->url(), ca_file)->Read("/m/a"),
                StatusIs(absl::StatusCode::kUnavailable,
                         AllOf(HasSubstr(server->url()), HasSubstr("certificate"))))
        << ca_file;
  }
  // A certificate of the right CA, but for another address.
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto other,
      FakeKubernetes::Start({.certificate_file = File("else.pem"), .key_file = File("else.key")}));
  EXPECT_THAT(NewRegistry(other->url(), File("ca.pem"))->Read("/m/a"),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr(other->url())));
}

TEST_F(KubernetesTlsTest, PodUsesItsServiceAccount) {
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto server,
      FakeKubernetes::Start(
          {.certificate_file = File("api.pem"), .key_file = File("api.key"), .tokens = "secret"}));
  std::filesystem::copy(File("ca.pem"), File("ca.crt"));
  server->WriteFile("token", "secret");
  std::filesystem::copy(server->WriteFile("token", "secret"), File("token"));
  std::filesystem::copy(server->WriteFile("namespace", "ema"), File("namespace"));
  setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1", 1);
  setenv("KUBERNETES_SERVICE_PORT", absl::StrCat(server->port()).c_str(), 1);
  EMA_ASSERT_OK_AND_ASSIGN(const auto registry,
                           KubernetesRegistry::Create({.account_folder = folder_}));
  EXPECT_THAT(registry->CompareAndPut("/m/a", 0, "x"), IsOk());
  EXPECT_THAT(registry->health().endpoints, ElementsAre(server->url()));
  EXPECT_THAT(KubernetesRegistry::Create({.account_folder = folder_ + "/nowhere"}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("/nowhere/")));
}

}  // namespace
}  // namespace ema
