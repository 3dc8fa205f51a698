# SPDX-License-Identifier: Apache-2.0
"""Frozen tensors are pushed once a run; groups of tensors go by schedules of their own."""

from __future__ import annotations

import pathlib

import ema_client
import numpy as np
import pytest
import torch
from ema_client._model.torch_model import checksums, weighted_sum
from server_group import ServerGroup
from testing import assert_same_bits, replay

HALF = {"smoothing": 0.5}


class Adapter(torch.nn.Module):
    """A large frozen base, a small frozen bias, and the adapter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.base = torch.nn.Linear(600, 600).requires_grad_(False)
        self.down = torch.nn.Linear(600, 3, bias=False)
        self.up = torch.nn.Linear(3, 600, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapter_trainer():
    module = Adapter()
    optimizer = torch.optim.SGD([*module.down.parameters(), *module.up.parameters()], lr=0.01)

    def step():
        optimizer.zero_grad()
        module(torch.randn(4, 600)).square().mean().backward()
        optimizer.step()

    return module, optimizer, step


def byte_counts(module):
    """Of what is trained, and of what is frozen."""
    live = sum(p.numel() * 4 for p in module.parameters() if p.requires_grad)
    return live, sum(p.numel() * 4 for p in module.parameters() if not p.requires_grad)


def test_a_trainer_sends_frozen_tensors_once(server, client, model):
    module, optimizer, step = adapter_trainer()
    live, frozen = byte_counts(module)
    logged = {}
    with ema_client.attach(
        module, optimizer, server.url(model), tracks={"ema": "3ba", "slow": "30ba", "raw": "copy"}
    ) as ema:
        for number in range(1, 31):
            step()
            logged[number] = {name: p.detach().clone() for name, p in module.named_parameters()}
        ema.close()
        assert ema.stats.pushes == 30
        assert ema.stats.sent_bytes == 30 * live + frozen
    pushes = [(entry.version, logged[entry.version.step]) for entry in client.versions(model)]
    for track in ("ema", "slow"):
        assert_same_bits(replay(pushes, track), client.pull(model, track=track))
    assert_same_bits(logged[30], client.pull(model, track="raw"))

    # The next life of the trainer has to show them once again.
    module, optimizer, step = adapter_trainer()
    with ema_client.attach(
        module,
        optimizer,
        server.url(model),
        tracks={"ema": "3ba", "slow": "30ba", "raw": "copy"},
        existing="continue",
    ) as ema:
        for _ in range(3):
            step()
        ema.close()
        assert ema.stats.sent_bytes == 3 * live + frozen


@pytest.mark.parametrize("how", ["written", "data", "assigned", "permuted", "unfrozen"])
def test_what_was_frozen_and_changes_is_pushed(server, client, model, how):
    module, optimizer, step = adapter_trainer()
    live, frozen = byte_counts(module)
    logged = {}

    def log(number):
        step()
        logged[number] = {name: p.detach().clone() for name, p in module.named_parameters()}

    # PyTorch does not count writes through `.data`.
    checks = how == "data"
    with ema_client.attach(
        module, optimizer, server.url(model), tracks={"ema": HALF}, check=checks
    ) as ema:
        for number in range(1, 4):
            log(number)
        ema.wait_released()
        before = module.base.weight.detach().clone()
        if how == "written":
            with torch.no_grad():
                module.base.weight[7, 9] += 1
        elif how == "data":
            module.base.weight.data[7, 9] += 1
        elif how == "assigned":
            module.base.weight.data = before + 1
        elif how == "permuted":
            module.base.weight.data = before.flip(0)
        else:
            module.base.weight.requires_grad_(True)
            optimizer.add_param_group({"params": [module.base.weight]})
        log(4)
        assert not torch.equal(before, module.base.weight)
        ema.close()
        assert ema.stats.pushes == 4
        assert ema.stats.sent_bytes == 4 * live + 2 * frozen
    pushes = [(entry.version, logged[entry.version.step]) for entry in client.versions(model)]
    assert_same_bits(replay(pushes, "ema"), client.pull(model, track="ema"))


def test_their_values_are_read_only_after_a_write(server, client, model, monkeypatch):
    """A write of what was there (averaged() on one rank) changes nothing for the server."""
    module, optimizer, step = adapter_trainer()
    live, frozen = byte_counts(module)
    read = []

    def recorded(tensors):
        given = list(tensors)
        read.extend(tuple(tensor.shape) for tensor in given)
        return checksums(given)

    with ema_client.attach(module, optimizer, server.url(model), tracks={"ema": HALF}) as ema:
        monkeypatch.setattr("ema_client._trainer.frozen.checksums", recorded)
        for _ in range(3):
            step()
        assert read == []
        with torch.no_grad():
            module.base.weight.mul_(1)
        step()
        step()
        assert read == [(600, 600)]
        ema.close()
        assert ema.stats.sent_bytes == 5 * live + frozen


def resident_bytes(field):
    """Of this process: "VmRSS" now, "VmHWM" at most since `clear_refs`."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) << 10


