// SPDX-License-Identifier: Apache-2.0
//
// How the registry connects to an etcd, and what it does when answers, leases and changes are lost.
#include "server/registry/etcd_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "tests/registry/watched_keys.h"
#include "tests/testutil/etcd_cluster.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/tcp_proxy.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kTtl = absl::Seconds(2);           // etcd's shortest one.
constexpr absl::Duration kCallTimeout = absl::Seconds(20);  // For busy machines.

std::unique_ptr<EtcdRegistry> NewRegistry(const std::string& endpoints,
                                          absl::Duration call_timeout = kCallTimeout) {
  return *EtcdRegistry::Create({.endpoints = endpoints, .call_timeout = call_timeout});
}

// Calls `done` until it returns true, and returns the result of the last call.
template <typename Predicate>
bool Await(const Predicate& done, absl::Duration timeout = absl::Seconds(20)) {
  const SteadyTime deadline = After(SteadyNow(), timeout);
  while (!done()) {
    if (SteadyNow() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(10));
  }
  return true;
}

TEST(EtcdOptionsTest, WrongOnesAreRefusedWithTheirText) {
  const struct {
    EtcdOptions options;
    const char* message;
  } cases[] = {
      {{.endpoints = ""}, "etcd endpoint \"\" of \"\": expected http://HOST:PORT"},
      {{.endpoints = "http://a,,b"}, "etcd endpoint \"\" of \"http://a,,b\""},
      {{.endpoints = "a,https://b"},
       "etcd endpoint \"https://b\" of \"a,https://b\": expected http"},
      {{.endpoints = "http://a/v3"}, "etcd endpoint \"http://a/v3\""},
      {{.endpoints = "a", .ca_file = "ca.pem"}, "files of TLS need https:// endpoints"},
      {{.endpoints = "https://a", .key_file = "k.pem"}, "the key needs the certificate"},
      {{.endpoints = "https://a", .ca_file = "/nowhere/ca.pem"}, "etcd: file \"/nowhere/ca.pem\""},
      {{.endpoints = "https://a", .ca_file = "/etc/passwd"},
       "etcd: file \"/etc/passwd\": expected PEM"},
  };
  for (const auto& [options, message] : cases) {
    EXPECT_THAT(EtcdRegistry::Create(options),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(message)));
  }
}

TEST(EtcdEndpointsTest, ErrorNamesEveryEndpointAndWhyItFailed) {
  const auto registry = NewRegistry("http://127.0.0.1:1,localhost:2");
  const SteadyTime start = SteadyNow();
  EXPECT_THAT(registry->CompareAndPut("/m/a", 0, "x"),
              StatusIs(absl::StatusCode::kUnavailable,
                       ContainsRegex("etcd cannot put \"/m/a\": http://127.0.0.1:1: .*refused; "
                                     "http://localhost:2: .*refused")));
  EXPECT_LT(Since(start), kCallTimeout);
}

class EtcdTest : public testing::Test {
 protected:
  const std::unique_ptr<EtcdCluster> cluster_ = *EtcdCluster::Start({});
  const std::unique_ptr<EtcdRegistry> registry_ = NewRegistry(cluster_->endpoints());
};

TEST_F(EtcdTest, SilentEtcdIsNamedAtTheDeadline) {
  const auto registry = NewRegistry(cluster_->endpoints(), absl::Seconds(2));
  ASSERT_TRUE(Await([&] { return registry->Read("/m/a").ok(); }));
  cluster_->Signal(0, SIGSTOP);
  const SteadyTime start = SteadyNow();
  EXPECT_THAT(registry->Read("/m/a"),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr(absl::StrCat("etcd cannot read \"/m/a\": ", cluster_->url(0),
                                              ": no answer within 2s"))));
  EXPECT_LT(Since(start), absl::Seconds(10));
}

