# SPDX-License-Identifier: Apache-2.0
"""LocalEMA and compute_ema against the replay in NumPy, bit by bit."""

from __future__ import annotations

import copy
import io
import signal
import threading

import ema_client
import numpy as np
import pytest
import torch
from ema_client import LocalEMA, Track, compute_ema
from replay import Replay, half_life_weight
from testing import assert_same_bits, numpy_of


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 5, 3)
        self.norm = torch.nn.BatchNorm2d(5)
        self.halves = torch.nn.Parameter(torch.zeros(17, dtype=torch.float16))
        self.brain = torch.nn.Parameter(torch.zeros(17, dtype=torch.bfloat16))
        self.head = torch.nn.Linear(5, 4, bias=False)
        self.tied = torch.nn.Linear(5, 4, bias=False)
        self.tied.weight = self.head.weight


def shake(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            else:
                tensor += 1


def widened(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Its values as NumPy has them; half precision as float32."""
    return {
        name: (tensor.detach().float() if tensor.is_floating_point() else tensor).numpy().copy()
        for name, tensor in model.state_dict().items()
    }


def mean_of(samples: list[np.ndarray]) -> np.ndarray:
    """As the server computes the mean of the last ones."""
    newest = samples[-1].astype(np.float64)
    differences = sum(sample.astype(np.float64) - newest for sample in samples[:-1])
    return (newest + differences / len(samples)).astype(samples[-1].dtype)


def test_averages_are_bit_equal_to_a_replay():
    model = Net()
    ema = LocalEMA(model, half_life="7ba", update_interval="2ba")
    replay = Replay()
    for n in range(1, 30):
        shake(model, n)
        record = ema.update()["ema"]
        assert record.updated == (n == 1 or n % 2 == 0)
        if record.updated:
            expected = 1.0 if n == 1 else half_life_weight(record.elapsed, 7)
            assert record.update_weight == expected
            replay.update(record.update_weight, widened(model))
    assert_same_bits(replay.average, ema.weights())
    assert ema.batch == 29
    assert record.config == "half_life=7ba, update_interval=2ba"


def test_records_of_updates():
    ema = LocalEMA(Net(), tracks={"ema": "10ba", "raw": "copy", "slow": Track(dtype="float64")})
    records = ema.update()
    assert records == ema.records
    assert (records["ema"].update_weight, records["ema"].update_count, records["ema"].elapsed) == (
        1,
        1,
        0,
    )
    ema.update()
    records = ema.update({"batch": 10})
    weight = float(-np.expm1(-np.log(2) * 8 / 10))
    assert records["ema"].update_weight == np.float32(weight)
    assert records["ema"].window_steps == pytest.approx(1 / weight)
    assert records["ema"].stall_gap == pytest.approx(2**-24 / weight)
    assert records["slow"].stall_gap == 2**-53 / records["slow"].update_weight
    assert records["slow"].update_weight == pytest.approx(
        -np.expm1(-np.log(2) * 8 / 1000), rel=1e-15
    )
    assert records["raw"].update_weight == 1


def test_without_arguments_it_is_composers_half_life():
    ema = LocalEMA(Net())
    ema.update()
    assert ema.update()["ema"].update_weight == half_life_weight(1, 1000)


def test_many_tracks_do_not_touch_each_other():
    model = Net()
    tracks = {"a": "5ba", "b": {"smoothing": 0.9, "update_interval": "3ba"}, "raw": "copy"}
    together = LocalEMA(model, tracks=tracks)
    alone = {name: LocalEMA(model, tracks={name: track}) for name, track in tracks.items()}
    for n in range(1, 12):
        shake(model, n)
        together.update()
        for ema in alone.values():
            ema.update()
    for name, ema in alone.items():
        assert_same_bits(ema.weights(name), together.weights(name))
    raw = together.weights("raw")
    assert raw["halves"].dtype == torch.float16
    assert torch.equal(raw["brain"], model.brain)
    assert together.weights("a")["halves"].dtype == torch.float32


def test_rules_for_tensors():
    model = Net()
    ema = LocalEMA(
        model,
        tracks={
            "ema": Track(
                smoothing=0.5,
                tensor_rules={"head.*": "ignore", "halves": "copy"},
                buffers="copy",
            )
        },
    )
    for n in range(3):
        shake(model, n)
        ema.update()
    weights = ema.weights()
    assert "head.weight" not in weights and "tied.weight" not in weights
    assert torch.equal(weights["halves"], model.halves)
    assert torch.equal(weights["norm.running_mean"], model.norm.running_mean)
    assert not torch.equal(weights["conv.weight"], model.conv.weight)
    assert weights["norm.num_batches_tracked"] == 3
    before = model.head.weight.detach().clone()
    ema.copy_to(model)
    assert torch.equal(model.head.weight, before)
    assert torch.equal(model.conv.weight, weights["conv.weight"])


@pytest.mark.parametrize(
    "before_start, expected",
    [
        ("reinit", [1, 1, 1, 4, 4.5, 5.25]),
        ("copy", [1, 2, 3, 4, 4.5, 5.25]),
        ("hold", [1, 1, 1, 1, 3, 4.5]),
    ],
)
def test_before_the_start(before_start, expected):
    model = torch.nn.Linear(1, 1, bias=False)
    ema = LocalEMA(
        model, tracks={"e": Track(smoothing=0.5, ema_start="4ba", before_start=before_start)}
    )
    values = []
    for n in range(1, 7):
        torch.nn.init.constant_(model.weight, n)
        ema.update()
        values.append(float(ema.weights()["weight"]))
    assert values == expected


def test_zero_init():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 8)
    ema = LocalEMA(
        model,
        tracks={
            "plain": Track(smoothing=0.5, zero_init="plain"),
            "debias": Track(smoothing=0.5, zero_init="debias"),
        },
    )
    for plain in (4, 6, 7):
        ema.update()
        assert ema.weights("plain")["weight"] == plain
        assert ema.weights("debias")["weight"] == 8


def test_a_float64_track_does_not_stall():
    model = torch.nn.Linear(1, 1, bias=False)
    tracks = {
        "plain": {"smoothing": 0.999999},
        "wide": {"smoothing": 0.999999, "dtype": "float64"},
    }
    ema = LocalEMA(model, tracks=tracks)
    torch.nn.init.constant_(model.weight, 1)
    ema.update()
    torch.nn.init.constant_(model.weight, 1.01)
    for _ in range(1000):
        ema.update()
    assert ema.weights("plain")["weight"] == 1
    pushed = float(model.weight)  # 1.01 as a float32.
    exact = pushed + (1 - pushed) * 0.999999**1000
    assert float(ema.weights("wide")["weight"]) == pytest.approx(exact, rel=1e-13)
    assert ema.records["wide"].stall_gap == 2**-53 / ema.records["wide"].update_weight


def test_averaged_and_back():
    model = Net()
    ema = LocalEMA(model, smoothing=0.5)
    for n in range(3):
        shake(model, n)
        ema.update()
    own = widened(model)
    with pytest.raises(RuntimeError, match="no more"):
        with ema.averaged():
            weights = ema.weights()
            assert torch.equal(model.conv.weight, weights["conv.weight"])
            assert torch.equal(model.tied.weight, weights["tied.weight"])
            assert torch.equal(model.halves, weights["halves"].half())
            raise RuntimeError("no more")
    assert_same_bits(own, widened(model))
    other = Net()
    with ema.averaged(other):
        assert torch.equal(other.conv.weight, weights["conv.weight"])
    assert_same_bits(own, widened(model))
    with pytest.raises(
        ema_client.InvalidArgumentError, match="not in the module.*not in the average"
    ):
        ema.copy_to(torch.nn.Linear(3, 3))


def test_parametrizations_cache_no_values_of_other_weights():
    model = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3))
    ema = LocalEMA(model, smoothing=0.5)
    for n in range(3):
        shake(model, n)
        ema.update()
    inputs = torch.ones(1, 3)
    with torch.no_grad(), ema.averaged():
        expected = model(inputs)
    with torch.no_grad(), torch.nn.utils.parametrize.cached():
        own = model(inputs)
        assert not torch.equal(own, expected)
        with ema.averaged():
            assert torch.equal(model(inputs), expected)
        assert torch.equal(model(inputs), own)


class Tied(torch.nn.Module):
    """Two pairs of layers, the second of each with the weight of the first or with its own."""

    def __init__(self, *pairs: tuple[str, str], is_tied: bool = True) -> None:
        super().__init__()
        for first, second in pairs:
            self.add_module(first, torch.nn.Linear(3, 3, bias=False))
            self.add_module(second, torch.nn.Linear(3, 3, bias=False))
            if is_tied:
                self.get_submodule(second).weight = self.get_submodule(first).weight


@pytest.mark.parametrize(
    "other",
    [Tied(("b", "a"), ("d", "c")), Tied(("a", "b"), ("c", "d"), is_tied=False)],
    ids=["in another order", "not tied"],
)
def test_another_model_may_be_tied_otherwise(other):
    model = Tied(("a", "b"), ("c", "d"))
    ema = LocalEMA(model, tracks={"ema": {"smoothing": 0.5, "tensor_rules": {"c.*": "ignore"}}})
    ema.update()
    own = widened(other)
    with ema.averaged(other):
        assert torch.equal(other.a.weight, model.a.weight)
        assert torch.equal(other.b.weight, model.a.weight)
        assert np.array_equal(own["c.weight"], widened(other)["c.weight"])
    assert_same_bits(own, widened(other))
    ema.copy_to(other)
    assert torch.equal(other.a.weight, model.a.weight)
    assert torch.equal(other.b.weight, model.a.weight)
    assert np.array_equal(own["d.weight"], widened(other)["d.weight"])


def over_the_memory_of(module: torch.nn.Linear) -> torch.nn.Linear:
    """Other parameters, whose values are those of `module`."""
    other = torch.nn.Linear(module.in_features, module.out_features)
    for name, parameter in module.named_parameters():
        setattr(other, name, torch.nn.Parameter(parameter.detach()))
    return other


@pytest.mark.parametrize("make", [lambda module: module, over_the_memory_of], ids=["own", "other"])
@pytest.mark.parametrize("how", ["averaged", "copy_to", "compute_ema"])
def test_weights_that_a_push_reads_are_waited_for(server, model, monkeypatch, how, make):
    module = torch.nn.Linear(3, 2)
    written = make(module)
    local = LocalEMA(module)
    local.update()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with ema_client.attach(module, optimizer, server.url(model), half_life="5ba") as ema:
        optimizer.step()
        waited = []
        monkeypatch.setattr(ema, "wait_released", lambda: waited.append(module.weight.tolist()))
        own = module.weight.tolist()
        if how == "averaged":
            with local.averaged(written):
                assert waited == [own]
        elif how == "copy_to":
            local.copy_to(written)
        else:
            compute_ema(torch.nn.Linear(3, 2), written, smoothing=0.5)
        assert waited == [own]


def test_a_push_gets_the_weights_that_it_began_with(server, client, model):
    """Also where averages are written through another parameter over the memory that it reads."""
    module = torch.nn.Linear(4096, 4096)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    local = LocalEMA(module)
    local.update()
    module.weight.grad = torch.ones_like(module.weight)
    with ema_client.attach(module, optimizer, server.url(model), tracks={"raw": "copy"}) as ema:
        optimizer.step()
        ema.wait_pushed()
        server.send_signal(signal.SIGSTOP)
        waker = threading.Timer(0.5, server.send_signal, (signal.SIGCONT,))
        try:
            optimizer.step()
            pushed = {name: value.clone() for name, value in module.state_dict().items()}
            waker.start()
            local.copy_to(over_the_memory_of(module))
            assert waker.finished.is_set()
        finally:
            server.send_signal(signal.SIGCONT)
        assert ema.wait_pushed().step == 2
    assert not torch.equal(module.weight, pushed["weight"])
    assert_same_bits(pushed, client.pull(model, track="raw"))


def test_averages_are_in_host_memory_whatever_the_default_device_is():
    model = Net()
    tracks = {"raw": "copy", "wide": {"smoothing": 0.5, "dtype": "float64"}}
    ema = LocalEMA(model, smoothing=0.5, tracks=tracks)
    with torch.device("meta"):  # As torch.set_default_device.
        ema.update()
    other = Net()
    for track in ("ema", *tracks):
        ema.copy_to(other, track)
        assert_same_bits(widened(model), widened(other))


MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("used_in", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("made_in", MODES, ids=lambda mode: mode.__name__)
def test_any_grad_mode_gives_the_same_averages(made_in, used_in):
    def averages(first, second):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
        tracks = {"ema": Track(half_life="4ba", dtype="float64"), "raw": "copy"}
        ema = LocalEMA(model, tracks=tracks)
        with first():
            model(torch.randn(4, 3))
            ema.update()
        loaded = LocalEMA(model, tracks=tracks)
        with first():
            loaded.load_state_dict(ema.state_dict())
        with second():
            model(torch.randn(4, 3))
            ema.update()
            loaded.update()
            with ema.averaged():
                pass
        assert_same_bits(ema.weights("ema"), loaded.weights("ema"))
        return ema, model

    expected, _ = averages(torch.enable_grad, torch.enable_grad)
    ema, model = averages(made_in, used_in)
    assert_same_bits(expected.weights("ema"), ema.weights("ema"))
    assert_same_bits(expected.weights("raw"), ema.weights("raw"))
    with made_in():
        weights = ema.weights("ema")
        other = copy.deepcopy(model)
    weights = {
        name: value.float() if value.is_floating_point() else value
        for name, value in weights.items()
    }
    model.load_state_dict(weights, assign=True)
    model(torch.randn(4, 3)).sum().backward()
    with used_in():
        ema.copy_to(other)
        compute_ema(model, other, smoothing=0.0)
    assert_same_bits(model.state_dict(), other.state_dict())


def test_weights_load_into_a_model():
    model = Net()
    ema = LocalEMA(model)
    ema.update()
    other = Net()
    other.load_state_dict(ema.weights())
    assert_same_bits(widened(model), widened(other))
    # They are the caller's.
    ema.weights()["conv.weight"].zero_()
    assert torch.equal(ema.weights()["conv.weight"], model.conv.weight)


def test_state_dict_goes_on_where_it_was():
    def make(model):
        tracks = {
            "wide": Track(half_life="9ba", dtype="float64", ema_start="5ba"),
            "swa": Track(uniform=True, update_interval="3ba"),
            "late": Track(half_life="0.5dur", ema_start="0.5dur"),
            "mean": Track(mean_of_last=4),
        }
        return LocalEMA(model, tracks=tracks)

    model = Net()
    ema = make(model)
    straight = make(model)
    for n in range(1, 21):
        shake(model, n)
        time = {"batch": n, "progress": n / 20}
        ema.update(time)
        straight.update(time)
        if n in (1, 4, 6, 11):
            file = io.BytesIO()
            torch.save(ema.state_dict(), file)
            file.seek(0)
            ema = make(model)
            ema.load_state_dict(torch.load(file))
    for track in ("wide", "swa", "late", "mean"):
        assert_same_bits(straight.weights(track), ema.weights(track))
    assert straight.records == ema.records


def test_a_mean_of_the_last_is_that_of_the_weights():
    model = Net()
    tracks = {
        "mean": Track(mean_of_last=3),
        "hold": Track(mean_of_last=3, ema_start="3ba", before_start="hold"),
        "copy": Track(mean_of_last=3, ema_start="3ba", before_start="copy"),
    }
    ema = LocalEMA(model, tracks=tracks)
    seen = []
    for n in range(1, 8):
        shake(model, n)
        records = ema.update()
        assert records["mean"].update_weight == pytest.approx(1 / min(n, 3))
        assert records["mean"].stall_gap == 0
        seen.append(widened(model))
        for track, samples in {
            "mean": seen[-3:],
            "hold": [seen[0], *seen[3:]][-3:],
            "copy": seen[2:][-3:] if n >= 3 else seen[-1:],
        }.items():
            expected = {
                name: mean_of([sample[name] for sample in samples])
                for name, value in seen[-1].items()
                if value.dtype == np.float32
            }
            weights = ema.weights(track)
            assert_same_bits(expected, {name: weights[name] for name in expected})
    state = ema.state_dict()
    other = LocalEMA(model, tracks=tracks | {"mean": Track(mean_of_last=4)})
    with pytest.raises(ema_client.InvalidArgumentError, match="weights of 3 updates.*those of 2"):
        other.load_state_dict(state)


def test_a_state_that_does_not_fit_changes_nothing():
    model = Net()
    ema = LocalEMA(model, half_life="5ba")
    ema.update()
    weights = ema.weights()
    other = LocalEMA(torch.nn.Linear(2, 2), half_life="5ba")
    other.update()
    for state in (
        other.state_dict(),
        LocalEMA(model, tracks={"x": "5ba"}).state_dict(),
    ):
        with pytest.raises(ema_client.InvalidArgumentError, match="not in the state"):
            ema.load_state_dict(state)
    assert_same_bits(weights, ema.weights())


def test_bad_times_change_nothing():
    model = Net()
    ema = LocalEMA(model, tracks={"a": "5ba", "b": "5sp"})
    ema.update({"batch": 5, "sample": 5})
    shake(model, 1)
    before = ema.weights("a")
    for time in (None, {"batch": 6}, {"batch": 4, "sample": 9}, {"bach": 6}):
        with pytest.raises(ema_client.InvalidArgumentError) as error:
            ema.update(time)
        assert error.value.reason == "BAD_TIME"
    assert ema.batch == 5
    assert_same_bits(before, ema.weights("a"))
    ema.update({"batch": 6, "sample": 6})


def test_tracks_that_are_not_there():
    ema = LocalEMA(Net(), tracks={"a": "5ba", "b": "6ba", "raw": "copy"})
    with pytest.raises(ema_client.FailedPreconditionError, match='"a".*no weights yet'):
        ema.weights("a")
    with pytest.raises(ema_client.NotFoundError, match="which track.*a, b, raw"):
        ema.weights()
    with pytest.raises(ema_client.InvalidArgumentError, match='track "e".*half_lif'):
        LocalEMA(Net(), tracks={"e": {"half_lif": "5ba"}})


def test_the_models_own_tensors_are_read_not_kept():
    model = Net()
    ema = LocalEMA(model, tracks={"raw": "copy", "first": "5ba"})
    ema.update()
    raw, first = ema.weights("raw"), ema.weights("first")
    shake(model, 3)
    assert_same_bits(numpy_of(raw), numpy_of(ema.weights("raw")))
    assert_same_bits(first, ema.weights("first"))


@pytest.mark.parametrize("smoothing", [0.99, 0.5, 0.0, 1.0, 0.9999])
def test_compute_ema_is_bit_equal_to_a_replay(smoothing):
    model, ema_model = Net().float(), Net().float()
    replay = Replay()
    replay.update(1.0, widened(ema_model))
    addresses = [tensor.data_ptr() for tensor in ema_model.state_dict().values()]
    for n in range(5):
        shake(model, n)
        compute_ema(model, ema_model, smoothing=smoothing)
        replay.update(1 - smoothing, widened(model))
    assert_same_bits(replay.average, widened(ema_model))
    assert addresses == [tensor.data_ptr() for tensor in ema_model.state_dict().values()]
    assert ema_model.tied.weight is ema_model.head.weight


def test_compute_ema_of_other_dtypes_and_layouts():
    model, ema_model = Net(), Net()
    ema_model.conv.to(memory_format=torch.channels_last)
    ema_model.halves.data = ema_model.halves.data.double()
    shake(model, 1)
    shake(ema_model, 2)
    before = copy.deepcopy(ema_model)
    compute_ema(model, ema_model)
    for name in ("conv.weight", "halves", "brain", "norm.running_var"):
        new, old = ema_model.state_dict()[name], before.state_dict()[name]
        expected = 0.99 * old.double() + 0.01 * model.state_dict()[name].double()
        tolerance = torch.finfo(new.dtype).eps if new.dtype != torch.float64 else 2**-23
        torch.testing.assert_close(new.double(), expected, rtol=0, atol=4 * tolerance)
        assert new.stride() == old.stride() and new.dtype == old.dtype
    assert ema_model.norm.num_batches_tracked == model.norm.num_batches_tracked


def test_compute_ema_computes_in_float64_and_keeps_infinities():
    model = torch.nn.Linear(3, 2).double()
    with torch.no_grad():
        model.weight.fill_(1e300)
        model.bias.fill_(1 + 2**-40)
    model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    ema_model = copy.deepcopy(model)
    ema_model.bias.data.fill_(1.0)
    model.mask, ema_model.mask = model.mask.float(), ema_model.mask.bfloat16()
    compute_ema(model, ema_model, smoothing=0.75)
    torch.testing.assert_close(ema_model.weight, model.weight, rtol=1e-15, atol=0)
    assert ema_model.bias.tolist() == [1 + 2**-42] * 2
    assert torch.equal(ema_model.mask.float(), model.mask)


def test_compute_ema_names_a_value_that_is_too_large_and_changes_nothing():
    for wide, narrow, value, ends in (
        (torch.float32, torch.float16, -1e5, "-100000, and float16 ends at 65504"),
        (torch.float64, torch.float32, 1e300, r"1e\+300, and float32 ends at 3.40282e\+38"),
        (torch.float64, torch.float16, 1e300, r"1e\+300, and float32 ends at 3.40282e\+38"),
    ):
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(wide)
        ema_model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        ema_model[0].to(narrow)
        before = copy.deepcopy(ema_model.state_dict())
        with torch.no_grad():
            model[0].weight[1, 2] = value
            model[1].running_mean.fill_(7)
        model[1].num_batches_tracked.fill_(7)
        with pytest.raises(
            ema_client.InvalidArgumentError, match=rf"model: 0.weight\[1, 2\] is {ends}"
        ):
            compute_ema(model, ema_model, smoothing=0.0)
        for name, tensor in ema_model.state_dict().items():
            assert torch.equal(tensor, before[name]), name


def test_a_weight_that_is_too_large_for_the_average_is_named():
    model = torch.nn.Linear(3, 2).double()
    ema = LocalEMA(model, tracks={"ema": "5ba", "wide": Track(half_life="5ba", dtype="float64")})
    ema.update()
    before, wide = ema.weights("ema"), ema.weights("wide")
    with torch.no_grad():
        model.weight[1, 2] = 1e300
    with pytest.raises(
        ema_client.InvalidArgumentError,
        match=r'LocalEMA: track "ema": weight\[1, 2\] is 1e\+300, and float32 ends at 3.40282e\+38',
    ):
        ema.update()
    assert ema.batch == 1
    assert_same_bits(before, ema.weights("ema"))
    assert_same_bits(wide, ema.weights("wide"))
    with torch.no_grad():
        model.weight[1, 2] = torch.inf  # As documented, it goes into the averages.
    ema.update()
    assert ema.weights("ema")["weight"][1, 2].isinf()
    other = LocalEMA(model, tracks={"wide": Track(half_life="5ba", dtype="float64")})
    with torch.no_grad():
        model.weight[1, 2] = 1e300
    other.update()
    assert other.weights("wide")["weight"][1, 2] == 1e300


def test_compute_ema_counts_tied_tensors_once():
    model, ema_model = Net(), Net()
    torch.nn.init.zeros_(ema_model.head.weight)
    torch.nn.init.ones_(model.head.weight)
    compute_ema(model, ema_model, smoothing=0.9)
    assert torch.all(ema_model.head.weight == np.float32(0.1))
    # Tied in one of them only.
    torch.nn.init.zeros_(ema_model.head.weight)
    model.tied.weight = torch.nn.Parameter(torch.ones(4, 5))
    compute_ema(model, ema_model, smoothing=0.9)
    assert torch.all(ema_model.tied.weight == np.float32(0.1))


def test_compute_ema_looks_through_wrappers():
    model, ema_model = Net(), Net()
    shake(model, 1)
    compute_ema(torch.nn.DataParallel(model), ema_model, smoothing=0)
    assert torch.equal(ema_model.conv.weight, model.conv.weight)


def test_compute_ema_refuses_what_does_not_match():
    model, ema_model = Net(), Net()
    shake(model, 1)
    before = widened(ema_model)
    wrong = Net()
    wrong.extra = torch.nn.Parameter(torch.zeros(1))
    del wrong.halves
    with pytest.raises(
        ema_client.InvalidArgumentError, match="not in ema_model: halves; not in model: extra"
    ):
        compute_ema(model, wrong)
    wrong = Net()
    wrong.head = torch.nn.Linear(6, 4, bias=False)
    wrong.norm = torch.nn.BatchNorm2d(4)
    with pytest.raises(ema_client.InvalidArgumentError, match="head.weight.*") as error:
        compute_ema(model, wrong)
    assert "norm.running_mean" in str(error.value)
    for smoothing in (-0.1, 1.5, float("nan"), "0.9"):
        with pytest.raises(ema_client.InvalidArgumentError, match="smoothing.*0.99"):
            compute_ema(model, ema_model, smoothing=smoothing)
    assert_same_bits(before, widened(ema_model))