def test_frozen_and_foreign_tensors_are_not_copied(server, client, model):
    """The step that pushes them waits for it, so that they may change afterwards."""
    count = 48 << 20
    module = torch.nn.ParameterDict(
        {
            "trained": torch.nn.Parameter(torch.ones(3)),
            "frozen": torch.nn.Parameter(torch.ones(count), requires_grad=False),
            "foreign": torch.nn.Parameter(torch.ones(count)),
        }
    )
    optimizer = torch.optim.SGD([module["trained"]], lr=1.0)
    with ema_client.attach(module, optimizer, server.url(model), tracks={"raw": "copy"}) as ema:
        for step in (1, 2):
            ema.wait_pushed()
            before = resident_bytes("VmRSS")
            pathlib.Path("/proc/self/clear_refs").write_text("5")
            optimizer.step()
            assert resident_bytes("VmHWM") - before < 3 * count
            with torch.no_grad():
                module["foreign"].fill_(step + 1)
                module["frozen"].zero_()
            version = ema.wait_pushed()
            assert version.step == step
            # The frozen one was pushed with step 2, when it had been written.
            raw = client.pull(model, track="raw")
            assert (raw["foreign"] == step).all()
            assert (raw["frozen"] == 2 - step).all()


def test_after_a_failed_push_they_are_pushed_again(server, client, model):
    """After a failure all ranks push them, so that they agree."""
    module, optimizer, step = adapter_trainer()
    live, frozen = byte_counts(module)
    with ema_client.attach(module, optimizer, server.url(model), tracks={"ema": HALF}) as ema:
        for _ in range(2):
            step()
        ema.wait_pushed()
        before = ema.stats.sent_bytes
        with torch.no_grad():
            kept = module.up.weight.clone()
            module.up.weight.fill_(float("nan"))
        optimizer.zero_grad()
        optimizer.step()
        ema.wait_pushed()
        failed = ema.stats.sent_bytes - before
        with torch.no_grad():
            module.up.weight.copy_(kept)
        step()
        step()
        ema.close()
        assert (ema.stats.pushes, ema.stats.skipped) == (4, 1)
        # The server that finds the NaN ends the push to the other servers of its group, which may not have sent all
        # bytes to them.
        assert failed <= live if isinstance(server, ServerGroup) else failed == live
        assert before == 2 * live + frozen
        assert ema.stats.sent_bytes - failed == 4 * live + 2 * frozen


def test_frozen_parameters_that_go_or_have_no_values(server, client, model):
    module, optimizer, step = adapter_trainer()
    module.offloaded = torch.nn.Linear(3, 3, device="meta").requires_grad_(False)
    rules = {"offloaded.*": "ignore"}
    with ema_client.attach(
        module,
        optimizer,
        server.url(model),
        tracks={"ema": {"smoothing": 0.5, "tensor_rules": rules}},
    ) as ema:
        step()
        step()
        del module.offloaded
        step()
        base, module.base = module.base, torch.nn.Identity()
        step()  # A tensor of the model is missing: the push is skipped, not the training.
        module.base = base
        step()
        ema.close()
        assert (ema.stats.pushes, ema.stats.skipped) == (4, 1)


def test_checksums_see_every_change():
    torch.manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.float64):
        values = (torch.randn(61, 33) * 50).to(dtype)
        others = [values.flip(0), values.flip(1), values.roll(1, 1), values[:, :-1], values.clone()]
        others[-1][60, 32] += 1
        for checksum in (lambda t: checksums([t])[0], lambda t: weighted_sum(t).item()):
            assert checksum(values) == checksum(values.clone())
            assert checksum(values.t()) == checksum(values.t().contiguous())
            assert all(checksum(other) != checksum(values) for other in others)
    large = torch.zeros((1 << 21) + 3)
    moved = large.clone()
    large[0] = moved[1 << 20] = 1
    assert weighted_sum(large).item() != weighted_sum(moved).item()
    assert checksums([torch.empty(0), torch.empty(3, device="meta")]) == [0, 0]


