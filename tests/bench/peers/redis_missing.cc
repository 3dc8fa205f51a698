// SPDX-License-Identifier: Apache-2.0
//
// For a build without hiredis.
#include "tests/bench/peers/redis_peer.h"

namespace ema::bench {

std::unique_ptr<RedisPeer> StartRedis() { return nullptr; }

}  // namespace ema::bench
