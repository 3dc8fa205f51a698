// SPDX-License-Identifier: Apache-2.0
//
// A process of tests/testutil/fake_kubernetes.py.
#ifndef EMA_TESTS_TESTUTIL_FAKE_KUBERNETES_H_
#define EMA_TESTS_TESTUTIL_FAKE_KUBERNETES_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/testutil/server_process.h"

namespace ema {

// A fake API server on a free port of 127.0.0.1, with its objects in a temporary folder. Its
// namespace is "ema". Killed when this is destroyed. For one thread.
class FakeKubernetes {
 public:
  struct Options {
    std::string certificate_file;  // With a key: it speaks TLS.
    std::string key_file;
    std::string tokens;  // Separated by spaces. Empty: it accepts all requests.
  };
  // Returns when it answers.
  static absl::StatusOr<std::unique_ptr<FakeKubernetes>> Start(Options options);
  ~FakeKubernetes();

  int port() const { return port_; }
  std::string url() const;
  // Replaces the valid tokens.
  void SetTokens(const std::string& tokens) const;
  // A file in its folder, with this content.
  std::string WriteFile(const std::string& name, const std::string& content) const;

  void Kill() { process_.reset(); }
  // Starts a killed one with its objects. Does not wait.
  absl::Status Restart();
  void Signal(int signal) const { process_->Signal(signal); }
  // Sends a request of its paths for tests, such as "POST /control/compact"; returns the answer.
  absl::StatusOr<std::string> Control(const std::string& method, const std::string& path) const;

 private:
  explicit FakeKubernetes(Options options) : options_(std::move(options)) {}

  const Options options_;
  std::string folder_;
  int port_ = 0;
  std::unique_ptr<ChildProcess> process_;  // Null while it is killed.
};

}  // namespace ema

#endif  // EMA_TESTS_TESTUTIL_FAKE_KUBERNETES_H_
