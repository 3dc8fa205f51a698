// SPDX-License-Identifier: Apache-2.0
//
// A server that copies the model of another one, both as they are in ema-server.
#include "server/follow/follower.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ema/client.h"
#include "ema/internal/status_macros.h"
#include "server/base/observer.h"
#include "server/core/checkpoints.h"
#include "server/rpc/rpc_server.h"
#include "server/wire/convert_types.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/tcp_proxy.h"
#include "tests/testutil/test_device.h"

namespace ema {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(100);

class PullCounter final : public ServerObserver {
 public:
  void OnPullEnded(const PullEnd&) override { ++count; }

  std::atomic<int> count = 0;
};

// A model store and the RPC server that serves it.
struct Host {
  PullCounter pulls;  // That the server has ended.
  std::shared_ptr<ModelStore> store;
  Checkpoints no_checkpoints;
  std::unique_ptr<Follower> follower;  // Null: of the followed server.
  FollowedServer followed;
  std::unique_ptr<RpcServer> server;
  std::unique_ptr<Client> client;

  ~Host() {
    if (follower != nullptr) follower->Stop();
    server = nullptr;
  }
  std::string address() const { return absl::StrCat("ema://127.0.0.1:", server->port()); }
};

// `port` 0: any.
std::unique_ptr<Host> StartHost(int64_t incarnation, int port = 0,
                                std::unique_ptr<Follower> follower = nullptr) {
  auto host = std::make_unique<Host>();
  ModelStore::Options store;
  store.memory_bytes = int64_t{64} << 20;
  store.model.incarnation = incarnation;
  store.model.block_bytes = 4096;
  host->store = std::make_shared<ModelStore>(NewTestDevice(int64_t{64} << 20), store);
  RpcServer::Options options;
  options.listen_addresses = {absl::StrCat("127.0.0.1:", port)};
  options.observer = &host->pulls;
  // Shared memory would go round a proxy.
  options.same_host_lane = false;
  if (follower != nullptr) {
    host->follower = std::move(follower);
    host->followed = {.url = host->follower->url(),
                      .check_readable = [&h = *host] { return h.follower->CheckReadable(); },
                      .check_has_version = [&h = *host] { return h.follower->CheckHasVersion(); }};
    options.followed = &host->followed;
  }
  host->server = *RpcServer::Start(host->store, &host->no_checkpoints, options);
  host->client = *Client::Create(host->address(), {.timeout = kPatience});
  if (host->follower != nullptr) host->follower->Start(host->store);
  return host;
}

std::unique_ptr<Host> StartFollower(const std::string& address) {
  return StartHost(/*incarnation=*/1000, /*port=*/0,
                   *Follower::Create({.address = address, .model = "m"}));
}

// What a version of a track is to a reader.
struct Content {
  std::string record;
  std::string bytes;
  int64_t received_bytes = 0;

