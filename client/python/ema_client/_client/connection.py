# SPDX-License-Identifier: Apache-2.0
"""The interface of `Client` for the functions that are its methods."""

from __future__ import annotations

from typing import Protocol

from ema_client import _ema


class Connection(Protocol):
    """The part of `Client` that its methods' modules use: they cannot import `Client`, which
    imports them.

    Attributes:
        _client: the extension module's client, with errors that say more.
        _raw: the extension module's client itself.
        _timeout_s: seconds for calls that move no weights.
        _transfer_timeout_s: seconds for calls that move weights, or wait for the server's disk.
    """

    _client: _ema.Client
    _raw: _ema.Client
    _timeout_s: float
    _transfer_timeout_s: float

    def _timeout(self, timeout_s: float | None, *, is_transfer: bool = False) -> float:
        """The timeout of a call, or the client's. InvalidArgumentError: not a timeout."""
