# SPDX-License-Identifier: Apache-2.0
"""The demo's check: it accepts what follows from the trainer's log alone, and nothing else."""

from __future__ import annotations

import dataclasses

import ema_client
import numpy as np
import pytest
from check import CheckError, check_averages
from replay import Replay

STEPS = [1, 10, 20, 40]
HALF_LIFE = 20.0
RIGHT = [1.0, *(float(np.float32(1 - 0.5 ** (n / HALF_LIFE))) for n in (9, 10, 20))]
ONE_BIT_MORE = [*RIGHT[:2], float(np.nextafter(np.float32(RIGHT[2]), np.float32(1))), RIGHT[3]]


@pytest.fixture
def served(tmp_path, rng):
    """Writes what the demo leaves behind where the server applied `weights`; returns its records."""

    def write(weights):
        records, replay = [], Replay()
        for folder in ("trainer_log", "pulled"):
            (tmp_path / folder).mkdir()
        for number, (step, weight) in enumerate(zip(STEPS, weights), start=1):
            log = {"w": rng.standard_normal(5).astype(np.float32), "n": np.array(step)}
            replay.update(weight, log)
            np.savez(tmp_path / "trainer_log" / f"{step:06d}.npz", **log)
            pulled = {f"ema/{name}": array for name, array in replay.average.items()}
            pulled |= {f"raw/{name}": array for name, array in log.items()}
            np.savez(tmp_path / "pulled" / f"{number:06d}.npz", **pulled)
            track = ema_client.TrackVersion(
                update_weight=weight, elapsed=0, update_count=number, updated=True
            )
            records.append(
                ema_client.Version(
                    number=number,
                    step=step,
                    incarnation=1,
                    time=ema_client.TrainingTime(batch=step),
                    tracks={"ema": track},
                )
            )
        return records

    return write


def check(folder, records):
    return check_averages(folder, records, {"ema": HALF_LIFE}, ["raw"])


def test_right_averages_pass(tmp_path, served):
    assert check(tmp_path, served(RIGHT))["tensors_compared"] == 4 * len(STEPS)


@pytest.mark.parametrize(
    "weights",
    [ONE_BIT_MORE, [0.5, *RIGHT[1:]], [1.0, RIGHT[2], RIGHT[2], RIGHT[3]]],
    ids=["one bit", "first", "other elapsed time"],
)
def test_a_wrong_weight_fails_even_if_record_and_average_agree(tmp_path, served, weights):
    with pytest.raises(CheckError, match="must have the weight"):
        check(tmp_path, served(weights))


def test_a_right_record_of_a_wrong_average_fails(tmp_path, served):
    records = [
        dataclasses.replace(
            record,
            tracks={"ema": dataclasses.replace(record.tracks["ema"], update_weight=weight)},
        )
        for record, weight in zip(served(ONE_BIT_MORE), RIGHT)
    ]
    with pytest.raises(CheckError, match="version 3, track ema is not what was trained"):
        check(tmp_path, records)


def test_a_skipped_update_fails(tmp_path, served):
    records = served(RIGHT)
    records[2] = dataclasses.replace(
        records[2],
        tracks={"ema": dataclasses.replace(records[2].tracks["ema"], updated=False)},
    )
    with pytest.raises(CheckError, match="version 3, track ema"):
        check(tmp_path, records)
