# SPDX-License-Identifier: Apache-2.0
"""Client, Run and PendingPush against a real server."""

from __future__ import annotations

import collections
import contextlib
import copy
import ctypes
import dataclasses
import functools
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time

import ema_client
import numpy as np
import pytest
import safetensors
import torch
from testing import assert_same_bits, numpy_of, random_weights, replay

TRACKS = {"fast": "20ba", "slow": {"half_life": "200ba", "update_interval": "2ba"}, "raw": "copy"}


def test_push_returns_the_record_of_the_version(client, model, rng):
    weights = random_weights(rng)
    client.create_model(model, weights, tracks=TRACKS)
    with client.open_run(model) as run:
        assert run.latest is None
        version = run.push(step=10, weights=weights)
        assert run.latest == version
    assert (version.number, version.step, version.time.batch) == (1, 10, 10)
    assert version.incarnation >= 1
    assert version.skipped == 0
    assert set(version.tracks) == {"fast", "slow", "raw"}
    for record in version.tracks.values():
        assert (record.updated, record.update_weight, record.update_count) == (True, 1.0, 1)
    assert abs(version.commit_time - time.time()) < 60


def test_averages_are_bit_equal_to_a_replay(client, model, rng):
    weights = random_weights(rng)
    client.create_model(model, weights, tracks=TRACKS)
    pushes = []
    with client.open_run(model) as run:
        for step in (1, 2, 3, 7, 8, 30):
            weights = random_weights(rng, scale=1.0 + step)
            pushes.append((run.push(step=step, weights=weights), weights))
    for track in ("fast", "slow"):
        assert_same_bits(replay(pushes, track), client.pull(model, track=track, framework="numpy"))
    assert_same_bits(weights, client.pull(model, track="raw", framework="numpy"))
    last = pushes[-1][0].tracks
    assert last["fast"].elapsed == 22
    assert last["fast"].update_weight == np.float32(-np.expm1(-np.log(2) * 22 / 20))
    # Steps 1, 2, 3 (not due), 7, 8, 30.
    assert not pushes[2][0].tracks["slow"].updated
    assert last["slow"].update_count == 5


def test_torch_tensors_bfloat16_among_them(client, model):
    torch.manual_seed(1)
    weights = {
        "w": torch.nn.Parameter(torch.randn(8, 5)),
        "b": torch.randn(33).to(torch.bfloat16),
        "n": torch.tensor(3),
    }
    client.create_model(model, weights, tracks={"ema": "4ba", "raw": "copy"})
    pushes = []
    with client.open_run(model) as run:
        for step in (1, 2, 3):
            with torch.no_grad():
                weights["w"] += 0.1
            weights["b"] = weights["b"] * 1.01
            version = run.push(step=step, weights=weights)
            logged = {name: tensor.detach().clone() for name, tensor in weights.items()}
            logged["b"] = logged["b"].float()
            pushes.append((version, logged))
    average = client.pull(model, track="ema")
    assert isinstance(average["w"], torch.Tensor)
    assert average["b"].dtype == torch.float32
    assert_same_bits(replay(pushes, "ema"), average)
    raw = client.pull(model, track="raw")
    assert raw["b"].dtype == torch.bfloat16
    for name, tensor in weights.items():
        assert torch.equal(raw[name], tensor.detach()), name
    assert raw.version == version
    assert raw.track == "raw"


def test_pulled_tensors_are_writable_and_independent(client, model):
    client.create_model(model, {"w": np.ones(4, np.float32)}, tracks={"ema": "4ba"})
    with client.open_run(model) as run:
        run.push(step=1, weights={"w": np.ones(4, np.float32)})
    first = client.pull(model, track="ema", framework="numpy")
    first["w"][:] = 7
    second = client.pull(model, track="ema", framework="torch")
    second["w"] += 1
    assert second["w"].tolist() == [2, 2, 2, 2]
    assert client.pull(model, track="ema")["w"].tolist() == [1, 1, 1, 1]


