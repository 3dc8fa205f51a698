// SPDX-License-Identifier: Apache-2.0
//
// Saving and restoring in this process, by the server's own code, beside the same bytes in a plain
// file on the same disk, and beside what trainers save with.
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/checkpoint/checkpoint_reader.h"
#include "server/checkpoint/checkpoint_writer.h"
#include "server/checkpoint/sync_latch.h"
#include "server/format/checkpoint_name.h"
#include "server/format/file_system.h"
#include "server/format/verify.h"
#include "tests/bench/core_trainer.h"
#include "tests/bench/folder.h"
#include "tests/bench/peers/plain_file.h"
#include "tests/bench/peers/python_peer.h"
#include "tests/bench/rows.h"

namespace ema::bench {
namespace {

constexpr char kNoPython[] = "peer: no Python here; deploy/setup.sh --bench installs it";

// A model with one float32 average, and its checkpoint.
class SavedModel {
 public:
  explicit SavedModel(const BenchOptions& options)
      : folder_(options.data_dir / "ours"),
        trainer_({.parameters = options.checkpoint_megabytes * 1'000'000 / int64_t{sizeof(float)},
                  .track = {.name = "ema", .schedule = Must(Schedule::Parse("100ba"))}}),
        snapshot_(Must(trainer_.model().history().Pin(0))),
        name_(CheckpointName(IdOf(snapshot_->record))) {}

  double gigabytes() const { return Gigabytes(static_cast<size_t>(trainer_.total_bytes())); }

  // Seconds until it is durable; what is checked after that, before a client hears of it, is
  // ReadBack().
  double Save() {
    std::filesystem::remove_all(path());
    const std::string temporary = folder_.Path(".tmp");
    return SecondsOf([&] {
      Must(WriteCheckpoint(files_, latch_, temporary, trainer_.model(), *snapshot_, {}));
      Must(files_.Rename(temporary, path()));
      Must(files_.SyncDirectory(folder_.path()));
    });
  }
  double ReadBack() {
    return SecondsOf([&] { Must(VerifyCheckpoint(files_, path())); });
  }
  // From the disk, into memory that is as fresh as a starting server's.
  double Restore() {
    trainer_.model().device().Trim(0);
    DropCache(path());
    return SecondsOf([&] {
      const CheckpointManifest manifest = Must(ReadCheckpointManifest(files_, path()));
      Must(ReadCheckpoint(files_, path(), manifest, trainer_.model()));
    });
  }

 private:
  std::string path() const { return folder_.Path(name_); }

  FileSystem& files_ = PosixFileSystem();
  SyncLatch latch_;
  const Folder folder_;
  CoreTrainer trainer_;
  const SnapshotRef snapshot_;
  const std::string name_;
};

// The same bytes in a plain file.
class PlainModel {
 public:
  explicit PlainModel(const BenchOptions& options)
      : folder_(options.data_dir / "plain"),
        weights_(static_cast<size_t>(options.checkpoint_megabytes) * 1'000'000, 400) {}

  double Save() {
    std::filesystem::remove(path());
    return SecondsOf([&] { WritePlainFile(path(), weights_.memory().bytes()); });
  }
  double Read() {
    DropCache(path());
    return SecondsOf([&] { ReadPlainFile(path()); });
  }

 private:
  std::string path() const { return folder_.Path("weights"); }

