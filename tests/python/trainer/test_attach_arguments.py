# SPDX-License-Identifier: Apache-2.0
"""What attach() is called with: a library's own words, and what is wrong, named before anything is made."""

from __future__ import annotations

import math
import pathlib

import ema_client
import pytest
import torch
from ema_client._tracks.track import track_from, track_of

BAD_VALUES = [
    ({"max_wait_s": -1}, r"max_wait_s -1: must be seconds, 0 or more"),
    ({"max_wait_s": math.nan}, "max_wait_s nan"),
    ({"max_wait_s": "3"}, "max_wait_s '3'"),
    ({"max_wait_s": True}, "max_wait_s True"),
    ({"timeout_s": 0}, "timeout_s 0: must be seconds, above 0"),
    ({"timeout_s": math.nan}, "timeout_s nan"),
    ({"max_outage_s": -1}, "max_outage_s -1"),
    ({"start_step": -1}, "start_step -1: must be a whole number, 0 or more"),
    ({"start_step": 1.5}, "start_step 1.5"),
    ({"keep_resumable": "a"}, "keep_resumable 'a': must be a whole number, 1 or more"),
    ({"keep_resumable": True}, "keep_resumable True"),
    ({"max_pinned_versions": -1}, "max_pinned_versions -1"),
    (
        {"max_staging_bytes": 1 << 20},
        "max_staging_bytes 1048576: must be a whole number, 67108864 or more",
    ),
    ({"wire_dtype": "bf16"}, r"""wire_dtype 'bf16': must be "as pushed" or "bfloat16" \["""),
    ({"source": "masters"}, r"""source 'masters': must be "parameters" or "master" \["""),
    (
        {"non_finite": "ignore"},
        r"""non_finite 'ignore': must be "reject", "skip" or "allow" \[""",
    ),
    ({"tracks": ["ema"]}, r"tracks \['ema'\]: must be tracks by name"),
    (
        {"existing": "resume"},
        r"""existing .resume.: must be "error", "new" or "continue" \[""",
    ),
    ({"preset": 5}, "preset 5: must be a name"),
    ({"rename": "a"}, "rename 'a': must be a function"),
    ({"rename": lambda name: None}, r'rename\("weight"\) gave None: must be a name'),
    ({"time": 5}, "time 5: must be a function"),
    ({"time": lambda step: 5}, "time 5: must be a TrainingTime"),
    (
        {"half_life": "2ep"},
        r'track "ema": .* lacks "ep", .*: give it by attach\(time=\), such as '
        r'time=lambda step: {"epoch": step // steps_per_epoch}, the same on all ranks',
    ),
    ({"half_life": "30sec", "time": lambda step: {"ep": step}}, 'lacks "sec", which half_life'),
    ({"time": lambda step: {"ep": 0, "epoch": 0}}, '"epoch" is given twice'),
    ({"time": lambda step: {"epochs": 0}}, "number for each of batch, epoch.*'epochs'"),
    ({"half_life": "2ep", "time": lambda step: {"sample": step}}, r'lacks "ep".* \[BAD_TIME\]'),
]


@pytest.mark.parametrize("kind", ["lazy", "meta"])
def test_a_module_that_is_not_materialized_is_named_by_every_entry(server, client, model, kind):
    whole = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 4))
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 4))
    if kind == "lazy":
        net[1] = torch.nn.LazyLinear(4)
    else:
        net[1].to("meta")
    url = server.url(model)
    local = ema_client.LocalEMA(whole)
    local.update()
    with ema_client.attach(whole, None, url) as ema:
        ema.after_step()
    with ema_client.Client(server.address) as other:
        other.create_model(f"{model}-pushed", whole.state_dict(), tracks={"ema": "2ba"})

    def swap(averaged):
        with averaged:
            pass

    def push():
        with client.open_run(f"{model}-pushed") as run:
            run.push(step=1, weights=net.state_dict())

    def ema_model(given):
        name = f"{model}-{callable(given) and type(given).__name__}"
        options = {"preset": "ema_pytorch", "ema_model": given}
        with ema_client.attach(whole, None, server.url(name), **options) as ema:
            ema.after_step()
            ema.ema_model

    uses = [
        lambda: ema_client.attach(net, None, url, existing="new"),
        lambda: ema_client.LocalEMA(net),
        lambda: ema_client.compute_ema(net, whole),
        lambda: ema_client.compute_ema(whole, net),
        lambda: swap(ema_client.averaged(net, url)),
        lambda: swap(local.averaged(net)),
        lambda: local.copy_to(net),
        lambda: client.pull(model, out=net),
        lambda: client.pull(model, out=net.state_dict()),
        push,
        lambda: ema_model(net),
        lambda: ema_model(lambda: net),
    ]
    if kind == "lazy":  # On the meta device, these need no values.
        uses.append(lambda: ema_client.load_into(net, url))
        uses.append(
            lambda: client.create_model(f"{model}-n", net.state_dict(), tracks={"ema": "2ba"})
        )
    cure = {"lazy": '"1.weight".*run a forward first', "meta": r"1.weight.*model.to_empty\("}[kind]
    for use in uses:
        with pytest.raises(ema_client.InvalidArgumentError, match=cure):
            use()


