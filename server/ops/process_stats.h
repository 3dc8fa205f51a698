// SPDX-License-Identifier: Apache-2.0
//
// Resource usage of this process.
#ifndef EMA_SERVER_OPS_PROCESS_STATS_H_
#define EMA_SERVER_OPS_PROCESS_STATS_H_

#include <cstdint>

namespace ema {

struct ProcessStats {
  int64_t resident_bytes = 0;
  int64_t open_fds = 0;
  int64_t max_fds = 0;
  double start_time_seconds = 0;  // Since the epoch.
  double cpu_seconds = 0;         // User and system, of all threads.
};

// Resident memory of this process; 0: it cannot be read.
int64_t ResidentBytes();
// The part of it that is neither file-backed nor shared with other processes.
int64_t PrivateBytes();

// Values that cannot be read are 0.
ProcessStats ReadProcessStats();

}  // namespace ema

#endif  // EMA_SERVER_OPS_PROCESS_STATS_H_