  friend bool operator==(const Content& a, const Content& b) {
    return a.record == b.record && a.bytes == b.bytes;
  }
};

absl::StatusOr<Content> Read(Client& client, const std::string& track, const VersionId& id = {},
                             std::optional<VersionId> base = std::nullopt,
                             std::string before = "") {
  Content content{.bytes = std::move(before)};
  const auto target = [&](const PullInfo& info) -> absl::StatusOr<std::span<std::byte>> {
    content.bytes.resize(info.total_bytes);
    return std::as_writable_bytes(std::span(content.bytes.data(), content.bytes.size()));
  };
  EMA_ASSIGN_OR_RETURN(
      const PullInfo info,
      client.Pull("m", track, {.version = id.version, .incarnation = id.incarnation, .base = base},
                  target, kPatience));
  content.record = ToProto(info.version).DebugString();
  content.received_bytes = info.received_bytes;
  return content;
}

// Waits until the client's server has that version, or a later one.
absl::Status Await(Client& client, const VersionId& id) {
  EMA_ASSIGN_OR_RETURN(const auto watch, client.Watch("m", VersionId{}, kPatience));
  while (true) {
    EMA_ASSIGN_OR_RETURN(const VersionWatch::Item item, watch->Next());
    if (item.version.id() >= id) return absl::OkStatus();
  }
}

// Two averages, of which "slow" changes at every fourth step only, and the weights.
std::vector<TrackConfig> Tracks() {
  return {{.name = "ema", .schedule = *Schedule::Parse("2ba")},
          {.name = "slow", .schedule = *Schedule::Parse("half_life=8ba, update_interval=4ba")},
          {.name = "raw", .schedule = *Schedule::Parse("copy")}};
}

Manifest SomeManifest() {
  return *Manifest::Create(
      {{.name = "weight", .shape = {1000, 7}},
       {.name = "half", .dtype = Dtype::kBFloat16, .shape = {301}},
       {.name = "count", .dtype = Dtype::kInt64, .shape = {}, .is_buffer = true}});
}

class FollowerTest : public testing::Test {
 protected:
  void Create(const Manifest& manifest = SomeManifest()) {
    ASSERT_THAT(source_->client->CreateModel("m", manifest, Tracks(), {}, kPatience), IsOk());
    OpenRun();
  }
  void OpenRun() { EMA_ASSERT_OK_AND_ASSIGN(run_, source_->client->OpenRun("m", {}, kPatience)); }
  // Commits a step whose weights are all its number, and returns the version.
  VersionId Push(int64_t step) {
    std::vector<std::vector<std::byte>> weights;
    std::vector<std::span<const std::byte>> shards;
    for (const TensorSpec& tensor : run_->manifest().tensors()) {
      std::vector<std::byte>& bytes = weights.emplace_back(tensor.byte_count());
      const auto fill = [&](auto value) {
        for (size_t i = 0; i < bytes.size(); i += sizeof(value)) {
          std::memcpy(&bytes[i], &value, sizeof(value));
        }
      };
      if (tensor.dtype == Dtype::kFloat32) fill(static_cast<float>(step));
      if (tensor.dtype == Dtype::kBFloat16) fill(static_cast<uint16_t>(0x3f80 + step));
      if (tensor.dtype == Dtype::kInt64) fill(step);
    }
    shards.assign(weights.begin(), weights.end());
    const absl::StatusOr<Version> version =
        run_->Push(step, TrainingTime::AtBatch(step), std::move(shards), kPatience);
    EXPECT_THAT(version, IsOk());
    return version.ok() ? version->id() : VersionId();
  }
  void ExpectSame(Client& copy, const VersionId& id) {
    for (const TrackConfig& track : Tracks()) {
      SCOPED_TRACE(absl::StrCat("version ", id.version, ", track ", track.name));
      EMA_ASSERT_OK_AND_ASSIGN(const Content expected, Read(*source_->client, track.name, id));
      EMA_ASSERT_OK_AND_ASSIGN(const Content content, Read(copy, track.name, id));
      EXPECT_EQ(content.record, expected.record);
      EXPECT_TRUE(content.bytes == expected.bytes);
    }
  }

  std::unique_ptr<Host> source_ = StartHost(/*incarnation=*/7);
  std::unique_ptr<ema::Run> run_;
};

TEST_F(FollowerTest, ReadersGetTheSameVersions) {
  Create();
  const auto copy = StartFollower(source_->address());
  for (int64_t step = 1; step <= 5; ++step) {
    const VersionId id = Push(step);
    ASSERT_THAT(Await(*copy->client, id), IsOk());
    ExpectSame(*copy->client, id);
  }
  EXPECT_THAT(copy->server->health(), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const ModelInfo info, copy->client->GetModel("m"));
  EXPECT_EQ(info.manifest, SomeManifest());
  EXPECT_EQ(info.tracks, Tracks());
  EMA_ASSERT_OK_AND_ASSIGN(const auto models, copy->client->ListModels());
  ASSERT_EQ(models.size(), 1);
  EXPECT_EQ(models[0].latest->step, 5);
  EMA_ASSERT_OK_AND_ASSIGN(const auto expected, source_->client->ListVersions("m"));
  EMA_ASSERT_OK_AND_ASSIGN(const auto versions, copy->client->ListVersions("m"));
  ASSERT_EQ(versions.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(versions[i].version.id(), expected[i].version.id());
    EXPECT_EQ(versions[i].version.commit_time, expected[i].version.commit_time);
    EXPECT_EQ(versions[i].available, expected[i].available);
  }
  EMA_ASSERT_OK_AND_ASSIGN(const Version there, source_->client->GetStatistics("m"));
  EMA_ASSERT_OK_AND_ASSIGN(const Version here, copy->client->GetStatistics("m"));
  EXPECT_EQ(ToProto(here).DebugString(), ToProto(there).DebugString());
}

TEST_F(FollowerTest, AnUnchangedTrackIsSharedAndReadersPullOnlyDifferences) {
  Create();
  const auto copy = StartFollower(source_->address());
  const VersionId first = Push(4);
  ASSERT_THAT(Await(*copy->client, first), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const Content before, Read(*copy->client, "slow", first));
  const VersionId second = Push(5);
  ASSERT_THAT(Await(*copy->client, second), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto model, copy->store->Get("m"));
  EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef old, model->history().Pin(first.version));
  EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef now, model->history().Pin(second.version));
  EXPECT_EQ(now->Find("slow")->blocks, old->Find("slow")->blocks);
  for (size_t i = 0; i < now->Find("raw")->blocks.size(); ++i) {
    EXPECT_NE(now->Find("raw")->blocks[i], old->Find("raw")->blocks[i]);
  }

  EMA_ASSERT_OK_AND_ASSIGN(const Content slow,
                           Read(*copy->client, "slow", second, first, before.bytes));
  EXPECT_EQ(slow.received_bytes, 0);
  EXPECT_TRUE(slow.bytes == before.bytes);
  ExpectSame(*copy->client, second);
}

