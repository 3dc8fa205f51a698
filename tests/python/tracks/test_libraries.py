# SPDX-License-Identifier: Apache-2.0
"""Each preset beside the real library, on the same random weights; and our answers to their bugs.

From the same float32 average each update must agree with the library's within 2 ulp of the larger
operand, ours no further from float64 than theirs (and 1 ulp), by the same weight bit for bit.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import ema_client
import numpy as np
import pytest
import torch
from ema_client import Track
from ema_client._tracks import presets
from libraries import (
    UPDATES,
    Agreement,
    Net,
    Step,
    Tensors,
    Theirs,
    float_names,
    floats,
    run_ours,
    run_theirs,
)
from ours import MakeOurs, make_ours  # noqa: F401

pytestmark = pytest.mark.framework


class EmaPytorch:
    """EMA or KarrasEMA; says what weight the library gave its lerp."""

    def __init__(self, model: torch.nn.Module, kind: str = "EMA", **arguments: Any) -> None:
        import ema_pytorch

        self._ema = getattr(ema_pytorch, kind)(model, **arguments)
        self._weight: float | None = None
        lerp, copy_to = self._ema.inplace_lerp, self._ema.inplace_copy

        def recorded_lerp(target: torch.Tensor, source: torch.Tensor, weight: float) -> None:
            self._weight = weight
            lerp(target, source, weight)

        def recorded_copy(target: torch.Tensor, source: torch.Tensor) -> None:
            self._weight = 1.0
            copy_to(target, source)

        self._ema.inplace_lerp, self._ema.inplace_copy = recorded_lerp, recorded_copy

    def tensors(self) -> Tensors:
        return dict(self._ema.ema_model.state_dict())

    def update(self, n: int) -> float | None:
        self._weight = None
        self._ema.update()
        return self._weight


class Diffusers:
    def __init__(self, model: torch.nn.Module, **arguments: Any) -> None:
        from diffusers.training_utils import EMAModel

        self._model = model
        self._ema = EMAModel(model.parameters(), **arguments)

    def tensors(self) -> Tensors:
        names = [name for name, _ in self._model.named_parameters()]
        return dict(zip(names, self._ema.shadow_params))

    def update(self, n: int) -> float | None:
        self._ema.step(self._model.parameters())
        return 1 - self._ema.cur_decay_value


class Timm:
    def __init__(
        self, model: torch.nn.Module, version: str = "v3", step: bool = True, **arguments: Any
    ) -> None:
        from timm.utils import ModelEmaV2, ModelEmaV3

        self._model, self._version, self._step = model, version, step
        self._ema = (ModelEmaV3 if version == "v3" else ModelEmaV2)(model, **arguments)

    def tensors(self) -> Tensors:
        return dict(self._ema.module.state_dict())

    def update(self, n: int) -> float | None:
        if self._version == "v2":
            self._ema.update(self._model)
            return 1 - self._ema.decay
        step = n if self._step else None
        self._ema.update(self._model, step=step)
        return 1 - self._ema.get_decay(step)


class Torch:
    def __init__(
        self,
        model: torch.nn.Module,
        kind: str = "ema",
        decay: float = 0.999,
        use_buffers: bool = False,
    ) -> None:
        from torch.optim import swa_utils

        self._model, self._kind, self._decay = model, kind, decay
        average = None if kind == "swa" else swa_utils.get_ema_multi_avg_fn(decay)
        self._ema = swa_utils.AveragedModel(model, multi_avg_fn=average, use_buffers=use_buffers)

    def tensors(self) -> Tensors:
        return dict(self._ema.module.state_dict())

    def update(self, n: int) -> float | None:
        count = int(self._ema.n_averaged)
        self._ema.update_parameters(self._model)
        if count == 0:
            return 1.0
        return 1 / (count + 1) if self._kind == "swa" else 1 - self._decay


class Optax:
    """incremental_update, from the first push on."""

    def __init__(self, model: torch.nn.Module, step_size: float) -> None:
        self._model, self._size = model, step_size
        self._tensors = {
            name: torch.zeros_like(tensor)
            for name, tensor in model.state_dict().items()
            if tensor.is_floating_point()
        }

    def tensors(self) -> Tensors:
        return self._tensors

    def update(self, n: int) -> float | None:
        import jax.numpy as jnp
        import optax

        new = {name: jnp.asarray(self._model.state_dict()[name].numpy()) for name in self._tensors}
        old = {name: jnp.asarray(tensor.numpy()) for name, tensor in self._tensors.items()}
        for name, value in optax.incremental_update(new, old, self._size).items():
            self._tensors[name].copy_(torch.tensor(np.asarray(value)))
        return self._size


def edm2_gamma(std: float) -> float:
    t = std**-2
    return float(np.roots([1, 7, 16 - t, 12 - t]).real.max())


def inverse_gamma(s: float, inv_gamma: float = 1.0, power: float = 2 / 3) -> float:
    return 1 - (1 + s / inv_gamma) ** -power


@dataclasses.dataclass(frozen=True)
class Case:
    """A setting of a library, and the same as a preset."""

    name: str
    library: Callable[..., Any]
    preset: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    # The library begins with the weights from before training, we with the first push.
    skip_first: bool = False

    @property
    def track(self) -> dict[str, Any]:
        return {"preset": self.preset, **self.arguments}


CASES = [
    Case("diffusers", Diffusers, "diffusers"),
    Case("diffusers-short", Diffusers, "diffusers", {"decay": 0.9, "update_after_step": 3}),
    Case("diffusers-min", Diffusers, "diffusers", {"decay": 0.95, "min_decay": 0.5}),
    Case("diffusers-crossed", Diffusers, "diffusers", {"decay": 0.5, "min_decay": 0.9}),
    Case(
        "diffusers-warmup",
        Diffusers,
        "diffusers",
        {"use_ema_warmup": True, "inv_gamma": 2.0, "power": 0.75, "update_after_step": 5},
    ),
    Case("timm-v2", Timm, "timm", {"version": "v2"}, skip_first=True),
    Case("timm-v2-short", Timm, "timm", {"version": "v2", "decay": 0.9}, skip_first=True),
    Case("timm-v3", Timm, "timm"),
    Case("timm-v3-after", Timm, "timm", {"decay": 0.99, "update_after_step": 7}),
    Case("timm-v3-warmup", Timm, "timm", {"use_warmup": True, "decay": 0.95, "min_decay": 0.4}),
    Case(
        "timm-v3-warmup-after",
        Timm,
        "timm",
        {"use_warmup": True, "warmup_gamma": 3.0, "warmup_power": 0.8, "update_after_step": 4},
    ),
    Case("timm-v3-buffers", Timm, "timm", {"decay": 0.9, "exclude_buffers": True}),
    Case("timm-v3-no-step", Timm, "timm", {"decay": 0.99, "step": False}, skip_first=True),
    Case("torch", Torch, "torch"),
    Case("torch-buffers", Torch, "torch", {"decay": 0.9, "use_buffers": True}),
    Case("torch-zero", Torch, "torch", {"decay": 0.0}),
    Case("torch-swa", Torch, "torch", {"kind": "swa"}),
    Case("torch-swa-buffers", Torch, "torch", {"kind": "swa", "use_buffers": True}),
    Case("optax", Optax, "optax", {"step_size": 0.001}, skip_first=True),
    Case("optax-large", Optax, "optax", {"step_size": 0.7}, skip_first=True),
]


def ours_and_theirs(
    make_ours: MakeOurs, case: Case, *, updates: int = UPDATES
) -> Iterator[tuple[Step, Theirs]]:
    model = Net()
    library = case.library(model, **case.arguments)
    steps = run_ours(make_ours(model, case.track), model, updates=updates)
    for step, theirs in zip(steps, run_theirs(library, model, steps)):
        if case.skip_first and step.n == 1:
            assert step.weight == 1
            continue
        yield step, theirs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decays_and_updates_are_the_librarys(case, make_ours):
    agreement = Agreement()
    weights = set()
    is_copied = Track.preset(case.preset, **case.arguments).buffers == "copy"
    copied = set(dict(Net().named_buffers())) if is_copied else set()
    for step, theirs in ours_and_theirs(make_ours, case):
        assert step.weight == np.float32(theirs.weight), step.n
        weights.add(step.weight)
        after = floats(theirs.after)
        for name in copied & after.keys():
            assert torch.equal(after.pop(name), step.params[name])
            assert torch.equal(step.after[name], step.params[name])
        if step.before is not None:
            agreement.add(step, after, theirs.weight)
        # Also where a library averages integers.
        for name, tensor in step.after.items():
            if not tensor.is_floating_point():
                assert torch.equal(tensor, step.params[name])
    print(f"{case.name}: {len(weights)} weights; {agreement}")
    agreement.check()


def arguments_of(*functions: Callable[..., Any]) -> dict[str, Any]:
    """Their arguments that have defaults."""
    return {
        parameter.name: parameter.default or None  # An empty set is an empty tuple.
        for function in functions
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is not parameter.empty
    }


def test_presets_have_the_librarys_arguments_and_defaults():
    import diffusers.training_utils
    import ema_pytorch
    import optax
    import timm.utils
    from torch.optim import swa_utils

    model = swa_utils.AveragedModel
    own_names = {
        # Deprecated, in diffusers' **kwargs; and how ours is called.
        "diffusers": {"max_value", "min_value", "device"},
        "timm v3": {"step"},
    }
    for name, ours, theirs in (
        ("ema_pytorch", presets.ema_pytorch, [ema_pytorch.EMA.__init__]),
        ("karras", presets._karras, [ema_pytorch.KarrasEMA.__init__]),
        ("diffusers", presets._diffusers, [diffusers.training_utils.EMAModel.__init__]),
        ("timm v2", presets._timm_v2, [timm.utils.ModelEmaV2.__init__]),
        ("timm v3", presets._timm_v3, [timm.utils.ModelEmaV3.__init__]),
        ("torch", presets._torch_ema, [model.__init__, swa_utils.get_ema_multi_avg_fn]),
        ("torch swa", presets._torch_swa, [model.__init__]),
    ):
        own = arguments_of(ours)
        assert own_names.get(name, set()) <= own.keys()
        own = {key: own[key] for key in own if key not in own_names.get(name, ())}
        assert own == arguments_of(*theirs), name
    own = inspect.signature(presets._optax).parameters
    for function in (optax.ema, optax.incremental_update, optax.periodic_update):
        parameters = inspect.signature(function).parameters.keys()
        assert parameters - {"new_tensors", "old_tensors", "steps"} <= own.keys()


EMA_PYTORCH = {
    "defaults": {},
    "every-step": {"update_every": 1, "update_after_step": 0},
    "every-2-after-3": {"update_every": 2, "update_after_step": 3},
    # The first averaging call is not the one after the last copy.
    "every-4-after-3": {"update_every": 4, "update_after_step": 3},
    "every-7-after-100": {"update_every": 7},
    "limits": {
        "update_every": 1,
        "update_after_step": 5,
        "beta": 0.9,
        "min_value": 0.6,
        "inv_gamma": 3.0,
        "power": 0.9,
    },
    "crossed": {"update_every": 3, "update_after_step": 0, "beta": 0.5, "min_value": 0.9},
    "frozen": {"update_every": 3, "update_after_step": 10, "beta": 1},
    "names": {
        "update_every": 1,
        "update_after_step": 0,
        "param_or_buffer_names_no_ema": ["norm.running_var"],
        "ignore_names": ["linear.weight"],
        "ignore_startswith_names": ["sca"],
    },
}


def ema_pytorch_weight(t: int, **arguments: Any) -> float | None:
    """What ema_pytorch means to give its call t, counted from 0, without float32."""
    get = {"beta": 0.9999, "update_after_step": 100, "update_every": 10, **arguments}.get
    if t % get("update_every") != 0:
        return None
    if t <= get("update_after_step"):
        return 1.0
    if get("beta") == 1:
        return None
    s = t - get("update_after_step")
    decay = inverse_gamma(s, get("inv_gamma", 1.0), get("power", 2 / 3))
    return 1 - min(max(decay, get("min_value", 0.0)), get("beta"))


@pytest.mark.parametrize("arguments", EMA_PYTORCH.values(), ids=EMA_PYTORCH.keys())
def test_ema_pytorch(arguments, make_ours):
    """It forms its decay in float32, where we do not: the decays are equal as float32 to one ulp.

    At decay 0.9999 an ulp is 0.06 % of the weight.
    """
    case = Case("ema_pytorch", EmaPytorch, "ema_pytorch", arguments)
    agreement = Agreement()
    furthest = 0.0
    averaged = set(Net().state_dict()) - set(arguments.get("ignore_names", []))
    averaged -= (
        {name for name in averaged if name.startswith("sca")}
        if "ignore_startswith_names" in arguments
        else set()
    )
    for step, theirs in ours_and_theirs(make_ours, case):
        exact = ema_pytorch_weight(step.n - 1, **arguments)
        assert step.weight == (None if exact is None else np.float32(exact)), step.n
        assert (theirs.weight is None) == (exact is None)
        assert step.after.keys() == averaged
        if exact is None or step.before is None:
            continue
        furthest = max(furthest, abs(theirs.weight - exact) * 2**24)
        after = floats({name: theirs.after[name] for name in averaged})
        if "names" in str(arguments):
            variance = after.pop("norm.running_var")
            assert torch.equal(variance, step.params["norm.running_var"])
            assert torch.equal(step.after["norm.running_var"], variance)
        agreement.add(step, after, exact)
    print(f"decay {furthest:.2f} x 2^-24 apart; {agreement}")
    assert furthest <= 1
    agreement.check()


def test_ema_pytorch_forgets_integer_buffers(make_ours):
    case = Case("ema_pytorch", EmaPytorch, "ema_pytorch", {"update_every": 1})
    name = "norm.num_batches_tracked"
    for step, theirs in ours_and_theirs(make_ours, case, updates=5):
        assert theirs.after[name] == 0
        assert step.after[name] == step.params[name] == step.n


def test_karras_is_a_step_ahead_as_the_library(make_ours):
    """KarrasEMA's decay at call n is the profile's at step n + 1, and ours."""
    model = Net()
    library = EmaPytorch(model, "KarrasEMA", sigma_rel=0.1, update_every=1)
    track = {"preset": "karras", "sigma_rel": 0.1, "update_every": 1}
    steps = run_ours(make_ours(model, track), model, updates=UPDATES)
    theirs = [result.weight for result in run_theirs(library, model, steps)]
    exponent = edm2_gamma(0.1) + 1
    # The first call of both is a copy.
    for step, their in list(zip(steps, theirs))[1:]:
        expected = 1 - (1 - 1 / (step.n + 1)) ** exponent
        assert step.weight == pytest.approx(expected, rel=1e-6)
        assert step.weight == np.float32(their)


def profile_width(weights: list[tuple[int, float]], last: int) -> float:
    """The relative standard deviation of the updates' shares over time."""
    share = {}
    for n, weight in weights:
        share = {at: part * (1 - weight) for at, part in share.items()}
        share[n] = weight
    at = np.array(list(share)) / last
    part = np.array(list(share.values()))
    mean = (at * part).sum() / part.sum()
    return float(np.sqrt(((at - mean) ** 2 * part).sum() / part.sum()))