def test_runs_of_arrays_have_frozen_tensors_too(client, model):
    weights = {"a": np.full(3, 2.0, np.float32), "frozen": np.full(5, 0.1, np.float32)}
    client.create_model(model, weights, tracks={"ema": HALF})
    with pytest.raises(ema_client.InvalidArgumentError, match="has no tensors forzen"):
        client.open_run(model, frozen=["forzen"])
    with client.open_run(model, frozen=["frozen"]) as run:
        assert run.frozen == ("frozen",)
        assert not run.may_omit_frozen
        run.push(step=1, weights=weights)
        assert run.may_omit_frozen
        weights["a"] += 2
        weights["frozen"] += 9  # Not looked at: the caller has promised.
        assert run.start_push(step=2, weights={"a": weights["a"]}).wait().number == 2
        pulled = client.pull(model, track="ema", framework="numpy")
        assert pulled["a"].tolist() == [3, 3, 3]
        assert_same_bits({"f": np.full(5, 0.1, np.float32)}, {"f": pulled["frozen"]})
        run.push(step=3, weights=weights, frozen_changed=True)
        assert not run.may_omit_frozen
        with pytest.raises(ema_client.InvalidArgumentError, match='tensor "frozen".* 20 bytes'):
            run.push(step=4, weights={"a": weights["a"]})
    pulled = client.pull(model, track="ema", framework="numpy")
    np.testing.assert_allclose(pulled["frozen"], 4.6, rtol=1e-6)


def test_a_group_of_tensors_has_its_own_schedule(server, client, model):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    track = ema_client.Track(
        half_life="4ba",
        update_interval="2ba",
        tensor_rules={
            "1.*": {"smoothing": 0.5, "update_interval": "3ba"},
            "0.bias": "2ba",
            "0.weight": {"half_life": "9ba", "update_interval": "1ba"},
        },
    )
    local = ema_client.LocalEMA(module, tracks={"ema": track})
    logged = {}
    with ema_client.attach(module, optimizer, server.url(model), tracks={"ema": track}) as ema:
        for number in range(1, 8):
            optimizer.zero_grad()
            module(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            local.update()
            logged[number] = {name: p.detach().clone() for name, p in module.named_parameters()}
        ema.close()
        assert ema.stats.pushes == 7  # The one with "1ba" is due at each.
    assert_same_bits(local.weights(), client.pull(model, track="ema"))
    served = client.model(model).tracks["ema"]
    assert dict(served.tensor_rules)["0.bias"] == "half_life=2ba, update_interval=2ba"
    # What the server says can be given back.
    assert client.update_model(model, tracks={"ema": served}).pending_tracks is None
    versions = [entry.version for entry in client.versions(model)]
    own = [version.step for version in versions if version.tracks["ema"].updated]
    group = [v.step for v in versions if v.tracks["ema"].rules["1.*"].updated]
    assert (own, group) == ([1, 2, 4, 6], [1, 3, 6])
    assert versions[5].tracks["ema"].rules["1.*"].update_weight == 0.5
    assert local.records["ema"].rules["1.*"].update_count == 3

    state = local.state_dict()
    other = ema_client.LocalEMA(module, tracks={"ema": track})
    other.load_state_dict(state)
    assert_same_bits(local.weights(), other.weights())
    with pytest.raises(ema_client.InvalidArgumentError, match="has 1 schedules"):
        ema_client.LocalEMA(module, tracks={"ema": "4ba"}).load_state_dict(state)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("2bananas", "2bananas"),
        ("avrage", 'must be "average", "copy" or "ignore"'),
        ({"half_life": "2ba", "smoothing": 0.5}, "half_life and smoothing"),
        ({"half_live": "2ba"}, 'did you mean "half_life"'),
        ({"half_life": "2ba", "dtype": "float64"}, "dtype 'float64': a rule has"),
        (7, "must be names or globs"),
    ],
)
def test_what_is_wrong_with_a_rule_is_said(client, model, rule, message):
    weights = {"a": np.zeros(3, np.float32)}
    with pytest.raises(ema_client.InvalidArgumentError, match=message):
        client.create_model(
            model, weights, tracks={"ema": {"half_life": "9ba", "tensor_rules": {"a": rule}}}
        )
    with pytest.raises(ema_client.NotFoundError):
        client.model(model)
