// SPDX-License-Identifier: Apache-2.0
#include "server/checkpoint/checkpoint_store.h"

#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/checkpoint/sync_latch.h"
#include "server/format/json_file.h"
#include "server/format/safetensors.h"
#include "tests/checkpoint/test_checkpoints.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const absl::Time kNow = absl::FromUnixSeconds(1'760'000'000);

std::unique_ptr<CheckpointStore> OpenStore(FileSystem& files, absl::Time now = kNow) {
  auto store = CheckpointStore::Open(files, {.data_dir = "/data"}, now);
  EXPECT_THAT(store, IsOk());
  return *std::move(store);
}

std::string CheckpointsPath(const std::string& model) {
  return absl::StrCat("/data/models/", model, "/checkpoints");
}

// Names in a model's folder that are checkpoints.
std::vector<std::string> Saved(FakeFileSystem& files, const std::string& model = "m") {
  std::vector<std::string> names;
  const auto entries = files.ListDirectory(CheckpointsPath(model));
  EXPECT_THAT(entries, IsOk());
  for (const DirectoryEntry& entry : *entries) {
    if (absl::StartsWith(entry.name, "step-")) names.push_back(entry.name);
  }
  return names;
}

absl::Status DataLoss() { return absl::DataLossError("a byte is wrong"); }

// A server's start with what `files` has.
struct Restarted {
  static ModelStore::Options WithIncarnation(int64_t incarnation) {
    ModelStore::Options options = SmallBlocks();
    options.model.incarnation = incarnation;
    return options;
  }

  explicit Restarted(FileSystem& files, absl::Time now = kNow)
      : store(OpenStore(files, now)),
        models(TestDevice(), WithIncarnation(store->data().incarnation())) {
    auto loaded = store->LoadAll(models);
    EXPECT_THAT(loaded, IsOk());
    if (loaded.ok()) report = *std::move(loaded);
  }

  std::unique_ptr<CheckpointStore> store;
  ModelStore models;
  LoadReport report;
};

TEST(CheckpointStoreTest, WhatIsSavedIsLoadedBitForBitByTheNextServer) {
  std::string directory = testing::TempDir() + "/ema_store_XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  const CheckpointStore::Options options = {.data_dir = directory + "/new/data"};
  TestVersions versions(3);
  std::string name;
  {
    EMA_ASSERT_OK_AND_ASSIGN(auto store, CheckpointStore::Open(PosixFileSystem(), options));
    EXPECT_EQ(versions.model->durable().step(), 0);
    EMA_ASSERT_OK_AND_ASSIGN(const auto saved,
                             store->FolderOf("m").Save(*versions.model, versions[3]));
    name = saved.name;
    EXPECT_EQ(name, "step-000000000030-version-7-3");
    EXPECT_EQ(versions.model->durable().step(), 30);
    int64_t file_bytes = 0;
    for (const char* track : {"fast", "slow", "raw", "exact", "some"}) {
      EMA_ASSERT_OK_AND_ASSIGN(
          const auto file,
          PosixFileSystem().OpenFile(absl::StrCat(options.data_dir, "/models/m/checkpoints/", name,
                                                  "/tracks/", track, "/model.safetensors")));
      EMA_ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header, ReadSafetensorsHeader(*file));
      EXPECT_EQ(header.metadata.at("ema.track"), track);
      EXPECT_EQ(header.metadata.at("ema.step"), "30");
      EXPECT_EQ(header.metadata.at("format"), "pt");
      EXPECT_EQ(header.header_bytes % 64, 0);
      for (const SafetensorsTensor& tensor : header.tensors) {
        EXPECT_EQ(tensor.begin % DtypeSize(tensor.spec.dtype), 0) << tensor.spec.name;
      }
      file_bytes += file->size_bytes();
    }
    EXPECT_EQ(saved.total_bytes, file_bytes);
  }
  EMA_ASSERT_OK_AND_ASSIGN(auto store, CheckpointStore::Open(PosixFileSystem(), options));
  ModelStore models(TestDevice(), SmallBlocks());
  EMA_ASSERT_OK_AND_ASSIGN(const auto report, store->LoadAll(models));
  ASSERT_EQ(report.loaded.size(), 1u);
  EXPECT_THAT(report.corrupt, IsEmpty());
  EXPECT_EQ(report.loaded[0].model, "m");
  EXPECT_EQ(report.loaded[0].checkpoint, name);
  EXPECT_EQ(report.loaded[0].record.step, 30);
  EMA_ASSERT_OK_AND_ASSIGN(const auto model, models.Get("m"));
  ExpectSameVersion(*model, *versions.model, *versions[3]);
  EXPECT_EQ(model->durable().step(), 30);
  PosixFileSystem().RemoveTree(directory).IgnoreError();
}

