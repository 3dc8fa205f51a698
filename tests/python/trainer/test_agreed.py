# SPDX-License-Identifier: Apache-2.0
"""attach() on ranks that were given other arguments, and to models that were made with others."""

from __future__ import annotations

import json
import subprocess
import sys

import ema_client
import pytest
import torch
from ema_client._trainer.arguments import Arguments, check_agreed
from safetensors.torch import save_file
from testing import started

LONG = {f"layer{n}.*": "copy" for n in range(50)}
# What rank 0 and rank 1 are given, and what both must say.
CASES = {
    "half_life": ({"half_life": "3ba"}, {"half_life": "5ba"}),
    "interval": ({"half_life": "3ba"}, {"half_life": "3ba", "update_interval": "2ba"}),
    "tracks": (
        {"tracks": {"ema": {"half_life": "3ba", "tensor_rules": {"bias": "copy"}}}},
        {"tracks": {"ema": {"half_life": "3ba", "tensor_rules": {"bias": "ignore"}}}},
    ),
    "preset": (
        {"preset": {"preset": "ema_pytorch", "update_model_with_ema_every": 10}},
        {"preset": {"preset": "ema_pytorch", "update_model_with_ema_every": 20}},
    ),
    "preset arguments": (
        {"preset": "ema_pytorch", "ignore_names": ["bias"]},
        {"preset": "ema_pytorch", "beta": 0.5, "ignore_names": []},
    ),
    "late in a long text": (
        {"tracks": {"ema": {"half_life": "3ba", "tensor_rules": {**LONG, "bias": "copy"}}}},
        {"tracks": {"ema": {"half_life": "3ba", "tensor_rules": {**LONG, "bias": "ignore"}}}},
    ),
    "buffers": ({"half_life": "3ba"}, {"half_life": "3ba", "buffers": "average"}),
    "start_step": ({"half_life": "3ba"}, {"half_life": "3ba", "start_step": 10}),
    "existing": ({"half_life": "3ba"}, {"half_life": "3ba", "existing": "new"}),
    "policies": (
        {"half_life": "3ba"},
        {"half_life": "3ba", "on_error": "wait", "non_finite": "skip"},
    ),
    "optimizer": ({"half_life": "3ba", "without": True}, {"half_life": "3ba"}),
    "same": (
        {"half_life": "3ba", "max_outage_s": 60, "max_wait_s": 5},
        {"tracks": {"ema": "3ba"}, "max_outage_s": 60.0, "max_wait_s": 6},
    ),
    "the same preset": (
        {"preset": {"preset": "ema_pytorch", "beta": 0.5}},
        {"preset": "ema_pytorch", "beta": 0.5},
    ),
}
SAID = {
    "half_life": "half_life is '3ba' on rank 0, '5ba' on rank 1",
    "interval": "update_interval is None on rank 0, '2ba' on rank 1",
    "tracks": "{'bias': 'copy'}}} on rank 0, {'ema': {'half_life': '3ba', 'tensor_rules': {'bias': 'ig",
    "preset": "update_model_with_ema of preset is ",
    "preset arguments": "ignore_names is ['bias'] on rank 0, [] on rank 1; beta is not given on rank 0, 0.5",
    "late in a long text": "'layer49.*': 'copy', 'bias': 'copy'}}} on rank 0, ",
    "buffers": "tracks without buffers is ['ema'] on rank 0, [] on rank 1",
    "start_step": "start_step is None on rank 0, 10.0 on rank 1",
    "existing": "existing is None on rank 0, 'new' on rank 1",
    "policies": "non_finite is 'reject' on rank 0, 'skip' on rank 1; on_error is None on rank 0, ",
    "optimizer": "optimizer is None on rank 0, 'given' on rank 1",
    "same": "attached",
    "the same preset": "attached",
}

RANK = """
import json, sys
import ema_client, torch
import torch.distributed as dist

rank, init_file, url, cases = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=2)
torch.manual_seed(0)
module = torch.nn.Linear(3, 4)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
for name, given in json.loads(cases).items():
    stepping = None if given[rank].pop("without", False) else optimizer
    try:
        ema = ema_client.attach(module, stepping, url + name.replace(" ", "-"), **given[rank])
        print(name, ": attached", sep="")
        optimizer.step()
        ema.close()
    except ValueError as error:
        print(name, ": ", error, sep="")
"""


def test_arguments_that_differ_between_ranks_are_named_on_all(server, client, model, tmp_path):
    arguments = [tmp_path / "init", server.url(model), json.dumps(CASES)]
    commands = [[sys.executable, "-c", RANK, rank, *arguments] for rank in (0, 1)]
    with started(*commands, stdout=subprocess.PIPE, text=True) as ranks:
        outputs = [rank.communicate(timeout=100)[0].splitlines() for rank in ranks]
    assert outputs[0] == outputs[1]
    assert [line.partition(":")[0] for line in outputs[0]] == list(SAID)
    for line, said in zip(outputs[0], SAID.values()):
        assert said in line
    # Nothing was made of what does not fit together.
    assert [one.name for one in client.models()] == [model + "same", model + "the-same-preset"]


