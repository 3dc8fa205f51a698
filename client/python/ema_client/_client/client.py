# SPDX-License-Identifier: Apache-2.0
"""The connection to a server."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, cast

from ema_client import _ema
from ema_client._client import checkpoint_calls, model_calls, pull_calls, run, version_calls
from ema_client._client.mode import check_server
from ema_client._client.timeouts import CALL_TIMEOUT_S, TRANSFER_TIMEOUT_S, check_timeout
from ema_client._client.types import Tls
from ema_client._client.url import check_is_no_url
from ema_client._errors import EmaError, UnauthenticatedError, UnavailableError
from ema_client._argument_checks import check_text


class _Explained:
    """The extension module's client, whose errors say what this client knows about their cause."""

    def __init__(self, target: _ema.Client, empty_variables: list[str]) -> None:
        self._target = target
        self._empty_variables = empty_variables

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._call, getattr(self._target, name))

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except EmaError as error:
            model_calls.add_model_names(self._target, error, args)
            if self._empty_variables and isinstance(
                error, (UnauthenticatedError, UnavailableError)
            ):
                names = ", ".join(self._empty_variables)
                text = f"{error.args[0]}; set, but empty, and so not used: {names}"
                error.args = (text, *error.args[1:])
            raise


class Client:
    """A connection to a server, or to a group of servers. Thread-safe. Connects at the first call. Not for
    use in a forked child.

    All calls raise a subclass of EmaError; TypeError, where an argument has a wrong type; and, while they
    wait, KeyboardInterrupt. Without a server (EMA_MODE is "local" or "disabled") there is no client:
    FailedPreconditionError.

    Args:
        address: "host:port", "emas://host:port" over TLS, "unix:/path". Without a port: 50051. Several
            servers of one group: "ema://host:port,host:port"; the first that can be reached is used.
        timeout_s: seconds for every call without its own. None: 600 for calls that move weights or wait for
            the server's disk, 60 for others.
        same_host_lane: push and pull through shared memory if the server is on this host, runs as the same
            user and offers it. Otherwise through gRPC.
        max_connections: the most connections, or lanes in shared memory, that one push may use; 0: half of
            the machine's processors, at most 8. A run starts with one, and keeps more if they make its large
            pushes faster.
        tls: PEM files for an `emas://` address; None: those that the environment names, see `Tls`.
        token: a bearer token, if the server requires one. It is sent as plain text: over a network, use TLS.
            "": the value of EMA_TOKEN, unless a file is named.
        token_file: a file with the token, read for each call. "": the file that EMA_TOKEN_FILE names,
            unless a token is given.

    Example:
        >>> with ema_client.Client("host:50051") as client:
        ...     client.create_model("m", weights, tracks={"ema": "200ba", "raw": "copy"})
        ...     with client.open_run("m") as run:
        ...         version = run.push(step=10, weights=weights)
        ...     average = client.pull("m", track="ema", version=version.number)
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float | None = None,
        same_host_lane: bool = True,
        max_connections: int = 0,
        tls: Tls | None = None,
        token: str = "",
        token_file: str = "",
    ) -> None:
        check_server(f'Client("{address}")')
        if timeout_s is not None:
            check_timeout("timeout_s", timeout_s)
        self._timeout_s = timeout_s or CALL_TIMEOUT_S
        self._transfer_timeout_s = timeout_s or TRANSFER_TIMEOUT_S
        empty_variables = []
        if not token and not token_file:
            empty_variables += _empty_variables("EMA_TOKEN_FILE", "EMA_TOKEN")
            token_file = os.environ.get("EMA_TOKEN_FILE", "")
            token = "" if token_file else os.environ.get("EMA_TOKEN", "")
        if tls is None and str(address).startswith("emas://"):
            empty_variables += _empty_variables("EMA_TLS_CA", "EMA_TLS_CERT", "EMA_TLS_KEY")
        files = tls or Tls.from_environment()
        check_text("address", address)
        check_is_no_url(address)
        self._address = address
        self._raw = _ema.Client(
            address,
            self._timeout_s,
            same_host_lane,
            max_connections,
            (
                os.fspath(files.ca_file),
                os.fspath(files.certificate_file),
                os.fspath(files.key_file),
            ),
            token,
            token_file,
        )
        self._client = cast(_ema.Client, _Explained(self._raw, empty_variables))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection, as soon as its last run is closed."""
        self._client.close()

    def _timeout(self, timeout_s: float | None, *, is_transfer: bool = False) -> float:
        """The timeout of a call, or the client's. InvalidArgumentError: not a timeout."""
        if timeout_s is None:
            return self._transfer_timeout_s if is_transfer else self._timeout_s
        check_timeout("timeout_s", timeout_s)
        return timeout_s

    # The calls. Each is a function that takes the connection, in a module for its subject.

    server_info = model_calls.server_info
    create_model = model_calls.create_model
    import_weights = model_calls.import_weights
    update_model = model_calls.update_model
    model = model_calls.model
    models = model_calls.models
    delete_model = model_calls.delete_model
    attach_files = model_calls.attach_files
    attached_files = model_calls.attached_files
    remove_attached_file = model_calls.remove_attached_file

    open_run = run.open_run
    _open_run = run.join_run

    versions = version_calls.versions
    watch = version_calls.watch
    wait_for = version_calls.wait_for
    statistics = version_calls.statistics
    synthesize = version_calls.synthesize

    pull = pull_calls.pull
    refresh = pull_calls.refresh
    pull_stacked = pull_calls.pull_stacked
    save = pull_calls.save

    create_checkpoint = checkpoint_calls.create_checkpoint
    checkpoint = checkpoint_calls.checkpoint
    checkpoints = checkpoint_calls.checkpoints
    delete_checkpoint = checkpoint_calls.delete_checkpoint
    labels = checkpoint_calls.labels
    set_label = checkpoint_calls.set_label
    remove_label = checkpoint_calls.remove_label
    report_metric = checkpoint_calls.report_metric
    restore = checkpoint_calls.restore


def _empty_variables(*names: str) -> list[str]:
    """Those of the environment's variables that are set to nothing."""
    return [name for name in names if os.environ.get(name) == ""]
