// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "client/cli/bench.h"
#include "client/cli/checkpoint_commands.h"
#include "client/cli/commands.h"
#include "client/cli/exit_code.h"
#include "client/cli/explain.h"
#include "client/cli/output.h"
#include "client/cli/progress.h"
#include "client/cli/pull_command.h"
#include "client/cli/pulled_file.h"
#include "client/cli/server_commands.h"
#include "client/cli/track_option.h"
#include "client/cli/tracks_command.h"
#include "client/cli/weights_file.h"
#include "ema/error_reason.h"
#include "server/format/safetensors.h"
#include "tests/testutil/status_matchers.h"

namespace ema::cli {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(TrackOptionTest, ReadsEveryForm) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"raw=copy", "copy"},
      {"raw=copy,update_interval=5ba", "copy=true, update_interval=5ba"},
      {"fast=200ba", "half_life=200ba"},
      {"slow=2000ba,update_interval=10ba", "half_life=2000ba, update_interval=10ba"},
      {"slow=half_life=2000ba", "half_life=2000ba"},
      {"old=smoothing=0.99", "smoothing=0.99"},
      {"old=smoothing=0.99,update_interval=2ep", "smoothing=0.99, update_interval=2ep"}};
  for (const auto& [text, schedule] : cases) {
    SCOPED_TRACE(text);
    const absl::StatusOr<TrackOption> track = ParseTrackOption(text);
    ASSERT_THAT(track, IsOk());
    EXPECT_EQ(track->schedule.ToString(), schedule);
  }
}

TEST(TrackOptionTest, ReadsASnapshotIntervalAnywhere) {
  for (const char* text :
       {"p=sigma_rel=0.05,snapshot_interval=50ep", "p=snapshot_interval=50ep,sigma_rel=0.05",
        "p=sigma_rel=0.05, snapshot_interval=50ep, update_interval=2ba"}) {
    EMA_ASSERT_OK_AND_ASSIGN(const TrackOption track, ParseTrackOption(text));
    EXPECT_EQ(track.snapshot_interval, (TrainingDuration{50, TimeUnit::kEpoch})) << text;
    EXPECT_THAT(track.schedule.ToString(), HasSubstr("sigma_rel=0.05"));
  }
  for (const char* text : {"p=sigma_rel=0.05,snapshot_interval=50", "p=snapshot_interval=50ep",
                           "p=sigma_rel=0.05,snapshot_interval=5ba,snapshot_interval=5ba"}) {
    EXPECT_THAT(ParseTrackOption(text),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("p=")))
        << text;
  }
}

TEST(TrackOptionTest, ReadsWhatIsNotOfTheSchedule) {
  EMA_ASSERT_OK_AND_ASSIGN(
      const TrackOption option,
      ParseTrackOption("ema=200ba, tensor_rule=a:b*:ignore,dtype=float64,buffers=copy,"
                       "update_interval=5ba,tensor_rule=*.mean:copy"));
  EXPECT_EQ(option.schedule.ToString(), "half_life=200ba, update_interval=5ba");
  const TrackConfig made = option.On(nullptr);
  EXPECT_EQ(made.name, "ema");
  EXPECT_EQ(made.dtype, Dtype::kFloat64);
  EXPECT_EQ(made.buffers, TensorAction::kCopy);
  EXPECT_EQ(made.tensor_rules, (std::vector<TensorRule>{{"a:b*", TensorAction::kIgnore},
                                                        {"*.mean", TensorAction::kCopy}}));
  // What is left out stays as it is.
  EMA_ASSERT_OK_AND_ASSIGN(const TrackOption faster, ParseTrackOption("ema=100ba"));
  TrackConfig expected = made;
  expected.schedule = faster.schedule;
  EXPECT_EQ(faster.On(&made), expected);
  EMA_ASSERT_OK_AND_ASSIGN(const TrackOption plain,
                           ParseTrackOption("ema=100ba,dtype=float32,buffers=average"));
  expected.dtype = Dtype::kFloat32;
  expected.buffers = TensorAction::kAverage;
  EXPECT_EQ(plain.On(&made), expected);
}

