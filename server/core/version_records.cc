// SPDX-License-Identifier: Apache-2.0
#include "server/core/version_records.h"

#include <algorithm>
#include <string>

namespace ema {
namespace {

int64_t BytesOf(const TrackVersion& track) {
  int64_t bytes = sizeof(track) + sizeof(TrackStatistics) + track.config.capacity() +
                  2 * track.track.capacity();
  for (const TrackVersion& rule : track.rules) bytes += BytesOf(rule);
  return bytes;
}

// With the statistics that may come.
int64_t BytesOf(const Version& record) {
  int64_t bytes = sizeof(record);
  for (const TrackVersion& track : record.tracks) bytes += BytesOf(track);
  for (const std::string& name : record.skipped_tensors) {
    bytes += sizeof(std::string) + name.capacity();
  }
  return bytes;
}

}  // namespace

void VersionRecords::Add(const Version& record) {
  records_.push_back(record);
  // Counted as it will be subtracted: a copy's strings have no more room than they need.
  bytes_ += BytesOf(records_.back());
  while (records_.size() > 1 &&
         (static_cast<int64_t>(records_.size()) > kMaxCount || bytes_ > kMaxBytes)) {
    bytes_ -= BytesOf(records_.front());
    records_.pop_front();
  }
}

size_t VersionRecords::IndexOf(const VersionId& id) const {
  const auto it =
      std::partition_point(records_.begin(), records_.end(),
                           [&id](const Version& record) { return record.number < id.version; });
  return it != records_.end() && it->id() == id ? it - records_.begin() : records_.size();
}

void VersionRecords::AddStatistics(const VersionId& id, const TrackStatistics& statistics) {
  const size_t i = IndexOf(id);
  if (i == records_.size()) return;
  std::vector<TrackStatistics>& known = records_[i].statistics;
  if (std::none_of(known.begin(), known.end(),
                   [&](const TrackStatistics& other) { return other.track == statistics.track; })) {
    known.push_back(statistics);
  }
}

}  // namespace ema