// As after a move to a larger disk. Nothing may begin anew in the model's place.
TEST(CheckpointStoreTest, AModelsFolderMustNotBeALinkButItsCheckpointsMay) {
  namespace fs = std::filesystem;
  std::string directory = testing::TempDir() + "/ema_store_XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  const CheckpointStore::Options options = {.data_dir = directory};
  TestVersions versions(1);
  {
    EMA_ASSERT_OK_AND_ASSIGN(auto store, CheckpointStore::Open(PosixFileSystem(), options));
    EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions[1]), IsOk());
  }
  const fs::path model = fs::path(directory) / "models/m";
  const fs::path elsewhere = fs::path(directory) / "elsewhere";
  fs::rename(model, elsewhere);
  // To nothing, where its disk is not mounted.
  for (const fs::path& target : {elsewhere, fs::path("nowhere")}) {
    fs::create_directory_symlink(target, model);
    EXPECT_THAT(
        CheckpointStore::Open(PosixFileSystem(), options).status(),
        StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("models/m is a symbolic link")));
    fs::remove(model);
  }
  fs::create_directory(model);
  fs::create_directory_symlink("nowhere", model / "checkpoints");
  EXPECT_THAT(CheckpointStore::Open(PosixFileSystem(), options).status().message(),
              HasSubstr("models/m: "));
  fs::remove(model / "checkpoints");
  fs::create_directory_symlink(elsewhere / "checkpoints", model / "checkpoints");
  EMA_ASSERT_OK_AND_ASSIGN(auto store, CheckpointStore::Open(PosixFileSystem(), options));
  ModelStore models(TestDevice(), SmallBlocks());
  EMA_ASSERT_OK_AND_ASSIGN(const auto report, store->LoadAll(models));
  EXPECT_EQ(report.loaded.size(), 1u);
  fs::remove_all(directory);
}

TEST(CheckpointStoreTest, ALoadedModelGoesOnAsIfNothingHadHappened) {
  FakeFileSystem files;
  TestVersions versions(2);
  EXPECT_THAT(OpenStore(files)->FolderOf("m").Save(*versions.model, versions[2]), IsOk());
  Restarted server(files);
  EMA_ASSERT_OK_AND_ASSIGN(const auto model, server.models.Get("m"));
  // Every epoch that an earlier life can have given is fenced.
  EXPECT_GE(model->Describe().run_epoch, server.store->data().incarnation());
  const std::vector<std::byte> weights = RandomWeights(model->manifest(), 33);
  TestRank restarted(model, "launch 2");
  ASSERT_THAT(restarted.Join(), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult after, restarted.Push(30, weights));
  TestRank uninterrupted(versions.model, "launch 2");
  ASSERT_THAT(uninterrupted.Join(), IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const PushResult expected, uninterrupted.Push(30, weights));
  EXPECT_EQ(after.record.number, expected.record.number);
  for (const char* track : {"fast", "slow", "raw", "exact", "some"}) {
    EXPECT_EQ(*ReadAll(*model, track), *ReadAll(*versions.model, track)) << track;
  }
}

TEST(CheckpointStoreTest, TracksThatWereChangedComeBackAsTheyWere) {
  FakeFileSystem files;
  TestVersions versions(2);
  TrackConfig exact = versions.model->config().tracks[3];
  exact.dtype = Dtype::kFloat32;
  ASSERT_THAT(versions.model->UpdateTracks(
                  {.put = {exact,
                           {.name = "fast", .schedule = MakeSchedule("20ba")},
                           {.name = "new", .schedule = MakeSchedule("smoothing=0.5")}},
                   .remove = {"exact", "slow"},
                   .pause = {"raw"}}),
              IsOk());
  TestRank rank(versions.model, "launch 2");
  ASSERT_THAT(rank.Join(), IsOk());
  for (const int64_t step : {30, 40}) {
    ASSERT_THAT(rank.Push(step, RandomWeights(versions.model->manifest(), 3)), IsOk());
  }
  ASSERT_THAT(versions.model->UpdateTracks(
                  {.put = {{.name = "late", .schedule = MakeSchedule("copy")}}, .pause = {"new"}}),
              IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const SnapshotRef newest, versions.model->history().Pin(0));
  EXPECT_THAT(OpenStore(files)->FolderOf("m").Save(*versions.model, newest), IsOk());

  Restarted server(files);
  EMA_ASSERT_OK_AND_ASSIGN(const auto model, server.models.Get("m"));
  std::vector<std::string> texts;
  for (const TrackRef& track : model->Describe().tracks) {
    texts.push_back(track->name() + ": " + track->config_text());
  }
  // In their order, and with what waits for the next commit.
  EXPECT_THAT(texts, testing::ElementsAre("fast: half_life=20ba", "raw: copy; paused",
                                          testing::StartsWith("some: "), "exact: half_life=30ba",
                                          "new: smoothing=0.5; paused", "late: copy"));
  for (const char* track : {"fast", "raw", "exact", "some", "new"}) {
    EXPECT_EQ(*ReadAll(*model, track), *ReadAll(*versions.model, track)) << track;
  }
  // It takes no more memory to load than to have.
  ModelStore::Options tight = SmallBlocks();
  tight.memory_bytes = model->tracks().reserved_bytes();
  ModelStore tight_models(TestDevice(), tight);
  EMA_ASSERT_OK_AND_ASSIGN(const auto report, server.store->LoadAll(tight_models));
  EXPECT_EQ(report.loaded.size(), 1u);
  // A trainer that starts again says what it said at first.
  EMA_ASSERT_OK_AND_ASSIGN(const auto again, server.models.Create(EveryKindOfModel("m")));
  EXPECT_FALSE(again.created);
}

