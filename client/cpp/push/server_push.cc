// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/push/server_push.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/push/await_push.h"
#include "client/cpp/push/drop_step.h"
#include "client/cpp/push/push_messages.h"
#include "client/cpp/transport/convert_replies.h"
#include "client/cpp/transport/grpc_time.h"
#include "client/cpp/transport/retry.h"
#include "ema/error_reason.h"
#include "ema/internal/status_macros.h"

namespace ema::client_internal {

namespace {

// How long the kernel may take the slices of a push that has failed, before the connection is given
// up.
constexpr absl::Duration kDropSlicesGrace = absl::Milliseconds(100);
// How long a trainer is held while no stream to the server is open: enough to connect again after a
// cut, and no more, because a server that is gone may stay so.
constexpr absl::Duration kCutOffGrace = absl::Seconds(1);
constexpr absl::Duration kSlicePollInterval = absl::Milliseconds(5);
// Failures that should not happen: checksums that are wrong on arrival, errors that gRPC makes by
// itself.
constexpr int kMaxOddFailures = 4;

// True: `error` comes from a server that is there and takes this run's pushes, if not this one now.
bool ShowsServer(const absl::Status& error) {
  switch (GetErrorReason(error)) {
    case ErrorReason::kUnspecified:
    case ErrorReason::kDraining:
    case ErrorReason::kFenced:
    case ErrorReason::kRunIncomplete:
    case ErrorReason::kGroupDegraded:
      return false;
    default:
      return true;
  }
}

// Of a try's streams: greater than those of all tries before, so that a header that comes late,
// over another connection, does not replace a later try. In this process that holds even if the
// clock is set back; the clock makes the numbers of a restarted rank greater.
int64_t NextStreamGroup() {
  // Relaxed: nothing else goes along.
  static std::atomic<int64_t> last = 0;
  int64_t before = last.load(std::memory_order_relaxed);
  int64_t next = 0;
  do {
    next = std::max(before + 1, absl::GetCurrentTimeNanos());
  } while (!last.compare_exchange_weak(before, next, std::memory_order_relaxed));
  return next;
}

}  // namespace

ServerPush::ServerPush(std::shared_ptr<RunCore> run, PushArguments arguments,
                       std::vector<Gpu*> gpus, const GroupPart* part)
    : run_(std::move(run)),
      step_(arguments.step),
      time_(arguments.time),
      shards_(std::move(arguments.shards)),
      deadline_(arguments.deadline),
      options_(std::move(arguments.options)),
      gpus_(std::move(gpus)),
      part_(part != nullptr ? std::optional(*part) : std::nullopt),
      start_(SteadyNow()),
      sender_(run_.get(), &cut_off_clock_) {}

ServerPush::~ServerPush() {
  if (thread_.joinable()) thread_.join();
  queue_.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) {
  }
}

std::vector<int64_t> ServerPush::AllChunks() const {
  std::vector<int64_t> chunks(run_->chunks().ChunksBefore(total_bytes_));
  std::iota(chunks.begin(), chunks.end(), 0);
  return chunks;
}

void ServerPush::CheckContent() {
  // What is on a GPU is read by its own copies only.
  if (!gpus_.empty()) return;
  const RankLayout& layout = run_->layout();
  const int64_t bytes = HasFrozen() ? layout.total_bytes() : layout.trained_bytes();
  ChunkWriter writer(&layout, &run_->chunks(), run_->chunks().ChunksBefore(bytes), shards_, &gate_,
                     /*staged=*/nullptr, options_.strides);
  expected_crc32c_ = writer.Checksums().value_or(std::vector<uint32_t>());
}

std::optional<uint32_t> ServerPush::CheckedDigest() {
  const std::optional<uint32_t> digest = writer_->Digest();
  if (!digest.has_value() || expected_crc32c_.empty()) return digest;
  const std::vector<uint32_t> sent = *writer_->Checksums();  // They are known by now.
  const size_t checked = std::min(expected_crc32c_.size(), sent.size());
  was_written_ = !std::equal(sent.begin(), sent.begin() + checked, expected_crc32c_.begin());
  return was_written_ ? std::nullopt : digest;
}

