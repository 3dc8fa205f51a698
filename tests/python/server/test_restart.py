# SPDX-License-Identifier: Apache-2.0
"""What was saved is served again after a restart."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from fractions import Fraction

import ema_client
import numpy as np
import pytest
import torch
from ema_client._client import version_calls
from server_process import ServerProcess
from testing import assert_same_bits, random_weights, replay

TRACKS = {"fast": "20ba", "slow": {"half_life": "200ba", "update_interval": "2ba"}, "raw": "copy"}


def push_steps(client, model, rng, steps):
    pushes = []
    with client.open_run(model) as run:
        for step in steps:
            weights = random_weights(rng)
            pushes.append((run.push(step=step, weights=weights), weights))
    return pushes


def pull_all(client, model):
    return {track: client.pull(model, track=track, framework="numpy") for track in TRACKS}


@pytest.mark.parametrize("how", ["saved, killed", "terminated"])
def test_the_same_averages_after_a_restart(tmp_path, rng, model, how):
    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address) as client:
            client.create_model(model, random_weights(rng), tracks=TRACKS)
            pushes = push_steps(client, model, rng, [1, 2, 5])
            before = pull_all(client, model)
            if how == "saved, killed":
                assert client.create_checkpoint(model).version == pushes[-1][0]
        if how == "saved, killed":
            server.kill()
        else:
            # Saves by itself.
            assert server.stop() == 0
        server.start()
        with ema_client.Client(server.address) as client:
            after = pull_all(client, model)
            for track in TRACKS:
                assert_same_bits(before[track], after[track])
                assert after[track].version.step == 5
            latest = client.model(model).latest
            assert latest.number == 3
            # The averages go on as if nothing had happened.
            pushes += push_steps(client, model, rng, [6, 8])
            for track in ("fast", "slow"):
                assert_same_bits(
                    replay(pushes, track), client.pull(model, track=track, framework="numpy")
                )
            last = pushes[-1][0]
            assert last.number == 5
            assert last.incarnation > pushes[0][0].incarnation
            assert last.tracks["fast"].update_count == 5
        assert server.stop() == 0


def test_float64_averages_are_those_of_numpy_bit_for_bit_also_after_a_restart(tmp_path, rng, model):
    """Weights that float32 cannot hold, and changes that it would round away."""
    tracks = {
        "wide": {"smoothing": 0.75, "dtype": "float64"},
        "slow": {"smoothing": 0.9999999, "dtype": "float64"},
        "raw": "copy",
    }
    pushed: list[dict[str, np.ndarray]] = []
    for step in range(6):
        # Powers of two, so that the change is all that rounding could lose.
        tiny = np.ldexp(1.0 + step * rng.integers(1, 9, 1001), -100)
        pushed.append(
            {
                "large": 1e300 * rng.standard_normal((33, 31)),
                "tiny": tiny,
                "near": 1 + 1e-15 * rng.standard_normal(77),
                "half": rng.standard_normal(1003).astype(np.float16),
                "single": rng.standard_normal(515).astype(np.float32),
            }
        )

    def average(weights: list[dict[str, np.ndarray]], weight: float) -> dict[str, np.ndarray]:
        """`e + w * (p - e)` with the one rounding of a fused multiply-add, in exact fractions."""
        result = {name: array.astype(np.float64) for name, array in weights[0].items()}
        for later in weights[1:]:
            for name, param in later.items():
                before = result[name]
                difference = param.astype(np.float64) - before
                fused = [
                    float(Fraction(weight) * Fraction(d) + Fraction(e))
                    for d, e in zip(difference.flat, before.flat)
                ]
                result[name] = np.reshape(fused, before.shape)
        return result

    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address) as client:
            client.create_model(model, pushed[0], tracks=tracks)
            with client.open_run(model) as run:
                for step, weights in enumerate(pushed[:4], 1):
                    version = run.push(step=step, weights=weights)
            assert client.create_checkpoint(model).version == version
        server.kill()
        server.start()
        with ema_client.Client(server.address) as client, client.open_run(model) as run:
            for step, weights in enumerate(pushed[4:], 5):
                version = run.push(step=step, weights=weights)
            for track in ("wide", "slow"):
                record = version.tracks[track]
                assert record.update_weight == 1 - tracks[track]["smoothing"]
                expected = average(pushed, record.update_weight)
                got = client.pull(model, track=track, framework="numpy")
                assert {array.dtype for array in got.values()} == {np.dtype(np.float64)}
                assert_same_bits(got, expected)
                single = client.pull(
                    model, track=track, dtype="float32", overflow="inf", framework="numpy"
                )
                with np.errstate(over="ignore"):
                    narrow = {name: array.astype(np.float32) for name, array in expected.items()}
                assert_same_bits(single, narrow)
                box = ema_client.Shard("large", (3, 5), (20, 7))
                sliced = client.pull(model, track=track, slices=box, framework="numpy")
                np.testing.assert_array_equal(sliced["large"], expected["large"][3:23, 5:12])
            assert_same_bits(client.pull(model, track="raw", framework="numpy"), pushed[-1])
        assert server.stop() == 0


def test_means_of_the_last_are_those_of_a_local_ema_also_after_a_restart_and_a_rollback(
    tmp_path, model
):
    tracks = {
        "mean": {"mean_of_last": 3, "tensor_rules": {"copied": "copy"}},
        "wide": {"mean_of_last": 16, "dtype": "float64"},
        "rare": {"mean_of_last": 4, "update_interval": "2ba", "ema_start": "3ba"},
    }
    net = torch.nn.Module()
    net.weight = torch.nn.Parameter(torch.zeros(33, 31))
    net.small = torch.nn.Parameter(torch.zeros(1003, dtype=torch.float16))
    net.copied = torch.nn.Parameter(torch.zeros(7))
    net.register_buffer("count", torch.zeros((), dtype=torch.int64))
    local = ema_client.LocalEMA(net, tracks=tracks)

    def train(step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        net.count.fill_(step)
        return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}

    def push(run: ema_client.Run, steps: range) -> None:
        for step in steps:
            run.push(step=step, weights=train(step))

    def assert_same(client: ema_client.Client) -> None:
        for track in tracks:
            expected = {name: value.numpy() for name, value in local.weights(track).items()}
            assert_same_bits(expected, client.pull(model, track=track, framework="numpy"))

    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address) as client:
            info = client.create_model(model, train(0), tracks=tracks)
            elements = 33 * 31 + 1003 + 7
            # The copies of a version, times the versions: 2 that readers hold, 3 others.
            assert info.reserved_bytes >= 5 * elements * (3 * 4 + 16 * 8 + 4 * 4)
            with client.open_run(model) as run:
                for step in range(1, 6):
                    run.push(step=step, weights=train(step))
                    local.update()
                    assert_same(client)
            saved = client.create_checkpoint(model).version
        server.kill()
        server.start()
        with ema_client.Client(server.address) as client:
            with client.open_run(model) as run:
                push(run, range(6, 9))
            client.restore(model, version=saved)
            with client.open_run(model) as run:
                for step in range(6, 26):
                    run.push(step=step, weights=train(step))
                    local.update()
            assert_same(client)
        assert server.stop() == 0


def test_a_server_without_a_data_dir_says_so(tmp_path, model):
    with ServerProcess(tmp_path) as server, ema_client.Client(server.address) as client:
        weights = {"w": np.ones(3, np.float32)}
        client.create_model(model, weights, tracks={"raw": "copy"})
        with client.open_run(model) as run:
            run.push(step=1, weights=weights)
        with pytest.raises(ema_client.FailedPreconditionError) as error:
            client.create_checkpoint(model)
        assert error.value.reason == "NO_DATA_DIR"
        assert server.stop() == 0


def test_watch_goes_on_over_a_restart(tmp_path, model, rng):
    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address) as client:
            client.create_model(model, random_weights(rng), tracks=TRACKS)
            push_steps(client, model, rng, [1, 2])
            watch = client.watch(model, after=1, timeout_s=60)
            assert next(watch).number == 2
            assert server.stop() == 0
            server.start(port=server.port)
            push_steps(client, model, rng, [3])
            assert next(watch).number == 3
            watch.close()


@pytest.mark.parametrize("timeout_s", [None, 60])
def test_who_waits_hears_of_versions_counted_anew(tmp_path, model, rng, monkeypatch, timeout_s):
    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address) as client:
            client.create_model(model, random_weights(rng), tracks=TRACKS)
            push_steps(client, model, rng, [1])
            client.create_checkpoint(model)
            lost = push_steps(client, model, rng, [2, 3])[-1][0]
            has_looked = threading.Event()
            commits_of = version_calls._commits_of

            def signalling_commits(*args, **kwargs):
                has_looked.set()
                return commits_of(*args, **kwargs)

            monkeypatch.setattr(version_calls, "_commits_of", signalling_commits)
            with concurrent.futures.ThreadPoolExecutor() as pool, contextlib.ExitStack() as end:
                end.callback(client.delete_model, model)  # Which ends every wait.
                options = {"timeout_s": timeout_s, "must_exist": True}
                waiting = pool.submit(client.wait_for, model, step=5, **options)
                assert has_looked.wait(60)
                server.kill()
                server.start(port=server.port)
                anew = [version for version, _ in push_steps(client, model, rng, [4, 5])]
                assert [version.number for version in anew] == [2, 3] and lost.number == 3
                versions = client.watch(model, after=lost, timeout_s=30)
                assert [next(versions) for _ in anew] == anew
                versions.close()
                assert waiting.result(30) == anew[-1]