TEST(CheckpointStoreTest, SavingAVersionAgainWritesNothing) {
  FakeFileSystem files;
  TestVersions versions(1);
  auto store = OpenStore(files);
  EMA_ASSERT_OK_AND_ASSIGN(const auto first,
                           store->FolderOf("m").Save(*versions.model, versions[1]));
  files.set_hook([](const std::string& operation, const std::string&) {
    EXPECT_THAT(operation, Not(testing::AnyOf("create", "append", "rename", "remove")));
    return absl::OkStatus();
  });
  for (int i = 0; i < 2; ++i) {
    EMA_ASSERT_OK_AND_ASSIGN(const auto again,
                             store->FolderOf("m").Save(*versions.model, versions[1]));
    EXPECT_EQ(again.name, first.name);
    EXPECT_EQ(again.total_bytes, first.total_bytes);
    // The next server does not know of it, but finds it.
    store.reset();
    files.set_hook(nullptr);
    store = OpenStore(files);
  }
}

TEST(CheckpointStoreTest, KeepsTheNewestThree) {
  FakeFileSystem files;
  TestVersions versions(5);
  auto store = OpenStore(files);
  for (int64_t version = 1; version <= 5; ++version) {
    ASSERT_THAT(store->FolderOf("m").Save(*versions.model, versions[version]), IsOk());
  }
  EXPECT_THAT(Saved(files),
              testing::ElementsAre("step-000000000030-version-7-3", "step-000000000040-version-7-4",
                                   "step-000000000050-version-7-5"));
  for (const std::string& path : files.AllPaths()) EXPECT_THAT(path, Not(HasSubstr(".tmp-")));
}

TEST(CheckpointStoreTest, AnOlderVersionSavedLateIsNotTheLatest) {
  FakeFileSystem files;
  TestVersions versions(2);
  {
    auto store = OpenStore(files);
    ASSERT_THAT(store->FolderOf("m").Save(*versions.model, versions[2]), IsOk());
    ASSERT_THAT(store->FolderOf("m").Save(*versions.model, versions[1]), IsOk());
    EXPECT_EQ(versions.model->durable().step(), 20);
    // Both are on the disk.
    EXPECT_EQ(Saved(*files.AfterCrash(PowerLoss::kNothing)).size(), 2u);
  }
  Restarted server(files);
  EXPECT_EQ(server.report.loaded.at(0).record.number, 2);
}

TEST(CheckpointStoreTest, SavesOfManyModelsAndThreadsDoNotMix) {
  std::string directory = testing::TempDir() + "/ema_store_XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  const CheckpointStore::Options options = {.data_dir = directory};
  TestVersions a(2, "a");
  TestVersions b(2, "b");
  {
    EMA_ASSERT_OK_AND_ASSIGN(auto store, CheckpointStore::Open(PosixFileSystem(), options));
    std::vector<std::thread> threads;
    for (TestVersions* versions : {&a, &b}) {
      for (int64_t version = 1; version <= 2; ++version) {
        for (int i = 0; i < 2; ++i) {
          threads.emplace_back([&store, versions, version] {
            EXPECT_THAT(store->FolderOf(versions->model->config().name)
                            .Save(*versions->model, (*versions)[version]),
                        IsOk());
          });
        }
      }
    }
    for (std::thread& thread : threads) thread.join();
  }
  EMA_ASSERT_OK_AND_ASSIGN(auto store, CheckpointStore::Open(PosixFileSystem(), options));
  ModelStore models(TestDevice(), SmallBlocks());
  EMA_ASSERT_OK_AND_ASSIGN(const auto report, store->LoadAll(models));
  ASSERT_EQ(report.loaded.size(), 2u);
  ExpectSameVersion(**models.Get("a"), *a.model, *a[2]);
  ExpectSameVersion(**models.Get("b"), *b.model, *b[2]);
  PosixFileSystem().RemoveTree(directory).IgnoreError();
}

