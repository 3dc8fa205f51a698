# SPDX-License-Identifier: Apache-2.0
"""One rank that pushes constants until it is killed; test_group_campaign.py runs several.

Usage: filling_rank.py ADDRESS MODEL RANK RANKS
Pushes each step that is a line of its standard input, and prints a line of JSON for it. Opens the run again if a later
incarnation of the model has fenced it, as `attach` does.
"""

from __future__ import annotations

import json
import sys
import time

import ema_client
from kill_history import fill, id_of

TIMEOUT_S = 30
# How long it waits after a failed call.
PAUSE_S = 0.05


def open_run(client: ema_client.Client, model: str, rank: int, ranks: int) -> ema_client.Run:
    """Waits until the group accepts the rank, which may start while a server is away."""
    while True:
        try:
            return client.open_run(model, launch_id="campaign", rank=rank, world_size=ranks)
        except (ema_client.UnavailableError, ema_client.DeadlineExceededError):
            time.sleep(PAUSE_S)


def report(step: int, error: ema_client.EmaError) -> None:
    name = type(error).__name__
    answer = {"step": step, "error": name, "reason": error.reason, "text": str(error)}
    print(json.dumps(answer), flush=True)


def main() -> None:
    address, model, rank, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with ema_client.Client(address, timeout_s=TIMEOUT_S) as client:
        run = None
        for line in sys.stdin:
            step = int(line)
            try:
                if run is None:
                    run = open_run(client, model, rank, ranks)
                version = run.push(step=step, weights=fill(step))
            except ema_client.EmaError as error:
                if error.reason == "FENCED":
                    run = None
                report(step, error)
                time.sleep(PAUSE_S)
                continue
            weight = version.tracks["ema"].update_weight
            print(json.dumps({"step": step, "id": id_of(version), "weight": weight}), flush=True)


if __name__ == "__main__":
    main()
