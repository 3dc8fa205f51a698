// SPDX-License-Identifier: Apache-2.0
//
// The power goes at every operation of saves, rollbacks, labels, removals and starts, and of what
// was not synced by then any part is left. On each of these disks a start finds a whole version,
// and never one before the last that was said to be durable. A campaign tries more than ten
// thousand different disks; otherwise a sample of the scenarios is tried. And the proof that this
// would notice: with any one step of the recipe left out, some of these disks are bad.
#include <algorithm>
#include <functional>
#include <iostream>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "ema/internal/status_macros.h"
#include "server/checkpoint/checkpoint_manager.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/format/verify.h"
#include "tests/core/test_model.h"
#include "tests/testutil/campaign.h"
#include "tests/testutil/fake_file_system.h"

namespace ema {
namespace {

using ::testing::IsEmpty;

// The clock stands: incarnations must not lean on it.
const absl::Time kNow = absl::FromUnixSeconds(1'760'000'000);
constexpr char kFolder[] = "/data/models/m/checkpoints";
constexpr char kLabel[] = "best";
constexpr int64_t kIncarnation = 7;  // As SmallBlocks().
// At each point seeds are tried until so many in a row give no disk that was not seen yet, or until
// there have been so many.
constexpr uint32_t kDrySeeds = 150;
constexpr uint32_t kMostSeeds = 2000;
constexpr size_t kLeastStates = 10'000;
// A sample ends with the scenario that is being tried then.
constexpr absl::Duration kSampleTime = absl::Seconds(10);

bool EndsWith(const std::string& path, const char* end) { return absl::EndsWith(path, end); }

// Of versions 1 to 4, whose checkpoints have this server's incarnation in their names.
std::string NameOf(int64_t version) {
  return CheckpointName({kIncarnation, version, 10 * version});
}

// Versions 1 to 4 of a model small enough to be loaded 20 000 times, with more than two sectors.
class Versions {
 public:
  Versions() : models_(TestDevice(), SmallBlocks()) {
    ModelConfig config;
    config.name = "m";
    config.manifest = MakeManifest({{"w", Dtype::kFloat32, {2, 500}},
                                    {"v", Dtype::kFloat32, {299}},
                                    {"s", Dtype::kFloat32, {}}});
    config.tracks = {{"ema", MakeSchedule("10ba")}, {"raw", MakeSchedule("copy")}};
    config.max_pinned_versions = 8;
    model_ = models_.Create(config)->model;
    TestRank rank(model_, "launch");
    EXPECT_THAT(rank.Join(), IsOk());
    for (int64_t step = 10; step <= 40; step += 10) {
      EXPECT_THAT(rank.Push(step, WeightsAt(step)), IsOk());
      snapshots_.push_back(*model_->history().Pin(0));
      contents_.push_back(ContentOf(*model_));
    }
  }

  // What is pushed: after the same steps there is the same content.
  static std::vector<std::byte> WeightsAt(int64_t step) {
    std::vector<float> weights(1300);
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = 0.01f * step * (i + 1);
    return BytesOf(weights);
  }

  Model& model() const { return *model_; }
  const SnapshotRef& operator[](int64_t version) const { return snapshots_[version - 1]; }
  // All that is averaged at a step; equal only at equal steps.
  const std::vector<std::byte>& content_at(int64_t step) const { return contents_[step / 10 - 1]; }

  static std::vector<std::byte> ContentOf(Model& model) {
    std::vector<std::byte> bytes = *ReadAll(model, "ema");
    const std::vector<std::byte> raw = *ReadAll(model, "raw");
    bytes.insert(bytes.end(), raw.begin(), raw.end());
    return bytes;
  }

 private:
  ModelStore models_;
  std::shared_ptr<Model> model_;
  std::vector<SnapshotRef> snapshots_;
  std::vector<std::vector<std::byte>> contents_;
};

// What may be found when the power comes back.
struct Allowed {
  std::set<int64_t> versions = {0};  // 0: no model.
  int64_t kept_version = 0;          // Has its KEEP file.
  std::set<int64_t> labelled = {0};  // Have the label; 0: none has it.
  int64_t deleted_version = 0;       // Its checkpoint has been deleted by name.
  bool damaged_before = false;
  int64_t above_incarnation = 0;

  // Different ones differ.
  std::string ToString() const {
    return absl::StrCat(above_incarnation, " ", kept_version, " ", deleted_version, " ",
                        absl::StrJoin(versions, ","), " ", absl::StrJoin(labelled, ","), " ");
  }
};

// The version that has the label; 0: none.
absl::StatusOr<int64_t> LabelledVersion(CheckpointStore& store) {
  const auto found = store.FolderOf("m").FindLabel(kLabel);
  if (absl::IsNotFound(found.status())) return 0;
  EMA_RETURN_IF_ERROR(found.status());
  EMA_RETURN_IF_ERROR(found->checkpoint);
  return found->label.id.version;
}

// A server, as far as its disk is concerned, and what it has promised its clients. It saves the
// versions of `versions`, or, from StartTraining() on, makes such versions itself.
struct Server {
  FakeFileSystem& files;
  const Versions& versions;
  std::unique_ptr<CheckpointStore> store = nullptr;
  Allowed allowed = {};
  std::unique_ptr<ModelStore> models = nullptr;
  // Of which threads use the files only during a call. Goes before the models.
  std::unique_ptr<CheckpointManager> manager = nullptr;

  // The process ends.
  void End() {
    manager = nullptr;
    models = nullptr;
    store = nullptr;
  }

  // A new life. What it loads it calls durable.
  bool Start() {
    End();
    auto opened = CheckpointStore::Open(files, {.data_dir = "/data", .keep_count = 2}, kNow);
    if (!opened.ok()) return false;
    store = *std::move(opened);
    allowed.above_incarnation = store->data().incarnation();
    ModelStore found(TestDevice(), SmallBlocks());
    const auto report = store->LoadAll(found);
    if (!report.ok()) return false;
    allowed.versions = {report->loaded.empty() ? 0 : report->loaded[0].record.number};
    const auto labelled = LabelledVersion(*store);
    if (!labelled.ok()) return false;
    allowed.labelled = {*labelled};
    return true;
  }
  bool Save(int64_t version, bool keep = false) {
    allowed.versions.insert(version);
    if (!store->FolderOf("m").Save(versions.model(), versions[version], {.keep = keep}).ok())
      return false;
    allowed.versions = {version};
    if (keep) allowed.kept_version = version;
    return true;
  }
  bool Delete() {
    allowed.versions.insert(0);
    if (!store->DeleteModel("m").ok()) return false;
    allowed.versions = {0};
    return true;
  }

  // A new life that loads the model and goes on with it.
  bool StartTraining(const SavePolicy& policy = {}) {
    End();
    auto opened = CheckpointManager::Open(files,
                                          {.store = {.data_dir = "/data", .keep_count = 2},
                                           .policy = policy,
                                           .retry_delay = absl::Hours(1)},
                                          kNow);
    if (!opened.ok()) return false;
    manager = *std::move(opened);
    allowed.above_incarnation = manager->incarnation();
    ModelStore::Options options = SmallBlocks();
    options.model.incarnation = manager->incarnation();
    options.model.on_commit = [this](const std::shared_ptr<Model>& trained,
                                     const Snapshot& snapshot) {
      manager->OnCommit(trained, snapshot);
    };
    models = std::make_unique<ModelStore>(TestDevice(), options);
    return manager->LoadAll(*models).ok();
  }
  Model& model() const { return **models->Get("m"); }
  int64_t newest() const { return model().history().latest()->number; }

  // Commits the next version, which the policy may have saved.
  bool Push() {
    TestRank rank(*models->Get("m"), absl::StrCat("launch ", newest()));
    EXPECT_THAT(rank.Join(), IsOk());
    const int64_t step = model().history().latest()->step + 10;
    allowed.versions.insert(newest() + 1);
    EXPECT_THAT(rank.Push(step, Versions::WeightsAt(step)), IsOk());
    manager->AwaitIdle();
    return NoteDurable();
  }
  bool SaveNewest() { return manager->Save(model(), {}).ok() && NoteDurable(); }
  // What push replies call durable is.
  bool NoteDurable() {
    if (model().durable().version().version != newest()) return false;
    allowed.versions = {newest()};
    return true;
  }
  bool RollBackTo(int64_t version) {
    allowed.versions.insert(newest() + 1);
    const bool is_done = manager->Restore(model(), {version, 0}, "").ok();
    manager->AwaitIdle();
    return is_done && NoteDurable();
  }
  // By its score, if there is one.
  bool Label(int64_t version, std::optional<double> score = std::nullopt) {
    allowed.labelled.insert(version);
    if (version == newest()) allowed.versions.insert(version);
    const bool is_done =
        score.has_value()
            ? manager->ReportMetric(model(), {.name = kLabel, .id = {version, 0}, .metric = score})
                  .ok()
            : manager->SetLabel(model(), kLabel, {version, 0}).ok();
    if (!is_done) return false;
    allowed.labelled = {version};
    return version < newest() || NoteDurable();
  }
  bool RemoveLabel() {
    allowed.labelled.insert(0);
    if (!manager->RemoveLabel(model(), kLabel).ok()) return false;
    allowed.labelled = {0};
    return true;
  }
  bool DeleteCheckpoint(int64_t version) {
    if (!manager->Delete(model(), NameOf(version)).ok()) return false;
    allowed.deleted_version = version;
    return true;
  }
};

// Says what is wrong with the label; empty: nothing.
std::string FindLabelProblem(FakeFileSystem& files, CheckpointStore& store,
                             const std::set<int64_t>& allowed) {
  const auto labelled = LabelledVersion(store);
  if (!labelled.ok()) return absl::StrCat("its label: ", labelled.status().ToString());
  if (!allowed.contains(*labelled)) return absl::StrCat("version ", *labelled, " has the label");
  if (*labelled == 0) return "";
  const auto names = store.FolderOf("m").ListNames();
  for (const CheckpointEntry& stored : *names) {
    if (stored.id.version != *labelled) continue;
    const absl::Status whole =
        VerifyCheckpoint(files, store.FolderOf("m").Path(stored.name)).status();
    if (!whole.ok()) return absl::StrCat("what has the label: ", whole.ToString());
  }
  return "";
}

// Says what is wrong with a disk on which a server starts, and starts again; empty: nothing.
std::string FindProblem(FakeFileSystem& files, const Versions& versions, Allowed allowed) {
  for (int start = 0; start < 2; ++start) {
    const auto store = CheckpointStore::Open(files, {.data_dir = "/data", .keep_count = 2}, kNow);
    if (!store.ok()) return absl::StrCat("it does not open: ", store.status().ToString());
    if ((*store)->data().incarnation() <= allowed.above_incarnation) {
      return absl::StrCat("incarnation ", (*store)->data().incarnation(), " is used again");
    }
    allowed.above_incarnation = (*store)->data().incarnation();
    ModelStore models(TestDevice(), SmallBlocks());
    const auto report = (*store)->LoadAll(models);
    if (!report.ok()) return absl::StrCat("it does not load: ", report.status().ToString());
    if (!report->corrupt.empty() && !(allowed.damaged_before && start == 0)) {
      return absl::StrCat("checkpoint ", report->corrupt[0].checkpoint,
                          " is none: ", report->corrupt[0].problem.ToString());
    }
    const int64_t found = report->loaded.empty() ? 0 : report->loaded[0].record.number;
    if (!allowed.versions.contains(found)) return absl::StrCat("it loads version ", found);
    allowed.versions = {found};  // And the next start the same.
    if (found > 0 && Versions::ContentOf(**models.Get("m")) !=
                         versions.content_at(report->loaded[0].record.step)) {
      return absl::StrCat("version ", found, " has other content");
    }
    if (!report->missing.empty()) {
      return absl::StrCat("checkpoint ", report->missing[0].checkpoint, " is missing");
    }
    if (!report->lost_labels.empty()) return "the labels are lost";
    const std::string label_problem = FindLabelProblem(files, **store, allowed.labelled);
    if (!label_problem.empty()) return label_problem;
    allowed.labelled = {*LabelledVersion(**store)};
  }
  // What has the name of a checkpoint is one, not a part of one.
  for (const DirectoryEntry& entry :
       files.ListDirectory(kFolder).value_or(std::vector<DirectoryEntry>())) {
    if (!ParseCheckpointName(entry.name).has_value()) continue;
    for (const char* file :
         {"manifest.json", "tracks/ema/model.safetensors", "tracks/raw/model.safetensors"}) {
      if (!*files.Exists(JoinPath(JoinPath(kFolder, entry.name), file))) {
        return absl::StrCat(entry.name, " has no ", file);
      }
    }
  }
  bool is_kept = false;
  for (const std::string& path : files.AllPaths()) {
    if (absl::StrContains(path, "/.tmp-")) return absl::StrCat(path, " is left");
    if (allowed.deleted_version > 0 && EndsWith(path, NameOf(allowed.deleted_version).c_str())) {
      return absl::StrCat("deleted version ", allowed.deleted_version, " is there again");
    }
    is_kept |= EndsWith(path, absl::StrCat("-", allowed.kept_version, "/KEEP").c_str());
  }
  if (allowed.kept_version != 0 && !is_kept) return "the KEEP file is lost";
  return "";
}

struct Scenario {
  const char* name;
  // Before anything is in question.
  std::function<void(Server&)> before;
  // What the loss of power interrupts.
  std::function<void(Server&)> act;
};

void Saves(Server& server, int64_t count) {
  EXPECT_TRUE(server.Start());
  for (int64_t version = 1; version <= count; ++version) EXPECT_TRUE(server.Save(version));
}

// A save, or a removal, that only the process's end interrupts: what it has not synced is there
// for the next life, and still not on the disk.
void KillAt(Server& server, int64_t stop, const std::function<void()>& act) {
  server.files.set_hook([stop, count = int64_t{0}](const std::string&, const std::string&) mutable {
    return count++ < stop ? absl::OkStatus() : absl::UnavailableError("killed");
  });
  act();
  server.End();
  server.files.set_hook(nullptr);
}

// A life that goes on training from `count` checkpoints.
void Trains(Server& server, int64_t count, const SavePolicy& policy = {}) {
  Saves(server, count);
  EXPECT_TRUE(server.StartTraining(policy));
}

// Commits a version that nobody saves.
void PushUnsaved(Server& server) {
  const std::set<int64_t> durable = server.allowed.versions;
  EXPECT_FALSE(server.Push());
  server.allowed.versions = durable;
}

// Version 1, which has the label, is kept for that alone; version 4 is in memory.
void HaveAScore(Server& server) {
  Trains(server, 2);
  EXPECT_TRUE(server.Label(1, 0.5));
  PushUnsaved(server);
  EXPECT_TRUE(server.SaveNewest());
  PushUnsaved(server);
}

// The newest of three checkpoints is damaged, and unfinished things lie about.
void HaveAnAccident(Server& server) {
  Saves(server, 3);
  FakeFileSystem& files = server.files;
  files.FileBytes(absl::StrCat(kFolder, "/", NameOf(3), "/manifest.json"))[50] ^= 1;
  const std::string left = absl::StrCat(kFolder, "/.tmp-", NameOf(4));
  EXPECT_THAT(files.CreateDirectory(left), IsOk());
  EXPECT_THAT(files.NewWritableFile(JoinPath(left, "manifest.json")), IsOk());
  EXPECT_THAT(files.NewWritableFile("/data/.tmp-INCARNATION"), IsOk());
  files.SyncAll();
  server.allowed.versions = {2};
  server.allowed.damaged_before = true;
}

std::vector<Scenario> Scenarios() {
  std::vector<Scenario> scenarios = {
      {"the first start", [](Server&) {}, [](Server& server) { server.Start(); }},
      {"the first save", [](Server& server) { Saves(server, 0); },
       [](Server& server) { server.Save(1); }},
      {"a save", [](Server& server) { Saves(server, 1); }, [](Server& server) { server.Save(2); }},
      {"saves that remove old checkpoints", [](Server& server) { Saves(server, 2); },
       [](Server& server) {
         if (server.Save(3)) server.Save(4);
       }},
      {"a save that is kept", [](Server& server) { Saves(server, 1); },
       [](Server& server) { server.Save(2, /*keep=*/true); }},
      {"keeping what is saved", [](Server& server) { Saves(server, 2); },
       [](Server& server) { server.Save(2, /*keep=*/true); }},
      {"deleting", [](Server& server) { Saves(server, 2); },
       [](Server& server) { server.Delete(); }},
      {"deleting and saving anew", [](Server& server) { Saves(server, 1); },
       [](Server& server) {
         if (server.Delete()) server.Save(3);
       }},
      {"a start", [](Server& server) { Saves(server, 2); }, [](Server& server) { server.Start(); }},
      {"a start after an accident", HaveAnAccident, [](Server& server) { server.Start(); }},
      {"automatic saves", [](Server& server) { Trains(server, 2, {.every_commits = 1}); },
       [](Server& server) {
         if (server.Push()) server.Push();
       }},
      {"a rollback", [](Server& server) { Trains(server, 3); },
       [](Server& server) { server.RollBackTo(2); }},
      {"a rollback and what comes of it",
       [](Server& server) { Trains(server, 3, {.every_commits = 1}); },
       [](Server& server) {
         if (server.RollBackTo(2)) server.Push();
       }},
      {"a label for a checkpoint", [](Server& server) { Trains(server, 2); },
       [](Server& server) { server.Label(1); }},
      {"a label for what is not saved",
       [](Server& server) {
         Trains(server, 1);
         PushUnsaved(server);
       },
       [](Server& server) { server.Label(2); }},
      {"a better score", HaveAScore, [](Server& server) { server.Label(4, 0.7); }},
      {"taking a label away", HaveAScore, [](Server& server) { server.RemoveLabel(); }},
      {"deleting a checkpoint", [](Server& server) { Trains(server, 2); },
       [](Server& server) { server.DeleteCheckpoint(1); }},
  };
  // First the process ends at some point of a save, which need not be on the disk, then the power
  // goes. What the life between has loaded it has called durable.
  for (int64_t stop = 0; stop < 60; ++stop) {
    const auto kill_in_save = [stop](Server& server) {
      Saves(server, 1);
      KillAt(server, stop, [&] { server.Save(2); });
    };
    scenarios.push_back(
        {"a start after a kill in a save", kill_in_save, [](Server& server) { server.Start(); }});
    if (stop % 6 != 0) continue;
    scenarios.push_back(
        {"the same save again after a kill in it", kill_in_save, [](Server& server) {
           if (server.Start()) server.Save(2);
         }});
  }
  for (int64_t stop = 0; stop < 10; ++stop) {
    scenarios.push_back({"a start after a kill in a label",
                         [stop](Server& server) {
                           Trains(server, 2);
                           KillAt(server, stop, [&] { server.Label(1); });
                         },
                         [](Server& server) { server.Start(); }});
  }
  return scenarios;
}

// Leaves a step of the recipe out, or does it at the wrong time.
struct Mutation {
  FakeFileSystem::Ignored ignored;
  // Called before each operation.
  std::function<void(FakeFileSystem&, const std::string& operation, const std::string& path)> extra;
};

struct Verdict {
  size_t states = 0;  // All different.
  std::vector<std::string> problems;
};

// Lets the power go before the n-th operation for every n. `seen`: disks that need no second look.
Verdict LosePowerEverywhere(const Scenario& scenario, const Versions& versions,
                            const Mutation* mutation, std::unordered_set<std::string>& seen) {
  Verdict verdict;
  for (int64_t stop = 0;; ++stop) {
    FakeFileSystem files;
    Server server{files, versions};
    scenario.before(server);
    int64_t count = 0;
    bool is_extra = false;
    if (mutation != nullptr) {
      files.set_ignored([&](const std::string& operation, const std::string& path) {
        return !is_extra && mutation->ignored && mutation->ignored(operation, path);
      });
    }
    files.set_hook([&](const std::string& operation, const std::string& path) {
      if (is_extra) return absl::OkStatus();
      if (count++ >= stop) return absl::UnavailableError("no power");
      if (mutation != nullptr && mutation->extra) {
        is_extra = true;
        mutation->extra(files, operation, path);
        is_extra = false;
      }
      return absl::OkStatus();
    });
    scenario.act(server);
    const Allowed& allowed = server.allowed;
    const auto check = [&](PowerLoss loss, uint32_t seed) {
      const std::unique_ptr<FakeFileSystem> disk = files.AfterCrash(loss, seed);
      // The same disk is another state where other things have been promised.
      if (!seen.insert(allowed.ToString() + disk->Fingerprint()).second) return false;
      ++verdict.states;
      const std::string problem = FindProblem(*disk, versions, allowed);
      if (!problem.empty()) {
        verdict.problems.push_back(absl::StrCat(scenario.name, ", before operation ", stop,
                                                ", seed ", seed, ": ", problem));
      }
      return true;
    };
    check(PowerLoss::kNone, 0);
    check(PowerLoss::kNothing, 0);
    check(PowerLoss::kNamesOnly, 0);
    // Where all is synced there is but one disk.
    uint32_t dry = files.AfterCrash(PowerLoss::kNone)->Fingerprint() ==
                           files.AfterCrash(PowerLoss::kNothing)->Fingerprint()
                       ? kDrySeeds
                       : 0;
    for (uint32_t seed = 0; seed < kMostSeeds && dry < kDrySeeds; ++seed) {
      dry = check(PowerLoss::kAnything, seed) ? 0 : dry + 1;
    }
    // Of a wrong recipe one bad disk is enough.
    if (count <= stop || (mutation != nullptr && !verdict.problems.empty())) break;
  }
  return verdict;
}

TEST(PowerLossTest, EveryDiskIsGood) {
  const Versions versions;
  std::unordered_set<std::string> seen;
  size_t states = 0;
  std::vector<std::string> problems;
  std::vector<Scenario> scenarios = Scenarios();
  if (!IsCampaign()) {
    std::shuffle(scenarios.begin(), scenarios.end(), std::mt19937(CampaignSeed()));
  }
  const absl::Time test_begin = absl::Now();
  for (const Scenario& scenario : scenarios) {
    const absl::Time begin = absl::Now();
    if (!IsCampaign() && begin - test_begin > kSampleTime) break;
    const Verdict verdict = LosePowerEverywhere(scenario, versions, nullptr, seen);
    std::cout << scenario.name << ": " << verdict.states << " disks, "
              << absl::ToInt64Milliseconds(absl::Now() - begin) << " ms\n";
    states += verdict.states;
    problems.insert(problems.end(), verdict.problems.begin(), verdict.problems.end());
  }
  std::cout << states << " different disks, " << problems.size() << " bad\n";
  if (problems.size() > 20) problems.resize(20);
  EXPECT_THAT(problems, IsEmpty());
  EXPECT_GE(states, IsCampaign() ? kLeastStates : 1);
}

struct MutationCase {
  const char* name;
  const char* scenario;
  Mutation mutation;
};

bool IsSync(const std::string& operation, const std::string& path, const char* file) {
  return operation == "sync" && EndsWith(path, file);
}
bool IsFolderSync(const std::string& operation, const std::string& path, const char* folder) {
  return operation == "syncdir" && EndsWith(path, folder);
}
bool IsLastPart(const std::string& path, const char* beginning) {
  return absl::StartsWith(path.substr(path.find_last_of('/') + 1), beginning);
}

std::vector<MutationCase> Mutations() {
  using Text = const std::string&;
  return {
      {"NoSyncOfWeights",
       "a save",
       {.ignored = [](Text op, Text path) { return IsSync(op, path, "/model.safetensors"); }}},
      {"NoSyncOfTheManifest",
       "a save",
       {.ignored = [](Text op, Text path) { return IsSync(op, path, "/manifest.json"); }}},
      {"NoSyncOfATracksFolder",
       "a save",
       {.ignored = [](Text op, Text path) { return IsFolderSync(op, path, "/tracks/ema"); }}},
      {"NoSyncOfTheFolderOfTracks",
       "a save",
       {.ignored = [](Text op, Text path) { return IsFolderSync(op, path, "/tracks"); }}},
      {"NoSyncOfTheCheckpointsOwnFolder",
       "a save",
       {.ignored = [](Text op,
                      Text path) { return op == "syncdir" && IsLastPart(path, ".tmp-step-"); }}},
      {"NoSyncOfTheParent",
       "a save",
       {.ignored = [](Text op, Text path) { return IsFolderSync(op, path, "/checkpoints"); }}},
      {"NoSyncOfTheParentsOfTheFirst",
       "the first save",
       {.ignored = [](Text op, Text path) { return IsFolderSync(op, path, "/models"); }}},
      {"RenamedBeforeTheSync",
       "the first save",
       {.ignored = [](Text op, Text path) { return IsSync(op, path, "/model.safetensors"); },
        .extra =
            [](FakeFileSystem& files, Text op, Text path) {
              if (op == "create" && EndsWith(path, "/.tmp-LATEST")) files.SyncAll();
            }}},
      {"LatestBeforeTheCheckpoint",
       "a save",
       {.ignored = [](Text op,
                      Text path) { return op == "rename" && IsLastPart(path, ".tmp-step-"); },
        // The save's last act, after LATEST is on the disk: it looks for what is old.
        .extra =
            [](FakeFileSystem& files, Text op, Text path) {
              const std::string name = absl::StrCat(kFolder, "/", NameOf(2));
              const std::string temporary = absl::StrCat(kFolder, "/.tmp-", NameOf(2));
              if (op == "list" && EndsWith(path, "/checkpoints")) {
                files.Rename(temporary, name).IgnoreError();
              }
            }}},
      {"NoSyncOfTheIncarnation",
       "a start",
       {.ignored = [](Text op, Text path) { return IsSync(op, path, "/.tmp-INCARNATION"); }}},
      {"NoSyncOfTheIncarnationsName",
       "a start",
       {.ignored = [](Text op, Text path) { return IsFolderSync(op, path, "/data"); }}},
      {"NoSyncOfADeletion",
       "deleting",
       {.ignored = [](Text op, Text path) { return IsFolderSync(op, path, "/models"); }}},
      {"NoSyncOfAnAutomaticSave",
       "automatic saves",
       {.ignored = [](Text op, Text path) { return IsSync(op, path, "/manifest.json"); }}},
      {"ARollbackWithoutLatest",
       "a rollback",
       {.ignored = [](Text op,
                      Text path) { return op == "rename" && EndsWith(path, "/.tmp-LATEST"); }}},
      {"NoSyncOfLabels",
       "a label for a checkpoint",
       {.ignored = [](Text op, Text path) { return IsSync(op, path, "/.tmp-LABELS.json"); }}},
      {"NoSyncOfTheLabelsName",
       "a label for a checkpoint",
       {.ignored = [](Text op, Text path) { return IsFolderSync(op, path, "/checkpoints"); }}},
      {"NoSyncOfADeletedCheckpoint",
       "deleting a checkpoint",
       {.ignored = [](Text op, Text path) { return IsFolderSync(op, path, "/checkpoints"); }}},
      {"NoSyncOfKeeping",
       "keeping what is saved",
       {.ignored = [](Text op,
                      Text path) { return op == "syncdir" && IsLastPart(path, "step-"); }}},
  };
}

class MutatedRecipeTest : public testing::TestWithParam<MutationCase> {};

TEST_P(MutatedRecipeTest, LeavesABadDisk) {
  const Versions versions;
  for (const Scenario& scenario : Scenarios()) {
    if (std::string(scenario.name) != GetParam().scenario) continue;
    std::unordered_set<std::string> seen;
    const Verdict verdict = LosePowerEverywhere(scenario, versions, &GetParam().mutation, seen);
    std::cout << verdict.problems.size() << " of " << verdict.states << " disks are bad";
    if (!verdict.problems.empty()) std::cout << "; " << verdict.problems[0];
    std::cout << "\n";
    EXPECT_FALSE(verdict.problems.empty());
    return;
  }
  FAIL() << "no scenario " << GetParam().scenario;
}

INSTANTIATE_TEST_SUITE_P(PowerLoss, MutatedRecipeTest, testing::ValuesIn(Mutations()),
                         [](const auto& param) { return std::string(param.param.name); });

// A half-removed checkpoint must not come back under its old name: that needs a sync between the
// two, which is only told from others by what is in the folder.
TEST(PowerLossTest, NoSyncBeforeARemovalLeavesABadDisk) {
  const Versions versions;
  const FakeFileSystem* now = nullptr;
  Mutation mutation;
  mutation.extra = [&now](FakeFileSystem& files, const std::string&, const std::string&) {
    now = &files;
  };
  mutation.ignored = [&now](const std::string& operation, const std::string& path) {
    if (!IsFolderSync(operation, path, "/checkpoints")) return false;
    const std::vector<std::string> paths = now->AllPaths();
    return std::any_of(paths.begin(), paths.end(), [](const std::string& there) {
      return absl::StrContains(there, "/checkpoints/.tmp-step-");
    });
  };
  for (const Scenario& scenario : Scenarios()) {
    if (std::string(scenario.name) != "saves that remove old checkpoints") continue;
    std::unordered_set<std::string> seen;
    const Verdict verdict = LosePowerEverywhere(scenario, versions, &mutation, seen);
    EXPECT_FALSE(verdict.problems.empty()) << verdict.states;
  }
}

}  // namespace
}  // namespace ema