// A data directory with versions 1 and 2 of "m".
class DamageTest : public testing::Test {
 protected:
  DamageTest() : versions_(2) {
    auto store = OpenStore(files_);
    for (int64_t version = 1; version <= 2; ++version) {
      EXPECT_THAT(store->FolderOf("m").Save(*versions_.model, versions_[version]), IsOk());
    }
  }

  static std::string PathOf(int64_t version) {
    return absl::StrCat(CheckpointsPath("m"), "/step-0000000000", version, "0-version-7-", version);
  }

  void ExpectLoads(int64_t version) {
    Restarted server(files_);
    EMA_ASSERT_OK_AND_ASSIGN(const auto model, server.models.Get("m"));
    ExpectSameVersion(*model, *versions_.model, *versions_[version]);
  }

  // Expects that version 2 is set aside with this problem, and 1 loaded.
  void ExpectCorrupt(const std::string& problem) {
    Restarted server(files_);
    ASSERT_EQ(server.report.corrupt.size(), 1u);
    EXPECT_EQ(server.report.corrupt[0].model, "m");
    EXPECT_EQ(server.report.corrupt[0].checkpoint, "step-000000000020-version-7-2");
    EXPECT_THAT(server.report.corrupt[0].problem,
                AllOf(StatusIs(absl::StatusCode::kDataLoss, HasSubstr(problem)),
                      ReasonIs(ErrorReason::kCheckpointCorrupt)));
    EMA_ASSERT_OK_AND_ASSIGN(const auto model, server.models.Get("m"));
    ExpectSameVersion(*model, *versions_.model, *versions_[1]);
    EXPECT_THAT(
        files_.AllPaths(),
        Contains(absl::StrCat(CheckpointsPath("m"), "/.corrupt-step-000000000020-version-7-2")));
  }

  FakeFileSystem files_;
  TestVersions versions_;
};

TEST_F(DamageTest, EveryChangedByteIsDetectedAndTheOlderVersionIsLoaded) {
  // Bytes of each class; a changed byte in any of them is covered by the same checksum.
  const std::string manifest = PathOf(2) + "/manifest.json";
  for (const std::string& file : {manifest, PathOf(2) + "/tracks/fast/model.safetensors",
                                  PathOf(2) + "/tracks/slow/model.safetensors",
                                  PathOf(2) + "/tracks/raw/model.safetensors"}) {
    const int64_t size = static_cast<int64_t>(files_.FileBytes(file).size());
    for (int64_t at = 0; at < size; at += at < 1200 ? 7 : 509) {
      auto files = files_.AfterCrash(PowerLoss::kNone);
      std::string& bytes = files->FileBytes(file);
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << (at % 8)));
      Restarted server(*files);
      ASSERT_EQ(server.report.corrupt.size(), 1u) << file << " " << at;
      ASSERT_EQ(server.report.loaded.size(), 1u) << file << " " << at;
      ASSERT_EQ(server.report.loaded[0].record.number, 1) << file << " " << at;
    }
  }
}

TEST_F(DamageTest, AChangedTensorIsNamed) {
  std::string& bytes = files_.FileBytes(PathOf(2) + "/tracks/raw/model.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  ExpectCorrupt("track \"raw\": tensor \"u8\": its checksum is wrong");
}

TEST_F(DamageTest, AShortFileIsNamed) {
  files_.FileBytes(PathOf(2) + "/tracks/raw/model.safetensors").pop_back();
  ExpectCorrupt("track \"raw\": file \"model.safetensors\": it has");
}

TEST_F(DamageTest, AMissingFileIsNamed) {
  ASSERT_THAT(files_.RemoveFile(PathOf(2) + "/tracks/raw/model.safetensors"), IsOk());
  ExpectCorrupt("track \"raw\": ");
}

TEST_F(DamageTest, AMissingManifestIsNamed) {
  ASSERT_THAT(files_.RemoveFile(PathOf(2) + "/manifest.json"), IsOk());
  ExpectCorrupt("manifest.json");
}

TEST_F(DamageTest, ACheckpointUnderAnotherVersionsNameIsNotLoaded) {
  ASSERT_THAT(files_.RemoveTree(PathOf(2)), IsOk());
  ASSERT_THAT(files_.Rename(PathOf(1), PathOf(2)), IsOk());
  Restarted server(files_);
  EXPECT_EQ(server.report.corrupt.size(), 1u);
  EXPECT_THAT(server.report.loaded, IsEmpty());
  EXPECT_THAT(server.models.List(), IsEmpty());
}