def test_karras_keeps_its_width_at_any_interval():
    """ema_pytorch's decay forgets update_every: sigma_rel 0.05 becomes 0.24 at every 10."""
    model = torch.nn.Linear(1, 1)
    for every, theirs_width in ((1, 0.05), (10, 0.246)):
        library = EmaPytorch(model, "KarrasEMA", sigma_rel=0.05, update_every=every)
        ema = ema_client.LocalEMA(
            model, preset={"preset": "karras", "sigma_rel": 0.05, "update_every": every}
        )
        ours, theirs = [], []
        for n in range(1, 5001):
            record = ema.update()["ema"]
            if record.updated:
                ours.append((n, record.update_weight))
            weight = library.update(n)
            if weight is not None:
                theirs.append((n, weight))
        assert profile_width(ours, 5000) == pytest.approx(0.05, abs=0.002)
        assert profile_width(theirs, 5000) == pytest.approx(theirs_width, abs=0.01)


def test_diffusers_does_not_copy_exactly_at_first(make_ours):
    """Its subtract form, e -= 1 * (e - p), leaves a third of the elements an ulp off; a copy does not."""
    differing = elements = 0
    case = Case("diffusers", Diffusers, "diffusers", {"update_after_step": 20})
    for step, theirs in ours_and_theirs(make_ours, case, updates=20):
        assert step.weight == theirs.weight == 1
        for name in float_names(theirs.after):
            assert torch.equal(step.after[name], step.params[name])
            if step.n > 1:
                differing += int((theirs.after[name] != step.params[name]).sum())
                elements += theirs.after[name].numel()
    assert 0.1 < differing / elements < 0.6