// The frozen tensor does not change.
TEST_F(FollowerTest, UnchangedBlocksOfAChangedTrackAreShared) {
  const Manifest manifest = *Manifest::Create(
      {{.name = "frozen", .shape = {int64_t{1} << 20}}, {.name = "changing", .shape = {10}}});
  ASSERT_THAT(source_->client->CreateModel("m", manifest, Tracks(), {}, kPatience), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(
      run_,
      source_->client->OpenRun("m",
                               {.shards = {{WholeTensor(manifest, 1), WholeTensor(manifest, 0)}},
                                .frozen_shard_count = 1},
                               kPatience));
  const auto copy = StartFollower(source_->address());
  std::vector<std::byte> changing(40);
  const std::vector<std::byte> frozen(size_t{4} << 20);
  std::optional<VersionId> previous;
  Content raw;
  for (int64_t step = 4; step <= 12; step += 4) {
    changing[0] = static_cast<std::byte>(step);
    EMA_ASSERT_OK_AND_ASSIGN(const Version version, run_->Push(step, TrainingTime::AtBatch(step),
                                                               {changing, frozen}, kPatience));
    ASSERT_THAT(Await(*copy->client, version.id()), IsOk());
    ExpectSame(*copy->client, version.id());
    EMA_ASSERT_OK_AND_ASSIGN(raw, Read(*copy->client, "raw", version.id(), previous, raw.bytes));
    EMA_ASSERT_OK_AND_ASSIGN(const Content whole, Read(*source_->client, "raw", version.id()));
    EXPECT_TRUE(raw == whole);
    previous = version.id();
  }
  EXPECT_GT(raw.received_bytes, 0);
  EXPECT_LT(raw.received_bytes, static_cast<int64_t>(raw.bytes.size()) / 2);
}

TEST_F(FollowerTest, AVersionThatIsGoneBeforeAllTracksArePulledIsSkipped) {
  Create(*Manifest::Create({{.name = "weight", .shape = {8000}}}));
  TcpProxy proxy(source_->server->port());
  const auto copy = StartFollower(absl::StrCat("ema://", proxy.address()));
  while (source_->server->usage().watch_streams == 0) std::this_thread::yield();
  // The follower would need a minute for 32,000 bytes.
  proxy.SetTrickle(2);
  Push(1);
  // The server has sent all of the first track, and so no longer pins its version.
  while (source_->pulls.count == 0) std::this_thread::yield();
  VersionId last;
  for (int64_t step = 2; step <= 6; ++step) last = Push(step);
  proxy.SetTrickle(0);
  ASSERT_THAT(Await(*copy->client, last), IsOk());
  ExpectSame(*copy->client, last);
  EMA_ASSERT_OK_AND_ASSIGN(const auto versions, copy->client->ListVersions("m"));
  EXPECT_EQ(versions.front().version.id(), last);
}

// A server that is started again continues with the newest version that is on its disk.
class RestartedSourceTest : public FollowerTest {
 protected:
  // Starts the followed server again with `version`, and without the later ones.
  void Restart(const VersionId& version) {
    EMA_ASSERT_OK_AND_ASSIGN(const auto model, source_->store->Get("m"));
    EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef saved,
                             model->history().Pin(version.version, version.incarnation));
    const int port = source_->server->port();
    run_ = nullptr;
    source_ = nullptr;
    source_ = StartHost(/*incarnation=*/20, port);
    EMA_ASSERT_OK_AND_ASSIGN(const auto created, source_->store->Create(model->config()));
    auto loaded = std::make_shared<Snapshot>(*saved);
    for (TrackSnapshot& track : loaded->tracks) {
      for (const TrackRef& now : created.model->Describe().tracks) {
        if (now->name() == track.track->name()) track.track = now;
      }
    }
    created.model->Restore(loaded);
    OpenRun();
  }
};

