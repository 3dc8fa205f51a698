// SPDX-License-Identifier: Apache-2.0
//
// Real etcd processes for a test.
#ifndef EMA_TESTS_TESTUTIL_ETCD_CLUSTER_H_
#define EMA_TESTS_TESTUTIL_ETCD_CLUSTER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tests/testutil/server_process.h"

namespace ema {

// One or several etcds on free ports of 127.0.0.1, with their data in a temporary folder. Killed
// when this is destroyed. For one thread.
class EtcdCluster {
 public:
  struct Options {
    int size = 1;
    std::string scheme = "http";
    // A program that starts each etcd, with its options. Empty: there is none.
    std::vector<std::string> launcher;
    std::vector<std::string> etcd_options;  // More of them, for each etcd.
    std::string etcdctl_options;            // More of them, for Etcdctl().
  };
  // Returns when all are healthy.
  static absl::StatusOr<std::unique_ptr<EtcdCluster>> Start(Options options);
  ~EtcdCluster();

  int port(int etcd) const { return members_[etcd].client_port; }
  std::string url(int etcd) const;
  // As EtcdOptions::endpoints.
  std::string endpoints() const;
  // -1: none.
  int leader() const;

  void Signal(int etcd, int signal);
  void Kill(int etcd);
  // Starts a killed one with its data. Does not wait.
  absl::Status Restart(int etcd);
  absl::Status AwaitHealth() const;

  // What etcdctl prints. INTERNAL: it failed.
  absl::StatusOr<std::string> Etcdctl(const std::string& arguments) const;

 private:
  struct Member {
    std::vector<std::string> command;
    int client_port = 0;
    std::unique_ptr<ChildProcess> process;  // Null while it is killed.
  };

  explicit EtcdCluster(Options options) : options_(std::move(options)) {}

  const Options options_;
  std::string folder_;
  std::vector<Member> members_;
};

}  // namespace ema

#endif  // EMA_TESTS_TESTUTIL_ETCD_CLUSTER_H_