TEST(TrackOptionTest, ReadsRulesWithSchedulesOfTheirOwn) {
  EMA_ASSERT_OK_AND_ASSIGN(
      const TrackOption option,
      ParseTrackOption("ema=200ba,tensor_rule=stem.*:50ba,"
                       "tensor_rule=head.*:smoothing=0.5,update_interval=5ba"));
  const std::vector<TensorRule> rules = option.On(nullptr).tensor_rules;
  ASSERT_THAT(rules, SizeIs(2));
  // By the track's interval, as in Python.
  EXPECT_EQ(rules[0].schedule->ToString(), "half_life=50ba, update_interval=5ba");
  EXPECT_EQ(rules[1].pattern, "head.*");
  EXPECT_EQ(rules[1].schedule->ToString(), "smoothing=0.5, update_interval=5ba");
}

TEST(TrackOptionTest, KnowsEveryFieldOfASchedule) {
  for (const ScheduleOption& field : ScheduleOptions()) {
    const std::string message(
        ParseTrackOption(absl::StrCat("ema=", field.field, "=?")).status().message());
    EXPECT_THAT(message, testing::Not(HasSubstr("did you mean"))) << field.field;
  }
}

TEST(TrackOptionTest, SaysWhichFieldIsWrong) {
  const std::pair<const char*, const char*> cases[] = {
      {"ema=2ba,dtype=bfloat16", "dtype \"bfloat16\" given, expected float32 or float64"},
      {"ema=2ba,dtype", "dtype \"\" given, expected float32 or float64"},
      {"ema=2ba,buffers=keep", "buffers \"keep\" given, expected average or copy"},
      {"ema=2ba,buffers=ignore", "buffers \"ignore\" given, expected average or copy"},
      {"ema=2ba,buffers=copy,buffers=copy", "buffers is given twice"},
      {"ema=2ba,tensor_rule=head", "tensor_rule \"head\" given, expected PATTERN:ACTION"},
      {"ema=2ba,tensor_rule=head:drop", "tensor_rule \"drop\" given, expected average, copy, "},
      {"ema=2ba,tensor_rule=head:0ba", "tensor_rule \"0ba\" given, expected average, copy, ignore"},
      {"ema=2ba,tensor_rules=head:copy", "field \"tensor_rules\"; did you mean \"tensor_rule\"?"},
      {"ema=2ba,buffer=copy", "field \"buffer\"; did you mean \"buffers\"?"},
      {"ema=2ba,update_intervals=5ba", "did you mean \"update_interval\"?"}};
  for (const auto& [text, said] : cases) {
    EXPECT_THAT(ParseTrackOption(text),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(said)));
  }
}

TEST(TrackOptionTest, RefusesTheRestAndShowsARightOne) {
  for (const char* text :
       {"", "fast", "=200ba", "fast=", "fast=200", "fast=-1ba", "fast=0ba", "fast=inf",
        "fast=smoothing=1", "fast=smoothing=x", "fast=200ba,10ba", "fast=200ba,update_interval=0ba",
        "fast=200ba,update_interval=", "fast=200ba,smoothing=0.9", "a b=copy", "../x=copy"}) {
    SCOPED_TRACE(text);
    EXPECT_THAT(ParseTrackOption(text),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("fast=200ba")));
  }
}

TEST(ProgressTest, FormatsBytes) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatBytes(int64_t{3} << 40), "3.0 TiB");
  EXPECT_EQ(FormatProgress(512, 1024, absl::Seconds(1)),
            "[###############...............]  50 %  512 B  512 B/s");
}

TEST(ExitCodeTest, FollowsTheHelp) {
  EXPECT_EQ(ExitCode(absl::OkStatus()), 0);
  EXPECT_EQ(ExitCode(absl::DataLossError("")), 1);
  EXPECT_EQ(ExitCode(absl::NotFoundError("")), 3);
  EXPECT_EQ(ExitCode(absl::OutOfRangeError("")), 3);
  EXPECT_EQ(ExitCode(absl::AlreadyExistsError("")), 4);
  EXPECT_EQ(ExitCode(absl::InvalidArgumentError("")), 4);
  EXPECT_EQ(ExitCode(absl::UnavailableError("")), 5);
  EXPECT_EQ(ExitCode(absl::DeadlineExceededError("")), 5);
  EXPECT_EQ(ExitCode(MakeError(absl::StatusCode::kUnavailable, ErrorReason::kStoreReadOnly, "")),
            4);
  EXPECT_EQ(ExitCode(MakeError(absl::StatusCode::kUnavailable, ErrorReason::kDiskFailed, "")), 4);
  EXPECT_EQ(LocalExitCode(absl::UnavailableError("")), 1);
  EXPECT_EQ(LocalExitCode(absl::NotFoundError("")), 3);
}

