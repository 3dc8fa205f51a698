// SPDX-License-Identifier: Apache-2.0
//
// Lives of a checkpoint store on a real disk, to be killed at any of their system calls
// (tests/python/checkpoint_victim.py). Training is the same in all of them: the digest of a version
// depends on nothing but its number.
//
// Reads lines "MODE DATA_DIR HOW" from the standard input. Each is a life of its own, in a process
// that is forked for it: to start a new one takes 0.4 s, nearly all of it LibTorch's. MODE:
//   save     loads what is there, trains one step, MARKS, saves it; two checkpoints are kept
//   keep     the same, and it is not removed for newer ones
//   delete   loads, MARKS, deletes the model
//   recover  MARKS, opens the directory and loads
// What is in question begins at the mark. If HOW is "stop" the life prints "marked=PID" there and
// stops itself (SIGSTOP), so that strace can come to it; "go": it goes on.
//
// A save that fails prints "failed=CODE REASON", is tried once more, and prints "again=CODE
// REASON". Prints "done" when the call has answered OK, then what is in memory (all zero: nothing):
//   version=3 step=30 digest=89abcdef incarnation=17 quarantined=0
// and last, whatever became of it, "ended=" with the exit code, 1 after an error, or with -9.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ema/error_reason.h"
#include "server/checkpoint/checkpoint_store.h"
#include "tests/core/test_model.h"

namespace ema {
namespace {

constexpr char kModel[] = "m";
constexpr int64_t kStepsPerVersion = 10;

// One system call, so that it is out before the next one.
void Print(const std::string& line) {
  if (write(STDOUT_FILENO, line.data(), line.size()) < 0) std::abort();
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
  config.tracks = {{.name = "ema", .schedule = MakeSchedule("10ba"), .compensated = true},
                   {"raw", MakeSchedule("copy")}};
  return config;
}

// Adds the next version to `model`.
void TrainOneStep(const std::shared_ptr<Model>& model) {
  const absl::StatusOr<SnapshotRef> newest = model->PinVersion(0);
  const int64_t number = newest.ok() ? (*newest)->record.version + 1 : 1;
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
  const SnapshotRef snapshot = ValueOf(model.PinVersion(0));
  for (const TrackSnapshot& of_track : snapshot->tracks) {
    const Track& track = *of_track.track;
    for (const Blocks& blocks : {of_track.blocks, of_track.low_blocks}) {
      if (blocks.empty()) continue;
      for (const HostPiece& piece :
           ValueOf(ReadBlocks(model.device(), track, blocks, 0, track.layout().total_bytes()))) {
        crc = Crc32c(crc, piece.bytes);
      }
    }
  }
  return crc;
}

void PrintState(ModelStore& models, const CheckpointStore& store, size_t quarantined) {
  int64_t version = 0;
  int64_t step = 0;
  uint32_t digest = 0;
  if (const auto model = models.Get(kModel); model.ok()) {
    const SnapshotRef snapshot = ValueOf((*model)->PinVersion(0));
    version = snapshot->record.version;
    step = snapshot->record.step;
    digest = Digest(**model);
  }
  Print(absl::StrFormat("version=%d step=%d digest=%08x incarnation=%d quarantined=%d\n", version,
                        step, digest, store.incarnation(), quarantined));
}

void Live(const std::string& data_dir, const std::string& mode, bool stops) {
  if (mode == "recover") Mark(stops);
  const std::unique_ptr<CheckpointStore> store =
      ValueOf(CheckpointStore::Open(PosixFileSystem(), {.data_dir = data_dir, .keep_count = 2}));
  ModelStore::Options options = SmallBlocks();
  options.model.incarnation = store->incarnation();
  ModelStore models(TestDevice(), options);
  const CheckpointStore::LoadReport report = ValueOf(store->LoadAll(models));
  if (mode == "save" || mode == "keep") {
    const std::shared_ptr<Model> model = report.loaded.empty()
                                             ? ValueOf(models.Create(Config())).model
                                             : ValueOf(models.Get(kModel));
    TrainOneStep(model);
    const SnapshotRef snapshot = ValueOf(model->PinVersion(0));
    Mark(stops);
    const auto save = [&] {
      return store->Save(*model, snapshot, {.keep = mode == "keep"}).status();
    };
    if (const absl::Status status = save(); !status.ok()) {
      PrintError("failed", status);
      const absl::Status again = save();
      PrintError("again", again);
      CheckOk(again);
    }
  } else if (mode == "delete") {
    Mark(stops);
    models.Delete(kModel);
    CheckOk(store->DeleteModel(kModel));
  } else if (mode != "recover") {
    Fail(absl::InvalidArgumentError(absl::StrCat("no such mode: ", mode)));
  }
  Print("done\n");
  PrintState(models, *store, report.quarantined.size());
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

int main() { ema::Serve(); }
