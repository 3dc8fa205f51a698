# SPDX-License-Identifier: Apache-2.0
"""What several test files use."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import ema_client
import numpy as np
import pytest
from replay import Replay, differing_bits
from server_process import ROOT

Weights = dict[str, np.ndarray]
Found = TypeVar("Found")

# Where the programs are that tests start.
SUPPORT = pathlib.Path(__file__).parent
EMACTL = pathlib.Path(os.environ.get("EMACTL_BIN") or ROOT / "build/release/client/cli/emactl")

# True if every case of the tests marked "campaign" is to be tried: tests/run.sh --campaign. Otherwise they try a sample,
# which the seed chooses. As in tests/testutil/campaign.h.
IS_CAMPAIGN = "TEST_CAMPAIGN" in os.environ
CAMPAIGN_SEED = int(os.environ.get("TEST_SEED", 0))

# HealthCheckResponse{status}
SERVING = b"\x08\x01"
NOT_SERVING = b"\x08\x02"


def wait_for(
    condition: Callable[[], Found], what: str | Callable[[], str], timeout_s: float = 60.0
) -> Found:
    """What `condition` gives when that is true. `what`: for the failure; a function is called then."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        is_in_time = time.monotonic() < deadline
        assert is_in_time, f"not within {timeout_s} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.005)
    return found


def sample(cases: Sequence[Found], seconds: float) -> Iterator[Found]:
    """Yields all cases in a campaign, otherwise random ones until the time is over, at least one. Prints the seed."""
    if IS_CAMPAIGN:
        yield from cases
        return
    print(f"TEST_SEED={CAMPAIGN_SEED}")
    deadline = time.monotonic() + seconds
    for case in random.Random(CAMPAIGN_SEED).sample(cases, len(cases)):
        yield case
        if time.monotonic() > deadline:
            return


def step_until(
    condition: Callable[[], object], step: Callable[[], object], timeout_s: float = 60.0
) -> None:
    """Makes steps of a training until `condition` gives something true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        step()


@contextlib.contextmanager
def started(*commands: Sequence[object], **options: Any) -> Iterator[list[subprocess.Popen[Any]]]:
    """A process for each command; `options` are Popen's. Those that still run at the end are killed."""
    with contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            process = subprocess.Popen([str(word) for word in command], **options)
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def exit_codes(processes: Sequence[subprocess.Popen[Any]], timeout_s: float = 100.0) -> list[int]:
    """Of processes that end within that time all together: by default before pytest.ini's limit, to tell which hangs."""
    deadline = time.monotonic() + timeout_s
    return [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]


def beside_python(library: str) -> pathlib.Path:
    """The Python of a virtual environment beside build/venv that has the library, which `--all` installs;
    skips the test without it."""
    python = ROOT / f"build/venv-{library}/bin/python"
    if not python.exists():
        pytest.skip(f"no build/venv-{library}: deploy/setup.sh --all makes it")
    return python


def random_weights(rng: np.random.Generator, scale: float = 1.0) -> Weights:
    """A few tensors of every kind that NumPy knows, odd sizes among them."""
    return {
        "conv.weight": (scale * rng.standard_normal((7, 3, 3, 3))).astype(np.float32),
        "conv.bias": (scale * rng.standard_normal(7)).astype(np.float32),
        "half": (scale * rng.standard_normal((5, 13))).astype(np.float16),
        "double": (scale * rng.standard_normal((3, 11))).astype(np.float64),
        "scalar": np.float32(scale * rng.standard_normal()).reshape(()),
        "empty": np.zeros((0, 4), np.float32),
        "count": np.array(rng.integers(0, 1000), np.int64),
        "mask": rng.integers(0, 2, 9).astype(np.bool_),
        "bytes": rng.integers(0, 255, (2, 3)).astype(np.uint8),
    }


def numpy_of(tensors: Mapping[str, Any]) -> Weights:
    """Tensors of torch or NumPy as NumPy arrays; bfloat16 as its bits."""
    result = {}
    for name, tensor in tensors.items():
        if type(tensor).__module__.startswith("torch"):
            import torch

            tensor = tensor.detach()
            if tensor.dtype == torch.bfloat16:
                tensor = tensor.view(torch.int16)
            tensor = tensor.numpy()
        result[name] = np.asarray(tensor)
    return result


def assert_same_bits(expected: Mapping[str, Any], got: Mapping[str, Any]) -> None:
    problems = differing_bits(numpy_of(expected), numpy_of(got))
    assert not problems, "\n".join(problems)


def replay(pushes: list[tuple[ema_client.Version, Mapping[str, Any]]], track: str) -> Weights:
    """What `track` must hold after `pushes`, given the weights that the server says it applied."""
    result = Replay()
    for version, weights in pushes:
        record = version.tracks[track]
        if record.updated:
            result.update(record.update_weight, numpy_of(weights))
    return result.average


@contextlib.contextmanager
def unchanged(client: ema_client.Client, model: str, track: str) -> Iterator[None]:
    """Asserts that the body changes neither the version nor a bit of the average, and leaves the server up."""
    before = client.pull(model, track=track, framework="numpy")
    yield
    after = client.pull(model, track=track, framework="numpy")
    assert after.version == before.version
    assert_same_bits(before, after)
    assert client.model(model).latest == before.version


def check_health(address: str, service: str) -> bytes:
    """Calls grpc.health.v1.Health/Check by another gRPC than ours; messages are bytes, as no generated code is there."""
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed: pip install grpcio")
    name = service.encode()
    # HealthCheckRequest{service: name}; without one it is empty.
    request = b"\x0a" + bytes([len(name)]) + name if name else b""
    with grpc.insecure_channel(address) as channel:
        return channel.unary_unary("/grpc.health.v1.Health/Check")(request, timeout=30)
