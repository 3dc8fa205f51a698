// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/peers/redis_peer.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "hiredis/hiredis.h"
#include "tests/bench/bench_util.h"
#include "tests/bench/child_process.h"
#include "tests/bench/peers/socket_wire.h"

namespace ema::bench {
namespace {

// Redis takes none by itself. Another process could take it first; then Redis ends, and so do we.
int FreePort() {
  const int listener = ListenOnLoopback();
  const int port = PortOf(listener);
  close(listener);
  return port;
}

redisContext* Connect(int port) {
  const absl::Time deadline = absl::Now() + absl::Seconds(10);
  while (true) {
    redisContext* const context = redisConnect("127.0.0.1", port);
    if (context != nullptr && context->err == 0) return context;
    if (context != nullptr) redisFree(context);
    if (absl::Now() > deadline) Die("Redis did not start");
    absl::SleepFor(absl::Milliseconds(10));
  }
}

class RealRedis final : public RedisPeer {
 public:
  // Without persistence: in memory only, as our server is without a data folder.
  explicit RealRedis(const std::string& program)
      : port_(FreePort()),
        process_({program, "--bind", "127.0.0.1", "--port", absl::StrCat(port_), "--save", "",
                  "--appendonly", "no", "--loglevel", "warning"},
                 ChildProcess::Stop::kTerminate),
        context_(Connect(port_), redisFree) {
    // As the others on loopback. What Redis sends is by the host's choice: it has no option.
    setsockopt(context_->fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
  }

  // One command after another: many at once would all be copied into one buffer of hiredis first.
  void Set(const std::vector<std::span<const std::byte>>& tensors) override {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const std::string key = absl::StrCat("layer", i);
      const char* words[] = {"SET", key.data(), reinterpret_cast<const char*>(tensors[i].data())};
      const size_t sizes[] = {3, key.size(), tensors[i].size()};
      const Reply reply(redisCommandArgv(context_.get(), 3, words, sizes));
      if (reply == nullptr || reply->type != REDIS_REPLY_STATUS) Die("Redis refuses a value");
    }
  }

  void Get(const std::vector<std::span<std::byte>>& tensors) override {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Reply reply(redisCommand(context_.get(), "GET layer%d", static_cast<int>(i)));
      if (reply == nullptr || reply->type != REDIS_REPLY_STRING ||
          reply->len != tensors[i].size()) {
        Die("Redis has another value");
      }
      std::memcpy(tensors[i].data(), reply->str, tensors[i].size());
    }
  }

  pid_t pid() const override { return process_.pid(); }

 private:
  struct FreeReply {
    void operator()(redisReply* reply) const { freeReplyObject(reply); }
  };
  struct Reply : std::unique_ptr<redisReply, FreeReply> {
    explicit Reply(void* reply) : unique_ptr(static_cast<redisReply*>(reply)) {}
  };

  const int port_;
  const ChildProcess process_;
  const std::unique_ptr<redisContext, decltype(&redisFree)> context_;
};

}  // namespace

std::unique_ptr<RedisPeer> StartRedis() {
  const std::string program = FindProgram("redis-server");
  if (program.empty()) return nullptr;
  return std::make_unique<RealRedis>(program);
}

}  // namespace ema::bench
