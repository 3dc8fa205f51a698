// SPDX-License-Identifier: Apache-2.0
//
// A TCP proxy on this machine that cuts and stalls what goes through it.
#ifndef EMA_TESTS_CLIENT_TCP_PROXY_H_
#define EMA_TESTS_CLIENT_TCP_PROXY_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace ema {

// Forwards 127.0.0.1:<its port> to 127.0.0.1:<target port>, in one thread.
class TcpProxy {
 public:
  explicit TcpProxy(int target_port);
  ~TcpProxy();

  std::string address() const;
  // Closes all connections that are open now, with a reset. Does not wait until that has happened.
  void CutAll() { cut_ = true; }
  void AwaitCut() const { cut_.wait(true); }
  // Closes all connections when the clients have sent so many bytes more, in all. 0: never.
  void CutAfter(int64_t bytes) { cut_after_ = bytes; }
  // Reads nothing any more, so that senders' buffers fill up.
  void SetStalled(bool stalled) { stalled_ = stalled; }
  int64_t connection_count() const { return connection_count_; }

 private:
  struct Pair {
    int client = -1;
    int server = -1;
  };

  void Loop();
  void Accept();
  // False: the connection has ended.
  bool Forward(int from, int to, bool counted);
  void CloseAll();

  const int target_port_;
  int listen_fd_ = -1;
  int port_ = 0;
  std::atomic<bool> stop_ = false;
  std::atomic<bool> cut_ = false;
  std::atomic<bool> stalled_ = false;
  std::atomic<int64_t> cut_after_ = 0;
  std::atomic<int64_t> connection_count_ = 0;
  std::vector<Pair> pairs_;
  std::thread thread_;
};

}  // namespace ema

#endif  // EMA_TESTS_CLIENT_TCP_PROXY_H_
