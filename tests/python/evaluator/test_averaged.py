# SPDX-License-Identifier: Apache-2.0
"""averaged(), pull() and watch() by URL."""

from __future__ import annotations

import concurrent.futures
import copy

import ema_client
import pytest
import torch
from ema_client._callbacks import CallbackAverage
from ema_client._client.first_weights import share_of_first_weights
from ema_client._evaluator.averaged import read_average
from ema_client._evaluator.reading import WhichAverage
from ema_client._model.torch_model import write
from testing import assert_same_bits, wait_for

TRACKS = {"fast": "4ba", "raw": "copy"}


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5))
    net.head = torch.nn.Linear(5, 4, bias=False)
    net.head.weight = torch.nn.Parameter(net[0].weight.detach().T.contiguous())
    return net


@pytest.fixture
def pushed(client, model):
    """A network, and the state that was pushed of it."""
    net = network()
    state = {name: tensor.detach() for name, tensor in net.state_dict().items()}
    client.create_model(model, state, tracks=TRACKS)
    with client.open_run(model) as run:
        run.push(step=1, weights=state)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3)
        net[1].running_mean += 1
        net[1].num_batches_tracked += 5
    return net, client.pull(model, track="fast")


def state_of(net):
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def test_values_are_swapped_in_and_back(server, model, pushed):
    net, average = pushed
    own = state_of(net)
    tensors = dict(net.named_parameters())
    with ema_client.averaged(net, server.url(model)) as version:
        assert version.number == 1
        assert_same_bits(average, net.state_dict())
        assert all(net.get_parameter(name) is tensor for name, tensor in tensors.items())
        assert torch.is_grad_enabled()
    assert_same_bits(own, net.state_dict())


def test_autocast_uses_the_values_that_were_written(server, client, model, pushed):
    net, average = pushed
    inputs = torch.ones(2, 4)
    expected = {
        name: torch.nn.functional.linear(inputs, values["0.weight"], values["0.bias"])
        for name, values in (("average", average), ("own", state_of(net)))
    }

    def check(values):
        torch.testing.assert_close(net[0](inputs).float(), expected[values], atol=0.02, rtol=0.02)

    with torch.autocast("cpu", torch.bfloat16):
        check("own")  # Autocast keeps the casts of the weights.
        with ema_client.averaged(net, server.url(model), track="fast"):
            check("average")
        check("own")
        client.pull(model, track="fast", out=net)
        check("average")


def test_values_come_back_after_an_exception(server, model, pushed):
    net, average = pushed
    own = state_of(net)
    with pytest.raises(RuntimeError, match="in the middle"):
        with ema_client.averaged(net, server.url(model), track="fast"):
            assert_same_bits(average, net.state_dict())
            raise RuntimeError("in the middle")
    assert_same_bits(own, net.state_dict())


@pytest.mark.parametrize("first_out", [0, 1], ids=["the outer one ends first", "nested"])
def test_values_come_back_when_all_have_ended(server, model, pushed, first_out):
    net, average = pushed
    own = state_of(net)
    both = [ema_client.averaged(net, server.url(model), track=track) for track in ("fast", "raw")]
    for one in both:
        one.__enter__()
    inner = state_of(net)
    both.pop(first_out).__exit__(None, None, None)
    assert_same_bits(average if first_out == 1 else inner, net.state_dict())
    both.pop().__exit__(None, None, None)
    assert_same_bits(own, net.state_dict())
    with ema_client.averaged(net, server.url(model), track="fast"):
        assert_same_bits(average, net.state_dict())
    assert_same_bits(own, net.state_dict())


def test_two_threads_cannot_have_averages_in_a_model_at_once(server, model, pushed):
    net, average = pushed
    own = state_of(net)

    def evaluate() -> None:
        with ema_client.averaged(net, server.url(model), track="fast"):
            pass

    with concurrent.futures.ThreadPoolExecutor(1) as other:
        with ema_client.averaged(net, server.url(model), track="fast"):
            with pytest.raises(ema_client.FailedPreconditionError, match="another thread"):
                other.submit(evaluate).result()
            assert_same_bits(average, net.state_dict())
        assert_same_bits(own, net.state_dict())
        other.submit(evaluate).result()
    assert_same_bits(own, net.state_dict())


