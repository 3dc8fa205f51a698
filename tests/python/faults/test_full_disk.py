# SPDX-License-Identifier: Apache-2.0
"""A real disk that is really full: saves fail, nothing else does, and it heals by itself."""

from __future__ import annotations

import contextlib
import errno
import pathlib
import shutil
import subprocess
import time
from collections.abc import Iterator

import ema_client
import numpy as np
import pytest
from http_pages import LISTEN, get_status, scrape, url_of, value
from server_process import ServerError, ServerProcess
from testing import EMACTL, NOT_SERVING, SERVING, check_health, wait_for

DISK_BYTES = 24 << 20
# Two checkpoints fit, three do not.
WEIGHT_BYTES = 4 << 20


def mount_or_skip(*arguments: str) -> None:
    try:
        result = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if result.returncode != 0:
        pytest.skip(f"cannot mount here: {result.stderr.strip()}")


def make_image(file: pathlib.Path) -> None:
    with file.open("wb") as image:
        image.truncate(DISK_BYTES)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(file)], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mkfs.ext4")


@contextlib.contextmanager
def small_disk(kind: str, folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of DISK_BYTES, mounted in `folder`."""
    disk = folder / "disk"
    disk.mkdir()
    if kind == "tmpfs":
        mount_or_skip("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(disk))
    else:
        image = folder / "image"
        make_image(image)
        mount_or_skip("-o", "loop", str(image), str(disk))
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def fill(disk: pathlib.Path, leave_bytes: int) -> pathlib.Path:
    """Takes all space but `leave_bytes`."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while (left := shutil.disk_usage(disk).free - leave_bytes) > 0:
                file.write(bytes(min(left, 1 << 20)))
        except OSError as error:
            # The file system wants some of it for itself.
            assert error.errno == errno.ENOSPC
    return ballast


def names(data: pathlib.Path) -> set[str]:
    return {path.name for path in (data / "models/m/checkpoints").iterdir()}


def push(run: ema_client.Run, step: int) -> np.ndarray:
    weights = np.full(WEIGHT_BYTES // 4, step, np.float32)
    run.push(step=step, weights={"w": weights})
    return weights


def check_said_once(server: ServerProcess, client: ema_client.Client) -> None:
    """The log, the status page, the metrics and the listing have the one failed save, of step 2, and why."""
    wait_for(lambda: "checkpoint failed" in server.log(), "the log says so")
    (failed,) = [line for line in server.log().splitlines() if "checkpoint failed" in line]
    for part in (
        "model=m step=2 version=2 checkpoint=step-",
        "reason=DISK_FULL",
        "peer=ipv4:127.0",
    ):
        assert part in failed
    problems = [
        (problem["what"], problem["count"])
        for problem in get_status(url_of(server))["problems"]
        if problem["text"].startswith("RESOURCE_EXHAUSTED")
    ]
    assert problems == [("save", 1)]
    metrics = scrape(server)
    assert value(metrics, "ema_checkpoints", model="m", state="failed") == 1
    assert value(metrics, "ema_checkpoints", model="m", state="complete") == 1
    assert value(metrics, "ema_data_dir_free_bytes") <= DISK_BYTES
    listed = client.checkpoints("m")
    (problem,) = [info.problem for info in listed if info.state == "failed"]
    assert "RESOURCE_EXHAUSTED" in problem and "ema.v1" not in problem
    shown = subprocess.run(
        [EMACTL, "--server", server.address, "checkpoint", "list", "m"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    (row,) = [row for row in shown if " failed " in row]
    assert row.endswith(problem)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
# What is left: too little to begin with, or less than the server thinks that it needs.
@pytest.mark.parametrize("leave_bytes", [0, WEIGHT_BYTES // 2])
def test_a_full_disk_heals_by_itself(tmp_path, kind, leave_bytes):
    with small_disk(kind, tmp_path) as disk:
        data = disk / "data"
        with ServerProcess(tmp_path, *LISTEN, data_dir=data) as server:
            with ema_client.Client(server.address) as client:
                client.create_model(
                    "m", {"w": np.zeros(WEIGHT_BYTES // 4, np.float32)}, tracks={"raw": "copy"}
                )
                with client.open_run("m") as run:
                    push(run, 1)
                    first = client.create_checkpoint("m")
                    before = names(data)
                    ballast = fill(disk, leave_bytes)
                    weights = push(run, 2)
                    with pytest.raises(ema_client.ResourceExhaustedError) as error:
                        client.create_checkpoint("m")
                    assert error.value.reason == "DISK_FULL"
                    check_said_once(server, client)
                    # The checkpoint before is as it was, and nothing of the other is left.
                    assert names(data) == before
                    # Pushes and pulls go on.
                    weights = push(run, 3)
                    assert (client.pull("m", track="raw", framework="numpy")["w"] == weights).all()
                    ballast.unlink()
                    saved = client.create_checkpoint("m")
                    assert saved.version.step == 3
                    assert names(data) == before | {saved.name} and first.name in before
            server.kill()
            server.start()
            with ema_client.Client(server.address) as client:
                pulled = client.pull("m", track="raw", framework="numpy")
                assert pulled.version.step == 3
                assert (pulled["w"] == weights).all()


def test_a_start_on_a_full_disk_says_so(tmp_path):
    with small_disk("tmpfs", tmp_path) as disk:
        data = disk / "data"
        with ServerProcess(tmp_path, *LISTEN, data_dir=data) as server:
            server.kill()
            ballast = fill(disk, 0)
            with pytest.raises(ServerError, match="the data directory is full: the server needs"):
                server.start()
            ballast.unlink()
            server.start()


@pytest.mark.slow
def test_a_data_directory_that_goes_and_comes_back(tmp_path):
    data, gone = tmp_path / "data", tmp_path / "gone"
    weights = {"w": np.ones(1000, np.float32)}
    with ServerProcess(tmp_path, *LISTEN, data_dir=data) as server:
        with ema_client.Client(server.address, timeout_s=60) as client:
            client.create_model("m", weights, tracks={"raw": "copy"})
            with client.open_run("m") as run:
                run.push(step=1, weights=weights)
                client.create_checkpoint("m")
                data.rename(gone)
                run.push(step=2, weights=weights)
                for call in (
                    lambda: client.create_checkpoint("m"),
                    lambda: client.set_label("m", "best"),
                    lambda: client.delete_model("m", purge=True),
                ):
                    begin = time.monotonic()
                    with pytest.raises(ema_client.UnavailableError) as error:
                        call()
                    # Not tried again until the time is over.
                    assert error.value.reason == "STORE_READ_ONLY"
                    assert time.monotonic() - begin < 10
                assert value(scrape(server), "ema_checkpoint_store_read_only") == 1
                assert check_health(server.address, "checkpoints") == NOT_SERVING
                assert check_health(server.address, "") == SERVING
                assert server.log().count("checkpoint failed") == 1
                gone.rename(data)
                wait_for(
                    lambda: check_health(server.address, "checkpoints") == SERVING,
                    "it is back",
                )
                assert value(scrape(server), "ema_checkpoint_store_read_only") == 0
                assert client.create_checkpoint("m").version.step == 2
