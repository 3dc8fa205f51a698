# SPDX-License-Identifier: Apache-2.0
"""JAX and NumPy where torch is not installed, and the names of a pytree's leaves."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import ema_client
import numpy as np
import pytest
import torch
from server_process import ROOT
from testing import assert_same_bits

pytestmark = pytest.mark.framework

jax = pytest.importorskip("jax")

# Trains, averages by optax what it pushes, and logs it.
TRAINING = """
import sys
import ema_client, jax, jax.numpy as jnp, numpy as np, optax
from ema_client.jax import named_leaves, unflatten

address, model, log_file = sys.argv[1:4]
try:
    import torch
except ImportError:
    pass
else:
    sys.exit("torch is installed")

key = jax.random.key(1)
params = {
    "layers": [
        {"kernel": jax.random.normal(key, (4, 700)), "bias": jnp.zeros(700)},
        {"kernel": jax.random.normal(key, (700, 1)).astype(jnp.bfloat16), "bias": jnp.zeros(1)},
    ],
    "scale": (jnp.ones(()),),
}
optimizer = optax.adam(0.01)
state = optimizer.init(params)

def loss(params, x):
    first, last = params["layers"]
    y = jnp.tanh(x @ first["kernel"] + first["bias"]) @ last["kernel"] + last["bias"]
    return jnp.mean((params["scale"][0] * y - x.sum(1, keepdims=True)) ** 2)

def step(params, state, x):
    updates, state = optimizer.update(jax.grad(loss)(params, x), state)
    return optax.apply_updates(params, updates), state

# The weights of before give their memory to the new ones, unless a push still reads them.
step = jax.jit(step, donate_argnums=(0, 1))

def in_float32(tree):
    return jax.tree.map(lambda leaf: np.array(leaf.astype(jnp.float32)), tree)

log = {}
with ema_client.Client(address) as client:
    client.create_model(
        model, named_leaves(params), tracks={"ema": {"smoothing": 0.9}, "raw": "copy"}
    )
    with client.open_run(model) as run:
        for n in range(1, 25):
            pushed = in_float32(params)
            log |= {f"{n}/{name}": leaf for name, leaf in named_leaves(pushed).items()}
            expected = pushed if n == 1 else optax.incremental_update(pushed, expected, 0.1)
            pending = run.start_push(step=n, weights=named_leaves(params))
            key, x_key = jax.random.split(key)
            params, state = step(params, state, jax.random.normal(x_key, (8, 4)))
            pending.wait()
    # "auto" is NumPy here.
    pulled = client.pull(model, track="ema")
    assert all(type(value) is np.ndarray for value in pulled.values())
    for name, value in named_leaves(expected).items():
        np.testing.assert_allclose(pulled[name], value, rtol=1e-5, atol=1e-6)

    # The tree's dtypes, and memory of its own.
    average = unflatten(params, pulled)
    assert jax.tree.map(lambda leaf: leaf.dtype, average) == jax.tree.map(lambda leaf: leaf.dtype, params)
    before = np.array(average["layers"][0]["kernel"])
    pulled["layers.0.kernel"][:] = 0
    assert (np.array(average["layers"][0]["kernel"]) == before).all()

    # NumPy arrays, and anything with the buffer protocol.
    weights = {"w": np.ones((2, 3), np.float32), "b": memoryview(b"abc")}
    client.create_model(model + "-numpy", weights, tracks={"raw": "copy"})
    with client.open_run(model + "-numpy") as run:
        run.push(step=1, weights=weights)
    out = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.uint8)}
    client.pull(model + "-numpy", track="raw", out=out)
    assert (out["w"] == 1).all() and out["b"].tobytes() == b"abc"
assert not any(name.split(".")[0] == "torch" for name in sys.modules)
np.savez(log_file, **log)
"""


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Python, and what it is given so that it finds all packages but torch."""
    folder = tmp_path_factory.mktemp("packages")
    sites = [pathlib.Path(path) for path in sys.path if path.endswith("site-packages")]
    # Of two packages of a name, the first is found.
    for site in [pathlib.Path(ema_client.__file__).parents[1], *sites]:
        for entry in site.iterdir():
            link = folder / entry.name
            if not entry.name.startswith(("torch", "functorch")) and not link.exists():
                link.symlink_to(entry)
    # -S: without the environment's own packages.
    return ["env", f"PYTHONPATH={folder}", "JAX_PLATFORMS=cpu", sys.executable, "-S"]


