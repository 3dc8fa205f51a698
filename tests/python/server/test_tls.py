# SPDX-License-Identifier: Apache-2.0
"""Trainers, evaluators and emactl over TLS, with certificates on both sides."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import pathlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import ema_client
import numpy as np
import pytest
import torch
from ema_client._client.url import split_url
from http_pages import LISTEN, scrape, value
from server_process import ROOT, ServerProcess
from testing import step_until, wait_for

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A CA that is the server's certificate, and a trainer's certificate that it has signed."""
    folder = tmp_path_factory.mktemp("tls")
    paths = {name: str(folder / name) for name in ("ca", "ca_key", "cert", "key", "request")}

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)

    openssl(
        *(
            "req",
            "-x509",
            *CURVE,
            "-subj",
            "/CN=ca",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ),
        *("-keyout", paths["ca_key"], "-out", paths["ca"]),
    )
    openssl(
        *("req", "-new", *CURVE, "-subj", "/CN=trainer"),
        *("-keyout", paths["key"], "-out", paths["request"]),
    )
    openssl(
        *(
            "x509",
            "-req",
            "-in",
            paths["request"],
            "-CA",
            paths["ca"],
            "-CAkey",
            paths["ca_key"],
        ),
        *("-CAcreateserial", "-out", paths["cert"]),
    )
    return paths


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, str]
) -> Iterator[ServerProcess]:
    with ServerProcess(
        tmp_path_factory.mktemp("server"),
        *(
            "--tls-cert",
            files["ca"],
            "--tls-key",
            files["ca_key"],
            "--tls-client-ca",
            files["ca"],
        ),
    ) as process:
        yield process
        assert process.stop() == 0, process.log()


