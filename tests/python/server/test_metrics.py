# SPDX-License-Identifier: Apache-2.0
"""Metrics of a real server: what is there, what it counts, what it is called."""

from __future__ import annotations

import shutil
import subprocess

import ema_client
import numpy as np
import pytest
from http_pages import get, scrape, server, url_of, value  # noqa: F401
from metrics_contract import FOLLOWER_ONLY, GROUP_ONLY, METRICS, TLS_ONLY
from testing import wait_for

WEIGHTS = {"w": np.ones(100_000, np.float32)}
TRACKS = {"ema": "4ba", "raw": "copy"}


@pytest.fixture
def used(client: ema_client.Client, model: str) -> str:
    """A model that has been pushed, pulled and saved, and a call that was refused."""
    client.create_model(model, WEIGHTS, tracks=TRACKS)
    with client.open_run(model) as run:
        run.push(step=3, weights=WEIGHTS)
        run.push(step=5, weights=WEIGHTS)
    client.pull(model, track="ema")
    client.create_checkpoint(model)
    client.statistics(model)
    with pytest.raises(ema_client.NotFoundError):
        client.pull(model, track="none")
    return model


@pytest.mark.parametrize(("name", "labels"), METRICS.items(), ids=METRICS)
def test_every_metric_of_the_contract_is_there(server, client, name, labels):
    if "m" not in {info.name for info in client.models()}:
        client.create_model("m", WEIGHTS, tracks=TRACKS)
        with client.open_run("m") as run:
            run.push(step=1, weights=WEIGHTS)
        client.create_checkpoint("m")
        client.statistics("m")
        with pytest.raises(ema_client.NotFoundError):
            client.pull("m", track="none")
    if name.endswith("_bucket"):
        labels = labels | {"le"}
    metrics = scrape(server)
    assert (name in metrics) == (name not in TLS_ONLY | GROUP_ONLY.keys() | FOLLOWER_ONLY.keys())
    for of_series in metrics.get(name, {}):
        assert [label for label, _ in of_series] == sorted(labels)


def test_what_happens_is_counted(server, used):
    metrics = scrape(server)
    size = 4 * 100_000
    assert value(metrics, "ema_pushes_total", model=used, result="committed") == 2
    assert value(metrics, "ema_pushes_total", model=used, result="dropped") == 0
    assert value(metrics, "ema_push_received_bytes_total", model=used) == 2 * size
    assert value(metrics, "ema_push_duration_seconds_count", model=used) == 2
    for phase in ("receive", "fold", "wait", "commit"):
        assert value(metrics, "ema_push_phase_seconds_count", model=used, phase=phase) == 2
    assert value(metrics, "ema_pulls_total", model=used, result="ok") == 1
    assert value(metrics, "ema_pull_sent_bytes_total", model=used) == size
    assert value(metrics, "ema_checkpoint_saves_total", model=used, result="ok") == 1
    assert value(metrics, "ema_model_step", model=used) == 5
    assert value(metrics, "ema_model_version", model=used) == 2
    assert value(metrics, "ema_model_durable_step", model=used) == 5
    assert value(metrics, "ema_model_unsaved_steps", model=used) == 0
    assert value(metrics, "ema_model_lag_steps", model=used) == 0
    assert value(metrics, "ema_sessions_open", model=used) == 0
    assert value(metrics, "ema_track_distance", model=used, track="ema") == 0
    assert value(metrics, "ema_rejects_total", rpc="Pull", reason="TRACK_NOT_FOUND") >= 1
    assert value(metrics, "ema_health_serving") == 1
    assert value(metrics, "ema_recovering") == 0
    assert value(metrics, "ema_memory_used_bytes", kind="blocks") >= 2 * 2 * size
    assert value(metrics, "ema_memory_used_bytes", kind="host_copies") == 0
    assert value(metrics, "ema_device_memory_bytes") >= value(metrics, "ema_memory_budget_bytes")


def test_phases_together_are_the_time_of_a_push(server, used):
    metrics = scrape(server)
    phases = sum(metrics["ema_push_phase_seconds_sum"].values())
    # Also of the tests before; a stream begins a little before its step, and ends a little after.
    assert phases > 0.5 * sum(metrics["ema_push_duration_seconds_sum"].values())


def test_a_step_that_waits_for_a_rank_shows(server, client, model):
    client.create_model(model, WEIGHTS, tracks=TRACKS)
    runs = [client.open_run(model, launch_id="x", rank=rank, world_size=2) for rank in (0, 1)]
    pending = runs[0].start_push(step=7, weights=WEIGHTS)
    wait_for(lambda: value(scrape(server), "ema_sessions_open", model=model) == 1, "a session")
    metrics = scrape(server)
    assert value(metrics, "ema_model_lag_steps", model=model) == 7
    assert value(metrics, "ema_session_age_seconds", model=model) > 0
    runs[1].push(step=7, weights=WEIGHTS)
    pending.wait()
    assert value(scrape(server), "ema_model_lag_steps", model=model) == 0


def test_series_of_a_deleted_model_go_away(server, client, used):
    client.delete_model(used)
    for name, series in scrape(server).items():
        assert all(dict(labels).get("model") != used for labels in series), name


def test_nonsense_in_calls_makes_no_series(server, client):
    def series():
        return {name: set(series) for name, series in scrape(server).items()}

    def ask(name):
        with pytest.raises(ema_client.EmaError):
            client.pull(name, track=name)
        with pytest.raises(ema_client.EmaError):
            client.model(name)
        client.delete_model(name)

    ask("first")
    before = series()
    for i in range(50):
        ask(f"nonsense-{i}")
    assert series() == before


@pytest.mark.parametrize("lane", [False, True], ids=["grpc", "lane"])
def test_a_push_tells_where_its_time_has_gone(server, model, lane):
    with ema_client.Client(server.address, same_host_lane=lane) as client:
        client.create_model(model, WEIGHTS, tracks=TRACKS)
        with client.open_run(model) as run:
            pending = run.start_push(step=1, weights=WEIGHTS)
            pending.wait()
            seconds = pending.stats.server_seconds
    assert pending.stats.lane == ("shared memory" if lane else "grpc")
    assert seconds is not None
    assert seconds.keys() == {"receive", "fold", "wait", "commit"}
    assert all(part >= 0 for part in seconds.values())
    assert seconds["fold"] > 0
    assert seconds["commit"] > 0


@pytest.mark.framework
def test_names_are_as_prometheus_wants_them(server, used):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: Debian's package prometheus has it")
    _, text = get(url_of(server), "/metrics")
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stderr == ""