void ServerPush::Start() {
  thread_ = std::thread([this] { RunThread(); });
}

void ServerPush::RunThread() {
  absl::StatusOr<Committed> result = Push();
  if (staged_.has_value()) staged_->Drop();
  gate_.FinishReading();
  DropSlices();
  if (!result.ok() && !part_.has_value()) result = DropStep(result.status());
  // To compare checksums it may have staged something once more.
  if (staged_.has_value()) staged_->Drop();
  sender_.DropConnections();
  {
    absl::MutexLock lock(&mu_);
    if (result.ok()) {
      run_->OnCommit(begun_epoch_, result->version, std::move(result->plan));
      result_ = std::move(result->version);
    } else {
      result_ = AnnotateLostMemory(result.status());
    }
    wait_.WakeAll();
  }
  if (part_.has_value()) part_->on_end();
}

absl::StatusOr<ServerPush::Committed> ServerPush::Push() {
  Backoff backoff;
  while (true) {
    absl::StatusOr<Committed> committed = Attempt();
    if (committed.ok() || !MayRetry(committed.status())) return committed;
    const absl::Duration delay = backoff.Next(committed.status());
    if (After(SteadyNow(), delay) >= deadline_) {
      return MakeError(
          absl::StatusCode::kDeadlineExceeded, GetErrorReason(committed.status()),
          absl::StrCat(Name(), " timed out; last error: ", committed.status().message()));
    }
    cut_off_clock_.SetCutOff(!ShowsServer(committed.status()));
    // If the trainer still waits, it is held until the bytes to resend are known, unless the pinned
    // memory holds all bytes.
    if (!staged_.has_value() || !staged_->Holds(AllChunks())) (void)gate_.BeginReading();
    if (!interrupt_.Sleep(delay)) return absl::CancelledError("interrupted");
  }
}

// The slot of a part of a push to a group, until it has sent its last chunk: then it waits
// for the other parts, some of which may still have to send.
class ServerPush::SendSlot {
 public:
  explicit SendSlot(ServerPush* push) {
    if (!push->part_.has_value()) return;
    const CutOffClock::Pause pause(push->cut_off_clock_);
    SendSlots* const slots = push->part_->slots;
    if (slots->Acquire(push->part_->position, push->deadline_, &push->interrupt_)) {
      slots_ = slots;
    } else if (push->interrupt_.fired()) {
      status_ = absl::CancelledError("interrupted");
    } else {
      status_ = absl::DeadlineExceededError(
          absl::StrCat(push->Name(), " timed out before it got a slot to send"));
    }
  }
  ~SendSlot() { End(); }
  SendSlot(const SendSlot&) = delete;
  SendSlot& operator=(const SendSlot&) = delete;

  const absl::Status& status() const { return status_; }
  void End() {
    if (slots_ != nullptr) std::exchange(slots_, nullptr)->Release();
  }

 private:
  SendSlots* slots_ = nullptr;  // Null: it has ended, or there are none.
  absl::Status status_;
};

absl::StatusOr<ServerPush::Committed> ServerPush::Attempt() {
  EMA_RETURN_IF_ERROR(run_->WaitReady(deadline_, &interrupt_));
  EMA_RETURN_IF_ERROR(ChooseBytes());
  if (has_begun_) {
    EMA_ASSIGN_OR_RETURN(std::optional<Committed> committed, QueryMissingChunks());
    if (committed.has_value()) return *std::move(committed);
  }
  EMA_RETURN_IF_ERROR(Stage());
  SendSlot slot(this);
  EMA_RETURN_IF_ERROR(slot.status());
  absl::StatusOr<Committed> committed = Send(slot);
  if (was_written_) {
    return MakeError(
        absl::StatusCode::kDataLoss, ErrorReason::kDigestMismatch,
        absl::StrCat(
            Name(),
            ": the weights were written while they were being sent; the step is abandoned"));
  }
  // A stream that has lacked bytes says only that it was cancelled.
  if (!committed.ok()) EMA_RETURN_IF_ERROR(StagingStatus());
  return committed;
}

