// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/push_sender.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/push/grpc_push_stream.h"
#include "client/cpp/push/lane_push_stream.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {
namespace {

// Smaller pushes say little about speed.
constexpr int64_t kMinNotedBytes = int64_t{64} << 20;

// True: fewer streams may work. The server had no place for a stream or ended it, or it broke.
bool IsRefused(const absl::Status& error) {
  const ErrorReason reason = GetErrorReason(error);
  return reason == ErrorReason::kTooManyStreams || reason == ErrorReason::kStalled ||
         (absl::IsUnavailable(error) && reason == ErrorReason::kUnspecified);
}

// True: the stream broke; an error with a reason is the server's.
bool IsBroken(const absl::Status& error) {
  return !error.ok() && !absl::IsCancelled(error) && !absl::IsDeadlineExceeded(error) &&
         GetErrorReason(error) == ErrorReason::kUnspecified;
}

}  // namespace

// One try, by one or more streams: the first on the calling thread, each other one on its own.
class PushSender::Sending {
 public:
  Sending(const PushMessages* messages, Streams* streams)
      : messages_(*messages), streams_(streams->list), parts_(streams_.size()) {}

  // Calls `header` when the threads run, and sends its result and all chunks. If the system has too
  // few threads, drops some of the streams.
  absl::StatusOr<v1::PushResponse> Run(const std::function<v1::PushHeader()>& header);
  // When the last chunk had been sent.
  SteadyTime sent_time() const { return sent_time_; }

 private:
  // What one stream has sent, and the reply that it got.
  struct Part {
    int64_t chunk_count = 0;
    int64_t total_bytes = 0;
    absl::StatusOr<v1::PushResponse> response;
  };

  absl::Status SendChunks(size_t index);
  void Commit(size_t index);
  // Records why the push fails, unless another stream has failed before, and ends the other
  // streams, which would wait for this one.
  void Fail(size_t index, const absl::Status& error);

  const PushMessages& messages_;
  std::vector<std::unique_ptr<PushStream>>& streams_;
  std::vector<Part> parts_;  // By stream.
  v1::PushHeader header_;
  std::optional<uint32_t> digest_;  // Absent: the push must stop.
  SteadyTime sent_time_;
  std::atomic<size_t> next_chunk_ = 0;  // In messages_.chunks.
  std::atomic<bool> has_failed_ = false;
  absl::Status error_;  // Set by the stream that has set `has_failed_`.
};

void PushSender::Sending::Fail(size_t index, const absl::Status& error) {
  if (has_failed_.exchange(true)) return;
  error_ = error;
  for (size_t i = 0; i < streams_.size(); ++i) {
    if (i != index) streams_[i]->Cancel();
  }
}

absl::Status PushSender::Sending::SendChunks(size_t index) {
  PushStream& stream = *streams_[index];
  Part& part = parts_[index];
  EMA_RETURN_IF_ERROR(stream.SendHeader(header_));
  while (!has_failed_.load()) {
    const size_t next = next_chunk_.fetch_add(1, std::memory_order_relaxed);
    if (next >= messages_.chunks.size()) break;
    const int64_t chunk = messages_.chunks[next];
    EMA_RETURN_IF_ERROR(stream.SendChunk(chunk));
    const int64_t length_bytes = messages_.plan->length_bytes(chunk);
    ++part.chunk_count;
    part.total_bytes += length_bytes;
    messages_.sent_bytes->fetch_add(length_bytes, std::memory_order_relaxed);
  }
  return absl::OkStatus();
}

void PushSender::Sending::Commit(size_t index) {
  if (!digest_.has_value()) return;
  Part& part = parts_[index];
  v1::PushCommit commit;
  commit.set_chunk_count(part.chunk_count);
  commit.set_total_bytes(part.total_bytes);
  commit.set_digest(*digest_);
  part.response = streams_[index]->Commit(commit);
  if (!part.response.ok()) Fail(index, part.response.status());
}

