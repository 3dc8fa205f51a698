# SPDX-License-Identifier: Apache-2.0
"""A read replica: a server that follows another one, as processes that are killed."""

from __future__ import annotations

import pathlib
import subprocess
import threading
from collections.abc import Iterator

import ema_client
import numpy as np
import pytest
from http_pages import LISTEN, get, scrape, url_of, value
from server_process import ServerProcess, server_binary
from testing import EMACTL, assert_same_bits, wait_for

SHAPES = {"weight": (300, 200), "bias": (200,)}
TRACKS = {
    "ema": "4ba",
    "mean": {"mean_of_last": 3},
    "wide": {"sigma_rel": 0.1, "snapshot_interval": "5ba", "dtype": "float64"},
    "part": {"half_life": "8ba", "tensor_rules": {"weight": "ignore"}},
    "raw": "copy",
}


def weights_of(step: int) -> dict[str, np.ndarray]:
    return {name: np.full(shape, step, np.float32) for name, shape in SHAPES.items()}


def push(client: ema_client.Client, steps: range) -> ema_client.Version:
    with client.open_run("m", timeout_s=60) as run:
        for step in steps:
            version = run.push(step=step, weights=weights_of(step))
    return version


@pytest.fixture
def source(tmp_path: pathlib.Path) -> Iterator[ServerProcess]:
    """The followed server, with a model that has no version."""
    with ServerProcess(tmp_path / "source", data_dir=tmp_path / "data") as process:
        with ema_client.Client(process.address) as client:
            client.create_model("m", weights_of(0), tracks=TRACKS)
        yield process


class Evaluator:
    """Pulls each version that the follower reports, and checks that all of it is of one step."""

    def __init__(self, address: str) -> None:
        self.steps: list[int] = []
        self.ids: list[tuple[int, int]] = []
        self.problem: Exception | None = None
        self._address = address
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with ema_client.Client(self._address, timeout_s=100) as client:
                for version in client.watch("m", after=0):
                    weights = client.pull("m", track="raw", framework="numpy")
                    assert_same_bits(weights_of(weights.version.step), weights)
                    assert weights.version.step >= version.step
                    self.ids.append((version.incarnation, version.number))
                    self.steps.append(weights.version.step)
        except Exception as error:  # The test's thread shows it.
            self.problem = error

    def wait_for(self, step: int) -> None:
        wait_for(
            lambda: self.problem is not None or step in self.steps, f"step {step}", timeout_s=100
        )
        if self.problem is not None:
            raise self.problem


def assert_same_newest(source: ServerProcess, follower: ServerProcess) -> None:
    with (
        ema_client.Client(source.address, timeout_s=60) as there,
        ema_client.Client(follower.address, timeout_s=60) as here,
    ):
        for track in TRACKS:
            expected = there.pull("m", track=track, framework="numpy")
            got = here.pull("m", track=track, framework="numpy")
            assert got.version == expected.version
            assert_same_bits(expected, got)


def test_readers_of_a_follower_survive_kills_of_both_servers(source, tmp_path):
    with ServerProcess(tmp_path / "follower", "--follow", source.url("m")) as follower:
        evaluator = Evaluator(follower.address)
        with ema_client.Client(source.address, timeout_s=60) as trainer:
            push(trainer, range(1, 21))
            evaluator.wait_for(20)
            assert_same_newest(source, follower)

            follower.kill()
            push(trainer, range(21, 26))
            follower.start(port=follower.port)
            evaluator.wait_for(25)

            trainer.create_checkpoint("m")
            push(trainer, range(26, 29))
            evaluator.wait_for(28)
        source.kill()
        # It serves the versions that it has.
        with ema_client.Client(follower.address) as reader:
            assert reader.pull("m", track="ema").version.step == 28
        wait_for(lambda: "cannot follow" in follower.log_path.read_text(), "it logs the outage")
        source.start(port=source.port)
        with ema_client.Client(source.address, timeout_s=60) as trainer:
            assert trainer.model("m").latest.step == 25
            push(trainer, range(26, 31))
        evaluator.wait_for(30)
        assert_same_newest(source, follower)
        assert evaluator.ids == sorted(set(evaluator.ids))
        wait_for(lambda: "following again" in follower.log_path.read_text(), "it logs the end")
        assert follower.stop() == 0, follower.log()


