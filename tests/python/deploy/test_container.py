# SPDX-License-Identifier: Apache-2.0
"""The container images are built, serve, stop, and start again with what they had; the demo runs in its own."""

import os
import re
import subprocess

import pytest
from server_process import ROOT

SCRIPT = ROOT / "deploy" / "container_test.sh"


def test_the_dockerfile_says_what_it_must() -> None:
    text = (ROOT / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)
    # What is built if nobody says a target.
    assert stages[-1] == ("runtime", "cpu")
    assert ("runtime", "cuda") in stages and ("${BASE}", "runtime") in stages
    project = re.search(r"^project\(ema VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text(), re.M)
    assert project is not None and f"ARG VERSION={project[1]}\n" in text


def test_the_compiler_is_of_the_cuda_that_torch_brings() -> None:
    text = "".join(
        (ROOT / f"deploy/requirements-{name}.txt").read_text() for name in ("server", "cuda")
    )
    versions = dict(re.findall(r"^nvidia-(\S+)==(\d+\.\d+)\.", text, re.MULTILINE))
    assert {"cuda-nvcc", "cuda-crt", "cuda-cccl", "nvvm", "cuda-runtime"} <= versions.keys()
    assert len(set(versions.values())) == 1, versions


@pytest.mark.container
@pytest.mark.timeout(
    3600
)  # It downloads a base system and LibTorch, and compiles the server twice.
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
