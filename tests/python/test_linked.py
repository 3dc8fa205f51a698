# SPDX-License-Identifier: Apache-2.0
"""What our programs and the client's extension are linked to: a library more is one more that a machine must have."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess

import ema_client._ema
import pytest
from server_process import ROOT, server_binary

EMACTL = pathlib.Path(os.environ.get("EMACTL_BIN") or ROOT / "build/release/client/cli/emactl")
SYSTEM = ["ld-linux-x86-64", "libc", "libgcc_s", "libm", "libstdc++"]
# Checksums, and kernels for the processor at hand.
OURS = ["libhwy", "libisal"]
GRPC = ["libgpr", "libgrpc", "libgrpc++", "libprotobuf"]


def needed(path: pathlib.Path) -> list[str]:
    """The shared libraries that a file names itself, without their versions."""
    done = subprocess.run(["readelf", "-d", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"\(NEEDED\).*\[([^]]+?)\.so[^]]*\]", done.stdout))


@pytest.mark.parametrize(
    "path, allowed",
    [
        # Where the toolkit is, also LibTorch's memory for GPUs and the CUDA runtime: the driver is loaded, not linked.
        (server_binary(), ["libc10", "libc10_cuda", "libcudart", "libspdlog", "libtorch_cpu"]),
        (EMACTL, []),
        # No LibTorch, and no Python: the interpreter brings its own.
        (pathlib.Path(ema_client._ema.__file__), GRPC),
    ],
    ids=["ema-server", "emactl", "extension"],
)
def test_nothing_unexpected_is_linked(path, allowed):
    libraries = [name for name in needed(path) if not name.startswith("libabsl_")]
    assert set(libraries) <= {*SYSTEM, *OURS, *allowed}
    assert set(OURS) <= set(libraries)