TEST(BenchTest, SpeedsHaveTheirMedianAndRange) {
  const Speeds odd = SpeedsOf({3, 1, 8});
  EXPECT_EQ(odd.median, 3);
  EXPECT_EQ(odd.least, 1);
  EXPECT_EQ(odd.most, 8);
  EXPECT_EQ(SpeedsOf({4, 1, 8, 2}).median, 3);
  EXPECT_EQ(SpeedsOf({7}).median, 7);
}

TEST(BenchTest, WhatCannotBeCleanedUpIsNotMade) {
  const Session session{.new_client = [] { return absl::UnauthenticatedError("no token"); }};
  // There is no client that could make a model.
  EXPECT_THAT(Bench(session, {.bytes = 4096}),
              StatusIs(absl::StatusCode::kUnauthenticated, "no token"));
}

TEST(ServerCommandsTest, InfoSaysInWordsHowTheServerStands) {
  const absl::Time now = absl::FromUnixSeconds(1'700'000'000);
  Client::ServerInfo info{.version = "1.2.3",
                          .device = "cpu",
                          .incarnation = 4,
                          .start_time = now - absl::Seconds(90.4),
                          .not_serving = "",
                          .memory_budget_bytes = int64_t{4} << 30,
                          .memory_reserved_bytes = int64_t{1} << 30,
                          .memory_used_bytes = int64_t{512} << 20,
                          .limits = {{"sessions", 2, 64}, {"unlimited_thing", {}, 0}}};
  EXPECT_EQ(DescribeServer(info, now),
            "ema-server 1.2.3 on cpu, incarnation 4\n"
            "SERVING, up 1m30s\n"
            "memory for models: 1.0 GiB reserved of 4.0 GiB, 512.0 MiB in use\n"
            "\n"
            "LIMIT            IN USE  OF\n"
            "sessions         2       64\n"
            "unlimited_thing  -       unlimited\n");
  info.not_serving = "the server is shutting down";
  EXPECT_THAT(DescribeServer(info, now), HasSubstr("NOT_SERVING: the server is shutting down"));
  EXPECT_THAT(DescribeServer(info, info.start_time + absl::Milliseconds(900)),
              HasSubstr(", up 0s\n"));
}

class PulledFileTest : public testing::Test {
 protected:
  void SetUp() override {
    char path[] = "/tmp/ema_cli_test.XXXXXX";
    ASSERT_NE(mkdtemp(path), nullptr);
    folder_ = path;
    // As a pull lays it out: a gap before "wide".
    info_.tensors = {{.spec = {.name = "odd", .dtype = Dtype::kFloat32, .shape = {3}},
                      .offset = 0,
                      .length_bytes = 12},
                     {.spec = {.name = "wide", .dtype = Dtype::kInt64, .shape = {2}},
                      .offset = 16,
                      .length_bytes = 16},
                     {.spec = {.name = "none", .dtype = Dtype::kBool, .shape = {0}},
                      .offset = 32,
                      .length_bytes = 0},
                     {.spec = {.name = "byte", .dtype = Dtype::kUInt8, .shape = {}},
                      .offset = 32,
                      .length_bytes = 1}};
    info_.total_bytes = 33;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  static std::string Read(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
  }
  size_t FileCount() const {
    return std::distance(std::filesystem::directory_iterator(folder_),
                         std::filesystem::directory_iterator());
  }

  std::string folder_;
  PullInfo info_;
};

TEST_F(PulledFileTest, WritesWhatOthersRead) {
  PulledFile file(Path("out.safetensors"));
  absl::StatusOr<std::span<std::byte>> memory = file.Reserve(info_, {{"step", "7"}});
  ASSERT_THAT(memory, IsOk());
  ASSERT_EQ(memory->size(), 33U);
  for (size_t i = 0; i < memory->size(); ++i) (*memory)[i] = static_cast<std::byte>(i);
  ASSERT_THAT(file.Commit(), IsOk());
  EXPECT_EQ(FileCount(), 1U);

  const std::string bytes = Read(Path("out.safetensors"));
  const absl::StatusOr<SafetensorsHeader> header =
      ParseSafetensorsHeader(bytes, static_cast<int64_t>(bytes.size()));
  ASSERT_THAT(header, IsOk());
  EXPECT_EQ(header->metadata.at("step"), "7");
  ASSERT_THAT(header->tensors, SizeIs(4));
  for (const SafetensorsTensor& tensor : header->tensors) {
    SCOPED_TRACE(tensor.spec.name);
    const auto pulled = std::find_if(info_.tensors.begin(), info_.tensors.end(),
                                     [&](const auto& t) { return t.spec == tensor.spec; });
    ASSERT_NE(pulled, info_.tensors.end());
    for (int64_t i = tensor.begin; i < tensor.end; ++i) {
      EXPECT_EQ(bytes[header->header_bytes + i],
                static_cast<char>(pulled->offset + i - tensor.begin));
    }
  }
}

TEST_F(PulledFileTest, AnUnfinishedFileLeavesTheOldOne) {
  std::ofstream(Path("out")) << "old";
  {
    PulledFile file(Path("out"));
    ASSERT_THAT(file.Reserve(info_, {}), IsOk());
    EXPECT_EQ(FileCount(), 2U);
  }
  EXPECT_EQ(FileCount(), 1U);
  EXPECT_EQ(Read(Path("out")), "old");
}

TEST_F(PulledFileTest, APullMayStartOver) {
  PulledFile file(Path("out"));
  ASSERT_THAT(file.Reserve(info_, {{"version", "1"}}), IsOk());
  info_.tensors.resize(1);
  info_.total_bytes = 12;
  const absl::StatusOr<std::span<std::byte>> memory = file.Reserve(info_, {{"version", "2"}});
  ASSERT_THAT(memory, IsOk());
  ASSERT_EQ(memory->size(), 12U);
  EXPECT_EQ(FileCount(), 1U);
  ASSERT_THAT(file.Commit(), IsOk());
  EXPECT_EQ(FileCount(), 1U);
  const std::string bytes = Read(Path("out"));
  const absl::StatusOr<SafetensorsHeader> header =
      ParseSafetensorsHeader(bytes, static_cast<int64_t>(bytes.size()));
  ASSERT_THAT(header, IsOk());
  EXPECT_EQ(header->metadata.at("version"), "2");
  EXPECT_THAT(header->tensors, SizeIs(1));
}

TEST_F(PulledFileTest, ReportsAFolderThatIsNotThere) {
  PulledFile file(Path("none/out"));
  EXPECT_THAT(file.Reserve(info_, {}),
              StatusIs(absl::StatusCode::kUnknown,
                       AllOf(HasSubstr("No such file"), HasSubstr("none/out.tmp-"))));
}

// As in a container, where each process is number 1.
TEST(SystemErrorTest, AFullDiskIsToldApart) {
  for (const int error : {ENOSPC, EDQUOT}) {
    EXPECT_THAT(
        SystemError(error, "reserve space for", "x"),
        AllOf(StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("reserve space for x")),
              ReasonIs(ErrorReason::kDiskFull)));
  }
  EXPECT_THAT(SystemError(EACCES, "replace", "x"),
              StatusIs(absl::StatusCode::kUnknown, "cannot replace x: Permission denied"));
}

TEST_F(PulledFileTest, WhatAKilledProcessOfTheSameNumberLeftIsNotInTheWay) {
  std::ofstream(Path("out.tmp-") + std::to_string(getpid())) << "left";
  PulledFile file(Path("out"));
  ASSERT_THAT(file.Reserve(info_, {}), IsOk());
  ASSERT_THAT(file.Commit(), IsOk());
  EXPECT_EQ(FileCount(), 2U);
  const mode_t mask = umask(0);
  umask(mask);
  EXPECT_EQ(std::filesystem::status(Path("out")).permissions(),
            static_cast<std::filesystem::perms>(0666 & ~mask));
}

TEST(SliceTest, IsReadAsNumPyWritesIt) {
  EMA_ASSERT_OK_AND_ASSIGN(
      const Manifest manifest,
      Manifest::Create({{"w[0]", Dtype::kFloat32, {10, 7, 3}}, {"s", Dtype::kFloat32, {}}}));
  struct Case {
    const char* text;
    std::vector<int64_t> offsets;
    std::vector<int64_t> extents;
  };
  for (const Case& slice : std::vector<Case>{{"w[0][2:5]", {2, 0, 0}, {3, 7, 3}},
                                             {"w[0][:,6:7]", {0, 6, 0}, {10, 1, 3}},
                                             {"w[0][9:,:2,1:3]", {9, 0, 1}, {1, 2, 2}}}) {
    EMA_ASSERT_OK_AND_ASSIGN(const TensorSlice got, ParseSlice(slice.text, manifest));
    EXPECT_EQ(got.tensor, "w[0]");
    EXPECT_EQ(got.offsets, slice.offsets) << slice.text;
    EXPECT_EQ(got.extents, slice.extents) << slice.text;
  }
  for (const char* text :
       {"", "w[0]", "w", "w[0][3]", "w[0][3:3]", "w[0][0:11]", "w[0][-1:2]", "w[0][0:1:2]",
        "w[0][a:b]", "w[0][:,:,:,:]", "x[0:1]", "s[0:1]", "w[0][1:2"}) {
    EXPECT_THAT(ParseSlice(text, manifest),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)))
        << text;
  }
}

