// SPDX-License-Identifier: Apache-2.0
//
// The part of a push that goes by gRPC: by one stream, or by several over as many connections.
#include <algorithm>
#include <deque>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "client/cpp/push/push.h"
#include "client/cpp/push/push_stream.h"
#include "client/cpp/transport/convert.h"
#include "ema/internal/status_macros.h"

namespace ema {
namespace {

// The speed of less says little.
constexpr int64_t kMinNotedBytes = int64_t{64} << 20;

}  // namespace

struct PendingPush::Impl::Part {
  Part(std::shared_ptr<client_internal::Connection> connection, SteadyTime deadline,
       client_internal::Interrupt* interrupt)
      : call(std::move(connection), deadline, interrupt), stream(&call, &queue) {}
  ~Part() {
    queue.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue.Next(&tag, &ok)) {
    }
  }

  grpc::CompletionQueue queue;
  client_internal::Call call;
  client_internal::PushStream stream;
  client_internal::ChunkWriter::Scratch scratch;
  int64_t chunk_count = 0;
  int64_t total_bytes = 0;
  // Stopped: another stream has failed, or the weights have been released.
  enum class State { kBroken, kStopped, kSent } state = State::kBroken;
  absl::StatusOr<v1::PushResponse> response;
};

struct PendingPush::Impl::Sending {
  // Ends the others, which would wait for a part that has failed; the first one says why.
  void Fail(Part* part) {
    Part* none = nullptr;
    if (!failed.compare_exchange_strong(none, part)) return;
    for (Part& other : parts) {
      if (&other != part) other.call.Cancel();
    }
  }

  v1::PushRequest header;
  std::deque<Part> parts;
  std::atomic<size_t> next_chunk = 0;  // In `chunks_to_send_`: whoever is free takes it.
  std::atomic<Part*> failed = nullptr;
  std::optional<uint32_t> digest;  // Absent: something has failed.
};

void PendingPush::Impl::SendChunks(Sending& sending, Part& part) {
  if (!part.stream.Write(sending.header)) return sending.Fail(&part);
  while (true) {
    const size_t next = sending.next_chunk.fetch_add(1, std::memory_order_relaxed);
    if (next >= chunks_to_send_.size()) break;
    const int64_t chunk = chunks_to_send_[next];
    // Made while the chunk before is being sent.
    const std::optional<grpc::ByteBuffer> encoded =
        sending.failed.load() != nullptr
            ? std::nullopt
            : writer_->Write(chunk, part.scratch, !part.call.connection().owns_socket());
    if (!encoded.has_value()) {
      part.state = Part::State::kStopped;
      return sending.Fail(&part);
    }
    if (!part.stream.Write(*encoded)) return sending.Fail(&part);
    const int64_t length_bytes = run_->chunks().length_bytes(chunk);
    ++part.chunk_count;
    part.total_bytes += length_bytes;
    sent_bytes_.fetch_add(length_bytes, std::memory_order_relaxed);
  }
  part.state = Part::State::kSent;
}

void PendingPush::Impl::FinishPart(Sending& sending, Part& part) {
  // A stream that has broken is asked why; the others have no use then.
  if (!sending.digest.has_value() && part.state != Part::State::kBroken) {
    part.response = part.stream.Cancel();
    return;
  }
  v1::PushRequest message;
  v1::PushCommit& commit = *message.mutable_commit();
  commit.set_chunk_count(part.chunk_count);
  commit.set_total_bytes(part.total_bytes);
  commit.set_digest(sending.digest.value_or(0));
  part.response = part.stream.Finish(message);
  if (!part.response.ok()) sending.Fail(&part);
}

absl::Status PendingPush::Impl::ChooseConnections(int64_t count) {
  EMA_ASSIGN_OR_RETURN(std::shared_ptr<client_internal::Connection> connection,
                       run_->client().Connect(deadline_, &interrupt_));
  connections_ = {std::move(connection)};
  if (count > 1) run_->client().ConnectMore(count, &interrupt_, &connections_);
  return absl::OkStatus();
}

absl::StatusOr<PendingPush::Impl::Committed> PendingPush::Impl::SendByGrpc() {
  const int64_t total_bytes = BytesToSend();
  // After a failure one connection does.
  const bool is_large = total_bytes >= kMinNotedBytes && !has_begun_;
  int64_t wanted = is_large ? run_->connection_count() : 1;
  if (staged_.has_value()) wanted = std::min<int64_t>(wanted, staged_->max_senders());
  EMA_RETURN_IF_ERROR(ChooseConnections(wanted));

  Sending sending;
  absl::Notification begin;
  absl::Notification all_sent;
  std::optional<absl::BlockingCounter> sending_parts;
  const auto send_part = [&](Part& part) {
    SendChunks(sending, part);
    sending_parts->DecrementCount();
  };
  std::vector<std::jthread> threads;
  try {
    for (size_t i = 1; i < connections_.size(); ++i) {
      threads.emplace_back([&, i] {
        begin.WaitForNotification();
        send_part(sending.parts[i]);
        all_sent.WaitForNotification();
        FinishPart(sending, sending.parts[i]);
      });
    }
  } catch (const std::system_error&) {
    // The system has no more threads: those that there are have to do.
    connections_.resize(threads.size() + 1);
  }
  const auto part_count = static_cast<int64_t>(connections_.size());
  connection_count_.store(part_count, std::memory_order_relaxed);
  *sending.header.mutable_header() = BeginStream(Lane::kGrpc);
  sending.header.mutable_header()->set_stream_count(part_count);
  for (const auto& connection : connections_) {
    sending.parts.emplace_back(connection, deadline_, &interrupt_);
  }
  sending_parts.emplace(static_cast<int>(part_count));

  const SteadyTime start = SteadyNow();
  begin.Notify();
  send_part(sending.parts.front());
  sending_parts->Wait();
  const SteadyTime sent = SteadyNow();
  if (sending.failed.load() == nullptr) sending.digest = CheckedDigest();
  if (sending.digest.has_value()) gate_.HaveRead();
  all_sent.Notify();
  FinishPart(sending, sending.parts.front());
  threads.clear();

  const Part* const failed = sending.failed.load();
  const Part& telling = failed != nullptr ? *failed : sending.parts.front();
  const bool is_refused =
      failed != nullptr &&
      (GetErrorReason(failed->response.status()) == ErrorReason::kTooManyStreams ||
       (absl::IsUnavailable(failed->response.status()) &&
        GetErrorReason(failed->response.status()) == ErrorReason::kUnspecified));
  if (wanted > 1 && (is_refused || part_count < wanted)) run_->NoteFewerConnections();
  EMA_RETURN_IF_ERROR(telling.response.status());
  if (is_large && part_count == wanted) {
    // Of weights on a GPU the gate knows when they were copied.
    const SteadyTime left = staged_.has_value() ? sent : std::min(gate_.left_time(), SteadyNow());
    const absl::Duration duration = absl::FromChrono(left - start);
    run_->NoteSpeed(static_cast<double>(total_bytes) / absl::ToDoubleSeconds(duration));
  }
  return FromResponse(*telling.response);
}

}  // namespace ema