def test_out_is_written_in_place_and_cast(client, model, rng):
    weights = {"a": rng.standard_normal((3, 4)).astype(np.float32), "n": np.array(5, np.int64)}
    client.create_model(model, weights, tracks={"ema": "4ba"})
    with client.open_run(model) as run:
        run.push(step=1, weights=weights)
    arrays = {"n": np.zeros((), np.int64), "a": np.zeros((3, 4), np.float32)}
    result = client.pull(model, track="ema", out=arrays)
    assert_same_bits(weights, arrays)
    assert result["a"] is arrays["a"]
    tensors = {"n": torch.zeros((), dtype=torch.int64), "a": torch.zeros(3, 4, dtype=torch.float16)}
    client.pull(model, track="ema", out=tensors)
    assert torch.equal(tensors["a"], torch.from_numpy(weights["a"]).half())
    with pytest.raises(
        ema_client.InvalidArgumentError, match="not in out: n; not on the server: m"
    ):
        client.pull(model, track="ema", out={"a": arrays["a"], "m": arrays["n"]})
    with pytest.raises(ema_client.InvalidArgumentError, match="shape"):
        client.pull(model, track="ema", out={"a": np.zeros((4, 3), np.float32), "n": arrays["n"]})


def test_numpy_arrays_that_are_not_contiguous_are_copied(client, model, rng):
    matrix = rng.standard_normal((6, 4)).astype(np.float32)
    client.create_model(model, {"m": matrix.T}, tracks={"raw": "copy"})
    with client.open_run(model) as run:
        run.push(step=1, weights={"m": matrix.T})
    raw = client.pull(model, track="raw", framework="numpy")
    assert_same_bits({"m": np.ascontiguousarray(matrix.T)}, raw)


def test_anything_with_the_buffer_protocol(client, model):
    data = memoryview(bytearray(range(12))).cast("B", (3, 4))
    client.create_model(model, {"m": data}, tracks={"raw": "copy"})
    with client.open_run(model) as run:
        run.push(step=1, weights={"m": data})
    raw = client.pull(model, track="raw", framework="numpy")
    assert raw["m"].tolist() == data.tolist()