def test_diffusers_keeps_no_buffers(make_ours):
    case = Case("diffusers", Diffusers, "diffusers")
    for step, theirs in ours_and_theirs(make_ours, case, updates=5):
        assert not any(name.startswith("norm.running") for name in theirs.after)
        assert torch.equal(step.after["norm.running_mean"], step.params["norm.running_mean"])


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3, bias=False)
        self.second = torch.nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight


def test_timm_updates_tied_weights_twice():
    """0 -> 1 at decay 0.9 is 0.1; timm V2 makes 0.19 of it, V3 0.19 or, at once, 0.2."""
    from timm.utils import ModelEmaV2, ModelEmaV3

    model = Tied()
    with torch.no_grad():
        model.first.weight.zero_()
    theirs = [
        ModelEmaV2(model, decay=0.9),
        ModelEmaV3(model, decay=0.9, foreach=False),
        ModelEmaV3(model, decay=0.9, foreach=True),
    ]
    ours = ema_client.LocalEMA(model, preset={"preset": "timm", "version": "v2", "decay": 0.9})
    ours.update(time={"batch": 0})
    with torch.no_grad():
        model.first.weight.fill_(1)
    for library in theirs:
        library.update(model)
    ours.update()
    results = [float(library.module.first.weight[0, 0].detach()) for library in theirs]
    assert results[:2] == pytest.approx([0.19, 0.19])
    assert results[2] == pytest.approx(0.2, abs=0.011)
    weights = ours.weights()
    assert weights["first.weight"][0, 0] == np.float32(0.1)
    assert torch.equal(weights["first.weight"], weights["second.weight"])


