// SPDX-License-Identifier: Apache-2.0
//
// How many records of a model's commits are kept for those who watch it, and for those who ask for
// its versions.
#ifndef EMA_SERVER_CORE_KEPT_RECORDS_H_
#define EMA_SERVER_CORE_KEPT_RECORDS_H_

#include <cstdint>

#include "ema/model_info.h"

namespace ema {

inline constexpr int64_t kMaxRecordCount = 4096;
inline constexpr int64_t kMaxRecordBytes = int64_t{4} << 20;

// What a record takes, with the statistics that may come.
int64_t RecordBytes(const Version& record);

// Whether so many records, which take so many bytes together, are more than is kept: then the
// oldest is let go. The newest never is.
constexpr bool AreTooManyRecords(int64_t count, int64_t bytes) {
  return count > 1 && (count > kMaxRecordCount || bytes > kMaxRecordBytes);
}

}  // namespace ema

#endif  // EMA_SERVER_CORE_KEPT_RECORDS_H_
