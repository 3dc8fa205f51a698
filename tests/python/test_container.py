# SPDX-License-Identifier: Apache-2.0
"""The container image is built, serves, stops, and starts again with what it had."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "container_test.sh"


@pytest.mark.container
@pytest.mark.timeout(3600)  # It downloads a base system and LibTorch, and compiles the server.
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a base image and a chroot")
def test_a_restarted_container_serves_what_was_pushed_before() -> None:
    done = subprocess.run(
        [SCRIPT],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.endswith("container_test: ok\n"), done.stdout
