// SPDX-License-Identifier: Apache-2.0
//
// Whether the records of two servers of a group are of one commit.
#ifndef EMA_CLIENT_CPP_GROUP_SAME_COMMIT_H_
#define EMA_CLIENT_CPP_GROUP_SAME_COMMIT_H_

#include "ema/version.h"

namespace ema::client_internal {

inline bool IsSameCommit(const Version& a, const Version& b) {
  return a.id() == b.id() && a.step == b.step && a.commit_time == b.commit_time;
}

}  // namespace ema::client_internal

#endif  // EMA_CLIENT_CPP_GROUP_SAME_COMMIT_H_
