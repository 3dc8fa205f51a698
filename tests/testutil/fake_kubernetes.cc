// SPDX-License-Identifier: Apache-2.0
#include "tests/testutil/fake_kubernetes.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/testutil/free_ports.h"

namespace ema {
namespace {

constexpr absl::Duration kStartTimeout = absl::Seconds(60);
constexpr absl::Duration kPollInterval = absl::Milliseconds(50);

}  // namespace

absl::StatusOr<std::unique_ptr<FakeKubernetes>> FakeKubernetes::Start(Options options) {
  std::unique_ptr<FakeKubernetes> server(new FakeKubernetes(std::move(options)));
  std::string folder = (std::filesystem::temp_directory_path() / "ema-kubernetes.XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) return absl::InternalError("no temporary folder");
  server->folder_ = folder;
  server->port_ = FindFreePorts(1)[0];
  server->SetTokens(server->options_.tokens);
  if (absl::Status status = server->Restart(); !status.ok()) return status;
  const absl::Time deadline = absl::Now() + kStartTimeout;
  while (true) {
    const absl::StatusOr<std::string> objects = server->Control("GET", "/control/objects");
    if (objects.ok()) return server;
    if (absl::Now() > deadline) return objects.status();
    absl::SleepFor(kPollInterval);
  }
}

FakeKubernetes::~FakeKubernetes() {
  process_.reset();
  std::error_code error;
  std::filesystem::remove_all(folder_, error);
}

std::string FakeKubernetes::url() const {
  return absl::StrCat(options_.certificate_file.empty() ? "http" : "https", "://127.0.0.1:", port_);
}

std::string FakeKubernetes::WriteFile(const std::string& name, const std::string& content) const {
  const std::string path = absl::StrCat(folder_, "/", name);
  // As Kubernetes replaces a token: a reader sees the old file or the new one.
  std::ofstream(path + ".new") << content;
  std::filesystem::rename(path + ".new", path);
  return path;
}

void FakeKubernetes::SetTokens(const std::string& tokens) const { WriteFile("tokens", tokens); }

absl::Status FakeKubernetes::Restart() {
  std::vector<std::string> command = {"/usr/bin/python3", EMA_FAKE_KUBERNETES,
                                      absl::StrCat("--port=", port_),
                                      absl::StrCat("--data=", folder_, "/objects")};
  if (!options_.tokens.empty()) command.push_back(absl::StrCat("--tokens=", folder_, "/tokens"));
  if (!options_.certificate_file.empty()) {
    command.push_back("--cert=" + options_.certificate_file);
    command.push_back("--key=" + options_.key_file);
  }
  absl::StatusOr<std::unique_ptr<ChildProcess>> process = ChildProcess::Start(command);
  if (!process.ok()) return process.status();
  process_ = *std::move(process);
  return absl::OkStatus();
}

absl::StatusOr<std::string> FakeKubernetes::Control(const std::string& method,
                                                    const std::string& path) const {
  // Python has the only HTTP client that the other tests need, too.
  const std::string command = absl::StrCat(
      "/usr/bin/python3 -c 'import ssl, urllib.request as r; "
      "print(r.urlopen(r.Request(\"",
      url(), path, "\", method=\"", method,
      "\"), timeout=20, context=ssl._create_unverified_context()).read().decode())' 2>&1");
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
