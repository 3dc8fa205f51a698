# SPDX-License-Identifier: Apache-2.0
"""Type checkers know the keyword arguments that functions pass on."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from ema_client._tracks import presets
from ema_client._tracks.preset_arguments import FURTHER_NAMES
from ema_client._tracks.typed_arguments import PresetArguments, TrackArguments
from ema_client._trainer.arguments import RunArguments
from ema_client._trainer.attach import KEYWORDS

# The source: mypy does not take the folder of installed packages.
PACKAGE = pathlib.Path(__file__).parents[3] / "client/python"
OF_EMA = {"half_life", "smoothing", "update_interval", "ema_start", "preset"}

# Without the frameworks, which take mypy minutes.
CONFIGURATION = """
[mypy]
strict = true
[mypy-torch.*,lightning.*,pytorch_lightning.*,transformers.*]
follow_imports = skip
ignore_missing_imports = true
[mypy-ema_client.*]
ignore_errors = true
"""
RIGHT = """
import ema_client
from ema_client.lightning import EMAWeightAveraging
from ema_client.transformers import EmaCallback

def use(model: object, optimizer: None) -> None:
    ema_client.attach(model, optimizer, "ema://h/m", half_life="5ba", ramp_ratio=0.1, time=None)
    ema_client.attach(model, optimizer, "ema://h/m", preset="ema_pytorch", beta=0.9, update_every=3)
    ema_client.LocalEMA(model, decay=0.9, zero_init="debias")
    ema_client.Track(decay=0.9)
    ema_client.Track.preset("optax", decay=0.9, debias=False)
    EMAWeightAveraging("ema://h/m", decay=0.9, on_error="raise")
    EmaCallback("ema://h/m", decay=0.9, wire_dtype="bfloat16", tracks={"raw": "copy"})
"""
WRONG = {
    'ema_client.attach(model, optimizer, "ema://h/m", ramp_ration=0.1)': "ramp_ratio",
    'ema_client.attach(model, optimizer, "ema://h/m", preset="ema_pytorch", betta=0.9)': "beta",
    'ema_client.attach(model, optimizer, "ema://h/m", preset="timm", decay="0.9")': "decay",
    "ema_client.LocalEMA(model, half_live=3)": "half_life",
    "ema_client.LocalEMA(model, use_ema_warmpu=True)": "use_ema_warmup",
    'ema_client.Track.preset("optax", stepsize=0.9)': "step_size",
    'EMAWeightAveraging("ema://h/m", halflife="3ba")': "half_life",
    'EmaCallback("ema://h/m", on_eror="raise")': "on_error",
    'EmaCallback("ema://h/m", on_error="rise")': "on_error",
}


def test_the_names_are_those_of_the_presets_tracks_and_attach():
    of_presets = set().union(*map(presets.argument_names, presets._NAMES))
    assert PresetArguments.__annotations__.keys() == of_presets
    of_attach = OF_EMA | {"dtype"}  # A preset has such an argument, too.
    assert TrackArguments.__annotations__.keys() == (of_presets | set(FURTHER_NAMES)) - of_attach
    # What callbacks take: they set `resume` themselves.
    assert RunArguments.__annotations__.keys() == set(KEYWORDS) - OF_EMA - {"resume"}


def test_a_type_checker_finds_misspelled_names(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed")
    (tmp_path / "mypy.ini").write_text(CONFIGURATION)
    (tmp_path / "user.py").write_text(RIGHT + "".join(f"    {line}\n" for line in WRONG))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "user.py"],
        **{"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 280},
        env={"MYPYPATH": str(PACKAGE)},
    )
    problems = done.stdout.splitlines()[:-1]
    problems = [line for line in problems if ": note: " not in line]
    first = RIGHT.count("\n") + 1
    assert [line.split(":")[1] for line in problems] == [
        str(first + number) for number in range(len(WRONG))
    ], (done.stdout + done.stderr)
    for line, name in zip(problems, WRONG.values()):
        assert f'"{name}"' in line
