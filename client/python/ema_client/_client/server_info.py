# SPDX-License-Identifier: Apache-2.0
"""A server's description of itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class ServerLimit:
    """A limit on the number of some resource.

    Attributes:
        in_use: the present number; None: it is not counted for the whole server.
        limit: the largest number; 0: unlimited.
    """

    in_use: int | None
    limit: int


@dataclasses.dataclass(frozen=True)
class ServerInfo:
    """A server's version, device, memory and limits, and whether it serves.

    Attributes:
        version: of the program, such as "0.1.0".
        device: the device that holds the averages: "cpu", or the name of a GPU.
        incarnation: number of this life of the server; another one after each start.
        start_time: seconds since 1970, by the server's clock.
        not_serving: why health checks say NOT_SERVING; empty: they say SERVING.
        memory_budget_bytes: memory for models.
        memory_reserved_bytes: the part of it that is reserved for models.
        memory_used_bytes: the part of it that is in use.
        limits: by name, such as "models" or "pull_streams".
    """

    version: str
    device: str
    incarnation: int
    start_time: float
    not_serving: str
    memory_budget_bytes: int
    memory_reserved_bytes: int
    memory_used_bytes: int
    limits: Mapping[str, ServerLimit] = dataclasses.field(hash=False)

    @property
    def is_serving(self) -> bool:
        return not self.not_serving


def server_info_from(fields: Mapping[str, Any]) -> ServerInfo:
    """Converts the extension module's result."""
    limits = {name: ServerLimit(*numbers) for name, numbers in fields["limits"].items()}
    return ServerInfo(**{**fields, "limits": limits})
