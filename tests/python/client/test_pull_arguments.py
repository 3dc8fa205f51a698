# SPDX-License-Identifier: Apache-2.0
"""What pull() is asked for: a selection, a dtype, a framework, a device."""

from __future__ import annotations

import ema_client
import ml_dtypes
import numpy as np
import pytest
import torch

WEIGHTS = {
    "0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "0.bias": np.arange(2, dtype=np.float32),
    "1.weight": np.ones(4, np.float32),
}
BOX = ema_client.Shard("1.weight", (1,), (2,))


@pytest.fixture
def pushed(client, model):
    client.create_model(model, WEIGHTS, tracks={"raw": "copy"})
    with client.open_run(model) as run:
        run.push(step=1, weights=WEIGHTS)


SELECTIONS = [
    ({}, set(WEIGHTS)),
    ({"tensors": None, "slices": None}, set(WEIGHTS)),
    ({"tensors": "0.*"}, {"0.weight", "0.bias"}),
    ({"tensors": "1.weight"}, {"1.weight"}),
    ({"tensors": ["0.bias", "1.*"]}, {"0.bias", "1.weight"}),
    ({"tensors": [], "slices": [BOX]}, {"1.weight"}),
    ({"slices": BOX}, {"1.weight"}),
    ({"tensors": "0.bias", "slices": []}, {"0.bias"}),
]


@pytest.mark.parametrize("selection, expected", SELECTIONS)
def test_what_is_selected_comes(server, client, model, pushed, selection, expected):
    assert set(client.pull(model, track="raw", **selection)) == expected
    assert set(ema_client.pull(server.url(model), track="raw", **selection)) == expected


WRONG = {
    "no-tensors": ({"tensors": []}, r"tensors \[\]: selects nothing; None is for everything"),
    "no-slices": ({"slices": ()}, r"slices \(\): selects nothing"),
    "no-name": ({"tensors": [3]}, "tensors: 3: must be a tensor's name"),
    "no-box": ({"slices": ["1.weight"]}, "slices: '1.weight': must be an ema_client.Shard"),
    "version": ({"version": ""}, "version '': must be a number, a record, or a label"),
    "dtype": ({"dtype": torch.int8}, r"dtype torch.int8: must be float32, float16 or bfloat16"),
    "dtype-name": ({"dtype": "half"}, "dtype 'half': must be"),
    "framework": (
        {"framework": "nump"},
        """framework 'nump': must be "auto", "torch" or "numpy\"""",
    ),
    "device-name": ({"device": "cudaa"}, "device 'cudaa': cannot be used here: "),
    "device-number": ({"device": "cuda:99"}, "device 'cuda:99': cannot be used here: "),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_had_is_named_before_a_byte_comes(client, model, pushed, what, tmp_path):
    arguments, message = WRONG[what]
    received: list[int] = []
    with pytest.raises(ValueError, match=message) as raised:
        client.pull(model, track="raw", on_progress=received.append, **arguments)
    assert isinstance(raised.value, ema_client.InvalidArgumentError)
    assert not received
    if arguments.keys() & {"tensors", "slices", "dtype"}:
        with pytest.raises(ValueError, match=message):
            client.save(model, tmp_path / "saved.safetensors", track="raw", **arguments)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "dtype",
    [
        "bfloat16",
        torch.bfloat16,
        ml_dtypes.bfloat16,
        np.dtype(ml_dtypes.bfloat16),
        torch.float16,
        np.float16,
        np.dtype("float16"),
        torch.float32,
    ],
    ids=repr,
)
def test_dtypes_of_frameworks(client, model, pushed, dtype):
    pulled = client.pull(model, track="raw", dtype=dtype, framework="torch")
    name = (
        "bfloat16" if "bfloat16" in str(dtype) else "float16" if "16" in str(dtype) else "float32"
    )
    assert pulled["0.bias"].dtype == getattr(torch, name)


NOTHING = {
    "save": lambda c, m: c.save(m, "averaged/", track="raw", files=""),
    "save_path": lambda c, m: c.save(m, None, track="raw"),
    "attach_files": lambda c, m: c.attach_files(m, ""),
    "remove_attached_file": lambda c, m: c.remove_attached_file(m, ""),
    "import": lambda c, m: c.import_weights("other", "", tracks={"ema": "4ba"}),
    "import_none": lambda c, m: c.import_weights("other", None, tracks={"ema": "4ba"}),
    "remove": lambda c, m: c.update_model(m, remove=""),
    "pause": lambda c, m: c.update_model(m, pause=["raw", ""]),
    "update_tracks": lambda c, m: c.update_model(m, tracks=""),
    "stacked": lambda c, m: c.pull_stacked(m, tracks=[""]),
    "statistics": lambda c, m: c.statistics(m, tracks=""),
    "half_life": lambda c, m: c.synthesize(m, result="r", sigma_rel=0.1, half_life=""),
    "delete_checkpoint": lambda c, m: c.delete_checkpoint(m, ""),
    "best": lambda c, m: c.report_metric(m, 1, 0.5, label=""),
    "scored": lambda c, m: c.report_metric(m, None, 0.5),
    "restore": lambda c, m: c.restore(m, label=""),
    "versions": lambda c, m: c.versions(m, after=None),
    "tls": lambda c, m: ema_client.Tls(ca_file=None),
}


@pytest.mark.parametrize("what", NOTHING)
def test_what_is_set_to_nothing_is_named(client, model, pushed, what, tmp_path, monkeypatch):
    """As a variable of a script that is not set. A folder "" would be the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ema_client.InvalidArgumentError,
        match="^(files|path|file|remove|pause|tracks|half_life|checkpoint|label|version|after|tls.ca_file)"
        " .*(''|None|str).*must (not )?be",
    ):
        NOTHING[what](client, model)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert not client.labels(model) and not client.attached_files(model)


def test_what_is_set_to_nothing_is_named_for_a_module(server, model, pushed):
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ema_client.InvalidArgumentError, match="rename '': must be a function"):
        ema_client.load_into(net, server.url(model), rename="")
    with pytest.raises(ema_client.InvalidArgumentError, match="check '': must be True or False"):
        ema_client.attach(net, optimizer, server.url("other"), check="")
    with pytest.raises(ema_client.InvalidArgumentError, match="files '': must be the path"):
        ema_client.attach(net, optimizer, server.url("other"), files="")
    with ema_client.Client(server.address) as client:
        assert "other" not in [info.name for info in client.models()]