def test_values_are_cast_to_the_modules_dtype(server, model, pushed):
    net, average = pushed
    half = copy.deepcopy(net).to(torch.bfloat16)
    own = state_of(half)
    with ema_client.averaged(half, server.url(model)):
        assert half[0].weight.dtype == torch.bfloat16
        assert torch.equal(half[0].weight, average["0.weight"].to(torch.bfloat16))
    assert all(torch.equal(own[name], tensor) for name, tensor in half.state_dict().items())


@pytest.mark.parametrize("is_part", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_model_of_half_the_bytes_pulls_half_of_them(
    server, client, model, pushed, monkeypatch, dtype, is_part
):
    net = pushed[0].to(dtype)
    pulled = []
    pull = ema_client.Client.pull

    def spy(self, name, **given):
        pulled.append(pull(self, name, **given))
        return pulled[-1]

    monkeypatch.setattr(ema_client.Client, "pull", spy)
    rename = (lambda name: name) if is_part else None
    with ema_client.averaged(net, server.url(model), track="fast", rename=rename):
        assert_same_bits(
            {name: value.to(net.state_dict()[name].dtype) for name, value in pushed[1].items()},
            net.state_dict(),
        )
    assert [weights["head.weight"].dtype for weights in pulled] == [dtype]


def test_a_wrapped_model(server, model, pushed):
    net, average = pushed
    wrapped = torch.nn.DataParallel(net)
    with ema_client.averaged(wrapped, server.url(model)):
        assert_same_bits(average, net.state_dict())


def test_another_model_is_refused_and_unchanged(server, model, pushed):
    other = torch.nn.Sequential(torch.nn.Linear(4, 5))
    own = state_of(other)
    with pytest.raises(ema_client.InvalidArgumentError) as error:
        with ema_client.averaged(other, server.url(model)):
            raise AssertionError("not reached")
    for name in ("1.running_mean", "head.weight"):
        assert name in str(error.value)
    assert_same_bits(own, other.state_dict())
    wider = network()
    wider[0] = torch.nn.Linear(6, 5)
    shapes = r"shapes do not match; 0.weight: \(5, 6\) in the module, \(5, 4\) in the average"
    for module, rename, problem in (
        (wider, None, shapes),
        # Parts of the model.
        (wider, str, shapes),
        (other, "x.{}".format, "names do not match; not in the average: x.0.bias, x.0.weight"),
    ):
        with pytest.raises(ema_client.InvalidArgumentError, match=f'^model "{model}": {problem} '):
            with ema_client.averaged(module, server.url(model), rename=rename):
                raise AssertionError("not reached")


def test_which_track_must_be_clear(server, client, model):
    net = torch.nn.Linear(2, 2)
    state = {name: tensor.detach() for name, tensor in net.state_dict().items()}
    client.create_model(model, state, tracks={"a": "4ba", "b": "8ba"})
    with client.open_run(model) as run:
        run.push(step=1, weights=state)
    with pytest.raises(ema_client.NotFoundError, match="a, b"):
        with ema_client.averaged(net, server.url(model)):
            raise AssertionError("not reached")
    with ema_client.averaged(net, server.url(model), track="b"):
        pass


@pytest.mark.parametrize("how", ["averaged", "part", "load_into"])
@pytest.mark.parametrize(
    "track, is_average",
    [
        ({"half_life": "4ba", "ema_start": "3ba"}, False),
        ({"smoothing": 0.9, "ema_start": "3ba", "before_start": "hold", "buffers": "copy"}, False),
        ({"smoothing": 0.9, "ema_start": "3ba", "before_start": "copy"}, True),
        ({"smoothing": 0.05, "tensor_rules": {"1.*": "half_life=2ba, ema_start=3ba"}}, True),
    ],
    ids=["reinit", "hold", "copy", "of a rule"],
)
def test_weights_that_are_no_average_yet_are_told(
    server, client, model, caplog, how, track, is_average
):
    net, url = network(), server.url(model)
    state = state_of(net)
    client.create_model(model, state, tracks={"ema": track})

    def read() -> list[str]:
        caplog.clear()
        if how == "load_into":
            ema_client.load_into(network(), url)
        else:
            with ema_client.averaged(net, url, rename=str if how == "part" else None):
                pass
        return [record.getMessage() for record in caplog.records]

    with client.open_run(model) as run:
        run.push(step=2, weights=state)
        expected = (
            f'model "{model}": track "ema" is no average yet, but the weights of its first push: '
            "version 1 (step 2) is from before its ema_start, 3ba"
        )
        assert read() == ([] if is_average else [expected])
        run.push(step=3, weights=state)
        assert read() == []


IGNORING = {
    "rules": {"tracks": {"body": {"half_life": "2ba", "tensor_rules": {"head.*": "ignore"}}}},
    "preset": {
        **{"preset": "ema_pytorch", "update_every": 1, "update_after_step": 0},
        "ignore_startswith_names": ["head."],
    },
}


SHARES = {
    "half_life": {"half_life": "100ba"},
    "interval": {"half_life": "100ba", "update_interval": "7ba"},
    "smoothing": {"decay": 0.99, "update_interval": "3ba"},
    "start": {"half_life": "100ba", "ema_start": "20ba"},
    "hold": {"smoothing": 0.98, "ema_start": "20ba", "before_start": "hold"},
    "ramp_ratio": {"half_life": "100ba", "ramp_ratio": 2.0},
    "ramp": {"ramp": 500, "min_decay": 0.95, "update_interval": "4ba"},
    "inv_gamma": {"inv_gamma": 1, "power": 0.9, "update_interval": "15ba"},
    "exp_ramp": {"exp_ramp": 5, "max_decay": 0.97, "count_offset": 8, "update_interval": "2ba"},
    "decays": {"decays": {"5ba": 0.95, "40ba": 0.99}},
    "cosine": {"decays": {"0ba": 0.97, "60ba": 1}, "decays_shape": "cosine", "ema_start": "20ba"},
    "decays by epochs": {"decays": {"0ep": 0.97, "3ep": 0.971, "5ep": 0.972}},
    "epochs": {"half_life": "2ep", "update_interval": "1ba"},
}


@pytest.mark.parametrize("fields", SHARES.values(), ids=SHARES.keys())
def test_the_share_of_the_first_weights(client, model, fields):
    client.create_model(model, {"w": torch.ones(1)}, tracks={"ema": fields})
    start = 20 if "ema_start" in fields and "before_start" not in fields else 1
    with client.open_run(model) as run:
        for step in range(1, 61):
            time = {"batch": step, "ep": step // 10}
            # Nothing but the first weights adds to the average.
            value = torch.full((1,), float(step <= start))
            version = run.push(step=step, weights={"w": value}, time=time)
            if step in (30, 60):
                real = client.pull(model, framework="torch")["w"].item()
                share = share_of_first_weights(version.tracks["ema"], version.time)
                assert share == pytest.approx(real, rel=0.02) or max(share, real) < 0.1


@pytest.mark.parametrize("count_from", [0, 10_000], ids=["from 0", "from step 10000"])
def test_a_short_run_is_told_once_how_much_are_first_weights(
    server, client, model, caplog, count_from
):
    net = torch.nn.Linear(2, 2)
    url = server.url(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    with ema_client.attach(
        net, optimizer, url, half_life="500ba", update_interval="10ba", start_step=count_from
    ) as ema:
        optimizer.step()
        with ema_client.averaged(net, url):
            assert not caplog.records  # It does not lag behind yet.
        for _ in range(249):
            optimizer.step()
        for _ in range(2):
            with ema_client.averaged(net, url):
                pass
        ema_client.load_into(net, url)
        assert ema.ema_model is not None
    (told,) = [record.getMessage() for record in caplog.records]
    assert f'model "{model}": track "ema": at step {count_from + 250}, 71 % of the average' in told
    assert 'half_life="500ba", ramp_ratio=0.1' in told

    caplog.clear()
    with ema_client.attach(
        net, optimizer, server.url(f"{model}-cured"), half_life="500ba", ramp_ratio=0.1
    ):
        for _ in range(250):
            optimizer.step()
        with ema_client.averaged(net, server.url(f"{model}-cured")):
            assert not caplog.records


@pytest.mark.parametrize("arguments", IGNORING.values(), ids=IGNORING)
def test_what_every_track_ignores_keeps_its_values(server, client, model, arguments):
    net, url = network(), server.url(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):  # The second trainer goes on with the model.
        with ema_client.attach(net, optimizer, url, existing="continue", **arguments):
            for _ in range(3):
                net(torch.randn(4, 4)).sum().backward()
                optimizer.step()
    own = state_of(net)
    [track] = client.model(model).tracks
    average = client.pull(model, track=track)
    assert "head.weight" not in average
    with ema_client.averaged(net, url):
        assert_same_bits({**average, "head.weight": own["head.weight"]}, net.state_dict())
    assert_same_bits(own, net.state_dict())
    with CallbackAverage(url, {}, track=None).averaged_or_own(net) as version:
        assert version is not None


def test_a_part_of_a_model_that_a_track_ignores_altogether(server, client, model):
    """A stage of a pipeline, of which no rule of the track has the others' tensors."""
    net, url = network(), server.url(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rules = {"head.*": "ignore", "1.*": "copy"}
    tracks = {"body": {"half_life": "2ba", "tensor_rules": rules}, "raw": "copy"}
    with ema_client.attach(net, optimizer, url, tracks=tracks):
        optimizer.step()
    own = state_of(net)
    with ema_client.averaged(net.head, url, rename=lambda name: f"head.{name}"):
        assert_same_bits(own, net.state_dict())


def test_in_the_training_loop(server, client, model):
    """A push that reads the weights in place gets the weights, not the averages that are swapped in."""
    net = torch.nn.Linear(600, 600)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ema_client.attach(
        net, optimizer, server.url(model), half_life="4ba", tracks={"raw": "copy"}
    ):
        for _ in range(6):
            optimizer.zero_grad()
            net(torch.randn(3, 600)).square().mean().backward()
            optimizer.step()
            trained = state_of(net)
            if client.model(model).latest is not None:
                with ema_client.averaged(net, server.url(model)):
                    net(torch.randn(3, 600))
            assert_same_bits(trained, net.state_dict())
    assert_same_bits(trained, client.pull(model, track="raw"))


def test_the_newest_version_is_that_of_the_last_step(server, client, model, monkeypatch):
    """Where this thread trains, whatever its push needs."""
    net, url = torch.nn.Linear(2000, 2000), server.url(model)
    other = torch.nn.Linear(2000, 2000)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ema_client.attach(net, optimizer, url, tracks={"raw": "copy", "ema": "4ba"}) as ema:
        for step in range(1, 5):
            net(torch.ones(2000)).sum().backward()
            optimizer.step()
            if step % 2 == 1:
                with ema_client.averaged(net, url) as version:
                    assert version.step == step
            else:
                assert ema_client.load_into(other, url, track="raw").version.step == step
                assert torch.equal(net.weight, other.weight)
        waits = []

        def wait_pushed(timeout_s):
            waits.append(timeout_s)
            raise ema_client.DeadlineExceededError("not yet")

        monkeypatch.setattr(ema, "wait_pushed", wait_pushed)
        for options in ({"timeout_s": 7}, {"version": version}, {"step": version.step}):
            with ema_client.averaged(net, url, **options):
                pass
        with concurrent.futures.ThreadPoolExecutor(1) as evaluator:
            evaluator.submit(ema_client.load_into, other, url).result()
        assert waits == [7]


@pytest.mark.parametrize("kind", ["other parameters", "copies"])
@pytest.mark.parametrize("how", ["averaged", "load_into"])
def test_memory_that_a_push_reads_is_waited_for(server, model, monkeypatch, how, kind):
    net, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    if kind == "other parameters":
        other.weight = torch.nn.Parameter(net.weight.detach().view(2, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ema_client.attach(net, optimizer, server.url(model), half_life="5ba") as ema:
        optimizer.step()
        # wait_pushed() would end the reading in place; without a version both calls use it.
        wait_for(lambda: ema.version is not None, "a version")
        waits = []
        monkeypatch.setattr(ema, "wait_released", lambda: waits.append(True))
        if how == "averaged":
            with ema_client.averaged(other, server.url(model), version=1):
                pass
        else:
            ema_client.load_into(other, server.url(model), version=1)
    assert waits == ([] if kind == "copies" else [True])


def test_pull_and_watch_by_url(server, model, pushed):
    net, average = pushed
    assert_same_bits(average, ema_client.pull(server.url(model), track="fast"))
    numpy_arrays = ema_client.pull(server.url(model), track="fast", version=1, framework="numpy")
    assert_same_bits(average, numpy_arrays)
    net.load_state_dict(ema_client.pull(server.url(model), track="fast"))
    with ema_client.Client(server.address) as client, client.open_run(model) as run:
        run.push(step=2, weights=state_of(net))
    versions = ema_client.watch(server.url(model), after=1, timeout_s=20)
    assert next(versions).step == 2
    versions.close()


def test_averaged_waits_for_the_first_version(server, client, model, caplog):
    net = torch.nn.Linear(3, 2)
    url = server.url(model)

    def evaluate(**given):
        with ema_client.averaged(net, url, **given) as version:
            return version, net.bias.tolist()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(evaluate)
        wait_for(lambda: "does not exist; readable" in caplog.text, "it waits for the model")
        client.create_model(model, state_of(net), tracks={"ema": "4ba"})
        wait_for(lambda: "has no version yet" in caplog.text, "it waits for the first version")
        with client.open_run(model) as run:
            version = run.push(step=1, weights={"weight": torch.ones(2, 3), "bias": torch.ones(2)})
        assert waiting.result(60) == (version, [1, 1])
    with pytest.raises(ema_client.DeadlineExceededError, match="does not exist; .*within 0.1 s"):
        with ema_client.averaged(net, server.url("nobody"), timeout_s=0.1):
            pass
    # These read what there is.
    for refused in (
        lambda: ema_client.averaged(net, server.url("nobody"), must_exist=True).__enter__(),
        lambda: ema_client.averaged(net, server.url("nobody"), version=3).__enter__(),
        lambda: ema_client.averaged(net, server.url("nobody"), step=3).__enter__(),
        lambda: ema_client.load_into(net, server.url("nobody")),
        lambda: ema_client.pull(server.url("nobody")),
    ):
        with pytest.raises(ema_client.NotFoundError, match="readable models: .*"):
            refused()


def test_a_training_does_not_wait_for_a_version_that_only_it_can_make(server, model):
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ema_client.attach(net, optimizer, server.url(model), half_life="5ba"):
        with pytest.raises(ema_client.FailedPreconditionError, match="NO_VERSION"):
            with ema_client.averaged(net, server.url(model)):
                pass
        optimizer.step()


def unwritable(how):
    """A parameter that `write` would fail at, or that it would write nothing to."""
    if how == "offloaded":
        return torch.nn.Parameter(torch.empty(3, device="meta"))
    return torch.nn.Parameter(torch.zeros(1).expand(3))


@pytest.mark.parametrize("how", ["averaged", "load_into", "LocalEMA"])
@pytest.mark.parametrize("kind", ["offloaded", "expanded"])
def test_what_cannot_be_written_is_named_and_nothing_changes(server, client, model, kind, how):
    if (kind, how) == ("offloaded", "load_into"):
        pytest.skip("load_into gives it memory")
    url = server.url(model)
    net = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(3)) for name in "abc"})
    local = ema_client.LocalEMA(net)
    local.update()
    with ema_client.attach(net, None, url, half_life="4ba") as ema:
        ema.after_step()
    other = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(3)) for name in "abc"})
    other["b"] = unwritable(kind)
    what = "meta device" if kind == "offloaded" else kind
    with pytest.raises(
        ema_client.InvalidArgumentError, match=f"cannot be written: b: .*{what}"
    ) as raised:
        if how == "averaged":
            with ema_client.averaged(other, url):
                raise AssertionError("not reached")
        elif how == "load_into":
            ema_client.load_into(other, url)
        else:
            local.copy_to(other)
    assert raised.value.reason == "BAD_LAYOUT"
    assert not other["a"].any() and not other["c"].any()