TEST_F(EtcdTest, WatchSurvivesCompactionOfChangesThatItHasNotSeen) {
  WatchedKeys keys;
  const auto report = keys.callback();
  std::atomic<int64_t> compacted = 0;
  // The first update comes between the reading of all keys and the stream of changes.
  const auto watch = registry_->Watch("/m/", [&](const RegistryUpdate& update) {
    if (compacted == 0) {
      registry_->CompareAndPut("/m/a", 0, "1").status().IgnoreError();
      const absl::StatusOr<int64_t> revision = registry_->CompareAndPut("/m/b", 0, "2");
      compacted = *revision;
      EXPECT_THAT(cluster_->Etcdctl(absl::StrCat("compaction ", *revision)), IsOk());
    }
    report(update);
  });
  const WatchedKeys::Values both = {{"/m/a", "1"}, {"/m/b", "2"}};
  EXPECT_EQ(keys.Await(both), both);
  EXPECT_EQ(keys.AwaitCompleteCount(2), 2);
  EXPECT_THAT(keys.changes(), IsEmpty());
  EXPECT_THAT(registry_->CompareAndPut("/m/c", 0, "3"), IsOk());
  const WatchedKeys::Values all = {{"/m/a", "1"}, {"/m/b", "2"}, {"/m/c", "3"}};
  EXPECT_EQ(keys.Await(all), all);
}

TEST_F(EtcdTest, CutWatchReportsAllKeysAgain) {
  TcpProxy proxy(cluster_->port(0));
  const auto behind_proxy = NewRegistry(proxy.address());
  EMA_ASSERT_OK_AND_ASSIGN(const int64_t a, registry_->CompareAndPut("/m/a", 0, "1"));
  WatchedKeys keys;
  const auto watch = behind_proxy->Watch("/m/", keys.callback());
  ASSERT_EQ(keys.AwaitCompleteCount(1), 1);
  EXPECT_THAT(registry_->CompareAndPut("/m/b", 0, "2"), IsOk());
  const WatchedKeys::Values both = {{"/m/a", "1"}, {"/m/b", "2"}};
  ASSERT_EQ(keys.Await(both), both);

  proxy.SetStalled(true);
  proxy.CutAll();
  proxy.AwaitCut();
  EXPECT_THAT(registry_->CompareAndDelete("/m/a", a), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const int64_t c, registry_->CompareAndPut("/m/c", 0, "3"));
  EXPECT_THAT(cluster_->Etcdctl(absl::StrCat("compaction ", c)), IsOk());
  proxy.SetStalled(false);
  const WatchedKeys::Values last = {{"/m/b", "2"}, {"/m/c", "3"}};
  EXPECT_EQ(keys.Await(last), last);
  EXPECT_EQ(keys.AwaitCompleteCount(2), 2);
}

TEST_F(EtcdTest, LostLeaseIsReplacedUnlessAnotherMemberHasTheKey) {
  EMA_ASSERT_OK_AND_ASSIGN(const auto member, registry_->Join("/s/a", "boot-1", kTtl));
  // As if the member had been stopped for longer than its TTL.
  const auto revoke = [&] {
    return cluster_->Etcdctl(
        "get /s/a -w fields | sed -n 's/\"Lease\" : //p' | xargs printf %x | xargs "
        "etcdctl --endpoints=" +
        cluster_->endpoints() + " lease revoke");
  };
  const int64_t first = registry_->Read("/s/a")->revision;
  ASSERT_THAT(revoke(), IsOk());
  EXPECT_TRUE(Await([&] {
    const absl::StatusOr<RegistryEntry> entry = registry_->Read("/s/a");
    return entry.ok() && entry->value == "boot-1" && entry->revision > first;
  }));
  EXPECT_THAT(member->status(), IsOk());

  // The member may be faster than the other one.
  std::unique_ptr<Membership> other;
  ASSERT_TRUE(Await([&] {
    revoke().status().IgnoreError();
    absl::StatusOr<std::unique_ptr<Membership>> joined = registry_->Join("/s/a", "boot-2", kTtl);
    if (joined.ok()) other = *std::move(joined);
    return joined.ok();
  }));
  EXPECT_TRUE(Await([&] { return !member->status().ok(); }));
  EXPECT_THAT(member->status(),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("has the value \"boot-2\"")));
  EXPECT_EQ(registry_->Read("/s/a")->value, "boot-2");
  EXPECT_THAT(other->Leave(), IsOk());
  EXPECT_TRUE(Await([&] { return member->status().ok(); }));
  EXPECT_EQ(registry_->Read("/s/a")->value, "boot-1");
}