TEST_F(DamageTest, WithoutAGoodLatestFileTheNewestNameIsLoaded) {
  files_.FileBytes(CheckpointsPath("m") + "/LATEST")[10] ^= 1;
  ExpectLoads(2);
  ASSERT_THAT(files_.RemoveFile(CheckpointsPath("m") + "/LATEST"), IsOk());
  ExpectLoads(2);
}

TEST_F(DamageTest, TheLatestFileDecides) {
  files_.FileBytes(CheckpointsPath("m") + "/LATEST") =
      EncodeLatest("step-000000000010-version-7-1");
  ExpectLoads(1);
}

TEST_F(DamageTest, ANewestThatHasGoneIsMissedUntilThatIsAcknowledged) {
  const std::string gone = "step-000000000020-version-7-2";
  const std::string loaded = "step-000000000010-version-7-1";
  ASSERT_THAT(files_.RemoveTree(PathOf(2)), IsOk());
  for (int start = 0; start < 2; ++start) {
    Restarted server(files_);
    ASSERT_EQ(server.report.missing.size(), 1u);
    EXPECT_EQ(server.report.missing[0].model, "m");
    EXPECT_EQ(server.report.missing[0].checkpoint, gone);
    EXPECT_EQ(server.report.missing[0].loaded, loaded);
    EMA_ASSERT_OK_AND_ASSIGN(const auto stored, server.store->FolderOf("m").List());
    ASSERT_EQ(stored.size(), 2u);
    EXPECT_EQ(stored[0].name, gone);
    EXPECT_THAT(stored[0].problem,
                AllOf(StatusIs(absl::StatusCode::kDataLoss, HasSubstr("missing")),
                      ReasonIs(ErrorReason::kCheckpointCorrupt)));
    EXPECT_EQ(server.store->CountAll().at("m").corrupt, 1);
    if (start == 0) continue;
    EXPECT_THAT(server.store->FolderOf("m").Delete(gone), IsOk());
    EXPECT_EQ(server.store->CountAll().at("m").corrupt, 0);
    EXPECT_THAT(server.store->FolderOf("m").Delete(loaded),
                ReasonIs(ErrorReason::kCheckpointInUse));
  }
  EXPECT_THAT(Restarted(files_).report.missing, IsEmpty());
  EXPECT_EQ(Restarted(files_).report.loaded.size(), 1u);
}

TEST_F(DamageTest, AModelThatHasNoneLeftIsMissed) {
  for (const int64_t version : {1, 2}) ASSERT_THAT(files_.RemoveTree(PathOf(version)), IsOk());
  {
    Restarted server(files_);
    ASSERT_EQ(server.report.missing.size(), 1u);
    EXPECT_EQ(server.report.missing[0].loaded, "");
    EXPECT_EQ(server.store->CountAll().at("m").corrupt, 1);
    EXPECT_THAT(server.store->FolderOf("m").Delete(server.report.missing[0].checkpoint), IsOk());
  }
  EXPECT_THAT(Restarted(files_).report.missing, IsEmpty());
}

TEST_F(DamageTest, WhatIsSetAsideIsNotMissedNorIsItOnceItIsDeleted) {
  files_.FileBytes(PathOf(2) + "/manifest.json")[100] ^= 1;
  for (int start = 0; start < 2; ++start) {
    Restarted server(files_);
    EXPECT_EQ(server.report.corrupt.size(), start == 0 ? 1u : 0u);
    EXPECT_THAT(server.report.missing, IsEmpty());
    if (start == 0) continue;
    EXPECT_THAT(server.store->FolderOf("m").Delete(".corrupt-step-000000000020-version-7-2"),
                IsOk());
  }
  EXPECT_THAT(Restarted(files_).report.missing, IsEmpty());
}

TEST_F(DamageTest, WhatWasLoadedInItsPlaceIsTheNewest) {
  files_.FileBytes(PathOf(2) + "/manifest.json")[100] ^= 1;
  Restarted server(files_);
  EXPECT_THAT(server.store->FolderOf("m").Delete("step-000000000010-version-7-1"),
              ReasonIs(ErrorReason::kCheckpointInUse));
  // And if it goes bad in its turn, nothing is left that a restart could load.
  EXPECT_THAT(server.store->FolderOf("m").SetAside("step-000000000010-version-7-1", DataLoss(),
                                                   /*waits=*/true),
              IsOkAndHolds(true));
}

TEST(CheckpointStoreTest, AfterTheNewestIsSetAsideAnOlderOneDoesNotTakeItsPlace) {
  FakeFileSystem files;
  TestVersions versions(3);
  {
    auto store = OpenStore(files);
    for (const int64_t version : {2, 3}) {
      ASSERT_THAT(store->FolderOf("m").Save(*versions.model, versions[version]), IsOk());
    }
    EXPECT_THAT(store->FolderOf("m").SetAside("step-000000000030-version-7-3", DataLoss(),
                                              /*waits=*/true),
                IsOkAndHolds(true));
    ASSERT_THAT(
        store->FolderOf("m").Save(*versions.model, versions[1], {.label = CheckpointLabel{"old"}}),
        IsOk());
  }
  Restarted server(files);
  EXPECT_EQ(server.report.loaded.at(0).record.number, 2);
  EXPECT_EQ(Saved(files).size(), 2u);
}

