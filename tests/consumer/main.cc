// SPDX-License-Identifier: Apache-2.0
#include "ema/client.h"
#include "ema/schedule.h"

// Succeeds if the libraries are complete: the schedule is good, the address is not.
int main() {
  return ema::Schedule::Parse("200ba").ok() && !ema::Client::Create("no address").ok() ? 0 : 1;
}
