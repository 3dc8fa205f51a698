// SPDX-License-Identifier: Apache-2.0
//
// A process that forks while a push runs, as a DataLoader does. The server is another process:
// gRPC's own threads of a server in this one would be a second thing that a fork breaks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>

#include "ema/client.h"
#include "tests/client/fake_server.h"
#include "tests/testutil/status_matchers.h"

namespace ema {
namespace {

using ::testing::HasSubstr;

// Runs a FakeServer, whose first push is held until the parent writes a byte, in a child. Made
// before this process uses gRPC.
class ServerProcess {
 public:
  ServerProcess() {
    int address_pipe[2];
    int command_pipe[2];
    if (pipe(address_pipe) != 0 || pipe(command_pipe) != 0) std::abort();
    pid_ = fork();
    if (pid_ == 0) {
      close(command_pipe[1]);
      FakeServer server(*Manifest::Create({{.name = "w", .shape = {1'000'000}}}));
      server.push_scripts = {{.hold_chunks = true}};
      server.watch_scripts = {{.versions = {v1::VersionRecord()}, .hold = true}};
      // Takes the lock that the server's threads take: that a push comes after its script is clear
      // from the port's way through the parent alone, which ThreadSanitizer does not follow.
      if (!server.pushes().empty()) _exit(1);
      const int port = server.port();
      if (write(address_pipe[1], &port, sizeof(port)) != sizeof(port)) _exit(1);
      char command = 0;
      while (read(command_pipe[0], &command, 1) == 1) server.Release();
      _exit(0);
    }
    close(address_pipe[1]);
    close(command_pipe[0]);
    if (read(address_pipe[0], &port_, sizeof(port_)) != sizeof(port_)) std::abort();
    close(address_pipe[0]);
    command_fd_ = command_pipe[1];
  }
  ~ServerProcess() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    close(command_fd_);
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  void Release() { EXPECT_EQ(write(command_fd_, "r", 1), 1); }

 private:
  pid_t pid_ = -1;
  int port_ = 0;
  int command_fd_ = -1;
};

bool is_child = false;

// Runs `body` in a child, which ends with its result. -1: it did not end within ten seconds, or
// crashed.
int InChild(const std::function<int()>& body) {
  const pid_t pid = fork();
  if (pid == 0) {
    is_child = true;
    std::exit(body());
  }
  for (int i = 0; i < 2000; ++i) {
    int status = 0;
    if (waitpid(pid, &status, WNOHANG) == pid) return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    poll(nullptr, 0, 5);
  }
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  return -1;
}

class ForkTest : public testing::Test {
 protected:
  // Once, before the first client: a process that has used gRPC cannot fork one that will.
  static void SetUpTestSuite() { server_ = new ServerProcess(); }
  static void TearDownTestSuite() { delete server_; }

  static inline ServerProcess* server_ = nullptr;
};

TEST_F(ForkTest, AChildLeavesItsParentsObjectsAlone) {
  EMA_ASSERT_OK_AND_ASSIGN(std::unique_ptr<Client> client, Client::Create(server_->address()));
  EMA_ASSERT_OK_AND_ASSIGN(std::unique_ptr<ema::Run> run, client->OpenRun("m", {}));
  const std::vector<std::byte> weights(run->layout().total_bytes());
  TrainingTime time;
  time.Set(TimeUnit::kBatch, 1);
  EMA_ASSERT_OK_AND_ASSIGN(std::unique_ptr<PendingPush> push,
                           run->StartPush(1, time, {weights}, absl::Seconds(30)));

  EMA_ASSERT_OK_AND_ASSIGN(std::unique_ptr<VersionWatch> watch, client->Watch("m", VersionId()));
  ASSERT_THAT(watch->Next(), IsOk());

  // A worker that never touches the client.
  EXPECT_EQ(InChild([] { return 7; }), 7);

  // One that destroys all it has inherited.
  EXPECT_EQ(InChild([&] {
              push.reset();
              run.reset();
              watch.reset();
              client.reset();
              return 8;
            }),
            8);

  // One that tries to use it.
  EXPECT_EQ(InChild([&] {
              const auto is_refused = [](const absl::Status& status) {
                return status.code() == absl::StatusCode::kFailedPrecondition;
              };
              const bool is_right =
                  is_refused(client->GetModel("m").status()) &&
                  is_refused(client->OpenRun("m", {}).status()) &&
                  is_refused(client->Watch("m", std::nullopt).status()) &&
                  is_refused(watch->Next().status()) &&
                  is_refused(run->Push(2, time, {weights}, absl::Seconds(1)).status()) &&
                  is_refused(run->QueryPush(1, true).status()) &&
                  is_refused(run->SkipStep(1, "why", absl::Seconds(1)).status()) &&
                  is_refused(run->IsDue(time).status()) && !run->latest().has_value() &&
                  is_refused(push->Wait().status()) && push->done() &&
                  push->WaitReleased(absl::Seconds(1)) && push->stats().stream_count == 0 &&
                  is_refused(Client::Create("127.0.0.1:1").status());
              push->Abandon();
              return is_right ? 9 : 10;
            }),
            9);

  // The parent's push has noticed nothing.
  EXPECT_FALSE(push->done());
  server_->Release();
  EXPECT_THAT(push->Wait(), IsOk());
  EXPECT_EQ(push->stats().stream_count, 1);
}

TEST_F(ForkTest, WorkersMayComeAndGoDuringPushes) {
  server_->Release();
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Client> client,
                           Client::Create(server_->address()));
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ema::Run> run, client->OpenRun("m", {}));
  const std::vector<std::byte> weights(run->layout().total_bytes());
  for (int64_t step = 11; step <= 20; ++step) {
    TrainingTime time;
    time.Set(TimeUnit::kBatch, static_cast<double>(step));
    EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<PendingPush> push,
                             run->StartPush(step, time, {weights}, absl::Seconds(30)));
    for (int worker = 0; worker < 4; ++worker) EXPECT_EQ(InChild([] { return 3; }), 3);
    EXPECT_TRUE(push->WaitReleased(absl::Seconds(10)));
    EXPECT_THAT(push->Wait(), IsOk());
  }
}

}  // namespace
}  // namespace ema

// LeakSanitizer asks: in a forked child, what the threads of the parent hold looks leaked.
extern "C" int __lsan_is_turned_off();
extern "C" int __lsan_is_turned_off() { return ema::is_child ? 1 : 0; }