TEST_F(RestartedSourceTest, TheCopyIsServedMeanwhileAndCatchesUp) {
  Create();
  const auto copy = StartFollower(source_->address());
  Push(1);
  const VersionId second = Push(2);
  ASSERT_THAT(Await(*copy->client, second), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const Content before, Read(*copy->client, "ema", second));
  Restart(second);
  EMA_ASSERT_OK_AND_ASSIGN(const Content after, Read(*copy->client, "ema"));
  EXPECT_TRUE(after == before);
  const VersionId third = Push(3);
  EXPECT_EQ(third, (VersionId{3, 20}));
  ASSERT_THAT(Await(*copy->client, third), IsOk());
  ExpectSame(*copy->client, third);
  // No version was lost, so the earlier ones stay.
  EMA_ASSERT_OK_AND_ASSIGN(const Content still, Read(*copy->client, "ema", second));
  EXPECT_TRUE(still == before);
}

TEST_F(RestartedSourceTest, VersionsThatTheFollowedServerHasLostGiveWayToItsNewOnes) {
  Create();
  const auto copy = StartFollower(source_->address());
  const VersionId first = Push(1);
  Push(2);
  const VersionId lost = Push(3);
  ASSERT_THAT(Await(*copy->client, lost), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto watch, copy->client->Watch("m", lost, kPatience));
  Restart(first);
  const VersionId second = Push(2);
  EXPECT_EQ(second, (VersionId{2, 20}));
  // A reader that has seen the lost one gets the new one next.
  EMA_ASSERT_OK_AND_ASSIGN(const VersionWatch::Item item, watch->Next());
  EXPECT_EQ(item.version.id(), second);
  ExpectSame(*copy->client, second);
  EXPECT_THAT(Read(*copy->client, "raw", lost), ReasonIs(ErrorReason::kVersionNotKept));
}

TEST_F(FollowerTest, ADeletedModelIsDeletedAndCopiedWhenItIsCreatedAgain) {
  Create();
  const auto copy = StartFollower(source_->address());
  ASSERT_THAT(Await(*copy->client, Push(1)), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto watch, copy->client->Watch("m", std::nullopt, kPatience));
  ASSERT_THAT(source_->client->DeleteModel("m"), IsOk());
  EXPECT_THAT(watch->Next(), ReasonIs(ErrorReason::kModelNotFound));
  EXPECT_THAT(copy->client->GetModel("m"), ReasonIs(ErrorReason::kModelNotFound));

  Create(*Manifest::Create({{.name = "other", .shape = {5000}}}));
  const VersionId id = Push(1);
  absl::StatusOr<ModelInfo> info;
  do {
    info = copy->client->GetModel("m");
  } while (GetErrorReason(info.status()) == ErrorReason::kModelNotFound);
  ASSERT_THAT(info, IsOk());
  ASSERT_THAT(Await(*copy->client, id), IsOk());
  ExpectSame(*copy->client, id);
}

TEST_F(FollowerTest, VersionsStayWhenTracksChange) {
  Create();
  const auto copy = StartFollower(source_->address());
  const VersionId first = Push(1);
  ASSERT_THAT(Await(*copy->client, first), IsOk());
  const TrackConfig added{.name = "long", .schedule = *Schedule::Parse("100ba")};
  const TrackConfig faster{.name = "ema", .schedule = *Schedule::Parse("1ba")};
  ASSERT_THAT(source_->client->UpdateModel(
                  "m", {.put = {added, faster}, .remove = {"slow"}, .pause = {"raw"}}),
              IsOk());
  Push(2);  // The tracks change after it.
  const VersionId id = Push(3);
  ASSERT_THAT(Await(*copy->client, id), IsOk());
  for (const char* const track : {"ema", "raw", "long"}) {
    SCOPED_TRACE(track);
    EMA_ASSERT_OK_AND_ASSIGN(const Content expected, Read(*source_->client, track, id));
    EMA_ASSERT_OK_AND_ASSIGN(const Content content, Read(*copy->client, track, id));
    EXPECT_TRUE(content == expected);
  }
  EXPECT_THAT(Read(*copy->client, "slow", id), ReasonIs(ErrorReason::kTrackNotFound));
  EMA_ASSERT_OK_AND_ASSIGN(const ModelInfo there, source_->client->GetModel("m"));
  EMA_ASSERT_OK_AND_ASSIGN(const ModelInfo here, copy->client->GetModel("m"));
  EXPECT_EQ(here.tracks, there.tracks);

  EMA_ASSERT_OK_AND_ASSIGN(const Content expected, Read(*source_->client, "ema", first));
  EMA_ASSERT_OK_AND_ASSIGN(const Content content, Read(*copy->client, "ema", first));
  EXPECT_TRUE(content == expected);
}