@pytest.mark.framework
def test_jax_arrays(client, model):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    weights = {"w": jax.numpy.arange(6.0).reshape(2, 3), "b": jax.numpy.ones(3, "bfloat16")}
    client.create_model(model, weights, tracks={"raw": "copy"})
    with client.open_run(model) as run:
        run.push(step=1, weights=weights)
    assert client.pull(model, track="raw")["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_two_ranks_push_at_once_from_two_threads(client, model, rng):
    weights = random_weights(rng)
    client.create_model(model, weights, tracks={"ema": "4ba", "raw": "copy"})
    runs = [
        client.open_run(model, launch_id="x", rank=rank, world_size=2, rank0_only=["count"])
        for rank in (0, 1)
    ]
    assert abs(runs[0].total_bytes - runs[1].total_bytes) <= 8
    assert "count" not in {shard.name for shard in runs[1].shards}
    versions = {}

    def push(rank):
        versions[rank] = runs[rank].push(step=1, weights=weights)

    threads = [threading.Thread(target=push, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert versions[0] == versions[1]
    assert_same_bits(weights, client.pull(model, track="raw", framework="numpy"))


def test_a_rank_may_give_just_its_shard(client, model, rng):
    matrix = rng.standard_normal((4, 6)).astype(np.float32)
    client.create_model(model, {"m": matrix}, tracks={"raw": "copy"})
    pushes = []
    for rank in (0, 1):
        columns = ema_client.Shard("m", (0, 3 * rank), (4, 3))
        run = client.open_run(model, launch_id="x", rank=rank, world_size=2, shards=[columns])
        half = np.ascontiguousarray(matrix[:, 3 * rank : 3 * rank + 3])
        pushes.append((run, half))
    with pytest.raises(ema_client.InvalidArgumentError, match="not a contiguous piece"):
        pushes[0][0].start_push(step=1, weights={"m": matrix})
    pending = [run.start_push(step=1, weights={"m": half}) for run, half in pushes]
    for push in pending:
        push.wait()
    assert_same_bits({"m": matrix}, client.pull(model, track="raw", framework="numpy"))


def test_start_push_reads_in_place_and_lets_go(client, model):
    weights = {"w": torch.ones(1 << 20)}
    client.create_model(model, weights, tracks={"raw": "copy"})
    with client.open_run(model) as run:
        push = run.start_push(step=1, weights=weights)
        assert push.wait_released(max_wait_s=30)
        weights["w"].zero_()
        version = push.wait()
        assert push.done
        assert push.wait_done(max_wait_s=0)
        stats = push.stats
    assert version.number == 1
    assert stats.total_bytes == stats.sent_bytes == 4 << 20
    assert stats.stream_count == 1
    assert bool((client.pull(model, track="raw")["w"] == 1).all())


def test_older_versions_can_be_pulled_while_they_are_kept(client, model):
    client.create_model(
        model, {"w": np.zeros(3, np.float32)}, tracks={"raw": "copy"}, max_pinned_versions=4
    )
    with client.open_run(model) as run:
        versions = [
            run.push(step=step, weights={"w": np.full(3, step, np.float32)}) for step in (1, 2, 3)
        ]
    listed = client.versions(model)
    assert [entry.version for entry in listed] == versions
    assert listed[-1].available
    for entry in listed:
        if entry.available:
            pulled = client.pull(model, track="raw", version=entry.version)
            assert pulled["w"].tolist() == [entry.version.step] * 3
    for after in (2, client.versions(model)[1].version):
        assert [entry.version.number for entry in client.versions(model, after=after)] == [3]


def test_watch_yields_every_commit_in_order(client, model):
    client.create_model(model, {"w": np.zeros(3, np.float32)}, tracks={"raw": "copy"})
    got = []

    def watch():
        for version in client.watch(model, timeout_s=30):
            got.append(version)
            if len(got) == 5:
                return

    thread = threading.Thread(target=watch)
    thread.start()
    time.sleep(0.3)  # Also right without it, but then the first versions may come from the records.
    with client.open_run(model) as run:
        pushed = [
            run.push(step=step, weights={"w": np.zeros(3, np.float32)}) for step in range(1, 6)
        ]
    thread.join(30)
    assert got == pushed
    replayed = client.watch(model, after=3)
    assert [next(replayed).number, next(replayed).number] == [4, 5]
    replayed.close()


@pytest.mark.slow
def test_a_slow_watcher_gets_the_newest_records(client, model):
    """As many as the server keeps, behind those that were on their way: 4 MiB, too."""
    weights = {"w": np.zeros(4, np.float32)}
    # Of so many tracks 4 MiB are a few hundred.
    client.create_model(model, weights, tracks={f"track-{i:02}": f"{100 + i}ba" for i in range(64)})
    count = 3000
    with client.open_run(model) as run, contextlib.closing(client.watch(model, after=0)) as watch:
        run.push(step=1, weights=weights)
        got = [next(watch)]
        for step in range(2, count + 1):
            run.push(step=step, weights=weights)
        while got[-1].number < count:
            got.append(next(watch))
    before = [0, *(version.number for version in got)]
    assert [version.skipped for version in got] == [
        version.number - previous - 1 for version, previous in zip(got, before)
    ]
    assert len(got) < count / 2


def test_a_watch_goes_on_without_its_client(server, client, model):
    weights = {"w": np.zeros(4, np.float32)}
    client.create_model(model, weights, tracks={"raw": "copy"})
    with ema_client.Client(server.address) as other:
        watch = other.watch(model, timeout_s=30)
    with client.open_run(model) as run:
        run.push(step=1, weights=weights)
        assert next(watch).step == 1
        run.push(step=2, weights=weights)
    assert next(watch).step == 2


def test_watch_times_out_without_a_commit(client, model):
    client.create_model(model, {"w": np.zeros(3, np.float32)}, tracks={"raw": "copy"})
    start = time.monotonic()
    with pytest.raises(ema_client.DeadlineExceededError):
        next(client.watch(model, timeout_s=0.5))
    assert time.monotonic() - start < 20


def test_models_are_listed_described_and_deleted(client, model, rng):
    weights = random_weights(rng)
    info = client.create_model(model, weights, tracks=TRACKS)
    assert client.create_model(model, weights, tracks=TRACKS) == info
    assert client.model(model) == info
    assert [spec.name for spec in info.tensors] == list(weights)
    assert info.tensors[0] == ema_client.TensorSpec("conv.weight", "float32", (7, 3, 3, 3))
    assert info.tracks["fast"] == ema_client.Track(half_life="20ba")
    assert info.tracks["slow"].update_interval == "2ba"
    assert info.tracks["raw"].is_copy
    assert info.latest is None
    assert info.reserved_bytes > 0
    assert model in [listed.name for listed in client.models()]
    client.delete_model(model)
    assert model not in [listed.name for listed in client.models()]
    client.delete_model(model)


def test_constant_decay(client, model):
    weights = {"w": np.zeros(3, np.float32)}
    info = client.create_model(
        model, weights, tracks={"ema": {"smoothing": 0.75, "update_interval": "1ba"}}
    )
    assert info.tracks["ema"].smoothing == 0.75
    with client.open_run(model) as run:
        run.push(step=1, weights=weights)
        run.push(step=2, weights={"w": np.full(3, 4, np.float32)})
    assert client.pull(model, track="ema")["w"].tolist() == [1, 1, 1]


def test_time_in_other_units(client, model):
    weights = {"w": np.zeros(2, np.float32)}
    tracks = {"ema": {"half_life": "1000sp", "update_interval": "100sp"}}
    client.create_model(model, weights, tracks=tracks)
    with client.open_run(model) as run:
        assert run.is_due({"sample": 64})
        run.push(step=1, weights=weights, time=ema_client.TrainingTime(batch=1, sample=64))
        assert not run.is_due({"sample": 99})
        version = run.push(step=2, weights=weights, time={"sample": 1064, "batch": 2})
        assert version.tracks["ema"].update_weight == 0.5
        with pytest.raises(ema_client.InvalidArgumentError) as error:
            run.push(step=3, weights=weights, time={"batch": 3})
        assert error.value.reason == "BAD_TIME"
        with pytest.raises(ema_client.InvalidArgumentError) as error:
            run.push(step=3, weights=weights, time={"sampels": 3})
        assert error.value.reason == "BAD_TIME"


def test_pull_reports_progress(client, model):
    weights = {"w": np.zeros(3 << 20, np.float32)}
    client.create_model(model, weights, tracks={"ema": "1ba"})
    with client.open_run(model) as run:
        run.push(step=1, weights=weights)
    seen = []
    client.pull(model, track="ema", on_progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 12 << 20

    def fail(_):
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        client.pull(model, track="ema", on_progress=fail)


def test_what_is_pulled_if_nothing_is_said(server, client, model, tmp_path):
    """The newest version of the only average, else of "ema"."""
    weights = {"a": np.arange(3, dtype=np.float32)}
    client.create_model(
        model, weights, tracks={"raw": "copy", "slow": "9ba"}, max_pinned_versions=None
    )
    assert client.model(model).max_pinned_versions == 2
    with client.open_run(model) as run:
        for step in (1, 2):
            newest = run.push(step=step, weights={"a": step * weights["a"]})
    progress = []
    pulled = [
        client.pull(model),
        client.pull(model, version=0),
        client.pull(model, track="slow", version=None),
        ema_client.pull(server.url(model), on_progress=progress.append),
    ]
    for one in pulled:
        assert (one.track, one.version) == ("slow", newest)
        assert_same_bits(pulled[0], one)
    assert progress[-1] == 12
    assert client.save(model, tmp_path / "a.safetensors") == newest
    with safetensors.safe_open(tmp_path / "a.safetensors", "np") as file:
        assert file.metadata()["ema.track"] == "slow"
    client.update_model(model, tracks={"fast": "2ba"})
    with client.open_run(model) as run:
        run.push(step=3, weights=weights)
    with pytest.raises(ema_client.NotFoundError, match=r"which track\?"):
        client.pull(model)


def test_ctrl_c_in_a_pull_that_tells_of_its_progress(server, model, rng):
    weights = {"w": rng.standard_normal(1 << 24).astype(np.float32)}
    # C, so that it is the pull that finds the signal, and not Python between two lines of ours; slow, so
    # that more has arrived by then.
    wait = functools.partial(ctypes.CDLL(None).poll, None, 0, 10)
    with ema_client.Client(server.address, same_host_lane=False) as client:
        client.create_model(model, weights, tracks={"ema": "4ba"})
        with client.open_run(model) as run:
            run.push(step=1, weights=weights)
        timer = threading.Timer(0.03, os.kill, [os.getpid(), signal.SIGINT])
        # A job in the background of a shell starts with Ctrl-C ignored.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                client.pull(model, track="ema", on_progress=wait)
                timer.join()
        finally:
            signal.signal(signal.SIGINT, before)
        assert_same_bits(weights, client.pull(model, track="ema", framework="numpy"))


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.models(),
        lambda client: client.statistics("m"),
        lambda client: client.create_checkpoint("m"),
        lambda client: client.pull("m", track="ema", framework="numpy"),
    ],
)
def test_no_server_is_unavailable_within_the_time_out(call):
    client = ema_client.Client("127.0.0.1:1", timeout_s=1)
    start = time.monotonic()
    with pytest.raises((ema_client.UnavailableError, ema_client.DeadlineExceededError)):
        call(client)
    assert time.monotonic() - start < 20


def test_a_call_that_waits_long_says_so(caplog):
    with pytest.raises((ema_client.UnavailableError, ema_client.DeadlineExceededError)):
        ema_client.Client("127.0.0.1:1", timeout_s=5).models()
    (warning,) = caplog.records
    assert warning.name.startswith("ema_client")
    assert "127.0.0.1:1: cannot connect" in warning.getMessage()


def test_a_closed_client_says_so(server):
    client = ema_client.Client(server.address)
    client.close()
    with pytest.raises(ema_client.FailedPreconditionError, match="closed"):
        client.models()


def test_errors_can_be_pickled():
    error = ema_client.AbortedError("step 3 is not after 4", reason="STALE_STEP")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ema_client.AbortedError
    assert (again.reason, again.code, str(again)) == ("STALE_STEP", "ABORTED", str(error))
    assert isinstance(ema_client.InvalidArgumentError("x"), ValueError)
    assert ema_client.InvalidArgumentError("x").reason == "BAD_REQUEST"
    # Of a server that has given none.
    assert copy.copy(ema_client.InvalidArgumentError("x", reason="")).reason == ""
    assert isinstance(ema_client.NotFoundError("x"), LookupError)
    assert isinstance(ema_client.DeadlineExceededError("x"), TimeoutError)
    assert isinstance(ema_client.UnavailableError("x"), ConnectionError)


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_what_was_pulled_can_be_copied_and_kept(client, model, rng, again):
    weights = random_weights(rng)
    client.create_model(model, weights, tracks=TRACKS)
    with client.open_run(model) as run:
        version = run.push(step=1, weights=weights)
    pulled = client.pull(model, track="fast", framework="numpy")
    kept = again(pulled)
    assert type(kept) is ema_client.Weights
    assert (kept.version, kept.track) == (version, "fast")
    assert_same_bits(pulled, kept)
    assert again(client.model(model)) == client.model(model)


def test_torch_saves_what_was_pulled(client, model):
    weights = {"w": torch.arange(6.0), "n": torch.tensor(3)}
    client.create_model(model, weights, tracks=TRACKS)
    with client.open_run(model) as run:
        run.push(step=1, weights=weights)
    pulled = client.pull(model, track="fast", framework="torch")
    file = io.BytesIO()
    torch.save(pulled, file)
    file.seek(0)
    kept = torch.load(file)
    assert type(kept) is collections.OrderedDict
    assert_same_bits(pulled, kept)


def test_a_version_is_a_key_and_json(client, model):
    weights = {"w": np.ones(3, np.float32)}
    client.create_model(model, weights, tracks=TRACKS)
    with client.open_run(model) as run:
        version = run.push(step=1, weights=weights)
    assert {version: 1}[client.model(model).latest] == 1
    assert len({client.model(model), client.model(model)}) == 1
    fields = json.loads(json.dumps(dataclasses.asdict(version)))
    assert fields["number"] == 1
    assert fields["time"]["batch"] == 1
    assert fields["tracks"]["fast"]["update_weight"] == 1.0


def test_records_are_shown_in_one_line(client, model):
    info = client.create_model(model, {"a": np.ones(3, np.float32)}, tracks={"ema": "4ba"})
    assert repr(info) == f"ModelInfo(name='{model}', 1 tensors, tracks=['ema'], latest=None)"
    with client.open_run(model) as run:
        version = run.push(step=7, weights={"a": np.ones(3, np.float32)})
    life = f"incarnation={version.incarnation}"
    expected = rf"Version\(number=1, step=7, {life}, tracks=\['ema'\], committed [-0-9]+ [:0-9]+\)"
    assert re.fullmatch(expected, repr(version))
    assert "latest=version 1 of step 7)" in repr(client.model(model))


@pytest.mark.parametrize(
    "url, problem",
    [
        ("", "is empty"),
        ("host:50051/m", 'begins with "host:50051/m", expected ema://'),
        ("http://host/m", 'begins with "http://", expected ema://'),
        ("ema:///m", 'the host is "", expected one such as'),
        ("ema://host:50051", 'the model is "", expected letters, digits'),
        ("ema://host:50051/team/m", 'the model is "team/m", expected letters, digits'),
        ("ema://host:50051/m?track=ema", r'the model is "m\?track=ema", expected letters'),
        ("ema+unix://run/ema.sock/m", 'the path of the socket is "run/ema.sock", expected'),
    ],
)
def test_a_wrong_url_says_which_part_is_wrong(url, problem):
    with pytest.raises(ema_client.InvalidArgumentError, match=f"^url .*: {problem}.*must be like"):
        ema_client.pull(url)


def test_a_client_of_a_url_says_what_it_takes(server, model):
    problem = f'the URL of model "{model}"; .* the server alone, "ema://{server.address}"'
    with pytest.raises(ema_client.InvalidArgumentError, match=problem):
        ema_client.Client(server.url(model))


WARNING = """
import logging, sys
import ema_client
exec(sys.argv[1])
logging.getLogger("ema_client._trainer.attach").info("not shown")
logging.getLogger("ema_client._trainer.attach").warning("track %s", "ema")
logging.getLogger("other").warning("of another library")
"""


@pytest.mark.parametrize(
    "setting_up, first",
    [
        ("", "ema_client: track ema"),
        ("logging.basicConfig()", "WARNING:ema_client._trainer.attach:track ema"),
        ("logging.getLogger('ema_client').addHandler(logging.NullHandler())", ""),
        ("logging.getLogger('ema_client').setLevel('ERROR')", ""),
        ("logging.getLogger('ema_client').propagate = False", "ema_client: track ema"),
        ("logging.lastResort.setLevel('ERROR')", ""),
    ],
)
def test_warnings_name_the_library_where_logging_is_not_set_up(setting_up, first):
    command = [sys.executable, "-c", WARNING, setting_up]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    others = [line for line in shown.splitlines() if line.endswith("of another library")]
    assert others in (["of another library"], ["WARNING:other:of another library"], [])
    assert [line for line in shown.splitlines() if line not in others] == [first] * bool(first)


def test_checkpoint_is_written(client, model, rng):
    weights = random_weights(rng)
    client.create_model(model, weights, tracks=TRACKS)
    with client.open_run(model) as run:
        version = run.push(step=1, weights=weights)
    checkpoint = client.create_checkpoint(model)
    assert checkpoint.version == version
    assert checkpoint.total_bytes > 0
    assert numpy_of(client.pull(model, track="raw")).keys() == weights.keys()