absl::Status ServerPush::PrepareStaging() {
  if (gpus_.empty() || staged_.has_value() || run_->chunks().chunk_count() == 0) {
    return absl::OkStatus();
  }
  const CutOffClock::Pause pause(cut_off_clock_);
  const auto any = [](Gpu* gpu) { return gpu != nullptr; };
  EMA_RETURN_IF_ERROR(run_->AllocateRing(**std::find_if(gpus_.begin(), gpus_.end(), any)));
  staged_.emplace(&run_->layout(), &run_->chunks(), shards_, gpus_, &run_->ring(), &gate_,
                  options_.strides, deadline_, &interrupt_);
  return absl::OkStatus();
}

absl::Status ServerPush::Stage() {
  if (!staged_.has_value()) return absl::OkStatus();
  const CutOffClock::Pause pause(cut_off_clock_);
  // Chunks that are not staged yet have to be read.
  if (!staged_->Holds(chunks_to_send_)) (void)gate_.BeginReading();
  staged_->Stage(chunks_to_send_).IgnoreError();
  return StagingStatus();
}

absl::Status ServerPush::StagingStatus() const {
  if (!staged_.has_value()) return absl::OkStatus();
  return WithPrefix(staged_->status(), absl::StrCat(Name(), ": "));
}

absl::Status ServerPush::AnnotateLostMemory(const absl::Status& error) const {
  const int64_t lost_bytes = run_->ring().lost_bytes();
  if (lost_bytes == 0 || error.ok()) return error;
  return MakeError(
      error.code(), GetErrorReason(error),
      absl::StrCat(error.message(), "; copies from the GPU have not ended: ", lost_bytes,
                   " bytes of pinned memory are not freed until they end"));
}

void ServerPush::MakeStreamsWait(absl::Span<const GpuStream> streams) {
  streams_wait_ = true;
  // What has ended copies nothing, unless the GPU hangs.
  if (gpus_.empty() || (done() && run_->ring().lost_bytes() == 0)) return;
  const auto lead = [this](const GpuStream& stream) {
    const absl::StatusOr<Gpu*> gpu = run_->ring().Open(stream.device);
    // Where the stream cannot wait, the trainer does.
    if (gpu.ok() && !(*gpu)->MakeWait(stream.handle).ok()) (*gpu)->AwaitIdle(deadline_, interrupt_);
  };
  const std::vector<GpuStream>& started_with = options_.gpu_weights.streams;
  for (const GpuStream& stream : started_with) lead(stream);
  for (const GpuStream& stream : streams) {
    if (std::find(started_with.begin(), started_with.end(), stream) == started_with.end()) {
      lead(stream);
    }
  }
}

bool ServerPush::HasFrozen() const {
  const RankLayout& layout = run_->layout();
  return std::none_of(
      layout.frozen_shards().begin(), layout.frozen_shards().end(), [&](const Shard& shard) {
        return shards_[&shard - layout.shards().data()].empty() && shard.element_count() > 0;
      });
}

absl::Status ServerPush::ChooseBytes() {
  const int64_t round = part_.has_value() ? part_->round->get() : 0;
  if (has_begun_ && begun_epoch_ == run_->run_epoch() && begun_round_ == round) {
    return absl::OkStatus();
  }
  const RankLayout& layout = run_->layout();
  const bool omits_frozen = !options_.frozen_changed && run_->may_omit_frozen();
  omits_frozen_ = omits_frozen;
  if (!omits_frozen && !HasFrozen()) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, ErrorReason::kPlanChanged,
        absl::StrCat(Name(), ": the server needs the frozen tensors, but they were not given"));
  }
  total_bytes_ = omits_frozen ? layout.trained_bytes() : layout.total_bytes();
  EMA_RETURN_IF_ERROR(PrepareStaging());
  writer_.emplace(&layout, &run_->chunks(), run_->chunks().ChunksBefore(total_bytes_), shards_,
                  &gate_, staged_.has_value() ? &*staged_ : nullptr, options_.strides);
  chunks_to_send_ = AllChunks();
  return absl::OkStatus();
}

