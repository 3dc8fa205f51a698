# SPDX-License-Identifier: Apache-2.0
"""What our programs and the client's extension are linked to: a library more is one more that a machine must have."""

from __future__ import annotations

import pathlib

import ema_client._ema
import pytest
from linking import EXTENSION, assert_linked
from server_process import server_binary
from testing import EMACTL

# Where the CUDA toolkit is, also LibTorch's memory for GPUs and the CUDA runtime: the driver is loaded, not linked.
SERVER = {
    "libc10",
    "libc10_cuda",
    "libcudart",
    "libmicrohttpd",
    "libprometheus-cpp-core",
    "libspdlog",
}


@pytest.mark.parametrize(
    "path, allowed",
    [
        (server_binary(), SERVER),
        (EMACTL, set()),
        (pathlib.Path(ema_client._ema.__file__), EXTENSION),
    ],
    ids=["ema-server", "emactl", "extension"],
)
def test_nothing_unexpected_is_linked(path, allowed):
    assert_linked(path, allowed)
