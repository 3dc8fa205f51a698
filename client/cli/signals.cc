// SPDX-License-Identifier: Apache-2.0
#include "client/cli/signals.h"

#include <signal.h>

namespace ema::cli {
namespace {

volatile sig_atomic_t interrupted = 0;
void OnSignal(int) { interrupted = 1; }

}  // namespace

void CatchSignals() {
  struct sigaction action = {};
  action.sa_handler = &OnSignal;
  action.sa_flags = SA_RESETHAND;  // The second one kills.
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  struct sigaction hang_up = {};
  if (sigaction(SIGHUP, nullptr, &hang_up) != 0 || hang_up.sa_handler == SIG_IGN) return;
  action.sa_flags = 0;  // It comes twice.
  sigaction(SIGHUP, &action, nullptr);
}

bool IsInterrupted() { return interrupted != 0; }

}  // namespace ema::cli
