// SPDX-License-Identifier: Apache-2.0
#include "server/ops/options.h"

#include <unistd.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

ParsedOptions Parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "ema-server");
  return ParseOptions(static_cast<int>(arguments.size()), arguments.data());
}

TEST(OptionsTest, DefaultsServeOnLoopbackWithoutCheckpoints) {
  const ParsedOptions parsed = Parse({});
  EXPECT_FALSE(parsed.should_exit) << parsed.text;
  EXPECT_THAT(parsed.options.listen, ElementsAre("127.0.0.1:50051"));
  EXPECT_EQ(parsed.options.data_dir, "");
  EXPECT_EQ(parsed.options.device, "auto");
  EXPECT_EQ(parsed.options.memory_bytes, 0);
  EXPECT_GE(parsed.options.thread_count, 1);
}

TEST(OptionsTest, LimitsOfConnectionsAreRead) {
  const ParsedOptions parsed =
      Parse({"--max-streams-per-connection=9", "--max-message-bytes=16M", "--max-metadata-bytes=4K",
             "--max-models=3", "--max-sessions=5", "--max-watch-streams=6",
             "--handshake-timeout=2s", "--keepalive-time=30s", "--keepalive-timeout=4s"});
  ASSERT_FALSE(parsed.should_exit) << parsed.text;
  EXPECT_EQ(parsed.options.limits.max_streams_per_connection, 9);
  EXPECT_EQ(parsed.options.limits.max_message_bytes, 16 << 20);
  EXPECT_EQ(parsed.options.limits.max_metadata_bytes, 4 << 10);
  EXPECT_EQ(parsed.options.max_models, 3);
  EXPECT_EQ(parsed.options.max_sessions, 5);
  EXPECT_EQ(parsed.options.limits.max_watch_streams, 6);
  EXPECT_EQ(parsed.options.limits.handshake_timeout, absl::Seconds(2));
  EXPECT_EQ(parsed.options.limits.keepalive_time, absl::Seconds(30));
  EXPECT_EQ(parsed.options.limits.keepalive_timeout, absl::Seconds(4));
}

TEST(OptionsTest, LimitsThatGrpcCannotKeepAreRefused) {
  for (const char* const flag :
       {"--max-streams-per-connection=0", "--max-message-bytes=4M", "--max-message-bytes=2G",
        "--max-metadata-bytes=100", "--max-models=0", "--max-sessions=0", "--max-watch-streams=0",
        "--handshake-timeout=0s", "--handshake-timeout=25h", "--keepalive-time=10ms",
        "--keepalive-time=720h", "--keepalive-timeout=720h"}) {
    const ParsedOptions parsed = Parse({flag});
    EXPECT_EQ(parsed.exit_code, 2) << flag;
    const std::string name = std::string(flag).substr(0, std::string(flag).find('='));
    EXPECT_THAT(parsed.text, HasSubstr(name));
  }
}

TEST(OptionsTest, NumbersOfBytesAreReadAndPrintedInUnitsOf1024) {
  for (const auto& [text, bytes] : std::map<std::string, int64_t>{{"0", 0},
                                                                  {"4096", 4096},
                                                                  {"12B", 12},
                                                                  {"512k", 512 << 10},
                                                                  {"3MiB", 3 << 20},
                                                                  {"4gb", int64_t{4} << 30},
                                                                  {"2T", int64_t{2} << 40},
                                                                  {"4194304T", int64_t{1} << 62}}) {
    EXPECT_EQ(Parse({"--memory-bytes", text.c_str()}).options.memory_bytes, bytes) << text;
  }
  for (const char* const bad : {"", "x", "-1", "1.5G", "4X", "4194305T", "9223372036854775808",
                                "99999999999999999999K", "4G4"}) {
    const ParsedOptions parsed = Parse({"--memory-bytes", bad});
    EXPECT_EQ(parsed.exit_code, 2);
    EXPECT_THAT(parsed.text, HasSubstr(absl::StrCat("--memory-bytes: \"", bad,
                                                    "\" is not a number of bytes from 0 to ")));
  }
  const std::map<std::string, std::string> printed = {{"1000", "1000"},
                                                      {"1024", "1KiB"},
                                                      {"8M", "8MiB"},
                                                      {"8193K", "8193KiB"},
                                                      {"3T", "3TiB"},
                                                      {"1024T", "1024TiB"},
                                                      {"5000000000", "5000000000"}};
  for (const auto& [text, expected] : printed) {
    EXPECT_THAT(Parse({"--max-file-bytes", text.c_str(), "--print-config"}).text,
                HasSubstr(absl::StrCat("\nmax-file-bytes = \"", expected, "\"  # flag\n")));
  }
}

