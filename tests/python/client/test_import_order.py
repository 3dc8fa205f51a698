# SPDX-License-Identifier: Apache-2.0
"""Our gRPC keeps to itself: other libraries in the process work, whichever was imported first."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys

import pytest

USES = {
    "ema_client": """
client = ema_client.Client({address!r})
weights = {{"w": np.arange(4, dtype=np.float32)}}
client.create_model(MODEL, weights, tracks={{"raw": "copy"}})
with client.open_run(MODEL) as run:
    run.push(step=1, weights=weights)
assert list(client.pull(MODEL, track="raw", framework="numpy")["w"]) == [0, 1, 2, 3]
""",
    "torch": "assert torch.nn.Linear(3, 3)(torch.ones(2, 3)).sum().item() is not None",
    # Another implementation in the same process talks to the same server.
    "grpc": """
with grpc.insecure_channel({address!r}) as channel:
    call = channel.unary_unary("/ema.v1.EmaService/ListModels")
    call(b"", timeout=20)
""",
}


def run_in_order(order, server, model):
    lines = ["import numpy as np", f"MODEL = {model!r}"]
    lines += [f"import {name}" for name in order]
    for name in [*order, *reversed(order)]:
        lines.append(USES[name].format(address=server.address) if name != "ema_client" else "")
    lines.append(USES["ema_client"].format(address=server.address))
    for name in order:
        if name != "ema_client":
            lines.append(USES[name].format(address=server.address))
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("order", list(itertools.permutations(["ema_client", "torch"])))
def test_beside_torch(server, model, order):
    run_in_order(order, server, model)


@pytest.mark.one_server("grpcio expects one address")
@pytest.mark.skipif(
    importlib.util.find_spec("grpc") is None, reason="grpcio is not installed: pip install grpcio"
)
@pytest.mark.parametrize("order", list(itertools.permutations(["ema_client", "grpc"])))
def test_beside_another_grpc(server, model, order):
    run_in_order(order, server, model)


def test_no_framework_is_imported():
    names = "torch numpy lightning pytorch_lightning transformers accelerate diffusers".split()
    program = f"import sys, ema_client; sys.exit(str(set(sys.modules) & set({names})))"
    result = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert result.stderr.strip() == "set()"