TEST_F(FollowerTest, ATrackOfAnotherFormReplacesTheModel) {
  Create();
  const auto copy = StartFollower(source_->address());
  const VersionId first = Push(1);
  ASSERT_THAT(Await(*copy->client, first), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto watch, copy->client->Watch("m", first, kPatience));
  ASSERT_THAT(source_->client->UpdateModel("m", {.remove = {"slow"}}), IsOk());
  Push(2);  // The tracks change after it.
  const TrackConfig other{
      .name = "slow", .schedule = *Schedule::Parse("9ba"), .dtype = Dtype::kFloat64};
  ASSERT_THAT(source_->client->UpdateModel("m", {.put = {other}}), IsOk());
  Push(3);
  const VersionId id = Push(4);
  absl::StatusOr<VersionWatch::Item> item;
  do {
    item = watch->Next();
    ASSERT_THAT(item, IsOk());
  } while (item->version.id() < id);
  EMA_ASSERT_OK_AND_ASSIGN(const Content expected, Read(*source_->client, "slow", id));
  EMA_ASSERT_OK_AND_ASSIGN(const Content content, Read(*copy->client, "slow", id));
  EXPECT_TRUE(content == expected);
}

TEST_F(FollowerTest, CallsThatChangeAModelAreRefused) {
  Create();
  const auto copy = StartFollower(source_->address());
  const VersionId id = Push(1);
  ASSERT_THAT(Await(*copy->client, id), IsOk());
  Client& client = *copy->client;
  const std::vector<absl::Status> refused = {
      client.CreateModel("other", SomeManifest(), Tracks(), {}).status(),
      client.OpenRun("m", {}).status(),
      client.UpdateModel("m", {.pause = {"ema"}}).status(),
      client.DeleteModel("m"),
      client.AttachFile("m", "config.json", "{}"),
      client.CreateCheckpoint("m").status(),
      client.RestoreCheckpoint("m", id).status(),
      client.SetLabel("m", "best").status(),
      client.ReportMetric("m", {.id = id, .value = 1}).status(),
  };
  for (const absl::Status& status : refused) {
    EXPECT_THAT(status, ReasonIs(ErrorReason::kReadOnly));
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition,
                                 HasSubstr(absl::StrCat("this server follows ", source_->address(),
                                                        "/m and is read-only"))));
  }
  EXPECT_THAT(client.GetServerInfo(), IsOk());
  // It concerns the server. (This one cannot do it.)
  EXPECT_THAT(client.SetLogLevel(""), ReasonIs(ErrorReason::kBadRequest));
  ExpectSame(client, id);
}

TEST_F(FollowerTest, BeforeTheFirstVersionReadersWaitAndHealthChecksFail) {
  const std::string address = source_->address();
  const int port = source_->server->port();
  source_ = nullptr;
  const auto copy = StartFollower(address);
  EXPECT_THAT(copy->server->health(),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr(absl::StrCat("no version of ", address, "/m has been copied"))));
  EXPECT_THAT(copy->follower->CheckReadable(), ReasonIs(ErrorReason::kModelBusy));
  EMA_ASSERT_OK_AND_ASSIGN(const auto models, copy->client->ListModels());
  EXPECT_TRUE(models.empty());
  // A reader of a server that has just been started does not learn that there is no such model.
  EMA_ASSERT_OK_AND_ASSIGN(const auto watch, copy->client->Watch("m", VersionId{}, kPatience));
  source_ = StartHost(/*incarnation=*/7, port);
  ASSERT_NO_FATAL_FAILURE(Create());
  const VersionId id = Push(1);
  absl::StatusOr<VersionWatch::Item> item = watch->Next();
  // The follower may have asked before the model was created.
  while (GetErrorReason(item.status()) == ErrorReason::kModelNotFound) item = watch->Next();
  ASSERT_THAT(item, IsOk());
  EXPECT_EQ(item->version.id(), id);
  EXPECT_THAT(copy->server->health(), IsOk());
}

}  // namespace
}  // namespace ema
