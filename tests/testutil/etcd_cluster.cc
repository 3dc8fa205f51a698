// SPDX-License-Identifier: Apache-2.0
#include "tests/testutil/etcd_cluster.h"

#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "tests/testutil/free_ports.h"

namespace ema {
namespace {

constexpr absl::Duration kStartTimeout = absl::Seconds(60);
constexpr absl::Duration kPollInterval = absl::Milliseconds(50);

}  // namespace

absl::StatusOr<std::unique_ptr<EtcdCluster>> EtcdCluster::Start(Options options) {
  std::unique_ptr<EtcdCluster> cluster(new EtcdCluster(std::move(options)));
  std::string folder = (std::filesystem::temp_directory_path() / "ema-etcd.XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) return absl::InternalError("no temporary folder");
  cluster->folder_ = folder;
  const int size = cluster->options_.size;
  const std::vector<int> ports = FindFreePorts(2 * size);
  const auto peer_url = [&](int etcd) { return absl::StrCat("http://127.0.0.1:", ports[etcd]); };
  std::vector<std::string> peers;
  for (int i = 0; i < size; ++i) peers.push_back(absl::StrCat("etcd-", i, "=", peer_url(i)));
  for (int i = 0; i < size; ++i) {
    Member& member = cluster->members_.emplace_back();
    member.client_port = ports[size + i];
    const std::string url = cluster->url(i);
    const std::string name = absl::StrCat("etcd-", i);
    member.command = {"/usr/bin/etcd",
                      "--name=" + name,
                      absl::StrCat("--data-dir=", folder, "/", name),
                      "--listen-client-urls=" + url,
                      "--advertise-client-urls=" + url,
                      "--listen-peer-urls=" + peer_url(i),
                      "--initial-advertise-peer-urls=" + peer_url(i),
                      "--initial-cluster=" + absl::StrJoin(peers, ","),
                      "--logger=zap",
                      absl::StrCat("--log-outputs=", folder, "/", name, ".log")};
    const std::vector<std::string>& launcher = cluster->options_.launcher;
    member.command.insert(member.command.begin(), launcher.begin(), launcher.end());
    member.command.insert(member.command.end(), cluster->options_.etcd_options.begin(),
                          cluster->options_.etcd_options.end());
    if (absl::Status status = cluster->Restart(i); !status.ok()) return status;
  }
  if (absl::Status status = cluster->AwaitHealth(); !status.ok()) return status;
  return cluster;
}

EtcdCluster::~EtcdCluster() {
  for (Member& member : members_) member.process.reset();
  std::error_code error;
  std::filesystem::remove_all(folder_, error);
}

std::string EtcdCluster::url(int etcd) const {
  return absl::StrCat(options_.scheme, "://127.0.0.1:", port(etcd));
}

std::string EtcdCluster::endpoints() const {
  std::vector<std::string> urls;
  for (size_t i = 0; i < members_.size(); ++i) urls.push_back(url(static_cast<int>(i)));
  return absl::StrJoin(urls, ",");
}

int EtcdCluster::leader() const {
  // A line for each: URL, id, version, size, whether it is the leader, and more.
  const absl::StatusOr<std::string> text = Etcdctl("endpoint status");
  if (!text.ok()) return -1;
  int etcd = 0;
  for (const absl::string_view line : absl::StrSplit(*text, '\n', absl::SkipEmpty())) {
    const std::vector<std::string> fields = absl::StrSplit(line, ", ");
    if (fields.size() > 4 && fields[4] == "true") return etcd;
    ++etcd;
  }
  return -1;
}

void EtcdCluster::Signal(int etcd, int signal) { members_[etcd].process->Signal(signal); }

void EtcdCluster::Kill(int etcd) { members_[etcd].process.reset(); }

absl::Status EtcdCluster::Restart(int etcd) {
  absl::StatusOr<std::unique_ptr<ChildProcess>> process =
      ChildProcess::Start(members_[etcd].command);
  if (!process.ok()) return process.status();
  members_[etcd].process = *std::move(process);
  return absl::OkStatus();
}

absl::Status EtcdCluster::AwaitHealth() const {
  const absl::Time deadline = absl::Now() + kStartTimeout;
  while (true) {
    const absl::StatusOr<std::string> health = Etcdctl("endpoint health");
    if (health.ok()) return absl::OkStatus();
    if (absl::Now() > deadline) return health.status();
    absl::SleepFor(kPollInterval);
  }
}

absl::StatusOr<std::string> EtcdCluster::Etcdctl(const std::string& arguments) const {
  const std::string command = absl::StrCat(
      "ETCDCTL_API=3 etcdctl --dial-timeout=1s --command-timeout=5s --endpoints=", endpoints(), " ",
      options_.etcdctl_options, " ", arguments, " 2>&1");
  FILE* const output = popen(command.c_str(), "r");
  if (output == nullptr) return absl::InternalError(command);
  std::string text;
  std::array<char, 4096> buffer;
  while (const size_t size = fread(buffer.data(), 1, buffer.size(), output)) {
    text.append(buffer.data(), size);
  }
  if (pclose(output) != 0) return absl::InternalError(absl::StrCat(command, ": ", text));
  return text;
}

}  // namespace ema