def test_timm_v2_cuts_integers_off():
    """num_batches_tracked of its average stays 0 for a thousand batches; ours is the model's."""
    from timm.utils import ModelEmaV2

    model = Net()
    theirs = ModelEmaV2(model, decay=0.999)
    ours = ema_client.LocalEMA(model, preset={"preset": "timm", "version": "v2", "decay": 0.999})
    for _ in range(100):
        model.norm.num_batches_tracked += 1
        theirs.update(model)
        ours.update()
    assert theirs.module.norm.num_batches_tracked == 0
    assert ours.weights()["norm.num_batches_tracked"] == 100


@pytest.mark.parametrize("debias", [True, False], ids=["debias", "plain"])
@pytest.mark.parametrize("decay", [0.9, 0.999, 0.9999])
def test_optax_ema(debias, decay, make_ours):
    """It forms the zeros' share, 1 - decay^n, in float32: at 0.9999 its first value is 1.0002 of ours."""
    import jax.numpy as jnp
    import optax

    model = Net()
    track = {"preset": "optax", "decay": decay, "debias": debias}
    steps = run_ours(make_ours(model, track), model, updates=UPDATES)
    transform = optax.ema(decay, debias=debias)
    names = float_names(steps[0].params)
    state = transform.init({name: jnp.zeros(steps[0].params[name].shape) for name in names})
    exact = {name: np.zeros(steps[0].params[name].shape) for name in names}
    worst_ours = worst_theirs = largest = 0.0
    for step in steps:
        params = {name: jnp.asarray(step.params[name].numpy()) for name in names}
        output, state = transform.update(params, state)
        share = -math.expm1(step.n * math.log(decay)) if debias else 1.0
        for name in names:
            exact[name] += (1 - decay) * (step.params[name].double().numpy() - exact[name])
            value = exact[name] / share
            scale = largest = max(largest, float(step.params[name].abs().max()))
            ours = np.abs(step.after[name].double().numpy() - value).max() / scale
            theirs = np.abs(np.asarray(output[name], np.float64) - value).max() / scale
            worst_ours, worst_theirs = max(worst_ours, ours), max(worst_theirs, theirs)
        if not debias:
            assert step.weight == np.float32(1 - decay)
        else:
            assert step.weight == pytest.approx((1 - decay) / share, rel=1e-7)
    print(f"from float64: ours {worst_ours:.2e}, theirs {worst_theirs:.2e}")
    assert worst_ours < 1e-6
    assert worst_ours <= worst_theirs + 2**-23
    if debias and decay == 0.9999:
        assert worst_theirs > 1e-5