TEST(VersionOrLabelTest, NumbersAreVersionsAndNamesAreLabels) {
  EMA_ASSERT_OK_AND_ASSIGN(const VersionOrLabel number, ParseVersionOrLabel("12", 3));
  EXPECT_EQ(number.id, (VersionId{.version = 12, .incarnation = 3}));
  EXPECT_EQ(number.label, "");
  EMA_ASSERT_OK_AND_ASSIGN(const VersionOrLabel label, ParseVersionOrLabel("resume-12"));
  EXPECT_EQ(label.id, VersionId());
  EXPECT_EQ(label.label, "resume-12");
  for (const char* text : {"0", "-3", "", "a b", "../best"}) {
    EXPECT_THAT(ParseVersionOrLabel(text),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("must be")))
        << text;
  }
  EXPECT_THAT(ParseVersionOrLabel("best", 3),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--incarnation 3")));
}

CheckpointInfo SomeCheckpoint() {
  return {.name = "c7",
          .state = CheckpointInfo::State::kCorrupt,
          .id = {.version = 7, .incarnation = 2},
          .step = 70,
          .tracks = {"ema", "raw"},
          .is_partial = true,
          .total_bytes = 2048,
          .labels = {"best", "stable"},
          .problem = "a byte is wrong"};
}

TEST(CheckpointOutputTest, SaysEverything) {
  const std::string table = CheckpointTable({SomeCheckpoint()});
  EXPECT_THAT(table, HasSubstr("CHECKPOINT  VERSION  STEP"));
  EXPECT_THAT(table, HasSubstr("c7          7        70    -          corrupt, partial  2.0 KiB  "
                               "best, stable  a byte is wrong\n"));
  CheckpointInfo good = SomeCheckpoint();
  good.problem = "";
  EXPECT_THAT(CheckpointTable({good}), HasSubstr("best, stable  -\n"));
  EXPECT_THAT(DescribeCheckpoint(SomeCheckpoint()),
              HasSubstr("version 7 of incarnation 2, step 70, committed -\n"
                        "state: corrupt, partial: a byte is wrong\nsize: 2.0 KiB\n"
                        "tracks: ema, raw\nlabels: best, stable\n"));
  EXPECT_EQ(Json(SomeCheckpoint()).dump(),
            R"({"checkpoint":"c7","state":"corrupt","incarnation":2,"version":7,"step":70,)"
            R"("commit_time":null,"tracks":["ema","raw"],"is_partial":true,"total_bytes":2048,)"
            R"("labels":["best","stable"],"problem":"a byte is wrong"})");
}

