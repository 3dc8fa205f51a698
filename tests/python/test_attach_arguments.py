# SPDX-License-Identifier: Apache-2.0
"""What attach() is called with: what is wrong is named before anything is made."""

from __future__ import annotations

import math

import ema_client
import pytest
import torch

BAD_VALUES = [
    ({"max_wait_s": -1}, r"max_wait_s -1: must be seconds, 0 or more"),
    ({"max_wait_s": math.nan}, "max_wait_s nan"),
    ({"max_wait_s": "3"}, "max_wait_s '3'"),
    ({"max_wait_s": True}, "max_wait_s True"),
    ({"timeout_s": 0}, "timeout_s 0: must be seconds, above 0"),
    ({"timeout_s": math.nan}, "timeout_s nan"),
    ({"timeout_s": None}, "timeout_s None"),
    ({"max_outage_s": -1}, "max_outage_s -1"),
    ({"start_step": -1}, "start_step -1: must be a whole number, 0 or more"),
    ({"start_step": 1.5}, "start_step 1.5"),
    ({"keep_resumable": "a"}, "keep_resumable 'a': must be a whole number, 1 or more"),
    ({"keep_resumable": True}, "keep_resumable True"),
    ({"max_pinned_versions": -1}, "max_pinned_versions -1"),
    ({"wire_dtype": "bf16"}, r"""wire_dtype 'bf16': must be "as pushed" or "bfloat16" \["""),
    (
        {"non_finite": "ignore"},
        r"""non_finite 'ignore': must be "reject" or "skip" or "allow" \[""",
    ),
    ({"tracks": ["ema"]}, r"tracks \['ema'\]: must be tracks by name"),
    ({"preset": 5}, "preset 5: must be a name"),
    ({"rename": "a"}, "rename 'a': must be a function"),
    ({"rename": lambda name: None}, r'rename\("weight"\) gave None: must be a name'),
    ({"time": 5}, "time 5: must be a function"),
    ({"time": lambda step: 5}, "time 5: must be a TrainingTime"),
]


def make_trainer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    net = torch.nn.Linear(3, 2)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "arguments, message",
    [pytest.param(*case, id=f"{i}-{next(iter(case[0]))}") for i, case in enumerate(BAD_VALUES)],
)
def test_a_bad_value_is_named_and_makes_no_model(server, client, model, arguments, message):
    net, optimizer = make_trainer()
    with pytest.raises(ValueError, match=message) as raised:
        ema_client.attach(net, optimizer, server.url(model), **arguments)
    assert isinstance(raised.value, ema_client.InvalidArgumentError)
    with pytest.raises(ema_client.NotFoundError):
        client.model(model)


def test_what_is_no_module_or_url_is_named(server):
    net, optimizer = make_trainer()
    with pytest.raises(ValueError, match="model of type dict: must be a torch.nn.Module"):
        ema_client.attach({}, optimizer, server.url("any"))
    with pytest.raises(ValueError, match='url "None": must be like ema://'):
        ema_client.attach(net, optimizer, None)


def test_a_client_without_time_is_refused(server):
    with pytest.raises(ValueError, match="timeout_s 0: must be seconds, above 0"):
        ema_client.Client(server.address, timeout_s=0)
