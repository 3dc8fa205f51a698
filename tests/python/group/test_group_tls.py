# SPDX-License-Identifier: Apache-2.0
"""A group whose servers call each other over TLS, with certificates of a private CA."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import ema_client
import numpy as np
import pytest
from server_group import ServerGroup

pytestmark = pytest.mark.skipif(not shutil.which("etcd"), reason="etcd is not installed")

WEIGHTS = {f"t{i}": np.full((5, 7), i, np.float32) for i in range(4)}


@pytest.fixture
def certificate(tmp_path: pathlib.Path) -> tuple[str, str]:
    """A certificate of the servers, which is its own CA, and its key."""
    paths = str(tmp_path / "ca.pem"), str(tmp_path / "ca.key")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=ema"
    command += f" -addext subjectAltName=IP:127.0.0.1 -out {paths[0]} -keyout {paths[1]}"
    subprocess.run(command.split(), check=True, capture_output=True)
    return paths


def test_clients_need_no_certificate_of_the_servers_ca(tmp_path, certificate):
    ca, key = certificate
    flags = ("--tls-cert", ca, "--tls-key", key, "--group-ca", ca)
    with (
        ServerGroup(tmp_path / "group", 2, *flags) as group,
        ema_client.Client(
            f"emas://{group.address}", tls=ema_client.Tls(ca), timeout_s=60
        ) as client,
    ):
        client.create_model("m", WEIGHTS, tracks={"raw": "copy"})
        with client.open_run("m") as run:
            run.push(step=3, weights=WEIGHTS)
        assert sorted(client.pull("m", track="raw", framework="numpy")) == sorted(WEIGHTS)