absl::StatusOr<std::optional<ServerPush::Committed>> ServerPush::QueryMissingChunks() {
  EMA_ASSIGN_OR_RETURN(PushProgress progress,
                       run_->QueryPush(step_, /*abandon_if_unfinished=*/false, deadline_,
                                       &interrupt_, /*retry=*/true));
  if (progress.state == PushProgress::State::kCommitted) {
    EMA_RETURN_IF_ERROR(CheckSameContent(progress));
    return TakeCommitted(progress);
  }
  if (progress.state == PushProgress::State::kOpen) {
    chunks_to_send_ = run_->chunks().ChunksIn(progress.missing);
    std::erase_if(chunks_to_send_, [all = run_->chunks().ChunksBefore(total_bytes_)](
                                       int64_t chunk) { return chunk >= all; });
  } else {
    chunks_to_send_ = AllChunks();
  }
  // A header and a commit alone attach this rank again to a step that has all its bytes. Nothing is
  // read for that, so it is right after the release, too.
  const bool is_staged = staged_.has_value() && staged_->Holds(chunks_to_send_);
  if (!chunks_to_send_.empty() && !is_staged && !gate_.BeginReading()) {
    return MakeError(absl::StatusCode::kAborted, ErrorReason::kStepAbandoned,
                     absl::StrCat(Name(),
                                  ": the connection broke before all bytes had arrived, "
                                  "and the weights had been released"));
  }
  return std::optional<Committed>();
}

absl::StatusOr<ServerPush::Committed> ServerPush::Send(SendSlot& slot) {
  const PushMessages messages = {.begin =
                                     [this](Lane lane, const std::string& why_no_better) {
                                       return BeginStream(lane, why_no_better);
                                     },
                                 .chunks = chunks_to_send_,
                                 .plan = &run_->chunks(),
                                 .writer = &*writer_,
                                 .digest =
                                     [&] {
                                       const std::optional<uint32_t> digest = CheckedDigest();
                                       slot.End();
                                       return digest;
                                     },
                                 .gate = &gate_,
                                 .sent_bytes = &sent_bytes_,
                                 .deadline = deadline_,
                                 .interrupt = &interrupt_};
  EMA_ASSIGN_OR_RETURN(const v1::PushResponse response,
                       sender_.Send(messages, staged_.has_value() ? &*staged_ : nullptr,
                                    /*is_first_try=*/!has_begun_));
  return FromResponse(response);
}

v1::PushHeader ServerPush::BeginStream(Lane lane, const std::string& why_no_better) {
  has_begun_ = true;
  begun_epoch_ = run_->run_epoch();
  cut_off_clock_.SetCutOff(false);
  stream_count_.fetch_add(1, std::memory_order_relaxed);
  {
    absl::MutexLock lock(&mu_);
    lane_ = lane;
    lane_reason_ = why_no_better;
  }
  v1::PushHeader header;
  header.set_model(run_->model());
  header.set_run_epoch(begun_epoch_);
  header.set_rank(run_->rank());
  header.set_layout_digest(run_->layout().digest());
  header.set_step(step_);
  ToProto(time_, header.mutable_time());
  // The newest one: joining again, before this push began, may have given it. A server that was
  // restarted has a plan of its own.
  header.set_plan_revision(has_rejoined_ ? 0 : run_->plan_revision());
  header.set_omits_frozen(omits_frozen_);
  header.set_stream_group(NextStreamGroup());
  header.set_stream_count(1);
  if (part_.has_value()) {
    begun_round_ = part_->round->get();
    header.set_round(begun_round_);
    header.set_incarnation(part_->round->incarnation());
  }
  if (!run_->latest().has_value()) header.set_imported_updates(run_->imported_updates());
  return header;
}

