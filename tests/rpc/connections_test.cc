// SPDX-License-Identifier: Apache-2.0
//
// The ways to a server: IPv4, IPv6, unix sockets, and how many may take them.
#include <grpcpp/generic/generic_stub.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <fstream>
#include <thread>

#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ema/client.h"
#include "server/rpc/open_connections.h"
#include "tests/rpc/rpc_fixture.h"

namespace ema {
namespace {

using ::testing::HasSubstr;

class ConnectionsTest : public RpcFixture {
 protected:
  std::string path_ = absl::StrCat("/tmp/ema-connections-test-", getpid(), ".sock");
  std::string socket_ = absl::StrCat("unix:", path_);

  static std::vector<std::string> AddressesOf(const RpcServer& server) {
    return absl::StrSplit(server.addresses(), ',');
  }
  // The server's ends of the connections to its port.
  std::vector<int> ServersEnds() const {
    std::vector<int> fds;
    for (int fd = 0; fd < 1024; ++fd) {
      sockaddr_in own{};
      sockaddr_storage peer{};
      socklen_t own_size = sizeof(own);
      socklen_t peer_size = sizeof(peer);
      if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_size) == 0 &&
          own.sin_family == AF_INET && ntohs(own.sin_port) == server_->port() &&
          getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0) {
        fds.push_back(fd);
      }
    }
    return fds;
  }
  // Pushes and pulls, by gRPC.
  static absl::Status Use(const std::string& address, absl::Duration timeout = absl::Seconds(20)) {
    EMA_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client,
                         Client::Create(address, {.timeout = timeout, .same_host_lane = false}));
    constexpr int64_t kCount = 500'000;
    const Manifest manifest = *Manifest::Create({{"w", Dtype::kFloat32, {kCount}}});
    EMA_RETURN_IF_ERROR(
        client
            ->CreateModel("used", manifest, {{.name = "ema", .schedule = *Schedule::Parse("1ba")}})
            .status());
    EMA_ASSIGN_OR_RETURN(const std::unique_ptr<ema::Run> run, client->OpenRun("used", {}));
    const int64_t step = run->latest().has_value() ? run->latest()->step + 1 : 1;
    const std::vector<float> weights(kCount, 3.0f);
    EMA_RETURN_IF_ERROR(
        run->Push(step, TrainingTime::AtBatch(step), {std::as_bytes(std::span(weights))}, timeout)
            .status());
    std::vector<float> pulled;
    EMA_RETURN_IF_ERROR(client
                            ->Pull(
                                "used", "ema", {},
                                [&](const PullInfo& info) {
                                  pulled.resize(info.total_bytes / 4);
                                  return std::as_writable_bytes(std::span(pulled));
                                },
                                timeout)
                            .status());
    return pulled == weights ? absl::OkStatus() : absl::DataLossError("other values");
  }
};

TEST_F(ConnectionsTest, AServerIsReachedByEachOfItsAddresses) {
  RpcServer::Options options;
  options.listen_addresses = {"127.0.0.1:0", socket_, "127.0.0.2:0"};
  StartServer(options);
  for (const std::string& address : AddressesOf(*server_)) EXPECT_THAT(Use(address), IsOk());
  server_.reset();
  EXPECT_NE(access(path_.c_str(), F_OK), 0);  // The file goes with the server.
}

