# SPDX-License-Identifier: Apache-2.0
"""`cmake --install --component server`: a tree that works wherever it is moved, and its systemd unit."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess

import ema_client
import numpy as np
import pytest
from server_process import ROOT, ServerProcess

pytestmark = pytest.mark.slow
# What every Debian has: glibc, and the compiler's libraries.
SYSTEM = (
    r"(libc|libm|libdl|librt|libutil|libpthread|libresolv|libgcc_s|libstdc\+\+|ld-linux-x86-64)\.so"
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """It has been moved, and where it was nothing is left."""
    build = pathlib.Path(os.environ.get("EMA_BUILD_DIR") or ROOT / "build/release")
    folder = tmp_path_factory.mktemp("installed")
    command = ["cmake", "--install", build, "--component", "server", "--strip"]
    done = subprocess.run(
        [*command, "--prefix", folder / "first"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (folder / "first").rename(folder / "moved")
    return folder / "moved"


def test_it_has_what_is_needed_and_nothing_else(tree):
    files = [path for path in tree.rglob("*") if path.is_file() and not path.is_symlink()]
    folders = {path.relative_to(tree).parts[:2] for path in files}
    assert folders == {
        ("bin", "ema-server"),
        ("bin", "emactl"),
        ("lib", "ema"),
        ("lib", "systemd"),
        ("share", "doc"),
    }
    assert sorted(path.name for path in (tree / "bin").iterdir()) == ["ema-server", "emactl"]
    assert sum(path.stat().st_size for path in files) < 60e6


@pytest.mark.parametrize("program", ["ema-server", "emactl"])
def test_programs_find_their_libraries_beside_themselves(tree, program):
    done = subprocess.run(
        ["ldd", tree / "bin" / program],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "not found" not in done.stdout
    found = dict(re.findall(r"(\S+) => (\S+)", done.stdout))
    elsewhere = {
        name
        for name, path in found.items()
        if not pathlib.Path(path).resolve().is_relative_to(tree)
    }
    assert not [name for name in elsewhere if not re.match(SYSTEM, name)]


def test_libcurl_is_beside_them_too(tree, tmp_path):
    """With what it needs. It is loaded before the API server is asked, which is not there."""
    group = [
        "--device",
        "cpu",
        "--group",
        "g",
        "--advertise",
        "127.0.0.1:1",
        "--data-dir",
        tmp_path,
    ]
    done = subprocess.run(
        [tree / "bin/ema-server", *group, "--listen", "127.0.0.1:0", "--allow-unauthenticated"]
        + ["--kubernetes", "--kubernetes-api=http://127.0.0.1:1", "--kubernetes-namespace=ema"],
        env={"PATH": os.environ["PATH"], "LD_DEBUG": "libs"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    loaded = re.findall(r"calling init: (\S+)", done.stderr)
    elsewhere = [path for path in loaded if not pathlib.Path(path).is_relative_to(tree)]
    assert any("libcurl" in path for path in loaded), done.stderr
    assert not [path for path in elsewhere if not re.match(SYSTEM, pathlib.Path(path).name)]


def test_it_serves(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("EMA_SERVER_BIN", str(tree / "bin/ema-server"))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    weights = {"w": np.arange(4, dtype=np.float32)}
    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address) as client:
            client.create_model("m", weights, tracks={"raw": "copy"})
            with client.open_run("m") as run:
                run.push(step=1, weights=weights)
            assert np.array_equal(
                client.pull("m", track="raw", framework="numpy")["w"], weights["w"]
            )
        listed = subprocess.run(
            [tree / "bin/emactl", "--server", server.address, "list"],
            capture_output=True,
            text=True,
        )
        assert listed.returncode == 0 and "m" in listed.stdout
        assert server.stop() == 0


def test_the_systemd_unit_is_right(tree, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze: the machine has no systemd")
    text = (tree / "lib/systemd/system/ema-server.service").read_text()
    assert "ExecStart=/opt/ema/bin/ema-server\n" in text
    unit = tmp_path / "ema-server.service"
    # It is verified with a program that is there.
    unit.write_text(text.replace("/opt/ema", str(tree)))
    verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert verified.returncode == 0 and "ema-server" not in verified.stderr, verified.stderr
    safe = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", unit],
        capture_output=True,
        text=True,
    )
    assert safe.returncode == 0, safe.stdout
    stop_s = re.search(r"^TimeoutStopSec=(\d+)min$", text, re.MULTILINE)
    assert stop_s is not None and int(stop_s[1]) * 60 > 60