absl::StatusOr<ServerPush::Committed> ServerPush::FromResponse(const v1::PushResponse& response) {
  if (response.has_timing()) {
    const v1::PushTiming& timing = response.timing();
    absl::MutexLock lock(&mu_);
    server_time_ = {absl::Seconds(timing.receive_seconds()), absl::Seconds(timing.fold_seconds()),
                    absl::Seconds(timing.wait_seconds()), absl::Seconds(timing.commit_seconds())};
  }
  run_->NoteRound(response.round());
  EMA_ASSIGN_OR_RETURN(RunPlan plan, FromProto(response.plan(), run_->plan()));
  return Committed{FromProto(response.version()), std::move(plan)};
}

bool ServerPush::MayRetry(const absl::Status& error) {
  const int64_t round = GetGroupHint(error).round;
  run_->NoteRound(round);
  if (interrupt_.fired()) return false;
  if (IsRetryable(error)) return true;
  if (error.code() == absl::StatusCode::kDeadlineExceeded) return false;
  switch (GetErrorReason(error)) {
    case ErrorReason::kRunIncomplete:
      run_->MarkNotReady();
      return true;
    case ErrorReason::kFenced:
      // A restarted server that does not know the run returns this, too. Rejoining shows which.
      if (!run_->rejoins() || std::exchange(has_rejoined_, true)) return false;
      run_->MarkNotReady();
      return true;
    case ErrorReason::kPlanChanged:
    case ErrorReason::kPlanMismatch:
      // Whether this step is due is for the trainer to say, by the plan that joining again gives.
      run_->MarkNotReady();
      return false;
    case ErrorReason::kStaleRound:
      // What was sent in the round that has ended is void.
      if (!part_.has_value() || round <= begun_round_) return false;
      part_->round->Note(round);
      break;
    case ErrorReason::kStalled:  // Also where a server with many slow peers gives our place away.
      return true;
    case ErrorReason::kChunkCorrupt:
    case ErrorReason::kPushIncomplete:
      break;
    case ErrorReason::kUnspecified:
      // The server always gives a reason: gRPC has ended the stream.
      if (error.code() != absl::StatusCode::kInternal &&
          error.code() != absl::StatusCode::kUnknown &&
          error.code() != absl::StatusCode::kCancelled) {
        return false;
      }
      break;
    default:
      return false;
  }
  return ++unexpected_failure_count_ <= kMaxOddFailures;
}

bool ServerPush::HasSlices() const {
  return gate_.HasSlices() || (staged_.has_value() && staged_->ring().has_lent());
}

void ServerPush::DropSlices() {
  const SteadyTime wait_end = After(SteadyNow(), kDropSlicesGrace);
  while (HasSlices()) {
    if (SteadyNow() >= wait_end) sender_.BreakConnections();
    // gRPC works in the threads that wait for it only.
    void* tag = nullptr;
    bool ok = false;
    queue_.AsyncNext(&tag, &ok, ToGrpc(After(SteadyNow(), kSlicePollInterval)));
  }
}

absl::StatusOr<ServerPush::Committed> ServerPush::DropStep(const absl::Status& error) {
  EMA_ASSIGN_OR_RETURN(PushProgress progress,
                       client_internal::DropStep(*run_, {.step = step_,
                                                         .error = error,
                                                         .has_begun = has_begun_,
                                                         .is_abandoned = interrupt_.fired(),
                                                         .name = Name()}));
  EMA_RETURN_IF_ERROR(CheckSameContent(progress));
  return TakeCommitted(progress);
}

absl::Status ServerPush::CheckSameContent(const PushProgress& progress) {
  // With frozen tensors or without them it is another digest.
  const bool has_frozen = run_->layout().trained_bytes() != run_->layout().total_bytes();
  if (!progress.digest.has_value() || has_frozen || !writer_.has_value()) return absl::OkStatus();
  const std::optional<uint32_t> digest = writer_->Digest();
  if (!digest.has_value() || *digest == *progress.digest) return absl::OkStatus();
  return MakeError(absl::StatusCode::kAborted, ErrorReason::kStaleStep,
                   absl::StrCat(Name(), ": the step is committed already, with other content"));
}

