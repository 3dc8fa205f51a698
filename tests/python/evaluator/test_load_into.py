# SPDX-License-Identifier: Apache-2.0
"""load_into(): averages for good, into modules with memory and without."""

from __future__ import annotations

import contextlib
import logging

import ema_client
import pytest
import torch
from testing import assert_same_bits

TRACKS = {"ema": "4ba", "raw": "copy"}


class Net(torch.nn.Module):
    """With BatchNorm, tied weights, a frozen parameter, and a buffer that no state_dict has."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width))
        self.body[0].bias.requires_grad_(False)
        self.head = torch.nn.Linear(width, 4, bias=False)
        self.tied = torch.nn.Linear(width, 4, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.body(x)) * self.mask + self.head(self.body(x))


def on_meta(make=Net, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    with torch.device("meta"):
        return make().to(dtype)


@pytest.fixture
def average(client, server, model):
    """The average of a network that was trained for a step, as its state."""
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    with ema_client.attach(net, optimizer, server.url(model), tracks=TRACKS) as ema:
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        ema.wait_pushed()
    pulled = client.pull(model, track="ema")
    assert not torch.equal(pulled["head.weight"], net.head.weight)
    return pulled


def test_tensors_stay_the_same_objects(server, model, average):
    net = Net()
    before = dict(net.named_parameters())
    loaded = ema_client.load_into(net, server.url(model))
    assert loaded.version == average.version
    assert (loaded.missing_keys, loaded.unexpected_keys, loaded.meta_buffers) == ((), (), ())
    assert_same_bits(average, net.state_dict())
    assert all(net.get_parameter(name) is parameter for name, parameter in before.items())
    assert not net.body[0].bias.requires_grad


def test_a_module_whose_state_is_a_copy(client, server, model):
    """FSDP's, DeepSpeed's and users' state_dict hooks clone."""

    def clone(module: object, state: dict[str, torch.Tensor], *_: object) -> None:
        state.update({name: value.clone() for name, value in state.items()})

    net, other = Net(), Net()
    for module in (net, other):
        module.register_state_dict_post_hook(clone)
    net(torch.randn(8, 4))
    with ema_client.attach(net, None, server.url(model), tracks=TRACKS) as ema:
        ema.after_step()
    assert_same_bits(net.state_dict(), client.pull(model, track="raw"))
    loaded = ema_client.load_into(other, server.url(model))
    assert loaded.missing_keys == loaded.unexpected_keys == ()
    assert_same_bits(net.state_dict(), other.state_dict())


class Hiding(Net):
    """Lists only what is trained, as models do that are to have no other parameters in the optimizer."""

    def named_parameters(self, *args, **kwargs):
        return ((n, p) for n, p in super().named_parameters(*args, **kwargs) if p.requires_grad)

    def named_buffers(self, *args, **kwargs):
        return iter(())


class Cloning(Net):
    """Lists copies of its parameters."""

    def named_parameters(self, *args, **kwargs):
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name, torch.nn.Parameter(parameter.detach().clone())


class Renaming(Net):
    def named_parameters(self, *args, **kwargs):
        return ((f"my.{n}", p) for n, p in super().named_parameters(*args, **kwargs))


