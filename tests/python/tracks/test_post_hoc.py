# SPDX-License-Identifier: Apache-2.0
"""Averages of other lengths, built by a real server from the snapshots that it has kept."""

from __future__ import annotations

import json
import math
import pathlib
import subprocess

import ema_client
import numpy as np
import pytest
import torch
from ema_client import Track
from ema_client._client.pieces import pieces_of
from ema_client._evaluator.reading import AverageReader, pull_pieces
from ema_client._model.ranks import Ranks
from ema_client._model.torch_model import named_tensors
from server_process import ServerProcess
from testing import EMACTL, assert_same_bits, wait_for

pytestmark = pytest.mark.one_server("the tests read the log and the folder of the server")

STEPS = 400
HALF_LIFE = 20
ELEMENTS = 3000


def tracks_of(interval: int, unit: str = "ba") -> dict[str, Track]:
    """Two tracks to build from, and what is built from them, tracked directly."""
    return {
        "p05": Track(sigma_rel=0.05, snapshot_interval=f"{interval}{unit}"),
        "p10": Track(sigma_rel=0.10, snapshot_interval=f"{interval}{unit}"),
        "p07": Track(sigma_rel=0.07),
        "hl": Track(half_life=f"{HALF_LIFE}ba", debias=True),
    }


def kept_steps(data_dir: pathlib.Path, model: str) -> list[int]:
    keeps = data_dir.glob(f"models/{model}/checkpoints/step-*/KEEP")
    return sorted(int(path.parent.name.split("-")[1]) for path in keeps)


def wait_until_kept(server: ServerProcess, model: str, step: int) -> None:
    """Until the server has said so: then it can keep the next."""
    line = f" checkpoint saved model={model} step={step} "
    wait_for(
        lambda: any(
            line in text and " keep=true" in text
            for text in server.log_path.read_text().splitlines()
        ),
        lambda: f"step {step} is kept; {server.log()}",
        30,
    )


class Walk:
    """A random walk of a parameter, beside a buffer and a counter; and its direct averages."""

    def __init__(self, seed: int = 20240607) -> None:
        self._rng = np.random.default_rng(seed)
        self.weights = {
            "w": np.zeros(ELEMENTS, np.float32),
            "half": np.zeros(7, np.float16),
            "n": np.array(0, np.int64),
        }
        self.direct: dict[int, dict[str, np.ndarray]] = {}

    def push(self, run: ema_client.Run, step: int) -> ema_client.Version:
        self.weights["w"] = self.weights["w"] + self._rng.standard_normal(ELEMENTS).astype(
            np.float32
        )
        self.weights["half"] = self.weights["half"] + np.float16(0.125)
        self.weights["n"] = np.array(step, np.int64)
        return run.push(step=step, weights=self.weights)

    def note(self, client: ema_client.Client, model: str, step: int) -> None:
        """Remembers what is tracked directly at this step."""
        self.direct[step] = {
            track: client.pull(model, track=track, framework="numpy")["w"].astype(np.float64)
            for track in ("p05", "p07", "p10", "hl")
        }


def rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array))))


def norm_of(track: str, step: int) -> float:
    """|p|, where |p|^2 is the integral of the profile's square."""
    if track == "hl":
        rate = math.log(2) / HALF_LIFE
        return math.sqrt(rate / 2 / math.tanh(rate * step / 2))
    gamma = 11.244939447858
    return (gamma + 1) / math.sqrt((2 * gamma + 1) * step)


def compare(
    client: ema_client.Client, model: str, walk: Walk, track: str, step: int, **arguments: object
) -> tuple[ema_client.Synthesis, float]:
    """Builds what `track` was at `step`. The RMS error, and the residual with what else came back."""
    profile = {"half_life": f"{HALF_LIFE}ba"} if track == "hl" else {"sigma_rel": 0.07}
    made = client.synthesize(model, step=step, result="built", **profile, **arguments)
    pulled = client.pull(model, track="built", framework="numpy")
    assert pulled.version == made.version and made.version.step == step
    assert sum(source.weight for source in made.sources) == pytest.approx(1, abs=1e-12)
    return made, rms(pulled["w"].astype(np.float64) - walk.direct[step][track])