TEST(CheckpointStoreTest, AnOldVersionWhoseCheckpointIsBadIsSavedAnewAsAnOldOne) {
  FakeFileSystem files;
  TestVersions versions(2);
  {
    auto store = OpenStore(files);
    for (const int64_t version : {1, 2}) {
      ASSERT_THAT(store->FolderOf("m").Save(*versions.model, versions[version]), IsOk());
    }
    files.FileBytes(CheckpointsPath("m") + "/step-000000000010-version-7-1/manifest.json")[99] ^= 1;
    ASSERT_THAT(store->FolderOf("m").Save(*versions.model, versions[1]), IsOk());
  }
  Restarted server(files);
  EXPECT_EQ(server.report.loaded.at(0).record.number, 2);
  EXPECT_EQ(Saved(files).size(), 2u);
}

// A moment without a free descriptor, or without space, does not latch the store: what it knows
// must be what is on the disk all the same.
TEST(CheckpointStoreTest, ASaveThatFailedBehindItsRenameIsKnownWhenItIsTriedAgain) {
  FakeFileSystem files;
  TestVersions versions(2);
  auto store = OpenStore(files);
  ASSERT_THAT(store->FolderOf("m").Save(*versions.model, versions[1]), IsOk());
  bool is_renamed = false;
  files.set_hook([&](const std::string& operation, const std::string& path) {
    is_renamed |= operation == "rename" && absl::StrContains(path, ".tmp-step-");
    return operation == "syncdir" && is_renamed
               ? absl::ResourceExhaustedError("too many open files")
               : absl::OkStatus();
  });
  EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions[2]),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("open files")));
  files.set_hook(nullptr);
  EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions[2],
                                        {.label = CheckpointLabel{.name = "best"}}),
              IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const auto stored, store->FolderOf("m").List());
  ASSERT_EQ(stored.size(), 2u);
  EXPECT_EQ(stored[0].id.version, 2);
  EXPECT_GT(stored[0].details->total_bytes, 0);
  EXPECT_NE(*store->FolderOf("m").Hold(stored[0].name), nullptr);
}

TEST(CheckpointStoreTest, AVersionThatWasHalfSetAsideIsSavedAnew) {
  FakeFileSystem files;
  TestVersions versions(1);
  auto store = OpenStore(files);
  EMA_ASSERT_OK_AND_ASSIGN(const auto saved,
                           store->FolderOf("m").Save(*versions.model, versions[1]));
  files.set_hook([](const std::string& operation, const std::string&) {
    return operation == "syncdir" ? absl::ResourceExhaustedError("too many open files")
                                  : absl::OkStatus();
  });
  EXPECT_THAT(store->FolderOf("m").SetAside(saved.name, DataLoss(), /*waits=*/true),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("open files")));
  files.set_hook(nullptr);
  EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions[1]), IsOk());
  EXPECT_THAT(Saved(files), testing::ElementsAre(saved.name));
  EMA_ASSERT_OK_AND_ASSIGN(const auto stored, store->FolderOf("m").List());
  ASSERT_EQ(stored.size(), 2u);
}

TEST_F(DamageTest, AllDamagedCheckpointsAreKeptAndTheNextSaveIsLoaded) {
  for (int64_t version = 1; version <= 2; ++version) {
    files_.FileBytes(PathOf(version) + "/manifest.json")[100] ^= 1;
  }
  {
    Restarted server(files_);
    EXPECT_EQ(server.report.corrupt.size(), 2u);
    EXPECT_THAT(server.report.loaded, IsEmpty());
    EXPECT_THAT(server.store->FolderOf("m").Save(*versions_.model, versions_[1]), IsOk());
  }
  ExpectLoads(1);
}

TEST_F(DamageTest, ACheckpointOfANewerServerStopsTheStart) {
  files_.FileBytes(PathOf(2) + "/manifest.json") = FormatJsonFile(7, Json::object());
  auto store = OpenStore(files_);
  ModelStore models(TestDevice(), SmallBlocks());
  EXPECT_THAT(store->LoadAll(models),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("model \"m\""), HasSubstr("step-000000000020"),
                             HasSubstr("format_version 7"))));
  EXPECT_THAT(files_.Exists(PathOf(2) + "/manifest.json"), IsOkAndHolds(true));
}

