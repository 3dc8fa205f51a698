// SPDX-License-Identifier: Apache-2.0
//
// Calls to the Kubernetes API: deadlines, a second attempt, errors, and which leases have expired.
#ifndef EMA_SERVER_REGISTRY_KUBERNETES_CLIENT_H_
#define EMA_SERVER_REGISTRY_KUBERNETES_CLIENT_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/log_event.h"
#include "server/base/steady_wait.h"
#include "server/registry/http_client.h"
#include "server/registry/kubernetes_objects.h"
#include "server/registry/kubernetes_registry.h"
#include "server/registry/lease_observer.h"

namespace ema {

// Errors as Registry. Thread-safe.
class KubernetesClient {
 public:
  // As KubernetesRegistry::Create().
  static absl::StatusOr<std::shared_ptr<KubernetesClient>> Create(KubernetesOptions options);

  // When a call that begins now must end.
  SteadyTime CallDeadline() const { return After(SteadyNow(), options_.call_timeout); }

  // Nullopt: there is no such object.
  absl::StatusOr<std::optional<KubernetesObject>> Get(KubernetesKind kind, std::string_view key,
                                                      SteadyTime deadline);
  // All objects whose keys have the prefix.
  absl::StatusOr<KubernetesList> List(KubernetesKind kind, std::string_view prefix);

  struct Change {
    bool is_made = false;
    // The object after the change. If it was not made: the object as it is; nullopt: none.
    std::optional<KubernetesObject> object;
    // A change that was not made may be there all the same, by an attempt whose answer was lost.
    bool may_be_ours = false;
  };
  // Creates the object if its revision is 0, or replaces the one that has this revision.
  absl::StatusOr<Change> Put(const KubernetesObject& object, SteadyTime deadline);
  // Deletes the object if it has this revision.
  absl::StatusOr<Change> Delete(const KubernetesObject& object, SteadyTime deadline);

  // Begins to watch the objects of a kind from a list on.
  absl::Status OpenWatch(KubernetesKind kind, std::string_view prefix, const KubernetesList& list,
                         HttpStreams& streams);
  HttpClient* http() { return &http_; }

  LeaseObserver& leases() { return leases_; }

  void NoteContact() { last_contact_ = SteadyNow(); }
  SteadyTime last_contact() const { return last_contact_; }
  RegistryHealth health() const ABSL_LOCKS_EXCLUDED(mu_);
  const LogSink& log() const { return options_.log; }

 private:
  struct Answer {
    HttpResponse response;
    bool is_repeated = false;  // An earlier attempt got no answer.
  };

  KubernetesClient(const LibCurl* curl, KubernetesOptions options);

  std::string PathOfAll(KubernetesKind kind) const;
  std::string PathOfOne(const KubernetesObject& object) const;
  // Sends a request, and once more if there is no answer within half of the time: on another
  // connection, perhaps to another API server. `operation` is for the message: "put \"key\"".
  absl::StatusOr<Answer> Call(const std::string& operation, const HttpRequest& request,
                              SteadyTime deadline) ABSL_LOCKS_EXCLUDED(mu_);
  // The change that `answer` reports; reads the object if it was not made.
  absl::StatusOr<Change> Finish(const std::string& operation, const KubernetesObject& object,
                                Answer answer, SteadyTime deadline);
  absl::Status ToStatus(const std::string& operation, const HttpResponse& response) const;
  absl::Status UnexpectedAnswerError(const std::string& operation) const;

  const KubernetesOptions options_;
  HttpClient http_;
  LeaseObserver leases_;
  // Relaxed would do: it orders nothing.
  std::atomic<SteadyTime> last_contact_ = SteadyNow();

  mutable absl::Mutex mu_;
  absl::Duration latency_ ABSL_GUARDED_BY(mu_);
  absl::Status error_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ema

#endif  // EMA_SERVER_REGISTRY_KUBERNETES_CLIENT_H_
