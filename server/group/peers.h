// SPDX-License-Identifier: Apache-2.0
//
// Calls to other members of the group, and the thread on which the group's work runs.
#ifndef EMA_SERVER_GROUP_PEERS_H_
#define EMA_SERVER_GROUP_PEERS_H_

#include <grpcpp/alarm.h>
#include <grpcpp/completion_queue.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ema/v1/group.pb.h"
#include "server/base/steady_wait.h"

namespace ema::group {

// One thread that runs posted work, timers, and the results of calls, one after another. So state
// that only they use needs no lock. None of them may block. The public methods may be called from
// any thread, this one included.
class Peers {
 public:
  struct Options {
    // PEM files. With a certificate, calls use TLS, and present it. The CA must have signed the
    // certificates of all members; empty: the system's CAs.
    std::string ca_file;
    std::string certificate_file;
    std::string key_file;
    // A file with a token of the role "server"; empty: calls have no token.
    std::string token_file;
  };

  // INVALID_ARGUMENT: a file cannot be read. Files are read again for each new connection.
  static absl::StatusOr<std::unique_ptr<Peers>> Start(Options options);
  // As Stop().
  ~Peers();

  // Runs `work` on the thread, in the order of the calls. False: it is discarded, after Stop().
  bool Post(std::function<void()> work) ABSL_LOCKS_EXCLUDED(mu_);
  // Blocks until all work that was posted before has run. Not on the thread.
  void AwaitPosted() ABSL_LOCKS_EXCLUDED(mu_);
  // Stop() discards work whose time has not come.
  void PostAfter(absl::Duration delay, std::function<void()> work) ABSL_LOCKS_EXCLUDED(mu_);

  // Each call runs `on_result` on the thread, once, unless it is made after Stop(). Errors of the
  // called server have their ErrorReason. Other errors: DEADLINE_EXCEEDED, GROUP_DEGRADED: no
  // answer within `timeout`. UNAVAILABLE, GROUP_DEGRADED: no connection, or the called server is
  // stopping; the call fails at once, and a later one connects again. FAILED_PRECONDITION: a file
  // of the options cannot be read. CANCELLED: Stop().
  template <typename Response>
  using OnResult = std::function<void(absl::StatusOr<Response>)>;
  void ReservePartition(const std::string& address, const v1::ReservePartitionRequest& request,
                        absl::Duration timeout, OnResult<v1::ReservePartitionResponse> on_result);
  void ProposeTracks(const std::string& address, const v1::ProposeTracksRequest& request,
                     absl::Duration timeout, OnResult<v1::ProposeTracksResponse> on_result);
  void Vote(const std::string& address, const v1::VoteRequest& request, absl::Duration timeout,
            OnResult<v1::GroupState> on_result);
  void Sync(const std::string& address, const v1::SyncRequest& request, absl::Duration timeout,
            OnResult<v1::GroupState> on_result);
  void PublishState(const std::string& address, const v1::PublishStateRequest& request,
                    absl::Duration timeout, OnResult<v1::PublishStateResponse> on_result);
  void SavePart(const std::string& address, const v1::SavePartRequest& request,
                absl::Duration timeout, OnResult<v1::SavePartResponse> on_result);
  void WriteCopy(const std::string& address, const v1::WriteCopyRequest& request,
                 absl::Duration timeout, OnResult<v1::WriteCopyResponse> on_result);
  void FetchCopy(const std::string& address, const v1::FetchCopyRequest& request,
                 absl::Duration timeout, OnResult<v1::FetchCopyResponse> on_result);
  void ReadCopy(const std::string& address, const v1::ReadCopyRequest& request,
                absl::Duration timeout, OnResult<v1::ReadCopyResponse> on_result);
  void GetPartStatistics(const std::string& address, const v1::GetPartStatisticsRequest& request,
                         absl::Duration timeout, OnResult<v1::GetPartStatisticsResponse> on_result);
  void SynthesizePart(const std::string& address, const v1::SynthesizePartRequest& request,
                      absl::Duration timeout, OnResult<v1::SynthesizePartResponse> on_result);
  void SaveNow(const std::string& address, const v1::SaveNowRequest& request,
               absl::Duration timeout, OnResult<v1::SaveNowResponse> on_result);
  void DescribeMember(const std::string& address, const v1::DescribeMemberRequest& request,
                      absl::Duration timeout, OnResult<v1::DescribeMemberResponse> on_result);

  // Runs the work that has been posted, cancels all calls, runs their `on_result`, and ends the
  // thread. To be called by the owner, on another thread. Calling it again does nothing.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  using Timers = std::multimap<SteadyTime, std::function<void()>>;
  struct Connection;
  struct Call;

  explicit Peers(Options options);

  // `kMethod`: the method of the stub that prepares the call.
  template <auto kMethod, typename Request, typename Response>
  void StartCall(const char* name, const std::string& address, const Request& request,
                 absl::Duration timeout, OnResult<Response> on_result);

  // On the thread.
  void Run();
  void RunPosted() ABSL_LOCKS_EXCLUDED(mu_);
  void RunDueTimers();
  // False: work has been posted, so the thread continues.
  bool TryClose() ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<std::shared_ptr<Connection>> ConnectionTo(const std::string& address);
  void AddCall(std::unique_ptr<Call> call, absl::Duration timeout);
  // Reports `status` now, although gRPC may need the call for longer.
  void Cancel(Call& call, const absl::Status& status);
  void EndCall(std::unique_ptr<Call> call);
  static absl::Status ResultOf(const Call& call);

  const Options options_;
  grpc::CompletionQueue queue_;

  // Only on the thread.
  std::map<std::string, std::shared_ptr<Connection>> connections_;  // By address.
  std::map<void*, std::unique_ptr<Call>> calls_;                    // By their tag in the queue.
  Timers timers_;
  bool is_stopping_ = false;

  absl::Mutex mu_;
  // Work to run. While there is any, the alarm's event is in the queue.
  std::vector<std::function<void()>> posted_ ABSL_GUARDED_BY(mu_);
  grpc::Alarm posted_alarm_ ABSL_GUARDED_BY(mu_);
  bool is_closed_ ABSL_GUARDED_BY(mu_) = false;  // No work is accepted any more.

  std::thread thread_;
};

}  // namespace ema::group

#endif  // EMA_SERVER_GROUP_PEERS_H_