TEST(OptionsTest, WhenCheckpointsAreSavedAndKeptIsRead) {
  const ServerOptions defaults = Parse({}).options;
  EXPECT_EQ(defaults.save_every_commits, 0);
  EXPECT_EQ(defaults.save_every, absl::Minutes(10));
  EXPECT_EQ(defaults.save_step_multiple, 0);
  EXPECT_EQ(defaults.keep_last, 3);
  EXPECT_EQ(defaults.keep_every_steps, 0);
  EXPECT_EQ(defaults.scrub_interval, absl::Hours(24));
  const ParsedOptions parsed =
      Parse({"--save-every-commits=5", "--save-every=0", "--save-step-multiple=1000000000000",
             "--keep-last=7", "--keep-every-steps=5000", "--scrub-interval=1h"});
  ASSERT_FALSE(parsed.should_exit) << parsed.text;
  EXPECT_EQ(parsed.options.save_every_commits, 5);
  EXPECT_EQ(parsed.options.save_every, absl::ZeroDuration());
  EXPECT_EQ(parsed.options.save_step_multiple, 1'000'000'000'000);
  EXPECT_EQ(parsed.options.keep_last, 7);
  EXPECT_EQ(parsed.options.keep_every_steps, 5000);
  EXPECT_EQ(parsed.options.scrub_interval, absl::Hours(1));
  for (const char* const flag :
       {"--keep-last=0", "--save-every-commits=-1", "--save-every=-1s", "--keep-every-steps=-1"}) {
    EXPECT_EQ(Parse({flag}).exit_code, 2) << flag;
  }
}

TEST(OptionsTest, HowOftenStatisticsAreComputedIsRead) {
  EXPECT_EQ(Parse({}).options.statistics_every_commits, 0);
  EXPECT_EQ(Parse({"--statistics-every-commits=10"}).options.statistics_every_commits, 10);
  EXPECT_EQ(Parse({"--statistics-every-commits=-1"}).exit_code, 2);
}

TEST(OptionsTest, TlsNeedsCertificateAndKey) {
  const ParsedOptions parsed = Parse({"--tls-cert=c", "--tls-key=k", "--tls-client-ca=a"});
  ASSERT_FALSE(parsed.should_exit) << parsed.text;
  EXPECT_EQ(parsed.options.tls_cert, "c");
  EXPECT_EQ(parsed.options.tls_key, "k");
  EXPECT_EQ(parsed.options.tls_client_ca, "a");
  EXPECT_THAT(Parse({"--tls-cert=c"}).text, HasSubstr("--tls-key"));
  EXPECT_THAT(Parse({"--tls-key=k"}).text, HasSubstr("--tls-cert"));
  EXPECT_THAT(Parse({"--tls-client-ca=a"}).text, HasSubstr("--tls-cert"));
}

TEST(OptionsTest, OptionsOfAGroupAreRead) {
  const ParsedOptions parsed =
      Parse({"--group=g", "--etcd=https://a:2379,b", "--advertise=host:50051", "--member=ema-0",
             "--etcd-ca=ca", "--etcd-cert=cert", "--etcd-key=key", "--etcd-user=ema",
             "--etcd-password-file=secret", "--max-registry-outage=1m", "--group-token-file=token",
             "--group-ca=members", "--tls-cert=own", "--tls-key=own"});
  ASSERT_FALSE(parsed.should_exit) << parsed.text;
  const ServerOptions& o = parsed.options;
  EXPECT_EQ(o.group, "g");
  EXPECT_THAT(o.etcd, ElementsAre("https://a:2379", "b"));
  EXPECT_EQ(o.advertise, "host:50051");
  EXPECT_EQ(o.member, "ema-0");
  EXPECT_EQ(o.etcd_ca, "ca");
  EXPECT_EQ(o.etcd_cert, "cert");
  EXPECT_EQ(o.etcd_key, "key");
  EXPECT_EQ(o.etcd_user, "ema");
  EXPECT_EQ(o.etcd_password_file, "secret");
  EXPECT_EQ(o.max_registry_outage, absl::Minutes(1));
  EXPECT_EQ(o.group_token_file, "token");
  EXPECT_EQ(o.group_ca, "members");
  ASSERT_EQ(parsed.warnings.size(), 1);
  EXPECT_EQ(ToText(parsed.warnings[0]),
            "a crash of one server loses the averages of its group group=g expected=--data-dir");

  EXPECT_THAT(Parse({"--print-config"}).text, HasSubstr("\netcd = []  # default\n"));

  const ParsedOptions defaults = Parse({"--group=g", "--etcd=http://a", "--advertise=host:1"});
  ASSERT_FALSE(defaults.should_exit) << defaults.text;
  EXPECT_EQ(defaults.options.replace_after, absl::ZeroDuration());
  EXPECT_EQ(defaults.options.max_registry_outage, absl::Minutes(10));
  std::array<char, 256> host{};
  ASSERT_EQ(gethostname(host.data(), host.size()), 0);
  EXPECT_EQ(defaults.options.member, host.data());
}