// The first answer is lost behind the proxy, so the request is made twice.
TEST_F(EtcdTest, WriteWhoseAnswerWasLostCountsOnce) {
  TcpProxy proxy(cluster_->port(0));
  const auto twice = [&](const auto& call) {
    // It waits for the lost answer for half of this time.
    const auto registry =
        NewRegistry(proxy.address() + "," + cluster_->url(0), /*call_timeout=*/absl::Seconds(6));
    EXPECT_THAT(registry->Read("/m/a"), IsOk());
    proxy.HoldReplies(true);
    call(*registry);
    proxy.HoldReplies(false);
  };
  int64_t revision = 0;
  twice([&](Registry& registry) {
    const absl::StatusOr<int64_t> put = registry.CompareAndPut("/m/a", 0, "x");
    ASSERT_THAT(put, IsOk());
    revision = *put;
  });
  EXPECT_THAT(registry_->Read("/m/a"), IsOkAndHolds(RegistryEntry{"/m/a", "x", revision}));
  twice([&](Registry& registry) {
    EXPECT_THAT(registry.CompareAndPut("/m/a", 0, "y"),
                StatusIs(absl::StatusCode::kAborted, HasSubstr("expected 0")));
  });
  twice([&](Registry& registry) {
    EXPECT_THAT(registry.CompareAndDelete("/m/a", revision), IsOk());
  });
  EXPECT_THAT(registry_->Read("/m/a"), IsOkAndHolds(RegistryEntry{.key = "/m/a"}));
}

TEST_F(EtcdTest, UserNeedsItsPasswordAndAnExpiredTokenIsRenewed) {
  for (const char* const command :
       {"user add root:secret", "user add ema:secret", "role add member",
        "user grant-role root root", "user grant-role ema member",
        "role grant-permission --prefix=true member readwrite /m/", "auth enable"}) {
    ASSERT_THAT(cluster_->Etcdctl(command), IsOk());
  }
  EXPECT_THAT(registry_->Read("/m/a"),
              StatusIs(absl::StatusCode::kUnauthenticated, HasSubstr("user name is empty")));
  EtcdOptions options = {.endpoints = cluster_->endpoints(),
                         .user = "ema",
                         .password = "wrong",
                         .call_timeout = kCallTimeout};
  EMA_ASSERT_OK_AND_ASSIGN(const auto rejected, EtcdRegistry::Create(options));
  const SteadyTime created = rejected->last_contact();
  EXPECT_THAT(rejected->Read("/m/a"),
              StatusIs(absl::StatusCode::kUnauthenticated,
                       AllOf(HasSubstr(absl::StrCat("etcd cannot read \"/m/a\": ", cluster_->url(0),
                                                    ": user \"ema\": ")),
                             HasSubstr("authentication failed"))));
  // It cannot use the registry, so it had no contact.
  EXPECT_EQ(rejected->last_contact(), created);
  EXPECT_THAT(rejected->health().error, testing::Not(IsOk()));
  options.password = "secret";
  EMA_ASSERT_OK_AND_ASSIGN(const auto registry, EtcdRegistry::Create(options));
  EMA_ASSERT_OK_AND_ASSIGN(const auto member, registry->Join("/m/s/a", "boot-1", kTtl));
  EXPECT_THAT(registry->Read("/s/a"),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("permission denied")));
  WatchedKeys keys;
  const auto watch = registry->Watch("/m/s/", keys.callback());
  ASSERT_EQ(keys.AwaitCompleteCount(1), 1);

  // etcd forgets its tokens.
  ASSERT_THAT(cluster_->Etcdctl("--user=root:secret auth disable"), IsOk());
  ASSERT_THAT(cluster_->Etcdctl("auth enable"), IsOk());
  EXPECT_THAT(registry->CompareAndPut("/m/s/b", 0, "x"), IsOk());
  const WatchedKeys::Values expected = {{"/m/s/a", "boot-1"}, {"/m/s/b", "x"}};
  EXPECT_EQ(keys.Await(expected), expected);
  EXPECT_TRUE(Await([&] { return member->status().ok(); }));

  // etcd still grants the member a new lease, but the member cannot put its key.
  ASSERT_THAT(cluster_->Etcdctl("--user=root:secret user revoke-role ema member"), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const std::string leases,
                           cluster_->Etcdctl("--user=root:secret lease list"));
  const std::vector<std::string> lines = absl::StrSplit(leases, '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), 2) << leases;  // A heading and the member's lease.
  ASSERT_THAT(cluster_->Etcdctl(absl::StrCat("--user=root:secret lease revoke ", lines[1])),
              IsOk());
  EXPECT_TRUE(Await([&] { return absl::IsPermissionDenied(member->status()); }));
  const SteadyTime contact = registry->last_contact();
  absl::SleepFor(2 * kTtl);
  EXPECT_EQ(registry->last_contact(), contact);
}

class EtcdTlsTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
    for (const std::string ca : {"ca", "other"}) {
      Openssl("req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=", ca,
              " -keyout ", File(ca + ".key"), " -out ", File(ca + ".pem"));
    }
    for (const std::string name : {"etcd", "member"}) {
      Openssl("req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=", name,
              " -addext subjectAltName=IP:127.0.0.1 -keyout ", File(name + ".key"), " -out ",
              File(name + ".csr"));
      Openssl("x509 -req -days 2 -copy_extensions copy -in ", File(name + ".csr"), " -CA ",
              File("ca.pem"), " -CAkey ", File("ca.key"), " -CAcreateserial -out ",
              File(name + ".pem"));
    }
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string File(const std::string& name) const { return absl::StrCat(folder_, "/", name); }
  template <typename... Parts>
  static void Openssl(const Parts&... parts) {
    const std::string command = absl::StrCat("openssl ", parts..., " 2>/dev/null");
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
  }

  std::string folder_ = (std::filesystem::temp_directory_path() / "ema-etcd-tls.XXXXXX").string();
};

TEST_F(EtcdTlsTest, BothSidesCheckCertificates) {
  EMA_ASSERT_OK_AND_ASSIGN(
      const auto cluster,
      EtcdCluster::Start(
          {.scheme = "https",
           .etcd_options = {"--cert-file=" + File("etcd.pem"), "--key-file=" + File("etcd.key"),
                            "--trusted-ca-file=" + File("ca.pem"), "--client-cert-auth"},
           .etcdctl_options = absl::StrCat("--cacert=", File("ca.pem"), " --cert=",
                                           File("member.pem"), " --key=", File("member.key"))}));
  const EtcdOptions good = {.endpoints = cluster->endpoints(),
                            .ca_file = File("ca.pem"),
                            .certificate_file = File("member.pem"),
                            .key_file = File("member.key"),
                            .call_timeout = kCallTimeout};
  EMA_ASSERT_OK_AND_ASSIGN(const auto registry, EtcdRegistry::Create(good));
  EXPECT_THAT(registry->CompareAndPut("/m/a", 0, "x"), IsOk());
  WatchedKeys keys;
  const auto watch = registry->Watch("/m/", keys.callback());
  const WatchedKeys::Values expected = {{"/m/a", "x"}};
  EXPECT_EQ(keys.Await(expected), expected);

  const auto read = [](const EtcdOptions& options) {
    return (*EtcdRegistry::Create(options))->Read("/m/a");
  };
  EtcdOptions wrong_ca = good;
  wrong_ca.ca_file = File("other.pem");
  EXPECT_THAT(read(wrong_ca),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr(cluster->url(0)), HasSubstr("certificate"))));
  EtcdOptions no_certificate = good;
  no_certificate.certificate_file = no_certificate.key_file = "";
  EXPECT_THAT(read(no_certificate),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr(cluster->url(0))));
  EtcdOptions no_tls = {.endpoints =
                            absl::StrReplaceAll(cluster->endpoints(), {{"https://", "http://"}})};
  EXPECT_THAT(read(no_tls), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("http://")));
}

}  // namespace
}  // namespace ema