absl::StatusOr<v1::PushResponse> PushSender::Sending::Run(
    const std::function<v1::PushHeader()>& header) {
  absl::Notification begin;
  absl::Notification all_sent;
  std::optional<absl::BlockingCounter> sending_streams;
  const auto send_chunks = [&](size_t index) {
    const absl::Status sent = SendChunks(index);
    if (!sent.ok()) Fail(index, sent);
    sending_streams->DecrementCount();
  };
  std::vector<std::jthread> threads;
  try {
    for (size_t i = 1; i < streams_.size(); ++i) {
      threads.emplace_back([&, i] {
        begin.WaitForNotification();
        send_chunks(i);
        all_sent.WaitForNotification();
        Commit(i);
      });
    }
  } catch (const std::system_error&) {
    // The system has no more threads: the existing ones must suffice.
    streams_.resize(threads.size() + 1);
  }
  header_ = header();
  header_.set_stream_count(std::ssize(streams_));
  sending_streams.emplace(static_cast<int>(streams_.size()));
  begin.Notify();
  send_chunks(0);
  sending_streams->Wait();
  sent_time_ = SteadyNow();
  if (!has_failed_.load()) digest_ = messages_.digest();
  if (digest_.has_value()) messages_.gate->FinishReading();
  all_sent.Notify();
  Commit(0);
  threads.clear();

  EMA_RETURN_IF_ERROR(error_);
  if (!digest_.has_value()) return UnreadableError();
  return std::move(parts_.front().response);
}

void PushSender::BreakConnections() {
  for (const std::shared_ptr<Connection>& connection : connections_) connection->Break();
  DropConnections();
}

absl::StatusOr<PushSender::Streams> PushSender::Open(const PushMessages& messages,
                                                     StagedChunks* staged, int64_t count) {
  Streams streams;
  RunCore::PushLanes taken = {.lanes = {}, .problem = broken_lane_};
  if (taken.problem.ok()) taken.problem = run_->FindLane(messages.deadline, messages.interrupt);
  if (taken.problem.ok()) {
    const CutOffClock::Pause pause(*clock_);  // The server may have to map the window.
    taken = run_->TakeLanes(count, staged != nullptr, messages.deadline, messages.interrupt);
  }
  streams.why_no_better = std::string(taken.problem.message());
  for (RunCore::PushLane& lane : taken.lanes) {
    streams.kind = lane.has_window ? Lane::kSharedWindow : Lane::kSharedMemory;
    streams.list.push_back(
        std::make_unique<LanePushStream>(run_, std::move(lane), &messages, staged));
  }
  if (!streams.list.empty()) return streams;

  EMA_ASSIGN_OR_RETURN(std::shared_ptr<Connection> connection,
                       run_->client().Connect(messages.deadline, messages.interrupt));
  connections_ = {std::move(connection)};
  if (count > 1) run_->client().ConnectMore(count, messages.interrupt, &connections_);
  for (const std::shared_ptr<Connection>& opened : connections_) {
    streams.list.push_back(std::make_unique<GrpcPushStream>(opened, &messages));
  }
  return streams;
}

absl::StatusOr<v1::PushResponse> PushSender::Send(const PushMessages& messages,
                                                  StagedChunks* staged, bool is_first_try) {
  const int64_t total_bytes = messages.total_bytes();
  const bool is_large = total_bytes >= kMinNotedBytes && is_first_try;
  int64_t wanted = is_large ? run_->connection_count() : 1;
  if (staged != nullptr) wanted = std::min<int64_t>(wanted, staged->max_senders());

  EMA_ASSIGN_OR_RETURN(Streams streams, Open(messages, staged, wanted));
  Sending sending(&messages, &streams);
  const SteadyTime start = SteadyNow();
  absl::StatusOr<v1::PushResponse> response = sending.Run([&] {
    connection_count_.store(std::ssize(streams.list), std::memory_order_relaxed);
    return messages.begin(streams.kind, streams.why_no_better);
  });
  const auto count = std::ssize(streams.list);
  // The server ends lanes that are too many for it; one may still work.
  const bool is_last_lane = streams.kind != Lane::kGrpc && count == 1;
  if (is_last_lane && IsBroken(response.status())) broken_lane_ = response.status();
  if (wanted > 1 && (IsRefused(response.status()) || count < wanted)) {
    run_->NoteFewerConnections();
  }
  if (response.ok() && is_large && count == wanted) {
    // For weights on a GPU the gate knows only when they were copied.
    const SteadyTime left =
        staged != nullptr ? sending.sent_time() : std::min(messages.gate->left_time(), SteadyNow());
    const absl::Duration duration = absl::FromChrono(left - start);
    run_->NoteSpeed(static_cast<double>(total_bytes) / absl::ToDoubleSeconds(duration));
  }
  return response;
}

}  // namespace ema::client_internal