TEST(OptionsTest, OptionsOfAGroupInKubernetesAreRead) {
  const ParsedOptions pod = Parse({"--group=g", "--advertise=host:1", "--kubernetes"});
  ASSERT_FALSE(pod.should_exit) << pod.text;
  EXPECT_TRUE(pod.options.kubernetes);
  const ParsedOptions elsewhere =
      Parse({"--group=g", "--advertise=host:1", "--kubernetes", "--kubernetes-api=https://a:6443",
             "--kubernetes-namespace=ema", "--kubernetes-token-file=token", "--kubernetes-ca=ca"});
  ASSERT_FALSE(elsewhere.should_exit) << elsewhere.text;
  EXPECT_EQ(elsewhere.options.kubernetes_api, "https://a:6443");
  EXPECT_EQ(elsewhere.options.kubernetes_namespace, "ema");
  EXPECT_EQ(elsewhere.options.kubernetes_token_file, "token");
  EXPECT_EQ(elsewhere.options.kubernetes_ca, "ca");
}

TEST(OptionsTest, OptionsOfAFollowerAreRead) {
  const ParsedOptions parsed =
      Parse({"--follow=emas://a:1,b:2/m", "--follow-token-file=token", "--follow-ca=ca"});
  ASSERT_FALSE(parsed.should_exit) << parsed.text;
  EXPECT_EQ(parsed.options.follow, "emas://a:1,b:2/m");
  EXPECT_EQ(parsed.options.follow_token_file, "token");
  EXPECT_EQ(parsed.options.follow_ca, "ca");
  const absl::StatusOr<FollowedModel> followed = ParseFollow(parsed.options.follow);
  ASSERT_TRUE(followed.ok()) << followed.status();
  EXPECT_EQ(followed->address, "emas://a:1,b:2");
  EXPECT_EQ(followed->model, "m");
}

TEST(OptionsTest, AServerIsReplacedOnlyWhenItNoLongerCommitsSteps) {
  const auto parse = [](const char* replace_after, const char* max_outage, const char* data_dir) {
    return Parse({"--group=g", "--etcd=http://a", "--advertise=host:1", replace_after, max_outage,
                  data_dir});
  };
  const ParsedOptions parsed =
      parse("--replace-after=10m", "--max-registry-outage=10m", "--data-dir=d");
  ASSERT_FALSE(parsed.should_exit) << parsed.text;
  EXPECT_EQ(parsed.options.replace_after, absl::Minutes(10));
  EXPECT_THAT(parse("--replace-after=9m", "--max-registry-outage=10m", "--data-dir=d").text,
              HasSubstr("--replace-after: shorter than --max-registry-outage"));
  EXPECT_THAT(parse("--replace-after=10m", "--max-registry-outage=10m", "--data-dir=").text,
              HasSubstr("--replace-after: given without --data-dir"));
  EXPECT_THAT(Parse({"--replace-after=10m"}).text,
              HasSubstr("--replace-after: given without --group"));
}