  const Folder folder_;
  const Weights weights_;
};

// A side whose rounds move as much as `model` has.
template <typename Work>
Side SideOf(std::string name, double gigabytes, Work seconds) {
  return {.name = std::move(name),
          .run = [gigabytes, seconds] { return std::vector<double>{gigabytes / seconds()}; },
          .gigabytes = gigabytes,
          .client_pid = getpid()};
}

std::string SizeText(const Bench& bench) {
  return absl::StrCat(bench.options().checkpoint_megabytes, " MB");
}

Row SaveBesidePeer(Bench& bench, const std::string& key, std::string peer_name,
                   const std::vector<std::string>& flags) {
  const auto ours = std::make_shared<SavedModel>(bench.options());
  Row row{.key = key,
          .name = absl::StrCat("save of ", SizeText(bench), ", synced and with checksums"),
          .unit = "GB/s",
          .ours = SideOf("ours", ours->gigabytes(), [ours] { return ours->Save(); }),
          .peer = {.name = std::move(peer_name)},
          .min_rounds = 3};
  if (bench.options().python.empty()) {
    row.missing = kNoPython;
    return row;
  }
  const auto folder = std::make_shared<const Folder>(bench.options().data_dir / key);
  std::vector<std::string> line = {"--folder", folder->Path("saved")};
  line.insert(line.end(), flags.begin(), flags.end());
  const auto peer = std::make_shared<PythonPeer>(bench.options(), "save_peer.py",
                                                 bench.options().checkpoint_megabytes, line);
  row.peer = SideOf(std::move(row.peer.name), ours->gigabytes(),
                    [peer, folder] { return peer->RunRound(); });
  row.peer.client_pid = peer->client_pid();
  return row;
}

// A row of what reads a checkpoint from the disk.
Row ReadBesidePlainFile(Bench& bench, const std::string& key, const std::string& what,
                        double (SavedModel::*read)(), const Goal& goal) {
  const auto ours = std::make_shared<SavedModel>(bench.options());
  const auto plain = std::make_shared<PlainModel>(bench.options());
  ours->Save();
  plain->Save();
  return {.key = key,
          .name = absl::StrCat(what, " ", SizeText(bench), ", every byte verified"),
          .unit = "GB/s",
          .ours = SideOf("ours", ours->gigabytes(), [ours, read] { return (*ours.*read)(); }),
          .peer = SideOf("the same bytes read from a file", ours->gigabytes(),
                         [plain] { return plain->Read(); }),
          .goal = goal};
}

}  // namespace

Row SaveBesidePlainFile(Bench& bench) {
  const auto ours = std::make_shared<SavedModel>(bench.options());
  const auto plain = std::make_shared<PlainModel>(bench.options());
  return {.key = "save",
          .name = absl::StrCat("save of ", SizeText(bench), ", synced and with checksums"),
          .unit = "GB/s",
          .ours = SideOf("ours", ours->gigabytes(), [ours] { return ours->Save(); }),
          .peer = SideOf("the same bytes written to a file, and fsync", ours->gigabytes(),
                         [plain] { return plain->Save(); }),
          .goal = AtLeast(0.9)};
}

Row ReadBackBesidePlainFile(Bench& bench) {
  return ReadBesidePlainFile(bench, "read_back", "reading back a save of", &SavedModel::ReadBack,
                             {});
}

Row RestoreBesidePlainFile(Bench& bench) {
  return ReadBesidePlainFile(bench, "restore", "restore of", &SavedModel::Restore, AtLeast(0.9));
}

Row SaveBesideTorch(Bench& bench) {
  return SaveBesidePeer(bench, "save_torch", "torch.save, which syncs nothing", {"--by", "torch"});
}
Row SaveBesideSyncedTorch(Bench& bench) {
  return SaveBesidePeer(bench, "save_torch_synced", "torch.save, and fsync after it",
                        {"--by", "torch", "--sync"});
}
Row SaveBesideSafetensors(Bench& bench) {
  return SaveBesidePeer(bench, "save_safetensors",
                        "safetensors.torch.save_file, which syncs nothing",
                        {"--by", "safetensors"});
}
Row SaveBesideSyncedSafetensors(Bench& bench) {
  return SaveBesidePeer(bench, "save_safetensors_synced",
                        "safetensors.torch.save_file, and fsync after it",
                        {"--by", "safetensors", "--sync"});
}
Row SaveBesideDcp(Bench& bench) {
  return SaveBesidePeer(
      bench, "save_dcp",
      "torch.distributed.checkpoint.save, which syncs its files, not their folder",
      {"--by", "dcp"});
}

}  // namespace ema::bench