TEST_F(ConnectionsTest, ASocketIsForTheServersOwnUserWhateverTheUmaskIs) {
  RpcServer::Options options;
  options.listen_addresses = {socket_};
  const mode_t before = umask(0);
  StartServer(options);
  umask(before);
  struct stat about {};
  ASSERT_EQ(stat(path_.c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & ACCESSPERMS, S_IRUSR | S_IWUSR);
  EXPECT_THAT(Use(socket_), IsOk());
}

TEST_F(ConnectionsTest, AServerIsReachedByIpv6) {
  RpcServer::Options options;
  options.listen_addresses = {"[::1]:0"};
  if (const auto server = RpcServer::Start(
          std::make_shared<ModelStore>(NewTestDevice(1 << 20), ModelStore::Options()), checkpoints_,
          options);
      !server.ok()) {
    GTEST_SKIP() << "this machine has no IPv6: " << server.status();
  }
  StartServer(options);
  EXPECT_THAT(Use(absl::StrCat("[::1]:", server_->port())), IsOk());
}

TEST_F(ConnectionsTest, AFileThatAKilledServerHasLeftIsReplaced) {
  RpcServer::Options options;
  options.listen_addresses = {"127.0.0.1:0", socket_};
  StartServer(options);
  ASSERT_EQ(link(path_.c_str(), absl::StrCat(path_, ".left").c_str()), 0);
  server_.reset();
  ASSERT_EQ(rename(absl::StrCat(path_, ".left").c_str(), path_.c_str()), 0);
  StartServer(options);
  EXPECT_THAT(Use(socket_), IsOk());
  // One at a time.
  EXPECT_THAT(RpcServer::Start(store_, checkpoints_, options),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr(path_)));
}

