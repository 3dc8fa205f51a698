# SPDX-License-Identifier: Apache-2.0
"""What is wrong is refused with its reason; the average does not change and the server stays up."""

from __future__ import annotations

import ema_client
import numpy as np
import pytest
import torch
from testing import random_weights, unchanged

TRACKS = {"ema": "20ba", "raw": "copy"}


@pytest.fixture
def run(client, model, rng):
    """A run with two versions, so that there is an average to spoil."""
    weights = random_weights(rng)
    client.create_model(model, weights, tracks=TRACKS)
    with client.open_run(model) as run:
        run.push(step=1, weights=weights)
        run.push(step=2, weights=random_weights(rng))
        yield run


def check(error, code, reason):
    assert error.value.code == code
    assert error.value.reason == reason
    assert len(str(error.value)) > 20


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.model("nobody"),
        lambda client: client.pull("nobody", track="ema"),
        lambda client: client.open_run("nobody"),
        lambda client: client.versions("nobody"),
        lambda client: client.create_checkpoint("nobody"),
        lambda client: client.synthesize("nobody", result="r", sigma_rel=0.1),
        lambda client: client.labels("nobody"),
        lambda client: client.attach_files("nobody", {"config.json": b"{}"}),
    ],
    ids=["model", "pull", "open_run", "versions", "checkpoint", "synthesize", "labels", "files"],
)
def test_unknown_model(client, call):
    client.create_model("knobody", {"w": np.ones(3, np.float32)}, tracks={"ema": "4ba"})
    client.create_model("another", {"w": np.ones(3, np.float32)}, tracks={"ema": "4ba"})
    with pytest.raises(ema_client.NotFoundError, match="nobody") as error:
        call(client)
    check(error, "NOT_FOUND", "MODEL_NOT_FOUND")
    # The nearest name first.
    assert '"nobody" does not exist; readable models: knobody, another' in str(error.value)


ONE = {"w": np.ones(3, np.float32)}


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda client, run: run.push(step=1.5, weights=ONE), "step 1.5: must be a whole number"),
        (lambda client, run: run.push(step="10", weights=ONE), "step '10': must be a whole number"),
        (lambda client, run: run.push(step=None, weights=ONE), "step None: must be a whole number"),
        (lambda client, run: run.push(step=2**63, weights=ONE), f"step {2**63}: must be a whole"),
        (lambda client, run: run.push(step=9, weights=[1]), "weights of type list: must be a map"),
        (lambda client, run: run.push(step=9, weights={1: 2}), "tensor name 1: must be a str"),
        (lambda client, run: client.pull("m", track="t", version=2.0), "version 2.0: must be a n"),
        (
            lambda client, run: client.pull("m", track="t", version=[]),
            "version []: must be a number, a record, or a label",
        ),
        (
            lambda client, run: client.pull("m", track="t", version=True),
            "version True: must be a number, a record",
        ),
        (
            lambda client, run: client.restore("m", version="x"),
            "version 'x': must be a whole number or a Version; that of a label is client.labels(name)['x']",
        ),
        (
            lambda client, run: client.set_label("m", "stable", version="best"),
            "must be a whole number or a Version; that of a label is client.labels(name)['best'].number",
        ),
        (
            lambda client, run: client.create_checkpoint("m", version=1.5),
            "version 1.5: must be a w",
        ),
        (
            lambda client, run: client.statistics("m", version=2**63),
            f"version {2**63}: must be a w",
        ),
        (lambda client, run: client.report_metric("m", True, 1), "version True: must be a whole"),
        (lambda client, run: client.report_metric("m", 1, True), "value True: must be a number"),
        (
            lambda client, run: next(client.watch("m", after="best")),
            "after 'best': must be a whole",
        ),
        (lambda client, run: client.refresh({}), "weights: not the memory of one pull"),
        (lambda client, run: create(client, {1: 2}), "tensor name 1: must be a str"),
        (lambda client, run: create(client, {"\ud800": 2}), "tensor name '\\ud800': must be a"),
        (lambda client, run: create(client, [("w", 2)]), "weights of type list: must be a mapping"),
        (lambda client, run: create(client, ONE, tracks=["e"]), "tracks of type list: must be a m"),
        (lambda client, run: ema_client.Client(None), "address None: must be a str"),
        (lambda client, run: ema_client.Client(""), 'address "": must be host:port'),
    ],
)
def test_a_value_of_a_wrong_type_or_size_is_named(client, run, call, message):
    with pytest.raises(ema_client.InvalidArgumentError) as error:
        call(client, run)
    assert message in str(error.value)
    check(error, "INVALID_ARGUMENT", "BAD_REQUEST")