def test_a_follower_is_ready_with_its_first_version_and_refuses_changes(source, tmp_path):
    with ServerProcess(tmp_path / "follower", *LISTEN, "--follow", source.url("m")) as follower:
        url = url_of(follower)
        code, text = get(url, "/readyz")
        assert code == 503 and f"no version of {source.url('m')} has been copied yet" in text
        with ema_client.Client(source.address) as trainer:
            push(trainer, range(1, 2))
        wait_for(lambda: get(url, "/readyz")[0] == 200, "the follower is ready")
        assert value(scrape(follower), "ema_follow_contact_age_seconds") >= 0
        assert value(scrape(follower), "ema_model_version", model="m") == 1
        with ema_client.Client(follower.address) as client:
            for refused in (
                lambda: client.create_model("n", weights_of(0), tracks=TRACKS),
                lambda: client.open_run("m"),
                lambda: client.delete_model("m"),
                lambda: client.report_metric("m", 1, 0.5),
            ):
                with pytest.raises(
                    ema_client.FailedPreconditionError, match="is read-only"
                ) as info:
                    refused()
                assert source.url("m") in str(info.value)
        for command in ("info", "list", "versions m", "health"):
            arguments = [EMACTL, "--server", follower.address, *command.split()]
            result = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
            assert result.returncode == 0, result.stderr
            assert command == "health" or "m" in result.stdout


def test_a_follower_presents_its_token_over_tls(tmp_path):
    ca, key, tokens, token = (tmp_path / name for name in ("ca", "key", "tokens", "token"))
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=ema"
    command += f" -addext subjectAltName=IP:127.0.0.1 -out {ca} -keyout {key}"
    subprocess.run(command.split(), check=True, capture_output=True)
    tokens.write_text(f"trainer {'t' * 20}\nevaluator {'e' * 20} m\n")
    token.write_text(f"{'e' * 20}\n")
    tls = ("--tls-cert", str(ca), "--tls-key", str(key), "--auth-tokens", str(tokens))
    follow = ("--follow-ca", str(ca), "--follow-token-file", str(token))
    with (
        ServerProcess(tmp_path / "source", *tls, data_dir=tmp_path / "data") as source,
        ServerProcess(
            tmp_path / "follower", *follow, "--follow", f"emas://{source.address}/m"
        ) as follower,
        ema_client.Client(
            f"emas://{source.address}", tls=ema_client.Tls(str(ca)), token="t" * 20
        ) as trainer,
        ema_client.Client(follower.address, timeout_s=60) as reader,
    ):
        trainer.create_model("m", weights_of(0), tracks=TRACKS)
        pushed = push(trainer, range(1, 4))
        assert reader.wait_for("m", step=3, timeout_s=60) == pushed
        assert_same_bits(weights_of(3), reader.pull("m", track="raw", framework="numpy"))

        token.write_text(f"{'x' * 20}\n")
        follower.stop()
        follower.start(port=follower.port)
        wait_for(lambda: "cannot follow" in follower.log_path.read_text(), "it logs the error")
        with pytest.raises(ema_client.EmaError, match="has not been copied yet: .*token"):
            reader.pull("m", track="raw", timeout_s=3)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--data-dir", "data"), "--data-dir: given with --follow"),
        (("--group", "g", "--etcd", "http://a", "--advertise", "a:1"), "--group: given with"),
        (("--follow-ca", "ca"), "--follow-ca: given, but the URL of --follow"),
    ],
)
def test_options_that_make_no_sense_are_refused(flags, problem):
    command = [server_binary(), "--follow", "ema://127.0.0.1:1/m", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert problem in result.stderr
