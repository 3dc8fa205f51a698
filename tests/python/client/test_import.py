# SPDX-License-Identifier: Apache-2.0
"""Models that begin with weights from files, of our own and of other libraries' averages."""

from __future__ import annotations

import dataclasses
import json

import ema_client
import numpy as np
import pytest
import torch
from ema_client import convert
from ema_client._client import safetensors
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from testing import assert_same_bits
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

WEIGHTS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7,
    "b": torch.arange(5, dtype=torch.bfloat16) / 3,
    "c": torch.tensor(7, dtype=torch.int64),
    "d": torch.zeros(0, 3),
    "e": torch.arange(4, dtype=torch.float64) / 3,
    "f": torch.tensor([True, False]),
}
TRACKS = {"ema": "100ba", "fixed": "smoothing=0.9", "raw": "copy"}


@pytest.fixture
def folder(tmp_path):
    """The same weights as a file, and as a Hugging Face folder of two pieces."""
    save_file(WEIGHTS, tmp_path / "whole.safetensors")
    pieces = tmp_path / "hf"
    pieces.mkdir()
    names = sorted(WEIGHTS)
    weight_map = {}
    for index, part in enumerate((names[:2], names[2:]), 1):
        name = f"model-{index:05}-of-00002.safetensors"
        save_file({n: WEIGHTS[n] for n in part}, pieces / name)
        weight_map.update(dict.fromkeys(part, name))
    (pieces / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return tmp_path


def assert_begins_with(client, model, weights, step):
    for track in client.model(model).tracks:
        pulled = client.pull(model, track=track, framework="torch")
        assert pulled.version.step == step and pulled.version.number == 1
        assert pulled.keys() == weights.keys()
        for name, value in weights.items():
            assert torch.equal(pulled[name], value.to(pulled[name].dtype)), (track, name)


@pytest.mark.parametrize("what", ["whole.safetensors", "hf"])
@pytest.mark.parametrize("how", ["python", "emactl"])
def test_every_track_begins_with_the_file(client, emactl, model, folder, what, how):
    if how == "python":
        tracks = {"ema": "100ba", "fixed": {"smoothing": 0.9}, "raw": "copy"}
        client.import_weights(model, folder / what, tracks=tracks, step=1000)
    else:
        arguments = [
            word for name, rule in TRACKS.items() for word in ("--track", f"{name}={rule}")
        ]
        result = emactl(
            "--json", "import", model, "--from", folder / what, "--step", "1000", *arguments
        )
        assert result.returncode == 0, result.stderr
        imported = json.loads(result.stdout)
        assert (imported["tensor_count"], imported["version"]["step"]) == (6, 1000)
    assert_begins_with(client, model, WEIGHTS, 1000)
    # Averaging goes on from there, with the whole weight of what was imported.
    with client.open_run(model) as run:
        version = run.push(
            step=1001,
            weights={n: v + v for n, v in WEIGHTS.items() if n != "f"} | {"f": WEIGHTS["f"]},
        )
    assert version.tracks["ema"].update_weight == np.float32(-np.expm1(-np.log(2) / 100))


def test_emactl_says_of_a_model_what_python_does(client, emactl, model, folder):
    path, twin = folder / "whole.safetensors", f"{model}-twin"
    rules = {"a": "copy", "b": "5ba", "?": "average", "c": "ignore"}
    track = ema_client.Track(half_life="9ba", dtype="float64", buffers="copy", tensor_rules=rules)
    client.import_weights(
        twin, path, tracks={"ema": track}, non_finite="skip", max_pinned_versions=3
    )
    written = ",".join(f"tensor_rule={pattern}:{action}" for pattern, action in rules.items())
    text = f"ema=9ba,dtype=float64,buffers=copy,{written}"
    made = emactl(
        *("import", model, "--from", path, "--track", text),
        *("--non-finite", "skip", "--max-pinned", "3"),
    )
    assert made.returncode == 0, made.stderr
    infos = [client.model(name) for name in (model, twin)]
    for field in ("tracks", "non_finite", "max_pinned_versions"):
        assert getattr(infos[0], field) == getattr(infos[1], field), field
    # What is not said again stays; what cannot change is refused, not lost.
    assert emactl("update", model, "--track", "ema=8ba").returncode == 0
    faster = dataclasses.replace(infos[1].tracks["ema"], half_life="8ba")
    assert client.model(model).pending_tracks["ema"] == faster
    refused = emactl("update", model, "--track", "ema=7ba,dtype=float32")
    assert refused.returncode == 4 and "remove it and add another" in refused.stderr
    # A new track, and one that is made anew, have what is said of them, and nothing else.
    new = ema_client.Track(smoothing=0.5, tensor_rules={"a": "ignore"})
    words = ("--track", "new=smoothing=0.5,tensor_rule=a:ignore", "--track", "ema=7ba")
    assert emactl("update", model, *words, "--remove", "ema").returncode == 0
    pending = client.model(model).pending_tracks
    assert pending == {"new": new, "ema": ema_client.Track(half_life="7ba")}


@pytest.mark.parametrize("policy", ["reject", "skip", "allow"])
def test_emactl_makes_models_of_every_policy(client, emactl, model, folder, policy):
    words = ("create", model, "--from", folder / "whole.safetensors", "--track", "ema=9ba")
    assert emactl(*words, "--non-finite", policy).returncode == 0
    assert client.model(model).non_finite == policy


def test_emactl_refuses_what_is_misspelled(client, emactl, model, folder):
    words = ("create", model, "--from", folder / "whole.safetensors", "--track")
    for track, more, code, said in (
        ("ema=9ba", ("--non-finite", "keep"), 2, "keep given, expected reject, skip or allow"),
        ("ema=9ba,tensor_rule=hed.*:ignore", (), 4, "hed.*"),
        ("ema=9ba,tensor_rules=a:copy", (), 2, 'did you mean "tensor_rule"?'),
    ):
        result = emactl(*words, track, *more)
        assert (result.returncode, said in result.stderr) == (code, True), result.stderr
    assert model not in [info.name for info in client.models()]


@pytest.mark.parametrize("how", ["python", "emactl"])
def test_the_config_says_which_weights_are_read(client, emactl, model, tmp_path, how):
    (tmp_path / "config.json").write_text('{"_class_name": "UNet2DModel"}')
    save_file({"w": torch.ones(2)}, tmp_path / "diffusion_pytorch_model.safetensors")
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    if how == "python":
        client.import_weights(model, tmp_path, tracks={"raw": "copy"}, step=5)
    else:
        command = ("import", model, "--from", tmp_path, "--track", "raw=copy", "--step", "5")
        assert emactl(*command).returncode == 0
    assert_begins_with(client, model, {"w": torch.ones(2)}, 5)


def test_a_model_with_versions_is_refused(client, emactl, model, folder):
    path = folder / "whole.safetensors"
    client.import_weights(model, path, tracks={"raw": "copy"}, step=5)
    with pytest.raises(
        ema_client.AlreadyExistsError, match="has version 1 .step 5., expected none"
    ):
        client.import_weights(model, path, tracks={"raw": "copy"}, step=6)
    result = emactl("import", model, "--from", path, "--track", "raw=copy", "--step", "6")
    assert result.returncode == 4
    assert "version 1 (step 5) already" in result.stderr
    assert client.model(model).latest.number == 1


@pytest.mark.parametrize(
    "track, why",
    [
        ({"smoothing": 0.9, "zero_init": "debias"}, "counts updates"),
        ({"half_life": "9ba", "debias": True}, "give the step"),
        ({"uniform": True}, "counts updates"),
        ({"mean_of_last": 3}, "needs the weights of each"),
        ({"sigma_rel": 0.1}, "give the step"),
        ({"half_life": "9ba", "ema_start": "50ba"}, "ema_start"),
    ],
)
def test_a_track_that_would_lose_it_is_refused(client, emactl, model, folder, track, why):
    path = folder / "whole.safetensors"
    with pytest.raises(ema_client.InvalidArgumentError, match=why):
        client.import_weights(model, path, tracks={"raw": "copy", "ema": track})
    text = ",".join(f"{name}={str(value).lower()}" for name, value in track.items())
    result = emactl("import", model, "--from", path, "--track", f"ema={text}")
    assert result.returncode == 4 and why in result.stderr, result.stderr
    assert model not in [info.name for info in client.models()]


@pytest.mark.parametrize("how", ["python", "emactl"])
def test_warm_ups_and_means_go_on_as_if_never_interrupted(
    client, emactl, model, tmp_path, rng, how
):
    tracks = {
        "ema_pytorch": ema_client.Track.preset("ema_pytorch", update_after_step=3, update_every=1),
        "diffusers": ema_client.Track.preset("diffusers"),
        "power": ema_client.Track(sigma_rel=0.1),
        "mean": ema_client.Track(uniform=True),
        "debiased": ema_client.Track(smoothing=0.9, zero_init="debias"),
    }
    pushed = [{"w": rng.standard_normal(50, dtype="float32")} for _ in range(30)]
    for name, track in tracks.items():
        whole, resumed = f"{model}-{name}-whole", f"{model}-{name}-resumed"
        client.create_model(whole, pushed[0], tracks={"ema": track})
        with client.open_run(whole) as run:
            for step, weights in enumerate(pushed[:20], 1):
                run.push(step=step, weights=weights)
            path = tmp_path / f"{name}.safetensors"
            save_file({"w": client.pull(whole, track="ema", framework="torch")["w"]}, path)
            for step, weights in enumerate(pushed[20:], 21):
                run.push(step=step, weights=weights)
        if how == "python":
            client.import_weights(resumed, path, tracks={"ema": track}, step=20, updates=20)
        else:
            config = client.model(whole).latest.tracks["ema"].config
            schedule = config.split(";")[0].replace(", ", ",")
            result = emactl(
                *["import", resumed, "--from", path, "--track", f"ema={schedule}"],
                *["--step", "20", "--updates", "20"],
            )
            assert result.returncode == 0, result.stderr
        assert client.model(resumed).latest.tracks["ema"].update_count == 20, name
        with client.open_run(resumed) as run:
            for step, weights in enumerate(pushed[20:], 21):
                run.push(step=step, weights=weights)
        assert_same_bits(
            client.pull(whole, track="ema", framework="numpy"),
            client.pull(resumed, track="ema", framework="numpy"),
        )


@pytest.mark.parametrize("updates", [1, 2])
def test_an_average_that_begins_at_zero_is_taken_as_it_is(client, model, tmp_path, updates):
    weights = {"w": np.full(4, 8, np.float32)}
    save_file({"w": torch.from_numpy(weights["w"])}, tmp_path / "w.safetensors")
    track = ema_client.Track(smoothing=0.9, zero_init="plain")
    client.import_weights(
        model, tmp_path / "w.safetensors", tracks={"ema": track}, step=updates, updates=updates
    )
    assert_same_bits(weights, client.pull(model, track="ema", framework="numpy"))


def test_units_that_only_a_track_needs_begin_at_zero(client, emactl, model, folder):
    result = emactl(
        *["import", model, "--from", folder / "whole.safetensors"],
        *["--track", "ema=half_life=2ep,update_interval=1ep", "--step", "9"],
    )
    assert result.returncode == 0, result.stderr
    assert client.model(model).latest.time == ema_client.TrainingTime(epoch=0)


def test_attach_goes_on_from_an_import(server, client, model, tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    save_file({**net.state_dict()}, tmp_path / "net.safetensors")
    client.import_weights(model, tmp_path / "net.safetensors", tracks={"ema": "10ba"}, step=100)
    average = client.pull(model, track="ema")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ema_client.attach(net, optimizer, server.url(model), half_life="10ba") as ema:
        assert ema.step == 100
        net(torch.ones(3, 3)).square().sum().backward()
        optimizer.step()
    version = client.model(model).latest
    assert (version.number, version.step) == (2, 101)
    weight = np.float32(version.tracks["ema"].update_weight)
    before = average["0.weight"].double().numpy()
    expected = before + float(weight) * (net[0].weight.detach().double().numpy() - before)
    np.testing.assert_allclose(client.pull(model, track="ema")["0.weight"].numpy(), expected, 1e-6)
    with pytest.raises(ema_client.AlreadyExistsError):
        ema_client.attach(net, optimizer, server.url(model), half_life="11ba", existing="continue")


def test_buffers_that_a_track_copies_are_copied_after_an_import_too(
    server, client, model, tmp_path
):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    save_file({**net.state_dict()}, tmp_path / "net.safetensors")
    track = ema_client.Track.preset("torch", decay=0.9)
    assert track.buffers == "copy"
    client.import_weights(model, tmp_path / "net.safetensors", tracks={"ema": track}, step=100)
    with pytest.raises(
        ema_client.AlreadyExistsError, match="copy them: 1.running_mean, 1.running_var. Give"
    ) as raised:
        ema_client.attach(net, None, server.url(model), preset="torch", decay=0.9)
    assert raised.value.reason == "MODEL_DIFFERS"

    tracks = {"ema": dataclasses.replace(track, tensor_rules={"*.running_*": "copy"})}
    other = f"{model[:60]}-2"
    client.import_weights(other, tmp_path / "net.safetensors", tracks=tracks, step=100)
    with ema_client.attach(net, None, server.url(other), tracks=tracks) as ema:
        net(torch.ones(3, 3))
        ema.after_step()
    assert ema.version.step == 101
    average = client.pull(other, track="ema")
    assert torch.equal(average["1.running_mean"], net[1].running_mean)
    assert torch.equal(average["1.running_var"], net[1].running_var)


def test_attach_goes_on_from_an_import_without_what_is_ignored(server, client, model, tmp_path):
    net = make_net()
    body = {name: tensor for name, tensor in net.state_dict().items() if not name.startswith("2.")}
    save_file(body, tmp_path / "body.safetensors")
    tracks = {"ema": ema_client.Track(half_life="10ba", tensor_rules={"2.*": "ignore"})}
    client.import_weights(model, tmp_path / "body.safetensors", tracks=tracks, step=100)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ema_client.attach(net, optimizer, server.url(model), tracks=tracks) as ema:
        optimizer.step()
    assert ema.version.step == 101


# --- Other libraries' states ---


def make_net():
    torch.manual_seed(2)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )


def jump(net):
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter))


