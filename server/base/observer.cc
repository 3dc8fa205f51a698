// SPDX-License-Identifier: Apache-2.0
#include "server/base/observer.h"

namespace ema {

ServerObserver& ServerObserver::None() {
  static ServerObserver none;
  return none;
}

std::string_view RefusalName(ServerObserver::Refusal reason) {
  switch (reason) {
    case ServerObserver::Refusal::kLimit:
      return "limit";
    case ServerObserver::Refusal::kDescriptors:
      return "descriptors";
    case ServerObserver::Refusal::kLanes:
      break;
  }
  return "lanes";
}

}  // namespace ema