@pytest.mark.parametrize(
    "call, parameter",
    [
        (lambda client: client.pull("m", track=5), "track: str"),
        (lambda client: client.pull("m", track="\ud800"), "track: str"),
        (lambda client: client.pull("m", track="t", step=2**70), "step: int"),
        (lambda client: client.report_metric("m", 1, "x"), "value: float"),
        (lambda client: client.update_model("m", remove=[3]), "remove: "),
        (lambda client: create(client, ONE, tracks={3: "1ba"}), "name: str"),
    ],
)
def test_another_value_of_a_wrong_type_is_a_type_error(client, call, parameter):
    with pytest.raises(TypeError, match=parameter):
        call(client)


def create(client, weights, tracks=TRACKS):
    client.create_model("n", weights, tracks=tracks)


def test_unknown_track(client, run, model):
    with unchanged(client, model, "ema"), pytest.raises(ema_client.NotFoundError) as error:
        client.pull(model, track="nothing")
    check(error, "NOT_FOUND", "TRACK_NOT_FOUND")


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"conv.bias": np.zeros(8, np.float32)}, r"float32\[7\] in the model, float32\[8\] given"),
        ({"conv.bias": np.zeros((7, 1), np.float32)}, r"float32\[7, 1\] given"),
        ({"conv.bias": np.zeros(7, np.float16)}, r"float16\[7\] given"),
        ({"count": np.array(1, np.int32)}, r"int64\[\] in the model, int32\[\] given"),
    ],
    ids=["shape", "rank", "dtype", "integer"],
)
def test_wrong_shape_or_dtype(client, run, model, rng, change, expected):
    weights = random_weights(rng) | change
    with unchanged(client, model, "ema"):
        with pytest.raises(ema_client.InvalidArgumentError, match=expected) as error:
            run.push(step=3, weights=weights)
        check(error, "INVALID_ARGUMENT", "BAD_LAYOUT")


def test_names_that_do_not_match_are_all_listed(client, run, model, rng):
    weights = random_weights(rng)
    weights["extra.one"] = weights.pop("mask")
    weights["extra.two"] = weights.pop("half")
    with unchanged(client, model, "ema"):
        with pytest.raises(ema_client.InvalidArgumentError) as error:
            run.push(step=3, weights=weights)
        check(error, "INVALID_ARGUMENT", "BAD_LAYOUT")
        for name in ("half", "mask", "extra.one", "extra.two"):
            assert name in str(error.value)


def test_order_does_not_matter(client, run, model, rng):
    weights = random_weights(rng)
    run.push(step=3, weights=dict(reversed(weights.items())))
    raw = client.pull(model, track="raw", framework="numpy")
    assert all(np.array_equal(raw[name], array) for name, array in weights.items())


@pytest.mark.parametrize("step", [2, 1, 0])
def test_stale_step(client, run, model, rng, step):
    with unchanged(client, model, "ema"), pytest.raises(ema_client.AbortedError) as error:
        run.push(step=step, weights=random_weights(rng), time={"batch": 3})
    check(error, "ABORTED", "STALE_STEP")


def test_time_that_goes_back(client, run, model, rng):
    with unchanged(client, model, "ema"), pytest.raises(ema_client.InvalidArgumentError) as error:
        run.push(step=3, weights=random_weights(rng), time={"batch": 1})
    check(error, "INVALID_ARGUMENT", "BAD_TIME")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(client, run, model, rng, value):
    weights = random_weights(rng)
    weights["conv.weight"][3, 1, 2, 0] = value
    with unchanged(client, model, "ema"):
        with pytest.raises(ema_client.InvalidArgumentError, match="conv.weight") as error:
            run.push(step=3, weights=weights)
        check(error, "INVALID_ARGUMENT", "NON_FINITE")
    assert run.push(step=4, weights=random_weights(rng)).number == 3


def test_a_fenced_run(client, run, model, rng):
    with client.open_run(model) as newer:
        with unchanged(client, model, "ema"), pytest.raises(ema_client.AbortedError) as error:
            run.push(step=3, weights=random_weights(rng))
        check(error, "ABORTED", "FENCED")
        assert newer.push(step=3, weights=random_weights(rng)).number == 3


