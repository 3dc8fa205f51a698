# SPDX-License-Identifier: Apache-2.0
"""The demo's evaluator: a third process that pulls every version while training goes on.

Usage: evaluator.py URL OUT_FOLDER
Ends after the last version of a training that has written rank0.json.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import ema_client
import numpy as np
import torch
from digits import accuracy, images, network

# How often it looks whether training has ended while no version comes.
QUIET_S = 1.0
# How long it waits for the trainer to make the model.
START_S = 120.0


def main() -> None:
    url, out = sys.argv[1], pathlib.Path(sys.argv[2])
    torch.set_num_threads(1)
    address, _, name = url.removeprefix("ema://").partition("/")
    x, y = images(held_out=True)
    net = network()
    series: list[dict[str, Any]] = []
    missed = 0
    last = 0
    with ema_client.Client(address) as client:
        client.wait_for(name, step=0, timeout_s=START_S)
        tracks = list(client.model(name).tracks)
        while not is_finished(out, last):
            try:
                for version in client.watch(name, after=last, timeout_s=QUIET_S):
                    last = version.number
                    missed += version.skipped
                    point = evaluate(client, name, version, tracks, net, x, y, out / "pulled")
                    series.append(point)
                    missed += not point["accuracy"]
                    if is_finished(out, last):
                        break
            except ema_client.DeadlineExceededError:
                continue
    (out / "evaluator.json").write_text(json.dumps({"missed": missed, "series": series}))


def is_finished(out: pathlib.Path, last: int) -> bool:
    end = out / "rank0.json"
    return (
        end.exists() and bool(text := end.read_text()) and json.loads(text)["last_version"] <= last
    )


def evaluate(
    client: ema_client.Client,
    name: str,
    version: ema_client.Version,
    tracks: list[str],
    net: torch.nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    pulled: pathlib.Path,
) -> dict[str, Any]:
    """Pulls all tracks of a version, measures them, and keeps what was pulled."""
    point: dict[str, Any] = {
        "version": version.number,
        "step": version.step,
        "tracks": {
            track: {"updated": record.updated, "weight": record.update_weight}
            for track, record in version.tracks.items()
        },
        "accuracy": {},
    }
    weights = {}
    try:
        for track in tracks:
            weights[track] = client.pull(name, track=track, version=version)
    except ema_client.OutOfRangeError:
        # The server has gone on while the version before was measured.
        return point
    for track, tensors in weights.items():
        net.load_state_dict(tensors)
        point["accuracy"][track] = accuracy(net, x, y)
    np.savez(
        pulled / f"{version.number:06d}.npz",
        **{
            f"{track}/{tensor}": value.numpy()
            for track, tensors in weights.items()
            for tensor, value in tensors.items()
        },
    )
    return point


if __name__ == "__main__":
    main()