TEST(CheckpointOutputTest, LabelsSayTheirScores) {
  const CheckpointLabel by_hand = {
      .name = "stable", .id = {.version = 7, .incarnation = 2}, .step = 70};
  CheckpointLabel scored = by_hand;
  scored.name = "best";
  scored.metric = 0.25;
  scored.lower_is_better = true;
  EXPECT_EQ(LabelTable({scored, by_hand}),
            "LABEL   VERSION  STEP  METRIC\n"
            "best    7        70    0.25 (lower is better)\n"
            "stable  7        70    -\n");
  EXPECT_EQ(Json(by_hand).dump(),
            R"({"label":"stable","incarnation":2,"version":7,"step":70,"metric":null,)"
            R"("lower_is_better":false})");
}

TEST(CheckpointOutputTest, ARolledBackVersionSaysSo) {
  Version version;
  version.number = 9;
  version.restored_from = {.version = 7, .incarnation = 2};
  EXPECT_THAT(DescribeVersion(version), HasSubstr("rolled back to version 7"));
  EXPECT_THAT(VersionTable({{.version = version, .available = true}}),
              HasSubstr("  rolled back to version 7\n"));
  EXPECT_EQ(Json(version)["restored_from"].dump(), R"({"version":7,"incarnation":2})");
}

