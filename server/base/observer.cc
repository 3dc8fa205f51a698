// SPDX-License-Identifier: Apache-2.0
#include "server/base/observer.h"

namespace ema {

ServerObserver& ServerObserver::None() {
  static ServerObserver none;
  return none;
}

}  // namespace ema
