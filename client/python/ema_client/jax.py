# SPDX-License-Identifier: Apache-2.0
"""Names the leaves of a JAX pytree, to push them, and builds a tree from pulled arrays.

    >>> run.push(step=step, weights=named_leaves(params))
    >>> average = unflatten(params, client.pull("m", track="ema", framework="numpy"))

Imports jax. Does not need torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ema_client._client.arrays import check_names, check_shapes
from ema_client._client.out import check_fits
from ema_client._errors import InvalidArgumentError


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by the keys and indices that lead to them, such as "layers.0.kernel".

    Returns the arrays themselves, in the tree's order. A push reads those in host memory in place.
    If a step donates them meanwhile, JAX allocates new memory, as it does whenever other code holds
    an array.

    Raises:
        InvalidArgumentError: two leaves have the same name; or the tree is a single leaf, which has
            none.

    Example:
        >>> client.create_model("m", named_leaves(params), tracks={"ema": "200ba"})
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not name or name in leaves:
            raise InvalidArgumentError(
                f'tree: {"two leaves are" if name else "a leaf alone is"} named "{name}": give them '
                "other keys",
                reason="BAD_MANIFEST",
            )
        leaves[name] = leaf
    return leaves


def unflatten(tree: Any, arrays: Mapping[str, Any]) -> Any:
    """A tree like `tree` whose leaves are copies of `arrays`, with the old dtypes and devices.

    Args:
        tree: as for `named_leaves`.
        arrays: by name, such as a pull's result.

    Raises:
        InvalidArgumentError: names or shapes do not match, lists all; or a value is too large for its
            leaf's dtype.

    Example:
        >>> average = unflatten(params, client.pull("m", track="ema", framework="numpy"))
    """
    leaves = named_leaves(tree)
    places = ("in arrays", "in the tree")
    check_names("arrays", expected=leaves, given=arrays, places=places)
    check_shapes("arrays", expected=leaves, given=arrays, places=places)
    for name, leaf in leaves.items():
        check_fits("tree", name, jax.numpy.asarray(arrays[name]), leaf)
    # Copies: JAX would share NumPy's memory, which `Client.refresh` writes to.
    return jax.tree_util.tree_unflatten(
        jax.tree_util.tree_structure(tree),
        [
            jax.numpy.array(arrays[name], dtype=leaf.dtype, copy=True, device=_device_of(leaf))
            for name, leaf in leaves.items()
        ],
    )


def _device_of(leaf: Any) -> Any:
    """The leaf's sharding over devices; None: it is a NumPy array."""
    return getattr(leaf, "sharding", None)
