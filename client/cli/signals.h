// SPDX-License-Identifier: Apache-2.0
//
// The signals that end what emactl waits for.
#ifndef EMA_CLIENT_CLI_SIGNALS_H_
#define EMA_CLIENT_CLI_SIGNALS_H_

namespace ema::cli {

// From here on Ctrl-C ends the wait, so that a half-written file is removed; so does a terminal
// that is closed, unless nohup ignores that.
void CatchSignals();
// One of these has come.
bool IsInterrupted();

}  // namespace ema::cli

#endif  // EMA_CLIENT_CLI_SIGNALS_H_
