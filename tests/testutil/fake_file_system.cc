// SPDX-License-Identifier: Apache-2.0
#include "tests/testutil/fake_file_system.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

constexpr size_t kSectorBytes = 512;

absl::Status NoSuch(const std::string& path) { return absl::NotFoundError("no " + path); }

// What of a file's bytes is on the disk when nobody has synced the last of them.
std::string Torn(const std::string& synced, const std::string& written, std::mt19937& random) {
  switch (random() % 5) {
    case 0:
      return synced;
    case 1:
      return written;
    case 2: {  // The size came, the data did not.
      std::string zeros = synced;
      zeros.resize(written.size());
      return zeros;
    }
    case 3: {  // The size came, and some sectors, in no order.
      std::string sectors = synced;
      sectors.resize(written.size());
      for (size_t begin = 0; begin < written.size(); begin += kSectorBytes) {
        if (random() % 2 == 0) continue;
        const size_t n = std::min(kSectorBytes, written.size() - begin);
        sectors.replace(begin, n, written, begin, n);
      }
      return sectors;
    }
    default: {  // The first bytes came; often whole sectors of them.
      std::string part = written.substr(0, random() % (written.size() + 1));
      if (random() % 2 == 0) part.resize(part.size() / kSectorBytes * kSectorBytes);
      return part.size() < synced.size() ? synced : part;
    }
  }
}

}  // namespace

class FakeFileSystem::Writer final : public WritableFile {
 public:
  Writer(FakeFileSystem& files, int64_t node, std::string path)
      : files_(files), node_(node), path_(std::move(path)) {}

  absl::Status Append(std::span<const std::byte> bytes) override {
    const absl::Status status = files_.Call("append", path_);
    const Held held(files_.mu_);
    const size_t n = status.ok() ? bytes.size() : bytes.size() / 2;
    files_.nodes_[node_].bytes.append(reinterpret_cast<const char*>(bytes.data()), n);
    return status;
  }

  absl::Status Sync() override {
    EMA_RETURN_IF_ERROR(files_.Call("sync", path_));
    if (files_.IsIgnored("sync", path_)) return absl::OkStatus();
    const Held held(files_.mu_);
    files_.nodes_[node_].synced_bytes = files_.nodes_[node_].bytes;
    return absl::OkStatus();
  }

  absl::Status Close() override { return files_.Call("close", path_); }

 private:
  FakeFileSystem& files_;
  const int64_t node_;
  const std::string path_;
};

class FakeFileSystem::Reader final : public RandomAccessFile {
 public:
  Reader(const FakeFileSystem& files, int64_t node, std::string path)
      : files_(files), node_(node), path_(std::move(path)) {}

  int64_t size_bytes() const override {
    const Held held(files_.mu_);
    return static_cast<int64_t>(files_.nodes_[node_].bytes.size());
  }

  absl::Status Read(int64_t offset, std::span<std::byte> bytes) const override {
    EMA_RETURN_IF_ERROR(files_.Call("read", path_));
    const Held held(files_.mu_);
    const std::string& content = files_.nodes_[node_].bytes;
    if (offset + bytes.size() > content.size()) return absl::DataLossError(path_ + " is short");
    std::memcpy(bytes.data(), content.data() + offset, bytes.size());
    return absl::OkStatus();
  }

 private:
  const FakeFileSystem& files_;
  const int64_t node_;
  const std::string path_;
};

class FakeFileSystem::Holder final : public FileLock {
 public:
  Holder(FakeFileSystem& files, int64_t node, std::string path)
      : files_(files), node_(node), path_(std::move(path)) {}
  ~Holder() override {
    const Held held(files_.mu_);
    files_.locks_.erase(node_);
  }

  absl::StatusOr<bool> IsInPlace() const override {
    EMA_RETURN_IF_ERROR(files_.Call("place", path_));
    const Held held(files_.mu_);
    return files_.Find(path_) == node_;
  }

 private:
  FakeFileSystem& files_;
  const int64_t node_;
  const std::string path_;
};

std::unique_ptr<FakeFileSystem> FakeFileSystem::AfterCrash(PowerLoss loss, uint32_t seed) const {
  const Held held(mu_);
  std::mt19937 random(seed);
  // From nearly nothing to nearly all: names deep in new folders are there only if all above are.
  const uint32_t kept_of_8 = 1 + random() % 7;
  auto after = std::make_unique<FakeFileSystem>();
  after->nodes_ = nodes_;
  for (Node& node : after->nodes_) {
    node.names.clear();
    if (loss == PowerLoss::kNothing || loss == PowerLoss::kNamesOnly)
      node.bytes = node.synced_bytes;
    if (loss == PowerLoss::kAnything && node.bytes != node.synced_bytes) {
      node.bytes = Torn(node.synced_bytes, node.bytes, random);
    }
    node.synced_bytes = node.bytes;
  }
  for (const Change& change : changes_) {
    const bool is_kept = change.is_synced || loss == PowerLoss::kNone ||
                         loss == PowerLoss::kNamesOnly ||
                         (loss == PowerLoss::kAnything && random() % 8 < kept_of_8);
    if (!is_kept) continue;
    after->Apply(change.directory, change.names);
    after->changes_.back().is_synced = true;
  }
  return after;
}