def test_optax_periodic_update(make_ours):
    import jax.numpy as jnp
    import optax

    model = Net()
    steps = run_ours(
        make_ours(model, {"preset": "optax", "update_period": 7}), model, updates=UPDATES
    )
    old = jnp.zeros((13, 7))
    for step in steps:
        new = jnp.asarray(step.params["linear.weight"].numpy())
        old = optax.periodic_update(new, old, step.n, 7)
        if step.n >= 7:
            np.testing.assert_array_equal(np.asarray(old), step.after["linear.weight"].numpy())


def test_edm2(make_ours):
    """Its formulas (the code is not on PyPI): the same weights, with images as samples."""
    batch_images = 128
    cases = [
        ({"std": 0.05}, lambda n: (1 - 1 / n) ** (edm2_gamma(0.05) + 1)),
        ({"stds": [0.1]}, lambda n: (1 - 1 / n) ** (edm2_gamma(0.1) + 1)),
        ({"rampup_ratio": 0.09}, lambda n: 0.5 ** (1 / (n * 0.09))),
        (
            {"halflife_Mimg": 0.0064, "rampup_ratio": 0.09},
            lambda n: 0.5 ** (batch_images / min(6400, batch_images * n * 0.09)),
        ),
        ({"halflife_Mimg": 0.0064, "rampup_ratio": None}, lambda n: 0.5 ** (batch_images / 6400)),
    ]
    model = torch.nn.Linear(2, 2)
    for arguments, decay in cases:
        ema = ema_client.LocalEMA(model, preset={"preset": "edm2", **arguments})
        for n in range(1, UPDATES + 1):
            record = ema.update({"sample": batch_images * n})["ema"]
            expected = 1.0 if n == 1 else np.float32(1 - decay(n))
            assert record.update_weight == expected, (arguments, n)
    # The average of torch.lerp, EDM2's arithmetic, from the same values.
    model = Net()
    steps = run_ours(make_ours(model, {"sigma_rel": 0.1}), model, updates=UPDATES)
    agreement = Agreement()
    for step in steps[1:]:
        weight = 1 - (1 - 1 / step.n) ** (edm2_gamma(0.1) + 1)
        assert step.before is not None
        theirs = {
            name: torch.lerp(step.before[name], step.params[name], weight)
            for name in float_names(step.params)
        }
        agreement.add(step, theirs, weight)
    agreement.check()