TEST(OptionsTest, CopiesNeedAGroupWithADataDirectory) {
  const auto parse = [](const char* copy_every, const char* copy_dir, const char* data_dir) {
    return Parse(
        {"--group=g", "--etcd=http://a", "--advertise=host:1", copy_every, copy_dir, data_dir});
  };
  const ParsedOptions parsed = parse("--copy-every=30s", "--copy-dir=c", "--data-dir=d");
  ASSERT_FALSE(parsed.should_exit) << parsed.text;
  EXPECT_EQ(parsed.options.copy_dir, "c");
  EXPECT_EQ(parsed.options.copy_every, absl::Seconds(30));
  EXPECT_THAT(parse("--copy-every=1m", "--copy-dir=c", "--data-dir=").text,
              HasSubstr("--copy-dir: given without --data-dir"));
  EXPECT_THAT(parse("--copy-every=30s", "--copy-dir=", "--data-dir=d").text,
              HasSubstr("--copy-every: given without --copy-dir"));
  EXPECT_THAT(Parse({"--copy-dir=c"}).text, HasSubstr("--copy-dir: given without --group"));
}

TEST(OptionsTest, FlagsAreRead) {
  const ParsedOptions parsed = Parse({"--listen",
                                      "[::1]:0,unix:/run/ema.sock",
                                      "--port-file",
                                      "p",
                                      "--device",
                                      "cpu",
                                      "--memory-bytes",
                                      "4G",
                                      "--data-dir=d",
                                      "--threads",
                                      "3",
                                      "--max-push-streams",
                                      "5",
                                      "--max-pull-streams",
                                      "6",
                                      "--max-connections",
                                      "7",
                                      "--same-host-lane",
                                      "off",
                                      "--max-window-bytes",
                                      "5M",
                                      "--session-timeout",
                                      "1m30s",
                                      "--stream-timeout",
                                      "500ms",
                                      "--drain-grace",
                                      "0s",
                                      "--log-level",
                                      "debug",
                                      "--block-bytes",
                                      "8K",
                                      "--max-file-bytes",
                                      "1G"});
  ASSERT_FALSE(parsed.should_exit) << parsed.text;
  const ServerOptions& o = parsed.options;
  EXPECT_THAT(o.listen, ElementsAre("[::1]:0", "unix:/run/ema.sock"));
  EXPECT_EQ(o.port_file, "p");
  EXPECT_EQ(o.device, "cpu");
  EXPECT_EQ(o.memory_bytes, int64_t{4} << 30);
  EXPECT_EQ(o.data_dir, "d");
  EXPECT_EQ(o.thread_count, 3);
  EXPECT_EQ(o.limits.max_push_streams, 5);
  EXPECT_EQ(o.limits.max_pull_streams, 6);
  EXPECT_EQ(o.limits.max_connections, 7);
  EXPECT_EQ(o.same_host_lane, "off");
  EXPECT_EQ(o.max_window_bytes, 5 << 20);
  EXPECT_EQ(o.limits.session_timeout, absl::Seconds(90));
  EXPECT_EQ(o.limits.stream_timeout, absl::Milliseconds(500));
  EXPECT_EQ(o.drain_grace, absl::ZeroDuration());
  EXPECT_EQ(o.log_level, "debug");
  EXPECT_EQ(o.block_bytes, 8192);
  EXPECT_EQ(o.max_file_bytes, int64_t{1} << 30);
}

struct BadCase {
  std::string name;
  std::vector<const char*> arguments;
  std::string message;
};

class BadOptionsTest : public testing::TestWithParam<BadCase> {};