TEST_F(ConnectionsTest, NoFileThatIsNoSocketIsReplaced) {
  const std::string target = absl::StrCat(path_, ".target");
  RpcServer::Options options;
  options.listen_addresses = {socket_};
  const auto expect_refused = [&] {
    EXPECT_THAT(RpcServer::Start(
                    std::make_shared<ModelStore>(NewTestDevice(1 << 20), ModelStore::Options()),
                    checkpoints_, options),
                StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("not a socket")));
    struct stat there {};
    EXPECT_EQ(lstat(path_.c_str(), &there), 0);
    EXPECT_FALSE(S_ISSOCK(there.st_mode));
  };
  std::ofstream(path_) << "precious";
  expect_refused();
  ASSERT_EQ(rename(path_.c_str(), target.c_str()), 0);
  ASSERT_EQ(symlink(target.c_str(), path_.c_str()), 0);
  expect_refused();
  std::string text;
  std::ifstream(target) >> text;
  EXPECT_EQ(text, "precious");
  // Nor is a link to a socket that nobody listens on.
  unlink(target.c_str());
  const int left = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  target.copy(address.sun_path, sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(left, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  close(left);
  expect_refused();
  EXPECT_EQ(access(target.c_str(), F_OK), 0);
  unlink(target.c_str());
  unlink(path_.c_str());
}

TEST_F(ConnectionsTest, BadAddressesAreRefused) {
  for (const std::string address : {"unix:relative", "unix:", "unix:/no-such-folder/x"}) {
    RpcServer::Options options;
    options.listen_addresses = {address};
    EXPECT_NE(RpcServer::Start(store_, checkpoints_, options).status().code(),
              absl::StatusCode::kOk)
        << address;
  }
  EXPECT_THAT(Client::Create("unix:relative"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("unix:/path")));
  EXPECT_EQ(Use(socket_, absl::Milliseconds(100)).code(), absl::StatusCode::kUnavailable);
}

TEST_F(ConnectionsTest, MoreConnectionsThanAllowedAreClosedUntilOthersGo) {
  RpcServer::Options options;
  options.limits.max_connections = 2;
  StartServer(options);
  {
    const std::unique_ptr<Client> first = *Client::Create(address_);
    const std::unique_ptr<Client> second = *Client::Create(address_);
    ASSERT_THAT(first->ListModels(), IsOk());
    ASSERT_THAT(second->ListModels(), IsOk());
    EXPECT_EQ(Use(address_, absl::Milliseconds(300)).code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(first->ListModels(), IsOk());
  }
  EXPECT_THAT(Use(address_), IsOk());
}

TEST_F(ConnectionsTest, AllTcpAddressesHaveOneLimitTogetherAndSocketsAnother) {
  RpcServer::Options options;
  options.listen_addresses = {"127.0.0.1:0", "127.0.0.2:0", socket_};
  options.limits.max_connections = 2;
  StartServer(options);
  const std::vector<std::string> addresses = AddressesOf(*server_);
  const auto connect = [](const std::string& address) {
    std::unique_ptr<Client> client = *Client::Create(address, {.same_host_lane = false});
    EXPECT_THAT(client->ListModels(), IsOk());
    return client;
  };
  {
    const std::unique_ptr<Client> by_one = connect(addresses[0]);
    const std::unique_ptr<Client> by_another = connect(addresses[1]);
    EXPECT_EQ(Use(address_, absl::Milliseconds(300)).code(), absl::StatusCode::kUnavailable);
    const std::unique_ptr<Client> by_file = connect(socket_);
    EXPECT_THAT(Use(socket_), IsOk());
    const std::unique_ptr<Client> by_file_too = connect(socket_);
    EXPECT_EQ(server_->usage().connections, 4);
    EXPECT_EQ(Use(socket_, absl::Milliseconds(300)).code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_THAT(Use(address_), IsOk());
  EXPECT_THAT(Use(socket_), IsOk());
}

TEST_F(ConnectionsTest, AnIdleConnectionIsClosedAndItsClientDoesNotNotice) {
  StartServer({.limits = {.max_connection_idle = absl::Milliseconds(50)}});
  const std::unique_ptr<Client> client = *Client::Create(address_, {.same_host_lane = false});
  for (int i = 0; i < 3; ++i) {
    ASSERT_THAT(client->ListModels(), IsOk());
    while (server_->usage().connections > 0) std::this_thread::yield();
  }
}

TEST(OpenConnectionsTest, ClosedConnectionsDoNotCount) {
  OpenConnections connections(/*limit=*/2);
  const int first = socket(AF_UNIX, SOCK_STREAM, 0);
  const int second = socket(AF_UNIX, SOCK_STREAM, 0);
  const int third = socket(AF_UNIX, SOCK_STREAM, 0);
  EXPECT_TRUE(connections.Add(first, /*is_unix=*/false));
  EXPECT_TRUE(connections.Add(second, /*is_unix=*/false));
  EXPECT_FALSE(connections.Add(third, /*is_unix=*/false));
  EXPECT_TRUE(connections.Add(third, /*is_unix=*/true));
  EXPECT_EQ(connections.count(), 3);
  close(first);
  EXPECT_EQ(connections.count(), 2);
  const int fourth = socket(AF_UNIX, SOCK_STREAM, 0);
  EXPECT_TRUE(connections.Add(fourth, /*is_unix=*/false));
  for (const int fd : {second, third, fourth}) close(fd);
  EXPECT_EQ(connections.count(), 0);
}

TEST_F(ConnectionsTest, WhoDoesNotBeginToSpeakIsClosed) {
  StartServer({.limits = {.handshake_timeout = absl::Milliseconds(200)}});
  sockaddr_in server{};
  server.sin_family = AF_INET;
  server.sin_port = htons(static_cast<uint16_t>(server_->port()));
  server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&server), sizeof(server)), 0);
  // The end of the stream, behind what the server has said for itself.
  pollfd readable{.fd = fd, .events = POLLIN};
  std::array<char, 1024> said;
  ssize_t count = 1;
  while (count > 0 && poll(&readable, 1, 20'000) == 1) count = read(fd, said.data(), said.size());
  EXPECT_LE(count, 0);
  close(fd);
  EXPECT_THAT(Use(address_), IsOk());
}

TEST_F(ConnectionsTest, TheKernelAsksWhetherAnIdlePeersMachineIsThere) {
  StartServer({.limits = {.keepalive_time = absl::Milliseconds(6'500),
                          .keepalive_timeout = absl::Seconds(20)}});
  const std::unique_ptr<Client> client = *Client::Create(address_, {.same_host_lane = false});
  ASSERT_THAT(client->ListModels(), IsOk());
  const auto option = [](int fd, int level, int name) {
    int value = -1;
    socklen_t size = sizeof(value);
    EXPECT_EQ(getsockopt(fd, level, name, &value, &size), 0);
    return value;
  };
  const std::vector<int> fds = ServersEnds();
  ASSERT_THAT(fds, testing::Not(testing::IsEmpty()));
  for (const int fd : fds) {
    EXPECT_EQ(option(fd, SOL_SOCKET, SO_KEEPALIVE), 1);
    EXPECT_EQ(option(fd, IPPROTO_TCP, TCP_KEEPIDLE), 7);
    EXPECT_EQ(option(fd, IPPROTO_TCP, TCP_KEEPINTVL) * option(fd, IPPROTO_TCP, TCP_KEEPCNT), 20);
  }
  // The longest that the option takes is more than Linux does.
  StartServer({.limits = {.keepalive_time = absl::Hours(24)}});
  const std::unique_ptr<Client> other = *Client::Create(address_, {.same_host_lane = false});
  ASSERT_THAT(other->ListModels(), IsOk());
  for (const int fd : ServersEnds()) EXPECT_EQ(option(fd, IPPROTO_TCP, TCP_KEEPIDLE), 32'767);
}

TEST_F(ConnectionsTest, LongHeadersAndOneStreamTooManyAreRefused) {
  const auto list = [this](size_t header_bytes, absl::Duration timeout) {
    grpc::ClientContext context;
    context.AddMetadata("x-note", std::string(header_bytes, 'x'));
    context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
    v1::ListModelsResponse response;
    return stub_->ListModels(&context, {}, &response).error_code();
  };
  StartServer({.limits = {.max_metadata_bytes = 2048}});
  EXPECT_EQ(list(1000, absl::Seconds(20)), grpc::StatusCode::OK);
  EXPECT_EQ(list(8000, absl::Seconds(20)), grpc::StatusCode::RESOURCE_EXHAUSTED);
  // A new connection: gRPC closes one on which a stream begins before it has let that one go.
  StartServer({.limits = {.max_streams_per_connection = 1}});
  CreateAndOpen();
  grpc::ClientContext context;
  v1::WatchRequest request;
  request.set_model("m");
  const auto watch = stub_->Watch(&context, request);
  watch->WaitForInitialMetadata();
  EXPECT_EQ(list(10, absl::Milliseconds(300)), grpc::StatusCode::DEADLINE_EXCEEDED);
  context.TryCancel();
  watch->Finish();
  EXPECT_EQ(list(10, absl::Seconds(20)), grpc::StatusCode::OK);
}

TEST_F(ConnectionsTest, AServerThatIsStoppedUnderReadingTrafficEndsInOrder) {
  for (int round = 0; round < 10; ++round) {
    StartServer({.same_host_lane = false});
    CreateAndOpen();
    v1::PushResponse response;
    ASSERT_TRUE(PushFilled(1, 1, &response).status.ok());
    std::atomic<bool> stopped = false;
    std::atomic<int64_t> pulls = 0;
    std::vector<std::jthread> readers;
    for (int i = 0; i < 16; ++i) {
      readers.emplace_back([&] {
        while (!stopped.load()) {
          grpc::ClientContext context;
          v1::PullRequest request;
          request.set_model("m");
          request.set_track("ema");
          const auto stream = stub_->Pull(&context, request);
          v1::PullResponse message;
          while (stream->Read(&message)) {
          }
          if (stream->Finish().ok()) pulls.fetch_add(1);
        }
      });
    }
    while (pulls.load() < 100) std::this_thread::yield();
    server_->Shutdown(SteadyNow());
    stopped.store(true);
    readers.clear();
    server_.reset();
  }
}

// Keeps the server's thread busy at the first pull that ends.
class SlowObserver final : public ServerObserver {
 public:
  void OnRpcEnded(std::string_view rpc, const absl::Status&) override {
    if (rpc != "Pull" || begun.HasBeenNotified()) return;
    begun.Notify();
    release.WaitForNotification();
  }
  absl::Notification begun;
  absl::Notification release;
};

// An operation on a completion queue that has been shut down would end the process.
TEST_F(ConnectionsTest, AServerThatStopsEndsACallWhoseStartItHasNotYetSeen) {
  // A queue does deferred work, such as its shutdown, after every eighth completion. Each round
  // begins with another number of completions.
  for (int round = 0; round < 8; ++round) {
    SlowObserver observer;
    RpcServer::Options options{.same_host_lane = false};
    options.observer = &observer;
    StartServer(options);
    CreateAndOpen();
    v1::PushResponse response;
    ASSERT_TRUE(PushFilled(1, 1, &response).status.ok());
    v1::GetModelRequest request;
    request.set_model("m");
    for (int i = 0; i < round; ++i) {
      grpc::ClientContext context;
      v1::Model model;
      ASSERT_TRUE(stub_->GetModel(&context, request, &model).ok());
    }

    // A malformed request is never counted as admitted, but keeps the server's only thread busy
    // while another pull arrives and the server stops.
    std::jthread malformed([&] {
      grpc::CompletionQueue queue;
      grpc::ClientContext context;
      const grpc::Slice garbage("\xff");
      const auto call = grpc::GenericStub(channel_).PrepareUnaryCall(
          &context, "/ema.v1.EmaService/Pull", grpc::ByteBuffer(&garbage, 1), &queue);
      call->StartCall();
      grpc::ByteBuffer reply;
      grpc::Status status;
      call->Finish(&reply, &status, nullptr);
      void* tag = nullptr;
      bool ok = false;
      queue.Next(&tag, &ok);
      EXPECT_FALSE(status.ok());
    });
    observer.begun.WaitForNotification();
    std::jthread reader([&] { Pull("ema"); });
    absl::SleepFor(absl::Milliseconds(100));
    std::jthread stopper([&] { server_->Shutdown(SteadyNow()); });
    absl::SleepFor(absl::Milliseconds(300));
    observer.release.Notify();
    stopper.join();
    reader.join();
    malformed.join();
    server_.reset();
  }
}

TEST_F(ConnectionsTest, AReaderThatHasLostItsPlaceGoesOn) {
  RpcServer::Options options;
  options.limits.max_pull_streams = 1;
  options.limits.stream_timeout = absl::Seconds(1);
  StartServer(options);
  constexpr int64_t kCount = 20'000'000;  // More than windows and sockets take.
  const Manifest manifest = *Manifest::Create({{"w", Dtype::kFloat32, {kCount}}});
  const auto new_client = [this] {
    return *Client::Create(address_, {.timeout = absl::Seconds(30), .same_host_lane = false});
  };
  const std::unique_ptr<Client> slow = new_client();
  ASSERT_THAT(
      slow->CreateModel("m", manifest, {{.name = "ema", .schedule = *Schedule::Parse("1ba")}}),
      IsOk());
  EMA_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ema::Run> run, slow->OpenRun("m", {}));
  std::vector<float> weights(kCount);
  for (int64_t i = 0; i < kCount; ++i) weights[i] = static_cast<float>(i % 1009);
  ASSERT_THAT(run->Push(1, TrainingTime::AtBatch(1), {std::as_bytes(std::span(weights))},
                        absl::Seconds(30)),
              IsOk());

  const auto pull = [&](Client& client, std::vector<float>& pulled,
                        const std::function<void(int64_t)>& on_progress) {
    pulled.resize(kCount);
    return client
        .Pull(
            "m", "ema", {},
            [&](const PullInfo&) -> absl::StatusOr<std::span<std::byte>> {
              return std::as_writable_bytes(std::span(pulled));
            },
            absl::Seconds(30), on_progress)
        .status();
  };
  std::vector<float> of_other;
  std::vector<float> of_slow;
  bool has_waited = false;
  // The other one comes while this one takes nothing.
  const absl::Status status = pull(*slow, of_slow, [&](int64_t) {
    if (std::exchange(has_waited, true)) return;
    absl::SleepFor(absl::Milliseconds(400));
    EXPECT_THAT(pull(*new_client(), of_other, nullptr), IsOk());
  });
  EXPECT_THAT(status, IsOk());
  EXPECT_TRUE(of_other == weights);
  EXPECT_TRUE(of_slow == weights);
}

}  // namespace
}  // namespace ema