def bound(made: ema_client.Synthesis, track: str, step: int) -> float:
    """Of the RMS error for a random walk with steps of size 1: Wirtinger's inequality for the running
    integral of the difference of the profiles, which is 0 at both ends. Besides, float32 is rounded.
    """
    return made.residual * norm_of(track, step) * step / math.pi + 2e-6 * math.sqrt(step)


@pytest.mark.parametrize("count", [5, 10, 20, 40])
def test_what_was_tracked_directly_is_rebuilt(server, client, model, count):
    interval = STEPS // count
    data_dir = pathlib.Path(server.data_dir)
    walk = Walk()
    client.create_model(model, walk.weights, tracks=tracks_of(interval))
    past = 3 * STEPS // 5
    between = past + interval // 2
    with client.open_run(model) as run:
        for step in range(1, STEPS + 1):
            walk.push(run, step)
            if step % interval == 0:
                wait_until_kept(server, model, step)
            if step in (past, between, STEPS):
                walk.note(client, model, step)
    assert kept_steps(data_dir, model) == list(range(interval, STEPS + 1, interval))
    for step in (past, between, STEPS):
        for track in ("p07", "hl"):
            made, error = compare(client, model, walk, track, step)
            assert {source.track for source in made.sources} <= {"p05", "p10"}
            assert all(source.step <= step for source in made.sources)
            relative = error / math.sqrt(step)
            print(
                f"\n{count:3d} snapshots, {track:4s} at step {step}: residual {made.residual:.2e}, "
                f"error / the walk's size {relative:.2e}",
                end="",
            )
            assert error <= bound(made, track, step)
            # Between snapshots the newest weights are missing.
            if step != between:
                assert made.residual < {5: 0.1, 10: 0.03, 20: 0.01, 40: 3e-3}[count]
    # What is not averaged is the newest snapshot's.
    client.synthesize(model, sigma_rel=0.07, result="built", step=between)
    pulled = client.pull(model, track="built", framework="numpy")
    assert pulled["n"] == past and pulled["n"].dtype == np.int64


def test_a_stored_track_is_rebuilt_exactly(server, client, model):
    walk = Walk()
    client.create_model(model, walk.weights, tracks=tracks_of(10))
    with client.open_run(model) as run:
        for step in range(1, 31):
            walk.push(run, step)
            if step % 10 == 0:
                wait_until_kept(server, model, step)
            walk.note(client, model, step)
    for step in (10, 20, 30):
        made = client.synthesize(model, result="post-hoc", sigma_rel=0.05, step=step)
        assert made.residual < 1e-6
        built = client.pull(model, track="post-hoc", framework="numpy")["w"]
        np.testing.assert_allclose(built, walk.direct[step]["p05"], rtol=2e-6, atol=1e-5)
    assert client.synthesize(model, result="post-hoc", sigma_rel=0.05).version.step == 30


