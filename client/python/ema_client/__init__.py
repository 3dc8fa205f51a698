# SPDX-License-Identifier: Apache-2.0
"""EMA Server's client: trainers push their weights, evaluators pull the averages.

In a training loop, on every rank:

    >>> ema = ema_client.attach(model, optimizer, "ema://host:50051/digits", half_life="200ba")
    >>> ...
    >>> ema.close()

Anywhere else:

    >>> weights = ema_client.pull("ema://host:50051/digits", track="ema")
    >>> for _ in ema_client.watch("ema://host:50051/digits"):
    ...     with ema_client.averaged(model, "ema://host:50051/digits") as version:
    ...         print(version.step, evaluate(model))

In a framework's training: `ema_client.lightning`, `ema_client.transformers`, `ema_client.diffusers`,
`ema_client.composer`. Without a server, with the same numbers: `LocalEMA` and `compute_ema`. One level lower,
for anything that has named arrays (PyTorch, NumPy, JAX): `Client`.

A push, module by module: `_attach` checks and has the ranks agree; `_joining` makes the model and opens the
run; `_attachment` hooks the optimizer; `_pushing` counts its steps and pushes those that are due, with what
`_torch_model` finds in the module and `_guard` copies or watches; `_run` hands that to the extension module
`_ema`; `_away` joins again when the server was away. A pull: for `_averaged` and `_load`, `_reading` matches
the tensors of a module with the server's (`_pieces`: what of them is on this rank); `_evaluator_calls` asks
for them, by what `_pull_arguments` has checked; `_arrays` makes tensors of the bytes, or `_out` writes them.
"""

from ema_client._attach import attach
from ema_client._attachment import Attachment
from ema_client._averaged import averaged
from ema_client._client import Client
from ema_client._errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    EmaError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from ema_client._load import Loaded, load_into
from ema_client._local import LocalEMA, compute_ema
from ema_client._read import pull, watch
from ema_client._run import PendingPush, Run
from ema_client._server_info import ServerInfo, ServerLimit
from ema_client._track import Track
from ema_client._types import (
    Checkpoint,
    CheckpointInfo,
    Label,
    ListedVersion,
    MetricResult,
    ModelInfo,
    PushStats,
    ResumePoint,
    Shard,
    Stats,
    Synthesis,
    SynthesisSource,
    TensorSpec,
    TrackStatistics,
    TrackVersion,
    Tls,
    TrainingTime,
    Version,
    Weights,
)

__version__ = "0.1.0"

__all__ = [
    "AbortedError",
    "AlreadyExistsError",
    "Attachment",
    "CancelledError",
    "Checkpoint",
    "CheckpointInfo",
    "Client",
    "DataLossError",
    "DeadlineExceededError",
    "EmaError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "Label",
    "ListedVersion",
    "Loaded",
    "LocalEMA",
    "MetricResult",
    "ModelInfo",
    "NotFoundError",
    "OutOfRangeError",
    "PendingPush",
    "PermissionDeniedError",
    "PushStats",
    "ResourceExhaustedError",
    "ResumePoint",
    "Run",
    "ServerInfo",
    "ServerLimit",
    "Shard",
    "Stats",
    "Synthesis",
    "SynthesisSource",
    "TensorSpec",
    "Track",
    "TrackStatistics",
    "TrackVersion",
    "Tls",
    "TrainingTime",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "Version",
    "Weights",
    "attach",
    "averaged",
    "compute_ema",
    "load_into",
    "pull",
    "watch",
]