TEST(TracksOutputTest, ATrackThatWasNotDueHasNoWeight) {
  ModelInfo model{.name = "m"};
  model.tracks = {{"fast", *Schedule::Parse("10ba")}, {"slow", *Schedule::Parse("10ba")}};
  model.latest.emplace().tracks = {
      {.track = "fast", .updated = true, .update_weight = 0.0625, .update_count = 12},
      {.track = "slow", .updated = false, .update_count = 3}};
  const std::string table = TrackTable(model);
  EXPECT_THAT(table, HasSubstr(" 12       0.0625  "));
  EXPECT_THAT(table, HasSubstr(" 3        -       "));
}

TEST(StatisticsOutputTest, SaysWhatThereIs) {
  Version version;
  version.statistics = {{.track = "ema", .norm = 5, .distance = 0.25},
                        {.track = "alone", .norm = 1.5e10}};
  EXPECT_EQ(StatisticsTable(version.statistics),
            "TRACK  NORM     DISTANCE\n"
            "ema    5        0.25\n"
            "alone  1.5e+10  -\n");
  EXPECT_EQ(Json(version)["statistics"].dump(),
            R"([{"track":"ema","norm":5.0,"distance":0.25},)"
            R"({"track":"alone","norm":15000000000.0,"distance":null}])");
}

TEST(ModelOutputTest, SaysEverythingInJson) {
  ModelInfo model;
  model.name = "m";
  model.non_finite = NonFinitePolicy::kSkipTensor;
  model.latest.emplace().wire_dtype = WireDtype::kBFloat16;
  model.tracks = {{.name = "ema", .schedule = *Schedule::Parse("half_life=200ba")}};
  model.tracks[0].tensor_rules = {
      {.pattern = "stem.*", .schedule = *Schedule::Parse("smoothing=0.5")},
      {.pattern = "head.*", .action = TensorAction::kIgnore}};
  model.manifest = *Manifest::Create({{.name = "w", .shape = {4}}});
  const Json json = Json(model);
  EXPECT_EQ(json["non_finite"], "skip");
  EXPECT_EQ(json["latest"]["wire_dtype"], "bfloat16");
  EXPECT_EQ(json["tracks"][0]["tensor_rules"].dump(),
            R"([{"pattern":"stem.*","action":"average","schedule":{"smoothing":"0.5"}},)"
            R"({"pattern":"head.*","action":"ignore","schedule":null}])");
  EXPECT_THAT(DescribeModel(model),
              AllOf(HasSubstr("NaN or infinity: skip\n"), HasSubstr("sent as bfloat16\n")));
}

TEST(ModelOutputTest, InAListItHasNoRules) {
  ModelInfo model;
  const TrackConfig track = {.name = "ema", .schedule = *Schedule::Parse("half_life=200ba")};
  model.tracks = {track};
  model.pending_tracks.emplace({track});
  const Json json = Json(model);
  for (const char* tracks : {"tracks", "pending_tracks"}) {
    EXPECT_EQ(json[tracks][0]["name"], "ema") << tracks;
    EXPECT_FALSE(json[tracks][0].contains("tensor_rules")) << tracks;
  }
}

