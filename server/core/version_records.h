// SPDX-License-Identifier: Apache-2.0
//
// The remembered records of a model's latest commits.
#ifndef EMA_SERVER_CORE_VERSION_RECORDS_H_
#define EMA_SERVER_CORE_VERSION_RECORDS_H_

#include <cstddef>
#include <cstdint>
#include <deque>

#include "ema/version.h"
#include "ema/version_id.h"

namespace ema {

// Invariant: the records are the latest ones without a gap (of a copied model: those of the copied
// versions), at most kMaxCount of them and at most
// kMaxBytes, statistics included; the newest is always remembered, whatever its size. Not
// thread-safe.
class VersionRecords {
 public:
  static constexpr int64_t kMaxCount = 4096;
  static constexpr int64_t kMaxBytes = int64_t{4} << 20;

  // REQUIRES: `record` is after all others.
  void Add(const Version& record);
  const std::deque<Version>& all() const { return records_; }  // Oldest first.
  // Null: it is not remembered.
  const Version* Find(const VersionId& id) const {
    const size_t i = IndexOf(id);
    return i < records_.size() ? &records_[i] : nullptr;
  }
  // Adds statistics to the record of their version, unless that is forgotten or has them.
  void AddStatistics(const VersionId& id, const TrackStatistics& statistics);

 private:
  // records_.size(): not remembered.
  size_t IndexOf(const VersionId& id) const;

  std::deque<Version> records_;
  int64_t bytes_ = 0;
};

}  // namespace ema

#endif  // EMA_SERVER_CORE_VERSION_RECORDS_H_
