# SPDX-License-Identifier: Apache-2.0
"""Bearer tokens and their roles, with real processes: trainers, evaluators, emactl, changed files."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
from collections.abc import Iterator

import ema_client
import numpy as np
import pytest
import torch
from server_process import ROOT, ServerProcess
from testing import wait_for

TRAINER = "trainer-6f1d2c70b4e94b0f"
EVALUATOR = "evaluator-0d0f6f0c0b3a4a8c"
ADMIN = "admin-51e3a0b2c7d84f60"
WEIGHTS = {"w": np.arange(1000, dtype=np.float32)}


def write(path: pathlib.Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(path)


@pytest.fixture
def tokens(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "tokens"
    write(path, f"trainer {TRAINER} digits-*\nevaluator {EVALUATOR}\nadmin {ADMIN}\n")
    return path


@pytest.fixture
def server(tmp_path: pathlib.Path, tokens: pathlib.Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        tmp_path / "server", "--auth-tokens", str(tokens), data_dir=tmp_path / "data"
    ) as process:
        yield process
        assert process.stop() == 0, process.log()
        for token in (TRAINER, EVALUATOR, ADMIN):
            assert token not in process.log_path.read_text()


def client_of(server: ServerProcess, token: str) -> ema_client.Client:
    return ema_client.Client(server.address, token=token, timeout_s=20)


def emactl(
    server: ServerProcess, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    binary = ROOT / "build/release/client/cli/emactl"
    return subprocess.run(
        [os.environ.get("EMACTL_BIN", binary), "--server", server.address, "--json", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_each_does_what_its_role_may(server: ServerProcess) -> None:
    with client_of(server, TRAINER) as trainer, client_of(server, EVALUATOR) as evaluator:
        trainer.create_model("digits-1", WEIGHTS, tracks={"ema": "10ba"})
        with trainer.open_run("digits-1") as run:
            version = run.push(step=1, weights=WEIGHTS)
        pulled = evaluator.pull("digits-1", track="ema", framework="numpy")
        np.testing.assert_array_equal(pulled["w"], WEIGHTS["w"])
        assert pulled.version == version
        evaluator.report_metric("digits-1", version, 0.5)

        with pytest.raises(ema_client.PermissionDeniedError, match="expected trainer") as refused:
            evaluator.open_run("digits-1")
        assert refused.value.reason == "NOT_ALLOWED"
        with pytest.raises(ema_client.PermissionDeniedError, match='model "faces"'):
            trainer.create_model("faces", WEIGHTS, tracks={"ema": "10ba"})
        with pytest.raises(ema_client.PermissionDeniedError, match="expected admin"):
            trainer.delete_model("digits-1")
        with client_of(server, ADMIN) as admin:
            admin.delete_model("digits-1")
            assert not admin.models()


@pytest.mark.parametrize("token", ["", "admin", "admin-51e3a0b2c7d84f61"])
def test_without_a_known_token_nothing_goes(server: ServerProcess, token: str) -> None:
    with client_of(server, token) as client:
        with pytest.raises(ema_client.UnauthenticatedError) as refused:
            client.models()
        assert refused.value.reason == "BAD_TOKEN"
        with pytest.raises(ema_client.UnauthenticatedError):
            client.create_model("digits-1", WEIGHTS, tracks={"ema": "10ba"})
    assert token == "" or token not in server.log_path.read_text()


@pytest.mark.parametrize("variable", ["EMA_TOKEN", "EMA_TOKEN_FILE"])
def test_an_empty_variable_is_named_where_a_token_is_missing(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "")
    problem = f"no token, .*; set, but empty, and so not used: {variable}"
    with ema_client.Client(server.address, timeout_s=20) as client:
        with pytest.raises(ema_client.UnauthenticatedError, match=problem):
            client.models()
    client_of(server, EVALUATOR).models()


def test_a_new_average_needs_an_admins_token(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMA_TOKEN", TRAINER)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    url = server.url("digits-new")
    with ema_client.attach(model, optimizer, url, half_life="10ba") as ema:
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        assert ema.wait_pushed() is not None
    with pytest.raises(
        ema_client.PermissionDeniedError, match="use an admin's token, or"
    ) as refused:
        ema_client.attach(model, optimizer, url, half_life="10ba", existing="new")
    assert refused.value.reason == "NOT_ALLOWED"


def test_attach_takes_the_token_of_the_environment(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ema_client.UnauthenticatedError):
        ema_client.attach(model, optimizer, server.url("digits-2"), half_life="10ba")
    monkeypatch.setenv("EMA_TOKEN", TRAINER)
    with ema_client.attach(model, optimizer, server.url("digits-2"), half_life="10ba") as ema:
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        version = ema.wait_pushed()
    assert version is not None and version.step == 1
    pulled = ema_client.pull(server.url("digits-2"), track="ema")
    assert torch.equal(pulled["weight"], model.weight.detach())


def test_changed_files_are_taken_over_on_both_sides(
    server: ServerProcess, tokens: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    new = "trainer-ffffffffffffffff"
    mine = tmp_path / "mine"
    write(mine, TRAINER + "\n")
    with ema_client.Client(server.address, token_file=str(mine), timeout_s=20) as trainer:
        trainer.create_model("digits-3", WEIGHTS, tracks={"ema": "10ba"})
        with trainer.open_run("digits-3") as run:
            run.push(step=1, weights=WEIGHTS)
            write(tokens, f"trainer {new} digits-*\n")

            def is_refused() -> bool:
                try:
                    trainer.model("digits-3")
                except ema_client.UnauthenticatedError:
                    return True
                return False

            wait_for(is_refused, "the old token is refused", 30)
            with pytest.raises(ema_client.UnauthenticatedError):
                run.push(step=2, weights=WEIGHTS)
            write(mine, new)
            assert run.push(step=3, weights=WEIGHTS).number == 2
    # A file that is wrong is not taken over, and the log says so, without what is in it.
    write(tokens, f"nobody {ADMIN}")
    wait_for(lambda: "reload failed" in server.log_path.read_text(), "the log says so", 30)
    with client_of(server, new) as trainer:
        assert trainer.model("digits-3").name == "digits-3"
    write(tokens, f"admin {new}")
    wait_for(
        lambda: "token file reloaded" in server.log_path.read_text().split("reload failed")[1],
        "the file is taken over",
        30,
    )


def test_a_watch_has_the_token_of_its_client(server: ServerProcess) -> None:
    with client_of(server, TRAINER) as trainer, client_of(server, EVALUATOR) as evaluator:
        trainer.create_model("digits-7", WEIGHTS, tracks={"ema": "10ba"})
        with trainer.open_run("digits-7") as run:
            run.push(step=1, weights=WEIGHTS)
        assert next(evaluator.watch("digits-7", after=0, timeout_s=20)).step == 1


def test_a_watch_ends_when_its_token_is_taken_away(
    server: ServerProcess, tokens: pathlib.Path
) -> None:
    binary = os.environ.get("EMACTL_BIN", ROOT / "build/release/client/cli/emactl")
    with client_of(server, TRAINER) as trainer, contextlib.ExitStack() as stack:
        trainer.create_model("digits-5", WEIGHTS, tracks={"ema": "10ba"})
        watch = stack.enter_context(
            subprocess.Popen(
                [binary, "--server", server.address, "--json", "watch", "digits-5", "--after", "0"],
                env=os.environ | {"EMA_TOKEN": EVALUATOR},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(watch.kill)
        assert watch.stdout is not None and watch.stderr is not None
        with trainer.open_run("digits-5") as run:
            run.push(step=1, weights=WEIGHTS)
            assert '"step":1' in watch.stdout.readline().replace(" ", "")
            # A file that says the same of it ends nothing.
            write(tokens, f"trainer {TRAINER} digits-*\nevaluator {EVALUATOR}\n")
            wait_for(
                lambda: server.log_path.read_text().count("token file reloaded") == 1,
                "the file is taken over",
                30,
            )
            run.push(step=2, weights=WEIGHTS)
            assert '"step":2' in watch.stdout.readline().replace(" ", "")
            write(tokens, f"trainer {TRAINER} digits-*\nevaluator {EVALUATOR} faces\n")
            assert watch.wait(timeout=30) == 4
            assert json.loads(watch.stderr.read())["error"]["reason"] == "BAD_TOKEN"
            assert run.push(step=3, weights=WEIGHTS).number == 3


def test_who_is_refused_and_what_operators_do_is_on_record(
    server: ServerProcess,
) -> None:
    with client_of(server, "wrong-wrong-wrong") as nobody, client_of(server, ADMIN) as admin:
        for _ in range(50):
            with pytest.raises(ema_client.UnauthenticatedError):
                nobody.models()
        admin.create_model("digits-6", WEIGHTS, tracks={"ema": "10ba"})
        assert emactl(server, "log-level", "error", EMA_TOKEN=ADMIN).returncode == 0
        admin.update_model("digits-6", tracks={"slow": "100ba"})
        with pytest.raises(ema_client.InvalidArgumentError):
            admin.update_model("digits-6", tracks={"no name": "100ba"})
        admin.delete_model("digits-6")
    with client_of(server, TRAINER) as trainer, pytest.raises(ema_client.PermissionDeniedError):
        trainer.delete_model("digits-6")
    wait_for(lambda: "rpc=DeleteModel" in server.log_path.read_text(), "the log has come so far")
    lines = server.log_path.read_text().splitlines()
    refused = [line for line in lines if " call refused " in line]
    assert 10 <= len(refused) < 50
    for word in ("rpc=ListModels", "peer=ipv4:127.0.0.1:", "reason=BAD_TOKEN"):
        assert word in refused[0]
    created = next(line for line in lines if " model created " in line)
    assert "peer=ipv4:127.0.0.1:" in created and "role=admin" in created
    calls = [line for line in lines if " operator call " in line]
    assert [line.split("rpc=")[1].split()[0] for line in calls] == [
        "SetLogLevel",
        "UpdateModel",
        "UpdateModel",
        "DeleteModel",
    ]
    for line in calls:
        assert "peer=ipv4:127.0.0.1:" in line and "role=admin" in line
    assert all("model=digits-6" in line for line in calls[1:])
    assert "status=OK" in calls[1] and 'status="INVALID_ARGUMENT' in calls[2]


def test_emactl_has_a_token_too(server: ServerProcess, tmp_path: pathlib.Path) -> None:
    done = emactl(server, "list")
    assert done.returncode == 4 and json.loads(done.stderr)["error"]["reason"] == "BAD_TOKEN"
    assert emactl(server, "list", EMA_TOKEN=EVALUATOR).returncode == 0
    path = tmp_path / "token"
    path.write_text(ADMIN)
    assert emactl(server, "--token-file", str(path), "list", EMA_TOKEN="wrong").returncode == 0
    missing = emactl(server, "--token-file", str(tmp_path / "none"), "list")
    assert missing.returncode == 2 and "No such file" in missing.stderr
    path.write_text("")
    empty = emactl(server, "--token-file", str(path), "list")
    assert empty.returncode == 2 and "expected a file of one token" in empty.stderr


def test_purge_removes_what_delete_leaves(server: ServerProcess, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "data/models"
    with client_of(server, ADMIN) as admin:
        for purge in (False, False, True):
            admin.create_model("digits-4", WEIGHTS, tracks={"ema": "10ba"})
            admin.create_model("digits-45", WEIGHTS, tracks={"ema": "10ba"})
            with admin.open_run("digits-4") as run:
                run.push(step=1, weights=WEIGHTS)
            admin.create_checkpoint("digits-4")
            admin.delete_model("digits-4", purge=purge)
            admin.delete_model("digits-45")
            left = [path.name for path in folder.iterdir() if path.name.endswith("-digits-4")]
            assert bool(left) != purge
        admin.delete_model("digits-4", purge=True)


def test_a_bad_token_file_stops_the_start(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"boss {ADMIN}\n")
    binary = os.environ.get("EMA_SERVER_BIN", ROOT / "build/release/server/ema-server")
    done = subprocess.run(
        [binary, "--listen", "127.0.0.1:0", "--auth-tokens", path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "line 1: the first word is not a role" in done.stderr and ADMIN not in done.stderr