class WeightsFileTest : public testing::Test {
 protected:
  void SetUp() override {
    char path[] = "/tmp/ema_weights_test.XXXXXX";
    ASSERT_NE(mkdtemp(path), nullptr);
    folder_ = path;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << text;
  }
  // One uint8 tensor a letter, of as many bytes of it as it is long.
  void WriteTensors(const std::string& file, const std::vector<std::string>& names) const {
    std::vector<TensorSpec> specs;
    std::string data;
    for (const std::string& name : names) {
      specs.push_back(
          {.name = name, .dtype = Dtype::kUInt8, .shape = {static_cast<int64_t>(name.size())}});
      data += name;
    }
    Write(file, EncodeSafetensorsHeader(specs, {}) + data);
  }
  absl::StatusOr<std::vector<std::string>> ReadAll(const std::string& path) const {
    EMA_ASSIGN_OR_RETURN(const WeightsFile file, WeightsFile::Open(path));
    EMA_ASSIGN_OR_RETURN(const WeightsFile::Weights weights,
                         file.Read([](int64_t) { return true; }));
    std::vector<std::string> result;
    for (const auto& bytes : weights.tensors) {
      result.emplace_back(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    }
    EXPECT_EQ(static_cast<int64_t>(result.size()), file.manifest().tensor_count());
    for (size_t i = 0; i < result.size(); ++i) {
      EXPECT_EQ(file.manifest().tensor(static_cast<int64_t>(i)).name, result[i]);
    }
    return result;
  }

  std::string folder_;
};

TEST_F(WeightsFileTest, ReadsAFileAndAFolderAndItsPieces) {
  WriteTensors("model.safetensors", {"aa", "b"});
  EXPECT_THAT(ReadAll(folder_ + "/model.safetensors"), IsOkAndHolds(ElementsAre("aa", "b")));
  EXPECT_THAT(ReadAll(folder_), IsOkAndHolds(ElementsAre("aa", "b")));
  // The index goes before a whole file; a tensor that it does not name is not the model's.
  WriteTensors("model-1.safetensors", {"c", "dd", "extra"});
  WriteTensors("model-2.safetensors", {"eee"});
  Write("model.safetensors.index.json",
        R"({"metadata": {}, "weight_map": {"eee": "model-2.safetensors",)"
        R"("c": "model-1.safetensors", "dd": "model-1.safetensors"}})");
  EXPECT_THAT(ReadAll(folder_), IsOkAndHolds(ElementsAre("c", "dd", "eee")));
}

TEST_F(WeightsFileTest, FollowsTheLinksOfACache) {
  WriteTensors("blob", {"aa"});
  std::filesystem::create_symlink("blob", folder_ + "/model.safetensors");
  EXPECT_THAT(ReadAll(folder_), IsOkAndHolds(ElementsAre("aa")));
}

TEST_F(WeightsFileTest, RefusesWhatIsNotThereOrNotRight) {
  EXPECT_THAT(WeightsFile::Open(folder_),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("model.safetensors")));
  EXPECT_THAT(WeightsFile::Open(folder_ + "/none"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("none")));
  Write("model.safetensors", "not a safetensors file");
  EXPECT_THAT(WeightsFile::Open(folder_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("model.safetensors: ")));
  WriteTensors("piece.safetensors", {"a"});
  const std::vector<std::pair<const char*, const char*>> indices = {
      {"[]", "no weight_map"},
      {R"({"weight_map": {}})", "no weight_map"},
      {R"({"weight_map": {"a": 1}})", "not a name"},
      {R"({"weight_map": {"a": "../piece.safetensors"}})", "not a name"},
      {R"({"weight_map": {"b": "piece.safetensors"}})", "no tensor \"b\""}};
  for (const auto& [index, problem] : indices) {
    Write("model.safetensors.index.json", index);
    EXPECT_THAT(WeightsFile::Open(folder_),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(problem)))
        << index;
  }
}

TEST_F(WeightsFileTest, EndsWhenItIsToldTo) {
  WriteTensors("f", {"aa", "b"});
  EMA_ASSERT_OK_AND_ASSIGN(const WeightsFile file, WeightsFile::Open(folder_ + "/f"));
  int64_t done = 0;
  EXPECT_THAT(file.Read([&](int64_t bytes) {
    done = bytes;
    return false;
  }),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("interrupted")));
  EXPECT_EQ(done, 2);
}

}  // namespace
}  // namespace ema::cli
