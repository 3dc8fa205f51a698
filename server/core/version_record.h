// SPDX-License-Identifier: Apache-2.0
//
// How a version came about: what is said of it wherever its weights are.
#ifndef EMA_SERVER_CORE_VERSION_RECORD_H_
#define EMA_SERVER_CORE_VERSION_RECORD_H_

#include "ema/model_info.h"

namespace ema {

using TrackRecord = TrackVersion;
using VersionRecord = Version;

}  // namespace ema

#endif  // EMA_SERVER_CORE_VERSION_RECORD_H_
