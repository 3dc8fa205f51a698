// SPDX-License-Identifier: Apache-2.0
//
// A TCP proxy on this machine that cuts, delays and stalls what goes through it.
#ifndef EMA_TESTS_TESTUTIL_TCP_PROXY_H_
#define EMA_TESTS_TESTUTIL_TCP_PROXY_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <list>
#include <string>
#include <thread>
#include <vector>

namespace ema {

// Forwards 127.0.0.1:<its port> to 127.0.0.1:<target port>, in one thread. What it is told applies
// to both directions, at once, to the bytes that come from then on.
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
  // Resets the clients' ends of all connections. The server's ends stay open, silent and unread
  // until CutAll(): it does not learn that its peers have gone.
  void HalfOpenAll() { half_open_ = true; }
  void AwaitHalfOpen() const { half_open_.wait(true); }

  // Reads nothing any more, so that senders' buffers fill up.
  void SetStalled(bool stalled) { stalled_ = stalled; }
  // Reads nothing any more of what the servers send.
  void HoldReplies(bool held) { replies_held_ = held; }
  // Bytes go on so much later than they came; 0: at once.
  void SetDelay(std::chrono::milliseconds delay) { delay_ms_ = delay.count(); }
  // Of each connection and direction at most so many bytes go on at once, a few times in a
  // hundredth of a second; 0: no limit.
  void SetTrickle(int64_t bytes) { trickle_bytes_ = bytes; }

  int64_t connection_count() const { return connection_count_; }
  // Of connections that were open when they were cut, or half of them.
  int64_t cut_count() const { return cut_count_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Piece {
    Clock::time_point due;
    std::string bytes;
  };
  // One direction of a connection.
  struct Pipe {
    int from = -1;
    int to = -1;
    bool from_client = false;
    bool ended = false;  // `from` has no more.
    std::deque<Piece> pieces;
    size_t queued_bytes = 0;
  };
  struct Connection {
    Pipe up;
    Pipe down;
  };

  void Loop();
  void Accept();
  // False: the connection has ended.
  bool Receive(Pipe& pipe);
  bool Send(Pipe& pipe);
  bool IsDue(const Pipe& pipe) const;
  void ObeyCuts();
  void CloseAll();

  const int target_port_;
  int listen_fd_ = -1;
  int port_ = 0;
  // Relaxed would do: they are looked at every two milliseconds.
  std::atomic<bool> stop_ = false;
  std::atomic<bool> cut_ = false;
  std::atomic<bool> half_open_ = false;
  std::atomic<bool> stalled_ = false;
  std::atomic<bool> replies_held_ = false;
  std::atomic<int64_t> delay_ms_ = 0;
  std::atomic<int64_t> trickle_bytes_ = 0;
  std::atomic<int64_t> cut_after_ = 0;
  std::atomic<int64_t> connection_count_ = 0;
  std::atomic<int64_t> cut_count_ = 0;
  // Only on the thread.
  std::list<Connection> connections_;
  std::vector<int> orphans_;  // The server's ends of half-open connections.
  std::thread thread_;
};

}  // namespace ema

#endif  // EMA_TESTS_TESTUTIL_TCP_PROXY_H_