void FakeFileSystem::SyncAll() {
  const Held held(mu_);
  for (Node& node : nodes_) node.synced_bytes = node.bytes;
  for (Change& change : changes_) change.is_synced = true;
}

std::string& FakeFileSystem::FileBytes(const std::string& path) {
  const Held held(mu_);
  return nodes_[*Find(path)].bytes;
}

std::vector<std::string> FakeFileSystem::AllPaths() const {
  const Held held(mu_);
  std::vector<std::string> paths;
  const std::function<void(int64_t, const std::string&)> visit = [&](int64_t node,
                                                                     const std::string& path) {
    for (const auto& [name, child] : nodes_[node].names) {
      const std::string child_path = path + "/" + name;
      paths.push_back(child_path);
      visit(child, child_path);
    }
  };
  visit(0, "");
  return paths;
}

std::string FakeFileSystem::Fingerprint() const {
  const Held held(mu_);
  std::string text;
  const std::function<void(int64_t)> visit = [&](int64_t number) {
    const Node& node = nodes_[number];
    absl::StrAppend(&text, node.is_directory ? "d" : "f", node.bytes.size(), ":", node.bytes);
    for (const auto& [name, child] : node.names) {
      absl::StrAppend(&text, name, "/");
      visit(child);
    }
    absl::StrAppend(&text, ";");
  };
  visit(0);
  return text;
}

absl::Status FakeFileSystem::Call(const std::string& operation, const std::string& path) const {
  return hook_ ? hook_(operation, path) : absl::OkStatus();
}

bool FakeFileSystem::IsIgnored(const std::string& operation, const std::string& path) const {
  return ignored_ && ignored_(operation, path);
}

std::optional<int64_t> FakeFileSystem::Find(const std::string& path) const {
  int64_t node = 0;
  for (const absl::string_view part : absl::StrSplit(path, '/', absl::SkipEmpty())) {
    const auto it = nodes_[node].names.find(std::string(part));
    if (it == nodes_[node].names.end()) return std::nullopt;
    node = it->second;
  }
  return node;
}

absl::StatusOr<std::pair<int64_t, std::string>> FakeFileSystem::FindParent(
    const std::string& path) const {
  const size_t slash = path.find_last_of('/');
  const std::optional<int64_t> parent = Find(path.substr(0, slash));
  if (!parent.has_value() || !nodes_[*parent].is_directory) return NoSuch(path);
  return std::pair(*parent, path.substr(slash + 1));
}

void FakeFileSystem::Apply(int64_t directory,
                           std::vector<std::pair<std::string, std::optional<int64_t>>> names) {
  for (const auto& [name, node] : names) {
    if (node.has_value()) {
      nodes_[directory].names[name] = *node;
    } else {
      nodes_[directory].names.erase(name);
    }
  }
  changes_.push_back({directory, std::move(names)});
}

absl::StatusOr<std::unique_ptr<WritableFile>> FakeFileSystem::NewWritableFile(
    const std::string& path) {
  EMA_RETURN_IF_ERROR(Call("create", path));
  const Held held(mu_);
  EMA_ASSIGN_OR_RETURN(const auto place, FindParent(path));
  if (Find(path).has_value()) return absl::AlreadyExistsError(path);
  const int64_t node = static_cast<int64_t>(nodes_.size());
  nodes_.emplace_back();
  Apply(place.first, {{place.second, node}});
  return std::make_unique<Writer>(*this, node, path);
}

absl::StatusOr<std::unique_ptr<RandomAccessFile>> FakeFileSystem::OpenFile(
    const std::string& path) {
  EMA_RETURN_IF_ERROR(Call("open", path));
  const Held held(mu_);
  const std::optional<int64_t> node = Find(path);
  if (!node.has_value()) return NoSuch(path);
  if (nodes_[*node].is_directory) return absl::FailedPreconditionError("not a regular file");
  return std::make_unique<Reader>(*this, *node, path);
}

absl::Status FakeFileSystem::Rename(const std::string& from, const std::string& to) {
  EMA_RETURN_IF_ERROR(Call("rename", from));
  if (IsIgnored("rename", from)) return absl::OkStatus();
  const Held held(mu_);
  EMA_ASSIGN_OR_RETURN(const auto from_place, FindParent(from));
  EMA_ASSIGN_OR_RETURN(const auto to_place, FindParent(to));
  if (from_place.first != to_place.first) return absl::UnimplementedError("between directories");
  const std::optional<int64_t> node = Find(from);
  if (!node.has_value()) return NoSuch(from);
  if (const std::optional<int64_t> there = Find(to);
      there.has_value() && !nodes_[*there].names.empty()) {
    return absl::AlreadyExistsError(to);
  }
  Apply(from_place.first, {{from_place.second, std::nullopt}, {to_place.second, *node}});
  return absl::OkStatus();
}

