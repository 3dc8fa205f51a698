// SPDX-License-Identifier: Apache-2.0
//
// Lives of a server's checkpoints on a real disk, to be killed at any of their system calls
// (tests/python/support/checkpoint_victim.py). Training is the same in all of them: the digest of a
// version depends on nothing but its number and what it was trained from.
//
// Reads lines "MODE DATA_DIR HOW" from the standard input. Each is a life of its own, in a process
// that is forked for it. MODE:
//   save     loads what is there, trains one step, MARKS, saves it; two checkpoints are kept
//   keep     the same, and it is not removed for newer ones
//   delete   loads, MARKS, deletes the model
//   recover  MARKS, opens the directory and loads
// and, with all that a server has of checkpoints:
//   auto      loads, MARKS, trains one step, which is saved by itself
//   rollback  loads, MARKS, goes back to the oldest checkpoint
//   undo      loads, trains two steps, MARKS, goes back by one, which only memory has
//   label     loads, MARKS, gives the oldest checkpoint the label "stable"
//   score     loads, trains one step, MARKS, reports a score for it, better than those before
//   unlabel   loads, MARKS, takes away the label that scores have put
//   remove    loads, MARKS, deletes the oldest checkpoint
// What is in question begins at the mark. If HOW is "stop" the life prints "marked=PID" there and
// stops itself (SIGSTOP), so that strace can come to it; "go": it goes on.
//
// What fails prints "failed=CODE REASON", is tried once more, and prints "again=CODE REASON".
// Prints "done" when the call has answered OK; then, if it was not stopped, what is in memory (all
// zero: nothing), "from" being the version that a rollback has made it of,
//   version=3 step=30 from=0 digest=89abcdef incarnation=17 corrupt=0
// and, if it has only recovered, which versions are on the disk, all of them whole, and have
// labels:
//   checkpoints=2,3 labels=best:2
// and last, whatever became of it, "ended=" with the exit code, 1 after an error, or with -9.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/internal/sysinfo.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ema/error_reason.h"
#include "server/checkpoint/checkpoint_manager.h"
#include "server/checkpoint/checkpoint_store.h"
#include "server/format/verify.h"
#include "tests/core/test_model.h"