@pytest.mark.parametrize("kept_by", ["fairscale", "the meta device"])
def test_parameters_without_values_are_refused(server, client, model, kept_by):
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    if kept_by == "the meta device":
        net[1].to("meta")
    else:
        for parameter in net[1].parameters():
            parameter._orig_size = parameter.shape
            parameter.data = torch.empty(0)
    for use in (
        lambda: ema_client.attach(net, None, server.url(model)),
        lambda: ema_client.LocalEMA(net),
    ):
        with pytest.raises(
            ema_client.InvalidArgumentError, match=f"the values of 1.weight, 1.bias .*{kept_by}"
        ):
            use()
    assert model not in {info.name for info in client.models()}
    rules = {"1.*": "ignore"}
    with ema_client.attach(net, None, server.url(model), tensor_rules=rules) as ema:
        ema.after_step()
    assert list(client.pull(model)) == ["0.weight", "0.bias"]


def test_a_parameter_without_elements_is_averaged(server, client, model):
    net = torch.nn.Linear(0, 2)
    with ema_client.attach(net, None, server.url(model)) as ema:
        ema.after_step()
    assert client.pull(model)["weight"].shape == (2, 0)


def test_a_model_with_other_tracks_is_one_error(server, model):
    for half_life in ("3ba", "4ba"):
        net, optimizer = make_trainer()
        try:
            ema_client.attach(
                net, optimizer, server.url(model), half_life=half_life, existing="continue"
            ).close()
        except ema_client.AlreadyExistsError as error:
            raised = error
    assert raised.__context__ is None or raised.__suppress_context__


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


def test_max_staging_bytes_reaches_the_run(server, client, model, monkeypatch):
    given = {}
    open_run = ema_client.Client._open_run

    def note(self, name, **options):
        given.update(options)
        return open_run(self, name, **options)

    monkeypatch.setattr(ema_client.Client, "_open_run", note)
    net, optimizer = make_trainer()
    ema_client.attach(net, optimizer, server.url(model), max_staging_bytes=1 << 27).close()
    assert given["max_staging_bytes"] == 1 << 27
    with pytest.raises(
        ema_client.InvalidArgumentError, match="max_staging_bytes 1: must be at least"
    ):
        client.open_run(model, max_staging_bytes=1)


def test_what_is_no_module_or_url_is_named(server):
    net, optimizer = make_trainer()
    with pytest.raises(ValueError, match="model of type dict: must be a torch.nn.Module"):
        ema_client.attach({}, optimizer, server.url("any"))
    with pytest.raises(ValueError, match='url "None": must be like ema://'):
        ema_client.attach(net, optimizer, None)


def test_a_client_without_time_is_refused(server):
    with pytest.raises(ValueError, match="timeout_s 0: must be seconds, above 0"):
        ema_client.Client(server.address, timeout_s=0)


PRESETS = {
    "ema_pytorch": {
        "beta": 0.99,
        "update_after_step": 100,
        "update_every": 10,
        "inv_gamma": 2.0,
        "ignore_names": {"bias"},
    },
    "diffusers": {"decay": 0.99, "use_ema_warmup": True},
    "timm": {"version": "v2", "decay": 0.99},
    "torch": {"kind": "swa"},
    "optax": {"decay": 0.9, "debias": False},
    "edm2": {"halflife_Mimg": 0.5},
    "karras": {"gamma": 6.94},
    "composer": {"half_life": "100ba", "update_interval": "2ba", "ema_start": "4ba"},
}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_presets_arguments_are_keyword_arguments(server, client, model, preset):
    net, optimizer = make_trainer()
    time = lambda step: {"batch": step, "sample": 8 * step}  # noqa: E731
    tracks = {"raw": "copy"}
    arguments = PRESETS[preset]
    with ema_client.attach(
        net, optimizer, server.url(model), preset=preset, time=time, tracks=tracks, **arguments
    ):
        pass
    expected = ema_client.Track.preset(preset, **arguments)
    raw = {"copy": True, "update_interval": arguments.get("update_interval", "1ba")}
    client.create_model(
        f"{model}-expected", dict(net.state_dict()), tracks={"ema": expected, "raw": raw}
    )
    assert client.model(model).tracks == client.model(f"{model}-expected").tracks


