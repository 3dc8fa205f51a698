// SPDX-License-Identifier: Apache-2.0
#include "server/core/kept_records.h"

#include <string>

namespace ema {
namespace {

int64_t BytesOf(const TrackVersion& track) {
  int64_t bytes = sizeof(track) + sizeof(TrackStatistics) + track.config.capacity() +
                  2 * track.track.capacity();
  for (const TrackVersion& rule : track.rules) bytes += BytesOf(rule);
  return bytes;
}

}  // namespace

int64_t RecordBytes(const Version& record) {
  int64_t bytes = sizeof(record);
  for (const TrackVersion& track : record.tracks) bytes += BytesOf(track);
  for (const std::string& name : record.skipped_tensors) {
    bytes += sizeof(std::string) + name.capacity();
  }
  return bytes;
}

}  // namespace ema
