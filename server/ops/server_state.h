// SPDX-License-Identifier: Apache-2.0
//
// The state of the server that metrics and the status page show beside event counts.
#ifndef EMA_SERVER_OPS_SERVER_STATE_H_
#define EMA_SERVER_OPS_SERVER_STATE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ema/group_info.h"
#include "server/base/heartbeat.h"
#include "server/base/rpc_limits.h"
#include "server/core/checkpoint_counts.h"
#include "server/core/model_overview.h"
#include "server/device/device.h"

namespace ema {

// Since 1970.
inline double UnixSeconds(absl::Time time) {
  return absl::ToDoubleSeconds(time - absl::UnixEpoch());
}

// Upper bounds of the host memory that the process uses. Models, and bytes cast for readers,
// reserve their part before they use it.
struct MemoryFormula {
  int64_t push_bytes = 0;  // Of one stream, like the next two.
  int64_t pull_bytes = 0;
  int64_t lane_bytes = 0;
  int64_t lane_count = 0;
  int64_t stream_bytes = 0;   // Of all together: receive windows, requests, buffers for sending.
  int64_t waiting_bytes = 0;  // Requests that wait for a worker.
  int64_t record_bytes = 0;   // Of all models together, beside what they reserve.
  int64_t kept_bytes = 0;     // Freed heap memory, and pinned memory that streams share.
  int64_t process_bytes = 0;  // Resident memory at the start.
  // ModelStore::Options::host_memory_bytes, for attached files and for bytes that are read, cast or
  // cut out for readers: 0 where models are in the host's memory.
  int64_t host_budget_bytes = 0;
};

// Collected for each request.
struct ServerState {
  // Limits of each part, and the device's memory.
  struct Memory {
    int64_t budget_bytes = 0;      // For models.
    int64_t reserved_bytes = 0;    // Of budget_bytes.
    int64_t host_model_bytes = 0;  // The budget, if models are in the host's memory.
    MemoryFormula formula;
    int64_t device_bytes = 0;  // All memory of the device that the server may use.
    Device::MemoryUse device_use;
  };
  struct Tls {
    absl::Time expiry;                // Of the certificate in use.
    bool has_rejected_files = false;  // The files are invalid; the previous ones are in use.
  };
  struct Model {
    std::string name;
    ModelOverview overview;
    std::vector<StatisticsPoint> history;  // Only for the status page.
  };

  absl::Time now;
  absl::Time start_time;
  // OK: it serves.
  absl::Status health;
  bool is_recovering = false;  // The checkpoints are being read, and nothing is served yet.
  absl::Status device_health;
  bool has_data_dir = false;
  absl::Status checkpoints_health;  // OK without a data directory.
  bool is_store_read_only = false;
  std::optional<int64_t> data_dir_free_bytes;
  // When the last complete scrub ended, see CheckpointScrubber::time(). Absent: checkpoints are not
  // scrubbed.
  std::optional<absl::Time> scrub_time;
  // --save-every. Absent: there are no such saves.
  std::optional<absl::Duration> save_interval;
  // By model, those with only bad checkpoints included. Empty without a data directory.
  std::map<std::string, CheckpointCounts> checkpoints;
  std::string device;
  std::string cuda_version;
  int64_t incarnation = 0;
  int64_t statistics_every_commits = 0;  // 0: only when asked for.
  int64_t max_models = 0;
  Memory memory;
  RpcLimits limits;
  RpcUsage usage;
  int64_t max_sessions = 0;          // Of all models together.
  std::optional<Tls> tls;            // Absent: the server does not speak TLS, or not yet.
  bool has_rejected_tokens = false;  // The token file is invalid or missing; old tokens apply.
  std::vector<Heartbeats::Age> workers;
  std::vector<Model> models;  // By name.
  // As this server sees it. Absent: it is not in a group, or has not joined it.
  std::optional<GroupInfo> group;
  // When the followed server last answered; if it never has, when this server was started. Absent:
  // this server follows no other one.
  std::optional<absl::Time> follow_contact;
};

}  // namespace ema

#endif  // EMA_SERVER_OPS_SERVER_STATE_H_
