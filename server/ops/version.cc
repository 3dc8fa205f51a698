// SPDX-License-Identifier: Apache-2.0
#include "server/ops/version.h"

namespace ema {

std::string_view ServerVersion() { return EMA_VERSION; }

}  // namespace ema