TEST_F(DamageTest, AModelThatDoesNotFitStopsTheStart) {
  auto store = OpenStore(files_);
  ModelStore::Options options = SmallBlocks();
  options.memory_bytes = 1000;
  ModelStore models(TestDevice(), options);
  EXPECT_THAT(store->LoadAll(models),
              AllOf(StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("model \"m\"")),
                    ReasonIs(ErrorReason::kMemoryBudget)));
}

TEST(CheckpointStoreTest, ADeletedModelIsNotLoadedAndNotSavedAgain) {
  FakeFileSystem files;
  TestVersions versions(3);
  {
    auto store = OpenStore(files);
    for (const int64_t version : {1, 2}) {
      ASSERT_THAT(store->FolderOf("m").Save(*versions.model, versions[version]), IsOk());
    }
    ASSERT_TRUE(versions.models.Delete("m"));
    ASSERT_THAT(store->DeleteModel("m"), IsOk());
    EXPECT_THAT(store->FolderOf("m").Save(*versions.model, versions[3]),
                AllOf(StatusIs(absl::StatusCode::kNotFound, HasSubstr("m")),
                      ReasonIs(ErrorReason::kModelNotFound)));
    // Another model of that name starts from nothing, and can be deleted, too.
    TestVersions others(1);
    ASSERT_THAT(store->FolderOf("m").Save(*others.model, others[1]), IsOk());
    EXPECT_THAT(Saved(files), testing::ElementsAre("step-000000000010-version-7-1"));
    ASSERT_TRUE(others.models.Delete("m"));
    ASSERT_THAT(store->DeleteModel("m"), IsOk());
    EXPECT_THAT(store->DeleteModel("m"), IsOk());
  }
  Restarted server(files);
  EXPECT_THAT(server.report.loaded, IsEmpty());
  EXPECT_THAT(server.report.corrupt, IsEmpty());
  const std::string deleted = absl::StrCat("/data/models/.deleted-1760000000000000-");
  EXPECT_THAT(files.AllPaths(),
              Contains(deleted + "1-m/checkpoints/step-000000000020-version-7-2"));
  EXPECT_THAT(files.AllPaths(),
              Contains(deleted + "2-m/checkpoints/step-000000000010-version-7-1"));
}

TEST(CheckpointStoreTest, ADeletionThatFailedComesBeforeTheNextSave) {
  FakeFileSystem files;
  TestVersions versions(2);
  auto store = OpenStore(files);
  ASSERT_THAT(store->FolderOf("m").Save(*versions.model, versions[2]), IsOk());
  ASSERT_TRUE(versions.models.Delete("m"));
  files.set_hook([](const std::string& operation, const std::string&) {
    return operation == "rename" ? absl::UnavailableError("I/O error") : absl::OkStatus();
  });
  EXPECT_THAT(store->DeleteModel("m"), StatusIs(absl::StatusCode::kUnavailable, "I/O error"));
  files.set_hook(nullptr);
  TestVersions others(1);
  ASSERT_THAT(store->FolderOf("m").Save(*others.model, others[1]), IsOk());
  EXPECT_THAT(Saved(files), testing::ElementsAre("step-000000000010-version-7-1"));
}

TEST(CheckpointStoreTest, ASecondServerIsRefused) {
  FakeFileSystem files;
  auto store = OpenStore(files);
  EXPECT_THAT(CheckpointStore::Open(files, {.data_dir = "/data"}),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("used by another server")));
  store.reset();
  EXPECT_THAT(CheckpointStore::Open(files, {.data_dir = "/data"}), IsOk());
}

TEST(CheckpointStoreTest, OptionsAreChecked) {
  FakeFileSystem files;
  EXPECT_THAT(CheckpointStore::Open(files, {.data_dir = ""}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("data directory")));
  EXPECT_THAT(CheckpointStore::Open(files, {.data_dir = "/data", .keep_count = 0}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("keep_count")));
  EXPECT_THAT(CheckpointStore::Open(files, {.data_dir = "/data", .max_file_bytes = 0}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("max_file_bytes")));
}

TEST(IncarnationTest, GrowsWithEveryStart) {
  FakeFileSystem files;
  constexpr int64_t kLife = DataDirectory::kIncarnationsPerStart;
  const int64_t first = IncarnationWithoutStore(kNow);
  const auto start_at = [&](int64_t micros) {
    return OpenStore(files, kNow + absl::Microseconds(micros))->data().incarnation() - first;
  };
  EXPECT_EQ(start_at(0), 0);
  EXPECT_EQ(start_at(0), kLife);
  // Also when the clock goes back.
  EXPECT_EQ(start_at(-50), 2 * kLife);
  EXPECT_EQ(start_at(3 * kLife + 1), 3 * kLife + 1);
  EXPECT_EQ(IncarnationWithoutStore(absl::FromUnixMicros(500)), 500);
}