WHOLE = {"tensor_rules": {"bias": "copy"}, "buffers": "copy", "dtype": "float64"}


@pytest.mark.parametrize(
    "made_by",
    [
        {},
        {"half_life": "100ba", "tracks": {"raw": "copy"}},
        {"preset": "torch", "decay": 0.9, "use_buffers": True},
        {"preset": {"preset": "torch", "decay": 0.9}},
        {"preset": {"preset": "ema_pytorch", **WHOLE}},
    ],
    ids=str,
)
def test_what_is_no_schedules_goes_with_each_that_makes_the_track(server, client, model, made_by):
    net, optimizer = make_trainer()
    given = {} if "dtype" in str(made_by) else WHOLE
    with ema_client.attach(net, optimizer, server.url(model), **made_by, **given) as ema:
        optimizer.step()
        version = ema.wait_pushed()
    track = client.model(model).tracks["ema"]
    assert {name: getattr(track, name) for name in WHOLE} == {
        **WHOLE,
        "tensor_rules": (("bias", "copy"),),
    }
    local = ema_client.LocalEMA(net, **made_by, **given)
    local.update()
    assert local.records["ema"].config == version.tracks["ema"].config


def test_a_paused_power_function_that_keeps_snapshots(server, client, model):
    net, optimizer = make_trainer()
    arguments = {"preset": "edm2", "std": 0.05, "time": lambda step: {"sp": 8 * step}}
    with ema_client.attach(
        net, optimizer, server.url(model), paused=True, snapshot_interval="80sp", **arguments
    ):
        track = client.model(model).tracks["ema"]
    assert (track.sigma_rel, track.paused, track.snapshot_interval) == (0.05, True, "80sp")


@pytest.mark.parametrize("name, value", WHOLE.items())
def test_what_is_of_no_track_is_refused(server, name, value):
    net, optimizer = make_trainer()
    given = {"tracks": {"fast": "3ba", "slow": "9ba"}, name: value}
    for make in (
        lambda: ema_client.attach(net, optimizer, server.url("any"), **given),
        lambda: ema_client.LocalEMA(net, **given),
    ):
        with pytest.raises(ValueError, match=f"{name}: for the track .* give each of these its"):
            make()