@pytest.mark.parametrize("library", ["torch", "ema_pytorch", "diffusers"])
def test_a_partly_compiled_model_has_the_names_of_attach(server, client, model, tmp_path, library):
    net = torch.nn.Sequential()
    net.a = torch.compile(torch.nn.Linear(3, 2))
    net.b = checkpoint_wrapper(torch.nn.Linear(2, 2))
    names = [name for name, _ in net.named_parameters()]
    assert "a._orig_mod.weight" in names and "b._checkpoint_wrapped_module.weight" in names
    arguments = ()
    if library == "torch":
        state = torch.optim.swa_utils.AveragedModel(net).state_dict()
    elif library == "ema_pytorch":
        state = {f"ema_model.{name}": value for name, value in net.state_dict().items()}
    else:
        state = {"shadow_params": list(net.parameters()), "optimization_step": 1}
        (tmp_path / "names.txt").write_text("\n".join(names))
        arguments = ("--names", tmp_path / "names.txt")
    (file,) = converted(tmp_path, state, *arguments)
    client.import_weights(model, tmp_path / file, tracks={"ema": "100ba"}, step=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ema_client.attach(net, optimizer, server.url(model), half_life="100ba") as ema:
        assert ema.step == 1


@pytest.mark.parametrize("how", ["python", "emactl"])
def test_a_file_of_a_wrapped_model_has_the_names_of_attach(
    server, client, emactl, model, tmp_path, how
):
    """As torch.compile and DistributedDataParallel save it; of tied tensors it has one name."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    net[1].weight = net[0].weight
    file = tmp_path / "from.safetensors"
    own = {name: value for name, value in net.state_dict().items() if name != "1.weight"}
    save_file({f"module._orig_mod.{name}": value for name, value in own.items()}, file)
    if how == "python":
        client.import_weights(model, file, tracks={"ema": "100ba"}, step=1)
    else:
        result = emactl("import", model, "--from", file, "--step", "1", "--track", "ema=100ba")
        assert result.returncode == 0, result.stderr
    assert_begins_with(client, model, own, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ema_client.attach(net, optimizer, server.url(model), half_life="100ba") as ema:
        assert ema.step == 1


def test_names_that_only_wrappers_keep_apart_are_refused(tmp_path, capsys):
    torch.save({"a.w": torch.ones(2), "a._orig_mod.w": torch.ones(2)}, tmp_path / "from.pt")
    assert convert.main([str(tmp_path / "from.pt"), str(tmp_path / "to.safetensors")]) == 1
    message = '"a._orig_mod.w" and "a.w" are both named "a.w" without wrappers'
    assert message in capsys.readouterr().err


def converted(tmp_path, state, *arguments):
    """What the command makes of a state: file names and their tensors."""
    torch.save(state, tmp_path / "from.pt")
    target = tmp_path / "to.safetensors"
    assert convert.main([str(tmp_path / "from.pt"), str(target), *map(str, arguments)]) == 0
    return {path.name: load_file(path) for path in sorted(tmp_path.glob("to*.safetensors"))}


def metadata_of(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def assert_tensors(expected, got):
    assert got.keys() == expected.keys()
    assert_same_bits(expected, got)


@pytest.mark.framework
def test_ema_pytorch(tmp_path):
    import ema_pytorch

    net = make_net()
    ema = ema_pytorch.EMA(net, beta=0.9, update_every=1, include_online_model=True)
    for _ in range(4):
        jump(net)
        ema.update()
    files = converted(
        tmp_path, {"net": 1, "trainer": {"ema": ema.state_dict()}}, "--key", "trainer.ema"
    )
    assert list(files) == ["to.safetensors"]
    assert_tensors(dict(ema.ema_model.state_dict()), files["to.safetensors"])
    assert metadata_of(tmp_path / "to.safetensors") == {
        "format": "pt",
        "source": "ema_pytorch",
        "source_step": str(ema.step.item()),
    }


@pytest.mark.framework
def test_ema_pytorch_post_hoc_has_several(tmp_path):
    import ema_pytorch

    net = make_net()
    ema = ema_pytorch.PostHocEMA(
        net, sigma_rels=(0.05, 0.28), checkpoint_folder=str(tmp_path / "post-hoc")
    )
    for _ in range(3):
        jump(net)
        ema.update()
    files = converted(tmp_path, ema.state_dict())
    assert list(files) == ["to.0.safetensors", "to.1.safetensors"]
    for one, tensors in zip(ema.ema_models, files.values()):
        assert_tensors(dict(one.ema_model.state_dict()), tensors)


@pytest.mark.framework
def test_diffusers(tmp_path):
    from diffusers.training_utils import EMAModel

    net = make_net()
    ema = EMAModel(net.parameters(), decay=0.9)
    for _ in range(4):
        jump(net)
        ema.step(net.parameters())
    names = [name for name, _ in net.named_parameters()]
    (tmp_path / "names.txt").write_text("\n".join(names))
    files = converted(tmp_path, ema.state_dict(), "--names", tmp_path / "names.txt")
    assert_tensors(dict(zip(names, ema.shadow_params)), files["to.safetensors"])
    assert metadata_of(tmp_path / "to.safetensors")["source_step"] == "4"


def test_diffusers_names_by_shape_or_not_at_all(tmp_path, capsys):
    state = {"shadow_params": [torch.ones(2, 3), torch.zeros(5)], "optimization_step": 3}
    torch.save(state, tmp_path / "from.pt")
    save_file({"w": torch.ones(2, 3), "b": torch.ones(5)}, tmp_path / "model.safetensors")
    files = converted(tmp_path, state, "--names", tmp_path / "model.safetensors")
    assert_tensors({"w": torch.ones(2, 3), "b": torch.zeros(5)}, files["to.safetensors"])
    save_file({"w": torch.ones(5), "b": torch.ones(5)}, tmp_path / "same.safetensors")
    (tmp_path / "short.txt").write_text("w\n")
    (tmp_path / "latin.txt").write_text("größe b", "latin-1")
    for names, problem in [
        (["--names", tmp_path / "same.safetensors"], "have the same shape"),
        (["--names", tmp_path / "short.txt"], "2 shadow_params, but 1 names"),
        (["--names", tmp_path / "latin.txt"], "latin.txt: not a text file in UTF-8"),
        ([], "give them with --names"),
    ]:
        command = [tmp_path / "from.pt", tmp_path / "x.safetensors", *names]
        assert convert.main([str(word) for word in command]) == 1
        assert problem in capsys.readouterr().err
        assert not (tmp_path / "x.safetensors").exists()


def test_torch_averaged_model(tmp_path):
    net = make_net()
    ema = torch.optim.swa_utils.AveragedModel(net, use_buffers=True)
    for _ in range(3):
        jump(net)
        ema.update_parameters(net)
    files = converted(tmp_path, ema.state_dict())
    assert_tensors(dict(ema.module.state_dict()), files["to.safetensors"])
    assert metadata_of(tmp_path / "to.safetensors")["source_step"] == "3"


def test_a_plain_state_dict_of_a_wrapped_model_with_tied_weights(tmp_path):
    net = make_net()
    state = {f"module._orig_mod.{name}": value for name, value in net.state_dict().items()}
    state["module._orig_mod.tied"] = state["module._orig_mod.0.weight"]
    files = converted(tmp_path, state)
    assert_tensors(dict(net.state_dict()), files["to.safetensors"])


def test_what_is_no_state_is_refused(tmp_path, capsys):
    for state, arguments, problem in [
        ({"net": {}}, [], '"net" is of type dict, not a tensor'),
        ({}, [], "no tensors"),
        ({"a": 1}, ["--key", "b"], 'no key "b"'),
        ([1], [], "a list, not a dict"),
        ({0: torch.zeros(1)}, [], "0 is no name"),
        ({"state": {0: {"a": torch.zeros(1)}}}, ["--key", "state"], "0 is no name"),
        ({"shadow_params": 3}, [], "no list of tensors"),
        ({"a": torch.zeros(1, dtype=torch.complex64)}, [], "complex64"),
        ({"a": torch.eye(2).to_sparse()}, [], '"a" is sparse (torch.sparse_coo)'),
    ]:
        torch.save(state, tmp_path / "from.pt")
        command = [str(tmp_path / "from.pt"), str(tmp_path / "to.safetensors"), *arguments]
        assert convert.main(command) == 1
        assert problem in capsys.readouterr().err
    for content in (b"", b"PK\3\4 damaged", b"words"):
        (tmp_path / "from.pt").write_bytes(content)
        assert convert.main([str(tmp_path / "from.pt"), str(tmp_path / "to.safetensors")]) == 1
        assert "not a file of torch.save" in capsys.readouterr().err
    assert convert.main([str(tmp_path / "none.pt"), str(tmp_path / "to.safetensors")]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from.pt"]


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def test_nothing_in_a_state_is_executed(tmp_path, capsys):
    torch.save({"w": torch.ones(2), "evil": Evil()}, tmp_path / "from.pt")
    command = [str(tmp_path / "from.pt"), str(tmp_path / "to.safetensors")]
    assert convert.main(command) == 1
    captured = capsys.readouterr()
    assert "executed" not in captured.out
    assert not (tmp_path / "to.safetensors").exists()


def test_our_files_are_what_the_library_reads_and_the_reverse(tmp_path):
    path = tmp_path / "ours.safetensors"
    safetensors.write(path, WEIGHTS, {"k": "v"})
    assert_tensors(WEIGHTS, load_file(path))
    for tensor in safetensors.open_weights(path):
        value = WEIGHTS[tensor.spec.name]
        assert (tensor.spec.dtype, tensor.spec.shape) == (
            str(value.dtype).removeprefix("torch."),
            tuple(value.shape),
        )
        bits = value.view(torch.uint16) if value.dtype == torch.bfloat16 else value
        assert np.array_equal(tensor.read(), bits.numpy())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 8,
        (1 << 40).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"[]",
        (66).to_bytes(8, "little")
        + b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}    ',
        (66).to_bytes(8, "little")
        + b'{"a": {"dtype": "F99", "shape": [3], "data_offsets": [0, 12]}}    '
        + b"\x00" * 12,
    ],
)
def test_files_that_are_not_what_they_should_be(client, model, tmp_path, content):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ema_client.InvalidArgumentError, match="bad.safetensors"):
        client.import_weights(model, path, tracks={"raw": "copy"})
