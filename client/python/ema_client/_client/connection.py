# SPDX-License-Identifier: Apache-2.0
"""What the functions that are methods of `Client` need of it."""

from __future__ import annotations

from typing import Protocol

from ema_client import _ema


class Connection(Protocol):
    """A `Client`, as the modules know it that it imports.

    Attributes:
        _client: the connection.
        _timeout_s: seconds for calls that move no weights.
        _transfer_timeout_s: seconds for calls that move weights, or wait for the server's disk.
    """

    _client: _ema.Client
    _timeout_s: float
    _transfer_timeout_s: float

    def _timeout(self, timeout_s: float | None, *, is_transfer: bool = False) -> float:
        """The timeout of a call, or the client's. InvalidArgumentError: not a timeout."""
