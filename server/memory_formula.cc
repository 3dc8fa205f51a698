// SPDX-License-Identifier: Apache-2.0
#include "server/memory_formula.h"

#include <algorithm>

#include "server/core/attached_files.h"
#include "server/core/model.h"
#include "server/core/reading.h"
#include "server/device/host_memory_bytes.h"
#include "server/ops/heap.h"
#include "server/ops/logging.h"
#include "server/ops/process_stats.h"
#include "server/rpc/rpc_server.h"
#include "server/wire/shared_ring.h"

namespace ema {
namespace {

void WarnOfMemory(const char* whose, int64_t at_most_bytes, int64_t available_bytes) {
  if (at_most_bytes <= available_bytes) return;
  Log(LogLevel::kWarning, "the limits allow more memory than is available",
      {{"memory", whose},
       {"at_most_bytes", at_most_bytes},
       {"available_bytes", available_bytes},
       {"lower", "--memory-bytes, --max-push-streams, --max-pull-streams"}});
}

}  // namespace

int64_t MaxWindowBytes(const ServerOptions& options) {
  return options.max_window_bytes > 0 ? options.max_window_bytes : HostMemoryBytes() / 16;
}

MemoryFormula FormulaOf(const ServerOptions& options, const Device& device) {
  // A chunk that is being made, one that is being sent, and gRPC's buffers.
  constexpr int64_t kPullBytes = (int64_t{4} << 20) + Reading::kUnbudgetedBytes;
  const Device::Overhead overhead = device.overhead(options.block_bytes);
  MemoryFormula formula;
  formula.push_bytes = RpcServer::PushBytes(options.limits) + overhead.host_bytes_per_stream;
  formula.pull_bytes = kPullBytes + overhead.host_bytes_per_reader;
  formula.lane_bytes = 2 * SharedRing::kBytes;
  formula.lane_count = options.same_host_lane == "on"
                           ? options.limits.max_push_streams + options.limits.max_pull_streams
                           : 0;
  formula.stream_bytes = options.limits.max_push_streams * formula.push_bytes +
                         options.limits.max_pull_streams * formula.pull_bytes +
                         formula.lane_count * formula.lane_bytes + RpcServer::kRequestBytes;
  formula.waiting_bytes = RpcServer::kWaitingBytes;
  formula.record_bytes = options.max_models * Model::kUnbudgetedBytes;
  formula.kept_bytes = kKeptHeapBytes + overhead.shared_host_bytes;
  formula.process_bytes = ResidentBytes();
  if (!device.is_host()) {
    const int64_t left_bytes = HostMemoryBytes() - formula.process_bytes - formula.stream_bytes -
                               formula.waiting_bytes - formula.record_bytes - formula.kept_bytes;
    formula.host_budget_bytes = std::max(left_bytes / 5 * 4, kMaxAttachedFileBytes);
  }
  return formula;
}

int64_t DefaultMemoryBytes(const ServerOptions& options, const Device& device) {
  const int64_t total_bytes = device.total_memory_bytes();
  const Device::Overhead overhead = device.overhead(options.block_bytes);
  // Without what the process has now, which is another at each start: what fits must fit again.
  const MemoryFormula formula = FormulaOf(options, device);
  const int64_t beside_bytes =
      device.is_host()
          ? formula.stream_bytes + formula.waiting_bytes + formula.record_bytes + formula.kept_bytes
          : options.limits.max_push_streams * overhead.bytes_per_stream + overhead.shared_bytes;
  return (total_bytes - std::min(beside_bytes, total_bytes / 2)) / 5 * 4;
}

void LogMemoryFormula(const ServerOptions& options, const MemoryFormula& formula,
                      const Device& device, int64_t model_bytes) {
  const int64_t host_model_bytes = device.is_host() ? model_bytes : 0;
  const int64_t at_most_bytes = formula.process_bytes + host_model_bytes +
                                formula.host_budget_bytes + formula.stream_bytes +
                                formula.waiting_bytes + formula.record_bytes + formula.kept_bytes;
  Log(LogLevel::kInfo, "memory",
      {{"at_most_bytes", at_most_bytes},
       {"formula",
        "now + models + files_and_casts + push_streams * push_stream + pull_streams * pull_stream "
        "+ lanes * lane + requests + waiting + max_models * records + freed; a model "
        "takes the bytes of its tracks * (2 + max_pinned_versions, and 1 more with --data-dir)"},
       {"now", formula.process_bytes},
       {"models", host_model_bytes},
       {"files_and_casts", formula.host_budget_bytes},
       {"push_streams", options.limits.max_push_streams},
       {"push_stream", formula.push_bytes},
       {"pull_streams", options.limits.max_pull_streams},
       {"pull_stream", formula.pull_bytes},
       {"lanes", formula.lane_count},
       {"lane", formula.lane_bytes},
       {"requests", RpcServer::kRequestBytes},
       {"waiting", formula.waiting_bytes},
       {"max_models", options.max_models},
       {"records", Model::kUnbudgetedBytes},
       {"freed", formula.kept_bytes},
       // The trainers allocate these.
       {"shared_windows", options.same_host_lane == "on" ? MaxWindowBytes(options) : 0}});
  WarnOfMemory("host", at_most_bytes, HostMemoryBytes());
  if (device.is_host()) return;
  const Device::Overhead overhead = device.overhead(options.block_bytes);
  const int64_t device_at_most_bytes = model_bytes +
                                       options.limits.max_push_streams * overhead.bytes_per_stream +
                                       overhead.shared_bytes;
  Log(LogLevel::kInfo, "device memory",
      {{"at_most_bytes", device_at_most_bytes},
       {"formula", "models + push_streams * push_stream + readers"},
       {"device", device.name()},
       {"models", model_bytes},
       {"push_streams", options.limits.max_push_streams},
       {"push_stream", overhead.bytes_per_stream},
       {"readers", overhead.shared_bytes}});
  WarnOfMemory(device.name().c_str(), device_at_most_bytes, device.total_memory_bytes());
}

}  // namespace ema