namespace ema {
namespace {

constexpr char kModel[] = "m";
constexpr int64_t kStepsPerVersion = 10;

// One system call, so that it is out before the next one; another if strace lets that fail.
void Print(const std::string& line) {
  for (int i = 0; i < 2; ++i) {
    if (write(STDOUT_FILENO, line.data(), line.size()) >= 0) return;
  }
  std::abort();
}

void Mark(bool stops) {
  if (!stops) return;
  Print(absl::StrFormat("marked=%d\n", getpid()));
  raise(SIGSTOP);
}

void PrintError(const char* what, const absl::Status& status) {
  Print(absl::StrFormat("%s=%s %s\n", what, absl::StatusCodeToString(status.code()),
                        ErrorReasonName(GetErrorReason(status))));
}

[[noreturn]] void Fail(const absl::Status& status) {
  absl::FPrintF(stderr, "%s\n", status.ToString());
  _exit(1);
}

void CheckOk(const absl::Status& status) {
  if (!status.ok()) Fail(status);
}

template <typename T>
T ValueOf(absl::StatusOr<T> value) {
  if (!value.ok()) Fail(value.status());
  return *std::move(value);
}

ModelConfig Config() {
  ModelConfig config;
  config.name = kModel;
  config.manifest = MakeManifest({{"wide", Dtype::kFloat32, {30, 50}},
                                  {"empty", Dtype::kFloat32, {0, 3}},
                                  {"bias", Dtype::kFloat32, {7}}});
  config.tracks = {{.name = "ema", .schedule = MakeSchedule("10ba"), .dtype = Dtype::kFloat64},
                   {"raw", MakeSchedule("copy")}};
  return config;
}

// Adds the next version to `model`.
void TrainOneStep(const std::shared_ptr<Model>& model) {
  const absl::StatusOr<SnapshotRef> newest = model->history().Pin(0);
  const int64_t number = newest.ok() ? (*newest)->record.number + 1 : 1;
  std::vector<float> weights(30 * 50 + 7);
  for (size_t i = 0; i < weights.size(); ++i) {
    weights[i] = static_cast<float>(number) + 0.001f * static_cast<float>(i);
  }
  TestRank rank(model, absl::StrFormat("launch-%d", number));
  CheckOk(rank.Join());
  CheckOk(rank.Push(number * kStepsPerVersion, BytesOf(weights)).status());
}

// Of all bytes of the newest version.
uint32_t Digest(Model& model) {
  uint32_t crc = 0;
  const SnapshotRef snapshot = ValueOf(model.history().Pin(0));
  for (const TrackSnapshot& of_track : snapshot->tracks) {
    const Track& track = *of_track.track;
    for (const HostPiece& piece : ValueOf(
             ReadBlocks(model.device(), track, of_track.blocks, 0, track.layout().total_bytes()))) {
      crc = Crc32c(crc, piece.bytes);
    }
  }
  return crc;
}

void PrintState(ModelStore& models, int64_t incarnation, size_t corrupt) {
  Version record;
  uint32_t digest = 0;
  if (const auto model = models.Get(kModel); model.ok()) {
    record = ValueOf((*model)->history().Pin(0))->record;
    digest = Digest(**model);
  }
  Print(absl::StrFormat("version=%d step=%d from=%d digest=%08x incarnation=%d corrupt=%d\n",
                        record.number, record.step,
                        record.restored_from.value_or(VersionId{}).version, digest, incarnation,
                        corrupt));
}

void PrintDisk(CheckpointStore& store, const LoadReport& report) {
  for (const auto& [model, problem] : report.lost_labels) CheckOk(problem);
  std::vector<int64_t> versions;
  for (const CheckpointEntry& stored : ValueOf(store.FolderOf(kModel).ListNames())) {
    if (!stored.problem.ok()) continue;
    CheckOk(VerifyCheckpoint(PosixFileSystem(), store.FolderOf(kModel).Path(stored.name)).status());
    versions.push_back(stored.id.version);
  }
  std::vector<std::string> labels;
  for (const CheckpointLabel& label : ValueOf(store.FolderOf(kModel).Labels())) {
    CheckOk(ValueOf(store.FolderOf(kModel).FindLabel(label.name)).checkpoint);
    labels.push_back(absl::StrCat(label.name, ":", label.id.version));
  }
  Print(absl::StrCat("checkpoints=", absl::StrJoin(versions, ","),
                     " labels=", absl::StrJoin(labels, ","), "\n"));
}

// Does it, or says why not and calls `again`, which must do it.
void Act(const std::function<absl::Status()>& act, const std::function<absl::Status()>& again) {
  if (const absl::Status status = act(); !status.ok()) {
    PrintError("failed", status);
    const absl::Status second = again();
    PrintError("again", second);
    CheckOk(second);
  }
  Print("done\n");
}

CheckpointStore::Options StoreOptions(const std::string& data_dir) {
  return {.data_dir = data_dir, .keep_count = 2};
}

// What is there, or a new model.
std::shared_ptr<Model> TheModel(ModelStore& models) {
  const auto loaded = models.Get(kModel);
  return loaded.ok() ? *loaded : ValueOf(models.Create(Config())).model;
}

void LiveOnStore(const std::string& data_dir, const std::string& mode, bool stops) {
  if (mode == "recover") Mark(stops);
  const std::unique_ptr<CheckpointStore> store =
      ValueOf(CheckpointStore::Open(PosixFileSystem(), StoreOptions(data_dir)));
  ModelStore::Options options = SmallBlocks();
  options.model.incarnation = store->data().incarnation();
  ModelStore models(TestDevice(), options);
  const LoadReport report = ValueOf(store->LoadAll(models));
  if (mode == "save" || mode == "keep") {
    const std::shared_ptr<Model> model = TheModel(models);
    TrainOneStep(model);
    const SnapshotRef snapshot = ValueOf(model->history().Pin(0));
    Mark(stops);
    const auto save = [&] {
      return store->FolderOf(kModel).Save(*model, snapshot, {.keep = mode == "keep"}).status();
    };
    Act(save, save);
  } else if (mode == "delete") {
    Mark(stops);
    models.Delete(kModel);
    const auto remove = [&] { return store->DeleteModel(kModel); };
    Act(remove, remove);
  } else {
    Print("done\n");
  }
  if (stops) return;
  PrintState(models, store->data().incarnation(), report.corrupt.size());
  if (mode == "recover") PrintDisk(*store, report);
}

// Calls `manager` for what `mode` says, from the mark on.
void ActOnManager(CheckpointManager& manager, const std::shared_ptr<Model>& model,
                  const std::string& mode, bool stops) {
  CheckpointInfo oldest;
  for (const CheckpointInfo& info : ValueOf(manager.List(*model)).checkpoints) oldest = info;
  const auto save = [&] { return manager.Save(*model, {}).status(); };
  const auto restore = [&](const VersionId& id) {
    return [&manager, &model, id] { return manager.Restore(*model, id, "").status(); };
  };
  // A rollback that could not be saved has been made all the same.
  const auto restore_again = [&](const VersionId& id) {
    return [&, id] {
      return model->history().latest()->restored_from.has_value() ? save() : restore(id)();
    };
  };
  std::function<absl::Status()> act;
  std::function<absl::Status()> again;
  if (mode == "auto") {
    act = [&]() -> absl::Status {
      TrainOneStep(model);
      manager.AwaitIdle();
      if (model->durable().version() == model->history().latest()->id()) return absl::OkStatus();
      return absl::UnavailableError("not saved");
    };
    again = save;
  } else if (mode == "rollback") {
    act = restore(oldest.id);
    again = restore_again(oldest.id);
  } else if (mode == "undo") {
    TrainOneStep(model);
    const VersionId id = model->history().latest()->id();
    TrainOneStep(model);
    act = restore(id);
    again = restore_again(id);
  } else if (mode == "label") {
    act = again = [&] { return manager.SetLabel(*model, "stable", oldest.id).status(); };
  } else if (mode == "score") {
    TrainOneStep(model);
    const VersionId id = model->history().latest()->id();
    act = again = [&, id] {
      return manager
          .ReportMetric(*model,
                        {.name = "best", .id = id, .metric = static_cast<double>(id.version)})
          .status();
    };
  } else if (mode == "unlabel") {
    act = again = [&] { return manager.RemoveLabel(*model, "best"); };
  } else if (mode == "remove") {
    act = again = [&] { return manager.Delete(*model, oldest.name); };
  } else {
    Fail(absl::InvalidArgumentError(absl::StrCat("no such mode: ", mode)));
  }
  Mark(stops);
  Act(act, again);
}

void LiveOnManager(const std::string& data_dir, const std::string& mode, bool stops) {
  std::unique_ptr<ModelStore> models;  // Goes after the manager.
  CheckpointManager::Options manager_options{.store = StoreOptions(data_dir)};
  if (mode == "auto") manager_options.policy.every_commits = 1;
  const std::unique_ptr<CheckpointManager> manager =
      ValueOf(CheckpointManager::Open(PosixFileSystem(), manager_options));
  ModelStore::Options options = SmallBlocks();
  options.model.incarnation = manager->incarnation();
  options.model.on_commit = [&](const std::shared_ptr<Model>& model, const Snapshot& snapshot) {
    manager->OnCommit(model, snapshot);
  };
  models = std::make_unique<ModelStore>(TestDevice(), options);
  CheckOk(manager->LoadAll(*models));
  ActOnManager(*manager, TheModel(*models), mode, stops);
  // To close the directory is not in question, and may be another thread's than what was.
  if (stops) _exit(0);
  PrintState(*models, manager->incarnation(), /*corrupt=*/0);
}

void Live(const std::string& data_dir, const std::string& mode, bool stops) {
  for (const char* of_store : {"save", "keep", "delete", "recover"}) {
    if (mode == of_store) return LiveOnStore(data_dir, mode, stops);
  }
  LiveOnManager(data_dir, mode, stops);
}

void Serve() {
  std::string mode;
  std::string data_dir;
  std::string how;
  while (std::cin >> mode >> data_dir >> how) {
    const pid_t pid = fork();
    if (pid == 0) {
      Live(data_dir, mode, how == "stop");
      _exit(0);  // What was made before the fork is the parent's to end.
    }
    int status = 0;
    if (pid < 0 || waitpid(pid, &status, 0) != pid) std::abort();
    Print(absl::StrFormat("ended=%d\n",
                          WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status)));
  }
}

}  // namespace
}  // namespace ema

int main() {
  // Before the first fork: it reads a file, else whenever a life's thread first waits for a mutex.
  absl::base_internal::NumCPUs();
  ema::Serve();
}