class Tied(torch.nn.Module):
    """Of these layers each has the first one's weight, or its own."""

    def __init__(self, *names: str, is_tied: bool = True) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.Linear(3, 3, bias=False))
            if is_tied:
                self.get_submodule(name).weight = self.get_submodule(names[0]).weight


OTHERS = {
    "in another order": Tied("decoder", "encoder"),
    "not tied": Tied("encoder", "decoder", is_tied=False),
    "under one name": Tied("decoder"),
}


@pytest.mark.parametrize("rename", [None, str], ids=["whole", "part"])
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_model_may_be_tied_otherwise_than_the_trainers(server, client, model, other, rename):
    url = server.url(model)
    track = {"half_life": "4ba", "tensor_rules": {"head.*": "ignore"}}
    net = Tied("encoder", "decoder")
    net.head = torch.nn.Linear(2, 2)
    with ema_client.attach(net, None, url, tracks={"ema": track}) as ema:
        ema.after_step()
    own = state_of(other)
    with ema_client.averaged(other, url, rename=rename):
        for tensor in other.state_dict().values():
            assert torch.equal(tensor, net.encoder.weight)
    assert_same_bits(own, other.state_dict())
    copied = copy.deepcopy(other)
    write(read_average(copied, WhichAverage(url, rename=rename)).pairs(copied))
    for tensor in copied.state_dict().values():
        assert torch.equal(tensor, net.encoder.weight)


