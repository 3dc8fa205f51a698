# SPDX-License-Identifier: Apache-2.0
"""`ema://host:port/model`, `emas://` over TLS, `ema+unix:///path/of/socket/model`."""

from __future__ import annotations

import re

from ema_client._errors import InvalidArgumentError


def split_url(url: str) -> tuple[str, str]:
    """Splits `ema://host:port/model` into the address of a `Client` and the model.

    In `ema+unix:///run/ema.sock/model`, for a unix socket, the last part is the model.
    """
    text = url if isinstance(url, str) else ""
    if match := re.fullmatch(r"ema\+unix://(/\S+)/([^/\s]+)", text):
        return f"unix:{match[1]}", match[2]
    match = re.fullmatch(r"(emas?://[^/\s]+)/([^/\s]+)", text)
    if match is None:
        raise InvalidArgumentError(
            f'url "{url}": must be like ema://host:50051/model, emas://host:50051/model or '
            "ema+unix:///run/ema.sock/model"
        )
    return match[1], match[2]