ServerPush::Committed ServerPush::TakeCommitted(PushProgress& progress) {
  return {*std::move(progress.version), std::move(progress.plan)};
}

std::string ServerPush::Name() const {
  return absl::StrCat("model \"", run_->model(), "\": push of step ", step_, " by rank ",
                      run_->rank());
}

bool ServerPush::IsDisconnected() const { return cut_off_clock_.cut_off_time() >= kCutOffGrace; }

bool ServerPush::AwaitDone(absl::Duration max_wait) const {
  absl::MutexLock lock(&mu_);
  const auto has_result = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return result_.has_value(); };
  return wait_.AwaitUntil(mu_, After(SteadyNow(), max_wait), has_result);
}

bool ServerPush::ServerResponds(SteadyTime deadline, Interrupt* interrupt) {
  const absl::StatusOr<PushProgress> progress =
      run_->QueryPush(step_, /*abandon_if_unfinished=*/false, deadline, interrupt, /*retry=*/false);
  return progress.ok() || GetErrorReason(progress.status()) != ErrorReason::kUnspecified;
}

int64_t ServerPush::progress_count() const {
  return sent_bytes_.load(std::memory_order_relaxed) +
         stream_count_.load(std::memory_order_relaxed) + gate_.left_slice_count();
}

bool ServerPush::AwaitWhileReachable(absl::Duration max_wait,
                                     absl::FunctionRef<bool(absl::Duration)> await) {
  Interrupt interrupt(&run_->client().options().is_interrupted);
  const PushHealth health = {
      .progress_count = [this] { return progress_count(); },
      .is_cut_off = [this] { return IsDisconnected(); },
      .server_responds = [this](SteadyTime deadline,
                                Interrupt* asker) { return ServerResponds(deadline, asker); }};
  return client_internal::AwaitWhileReachable(max_wait, health, &interrupt, await);
}

void ServerPush::ReleaseAndAbandon() {
  gate_.ForceRelease();
  interrupt_.Fire();
}

bool ServerPush::WaitReleased(absl::Duration max_wait, absl::Span<const GpuStream> streams) {
  if (AwaitWhileReachable(max_wait,
                          [this](absl::Duration most) { return gate_.TryRelease(most); })) {
    MakeStreamsWait(streams);
    return true;
  }
  ReleaseAndAbandon();
  gate_.AwaitNoReader();
  MakeStreamsWait(streams);
  AwaitDone(kAbandonGrace);
  return false;
}

absl::StatusOr<Version> ServerPush::Wait() {
  Interrupt interrupt(&run_->client().options().is_interrupted);
  while (!AwaitDone(Interrupt::kPollInterval)) {
    if (interrupt.fired()) return absl::CancelledError("interrupted");
  }
  absl::MutexLock lock(&mu_);
  return *result_;
}

bool ServerPush::WaitDone(absl::Duration max_wait) {
  return AwaitWhileReachable(max_wait, [this](absl::Duration most) { return AwaitDone(most); });
}

bool ServerPush::done() const { return AwaitDone(absl::ZeroDuration()); }

bool ServerPush::Abandon() {
  gate_.ForceRelease();
  if (!done()) interrupt_.Fire();
  if (!AwaitDone(gpus_.empty() ? absl::InfiniteDuration() : kHangLimit)) return false;
  if (!streams_wait_) MakeStreamsWait({});
  return true;
}

PendingPush::Stats ServerPush::stats() const {
  const SteadyTime left = gate_.left_time();
  absl::MutexLock lock(&mu_);
  return {.total_bytes = total_bytes_,
          .sent_bytes = sent_bytes_.load(std::memory_order_relaxed),
          .stream_count = stream_count_.load(std::memory_order_relaxed),
          .connection_count = sender_.connection_count(),
          .send_time = absl::FromChrono(std::min(left, SteadyNow()) - start_),
          .lane = lane_,
          .lane_reason = lane_reason_,
          .server_time = server_time_};
}

}  // namespace ema::client_internal