def test_tracks_that_differ_are_refused_whatever_is_said_of_them():
    ranks = [Arguments({}, tracks, {"tracks": "the same"}) for tracks in ("[3ba]", "[5ba]")]
    with pytest.raises(
        ema_client.InvalidArgumentError, match=r"\[3ba\] on rank 0, \[5ba\] on rank 1"
    ):
        check_agreed(ranks)


def test_sets_are_told_by_what_is_in_them():
    names = [f"layer{n}" for n in range(30)]
    one, other = (Arguments.of({"names": set(some)}, [], {}) for some in (names, names[::-1]))
    assert one == other


@pytest.mark.parametrize("how", ["attached", "another order", "imported"])
def test_a_model_with_other_options_is_refused(server, client, model, tmp_path, how):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    url, options = server.url(model), {"max_pinned_versions": 3, "non_finite": "skip"}
    if how == "imported":
        save_file({**net.state_dict()}, tmp_path / "net.safetensors")
        path = tmp_path / "net.safetensors"
        client.import_weights(model, path, tracks={"ema": "10ba"}, step=5, **options)
    else:
        ema_client.attach(net, optimizer, url, half_life="10ba", **options).close()
    if how == "another order":  # As other pipeline stages may have it.
        net = torch.nn.ModuleDict({"1": net[1], "0": net[0]})
    for others, said in [
        ({"non_finite": "reject"}, "non_finite reject here, skip there"),
        ({"max_pinned_versions": 4}, "max_pinned_versions 4 here, 3 there"),
        ({"half_life": "11ba"}, 'track "ema"'),
    ]:
        with pytest.raises(ema_client.AlreadyExistsError, match=said) as raised:
            others = {"existing": "continue", **others}
            ema_client.attach(net, optimizer, url, **{"half_life": "10ba", **options, **others})
        assert raised.value.reason == "MODEL_DIFFERS"
        assert str(raised.value).count("first change its tracks (Client.update_model, ") == 1
    client.update_model(model, tracks={"ema": "11ba"})
    ema_client.attach(net, optimizer, url, **{**options, "half_life": "11ba"}).close()
    with ema_client.attach(net, optimizer, url, half_life="10ba", **options) as ema:
        optimizer.step()
    assert ema.stats.pushes == 1


@pytest.mark.parametrize("how", ["the same order", "another order", "imported"])
def test_a_model_whose_tracks_were_changed_goes_on_with_its_first_arguments(
    server, client, model, tmp_path, how
):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tracks = {"ema": "10ba", "raw": "copy"}
    if how == "imported":
        save_file({**net.state_dict()}, tmp_path / "net.safetensors")
        client.import_weights(model, tmp_path / "net.safetensors", tracks=tracks, step=5)
    with ema_client.attach(net, optimizer, server.url(model), tracks=tracks):
        client.update_model(model, pause=["raw"], tracks={"slow": "50ba"})
        optimizer.step()
    changed = client.model(model).tracks
    assert changed.keys() == {"ema", "raw", "slow"}
    if how == "another order":
        net = torch.nn.ModuleDict({"1": net[1], "0": net[0]})
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for first_again in (tracks, dict(reversed(tracks.items()))):
        with ema_client.attach(
            net, optimizer, server.url(model), tracks=first_again, existing="continue"
        ) as ema:
            optimizer.step()
        assert ema.stats.pushes == 1
    assert client.model(model).tracks == changed


@pytest.mark.parametrize("has_committed", [False, True])
def test_tracks_that_were_changed_since_are_named_once(
    server, client, model, caplog, has_committed
):
    net = torch.nn.Linear(3, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def attach(tracks: dict[str, str]) -> list[str]:
        caplog.clear()
        with ema_client.attach(
            net, optimizer, server.url(model), tracks=tracks, existing="continue"
        ) as ema:
            ema.load_state_dict(None)
            if has_committed:
                optimizer.step()
        said = [record.message for record in caplog.records if "since the model" in record.message]
        return [message.partition(f'model "{model}": ')[2] for message in said]

    first = {"ema": "10ba", "raw": "copy", "old": "5ba"}
    assert attach(first) == attach(first) == []
    client.update_model(model, tracks={"ema": "40ba", "new": "80ba"}, remove=["old"])
    assert attach(first) == [
        'track "ema": its schedule was changed to half_life=40ba on the server since the model was made; '
        "it continues with that",
        'track "old": was removed on the server since the model was made; nothing goes into it',
    ]
    assert attach({"ema": "40ba", "raw": "copy", "new": "80ba"}) == []
    client.update_model(model, pause=["raw"])
    assert attach({"ema": "40ba", "raw": "copy", "new": "80ba"}) == [
        'track "raw": was paused on the server since the model was made; nothing goes into it'
    ]


def test_what_is_a_buffer_is_no_order(server, model):
    net = torch.nn.Module()
    net.register_buffer("mean", torch.zeros(3))
    net.weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ema_client.attach(net, optimizer, server.url(model), half_life="10ba").close()
    other = torch.nn.Module()
    other.register_buffer("weight", torch.zeros(3))
    other.mean = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(ema_client.AlreadyExistsError, match="buffer float32"):
        ema_client.attach(
            other, optimizer, server.url(model), half_life="10ba", existing="continue"
        )