@pytest.fixture
def environment(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Names the trainer's files, as a container's configuration would."""
    monkeypatch.setenv("EMA_TLS_CA", files["ca"])
    monkeypatch.setenv("EMA_TLS_CERT", files["cert"])
    monkeypatch.setenv("EMA_TLS_KEY", files["key"])


@pytest.mark.usefixtures("environment")
def test_a_trainer_and_an_evaluator_work_as_without(server: ServerProcess) -> None:
    url = f"emas://{server.address}/net"
    net = torch.nn.Linear(300, 200)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ema = ema_client.attach(net, optimizer, url, half_life="2ba")
    for _ in range(5):
        net(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ema.close()
    assert ema.stats.skipped == 0
    pulled = ema_client.pull(url, track="ema")
    assert pulled.version.step == 5
    with ema_client.averaged(net, url):
        assert torch.equal(net.weight, torch.as_tensor(pulled["weight"]))


def test_a_watch_has_the_files_of_its_client(server: ServerProcess, files: dict[str, str]) -> None:
    tls = ema_client.Tls(ca_file=files["ca"], certificate_file=files["cert"], key_file=files["key"])
    weights = {"w": torch.ones(3)}
    with ema_client.Client(f"tls:{server.address}", tls=tls, timeout_s=20) as client:
        client.create_model("watched", weights, tracks={"ema": "2ba"})
        with client.open_run("watched") as run:
            run.push(step=1, weights=weights)
        assert next(client.watch("watched", after=0, timeout_s=20)).step == 1


@pytest.mark.usefixtures("environment")
def test_emactl_takes_the_same_files(server: ServerProcess) -> None:
    output = subprocess.run(
        [
            ROOT / "build/release/client/cli/emactl",
            "--server",
            f"emas://{server.address}",
            "--json",
            "list",
        ],
        check=True,
        capture_output=True,
    ).stdout
    assert isinstance(json.loads(output), (list, dict))


def test_a_handshake_that_fails_prints_nothing_but_the_error(
    server: ServerProcess, files: dict[str, str]
) -> None:
    def stderr_of(*command: object) -> str:
        # Without our certificate.
        without = {name: text for name, text in os.environ.items() if not name.startswith("EMA_")}
        without.pop("GRPC_VERBOSITY", None)
        arguments = list(map(str, command))
        return subprocess.run(arguments, env=without, capture_output=True, text=True).stderr

    emactl = (
        ROOT / "build/release/client/cli/emactl",
        "--server",
        f"tls:{server.address}",
    )
    said = stderr_of(*emactl, "--tls-ca", files["ca"], "--timeout", "1s", "--json", "list")
    assert json.loads(said)["error"]["code"] == "UNAVAILABLE"
    program = f"""
import ema_client
try:
    ema_client.Client("emas://{server.address}", timeout_s=1).models()
except ema_client.EmaError:
    print("refused")
"""
    assert stderr_of(sys.executable, "-c", program) == ""


def test_files_may_be_given_to_the_client(server: ServerProcess, files: dict[str, str]) -> None:
    tls = ema_client.Tls(files["ca"], files["cert"], files["key"])
    with ema_client.Client(f"emas://{server.address}", timeout_s=30, tls=tls) as client:
        client.create_model("m", {"w": np.zeros(4, np.float32)}, tracks={"ema": "1ba"})


def test_who_has_no_certificate_does_not_get_in(
    server: ServerProcess, files: dict[str, str]
) -> None:
    for address, tls in [
        (f"emas://{server.address}", ema_client.Tls(files["ca"])),
        (
            f"emas://{server.address}",
            ema_client.Tls(),
        ),  # The system does not know the CA.
        (server.address, ema_client.Tls()),
    ]:
        with ema_client.Client(address, timeout_s=1, tls=tls) as client:
            with pytest.raises(ema_client.EmaError):
                client.models()


Sign = Callable[[str, int], str]


@pytest.fixture(scope="module")
def sign(tmp_path_factory: pytest.TempPathFactory, files: dict[str, str]) -> Sign:
    """Makes a certificate for the trainer's key, by name, that is good in January of a year."""
    folder = tmp_path_factory.mktemp("signed")
    (folder / "index").touch()
    config = folder / "config"
    config.write_text(f"""
[ca]
default_ca = ours
[ours]
database = {folder}/index
new_certs_dir = {folder}
certificate = {files["ca"]}
private_key = {files["ca_key"]}
rand_serial = yes
unique_subject = no
default_md = sha256
policy = any
[any]
commonName = supplied
""")

    def make(name: str, year: int) -> str:
        path = str(folder / name)
        subprocess.run(
            ["openssl", "ca", "-batch", "-notext", "-config", config]
            + ["-startdate", f"{year}0101000000Z", "-enddate", f"{year}0201000000Z"]
            + ["-in", files["request"], "-out", path],
            check=True,
            capture_output=True,
        )
        return path

    return make


@pytest.fixture(scope="module")
def expired(sign: Sign) -> str:
    return sign("expired", 2020)


def test_a_certificate_that_is_not_good_now_does_not_get_in(
    server: ServerProcess, files: dict[str, str], expired: str, sign: Sign
) -> None:
    for certificate, said in (
        (files["cert"], ""),
        (expired, r"expired\" \(CN = trainer, issued by .*\) has expired at 2020-02-01 00:00:00"),
        (
            sign("early", 2049),
            r"early\" \(CN = trainer, issued by .*valid from 2049-01-01 00:00:00",
        ),
    ):
        tls = ema_client.Tls(files["ca"], certificate, files["key"])
        timeout_s = 1 if said else 30
        with ema_client.Client(f"emas://{server.address}", timeout_s=timeout_s, tls=tls) as client:
            if not said:
                client.models()
            else:
                with pytest.raises(ema_client.UnavailableError, match=said):
                    client.models()


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("why", ["expired", "foreign"])
def test_a_trainer_whose_certificate_is_no_longer_good_warns_again(
    tmp_path: pathlib.Path,
    files: dict[str, str],
    expired: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    why: str,
) -> None:
    """In a training, as of everything that a person must mend."""
    certificate = tmp_path / "certificate"
    shutil.copy(files["cert"], certificate)
    monkeypatch.setenv("EMA_TLS_CERT", str(certificate))
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.weight.grad = torch.ones_like(net.weight)

    def flags(client_ca: str) -> list[str]:
        return [
            *("--tls-cert", files["ca"], "--tls-key", files["ca_key"]),
            *("--tls-client-ca", client_ca),
        ]

    first = ServerProcess(tmp_path / "first", *flags(files["ca"]))
    with first:
        ema = ema_client.attach(net, optimizer, f"emas://{first.address}/m", max_wait_s=1)
        optimizer.step()
        ema.wait_pushed()
    client_ca, said = files["ca"], "has expired at 2020-02-01"
    if why == "expired":
        shutil.copy(expired, certificate)
    else:
        client_ca = str(make_pair(tmp_path, "other", 1)[0])
        said = "may not accept the client certificate"
    second = ServerProcess(tmp_path / "second", *flags(client_ca))
    second.start(port=first.port)
    try:
        problem = "pushes will not resume until this is fixed: "
        step_until(lambda: problem in caplog.text, optimizer.step)
        (told,) = [r for r in caplog.records if problem in r.getMessage()]
        assert told.levelno == logging.WARNING and said in told.getMessage()
    finally:
        ema.close(timeout_s=1)
        second.stop()


EXPIRY = "ema_tls_certificate_expiry_timestamp_seconds"
REJECTED = "ema_tls_files_rejected"


def make_pair(folder: pathlib.Path, name: str, days: int) -> tuple[pathlib.Path, pathlib.Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", *CURVE, "-subj", f"/CN={name}", "-days", str(days)]
        + ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    return certificate, key


def test_what_the_server_may_reject_is_named(
    server: ServerProcess, files: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """It closes the connection without a word."""
    foreign = ema_client.Tls(files["ca"], *map(str, make_pair(tmp_path, "foreign", 1)))
    for tls, said in (
        (ema_client.Tls(files["ca"]), "may ask for a client certificate, and none is set"),
        (
            foreign,
            r"may not accept the client certificate .*\(CN = foreign, issued by CN = foreign",
        ),
    ):
        with ema_client.Client(f"emas://{server.address}", timeout_s=5, tls=tls) as client:
            with pytest.raises(ema_client.UnavailableError, match=said):
                client.models()


def seconds_of(time: str) -> float:
    return datetime.datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


def end_of(certificate: pathlib.Path) -> float:
    command = ["openssl", "x509", "-noout", "-enddate", "-dateopt", "iso_8601", "-in", certificate]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return seconds_of(text.removeprefix("notAfter="))


def tls_events(server: ServerProcess) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in server.log_path.read_text().splitlines()]
    return [event for event in events if event["event"].startswith("TLS files")]


def test_a_renewal_that_comes_in_two_parts_refuses_nobody(tmp_path: pathlib.Path) -> None:
    old, old_key = make_pair(tmp_path, "old", 3)
    new, new_key = make_pair(tmp_path, "new", 9)
    used, used_key = tmp_path / "tls.crt", tmp_path / "tls.key"
    used.write_bytes(old.read_bytes())
    used_key.write_bytes(old_key.read_bytes())

    def is_let_in(ca: pathlib.Path) -> bool:
        tls = ema_client.Tls(str(ca))
        with ema_client.Client(f"emas://{server.address}", timeout_s=10, tls=tls) as client:
            try:
                client.models()
            except ema_client.EmaError:
                return False
            return True

    flags = ("--tls-cert", str(used), "--tls-key", str(used_key), "--log-format", "json", *LISTEN)
    with ServerProcess(tmp_path / "server", *flags) as server:
        metrics = scrape(server)
        assert (value(metrics, EXPIRY), value(metrics, REJECTED)) == (end_of(old), 0)

        used_key.write_bytes(new_key.read_bytes())
        wait_for(lambda: value(scrape(server), REJECTED) == 1, "the key is rejected")
        assert value(scrape(server), EXPIRY) == end_of(old)
        for _ in range(20):
            assert is_let_in(old)
        (rejected,) = tls_events(server)
        assert rejected["level"] == "error" and str(used_key) in rejected["error"]

        used.write_bytes(new.read_bytes())
        wait_for(lambda: value(scrape(server), REJECTED) == 0, "the pair is taken over")
        assert value(scrape(server), EXPIRY) == end_of(new)
        wait_for(lambda: is_let_in(new), "new connections go by it")
        _, taken = tls_events(server)
        assert (taken["level"], taken["event"]) == ("info", "TLS files reloaded")
        assert seconds_of(taken["not_after"]) == end_of(new)


def test_who_speaks_plainly_is_an_event_of_the_log(
    tmp_path: pathlib.Path, files: dict[str, str]
) -> None:
    flags = ("--tls-cert", files["ca"], "--tls-key", files["ca_key"], "--log-format", "json")
    with ServerProcess(tmp_path, *flags) as server:
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as plain:
                plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
                with contextlib.suppress(ConnectionResetError):
                    while plain.recv(1 << 16):
                        pass
    events = [json.loads(line) for line in server.log_path.read_text().splitlines()]
    told = [event for event in events if event["event"] == "gRPC"]
    assert told and len(told) < 50, "a storm has fewer lines than connections"
    for event in told:
        assert event["level"] == "warn" and event["message"] and event["file"].endswith(".cc")
        assert event["line"] > 0 and event["more_before"] >= 0


def test_a_missing_file_is_named(server: ServerProcess) -> None:
    tls = ema_client.Tls(ca_file="/none/ca.pem")
    with ema_client.Client(f"emas://{server.address}", tls=tls) as client:
        with pytest.raises(ema_client.InvalidArgumentError, match="tls.ca_file.*/none/ca.pem"):
            client.models()


def test_addresses() -> None:
    assert split_url("emas://host/m") == ("emas://host", "m")
    assert split_url("ema://a:1,b:2/m") == ("ema://a:1,b:2", "m")
    assert split_url("ema+unix:///run/ema.sock/m") == ("unix:/run/ema.sock", "m")
    for address, found in (
        ("emas://127.0.0.1", "tls:127.0.0.1:50051"),
        ("ema://[::1]:7/", r"\[::1\]:7"),
    ):
        with ema_client.Client(address, timeout_s=0.05) as client:
            with pytest.raises(ema_client.EmaError, match=f"server {found}"):
                client.models()
