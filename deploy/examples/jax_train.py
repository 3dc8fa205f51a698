# SPDX-License-Identifier: Apache-2.0
"""Trains with JAX and optax; the average is on an EMA Server. Torch is not needed.

Usage: jax_train.py host:50051 MODEL
"""

from __future__ import annotations

import sys

import ema_client
import jax
import jax.numpy as jnp
import optax
from ema_client.jax import named_leaves, unflatten

STEPS = 200
INTERVAL = 5


def predict(params: dict, x: jax.Array) -> jax.Array:
    for layer in params["hidden"]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x @ params["last"]


def loss(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((predict(params, x) - y) ** 2)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    address, model = sys.argv[1:]
    key = jax.random.key(0)
    params = {
        "hidden": [{"kernel": 0.3 * jax.random.normal(key, (8, 32)), "bias": jnp.zeros(32)}],
        "last": 0.1 * jax.random.normal(key, (32, 1)),
    }
    optimizer = optax.sgd(0.1)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, x, y):
        updates, state = optimizer.update(jax.grad(loss)(params, x, y), state)
        return optax.apply_updates(params, updates), state

    with ema_client.Client(address) as client:
        # As existing="new" of attach(): a second training starts a new average.
        client.delete_model(model)
        client.create_model(model, named_leaves(params), tracks={"ema": "50ba"})
        with client.open_run(model) as run:
            for n in range(1, STEPS + 1):
                key, x_key, noise_key = jax.random.split(key, 3)
                x = jax.random.normal(x_key, (16, 8))
                y = x.sum(1, keepdims=True) + jax.random.normal(noise_key, (16, 1))
                params, state = step(params, state, x, y)
                if n % INTERVAL == 0:
                    run.push(step=n, weights=named_leaves(params))
        average = unflatten(params, client.pull(model, track="ema", framework="numpy"))

    x = jax.random.normal(key, (1000, 8))
    for name, tree in (("trained", params), ("averaged", average)):
        print(f"{name}: {loss(tree, x, x.sum(1, keepdims=True)):.4f}")


if __name__ == "__main__":
    main()