absl::Status FakeFileSystem::Exchange(const std::string& a, const std::string& b) {
  EMA_RETURN_IF_ERROR(Call("exchange", a));
  const Held held(mu_);
  EMA_ASSIGN_OR_RETURN(const auto a_place, FindParent(a));
  EMA_ASSIGN_OR_RETURN(const auto b_place, FindParent(b));
  if (a_place.first != b_place.first) return absl::UnimplementedError("between directories");
  const std::optional<int64_t> a_node = Find(a);
  const std::optional<int64_t> b_node = Find(b);
  if (!a_node.has_value() || !b_node.has_value()) return NoSuch(a);
  Apply(a_place.first, {{a_place.second, *b_node}, {b_place.second, *a_node}});
  return absl::OkStatus();
}

absl::Status FakeFileSystem::SyncDirectory(const std::string& path) {
  EMA_RETURN_IF_ERROR(Call("syncdir", path));
  if (IsIgnored("syncdir", path)) return absl::OkStatus();
  const Held held(mu_);
  const std::optional<int64_t> node = Find(path);
  if (!node.has_value()) return NoSuch(path);
  for (Change& change : changes_) {
    if (change.directory == *node) change.is_synced = true;
  }
  return absl::OkStatus();
}

absl::Status FakeFileSystem::CreateDirectory(const std::string& path) {
  EMA_RETURN_IF_ERROR(Call("mkdir", path));
  const Held held(mu_);
  EMA_ASSIGN_OR_RETURN(const auto place, FindParent(path));
  if (Find(path).has_value()) return absl::AlreadyExistsError(path);
  const int64_t node = static_cast<int64_t>(nodes_.size());
  nodes_.push_back({.is_directory = true});
  Apply(place.first, {{place.second, node}});
  return absl::OkStatus();
}

absl::StatusOr<std::vector<DirectoryEntry>> FakeFileSystem::ListDirectory(const std::string& path) {
  EMA_RETURN_IF_ERROR(Call("list", path));
  const Held held(mu_);
  const std::optional<int64_t> node = Find(path);
  if (!node.has_value()) return NoSuch(path);
  std::vector<DirectoryEntry> entries;
  for (const auto& [name, child] : nodes_[*node].names) {
    entries.push_back({name, nodes_[child].is_directory});
  }
  return entries;
}

absl::Status FakeFileSystem::RemoveNode(const std::string& path) {
  EMA_RETURN_IF_ERROR(Call("remove", path));
  const Held held(mu_);
  EMA_ASSIGN_OR_RETURN(const auto place, FindParent(path));
  if (!Find(path).has_value()) return NoSuch(path);
  Apply(place.first, {{place.second, std::nullopt}});
  return absl::OkStatus();
}

absl::Status FakeFileSystem::RemoveFile(const std::string& path) { return RemoveNode(path); }

absl::Status FakeFileSystem::RemoveTree(const std::string& path) {
  std::map<std::string, int64_t> names;
  {
    const Held held(mu_);
    const std::optional<int64_t> node = Find(path);
    if (!node.has_value()) return absl::OkStatus();
    names = nodes_[*node].names;
  }
  for (const auto& [name, child] : names) {
    EMA_RETURN_IF_ERROR(RemoveTree(JoinPath(path, name)));
  }
  return RemoveNode(path);
}

absl::StatusOr<bool> FakeFileSystem::Exists(const std::string& path) {
  EMA_RETURN_IF_ERROR(Call("exists", path));
  const Held held(mu_);
  return Find(path).has_value();
}

absl::StatusOr<int64_t> FakeFileSystem::FreeBytes(const std::string& path) {
  EMA_RETURN_IF_ERROR(Call("free", path));
  const Held held(mu_);
  return free_bytes_;
}

absl::StatusOr<std::unique_ptr<FileLock>> FakeFileSystem::Lock(const std::string& path) {
  EMA_RETURN_IF_ERROR(Call("lock", path));
  const Held held(mu_);
  std::optional<int64_t> node = Find(path);
  if (!node.has_value()) {
    EMA_ASSIGN_OR_RETURN(const auto place, FindParent(path));
    node = static_cast<int64_t>(nodes_.size());
    nodes_.emplace_back();
    Apply(place.first, {{place.second, *node}});
  }
  if (!locks_.insert(*node).second) return absl::AbortedError("LOCK is held");
  return std::make_unique<Holder>(*this, *node, path);
}

}  // namespace ema