def test_a_model_that_ties_what_the_trainer_does_not_is_refused(server, client, model):
    net = Tied("encoder", "decoder", is_tied=False)
    with ema_client.attach(net, None, server.url(model), half_life="4ba") as ema:
        ema.after_step()
    with pytest.raises(ema_client.InvalidArgumentError, match="own there: decoder.weight"):
        with ema_client.averaged(Tied("encoder", "decoder"), server.url(model)):
            raise AssertionError("not reached")


@pytest.mark.parametrize("rename", [None, str], ids=["whole", "part"])
def test_an_empty_version_is_not_the_newest(server, model, pushed, rename):
    net, url = pushed[0], server.url(model)
    with pytest.raises(ema_client.InvalidArgumentError, match="version ''"):
        with ema_client.averaged(net, url, track="fast", version="", rename=rename):
            raise AssertionError("not reached")
    with pytest.raises(ema_client.InvalidArgumentError, match="version ''"):
        ema_client.load_into(net, url, track="fast", version="", rename=rename)


@pytest.mark.parametrize("mixed", [False, True], ids=["cast by the server", "cast here"])
def test_values_that_are_too_large_for_the_modules_dtype(server, client, model, mixed):
    """If all floats of the module have one narrower dtype, the server casts."""
    url = server.url(model)
    net = torch.nn.Linear(2, 1)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, -1e5]]))
    with ema_client.attach(net, None, url, tracks={"raw": "copy"}) as ema:
        ema.after_step()
    half = torch.nn.Linear(2, 1).half()
    if mixed:
        half.bias = torch.nn.Parameter(half.bias.float())
    own = state_of(half)
    with pytest.raises(ema_client.InvalidArgumentError, match="is -100000, and float16 ends at"):
        with ema_client.averaged(half, url, track="raw"):
            raise AssertionError("not reached")
    for overflow, written in {"saturate": -65504, "inf": -float("inf")}.items():
        with ema_client.averaged(half, url, track="raw", overflow=overflow):
            assert half.weight.tolist() == [[1, written]]
    assert_same_bits(own, half.state_dict())