@pytest.mark.parametrize("make", [Hiding, Cloning, Renaming], ids=lambda make: make.__name__)
def test_a_module_that_lists_its_tensors_in_its_own_way(client, server, model, make):
    """Nothing is missing that a checkpoint of it has."""
    net, other, url = make(), make(), server.url(model)
    with ema_client.attach(net, None, url, tracks=TRACKS) as ema:
        ema.after_step()
        with torch.no_grad():
            for tensor in net.state_dict().values():
                tensor.add_(1)
        ema.after_step()
    assert_same_bits(net.state_dict(), client.pull(model, track="raw"))
    own = {name: value.clone() for name, value in other.state_dict().items()}
    with ema_client.averaged(other, url, track="raw"):
        assert_same_bits(net.state_dict(), other.state_dict())
    assert_same_bits(own, other.state_dict())
    loaded = ema_client.load_into(other, url, track="raw")
    assert loaded.missing_keys == loaded.unexpected_keys == ()
    assert_same_bits(net.state_dict(), other.state_dict())


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_meta_module_gets_memory(server, model, average, dtype, mode):
    net = on_meta(dtype=dtype)
    with mode():
        loaded = ema_client.load_into(net, server.url(model))
    # As after load_state_dict: what no state has is for the caller to make.
    assert loaded.meta_buffers == ("mask",)
    net.mask = torch.ones(4, dtype=dtype)
    assert net.tied.weight is net.head.weight
    assert net.head.weight.requires_grad and not net.body[0].bias.requires_grad
    for name, value in net.state_dict().items():
        expected = average[name]
        assert value.dtype == (dtype if expected.is_floating_point() else expected.dtype)
        assert torch.equal(value, expected.to(value.dtype)), name
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    net(torch.randn(8, 4, dtype=dtype)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(net.head.weight, average["head.weight"].to(dtype))


def test_tensors_with_memory_stay_where_others_get_it(server, model, average):
    net = on_meta()
    net.head = net.tied = torch.nn.Linear(5, 4, bias=False)
    weight = net.head.weight
    ema_client.load_into(net, server.url(model), device=torch.device("cpu"))
    assert net.head.weight is weight is net.tied.weight
    assert_same_bits(average, net.state_dict())


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize("device", ["nowhere", "cuda:99"])
def test_a_device_that_is_not_there(server, model, average, place, device):
    net = Net() if place == "cpu" else on_meta()
    before = dict(net.state_dict())
    with pytest.raises(
        ema_client.InvalidArgumentError, match=f"device '{device}': cannot be used here"
    ):
        ema_client.load_into(net, server.url(model), device=device)
    assert all(net.state_dict()[name].device == one.device for name, one in before.items())


def test_a_model_that_has_memory_elsewhere_is_not_moved(server, model, average):
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(
        ema_client.InvalidArgumentError,
        match="device 'meta': is for tensors that have no memory yet; body.0.weight is on cpu: move",
    ):
        ema_client.load_into(net, server.url(model), device="meta")
    assert_same_bits(before, net.state_dict())
    ema_client.load_into(net, server.url(model), device="cpu")
    assert_same_bits(average, net.state_dict())


class Other(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.nn.Linear(2, 2)
        del self.head, self.tied


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_strict_names_all_that_differs_and_changes_nothing(server, model, average, place):
    with torch.device(place):
        net = Other()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    tensors = dict(net.named_parameters())
    with pytest.raises(ema_client.InvalidArgumentError) as error:
        ema_client.load_into(net, server.url(model))
    for name in ("not on the server: extra.weight, extra.bias", "not in the module: head.weight"):
        assert name in str(error.value)
    assert all(net.get_parameter(name) is tensor for name, tensor in tensors.items())
    if place == "cpu":
        assert_same_bits(before, net.state_dict())


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_not_strict_loads_what_both_have(server, model, average, place):
    with torch.device(place):
        net = Other()
    extra = net.extra.weight
    loaded = ema_client.load_into(net, server.url(model), strict=False)
    assert loaded.missing_keys == ("extra.weight", "extra.bias")
    assert loaded.unexpected_keys == ("head.weight",)
    assert net.extra.weight is extra
    assert_same_bits({k: v for k, v in average.items() if k.startswith("body")}, net.body_state())


Other.body_state = lambda self: {  # type: ignore[attr-defined]
    f"body.{name}": tensor for name, tensor in self.body.state_dict().items()
}


class Foreign(torch.nn.Module):
    """Nothing of it is on the server."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_nothing_in_common_pulls_next_to_nothing(
    server, client, model, average, monkeypatch, alone, is_sharded
):
    net = Foreign()
    if is_sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    pulls = []
    pull = ema_client.Client.pull

    def record(*args, **options):
        pulls.append(pull(*args, **options))
        return pulls[-1]

    monkeypatch.setattr(ema_client.Client, "pull", record)
    loaded = ema_client.load_into(net, server.url(model), strict=False)
    assert loaded.version == client.model(model).latest
    assert loaded.missing_keys == ("foreign.weight", "foreign.bias")
    assert [len(weights) for weights in pulls] == [1]


@pytest.mark.parametrize("strict", [True, False])
def test_shapes_must_match(server, model, average, strict):
    net = Net(width=6)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(
        ema_client.InvalidArgumentError, match=r"body.0.weight: \(6, 4\) in the module"
    ):
        ema_client.load_into(net, server.url(model), strict=strict)
    assert_same_bits(before, net.state_dict())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("rename", [None, "part.{}".format], ids=["whole", "part"])
@pytest.mark.parametrize("others", [{}, {"raw": "copy"}], ids=["every track", "one track"])
def test_tensors_that_the_track_ignores_are_left(
    server, client, model, caplog, others, rename, strict
):
    url = server.url(model)
    ignoring = ema_client.Track(tensor_rules={"*head.*": "ignore"})
    with ema_client.attach(
        Net(), None, url, tracks={"ema": ignoring, **others}, rename=rename
    ) as ema:
        ema.after_step()
    key = rename or str
    for place in ("cpu", "meta"):
        with torch.device(place):
            net = Net()
        head = net.head.weight
        before = head.clone()
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "ema_client"):
            loaded = ema_client.load_into(net, url, strict=strict, rename=rename)
        assert loaded.missing_keys == loaded.unexpected_keys == ()
        assert loaded.ignored_keys == (key("head.weight"),)
        assert 'track "ema" ignores 1 tensors' in caplog.text
        assert net.head.weight is net.tied.weight is head and head.device.type == place
        assert place == "meta" or torch.equal(head, before)
        average = client.pull(model, track="ema")
        assert_same_bits(
            average, {key(f"body.{name}"): t for name, t in net.body.state_dict().items()}
        )
    net.other = torch.nn.Linear(2, 2)
    net.header = torch.nn.Linear(2, 2)
    if strict:
        with pytest.raises(ema_client.InvalidArgumentError) as error:
            ema_client.load_into(net, url, rename=rename)
        missing = ", ".join(map(key, ["other.weight", "other.bias", "header.weight"]))
        assert f"not on the server: {missing}, {key('header.bias')} " in f"{error.value.args[0]} "


def test_a_mask_of_integers_becomes_one_of_bools(server, client, model):
    weights = {"mask": torch.tensor([0, 1, 2], dtype=torch.uint8), "w": torch.ones(2)}
    client.create_model(model, weights, tracks={"ema": "10ba"})
    with client.open_run(model) as run:
        run.push(step=1, weights=weights)
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.zeros(2))
    module.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
    ema_client.load_into(module, server.url(model))
    assert module.mask.tolist() == [False, True, True]


def test_a_pull_that_fails_leaves_the_module_without_memory(server, model, average):
    net = on_meta()
    with pytest.raises(ema_client.NotFoundError):
        ema_client.load_into(net, server.url(model), version="nobody")
    assert all(tensor.is_meta for tensor in net.state_dict().values())


def test_a_module_that_keeps_parameters_elsewhere_is_not_reported_as_loaded(server, client, model):
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = [torch.nn.Parameter(torch.ones(2))]

        def named_parameters(self, *args, **kwargs):
            yield "own", self.own[0]

    with ema_client.attach(Own(), None, server.url(model)) as ema:
        ema.after_step()
    net = on_meta(Own)
    with pytest.raises(ema_client.InvalidArgumentError, match="has other tensors .* own; does"):
        ema_client.load_into(net, server.url(model))
    assert not ema_client.load_into(Own(), server.url(model)).missing_keys


def test_no_memory_for_a_part_leaves_all_without(server, model, average, monkeypatch):
    net = on_meta()
    empty_like = torch.empty_like
    made = []

    def little_memory(tensor, **options):
        if len(made) == 2:
            raise torch.OutOfMemoryError("no memory")
        made.append(empty_like(tensor, **options))
        return made[-1]

    monkeypatch.setattr(torch, "empty_like", little_memory)
    with pytest.raises(torch.OutOfMemoryError):
        ema_client.load_into(net, server.url(model))
    assert all(tensor.is_meta for tensor in net.state_dict().values())


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_a_part_of_the_model_by_other_names(server, model, average, place):
    with torch.device(place):
        stage = Net().body
    loaded = ema_client.load_into(stage, server.url(model), rename=lambda name: f"body.{name}")
    assert loaded.unexpected_keys == ("head.weight",)
    assert loaded.missing_keys == loaded.meta_buffers == ()
    names = {name: f"body.{name}" for name in stage.state_dict()}
    assert_same_bits({n: average[names[n]] for n in names}, stage.state_dict())
    with pytest.raises(ema_client.InvalidArgumentError, match="not on the server: stage.0.weight"):
        ema_client.load_into(stage, server.url(model), rename=lambda name: f"stage.{name}")


def test_a_pull_is_in_host_memory_whatever_the_default_device_is(client, model):
    client.create_model(model, {"w": torch.ones(2), "none": torch.ones(0, 2)}, tracks=TRACKS)
    with client.open_run(model) as run:
        run.push(step=1, weights={"w": torch.ones(2), "none": torch.ones(0, 2)})
    with torch.device("meta"):  # As torch.set_default_device.
        pulled = client.pull(model, track="ema")
    assert {tensor.device.type for tensor in pulled.values()} == {"cpu"}


def test_a_pull_onto_a_device(server, client, model, average):
    pulled = client.pull(model, track="ema", device="cpu")
    assert_same_bits(average, pulled)
    with pytest.raises(ema_client.InvalidArgumentError, match="one pull"):
        client.refresh(pulled)
    assert client.pull(model, track="ema", device="meta")["head.weight"].is_meta
    with pytest.raises(ema_client.InvalidArgumentError, match="device"):
        client.pull(model, track="ema", device="cpu", framework="numpy")
    with pytest.raises(ema_client.InvalidArgumentError, match="device"):
        client.pull(model, track="ema", device="cpu", out=dict(average))


@pytest.fixture
def alone(tmp_path):
    """A process group of this process."""
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        yield


def test_a_meta_module_of_fully_shard(server, model, average, alone):
    from torch.distributed.fsdp import fully_shard

    net = on_meta()
    del net.tied  # Of which fully_shard makes no secret either.
    net.tied = net.head
    fully_shard(net.body)
    fully_shard(net)
    loaded = ema_client.load_into(net, server.url(model))
    assert loaded.meta_buffers == ("mask",)
    net.mask = torch.ones(4)
    state = {
        name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in net.state_dict().items()
    }
    assert_same_bits(average, state)
    plain = Net()
    plain.load_state_dict(average)
    x = torch.randn(8, 4)
    assert torch.equal(net.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("mixed", [False, True], ids=["cast by the server", "cast here"])
def test_values_that_are_too_large_for_the_modules_dtype(server, client, model, mixed):
    """If all floats of the module have one narrower dtype, the server casts."""
    net = torch.nn.Linear(2, 1)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, -1e5]]))
    with ema_client.attach(net, None, server.url(model), tracks={"raw": "copy"}) as ema:
        ema.after_step()
    half = torch.nn.Linear(2, 1).half()
    if mixed:
        half.bias = torch.nn.Parameter(half.bias.float())
    before = state_bits(half)
    with pytest.raises(ema_client.InvalidArgumentError, match="is -100000, and float16 ends at"):
        ema_client.load_into(half, server.url(model), track="raw")
    assert state_bits(half) == before
    ema_client.load_into(half, server.url(model), track="raw", overflow="saturate")
    assert half.weight.tolist() == [[1, -65504]]
    ema_client.load_into(half, server.url(model), track="raw", overflow="inf")
    assert half.weight[0, 1] == -float("inf")
    ema_client.load_into(half.bfloat16(), server.url(model), track="raw")


def state_bits(module: torch.nn.Module) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in module.state_dict().items()}
