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

Private folders, each of which imports only what is before it: `_tracks` (how a track averages), `_client` (what
talks to a server, for anything that has named arrays), `_model` (what a torch.nn.Module and its optimizers
are), `_trainer` (`attach`), `_evaluator` (`averaged`, `load_into`). All may import `_errors`, `_given` and the
extension module, `_ema`; `_local` (`LocalEMA`) and `_callbacks`, for the frameworks, import from all.

A push: `_trainer/attach` checks and has the ranks agree; `joining` makes the model and opens the run;
`attachment` hooks the optimizer; `pusher` tells the engine in `_ema` of each step, and reads the weights when the
engine asks for them: with what `_model/torch_model` finds in the module and `guard` copies or watches. The
engine decides which steps are pushed, and rejoins the run after an outage. A pull: for `_evaluator/averaged` and `load`, `reading` matches the
tensors of a module with the server's (`_client/pieces`: what of them is on this rank);
`_client/evaluator_calls` asks for them, by what `pull_arguments` has checked; `arrays` makes tensors of the
bytes, or `out` writes them.
"""

from ema_client._client.client import Client
from ema_client._client.read import pull, watch
from ema_client._client.run import PendingPush, Run
from ema_client._client.server_info import ServerInfo, ServerLimit
from ema_client._client.types import (
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
from ema_client._local import LocalEMA, compute_ema
from ema_client._tracks.track import Track
from ema_client._trainer.attach import attach
from ema_client._trainer.attachment import Attachment

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
