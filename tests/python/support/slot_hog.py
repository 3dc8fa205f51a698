# SPDX-License-Identifier: Apache-2.0
"""A hostile client with a valid token that wants all slots for streams of one kind.

    python slot_hog.py pulls|pushes PORT TOKEN... [--seconds S] [--pause S]

"pulls" are 64 calls whose replies are never read, "pushes" 32 calls whose first message never ends, each on one
connection for each token. Whenever the server has ended calls, others are opened after a pause; without a pause, that is
a flood of calls, too. Prints "flooding" when it has begun, and at the end a JSON line with the number of calls.
"""

from __future__ import annotations

import argparse
import json
import time

from half_sent import HalfSender

# PullRequest{model: "pair", track: "ema"}
PULL = b"\x0a\x04pair\x12\x03ema"
CALLS = {"pulls": 64, "pushes": 32}


def open_call(kind: str, sender: HalfSender) -> int:
    if kind == "pulls":
        return sender.call("/ema.v1.EmaService/Pull", PULL)
    return sender.begin("/ema.v1.EmaService/Push")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=CALLS)
    parser.add_argument("port", type=int)
    parser.add_argument("tokens", nargs="+")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--pause", type=float, default=0)
    options = parser.parse_args()
    senders = [HalfSender(options.port, token=token) for token in options.tokens]
    calls = 0
    for sender in senders:
        for _ in range(CALLS[options.kind]):
            open_call(options.kind, sender)
            calls += 1
        sender.advance(max_wait_s=1.0)
    print("flooding", flush=True)
    deadline = time.monotonic() + options.seconds
    while time.monotonic() < deadline:
        for sender in senders:
            sender.advance(max_wait_s=0.005)
            for _ in sender.ended:
                open_call(options.kind, sender)
                calls += 1
            sender.ended.clear()
        time.sleep(options.pause)
    print(json.dumps({"calls": calls}))


if __name__ == "__main__":
    main()