class Holder(torch.nn.Module):
    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        super().__init__()
        for name, value in weights.items():
            self.register_buffer(name.replace(".", "_"), torch.from_numpy(np.array(value)))


def test_a_training_without_torch(server, client, model, tmp_path, without_torch):
    """Within the program by optax; here, bit for bit, by LocalEMA."""
    log_file = tmp_path / "log.npz"
    result = subprocess.run(
        [*without_torch, "-c", TRAINING, server.address, model, log_file],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    log = dict(np.load(log_file))
    names = [spec.name for spec in client.model(model).tensors]
    assert names == [
        "layers.0.bias",
        "layers.0.kernel",
        "layers.1.bias",
        "layers.1.kernel",
        "scale.0",
    ]
    holder = Holder({name: log[f"1/{name}"] for name in names})
    local = ema_client.LocalEMA(holder, smoothing=0.9)
    for n in range(1, 25):
        for name in names:
            getattr(holder, name.replace(".", "_")).copy_(torch.from_numpy(log[f"{n}/{name}"]))
        local.update()
    weights = local.weights()
    assert_same_bits(
        {name: weights[name.replace(".", "_")] for name in names},
        client.pull(model, track="ema", framework="numpy"),
    )


def test_the_example(server, model, without_torch):
    for _ in range(2):  # The second training starts a new average.
        result = subprocess.run(
            [*without_torch, ROOT / "deploy/examples/jax_train.py", server.address, model],
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert result.returncode == 0, result.stderr
        trained, averaged = (float(line.split()[1]) for line in result.stdout.splitlines())
        assert averaged < trained < 2


def test_names_of_leaves():
    from ema_client.jax import named_leaves

    tree = {"b": [1, {"x": 2}], "a": (3, None), "c.d": 4}
    assert named_leaves(tree) == {"a.0": 3, "b.0": 1, "b.1.x": 2, "c.d": 4}
    for bad, message in (({"a": {"b": 1}, "a.b": 2}, 'two leaves are named "a.b"'), (1, "alone")):
        with pytest.raises(ema_client.InvalidArgumentError, match=message):
            named_leaves(bad)


def test_unflatten_wants_all_names_and_shapes():
    from ema_client.jax import unflatten

    tree = {"a": jax.numpy.zeros(3), "b": jax.numpy.zeros(())}
    with pytest.raises(
        ema_client.InvalidArgumentError, match="not in arrays: b; not in the tree: c"
    ):
        unflatten(tree, {"a": np.zeros(3), "c": np.zeros(1)})
    with pytest.raises(
        ema_client.InvalidArgumentError, match=r"a: \(1, 3\) in arrays, \(3,\) in the tree"
    ):
        unflatten(tree, {"a": np.zeros((1, 3)), "b": np.zeros(())})
    made = unflatten(tree, {"a": np.ones(3), "b": np.ones(())})
    assert isinstance(made["a"], jax.Array) and made["a"].dtype == np.float32
    for dtype, large in (("float16", 1e5), ("bfloat16", 3.4e38)):
        half = {"a": jax.numpy.zeros(1, dtype)}
        with pytest.raises(ema_client.InvalidArgumentError, match=rf"tree: a\[0\] is .*{dtype}"):
            unflatten(half, {"a": np.full(1, large, np.float32)})


def test_arrays_on_several_devices(server, model):
    """Spread over four devices of the host: pushed whole, and given back as they were spread."""
    program = f"""
import ema_client, jax, numpy as np
from ema_client.jax import named_leaves, unflatten
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.array(jax.devices()), ("x",))
spread = NamedSharding(mesh, PartitionSpec("x"))
tree = {{
    "w": jax.device_put(np.arange(8, dtype=np.float32), spread),
    "second": jax.device_put(np.ones(2, np.float32), jax.devices()[1]),
}}
with ema_client.Client({server.address!r}) as client:
    client.create_model({model!r}, named_leaves(tree), tracks={{"raw": "copy"}})
    with client.open_run({model!r}) as run:
        run.push(step=1, weights=named_leaves(tree))
    back = unflatten(tree, client.pull({model!r}, track="raw", framework="numpy"))
for name, leaf in tree.items():
    assert (np.asarray(back[name]) == np.asarray(leaf)).all()
    assert back[name].sharding == leaf.sharding, back[name].sharding
"""
    flags = "--xla_force_host_platform_device_count=4"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
