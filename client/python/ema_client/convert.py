# SPDX-License-Identifier: Apache-2.0
"""Converts averages that other libraries have saved to safetensors files.

    python -m ema_client.convert FROM.pt TO.safetensors [--key ema] [--names NAMES]

FROM is a file of torch.save with the state of an ema-pytorch `EMA`, `KarrasEMA` or `PostHocEMA`, a
diffusers `EMAModel`, a torch `AveragedModel`, or with any state_dict; `--key` names the state in a
larger checkpoint ("trainer.ema": one key in another). It is read with weights_only=True: no code in
it is executed. Names lose what wrappers have added (DistributedDataParallel, torch.compile,
activation checkpointing), as with `attach`. Several averages go to TO.0.safetensors,
TO.1.safetensors, and so on. `Client.import_weights` and `emactl import` take these files.

A diffusers state has no names: --names gives them, as a text file with one name per line, in the
order of `model.named_parameters()`; or as a safetensors file or Hugging Face folder of the model,
if no two of its tensors have the same shape.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import pickle
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ema_client._client import arrays, safetensors
from ema_client._errors import EmaError, InvalidArgumentError
from ema_client._argument_checks import path_from

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Average:
    """One average: its library, its own count of updates or steps ("" if it has none), its tensors."""

    source: str
    step: str
    tensors: Mapping[str, torch.Tensor]


def averages_of(state: Mapping[str, Any], *, names: Sequence[str] | None = None) -> list[Average]:
    """Finds the averages in a library's state.

    Args:
        state: a result of the library's state_dict().
        names: the names of the tensors in a diffusers state, in its order.

    Raises:
        InvalidArgumentError: an unknown state, or names that do not fit it.
    """
    if wrong := [name for name in state if not isinstance(name, str)]:
        raise _refused(f"{wrong[0]!r} is no name: is the average under another --key?")
    if "shadow_params" in state:
        return [_of_diffusers(state, names)]
    if "n_averaged" in state:
        tensors = _with_prefix(state, "module.")
        return [Average("torch", _number(state["n_averaged"]), _unwrapped(tensors))]
    if any(name.startswith("ema_model.") for name in state):
        return [_of_ema_pytorch(state)]
    indices = {match[1] for name in state if (match := re.match(r"ema_models\.(\d+)\.", name))}
    if indices:
        return [
            _of_ema_pytorch(_with_prefix(state, f"ema_models.{index}."))
            for index in sorted(indices, key=int)
        ]
    return [Average("state_dict", "", _unwrapped(state))]


def _of_ema_pytorch(state: Mapping[str, Any]) -> Average:
    step = _number(state["step"]) if "step" in state else ""
    return Average("ema_pytorch", step, _unwrapped(_with_prefix(state, "ema_model.")))


def _of_diffusers(state: Mapping[str, Any], names: Sequence[str] | None) -> Average:
    values = _shadow_params(state)
    if names is None:
        raise _refused("a diffusers state has no names: give them with --names")
    if len(names) != len(values):
        raise _refused(f"{len(values)} shadow_params, but {len(names)} names")
    step = _number(state.get("optimization_step", ""))
    return Average("diffusers", step, _unwrapped(dict(zip(names, values))))


def _shadow_params(state: Mapping[str, Any]) -> Sequence[torch.Tensor]:
    import torch

    values = state.get("shadow_params", ())
    if isinstance(values, (list, tuple)) and all(isinstance(v, torch.Tensor) for v in values):
        return values
    raise _refused('"shadow_params" is no list of tensors')


def _names_from(path: pathlib.Path, state: Mapping[str, Any]) -> list[str]:
    """The names for a diffusers state, from a text file or by the shapes of a model's tensors."""
    if path.is_file() and path.suffix != ".safetensors":
        try:
            return path.read_text("utf-8").split()
        except UnicodeDecodeError as error:
            raise _refused(f"{path}: not a text file in UTF-8: {error}") from None
    by_shape: dict[tuple[int, ...], str] = {}
    for tensor in safetensors.open_weights(path):
        if tensor.spec.shape in by_shape:
            raise _refused(
                f"{path}: {by_shape[tensor.spec.shape]} and {tensor.spec.name} have the same shape, and "
                "the file has not the parameters' order; give a text file with a name a line, as "
                r'"\n".join(name for name, _ in model.named_parameters())'
            )
        by_shape[tensor.spec.shape] = tensor.spec.name
    shapes = [tuple(value.shape) for value in _shadow_params(state)]
    if unknown := [shape for shape in shapes if shape not in by_shape]:
        raise _refused(f"{path}: no tensor of shape {unknown[0]}")
    return [by_shape[shape] for shape in shapes]


def _number(value: Any) -> str:
    return str(value.item() if hasattr(value, "item") else value)


def _with_prefix(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def _unwrapped(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors by the names that `attach` gives them."""
    try:
        names = safetensors.unwrapped_names(state)
    except InvalidArgumentError as error:
        raise _refused(error.args[0]) from None
    return _checked(dict(zip(names, state.values())))


def _checked(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors, tied ones once. InvalidArgumentError: a value is not a dense tensor."""
    import torch

    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise _refused(
                f'"{name}" is of type {type(value).__name__}, not a tensor: is the average under '
                "another --key?"
            )
        if arrays.is_sparse(value):
            raise _refused(f'"{name}" is sparse ({value.layout}); expected a dense tensor')
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() > 0 and place in seen:
            continue
        seen.add(place)
        tensors[name] = value
    if not tensors:
        raise _refused("no tensors")
    return tensors


def _refused(problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"state: {problem}")


def convert(
    source: pathlib.Path,
    target: pathlib.Path,
    *,
    key: str = "",
    names: pathlib.Path | None = None,
) -> list[tuple[pathlib.Path, Average]]:
    """Writes the averages in `source`; returns each file with its average. See the command."""
    import torch

    try:
        state = torch.load(source, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise InvalidArgumentError(f"{source}: not a file of torch.save: {error}") from None
    for part in key.split(".") if key else ():
        if not isinstance(state, Mapping) or part not in state:
            raise _refused(f'there is no key "{part}"')
        state = state[part]
    if not isinstance(state, Mapping):
        raise _refused(f"a {type(state).__name__}, not a dict")
    averages = averages_of(state, names=None if names is None else _names_from(names, state))
    written = []
    for index, average in enumerate(averages):
        path = target
        if len(averages) > 1:
            path = target.with_name(f"{target.stem}.{index}{target.suffix}")
        metadata = {"format": "pt", "source": average.source, "source_step": average.step}
        safetensors.write(safetensors.replaceable(path), average.tensors, metadata)
        written.append((path, average))
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m ema_client.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="FROM")
    parser.add_argument("target", metavar="TO.safetensors")
    parser.add_argument("--key", default="", help="where in FROM the state is, such as ema")
    parser.add_argument("--names", help="of a diffusers state's tensors")
    options = parser.parse_args(arguments)
    try:
        written = convert(
            path_from("FROM", options.source),
            path_from("TO.safetensors", options.target),
            key=options.key,
            names=None if options.names is None else path_from("--names", options.names),
        )
    except (EmaError, OSError) as error:
        sys.stderr.write(f"convert: {error}\n")
        return 1
    for path, average in written:
        step = f", step {average.step}" if average.step else ""
        sys.stdout.write(f"{path}: {len(average.tensors)} tensors of {average.source}{step}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