TEST(IncarnationTest, NoneOfALifesModelsAndRunsIsUsedAgainAfterTheClockWasSetBack) {
  FakeFileSystem files;
  const auto create = [](Restarted& server, const std::string& name) {
    ModelConfig config;
    config.name = name;
    config.manifest = MakeManifest({{"w", Dtype::kFloat32, {3}}});
    config.tracks = {{"raw", MakeSchedule("copy")}};
    return server.models.Create(config)->model;
  };
  const auto push = [](const std::shared_ptr<Model>& model) {
    TestRank rank(model, "launch");
    EXPECT_THAT(rank.Join(), IsOk());
    EXPECT_THAT(rank.Push(10, BytesOf({1, 1, 1})), IsOk());
    return *model->history().latest();
  };
  Version first;
  {
    Restarted server(files, kNow + absl::Hours(1));
    create(server, "a");
    first = push(create(server, "b"));
  }
  // Nothing has been saved.
  Restarted server(files, kNow);
  const Version second = push(create(server, "b"));
  EXPECT_GT(second.id(), first.id());
  EXPECT_GT(second.run_epoch, first.run_epoch);
}

TEST(SyncLatchTest, LatchesOnAFailedFsyncAndOnNothingElse) {
  std::vector<std::string> told;
  SyncLatch latch([&](const std::string& message) { told.push_back(message); });
  EXPECT_THAT(latch.Check(absl::ResourceExhaustedError("too many open files")),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("open files")));
  EXPECT_THAT(latch.status(), IsOk());
  EXPECT_THAT(told, IsEmpty());
  EXPECT_THAT(latch.Check(absl::UnavailableError("I/O error")),
              ReasonIs(ErrorReason::kStoreReadOnly));
  EXPECT_THAT(latch.Check(absl::OkStatus()), IsOk());
  EXPECT_THAT(latch.Check(absl::UnavailableError("another")),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("I/O error")));
  EXPECT_THAT(latch.status(), ReasonIs(ErrorReason::kStoreReadOnly));
  EXPECT_THAT(told, ElementsAre(HasSubstr("I/O error")));
}

TEST(IncarnationTest, GrowsWhenItsFileIsLost) {
  FakeFileSystem files;
  TestVersions versions(1);
  EXPECT_THAT(OpenStore(files)->FolderOf("m").Save(*versions.model, versions[1]), IsOk());
  for (const char* bad : {"", "x", "-5\n", "99999999999999999999\n", "9223372036854775807\n"}) {
    files.FileBytes("/data/INCARNATION") = bad;
    EXPECT_EQ(OpenStore(files, absl::FromUnixMicros(3))->data().incarnation(),
              kTestIncarnation + DataDirectory::kIncarnationsPerStart)
        << bad;
  }
}

// A request has a budget for its patterns; what several have asked for may take more.
TEST(CheckpointStoreTest, PatternsThatOneRequestMayNotHaveAreSavedAndLoaded) {
  ModelConfig config;
  config.name = "m";
  std::vector<TensorSpec> tensors;
  for (int i = 0; i < 280; ++i) {
    tensors.push_back({absl::StrCat(std::string(900, 'a'), ".", i), Dtype::kFloat32, {1}});
  }
  config.manifest = MakeManifest(std::move(tensors));
  const std::string slow = "*" + std::string(450, 'a') + "?c*";
  for (const char* name : {"first", "second"}) {
    config.tracks.push_back({.name = name,
                             .schedule = MakeSchedule("10ba"),
                             .tensor_rules = {{slow, TensorAction::kIgnore}}});
  }
  ModelStore models(TestDevice(), SmallBlocks());
  EXPECT_THAT(models.Create(config), StatusIs(absl::StatusCode::kInvalidArgument,
                                              HasSubstr("with those before it takes too long")));
  const TrackConfig second = config.tracks.back();
  config.tracks.pop_back();
  EMA_ASSERT_OK_AND_ASSIGN(const auto created, models.Create(config));
  ASSERT_THAT(created.model->UpdateTracks({.put = {second}}), IsOk());
  TestRank rank(created.model, "launch");
  ASSERT_THAT(rank.Join(), IsOk());
  ASSERT_THAT(rank.Push(10, RandomWeights(created.model->manifest(), 1)), IsOk());

  FakeFileSystem files;
  // Reads it back, too.
  EXPECT_THAT(
      OpenStore(files)->FolderOf("m").Save(*created.model, *created.model->history().Pin(0)),
      IsOk());
  Restarted next(files);
  EXPECT_THAT(next.report.corrupt, IsEmpty());
  EMA_ASSERT_OK_AND_ASSIGN(const auto loaded, next.models.Get("m"));
  EXPECT_EQ(loaded->Describe().tracks.size(), 2u);
}

}  // namespace
}  // namespace ema