def test_ranks_that_have_not_joined(client, model, rng):
    weights = random_weights(rng)
    client.create_model(model, weights, tracks=TRACKS)
    with client.open_run(model, launch_id="x", rank=0, world_size=2) as run:
        with pytest.raises(
            (ema_client.FailedPreconditionError, ema_client.DeadlineExceededError)
        ) as error:
            run.push(step=1, weights=weights, timeout_s=1)
    assert error.value.reason in ("RUN_INCOMPLETE", "")
    assert client.model(model).latest is None


@pytest.mark.one_server("other servers find first that their tensors are in no shard")
def test_shards_that_overlap(client, run, model):
    bias = ema_client.Shard("conv.bias", (0,), (5,))
    with unchanged(client, model, "ema"):
        first = client.open_run(model, launch_id="x", rank=0, world_size=2, shards=[bias])
        with pytest.raises(ema_client.InvalidArgumentError, match="conv.bias") as error:
            client.open_run(
                model,
                launch_id="x",
                rank=1,
                world_size=2,
                shards=[ema_client.Shard("conv.bias", (4,), (3,))],
            )
        check(error, "INVALID_ARGUMENT", "LAYOUT_OVERLAP")
        # The other rank need not wait for its time-out.
        with pytest.raises(ema_client.InvalidArgumentError, match="conv.bias") as error:
            first.push(step=1, weights={"conv.bias": np.zeros(5, np.float32)})
        check(error, "INVALID_ARGUMENT", "LAYOUT_OVERLAP")
        with pytest.raises(ema_client.InvalidArgumentError) as error:
            client.open_run(model, launch_id="y", shards=[bias, bias])
        check(error, "INVALID_ARGUMENT", "LAYOUT_OVERLAP")


def test_shards_that_leave_a_hole(client, run, model):
    with unchanged(client, model, "ema"):
        with pytest.raises(ema_client.InvalidArgumentError, match="conv") as error:
            client.open_run(model, shards=[ema_client.Shard("conv.bias", (0,), (7,))])
        check(error, "INVALID_ARGUMENT", "LAYOUT_HOLE")


@pytest.mark.parametrize(
    "shard, reason",
    [
        (ema_client.Shard("conv.bias", (4,), (4,)), "BAD_LAYOUT"),
        (ema_client.Shard("conv.bias", (-1,), (4,)), "BAD_LAYOUT"),
        (ema_client.Shard("conv.bias", (0, 0), (4, 1)), "BAD_LAYOUT"),
        (ema_client.Shard("conv.gone", (0,), (4,)), "BAD_LAYOUT"),
    ],
    ids=["outside", "negative", "rank", "name"],
)
def test_shards_that_do_not_fit(client, run, model, shard, reason):
    with unchanged(client, model, "ema"), pytest.raises(ema_client.InvalidArgumentError) as error:
        client.open_run(model, shards=[shard])
    check(error, "INVALID_ARGUMENT", reason)


@pytest.mark.parametrize(
    "half_life", ["0ba", "inf", "infba", "-1ba", "1000", 1000, "nan", "", "5parsec"]
)
def test_half_lives(client, model, half_life):
    for tracks in ({"ema": half_life}, {"ema": {"half_life": half_life}}):
        with pytest.raises(ema_client.InvalidArgumentError) as error:
            client.create_model(model, {"w": np.zeros(2, np.float32)}, tracks=tracks)
        check(error, "INVALID_ARGUMENT", "BAD_SCHEDULE")
    assert model not in [info.name for info in client.models()]


@pytest.mark.parametrize(
    "track",
    [
        {"smoothing": 1.0},
        {"smoothing": -0.1},
        {"half_life": "2ba", "smoothing": 0.5},
        {"half_live": "2ba"},
        {"half_life": "2ba", "update_interval": "0ba"},
    ],
    ids=["one", "negative", "both", "misspelled", "interval"],
)
def test_tracks(client, model, track):
    with pytest.raises(ema_client.InvalidArgumentError) as error:
        client.create_model(model, {"w": np.zeros(2, np.float32)}, tracks={"ema": track})
    check(error, "INVALID_ARGUMENT", "BAD_SCHEDULE")


@pytest.mark.parametrize("name", ["", "a/b", ".a", "a b", "x" * 129])
def test_names(client, name):
    with pytest.raises(ema_client.InvalidArgumentError) as error:
        client.create_model(name, {"w": np.zeros(2, np.float32)}, tracks=TRACKS)
    check(error, "INVALID_ARGUMENT", "BAD_NAME")