def test_all_track_local_and_server_alike(client, model, rng):
    """One upload, all presets: LocalEMA has the server's bits."""
    tracks: dict[str, Any] = {case.name: case.track for case in CASES}
    tracks |= {
        f"ema_pytorch-{name}": {"preset": "ema_pytorch", **arguments}
        for name, arguments in EMA_PYTORCH.items()
    }
    tracks |= {"half-life": {"half_life": "7ba", "dtype": "float64"}, "raw": "copy"}
    net = Net()
    ema = ema_client.LocalEMA(net, tracks=tracks)
    buffers = dict(net.named_buffers())
    specs = {
        name: ema_client.TensorSpec(
            name, str(t.dtype).removeprefix("torch."), tuple(t.shape), is_buffer=name in buffers
        )
        for name, t in net.state_dict().items()
    }
    client.create_model(model, specs, tracks=tracks)
    generator = torch.Generator().manual_seed(1)
    with client.open_run(model) as run:
        for n in range(1, 151):
            for tensor in net.parameters():
                torch.nn.init.normal_(tensor, generator=generator)
            net.norm.num_batches_tracked += 1
            records = ema.update()
            version = run.push(step=n, weights=net.state_dict())
            for name, record in version.tracks.items():
                assert dataclasses.asdict(records[name]) == dataclasses.asdict(record), (n, name)
    for name in tracks:
        pulled = client.pull(model, track=name, framework="torch")
        local = ema.weights(name)
        assert pulled.keys() == local.keys()
        for tensor in pulled:
            assert torch.equal(pulled[tensor], local[tensor]), (name, tensor)