TEST_P(BadOptionsTest, ExitWith2AndSayWhy) {
  const ParsedOptions parsed = Parse(GetParam().arguments);
  EXPECT_TRUE(parsed.should_exit);
  EXPECT_EQ(parsed.exit_code, 2);
  EXPECT_THAT(parsed.text, HasSubstr(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    Options, BadOptionsTest,
    testing::Values(
        BadCase{"UnknownFlag", {"--bogus"}, "--bogus"}, BadCase{"Positional", {"extra"}, "extra"},
        BadCase{"MissingValue", {"--listen"}, "--listen"},
        BadCase{"ListenWithoutPort", {"--listen", "localhost"}, "is not host:port"},
        BadCase{"ListenWithoutHost", {"--listen", ":50051"}, "is not host:port"},
        BadCase{"ListenPortTooLarge", {"--listen", "a:65536"}, "is not host:port"},
        BadCase{"ListenPortIsText", {"--listen", "a:1x"}, "is not host:port"},
        BadCase{"LaneSocketRelative",
                {"--lane-socket=lane.sock"},
                "\"lane.sock\" is not an absolute path of at most 107 bytes"},
        BadCase{"LaneSocketWithoutLane",
                {"--lane-socket=/run/ema/lane.sock", "--same-host-lane=off"},
                "--lane-socket: given with --same-host-lane off"},
        BadCase{"Device", {"--device", "tpu"}, "tpu"},
        BadCase{"Bytes", {"--memory-bytes", "4X"}, "\"4X\" is not a number of bytes"},
        BadCase{"BytesNegative", {"--memory-bytes=-1"}, "\"-1\" is not a number of bytes"},
        BadCase{"Threads", {"--threads=-1"}, "--threads"},
        BadCase{"NoStreams", {"--max-push-streams", "0"}, "--max-push-streams"},
        BadCase{"DurationWithoutUnit", {"--session-timeout", "30"}, "such as 30s"},
        BadCase{"DurationZero", {"--stream-timeout", "0s"}, "is not a duration from 1ms to 8760h"},
        BadCase{"DurationInfinite", {"--drain-grace", "inf"}, "\"inf\" is not a duration"},
        BadCase{"LogFormat", {"--log-format", "xml"}, "\"xml\" is not one of text, json"},
        BadCase{"EtcdWithoutGroup", {"--etcd=http://a"}, "--etcd: given without --group"},
        BadCase{"MemberWithoutGroup", {"--member=a"}, "--member: given without --group"},
        BadCase{"GroupWithoutEtcd",
                {"--group=g", "--advertise=a:1"},
                "--group: given without --etcd or --kubernetes"},
        BadCase{"TwoRegistries",
                {"--group=g", "--advertise=a:1", "--etcd=http://a", "--kubernetes"},
                "--kubernetes: given with --etcd"},
        BadCase{"KubernetesWithoutGroup", {"--kubernetes"}, "--kubernetes: given without --group"},
        BadCase{"KubernetesApiWithoutGroup",
                {"--kubernetes-api=https://a"},
                "--kubernetes-api: given without --group"},
        BadCase{"KubernetesCaWithEtcd",
                {"--group=g", "--advertise=a:1", "--etcd=http://a", "--kubernetes-ca=c"},
                "--kubernetes-ca: given without --kubernetes"},
        BadCase{"EtcdCaWithKubernetes",
                {"--group=g", "--advertise=a:1", "--kubernetes", "--etcd-ca=c"},
                "--etcd-ca: given without --etcd"},
        BadCase{"KubernetesApiWithoutNamespace",
                {"--group=g", "--advertise=a:1", "--kubernetes", "--kubernetes-api=https://a"},
                "--kubernetes-api: given without --kubernetes-namespace"},
        BadCase{"GroupWithoutAdvertise",
                {"--group=g", "--etcd=http://a"},
                "--group: given without --advertise"},
        BadCase{"GroupWithTokensOfClientsOnly",
                {"--group=g", "--etcd=http://a", "--advertise=a:1", "--auth-tokens=t"},
                "--group: given with --auth-tokens, but without --group-token-file"},
        BadCase{"GroupCaWithoutTls",
                {"--group=g", "--etcd=http://a", "--advertise=a:1", "--group-ca=c"},
                "--group-ca: given without --tls-cert and --tls-key"},
        BadCase{"FollowWithoutModel",
                {"--follow=ema://a:1"},
                "--follow: \"ema://a:1\" is not the URL of a model"},
        BadCase{"FollowOverHttp",
                {"--follow=http://a:1/m"},
                "--follow: \"http://a:1/m\" is not the URL of a model"},
        BadCase{"FollowModelName", {"--follow=ema://a:1/m/n"}, "--follow: model \"m/n\""},
        BadCase{"FollowWithDataDir",
                {"--follow=ema://a:1/m", "--data-dir=d"},
                "--data-dir: given with --follow: a follower only copies a model for readers"},
        BadCase{"FollowInAGroup",
                {"--follow=ema://a:1/m", "--group=g", "--etcd=http://a", "--advertise=a:1"},
                "--group: given with --follow"},
        BadCase{"FollowCaWithoutTls",
                {"--follow=ema://a:1/m", "--follow-ca=c"},
                "--follow-ca: given, but the URL of --follow does not begin with emas://"},
        BadCase{"FollowTokenWithoutFollow",
                {"--follow-token-file=t"},
                "--follow-token-file: given without --follow"},
        BadCase{"GroupName", {"--group=a/b"}, "--group: name \"a/b\": a name must be"},
        BadCase{"AdvertiseWithoutPort", {"--advertise=a"}, "\"a\" is not host:port"},
        BadCase{"AdvertisePort", {"--advertise=a:0"}, "\"a:0\" is not host:port"},
        BadCase{"AdvertiseAny", {"--advertise=0.0.0.0:1"}, "is not host:port of this server"},
        BadCase{"EtcdEmpty", {"--etcd=http://a,,b"}, "--etcd: \"\" is empty"},
        BadCase{"Switch", {"--allow-unauthenticated=perhaps"}, "is neither true nor false"},
        BadCase{"Repeated", {"--device=cpu", "--device=auto"}, "--device"},
        BadCase{"FlagLikeAnother", {"--max-modles=3"}, "did you mean \"--max-models\"?"},
        BadCase{"FlagWithUnderscores", {"--max_models", "3"}, "did you mean \"--max-models\"?"},
        BadCase{"LogLevel", {"--log-level", "loud"}, "loud"},
        BadCase{"BlockBytes", {"--block-bytes", "1000"}, "--block-bytes"},
        BadCase{"BlockBytesMultiple", {"--block-bytes", "5000"}, "--block-bytes: 5000 is no"}),
    [](const testing::TestParamInfo<BadCase>& tested) { return tested.param.name; });

TEST(OptionsTest, HelpShowsEveryOptionWithItsDefaultAndEnvironment) {
  const ParsedOptions parsed = Parse({"--help"});
  EXPECT_TRUE(parsed.should_exit);
  EXPECT_EQ(parsed.exit_code, 0);
  for (const char* text : {"--listen HOST:PORT=127.0.0.1:50051 ... (Env:EMA_LISTEN)",
                           "--config FILE (Env:EMA_CONFIG)",
                           "--allow-unauthenticated (Env:EMA_ALLOW_UNAUTHENTICATED)",
                           "BYTES=8MiB (Env:EMA_MAX_MESSAGE_BYTES)",
                           "BYTES=8KiB (Env:EMA_MAX_METADATA_BYTES)",
                           "--port-file FILE (Env:EMA_PORT_FILE)",
                           "(Env:EMA_DEVICE)",
                           "--memory-bytes BYTES=0 (Env:EMA_MEMORY_BYTES)",
                           "=0 (Env:EMA_MAX_WINDOW_BYTES)",
                           "(Env:EMA_DATA_DIR)",
                           "(Env:EMA_THREADS)",
                           "=32 (Env:EMA_MAX_PUSH_STREAMS)",
                           "=64 (Env:EMA_MAX_PULL_STREAMS)",
                           "=1024 (Env:EMA_MAX_CONNECTIONS)",
                           "=on (Env:EMA_SAME_HOST_LANE)",
                           "=30s (Env:EMA_SESSION_TIMEOUT)",
                           "=30s (Env:EMA_STREAM_TIMEOUT)",
                           "=0 (Env:EMA_SAVE_EVERY_COMMITS)",
                           "=10m (Env:EMA_SAVE_EVERY)",
                           "=0 (Env:EMA_SAVE_STEP_MULTIPLE)",
                           "=3 (Env:EMA_KEEP_LAST)",
                           "=0 (Env:EMA_KEEP_EVERY_STEPS)",
                           "=24h (Env:EMA_SCRUB_INTERVAL)",
                           "=0 (Env:EMA_STATISTICS_EVERY_COMMITS)",
                           "=1024 (Env:EMA_MAX_WATCH_STREAMS)",
                           "=64 (Env:EMA_MAX_SESSIONS)",
                           "=0 (Env:EMA_DRAIN_DELAY)",
                           "=25s (Env:EMA_DRAIN_GRACE)",
                           "(Env:EMA_GROUP)",
                           "(Env:EMA_ETCD)",
                           "=10m (Env:EMA_MAX_REGISTRY_OUTAGE)",
                           "=info (Env:EMA_LOG_LEVEL)",
                           "--version"}) {
    EXPECT_THAT(parsed.text, HasSubstr(text));
  }
  for (const char* group :
       {"Configuration:", "Addresses:", "Security:", "Memory and device:", "Checkpoints:",
        "Group of servers:", "Limits:", "Time limits:", "Logging:"}) {
    EXPECT_THAT(parsed.text, HasSubstr(absl::StrCat("\n", group, "\n")));
  }
  EXPECT_THAT(parsed.text, Not(HasSubstr("block-bytes")));
}

TEST(OptionsTest, VersionIsPrinted) {
  const ParsedOptions parsed = Parse({"--version"});
  EXPECT_TRUE(parsed.should_exit);
  EXPECT_EQ(parsed.exit_code, 0);
  EXPECT_THAT(parsed.text, absl::StrCat("ema-server ", std::string(ServerVersion()), "\n"));
}

TEST(OptionsTest, EveryLimitIsNamedInOneEvent) {
  const std::string limits = ToText(LimitsEvent(Parse({"--max-models=7"}).options));
  for (const char* text : {"limits max_push_streams=32 max_pull_streams=64 ",
                           " max_connections=1024 ", " max_message_bytes=8MiB ", " max_models=7 ",
                           " handshake_timeout=5s ", " session_timeout=30s ", " drain_grace=25s"}) {
    EXPECT_THAT(limits, HasSubstr(text));
  }
  EXPECT_THAT(limits, Not(HasSubstr("log_level")));
}

struct ListenCase {
  std::string name;
  std::vector<const char*> arguments;
  bool is_allowed;
};

class LoopbackRuleTest : public testing::TestWithParam<ListenCase> {};

TEST_P(LoopbackRuleTest, OnlyThisHostIsServedUnlessSomethingTellsWhoMay) {
  const ParsedOptions parsed = Parse(GetParam().arguments);
  if (GetParam().is_allowed) {
    EXPECT_FALSE(parsed.should_exit) << parsed.text;
    return;
  }
  EXPECT_EQ(parsed.exit_code, 2);
  for (const char* text : {"--listen: \"", "--tls-client-ca", "--allow-unauthenticated"}) {
    EXPECT_THAT(parsed.text, HasSubstr(text));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Options, LoopbackRuleTest,
    testing::Values(
        ListenCase{"V4", {"--listen=127.0.0.1:1"}, true},
        ListenCase{"V4Other", {"--listen=127.8.0.1:1"}, true},
        ListenCase{"V6", {"--listen=[::1]:1"}, true},
        ListenCase{"V6OfV4", {"--listen=[::ffff:127.0.0.1]:1"}, true},
        ListenCase{"Localhost", {"--listen=localhost:1"}, true},
        ListenCase{"Unix", {"--listen=unix:/run/ema.sock"}, true},
        ListenCase{"AllV4", {"--listen=0.0.0.0:1"}, false},
        ListenCase{"AllV6", {"--listen=[::]:1"}, false},
        ListenCase{"Network", {"--listen=10.0.0.1:1"}, false},
        // May be any address tomorrow.
        ListenCase{"Name", {"--listen=trainer:1"}, false},
        ListenCase{"NameLikeLoopback", {"--listen=127.0.0.1.example.org:1"}, false},
        ListenCase{"OneOfTwo", {"--listen=127.0.0.1:1,0.0.0.0:1"}, false},
        ListenCase{"TlsAlone", {"--listen=0.0.0.0:1", "--tls-cert=c", "--tls-key=k"}, false},
        ListenCase{"TlsClients",
                   {"--listen=0.0.0.0:1", "--tls-cert=c", "--tls-key=k", "--tls-client-ca=a"},
                   true},
        ListenCase{"Allowed", {"--listen=0.0.0.0:1", "--allow-unauthenticated"}, true},
        ListenCase{"NotAllowed", {"--listen=0.0.0.0:1", "--allow-unauthenticated=false"}, false}),
    [](const testing::TestParamInfo<ListenCase>& tested) { return tested.param.name; });

TEST(OptionsTest, TokensWithoutTlsAreDoubtedWhereOthersCanListen) {
  const auto doubts = [](std::vector<const char*> arguments) {
    arguments.push_back("--auth-tokens=tokens");
    const ParsedOptions parsed = Parse(arguments);
    EXPECT_FALSE(parsed.should_exit) << parsed.text;
    std::string text;
    for (const LogEvent& warning : parsed.warnings) text += ToText(warning) + "\n";
    return text;
  };
  EXPECT_THAT(doubts({"--listen=0.0.0.0:1"}),
              HasSubstr("tokens are sent without TLS listen=0.0.0.0:1"));
  EXPECT_EQ(doubts({"--listen=127.0.0.1:1,unix:/x"}), "");
  EXPECT_EQ(doubts({"--listen=0.0.0.0:1", "--tls-cert=c", "--tls-key=k"}), "");
}

}  // namespace
}  // namespace ema