FIELDS = [
    {"half_life": "500ba", "ramp_ratio": 0.1},
    {"ramp_ratio": 0.1},
    {"half_life": "500ba", "debias": True, "ema_end": "900ba"},
    {"decay": 0.9, "zero_init": "debias"},
    {"inv_gamma": 2.0, "power": 0.75, "min_decay": 0.1, "max_decay": 0.99},
    {"ramp": 10, "interval_phase": 1, "update_interval": "4ba"},
    {"sigma_rel": 0.1, "age_offset": 1},
    {"uniform": True, "ema_start": "3ba", "before_start": "copy"},
    {"mean_of_last": 4, "update_interval": "2ba"},
    {"copy": True},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_tracks_fields_are_arguments(server, client, model, fields):
    net, optimizer = make_trainer()
    tracks = {"slow": "1000ba"}
    ema_client.attach(net, optimizer, server.url(model), tracks=tracks, **fields).close()
    expected = track_from(track_of("ema", ema_client.Track(**fields)))
    assert client.model(model).tracks == {
        "ema": expected,
        "slow": track_from(
            track_of("slow", "1000ba", update_interval=fields.get("update_interval"))
        ),
    }
    local = ema_client.LocalEMA(net, tracks=tracks, **fields)
    assert str(local._tracks["ema"].track) == str(track_of("ema", ema_client.Track(**fields)))


BOTH = [
    (
        {"ramp_ratio": 0.1, "tracks": {"ema": "5ba"}},
        'ramp_ratio: for the track "ema", which is in tracks, too; give all of it there, such as '
        r'tracks=\{"ema": \{"ramp_ratio": 0.1\}\}',
    ),
    (
        {"debias": True, "tracks": {"fast": "5ba", "raw": "copy"}},
        'debias: for the track "ema".*, such as '
        r'tracks=\{"fast": \{"half_life": "5ba", "debias": True\}\}',
    ),
    ({"preset": "torch", "tracks": {"ema": "5ba"}}, 'preset: .*"ema": .*"preset": "torch"'),
    ({"decay": 0.9, "smoothing": 0.8}, "smoothing 0.8 and decay 0.9 are both given.*give one"),
    ({"decay": 0.9, "half_life": "5ba"}, "half_life and smoothing"),
]


@pytest.mark.parametrize("arguments, message", BOTH)
def test_what_is_given_twice_is_named_with_the_cure(server, client, model, arguments, message):
    net, optimizer = make_trainer()
    for make in (
        lambda: ema_client.attach(net, optimizer, server.url(model), **arguments),
        lambda: ema_client.LocalEMA(net, **arguments),
    ):
        with pytest.raises(ema_client.InvalidArgumentError, match=message):
            make()
    with pytest.raises(ema_client.NotFoundError):
        client.model(model)


def test_the_lines_to_copy_work_as_they_are(server, client, model):
    page = (pathlib.Path(__file__).parents[3] / "client/docs/schedules.md").read_text()
    lines = page.partition("in one minute")[2].partition("```python")[2].partition("```")[0]
    lines = [line for line in lines.splitlines() if line.startswith("ema =")]
    assert len(lines) == 5
    for number, line in enumerate(lines):
        net, optimizer = make_trainer()
        names = {"model": net, "optimizer": optimizer, "url": server.url(f"{model}-{number}")}
        exec(line, {"ema_client": ema_client}, names)
        with names["ema"]:
            optimizer.step()
        assert client.model(f"{model}-{number}").tracks.keys() == {"ema"}


def test_the_line_of_an_ema_pytorch_user(server, client, model):
    net, optimizer = make_trainer()
    kept = torch.nn.Linear(3, 2)
    with ema_client.attach(
        net,
        optimizer,
        server.url(model),
        preset="ema_pytorch",
        beta=0.5,
        update_after_step=0,
        update_every=1,
        include_online_model=False,
        ema_model=kept,
        forward_method_names=("extra_repr",),
        update_model_with_ema_every=3,
    ) as ema:
        for _ in range(4):
            optimizer.step()
        assert ema.ema_model is kept
        assert ema.extra_repr() == net.extra_repr()
        # Switch-EMA has written the average into the model at this step.
        average = client.pull(model, track="ema", version=ema.version)
        assert torch.equal(net.weight, average["weight"])


UNKNOWN = [
    ({"preset": "ema_pytorch", "bta": 0.9}, '"bta"; did you mean "beta"'),
    ({"preset": "diffusers", "beta": 0.9}, '"beta".* the preset "diffusers" has decay, '),
    ({"preset": {"preset": "diffusers", "decay": 0.9}, "decay": 0.8}, '"decay" is given both'),
    ({"preset": {"preset": "composer", "half_life": "2ba"}, "half_life": "3ba"}, '"half_life" is'),
    ({"preset": {"preset": "timm", "dtype": "float64"}, "dtype": "float64"}, '"dtype" is'),
    ({"haf_life": "3ba"}, '"haf_life"; did you mean "half_life"'),
    ({"ramp_ration": 0.1}, '"ramp_ration"; did you mean "ramp_ratio"'),
    ({"beta": 0.9}, '"beta"; did you mean "decay", the share .* preset="ema_pytorch"'),
    ({"preset": "ema_pytorch", "decay": 0.9}, '"decay"; did you mean "beta", the share'),
    ({"preset": "karras", "ema_decay": 0.9}, '"ema_decay"; the preset "karras" has '),
]


@pytest.mark.parametrize("arguments, message", UNKNOWN)
def test_an_unknown_argument_is_named_with_the_nearest(server, client, model, arguments, message):
    net, optimizer = make_trainer()
    with pytest.raises(TypeError, match=message):
        ema_client.attach(net, optimizer, server.url(model), **arguments)
    with pytest.raises(TypeError, match=message):
        ema_client.LocalEMA(net, **arguments)
    with pytest.raises(ema_client.NotFoundError):
        client.model(model)


def test_local_averages_take_the_same_words():
    net, optimizer = make_trainer()
    local = [
        ema_client.LocalEMA(net, preset="torch", decay=0.5),
        ema_client.LocalEMA(net, preset={"preset": "torch", "decay": 0.5}),
    ]
    for _ in range(3):
        optimizer.step()
        for one in local:
            one.update()
    ours, expected = (one.weights() for one in local)
    assert torch.equal(ours["weight"], expected["weight"])
    assert not torch.equal(ours["weight"], net.weight)