def test_restarts_late_pushes_pauses_and_retention(tmp_path, model):
    data_dir = tmp_path / "data"
    walk = Walk()
    steps = [int(step) for step in np.cumsum(np.random.default_rng(7).integers(1, 6, 150))]
    tracks = {**tracks_of(20), "raw": "copy"}
    averages = list(tracks_of(20))
    with ServerProcess(tmp_path, data_dir=data_dir) as server:
        for part in (steps[:60], steps[60:100], steps[100:]):
            with ema_client.Client(server.address, timeout_s=30) as client:
                client.create_model(model, walk.weights, tracks=tracks)
                with client.open_run(model) as run:
                    for index, step in enumerate(part):
                        # All of them, or they would not average the same.
                        if index == 20:
                            client.update_model(model, pause=averages)
                        if index == 23:
                            client.update_model(model, resume=averages)
                        version = walk.push(run, step)
                        if index % 4 == 3 and version.tracks["p05"].updated:
                            client.create_checkpoint(model)
                        walk.note(client, model, step)
                client.create_checkpoint(model)
            server.kill()
            server.start()
            with ema_client.Client(server.address, timeout_s=30) as client:
                with pytest.raises(ema_client.NotFoundError):
                    client.pull(model, track="built")
                for step in (part[10], part[-1]):
                    for track in ("p07", "hl"):
                        made, error = compare(client, model, walk, track, step)
                        assert error <= bound(made, track, step)
                # The last step is stored; snapshots are far apart at first.
                assert made.residual < 0.2
        kept = kept_steps(data_dir, model)
        # One for each 20 batches, but for those without an update.
        assert len({step // 20 for step in kept}) == len(kept) >= steps[-1] // 20 - 6
        # Of the others three are left.
        folders = list(data_dir.glob(f"models/{model}/checkpoints/step-*"))
        assert len(folders) - len(kept) <= 3
        assert server.stop() == 0


@pytest.fixture
def made(server, client, model):
    walk = Walk()
    client.create_model(model, walk.weights, tracks={**tracks_of(10), "raw": "copy"})
    with client.open_run(model) as run:
        for step in range(1, 26):
            walk.push(run, step)
            if step % 10 == 0:
                wait_until_kept(server, model, step)
    return model


@pytest.mark.parametrize(
    "asked, is_far",
    [
        ({"step": 20, "sigma_rel": 0.07}, False),
        ({"step": 19, "sigma_rel": 0.07}, True),
    ],
    ids=str,
)
def test_what_is_far_from_what_was_asked_for_is_said(client, made, caplog, asked, is_far):
    residual = client.synthesize(made, result="built", **asked).residual
    assert residual > 0.5 if is_far else residual < 0.1
    said = [record.message for record in caplog.records]
    assert len(said) == is_far
    if is_far:
        snapshot = asked["step"] // 10 * 10
        assert f"residual {residual:.2g}, expected below 0.1" in said[0]
        assert f"(step {asked['step']} is built from snapshots up to step {snapshot})" in said[0]


def test_weights_that_amplify_are_said(server, client, model, caplog):
    walk = Walk()
    tracks = {
        f"p{sigma}": Track(sigma_rel=sigma, snapshot_interval="4ba") for sigma in (0.05, 0.06)
    }
    client.create_model(model, walk.weights, tracks=tracks)
    with client.open_run(model) as run:
        for step in range(1, 41):
            walk.push(run, step)
            if step % 4 == 0:
                wait_until_kept(server, model, step)

    def amplification(sigma_rel):
        made = client.synthesize(model, result="built", sigma_rel=sigma_rel)
        assert made.residual < 0.5
        return sum(abs(source.weight) for source in made.sources)

    assert amplification(0.055) < 2 and not caplog.messages
    total = amplification(0.02)
    assert total > 10
    (message,) = caplog.messages
    assert '"built" amplifies the differences between its snapshots' in message
    assert f"add up to {total:.3g}, expected at most 10" in message


@pytest.mark.parametrize(
    "arguments, error, reason, message",
    [
        ({}, "InvalidArgumentError", "BAD_SCHEDULE", "sigma_rel or half_life.*sigma_rel=0.07"),
        ({"sigma_rel": 0.07, "half_life": "5ba"}, "InvalidArgumentError", "BAD_SCHEDULE", "both"),
        ({"sigma_rel": 0.3}, "InvalidArgumentError", "BAD_SCHEDULE", "sigma_rel 0.3.*0.05"),
        ({"sigma_rel": 0.0}, "InvalidArgumentError", "BAD_SCHEDULE", "sigma_rel 0.*0.05"),
        ({"sigma_rel": math.nan}, "InvalidArgumentError", "BAD_SCHEDULE", "sigma_rel nan.*0.05"),
        ({"half_life": "5"}, "InvalidArgumentError", "BAD_SCHEDULE", 'half_life.*"5"'),
        ({"half_life": "0ba"}, "InvalidArgumentError", "BAD_SCHEDULE", "half_life.*1000ba"),
        ({"half_life": "5ep"}, "InvalidArgumentError", "BAD_SCHEDULE", 'half_life "5ep".*ba'),
        ({"sigma_rel": 0.07, "step": -1}, "InvalidArgumentError", "BAD_REQUEST", "step: -1"),
        (
            {"sigma_rel": 0.07, "step": 26},
            "OutOfRangeError",
            "VERSION_NOT_YET",
            "newest is step 25",
        ),
        ({"sigma_rel": 0.07, "step": 9}, "OutOfRangeError", "VERSION_NOT_KEPT", "10, 20"),
        ({"sigma_rel": 0.07, "tracks": ["p7"]}, "NotFoundError", "TRACK_NOT_FOUND", "p05"),
        (
            {"sigma_rel": 0.07, "tracks": ["p05", "p07"]},
            "InvalidArgumentError",
            "BAD_REQUEST",
            '"p07".*snapshot_interval',
        ),
        ({"sigma_rel": 0.07, "result": "raw"}, "AlreadyExistsError", "MODEL_DIFFERS", '"raw"'),
        ({"sigma_rel": 0.07, "result": "a b"}, "InvalidArgumentError", "BAD_NAME", "a b"),
    ],
)
def test_what_is_wrong_is_named(client, made, arguments, error, reason, message):
    with pytest.raises(getattr(ema_client, error), match=message) as caught:
        client.synthesize(made, **{"result": "post-hoc", **arguments})
    assert caught.value.reason == reason
    with pytest.raises(ema_client.NotFoundError):
        client.pull(made, track="post-hoc")


def test_results_are_pulled_replaced_and_dropped(client, made):
    for number in range(5):
        client.synthesize(made, sigma_rel=0.06 + 0.01 * number, result=f"r{number}")
    with pytest.raises(ema_client.NotFoundError):
        client.pull(made, track="r0")
    version = client.synthesize(made, sigma_rel=0.05, result="r2", step=15).version
    assert version.step == 15 and version.time == ema_client.TrainingTime(batch=15)
    assert "sigma_rel=0.05" in version.tracks["r2"].config
    for wanted in (0, version, version.number):
        assert client.pull(made, track="r2", version=wanted).version == version
    with pytest.raises(ema_client.OutOfRangeError):
        client.pull(made, track="r2", version=version.number + 1)
    before = client.model(made).reserved_bytes
    assert client.update_model(made, remove=["r2"]).reserved_bytes < before
    with pytest.raises(ema_client.NotFoundError):
        client.pull(made, track="r2")
    assert "r2" not in client.model(made).tracks
    client.update_model(made, tracks={"r2": "5ba"})
    with pytest.raises(ema_client.EmaError):
        client.pull(made, track="r2")
    client.pull(made, track="r4")
    client.delete_model(made)
    with pytest.raises(ema_client.NotFoundError):
        client.synthesize(made, result="post-hoc", sigma_rel=0.05)


def test_one_track_is_enough_and_says_how_far_off(client, made):
    both = client.synthesize(made, result="post-hoc", sigma_rel=0.07)
    one = client.synthesize(made, result="post-hoc", sigma_rel=0.07, tracks=["p10"])
    assert {source.track for source in one.sources} == {"p10"}
    assert one.residual > both.residual


@pytest.mark.parametrize(
    "track, message",
    [
        ({"half_life": "5ba", "snapshot_interval": "10ba"}, "snapshot_interval.*sigma_rel=0.05"),
        ({"sigma_rel": 0.05, "snapshot_interval": "0ba"}, 'snapshot_interval "0ba"'),
        ({"sigma_rel": 0.05, "snapshot_interval": "10"}, 'snapshot_interval.*"10"'),
        ({"sigma_rel": 0.05, "snapshot_interval": 10}, 'snapshot_interval.*"10"'),
    ],
)
def test_a_wrong_interval_makes_no_model(client, model, track, message):
    with pytest.raises(ema_client.InvalidArgumentError, match=message) as error:
        client.create_model(model, {"w": np.zeros(3, np.float32)}, tracks={"a": track})
    assert error.value.reason == "BAD_SCHEDULE"
    with pytest.raises(ema_client.NotFoundError):
        client.model(model)


def test_the_profile_of_what_is_kept_cannot_change(client, model):
    weights = {"w": np.zeros(3, np.float32)}
    track = Track(sigma_rel=0.05, snapshot_interval="10ba")
    client.create_model(model, weights, tracks={"a": track, "b": Track(sigma_rel=0.05)})
    for name, change in [
        ("a", Track(sigma_rel=0.06, snapshot_interval="10ba")),
        ("a", Track(sigma_rel=0.05, snapshot_interval="20ba")),
        ("a", Track(sigma_rel=0.05)),
        ("a", Track(sigma_rel=0.05, snapshot_interval="10ba", age_offset=1)),
        ("a", Track(sigma_rel=0.05, snapshot_interval="10ba", ema_start="5ba")),
        ("a", Track(sigma_rel=0.05, snapshot_interval="10ba", update_interval="1sp")),
        ("b", track),
    ]:
        with pytest.raises(ema_client.InvalidArgumentError, match="remove it and add another"):
            client.update_model(model, tracks={name: change})
    change = Track(sigma_rel=0.05, snapshot_interval="10ba", update_interval="2ba")
    assert client.update_model(model, tracks={"a": change}).tracks["a"] == change
    with client.open_run(model) as run:
        run.push(step=1, weights=weights)
        with pytest.raises(ema_client.InvalidArgumentError, match="snapshot_interval") as error:
            client.update_model(model, tracks={"c": Track(sigma_rel=0.1, snapshot_interval="1ep")})
        assert error.value.reason == "BAD_TIME"


def test_a_push_whose_time_lacks_the_unit_is_refused(client, model):
    weights = {"w": np.zeros(3, np.float32)}
    client.create_model(
        model, weights, tracks={"a": Track(sigma_rel=0.05, snapshot_interval="2ep")}
    )
    with client.open_run(model) as run:
        with pytest.raises(ema_client.InvalidArgumentError, match="snapshot_interval 2ep") as error:
            run.push(step=1, weights=weights)
        assert error.value.reason == "BAD_TIME"
        run.push(step=1, weights=weights, time={"batch": 1, "epoch": 1})
    with pytest.raises(ema_client.FailedPreconditionError, match="snapshot_interval") as error:
        client.synthesize(model, result="post-hoc", sigma_rel=0.07)
    assert error.value.reason == "NO_VERSION"


def test_a_server_without_a_data_dir_refuses_it(tmp_path, model):
    with ServerProcess(tmp_path) as server, ema_client.Client(server.address) as client:
        weights = {"w": np.zeros(3, np.float32)}
        track = Track(sigma_rel=0.05, snapshot_interval="10ba")
        for attempt in (
            lambda: client.create_model(model, weights, tracks={"a": track}),
            lambda: client.update_model(model, tracks={"a": track}),
            lambda: client.synthesize(model, result="post-hoc", sigma_rel=0.07),
        ):
            with pytest.raises(ema_client.FailedPreconditionError, match="--data-dir") as error:
                attempt()
            assert error.value.reason == "NO_DATA_DIR"
            if not client.models():
                client.create_model(model, weights, tracks={"b": "copy"})
        assert server.stop() == 0


def test_a_damaged_checkpoint_makes_nothing(server, client, made):
    path = next(
        pathlib.Path(server.data_dir).glob(
            f"models/{made}/checkpoints/step-*020-version-*/tracks/p10/model.safetensors"
        )
    )
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ema_client.DataLossError, match="step-000000000020.*p10") as error:
        client.synthesize(made, result="post-hoc", sigma_rel=0.07)
    assert error.value.reason == "CHECKPOINT_CORRUPT"
    with pytest.raises(ema_client.NotFoundError):
        client.pull(made, track="post-hoc")
    # It is not needed for an earlier step.
    client.synthesize(made, result="post-hoc", sigma_rel=0.07, step=15)


def test_emactl(server, client, made, tmp_path):
    def emactl(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [str(word) for word in (EMACTL, "--server", server.address, *arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    arguments = ["synthesize", made, "--name", "x", "--sigma-rel", "0.07", "--step", "20"]
    result = emactl(*arguments)
    assert result.returncode == 0, result.stderr
    assert "residual" in result.stdout and "p05" in result.stdout
    fields = json.loads(emactl("--json", *arguments, "--track", "p05", "--track", "p10").stdout)
    assert fields["version"]["step"] == 20 and 0 < fields["residual"] < 0.1
    assert sum(source["weight"] for source in fields["sources"]) == pytest.approx(1)
    assert emactl("pull", made, "--track", "x", "-o", tmp_path / "x.safetensors").returncode == 0
    assert emactl("synthesize", made, "--name", "x", "--half-life", "5ba").returncode == 0
    assert emactl("synthesize", made, "--name", "x").returncode == 2
    assert emactl(*arguments, "--half-life", "5ba").returncode == 2
    assert emactl("synthesize", made, "--name", "x", "--half-life", "5ep").returncode == 4
    result = emactl("update", made, "--track", "c=sigma_rel=0.2,snapshot_interval=50ba")
    assert "snapshot_interval 50ba" in result.stdout, result.stderr


class Net(torch.nn.Module):
    """What `Walk` pushes; modules have a method of the name "half"."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(ELEMENTS))
        self.register_buffer("half_", torch.zeros(7))
        self.register_buffer("n", torch.tensor(0))


@pytest.mark.parametrize("step", [None, 15])
def test_by_pieces(server, client, made, step):
    client.synthesize(made, result="post-hoc", sigma_rel=0.07, step=15)
    average = client.pull(made, track="post-hoc")
    url, net = server.url(made), Net()
    what = {"track": "post-hoc", "step": step, "rename": lambda name: name.rstrip("_")}

    def check(version):
        assert version == average.version
        assert_same_bits(average, {name.rstrip("_"): t for name, t in net.state_dict().items()})

    with ema_client.averaged(net, url, **what) as version:
        check(version)
    check(ema_client.load_into(net, url, **what).version)


def test_all_ranks_get_the_same_build(client, made):
    old, new = (
        client.synthesize(made, result="post-hoc", sigma_rel=sigma_rel, step=15).version
        for sigma_rel in (0.06, 0.07)
    )
    assert (old.number, old.incarnation) == (new.number, new.incarnation)
    answers = []

    class OneIsEarly(Ranks):
        """Rank 1 has pulled what was built first, and then as this one."""

        def gather_or_raise(self, failure, item):
            assert failure is None
            answers.append([item, item if answers else old])
            return answers[-1]

    reader = AverageReader(
        client=client,
        ranks=OneIsEarly(rank=0, world_size=1, group=None),
        info=client.model(made),
        track="post-hoc",
        version=new.number,
        step=None,
        named=named_tensors(Net()),
        may_be_part=True,
        is_part=True,
    )
    weights, version = pull_pieces(reader, pieces_of(reader.named.parameters))
    assert weights.version == version == new
    assert answers == [[new, old], [new, new]]


@pytest.mark.parametrize(
    "options, first",
    [
        ({"ema_start": "37ba"}, 37),
        ({"ema_start": "37ba", "before_start": "copy", "age_offset": 1.0}, 37),
        ({"ema_start": "10sp"}, 40),
        ({"age_offset": 1.0, "update_interval": "2ba"}, 10),
    ],
    ids=str,
)
def test_other_starts_and_offsets_are_counted_in(server, client, model, options, first):
    walk = Walk()
    tracks = {
        "p05": Track(sigma_rel=0.05, snapshot_interval="10ba", **options),
        "p10": Track(sigma_rel=0.10, snapshot_interval="10ba", **options),
        "p07": Track(sigma_rel=0.07, **options),
    }
    client.create_model(model, walk.weights, tracks=tracks)
    rng = np.random.default_rng(1)
    with client.open_run(model) as run:
        for step in range(1, 201):
            walk.weights["w"] = walk.weights["w"] + rng.standard_normal(ELEMENTS).astype(np.float32)
            run.push(step=step, weights=walk.weights, time={"batch": step, "sample": step // 4})
            if step == first or (step > first and step % 10 == 0):
                wait_until_kept(server, model, step)
    direct = client.pull(model, track="p07", framework="numpy")["w"].astype(np.float64)
    made = client.synthesize(model, result="post-hoc", sigma_rel=0.07)
    built = client.pull(model, track="post-hoc", framework="numpy")["w"].astype(np.float64)
    assert made.version.step == 200 and made.residual < 0.02
    assert rms(built - direct) <= bound(made, "p07", 200)
