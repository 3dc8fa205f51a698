# SPDX-License-Identifier: Apache-2.0
"""What a server says of itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class ServerLimit:
    """How much of something there may be.

    Attributes:
        in_use: how much there is; None: it is not counted for the whole server.
        limit: 0: any number.
    """

    in_use: int | None
    limit: int


@dataclasses.dataclass(frozen=True)
class ServerInfo:
    """How a server stands.

    Attributes:
        version: of its program, such as "0.1.0".
        device: where the averages are: "cpu", or the name of a GPU.
        incarnation: of this life of the server; another one after each start.
        start_time: seconds since 1970, by the server's clock.
        not_serving: why health checks say NOT_SERVING; empty: they say SERVING.
        memory_budget_bytes: what there is for models.
        memory_reserved_bytes: what of it is promised to them.
        memory_used_bytes: what of it they take now.
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
    """From what the extension module gives."""
    limits = {name: ServerLimit(*numbers) for name, numbers in fields["limits"].items()}
    return ServerInfo(**{**fields, "limits": limits})
