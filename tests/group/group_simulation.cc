// SPDX-License-Identifier: Apache-2.0
#include "tests/group/group_simulation.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace ema::group {
namespace {

using std::chrono::milliseconds;

// Commits are fewer with many partitions, as each needs more messages.
constexpr std::array<int, 16> kPartitionCounts = {1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 5, 6, 7, 8};

}  // namespace

GroupSimulation::Counts& GroupSimulation::Counts::operator+=(const Counts& other) {
  events += other.events;
  commits += other.commits;
  aborts += other.aborts;
  crashes += other.crashes;
  zombies += other.zombies;
  publications += other.publications;
  reads += other.reads;
  return *this;
}

GroupSimulation::GroupSimulation(uint64_t seed, Mutation mutation, bool has_trace)
    : mutation_(mutation), random_(seed), has_trace_(has_trace) {
  partition_count_ = kPartitionCounts[static_cast<size_t>(Below(kPartitionCounts.size()))];
  current_.fill(-1);
  zombie_.fill(-1);
  members_.resize(static_cast<size_t>(partition_count_));
  pushes_.emplace_back();  // Of version 0.
  trainers_[0].launch = ++launch_count_;
}

int64_t GroupSimulation::Below(int64_t n) {
  // SplitMix64.
  uint64_t z = (random_ += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  z ^= z >> 31;
  return static_cast<int64_t>((z >> 32) * static_cast<uint64_t>(n) >> 32);
}

template <typename... Args>
void GroupSimulation::Trace(const Args&... args) {
  if (has_trace_) absl::StrAppend(&trace_, args..., "\n");
}

void GroupSimulation::Violate(std::string what) {
  Trace("VIOLATION: ", what);
  if (violation_.empty()) violation_ = std::move(what);
}

const std::string& GroupSimulation::Run() {
  for (int p = 0; p < partition_count_; ++p) members_[static_cast<size_t>(p)] = {"p", "0"};
  for (int p = 0; p < partition_count_; ++p) Start(p);
  const int64_t event_count = 100 + 90 * partition_count_;
  while (counts_.events < event_count && violation_.empty()) Step();
  if (violation_.empty()) Settle();
  return violation_;
}

void GroupSimulation::Step() {
  ++counts_.events;
  now_ += milliseconds(Below(20));
  const int64_t dice = Below(100);
  const int partition = static_cast<int>(Below(partition_count_));
  Process* const process = FindProcess(partition);
  if (dice < 56 && !messages_.empty()) {
    // Most are delivered soon, the others at any later time.
    const auto count = static_cast<int64_t>(messages_.size());
    const auto i = static_cast<size_t>(
        Happens(60) ? count - 1 - Below(std::min<int64_t>(count, 2 * partition_count_))
                    : Below(count));
    const Message message = messages_[i];
    const bool is_lost = Happens(4);
    if (is_lost || !Happens(8)) {
      messages_[i] = messages_.back();
      messages_.pop_back();
    }
    if (!is_lost) Deliver(message);
  } else if (dice < 80) {
    if (current_[static_cast<size_t>(partition)] < 0) {
      Start(partition);
    } else if (process != nullptr) {
      Act(*process);
    }
  } else if (dice < 88) {
    ActAsTrainer(Happens(85) ? 0 : 1);
  } else if (dice < 92) {
    if (process == nullptr) return;
    if (Happens(30)) process->is_cut_off = false;
    ReadRegistry(*process);
  } else if (dice < 96) {
    Read();
  } else if (Below(partition_count_) > 0) {
    // A step takes more events with more partitions, so faults are fewer.
  } else if (dice < 97) {
    constexpr std::array<int64_t, 8> kSeconds = {1, 1, 8, 12, 12, 31, 31, 660};
    now_ += std::chrono::seconds(kSeconds[static_cast<size_t>(Below(kSeconds.size()))]);
    Trace("time passes");
    if (Process* const home = FindProcess(0); home != nullptr) ActAsHome(*home);
  } else if (dice < 98) {
    Crash(partition);
  } else if (dice < 99 && Happens(50)) {
    if (process != nullptr) process->is_cut_off = true;
  } else if (dice < 99) {
    SaveCheckpoint();
  } else {
    if (Process* const home = FindProcess(0); home != nullptr) ActAsHome(*home);
  }
}

void GroupSimulation::Settle() {
  constexpr int kMaxTurns = 14;
  has_faults_ = false;
  Trace("faults stop");
  zombie_.fill(-1);
  trainers_[1] = {};
  for (int p = 0; p < partition_count_; ++p) {
    if (current_[static_cast<size_t>(p)] < 0) Start(p);
    FindProcess(p)->is_cut_off = false;
  }
  const size_t decision_count = decisions_.size();
  for (int turn = 0; turn < kMaxTurns && violation_.empty(); ++turn) {
    now_ += std::chrono::seconds(8);
    for (int p = 0; p < partition_count_; ++p) {
      Process& process = *FindProcess(p);
      ReadRegistry(process);
      if (process.participant->to_send() != nullptr) SendVote(process);
      SendSync(process);
    }
    Process& home = *FindProcess(0);
    const int64_t round = home.rounds->state().round;
    if (home.rounds->Expire(now_)) {
      NoteRoundEnd(home, round, false);
    }
    Trainer& trainer = trainers_[0];
    if (trainer.incarnation != home.incarnation()) trainer.incarnation = 0;
    if (trainer.incarnation == 0) {
      OpenRun(trainer, home);
    } else {
      trainer.round = home.rounds->state().round;
      if (trainer.round > trainer.push_round) {
        BeginPush(trainer);
      } else {
        SendPush(trainer);
      }
    }
    for (int part = 0; part < 2; ++part) {
      for (size_t i = 0; i < messages_.size() && violation_.empty(); ++i) {
        Deliver(Message(messages_[i]));
        if (i > 10000) Violate("messages without end");
      }
      messages_.clear();
      for (int p = 0; p < partition_count_; ++p) {
        Process& process = *FindProcess(p);
        if (process.participant->phase() == Participant::Phase::kReceiving) Complete(process);
      }
    }
    if (decisions_.size() >= decision_count + 2) return;
  }
  Violate("no commits although the faults have stopped");
}

// --- Processes and the registry ---

GroupSimulation::Process* GroupSimulation::FindProcess(int partition) {
  const auto p = static_cast<size_t>(partition);
  const bool takes_zombie = zombie_[p] >= 0 && (current_[p] < 0 || Happens(30));
  const int index = takes_zombie ? zombie_[p] : current_[p];
  return index < 0 ? nullptr : &processes_[static_cast<size_t>(index)];
}

void GroupSimulation::Start(int partition) {
  const auto p = static_cast<size_t>(partition);
  const bool is_first = processes_.size() < members_.size();
  current_[p] = static_cast<int>(processes_.size());
  Process& process = processes_.emplace_back();
  process.index = processes_.size() - 1;
  process.partition = partition;
  process.boot = is_first ? "0" : absl::StrCat(process.index);
  members_[p].boot = process.boot;
  if (!is_first && mutation_ != Mutation::kNoNewIncarnation) ++incarnation_;
  if (!is_first) {
    for (int other = 0; other < partition_count_; ++other) {
      Send({.kind = Message::Kind::kRegistry, .to = other});
    }
  }
  Trace("start of ", partition, ", process ", process.index, ", incarnation ", incarnation_);
  Enter(process);
}

void GroupSimulation::Enter(Process& process) {
  Trace("process ", process.index, " (partition ", process.partition, ") enters incarnation ",
        incarnation_, " with version ", base_.id.version);
  process.participant.emplace(PartitionId{incarnation_, process.partition, process.boot},
                              base_.id.version);
  process.versions = {base_};
  process.registry_reached = now_;
  if (process.partition == 0) {
    process.rounds.emplace(
        Rounds::Options{
            .incarnation = incarnation_, .members = members_, .base_version = base_.id.version},
        now_);
    process.run_epoch = incarnation_ << 20;
    process.state = states_.size();
    states_.push_back(process.rounds->state());
  }
  SendSync(process);
}

void GroupSimulation::ReadRegistry(Process& process) {
  if (process.is_cut_off) return;
  process.registry_reached = now_;
  if (process.rounds.has_value()) process.rounds->NoteRegistryReached(now_);
  const auto p = static_cast<size_t>(process.partition);
  if (members_[p].boot != process.boot) {
    Trace("process ", process.index, " has been replaced, and exits");
    zombie_[p] = -1;
  } else if (incarnation_ > process.incarnation()) {
    Enter(process);
  }
}

void GroupSimulation::Crash(int partition) {
  const auto p = static_cast<size_t>(partition);
  if (current_[p] < 0) return;
  ++counts_.crashes;
  const auto zombie_count =
      std::count_if(zombie_.begin(), zombie_.end(), [](int index) { return index >= 0; });
  const bool leaves_zombie = zombie_[p] < 0 && zombie_count + 1 < partition_count_ && Happens(40);
  Trace("crash of process ", current_[p], leaves_zombie ? ", which lives on" : "");
  if (leaves_zombie) {
    ++counts_.zombies;
    zombie_[p] = current_[p];
    processes_[static_cast<size_t>(current_[p])].is_cut_off = Happens(70);
  }
  current_[p] = -1;
  if (Happens(50)) Start(partition);
}

void GroupSimulation::SaveCheckpoint() {
  int64_t version = INT64_MAX;
  for (int p = 0; p < partition_count_; ++p) {
    if (current_[static_cast<size_t>(p)] < 0) return;
    const Process& process = processes_[static_cast<size_t>(current_[static_cast<size_t>(p)])];
    if (process.incarnation() != incarnation_) return;
    version = std::min(version, process.participant->version());
  }
  const Process& home = processes_[static_cast<size_t>(current_[0])];
  if (home.is_cut_off) return;
  for (const Version& held : home.versions) {
    if (held.id.version == version) base_ = held;
  }
  Trace("checkpoint of version ", version);
}

// --- Messages ---

void GroupSimulation::Send(const Message& message) { messages_.push_back(message); }

void GroupSimulation::Deliver(const Message& message) {
  Process* const to = FindProcess(message.to);
  if (to == nullptr) return;
  switch (message.kind) {
    case Message::Kind::kPush:
      return DeliverPush(*to, message.value);
    case Message::Kind::kVote:
    case Message::Kind::kRefuse:
      return DeliverVote(*to, message);
    case Message::Kind::kSync:
      return DeliverSync(*to, message);
    case Message::Kind::kState:
      return ApplyState(*to, states_[static_cast<size_t>(message.value)]);
    case Message::Kind::kRegistry:
      return ReadRegistry(*to);
  }
}

void GroupSimulation::DeliverPush(Process& to, int64_t push) {
  using Answer = Participant::HeaderAnswer;
  Participant::Header header = pushes_[static_cast<size_t>(push)].header;
  if (mutation_ == Mutation::kNoRounds) header.round = to.participant->round();
  const Participant::Phase before = to.participant->phase();
  const Answer answer = to.participant->OnHeader(header);
  Trace("push ", push, " (step ", header.step, ", round ", header.round, ") to process ", to.index,
        ": answer ", static_cast<int>(answer));
  switch (answer) {
    case Answer::kAccept:
      if (before == Participant::Phase::kNone) {
        to.push = push;
      } else if (before == Participant::Phase::kReceiving &&
                 pushes_[static_cast<size_t>(to.push)].header.step != header.step) {
        Refuse(to);
      }
      break;
    case Answer::kStaleRound:
      Learn(push, to);
      break;
    case Answer::kFenced:
      if (pushes_[static_cast<size_t>(push)].launch == trainers_[0].launch &&
          header.incarnation == trainers_[0].incarnation) {
        trainers_[0].incarnation = 0;
      }
      break;
    case Answer::kPushesRejected:
      break;
    case Answer::kSync:
      SendSync(to);
      break;
    case Answer::kReadRegistry:
      ReadRegistry(to);
      break;
  }
}

void GroupSimulation::SendVote(Process& process) {
  const Vote& vote = *process.participant->to_send();
  Message message{.kind = Message::Kind::kRefuse,
                  .from = process.index,
                  .incarnation = process.incarnation(),
                  .round = vote.round};
  if (vote.step.ok()) {
    message.kind = Message::Kind::kVote;
    message.value = vote.step->step;
    message.epoch = vote.step->run_epoch;
    message.skipped = vote.step->skipped_tensor_count;
  }
  if (process.rounds.has_value()) return DeliverVote(process, message);
  Send(message);
}

void GroupSimulation::DeliverVote(Process& home, const Message& message) {
  const Process& from = processes_[message.from];
  const int64_t round = home.rounds->state().round;
  const bool rejected_pushes = home.rounds->state().rejects_pushes;
  Vote vote{{message.incarnation, from.partition, from.boot}, message.round};
  if (message.kind == Message::Kind::kVote) {
    vote.step = PreparedStep{
        .step = message.value, .run_epoch = message.epoch, .skipped_tensor_count = message.skipped};
  } else {
    vote.step = absl::AbortedError("refused");
  }
  if (mutation_ == Mutation::kNoRounds) vote.round = round;
  Trace("vote of process ", from.index, " for round ", message.round, ", ",
        vote.step.ok() ? "step " : "refused", message.value, ", to home ", home.index);
  Reply(home, message, home.rounds->OnVote(vote, now_, absl::UnixEpoch()), round, rejected_pushes);
}

void GroupSimulation::SendSync(Process& process) {
  const Message message{
      .kind = Message::Kind::kSync,
      .from = process.index,
      .incarnation = process.incarnation(),
      .round = process.participant->round(),
      .value = process.participant->phase() == Participant::Phase::kReceiving ? 1 : 0};
  if (process.rounds.has_value()) return DeliverSync(process, message);
  Send(message);
}

void GroupSimulation::DeliverSync(Process& home, const Message& message) {
  const Process& from = processes_[message.from];
  const int64_t round = home.rounds->state().round;
  const Sync sync{.from = {message.incarnation, from.partition, from.boot},
                  .round = message.round,
                  .received_bytes = message.value};
  Reply(home, message, home.rounds->OnSync(sync, now_), round, false);
}

void GroupSimulation::Reply(Process& home, const Message& message, const Rounds::Result& result,
                            int64_t round, bool rejected_pushes) {
  if (result.round_ended) NoteRoundEnd(home, round, rejected_pushes);
  const int to = processes_[message.from].partition;
  if (result.answer == Rounds::Answer::kFenced) {
    Send({.kind = Message::Kind::kRegistry, .to = to});
    if (message.incarnation > home.incarnation()) ReadRegistry(home);
  } else if (message.from == home.index) {
    ApplyState(home, home.rounds->state());
  } else if (result.answer == Rounds::Answer::kState && !result.round_ended) {
    Send({.kind = Message::Kind::kState, .to = to, .value = static_cast<int64_t>(home.state)});
  }
}

void GroupSimulation::NoteRoundEnd(Process& home, int64_t round, bool rejected_pushes) {
  const GroupState state = home.rounds->state();
  home.state = states_.size();
  states_.push_back(state);
  if (state.last_commit.has_value() && state.last_commit->round == round) {
    if (rejected_pushes) Violate("a commit in a round that rejects pushes");
    CheckDecision(home, *state.last_commit);
  } else if (round > 0) {
    Trace("home ", home.index, " aborts round ", round);
    const bool has_push = std::any_of(pushes_.begin(), pushes_.end(), [&](const Push& push) {
      return push.header.incarnation == state.incarnation && push.header.round == round;
    });
    counts_.aborts += has_faults_ && has_push ? 1 : 0;
  }
  ApplyState(home, state);
  for (int p = 1; p < partition_count_; ++p) {
    Send({.kind = Message::Kind::kState, .to = p, .value = static_cast<int64_t>(home.state)});
  }
}

void GroupSimulation::CheckDecision(const Process& home, const GroupCommit& commit) {
  const VersionId id{commit.version, home.incarnation()};
  Trace("home ", home.index, " commits version ", id.version, " of incarnation ", id.incarnation,
        " in round ", commit.round, ": step ", commit.step.step);
  counts_.commits += has_faults_ ? 1 : 0;
  if (now_ - home.registry_reached > std::chrono::minutes(10)) {
    Violate("a commit without the registry");
  }
  int64_t skipped = 0;
  int holder_count = 0;
  for (const auto& indexes : {current_, zombie_}) {
    for (const int index : indexes) {
      if (index < 0) continue;
      const Process& process = processes_[static_cast<size_t>(index)];
      if (process.incarnation() != id.incarnation) continue;
      skipped += process.skipped;
      ++holder_count;
      const bool is_of_round =
          process.participant->round() == commit.round || mutation_ == Mutation::kNoRounds;
      if (process.participant->phase() != Participant::Phase::kPrepared || !is_of_round ||
          process.push != home.push) {
        Violate(absl::StrCat("push ", home.push, " is decided in round ", commit.round,
                             ", but process ", process.index, " does not hold it"));
      }
    }
  }
  if (holder_count == partition_count_ && skipped != commit.step.skipped_tensor_count) {
    Violate("the record has not all skipped tensors");
  }
  const bool is_late = std::any_of(decisions_.begin(), decisions_.end(), [&](const Decision& d) {
    return d.id.incarnation > id.incarnation;
  });
  decisions_.push_back({id, commit.round, home.push, is_late});
}

void GroupSimulation::ApplyState(Process& process, const GroupState& state) {
  const Participant::Phase phase = process.participant->phase();
  const int64_t round = process.participant->round();
  Participant::Action action;
  if (mutation_ == Mutation::kNoRounds && state.last_commit.has_value() &&
      state.last_commit->version > process.participant->version()) {
    GroupState changed = state;
    changed.last_commit->round = round;
    action = process.participant->OnState(changed);
  } else {
    action = process.participant->OnState(state);
  }
  switch (action.kind) {
    case Participant::Action::Kind::kNothing:
      break;
    case Participant::Action::Kind::kPublish:
      Publish(process);
      break;
    case Participant::Action::Kind::kDrop:
      Trace("process ", process.index, " drops push ", process.push, " of round ", round);
      for (const Decision& decision : decisions_) {
        if (phase == Participant::Phase::kPrepared && decision.round == round &&
            decision.id.incarnation == process.incarnation()) {
          Violate(absl::StrCat("process ", process.index, " drops what was decided"));
        }
      }
      Learn(process.push, process);
      break;
    case Participant::Action::Kind::kReadRegistry:
      ReadRegistry(process);
      break;
    case Participant::Action::Kind::kDiverged:
      Violate(absl::StrCat("process ", process.index, " has missed a version"));
      break;
  }
}

void GroupSimulation::Publish(Process& process) {
  const VersionId id{process.participant->version(), process.incarnation()};
  Trace("process ", process.index, " publishes version ", id.version, " of incarnation ",
        id.incarnation, ": push ", process.push);
  counts_.publications += has_faults_ ? 1 : 0;
  std::move_backward(process.versions.begin(), process.versions.end() - 1, process.versions.end());
  process.versions[0] = {id, process.push};
  const auto decision = std::find_if(decisions_.rbegin(), decisions_.rend(),
                                     [&](const Decision& d) { return d.id == id; });
  if (decision == decisions_.rend()) return Violate("a version is published that was not decided");
  for (const Decision& other : decisions_) {
    if (other.id == id && other.push != process.push) {
      Violate(absl::StrCat("version ", id.version, " is of pushes ", process.push, " and ",
                           other.push));
    }
  }
  decision->published |= 1u << process.partition;
  if (decision->is_late && std::popcount(decision->published) == partition_count_) {
    Violate("a version decided after one of a later incarnation is on all partitions");
  }
  Learn(process.push, process);
}

// --- What processes do by themselves ---

void GroupSimulation::Complete(Process& process) {
  const Participant::Header& header = pushes_[static_cast<size_t>(process.push)].header;
  process.skipped = Happens(20) ? 1 : 0;
  process.participant->EndReceiving(process.participant->round(),
                                    PreparedStep{.step = header.step,
                                                 .run_epoch = header.run_epoch,
                                                 .skipped_tensor_count = process.skipped});
  SendVote(process);
}

void GroupSimulation::Refuse(Process& process) {
  process.participant->EndReceiving(process.participant->round(), absl::AbortedError("refused"));
  SendVote(process);
}

void GroupSimulation::Act(Process& process) {
  switch (process.participant->phase()) {
    case Participant::Phase::kNone:
      return SendSync(process);
    case Participant::Phase::kReceiving:
      if (Happens(85)) return Complete(process);
      return Happens(25) && Below(partition_count_) == 0 ? Refuse(process) : SendSync(process);
    case Participant::Phase::kPrepared:
      if (mutation_ == Mutation::kPreparedDropsStep && Happens(10)) return DropPush(process);
      if (process.participant->EndReceiving(process.participant->round(),
                                            absl::AbortedError("expired"))) {
        Violate("a prepared step was refused");
      }
      return SendVote(process);
    case Participant::Phase::kRefused:
      return SendVote(process);
  }
}

void GroupSimulation::DropPush(Process& process) {
  Trace("process ", process.index, " drops push ", process.push);
  const GroupState state{.incarnation = process.incarnation(),
                         .round = process.participant->round(),
                         .run_epoch = pushes_[static_cast<size_t>(process.push)].header.run_epoch};
  process.participant.emplace(PartitionId(process.participant->id()),
                              process.participant->version());
  process.participant->OnState(state);
}

void GroupSimulation::ActAsHome(Process& home) {
  if (!home.is_cut_off) {
    home.registry_reached = now_;
    home.rounds->NoteRegistryReached(now_);
  }
  Rounds& rounds = *home.rounds;
  const int64_t round = rounds.state().round;
  const int64_t dice = Below(10);
  bool has_ended = false;
  if (rounds.state().rejects_pushes || dice < 6) {
    has_ended = rounds.Expire(now_);
  } else if (dice < 7) {
    has_ended = rounds.RejectPushes(absl::UnavailableError("rejected"), /*until=*/now_);
  } else if (dice < 8) {
    has_ended = rounds.Abort(round, /*step=*/0, absl::AbortedError("abandoned"));
  } else {
    has_ended = rounds.SetTracksRevision(rounds.state().tracks_revision + 1, Happens(50));
  }
  if (has_ended) NoteRoundEnd(home, round, false);
}

// --- Trainers and readers ---

void GroupSimulation::ActAsTrainer(size_t index) {
  Trainer& trainer = trainers_[index];
  Process* const home = FindProcess(0);
  if (trainer.incarnation == 0) {
    if (index == 0 && home != nullptr) OpenRun(trainer, *home);
    return;
  }
  if (trainer.round > trainer.push_round) return BeginPush(trainer);
  const int64_t dice = Below(100);
  if (dice < 40) {
    Send({.kind = Message::Kind::kPush,
          .to = static_cast<int>(Below(partition_count_)),
          .value = trainer.push});
  } else if (home == nullptr || home->incarnation() < trainer.incarnation) {
    return;
  } else if (home->incarnation() > trainer.incarnation) {
    trainer.incarnation = 0;
  } else if (dice < 80 || Below(partition_count_) > 0) {
    trainer.round = home->rounds->state().round;
  } else if (dice < 88) {
    Trace("push ", trainer.push, " is abandoned");
    if (home->rounds->Abort(trainer.push_round, /*step=*/0, absl::AbortedError("abandoned"))) {
      NoteRoundEnd(*home, trainer.push_round, false);
      if (Happens(70)) --trainer.step;
    }
  } else if (index == 0 && dice < 95) {
    OpenRun(trainer, *home);
  } else if (index == 0) {
    trainers_[1] = trainer;
    trainer = {.launch = ++launch_count_};
  }
}

void GroupSimulation::OpenRun(Trainer& trainer, Process& home) {
  Rounds& rounds = *home.rounds;
  const GroupState& state = rounds.state();
  const int64_t round = state.round;
  if (round == 0 || state.rejects_pushes) return;
  const std::string launch_id = absl::StrCat(trainer.launch);
  if (state.launch_id != launch_id) {
    if (rounds.OpenRun(++home.run_epoch, launch_id)) NoteRoundEnd(home, round, false);
  } else if (mutation_ != Mutation::kRejoinKeepsRound) {
    if (rounds.Abort(round, /*step=*/0, absl::AbortedError("rejoined")))
      NoteRoundEnd(home, round, false);
  }
  trainer = {.launch = trainer.launch,
             .incarnation = home.incarnation(),
             .round = state.round,
             .run_epoch = state.run_epoch,
             .step = state.last_commit.has_value() ? state.last_commit->step.step : 0};
  Trace("launch ", trainer.launch, " joins run epoch ", state.run_epoch, " in round ", state.round);
}

void GroupSimulation::BeginPush(Trainer& trainer) {
  trainer.push = static_cast<int64_t>(pushes_.size());
  trainer.push_round = trainer.round;
  pushes_.push_back(
      {{trainer.incarnation, trainer.round, trainer.run_epoch, ++trainer.step}, trainer.launch});
  Trace("push ", trainer.push, " of step ", trainer.step, " begins in round ", trainer.round);
  SendPush(trainer);
}

void GroupSimulation::SendPush(const Trainer& trainer) {
  for (int p = 0; p < partition_count_; ++p) {
    Send({.kind = Message::Kind::kPush, .to = p, .value = trainer.push});
  }
}

void GroupSimulation::Learn(int64_t push, const Process& process) {
  if (has_faults_ && Happens(25)) return;
  for (Trainer& trainer : trainers_) {
    if (trainer.launch == pushes_[static_cast<size_t>(push)].launch &&
        trainer.incarnation == process.incarnation()) {
      trainer.round = std::max(trainer.round, process.participant->round());
    }
  }
}

void GroupSimulation::Read() {
  const Process* const process = FindProcess(read_count_);
  if (process == nullptr) return;
  if (read_count_ == 0) read_ = process->versions[0];
  const auto found = std::find_if(process->versions.begin(), process->versions.end(),
                                  [&](const Version& version) { return version.id == read_.id; });
  if (found == process->versions.end() || read_.id.version == 0) {
    read_count_ = 0;
    return;
  }
  if (found->push != read_.push) {
    Violate(absl::StrCat("a reader gets pushes ", read_.push, " and ", found->push));
  }
  if (++read_count_ == partition_count_) {
    ++counts_.reads;
    read_count_ = 0;
  }
}

}  // namespace ema::group
