// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/grpc_sender.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "client/cpp/client_impl.h"
#include "client/cpp/push/push_stream.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {
namespace {

// Smaller pushes say little about speed.
constexpr int64_t kMinNotedBytes = int64_t{64} << 20;

}  // namespace

struct GrpcSender::Part {
  Part(std::shared_ptr<Connection> connection, SteadyTime deadline, Interrupt* interrupt)
      : call(std::move(connection), deadline, interrupt), stream(&call, &queue) {}
  ~Part() {
    queue.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue.Next(&tag, &ok)) {
    }
  }

  grpc::CompletionQueue queue;
  Call call;
  PushStream stream;
  ChunkWriter::Scratch scratch;
  int64_t chunk_count = 0;
  int64_t total_bytes = 0;
  // Stopped: another stream has failed, or the weights have been released.
  enum class State { kBroken, kStopped, kSent } state = State::kBroken;
  absl::StatusOr<v1::PushResponse> response;
};

struct GrpcSender::Sending {
  explicit Sending(const PushMessages* the_messages) : messages(*the_messages) {}

  // Ends the others, which would wait for a part that has failed; the first one says why.
  void Fail(Part* part) {
    Part* none = nullptr;
    if (!failed.compare_exchange_strong(none, part)) return;
    for (Part& other : parts) {
      if (&other != part) other.call.Cancel();
    }
  }

  const PushMessages& messages;
  v1::PushRequest header;
  std::deque<Part> parts;
  std::atomic<size_t> next_chunk = 0;  // In messages.chunks: the next free part takes it.
  std::atomic<Part*> failed = nullptr;
  std::optional<uint32_t> digest;  // Absent: something has failed.
};

void GrpcSender::SendChunks(Sending& sending, Part& part) {
  const PushMessages& messages = sending.messages;
  if (!part.stream.Write(sending.header)) return sending.Fail(&part);
  while (true) {
    const size_t next = sending.next_chunk.fetch_add(1, std::memory_order_relaxed);
    if (next >= messages.chunks.size()) break;
    const int64_t chunk = messages.chunks[next];
    // Made while the previous chunk is being sent.
    const std::optional<grpc::ByteBuffer> encoded =
        sending.failed.load() != nullptr
            ? std::nullopt
            : messages.writer->Write(chunk, part.scratch, !part.call.connection().owns_socket());
    if (!encoded.has_value()) {
      part.state = Part::State::kStopped;
      return sending.Fail(&part);
    }
    if (!part.stream.Write(*encoded)) return sending.Fail(&part);
    const int64_t length_bytes = messages.plan->length_bytes(chunk);
    ++part.chunk_count;
    part.total_bytes += length_bytes;
    messages.sent_bytes->fetch_add(length_bytes, std::memory_order_relaxed);
  }
  part.state = Part::State::kSent;
}

void GrpcSender::FinishPart(Sending& sending, Part& part) {
  // A broken stream gives the error; the others are of no use then.
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

void GrpcSender::BreakConnections() {
  for (const std::shared_ptr<Connection>& connection : connections_) connection->Break();
  DropConnections();
}

absl::Status GrpcSender::Connect(const PushMessages& messages, int64_t count) {
  EMA_ASSIGN_OR_RETURN(std::shared_ptr<Connection> connection,
                       run_->client().Connect(messages.deadline, messages.interrupt));
  connections_ = {std::move(connection)};
  if (count > 1) run_->client().ConnectMore(count, messages.interrupt, &connections_);
  return absl::OkStatus();
}

absl::StatusOr<v1::PushResponse> GrpcSender::Send(const PushMessages& messages,
                                                  const Options& options) {
  const int64_t total_bytes = messages.total_bytes();
  const bool is_large = total_bytes >= kMinNotedBytes && options.is_first_try;
  int64_t wanted = 1;
  if (is_large) wanted = std::min(run_->connection_count(), options.max_connections);
  EMA_RETURN_IF_ERROR(Connect(messages, wanted));

  Sending sending(&messages);
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
    // The system has no more threads: the existing ones must suffice.
    connections_.resize(threads.size() + 1);
  }
  const auto part_count = static_cast<int64_t>(connections_.size());
  connection_count_.store(part_count, std::memory_order_relaxed);
  *sending.header.mutable_header() = messages.begin();
  sending.header.mutable_header()->set_stream_count(part_count);
  for (const auto& connection : connections_) {
    sending.parts.emplace_back(connection, messages.deadline, messages.interrupt);
  }
  sending_parts.emplace(static_cast<int>(part_count));

  const SteadyTime start = SteadyNow();
  begin.Notify();
  send_part(sending.parts.front());
  sending_parts->Wait();
  const SteadyTime sent = SteadyNow();
  if (sending.failed.load() == nullptr) sending.digest = messages.digest();
  if (sending.digest.has_value()) messages.gate->FinishReading();
  all_sent.Notify();
  FinishPart(sending, sending.parts.front());
  threads.clear();

  Part* const failed = sending.failed.load();
  Part& deciding = failed != nullptr ? *failed : sending.parts.front();
  const bool is_refused =
      failed != nullptr &&
      (GetErrorReason(failed->response.status()) == ErrorReason::kTooManyStreams ||
       (absl::IsUnavailable(failed->response.status()) &&
        GetErrorReason(failed->response.status()) == ErrorReason::kUnspecified));
  if (wanted > 1 && (is_refused || part_count < wanted)) run_->NoteFewerConnections();
  EMA_RETURN_IF_ERROR(deciding.response.status());
  if (is_large && part_count == wanted) {
    // For weights on a GPU the gate knows only when they were copied.
    const SteadyTime left =
        options.is_staged ? sent : std::min(messages.gate->left_time(), SteadyNow());
    const absl::Duration duration = absl::FromChrono(left - start);
    run_->NoteSpeed(static_cast<double>(total_bytes) / absl::ToDoubleSeconds(duration));
  }
  return *std::move(deciding.response);
}

}  // namespace ema::client_internal
