// SPDX-License-Identifier: Apache-2.0
//
// A random schedule of a group's commits: the partitions' and homes' state machines, a registry, a
// network, trainers and a reader, of which a seed decides what happens next.
#ifndef EMA_TESTS_GROUP_GROUP_SIMULATION_H_
#define EMA_TESTS_GROUP_GROUP_SIMULATION_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ema/version_id.h"
#include "server/base/steady_wait.h"
#include "server/group/participant.h"
#include "server/group/rounds.h"

namespace ema::group {

// A fault in the protocol itself, which the simulation must find.
enum class Mutation {
  kNone,
  kPreparedDropsStep,  // A prepared partition drops its session by itself.
  kNoRounds,           // Messages of all rounds are taken for those of the current one.
  kNoNewIncarnation,   // A process that has lost its memory does not begin a new incarnation.
  kRejoinKeepsRound,   // A rank that has restarted pushes its step again in the same round.
};

// Messages are lost, repeated, late and reordered. Processes crash, lose their memory and start
// again with a new boot, while the old process may live on (a zombie), though not those of all
// partitions at once. Processes lose the registry, pushes are refused, abandoned and rejected by
// all, ranks and trainers restart.
//
// Checked after each event: a version has the bytes of one push on all partitions, the order of a
// partition's versions has no gap, what is decided is held by every partition of that incarnation
// and dropped by none, a reader gets the bytes of one push, a version that is decided after one of
// a later incarnation is never on all partitions. At the end the faults stop, and then two steps
// must be committed.
class GroupSimulation {
 public:
  struct Counts {
    int64_t events = 0;  // While there are faults.
    int64_t commits = 0, aborts = 0, crashes = 0, zombies = 0, publications = 0, reads = 0;
    Counts& operator+=(const Counts& other);
  };

  GroupSimulation(uint64_t seed, Mutation mutation, bool has_trace);

  // Empty: nothing was violated.
  const std::string& Run();
  const Counts& counts() const { return counts_; }
  // One line for each event.
  const std::string& trace() const { return trace_; }

 private:
  static constexpr int kMaxPartitions = 8;

  struct Version {
    VersionId id;
    int64_t push = 0;
  };
  struct Process {
    size_t index = 0;
    int partition = 0;
    std::string boot;
    bool is_cut_off = false;  // From the registry.
    SteadyTime registry_reached;
    std::optional<Participant> participant;
    std::optional<Rounds> rounds;     // Of the home.
    int64_t run_epoch = 0;            // The last that the home has given.
    int64_t push = 0;                 // What the session is made of.
    int64_t skipped = 0;              // Tensors of the session.
    size_t state = 0;                 // Of the home, in states_.
    std::array<Version, 4> versions;  // The newest one first.

    int64_t incarnation() const { return participant->id().incarnation; }
  };
  // One attempt to push a step.
  struct Push {
    Participant::Header header;
    int64_t launch = 0;
  };
  // Knows what the replies have said.
  struct Trainer {
    int64_t launch = 0;
    int64_t incarnation = 0;  // 0: must open a run.
    int64_t round = 0;
    int64_t run_epoch = 0;
    int64_t step = 0;
    int64_t push = 0;        // The last one.
    int64_t push_round = 0;  // Its round.
  };
  struct Message {
    // kRegistry: the receiver reads the registry, which has changed, or has been FENCED.
    enum class Kind { kPush, kVote, kRefuse, kSync, kState, kRegistry } kind = Kind::kPush;
    int to = 0;       // Partition.
    size_t from = 0;  // Process.
    int64_t incarnation = 0;
    int64_t round = 0;
    int64_t value = 0;    // Push, its step, bytes, or index in states_.
    int64_t epoch = 0;    // Of kVote.
    int64_t skipped = 0;  // Of kVote.
  };
  struct Decision {
    VersionId id;
    int64_t round = 0;
    int64_t push = 0;
    bool is_late = false;    // A version of a later incarnation was decided before.
    uint32_t published = 0;  // By partition, a bit each.
  };

  // A number in [0, n).
  int64_t Below(int64_t n);
  bool Happens(int64_t percent) { return Below(100) < percent; }
  template <typename... Args>
  void Trace(const Args&... args);
  void Violate(std::string what);

  void Step();
  void Settle();

  // A process that has, or had, the partition's address; null: there is none.
  Process* FindProcess(int partition);
  void Start(int partition);
  void Enter(Process& process);
  void ReadRegistry(Process& process);
  void Crash(int partition);
  void SaveCheckpoint();

  void Send(const Message& message);
  void Deliver(const Message& message);
  void DeliverPush(Process& to, int64_t push);
  void SendVote(Process& process);
  void DeliverVote(Process& home, const Message& message);
  void SendSync(Process& process);
  void DeliverSync(Process& home, const Message& message);
  // `round`, `rejected_pushes`: before the message.
  void Reply(Process& home, const Message& message, const Rounds::Result& result, int64_t round,
             bool rejected_pushes);
  void NoteRoundEnd(Process& home, int64_t round, bool rejected_pushes);
  void CheckDecision(const Process& home, const GroupCommit& commit);
  void ApplyState(Process& process, const GroupState& state);
  void Publish(Process& process);

  void Act(Process& process);
  void Complete(Process& process);
  void Refuse(Process& process);
  void DropPush(Process& process);
  void ActAsHome(Process& home);

  void ActAsTrainer(size_t index);
  void OpenRun(Trainer& trainer, Process& home);
  void BeginPush(Trainer& trainer);
  void SendPush(const Trainer& trainer);
  // The trainer of `push` gets a reply with the round.
  void Learn(int64_t push, const Process& process);
  void Read();

  const Mutation mutation_;
  uint64_t random_;
  bool has_trace_;
  std::string trace_;
  std::string violation_;
  Counts counts_;
  bool has_faults_ = true;

  int partition_count_;
  SteadyTime now_{std::chrono::hours(1)};
  // The registry's record.
  int64_t incarnation_ = 1;
  std::vector<Rounds::Member> members_;
  Version base_;

  std::deque<Process> processes_;
  std::array<int, kMaxPartitions> current_{};  // Index of the process; -1: none.
  std::array<int, kMaxPartitions> zombie_{};
  std::vector<Message> messages_;
  std::vector<GroupState> states_;
  std::vector<Push> pushes_;
  std::vector<Decision> decisions_;
  std::array<Trainer, 2> trainers_;  // The newest launch, and one that it has replaced.
  int64_t launch_count_ = 0;

  Version read_;
  int read_count_ = 0;  // Partitions of read_.
};

}  // namespace ema::group

#endif  // EMA_TESTS_GROUP_GROUP_SIMULATION_H_
