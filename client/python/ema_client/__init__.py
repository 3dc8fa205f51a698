# SPDX-License-Identifier: Apache-2.0
"""EMA Server's client: trainers push their weights, evaluators pull the averages.

In a training loop, on every rank:

    >>> ema = ema_client.attach(model, optimizer, "ema://host:50051/digits", half_life="200ba")
    >>> ...
    >>> ema.close()

Anywhere else:

    >>> weights = ema_client.pull("ema://host:50051/digits", track="ema")
    >>> with ema_client.averaged(model, "ema://host:50051/digits") as version:
    ...     print(version.step, evaluate(model))

For training frameworks: `ema_client.lightning`, `ema_client.transformers`, `ema_client.diffusers`,
`ema_client.composer`, `ema_client.megatron`. `LocalEMA` and `compute_ema` compute the same numbers
without a server. `Client` is one level lower, for anything that has named arrays (PyTorch, NumPy,
JAX).

The private folders are layers: `_tracks` (schedules and presets), `_client` (calls of a server, for
named arrays), `_model` (the tensors and optimizers of a torch.nn.Module), `_trainer` (`attach`),
`_evaluator` (`averaged`, `load_into`). Each imports only those before it, with two exceptions:
`_client/pull_arguments` imports `_model`, to read a module, and `_trainer/attach` imports
`_without_server` (`attach` without a server). All may import `_errors`, `_argument_checks` and the
extension module `_ema`. `_local` (`LocalEMA`), `_callbacks` (for the frameworks) and
`_without_server` may import all folders.

The path of a push: `_trainer/attach` checks the arguments on all ranks; `joining` creates the model
and opens the run; `attachment` hooks the optimizer; `pusher` reports each step to the engine in
`_ema`. The engine decides which steps are pushed, and rejoins the run after an outage. For a step
that is pushed, it asks `pusher` for the weights: `_model/torch_model` lists the module's tensors,
and `guard` copies them or detects writes to them. The path of a pull: for `_evaluator/averaged` and
`load`, `reading` matches the module's tensors with the server's, and `_client/pieces` finds the
parts of them that this rank holds; `_client/pull_calls` requests them, with arguments that
`pull_arguments` has checked; `arrays` turns the bytes into tensors, or `out` writes them into given
ones.
"""

from ema_client._client.client import Client
from ema_client._client.read import pull, watch
from ema_client._client.run import PendingPush, Run
from ema_client._client.training_time import TrainingTime
from ema_client._client.types import (
    Checkpoint,
    CheckpointInfo,
    Label,
    ListedVersion,
    MetricResult,
    ModelInfo,
    PushStats,
    ResumePoint,
    ServerInfo,
    ServerLimit,
    Shard,
    Statistics,
    Stats,
    Synthesis,
    SynthesisSource,
    TensorSpec,
    TrackStatistics,
    TrackVersion,
    Tls,
    Version,
    Weights,
)
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
from ema_client._evaluator.averaged import averaged
from ema_client._evaluator.load import Loaded, load_into
from ema_client._compute_ema import compute_ema
from ema_client._local import LocalEMA
from ema_client._logging import add_last_resort
from ema_client._tracks.track import Track
from ema_client._trainer.attach import attach
from ema_client._trainer.attachment import Attachment

__version__ = "0.1.0"

add_last_resort()

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
    "Statistics",
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