def test_a_model_without_tracks_or_tensors(client, model):
    with pytest.raises(ema_client.InvalidArgumentError):
        client.create_model(model, {"w": np.zeros(2, np.float32)}, tracks={})
    with pytest.raises(ema_client.InvalidArgumentError) as error:
        client.create_model(model, {}, tracks=TRACKS)
    check(error, "INVALID_ARGUMENT", "BAD_MANIFEST")


@pytest.mark.parametrize(
    "value", [np.zeros(2, np.complex64), np.zeros(2, ">f4"), np.zeros(2, np.uint16), [1.0, 2.0]]
)
def test_arrays_that_the_server_does_not_keep(client, model, value):
    with pytest.raises(ema_client.InvalidArgumentError):
        client.create_model(model, {"w": value}, tracks=TRACKS)


def test_the_other_byte_order_is_named(client, run, model, rng):
    weights = random_weights(rng)
    weights["double"] = weights["double"].astype(">f8")
    with unchanged(client, model, "ema"), pytest.raises(ema_client.InvalidArgumentError) as error:
        run.push(step=3, weights=weights)
    assert 'array "double": dtype ">f8" has another byte order' in str(error.value)


def test_a_tensor_without_memory_of_its_own(client, run, model, rng):
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return args[0]

    bias = Wrapper._make_wrapper_subclass(Wrapper, (7,))
    with unchanged(client, model, "ema"):
        with pytest.raises(
            ema_client.InvalidArgumentError, match='"conv.bias": a .*Wrapper without memory'
        ) as error:
            run.push(step=3, weights=random_weights(rng) | {"conv.bias": bias})
        check(error, "INVALID_ARGUMENT", "BAD_REQUEST")


def test_a_model_that_exists_and_differs(client, run, model, rng):
    weights = random_weights(rng)
    with unchanged(client, model, "ema"):
        with pytest.raises(ema_client.AlreadyExistsError, match="conv.bias") as error:
            client.create_model(
                model, weights | {"conv.bias": np.zeros(8, np.float32)}, tracks=TRACKS
            )
        check(error, "ALREADY_EXISTS", "MODEL_DIFFERS")
        with pytest.raises(ema_client.AlreadyExistsError, match="ema") as error:
            client.create_model(model, weights, tracks=TRACKS | {"ema": "21ba"})
        check(error, "ALREADY_EXISTS", "MODEL_DIFFERS")


def test_pull_before_the_first_commit(client, model):
    client.create_model(model, {"w": np.zeros(2, np.float32)}, tracks=TRACKS)
    with pytest.raises(ema_client.FailedPreconditionError) as error:
        client.pull(model, track="ema")
    check(error, "FAILED_PRECONDITION", "NO_VERSION")


def test_versions_that_are_not_there(client, run, model, rng):
    for step in range(3, 12):
        run.push(step=step, weights=random_weights(rng))
    with pytest.raises(ema_client.OutOfRangeError) as error:
        client.pull(model, track="ema", version=1)
    check(error, "OUT_OF_RANGE", "VERSION_NOT_KEPT")
    with pytest.raises(ema_client.OutOfRangeError) as error:
        client.pull(model, track="ema", version=99)
    check(error, "OUT_OF_RANGE", "VERSION_NOT_YET")


def test_more_than_the_memory_budget(client, model):
    huge = ema_client.TensorSpec("w", "float32", (1 << 20, 1 << 20))
    with pytest.raises(ema_client.ResourceExhaustedError) as error:
        client.create_model(model, {"w": huge}, tracks=TRACKS)
    check(error, "RESOURCE_EXHAUSTED", "MEMORY_BUDGET")


@pytest.mark.parametrize(
    "url", ["host:1/m", "ema://host:1", "ema://host:1/", "ema:///m", "http://h:1/m"]
)
def test_urls(url):
    with pytest.raises(ema_client.InvalidArgumentError, match="ema://host:50051/model"):
        ema_client.pull(url, track="ema")


def test_a_push_while_another_runs(client, model):
    weights = {"w": np.zeros(1 << 20, np.float32)}
    client.create_model(model, weights, tracks=TRACKS)
    runs = [client.open_run(model, launch_id="x", rank=rank, world_size=2) for rank in (0, 1)]
    pending = runs[0].start_push(step=1, weights=weights)
    with pytest.raises(ema_client.FailedPreconditionError):
        runs[0].start_push(step=2, weights=weights)
    pending.abandon()
    with pytest.raises(ema_client.EmaError):
        pending.wait()
    assert client.model(model).latest is None
