# SPDX-License-Identifier: Apache-2.0
"""Tracks on a real server: rules for tensors, changes while training runs, what is not finite."""

from __future__ import annotations

import time

import ema_client
import numpy as np
import pytest
import torch
from server_process import ServerProcess
from testing import wait_for


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


class Tied(torch.nn.Module):
    """A language model in small: its head is its embedding; its scale is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens)))


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.tensor([0, 1, 2, 3])).square().mean().backward()
        optimizer.step()


def test_a_tied_tensor_is_pushed_once_and_read_under_both_names(server, client, model):
    module = Tied()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with ema_client.attach(module, optimizer, server.url(model), half_life="2ba"):
        train(module, optimizer, 4)
    info = client.model(model)
    assert {spec.name: spec.aliases for spec in info.tensors if spec.aliases} == {
        "embedding.weight": ("head.weight",)
    }
    average = client.pull(model, track="ema", framework="torch")
    assert average["head.weight"] is average["embedding.weight"]
    other = Tied()
    other.load_state_dict(average, strict=True)
    assert torch.equal(other.head.weight, average["embedding.weight"])
    again = Tied()
    client.pull(model, track="ema", out=again.state_dict())
    assert torch.equal(again.head.weight, average["embedding.weight"])
    with ema_client.averaged(module, server.url(model)):
        assert torch.equal(module.head.weight, average["embedding.weight"])


def test_tensors_are_averaged_copied_or_ignored(server, client, model):
    module = Tied()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    tracks = {
        "ema": {
            "half_life": "2ba",
            "buffers": "copy",
            "tensor_rules": {"norm.weight": "copy", "norm.num*": "ignore", "norm.bias": "ignore"},
        },
        "body": {"smoothing": 0.5, "tensor_rules": {"norm.*": "ignore"}},
    }
    with ema_client.attach(module, optimizer, server.url(model), tracks=tracks):
        train(module, optimizer, 3)
    own = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    assert "norm.bias" not in [spec.name for spec in client.model(model).tensors]
    average = client.pull(model, track="ema", framework="torch")
    assert "norm.num_batches_tracked" not in average
    for name in ("norm.weight", "norm.running_mean", "norm.running_var"):
        assert torch.equal(average[name], own[name])
    assert not torch.equal(average["embedding.weight"], own["embedding.weight"])
    body = client.pull(model, track="body", framework="torch")
    assert sorted(body) == ["embedding.weight", "head.weight"]
    with ema_client.averaged(module, server.url(model), track="body"):
        assert torch.equal(module.embedding.weight, body["embedding.weight"])
        assert torch.equal(module.norm.running_mean, own["norm.running_mean"])


def test_tracks_change_while_a_trainer_is_attached(server, client, model):
    module = Tied()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ema = ema_client.attach(
        module, optimizer, server.url(model), half_life="10ba", update_interval="5ba"
    )

    def train_and_wait(steps: int) -> None:
        for _ in range(steps):
            train(module, optimizer, 1)
            wait_for(lambda: ema._pusher.engine.is_push_done, "the push has ended", 30)

    with ema:
        train_and_wait(6)
        assert [entry.version.step for entry in client.versions(model)] == [1, 5]
        info = client.update_model(
            model,
            tracks={"ema": {"half_life": "20ba", "update_interval": "2ba"}, "raw": "copy"},
        )
        assert set(info.tracks) == {"ema"}
        assert info.pending_tracks is not None and set(info.pending_tracks) == {"ema", "raw"}
        # The trainer goes by the old plan up to the next commit, at 10.
        train_and_wait(6)
        assert [entry.version.step for entry in client.versions(model)] == [1, 5, 10, 11, 12]
        client.update_model(model, remove=["raw"], pause=["ema"], tracks={"slow": "3ba"})
        train_and_wait(2)
    versions = [entry.version for entry in client.versions(model)]
    assert versions[2].tracks["ema"].config == "half_life=10ba, update_interval=5ba"
    assert versions[4].tracks["ema"].config == "half_life=20ba, update_interval=2ba"
    assert versions[4].tracks["ema"].update_count == 4
    assert versions[4].tracks["ema"].update_weight == np.float32(1 - 2 ** (-2 / 20))
    assert set(versions[-1].tracks) == {"ema", "slow"}
    assert not versions[-1].tracks["ema"].updated
    assert client.model(model).tracks["ema"].paused
    assert ema.stats.skipped == 0


def test_the_composer_defaults_need_no_argument(server, client, model):
    module = Tied()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with ema_client.attach(module, optimizer, server.url(model)):
        train(module, optimizer, 1)
    assert client.model(model).tracks == {"ema": ema_client.Track(half_life="1000ba")}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"half_life": "5ba", "smoothing": 0.9}, "half_life and smoothing"),
        ({"half_life": "5ba", "preset": "diffusers"}, "preset and half_life"),
        ({"preset": "diffusers", "update_interval": "5ba"}, "preset and update_interval"),
        ({"preset": "diffuser"}, "diffusers"),
        ({"preset": {"preset": "diffusers", "decai": 0.9}}, "decay"),
        ({"smoothing": 1.5}, "smoothing 1.5"),
        ({"tracks": {"a": {"sigma_rel": 0.5}}}, "sigma_rel 0.5"),
        ({"tracks": {"a": {"half_life": "5ba", "tensor_rules": {"haed.*": "copy"}}}}, "haed"),
        ({"tracks": {"a": {"half_life": "5ba", "tensor_rules": {"haed.*": "ignore"}}}}, "haed"),
        ({"half_life": "0.5dur"}, "dur"),
        ({"ema_start": "100"}, "ema_start"),
    ],
)
def test_what_is_wrong_is_named_and_makes_no_model(server, client, model, arguments, message):
    module = Tied()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ema_client.InvalidArgumentError, match=message):
        ema_client.attach(module, optimizer, server.url(model), **arguments)
    with pytest.raises(ema_client.NotFoundError):
        client.model(model)


def test_a_misspelled_rule_of_a_new_model_is_named(client, model):
    weights = {"head.weight": floats(0), "body": floats(0)}
    for action in ("ignore", "copy", "average"):
        track = {"half_life": "5ba", "tensor_rules": {"haed.*": action}}
        with pytest.raises(ema_client.InvalidArgumentError, match="haed.*head.weight") as raised:
            client.create_model(model, weights, tracks={"ema": track})
        assert raised.value.reason == "BAD_SCHEDULE"


def test_what_is_not_finite_is_rejected_skipped_or_allowed(client, model):
    weights = {"a": floats(0, 0), "b": floats(0)}
    bad = {"a": floats(4, np.nan), "b": floats(4)}
    for policy in ("reject", "skip", "allow"):
        name = f"{model}-{policy}"
        info = client.create_model(
            name, weights, tracks={"ema": {"smoothing": 0.5}}, non_finite=policy
        )
        assert info.non_finite == policy
        with client.open_run(name) as run:
            run.push(step=1, weights=weights)
            if policy == "reject":
                with pytest.raises(ema_client.InvalidArgumentError, match='"a".*element 1.*rank 0'):
                    run.push(step=2, weights=bad)
                continue
            version = run.push(step=2, weights=bad)
        average = client.pull(name, track="ema", framework="numpy")
        assert average["b"].tolist() == [2]
        if policy == "skip":
            assert version.skipped_tensors == ("a",) and version.skipped_tensor_count == 1
            assert average["a"].tolist() == [0, 0]
        else:
            assert average["a"][0] == 2 and np.isnan(average["a"][1])
    with pytest.raises(ema_client.InvalidArgumentError, match="non_finite.*skip"):
        client.create_model(model, weights, tracks={"a": "copy"}, non_finite="ignore")


def test_a_limit_of_zero_is_not_the_default(client, model):
    weights = {"a": floats(0)}
    tracks = {
        "ramp": {"ramp": 10, "max_decay": 0.0},
        "preset": {"preset": "diffusers", "decay": 0.0},
    }
    client.create_model(model, weights, tracks=tracks)
    with client.open_run(model) as run:
        for step in range(1, 5):
            version = run.push(step=step, weights=weights)
            assert [track.update_weight for track in version.tracks.values()] == [1, 1]


def test_a_trainer_whose_time_goes_back_is_told(client, model):
    weights = {"a": floats(0)}
    client.create_model(model, weights, tracks={"ema": "100sp"})
    with client.open_run(model) as run:
        run.push(step=1, weights=weights, time={"batch": 1, "sample": 64})
        with pytest.raises(
            ema_client.InvalidArgumentError, match="32sp is before .* 64sp"
        ) as error:
            run.push(step=2, weights=weights, time={"batch": 2, "sample": 32})
        assert error.value.reason == "BAD_TIME"
        assert run.push(step=2, weights=weights, time={"batch": 2, "sample": 128}).step == 2


def test_records_say_how_far_the_average_reaches(client, model):
    weights = {"a": floats(0)}
    client.create_model(
        model, weights, tracks={"ema": {"half_life": "1000ba", "update_interval": "10ba"}}
    )
    with client.open_run(model) as run:
        run.push(step=10, weights=weights)
        record = run.push(step=20, weights=weights).tracks["ema"]
    assert record.update_weight == pytest.approx(6.907504562964099e-3, rel=1e-7)
    assert record.elapsed == 10 and record.update_count == 2
    assert record.window_steps == pytest.approx(10 / 6.907504562964099e-3)
    assert record.stall_gap == pytest.approx(2**-24 / 6.907504562964099e-3)


def test_a_track_that_float32_stalls_is_named_once_to_the_trainer(server, client, model, caplog):
    module = Tied()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    tracks = {
        "slow": {"smoothing": 0.9999},
        "kept": {"smoothing": 0.9999, "dtype": "float64"},
        "fast": {"half_life": "1000ba", "tensor_rules": {"*": {"smoothing": 0.99999}}},
    }
    with ema_client.attach(module, optimizer, server.url(model), tracks=tracks) as ema:
        train(module, optimizer, 4)
    assert ema.stats.pushes == 4
    slow, rule = [r.message for r in caplog.records if "values stall within" in r.message]
    assert f'model "{model}": track "slow": an update has the weight 0.0001,' in slow
    assert "within 0.0006 of their size" in slow and 'dtype="float64"' in slow
    assert 'track "fast", "*": an update has the weight 1e-05,' in rule


def test_norms_and_distances_are_those_of_what_is_pulled(client, model, rng):
    tracks = {
        "fast": {"smoothing": 0.5},
        "slow": {"smoothing": 0.9, "dtype": "float64"},
        "raw": "copy",
    }

    def weights() -> dict[str, np.ndarray]:
        return {
            "a": rng.standard_normal((50, 30)).astype(np.float32),
            "half": rng.standard_normal(1001).astype(np.float16),
            "double": rng.standard_normal((3, 11)),
            "n": np.array(7, np.int64),
        }

    def norm(arrays: dict[str, np.ndarray]) -> float:
        return float(np.sqrt(sum(np.sum(np.square(a, dtype=np.float64)) for a in arrays.values())))

    client.create_model(model, weights(), tracks=tracks)
    with client.open_run(model) as run:
        first = run.push(step=1, weights=weights())
        version = run.push(step=2, weights=weights())
    got = client.statistics(model)
    assert got.version == version and got.tracks.keys() == {"fast", "slow"}
    floats_of = {
        track: {
            name: array.astype(np.float64)
            for name, array in client.pull(model, track=track, framework="numpy").items()
            if name != "n"
        }
        for track in tracks
    }
    for track, statistics in got.tracks.items():
        average = floats_of[track]
        apart = {name: floats_of["raw"][name] - average[name] for name in average}
        assert statistics.norm == pytest.approx(norm(average), rel=1e-12)
        assert statistics.distance == pytest.approx(norm(apart), rel=1e-12)
    # The record has them from now on.
    assert client.model(model).latest.statistics == got.tracks
    only = client.statistics(model, version=first, tracks=["slow"])
    assert only.version == first and only.tracks["slow"].distance == pytest.approx(0, abs=1e-6)
    listed = client.versions(model)
    assert [v.version.statistics for v in listed] == [only.tracks, got.tracks]
    with pytest.raises(ema_client.InvalidArgumentError, match="averages no tensor"):
        client.statistics(model, tracks=["raw"])
    with pytest.raises(ema_client.OutOfRangeError):
        client.statistics(model, version=9)


def test_statistics_come_by_themselves_where_the_server_is_told_so(tmp_path, model):
    weights = {"w": floats(3, 4)}
    with (
        ServerProcess(tmp_path, "--statistics-every-commits", "2") as server,
        ema_client.Client(server.address, timeout_s=30) as client,
    ):
        client.create_model(model, weights, tracks={"ema": "10ba"})
        with client.open_run(model) as run:
            for step in (1, 2):
                run.push(step=step, weights=weights)
        statistics = wait_for(lambda: client.model(model).latest.statistics, "statistics", 20)
        assert statistics == {"ema": ema_client.TrackStatistics(norm=5.0)}
        assert not client.versions(model)[0].version.statistics


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_tracks_are_pulled_stacked(client, model, framework):
    weights = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(3)}
    tracks = {"fast": {"smoothing": 0.5}, "slow": {"smoothing": 0.75}, "raw": "copy"}
    client.create_model(model, weights, tracks=tracks)
    with client.open_run(model) as run:
        run.push(step=1, weights={"a": np.zeros((2, 3), np.float32), "n": np.array(2)})
        version = run.push(step=2, weights=weights)
    stacked = client.pull_stacked(model, tracks=list(tracks), framework=framework)
    assert stacked.version == version and stacked.track == "fast,slow,raw"
    for index, track in enumerate(tracks):
        single = client.pull(model, track=track, framework="numpy")
        for name, array in single.items():
            assert np.array_equal(np.asarray(stacked[name][index]), array)
    assert stacked["a"].shape == (3, 2, 3) and stacked["n"].shape == (3,)
    with pytest.raises(ema_client.InvalidArgumentError, match="at least one"):
        client.pull_stacked(model, tracks=[])


def test_one_name_does_where_several_may_be(client, model):
    weights = {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}
    wide = ema_client.Track(sigma_rel=0.1, update_interval="1ba", snapshot_interval="1ba")
    client.create_model(model, weights, tracks={"wide": wide, "ema": "4ba", "raw": "copy"})
    with client.open_run(model, frozen="a") as run:
        assert run.frozen == ("a",)
        run.push(step=1, weights=weights)
    assert client.pull_stacked(model, tracks="wide")["a"].shape == (1, 3)
    assert client.statistics(model, tracks="ema").tracks.keys() == {"ema"}
    saved = client.create_checkpoint(model, tracks="ema")
    assert client.checkpoint(model, saved.name).tracks == ("ema",)
    assert client.synthesize(model, result="made", sigma_rel=0.1, tracks="wide").residual < 0.1
    pending = client.update_model(model, pause="ema", remove="raw").pending_tracks
    assert pending.keys() == {"wide", "ema"} and pending["ema"].paused
    assert not client.update_model(model, resume="ema").pending_tracks["ema"].paused


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda client: client.pull_stacked("m", tracks=3), "tracks 3: must be a name, or several"),
        (lambda client: client.update_model("m", pause=3), "pause 3: must be a name, or several"),
        (lambda client: client.pull("m", track="t", tensors=3), "tensors 3: must be a name"),
    ],
)
def test_what_is_no_name_is_named(client, call, message):
    with pytest.raises(ema_client.InvalidArgumentError, match=message):
        call(client)


class Untied(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3, 5, bias=False)


@pytest.mark.parametrize("make", [Tied, Untied])
def test_stacked_tracks_are_evaluated_at_once(server, client, model, make):
    module = make().eval()
    tokens = torch.tensor([0, 1, 2, 3])
    tracks = {"fast": {"smoothing": 0.5}, "slow": {"smoothing": 0.75}}
    with ema_client.attach(module, None, server.url(model), tracks=tracks) as ema:
        for _ in range(3):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter += torch.rand_like(parameter)
            ema.after_step()
    stacked = client.pull_stacked(model, tracks=list(tracks))
    assert ("head.weight" in stacked) == (make is Untied)

    def call(weights):
        return torch.func.functional_call(module, weights, (tokens,))

    for track, output in zip(tracks, torch.func.vmap(call)(dict(stacked))):
        with ema_client.averaged(module, server.url(model), track=track):
            assert torch.allclose(output, module(tokens), atol=1e-6)


def test_a_trainer_whose_only_track_is_paused_goes_on_when_it_is_resumed(server, client, model):
    module = Tied()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with ema_client.attach(module, optimizer, server.url(model), half_life="10ba") as ema:
        train(module, optimizer, 1)
        client.update_model(model, pause=["ema"])
        while not client.model(model).tracks["ema"].paused:
            train(module, optimizer, 1)
        for _ in range(20):
            train(module, optimizer, 1)
            time.sleep(0.01)
        paused_at = client.model(model).latest.step
        train(module, optimizer, 20)
        assert client.model(model).latest.step == paused_at
        info = client.update_model(model, resume=["ema"])
        assert not info.tracks["ema"].paused and info.pending_tracks is None
        train(module, optimizer, 5)
    record = client.model(model).latest
    assert record.step > paused_at and record.tracks["ema"].updated
    assert ema.stats.skipped == 0
